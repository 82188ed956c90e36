"""Rounds on hosts of the lab: who is started when, and what goes over the bridge meanwhile."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab import Event, Host, Lab, Network, Rank, report

from benchmarks import fresh, precedence

SETTLE_SECONDS = 0.5
"""How long ranks have waited before the one that they wait for is started."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the function of a rank is told."""

    job: str
    rank: int
    world_size: int
    address: str
    """Rank 0's, for the contenders that must be told."""
    option: str = ""
    """What a contender has variants of."""
    gate: Gate | None = None
    """Where a rank in a fresh interpreter waits for the moment to begin: nobody knows how long its imports take."""

    def wait(self) -> float:
        """Wait for the moment to begin, say so, and return it."""
        precedence.take()
        if self.gate is not None:
            opened = self.gate.come()
            report("waiting")
            os.read(opened, 1)
            os.close(opened)
            return time.monotonic()
        report("waiting")
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Gate:
    """Where processes wait for one moment, however long it took to start them: a named pipe that its writer closes."""

    path: Path

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Keep everybody waiting."""
        os.mkfifo(self.path)
        writer = os.open(self.path, os.O_RDWR)  # does not wait for a reader, as a mere writer would
        try:
            yield
        finally:
            os.close(writer)

    def come(self) -> int:
        """Go there, while it is closed; return the descriptor to wait at."""
        return os.open(self.path, os.O_RDONLY)


RankFunction = Callable[[Place], None]
"""Calls `Place.wait`, then reports ``done`` with ``started`` and ``at``, and ``cpu`` between them (seconds)."""


class Field:
    """A bridge and hosts on it, one rank on each.

    Args:
        lab: where they are.
        size: the number of hosts.
    """

    def __init__(self, lab: Lab, size: int) -> None:
        self.size = size
        self.network: Network = lab.network()
        self.hosts: list[Host] = [lab.host(self.network) for _ in range(size)]
        self._rounds = 0

    # --- rounds ----------------------------------------------------------------------------------------------------

    def last(self, function: RankFunction, *, option: str = "", timeout: float = 60.0) -> list[Event]:
        """Rank 0 is started last, the others wait; returns how each rank ended, in order of rank."""
        with self._round() as start:
            waiting = [start(function, rank, option=option) for rank in range(1, self.size)]
            _all(waiting, "waiting", timeout)
            time.sleep(SETTLE_SECONDS)
            return _all([start(function, 0, option=option), *waiting], "done", timeout)

    def together_fresh(self, function: RankFunction, *, option: str = "", timeout: float = 60.0) -> list[Event]:
        """All ranks begin at one moment, in fresh interpreters that have imported what they need."""
        with self._round() as start, tempfile.TemporaryDirectory() as directory:
            gate = Gate(Path(directory, "gate"))
            with gate.closed():
                ranks = [start(function, rank, option=option, gate=gate) for rank in range(self.size)]
                _all(ranks, "waiting", timeout)
                time.sleep(SETTLE_SECONDS)
            return _all(ranks, "done", timeout)

    def late(self, function: RankFunction, *, option: str = "", timeout: float = 60.0) -> Event:
        """Rank 0 and all but one wait; returns how the last one ended."""
        with self._round() as start:
            waiting = [start(function, rank, option=option) for rank in range(self.size - 1)]
            _all(waiting, "waiting", timeout)
            waiting[0].wait_for("hosting", timeout)
            time.sleep(SETTLE_SECONDS)
            return start(function, self.size - 1, option=option).wait_for("done", timeout)

    def everywhere(
        self, function: Callable[..., None], arguments: Callable[[Place, int], tuple[Any, ...]], timeout: float
    ) -> tuple[float, list[Event]]:
        """Run a function on each host that starts several ranks there, and kill what it started afterwards.

        It is given a `Gate` as well, reports ``ready`` once its ranks wait there, and ``done``. Returns the moment at
        which the gate was opened, on the monotonic clock, and how each host ended.
        """
        self._rounds += 1
        place = Place(f"bench {self._rounds}", 0, self.size, self.hosts[0].address())
        with tempfile.TemporaryDirectory() as directory:
            gate = Gate(Path(directory, "gate"))
            try:
                with gate.closed():
                    started = [
                        host.start(function, *arguments(place, index), gate) for index, host in enumerate(self.hosts)
                    ]
                    _all(started, "ready", timeout)
                    begin = time.monotonic()
                return begin, _all(started, "done", timeout)
            finally:
                for host in reversed(self.hosts):  # rank 0's host last: else all others would be busy with its loss
                    host.kill()

    @contextlib.contextmanager
    def _round(self) -> Iterator[Callable[..., Rank[None]]]:
        """Lend a function that starts ranks of a new job; they are killed at the end, whatever happened."""
        self._rounds += 1
        job, started = f"bench {self._rounds}", []

        def start(
            function: RankFunction,
            rank: int,
            *,
            option: str = "",
            gate: Gate | None = None,
        ) -> Rank[None]:
            place = Place(job, rank, self.size, self.hosts[0].address(), option, gate)
            host = self.hosts[rank]
            process = host.start(function, place) if gate is None else host.start(fresh.run, function, place)
            started.append(process)
            return process

        try:
            yield start
        finally:
            for process in started:
                if process.exit_code is None:
                    process.kill()
                process.close()

    # --- the wire --------------------------------------------------------------------------------------------------

    def count_udp(self) -> None:
        """Begin to count UDP packets where they enter the bridge, each once however many hosts it goes to."""
        self.network.namespace.nft(
            "add table bridge bench\ndelete table bridge bench\n"
            "table bridge bench {\ncounter datagrams { }\nchain count {\ntype filter hook prerouting priority 0\n"
            "meta l4proto udp counter name datagrams\n}\n}\n"
        )

    def counted_udp(self) -> int:
        """Return the packets since `count_udp`."""
        shown = json.loads(
            self.network.namespace.tool(["nft", "-j", "list", "counter", "bridge", "bench", "datagrams"])
        )
        counter: dict[str, Any] = next(each["counter"] for each in shown["nftables"] if "counter" in each)
        return int(counter["packets"])


def name_each_other(hosts: Sequence[Host]) -> None:
    """Let hosts resolve each other's names, as a name server would: c10d tells the others of rank 0 by its name."""
    lines = "".join(f"{host.address()} {host.name}\n" for host in hosts)
    for host in hosts:
        host.hosts_file.write_text(f"127.0.0.1 localhost\n{lines}", encoding="utf-8")


