"""What examples/ddp_train.py writes, read back."""

from __future__ import annotations

import re
from dataclasses import dataclass

MET = r"^rank (\d+) on (\w+) (?:found rank 0 at|is rank 0 of job '[^']+', met at) (\S+) in [\d.]+ s$"
"""The line of a rank that has met the others: its rank, its host name, and the address of rank 0's store."""


@dataclass(frozen=True)
class Roster:
    """Who was in a job, as rank 0 tells it.

    Attributes:
        hostnames: by rank.
        addresses: by rank.
        store: address and port that all ranks met at.
    """

    hostnames: tuple[str, ...]
    addresses: tuple[str, ...]
    store: str


def roster(log: str) -> Roster:
    """Read the roster of the one job in what all its ranks wrote.

    Raises:
        AssertionError: it is not that of one job whose ranks each told once of the same rank 0.
    """
    met = re.findall(MET, log, re.MULTILINE)
    members = re.findall(r"^  rank (\d+): (\w+) (\S+), node (\d+), local rank 0, pid \d+$", log, re.MULTILINE)
    places = [int(rank) for rank, *_ in members]
    assert places == list(range(len(members))), log
    assert [int(node) for *_, node in members] == places, log  # a container is a node
    hostnames = [hostname for _, hostname, *_ in members]
    assert sorted((int(rank), hostname) for rank, hostname, _ in met) == list(enumerate(hostnames)), log
    (store,) = {store for *_, store in met}
    return Roster(tuple(hostnames), tuple(address for _, _, address, _ in members), store)


def accuracy(log: str) -> float:
    """Read the accuracy on the test set."""
    (value,) = re.findall(r"^final test accuracy: (\d\.\d+)$", log, re.MULTILINE)
    return float(value)


def identical_ranks(log: str) -> int:
    """Read how many ranks ended with the same parameters."""
    (ranks,) = re.findall(r"^parameters identical on (\d+) ranks", log, re.MULTILINE)
    return int(ranks)