@contextlib.contextmanager
def field(size: int) -> Iterator[Field]:
    """Lend a field of so many hosts, which end with the block."""
    with Lab() as lab:
        yield Field(lab, size)


def _all(ranks: list[Rank[None]], event: str, timeout: float) -> list[Event]:
    return [rank.wait_for(event, timeout) for rank in ranks]


def until_all(ends: list[Event]) -> float:
    """Return the milliseconds from rank 0's start until the last rank was done."""
    return max(float(end["at"]) - float(ends[0]["started"]) for end in ends) * 1e3


def until_workers(ends: list[Event]) -> float:
    """Return the milliseconds from rank 0's start until the last of the others was done, however long rank 0 took."""
    return max(float(end["at"]) - float(ends[0]["started"]) for end in ends[1:]) * 1e3


def from_begin(ends: list[Event]) -> float:
    """Return the milliseconds from the first start until the last rank was done."""
    return (max(float(end["at"]) for end in ends) - min(float(end["started"]) for end in ends)) * 1e3


def alone(end: Event) -> float:
    """Return the milliseconds of one rank."""
    return float(end["at"] - end["started"]) * 1e3


def cpu(ends: list[Event]) -> float:
    """Return the milliseconds of CPU that all ranks have used between their start and their end."""
    used = math.fsum(end["cpu"] for end in ends)
    return used * 1e3
