"""Rank 0 comes last: from its start of ``discover`` until every rank has GO.

    python -m benchmarks.last_rank [--hosts 8] [--rounds 20]

Each rank is a process in a network namespace of its own, torch is imported, the others are waiting. All of them read
the same monotonic clock. A second table says where rank 0's time goes.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import threading
import time
from collections.abc import Sequence

from tests.lab import Lab, Rank, report

import mingle


class _Stamp(logging.Handler):
    """Reports each step of a rank with the time at which it was taken."""

    def emit(self, record: logging.LogRecord) -> None:
        report("step", text=record.getMessage().partition(": ")[2], at=time.monotonic())


def discover(job_id: str, rank: int, world_size: int, *, steps: bool) -> None:
    """Discover once and report when it began and when it ended."""
    logger = logging.getLogger("mingle")
    if steps:
        logger.setLevel(logging.DEBUG)
        logger.addHandler(_Stamp())
    report("waiting")
    started = time.monotonic()
    with mingle.discover(job_id, rank=rank, world_size=world_size, discovery_timeout=30):
        report("go", started=started, at=time.monotonic())
        # Nobody leaves before all have it: the end of one is no part of what is measured.
        threading.Event().wait(0.3)


def measure(hosts: int, rounds: int) -> tuple[list[float], dict[str, list[float]]]:
    """Return the seconds of each round, and rank 0's steps in them."""
    totals: list[float] = []
    steps: dict[str, list[float]] = {}
    with Lab() as lab:
        network = lab.network()
        machines = [lab.host(network) for _ in range(hosts)]
        for round_ in range(rounds):
            waiting: list[Rank[None]] = [
                machines[rank].start(discover, f"bench {round_}", rank, hosts, steps=False) for rank in range(1, hosts)
            ]
            for rank in waiting:
                rank.wait_for("waiting")
            time.sleep(1)  # let them wait, as ranks do that have been started by hand
            last = machines[0].start(discover, f"bench {round_}", 0, hosts, steps=True)
            ends = [rank.wait_for("go") for rank in (last, *waiting)]
            started = ends[0]["started"]
            totals.append(max(end["at"] for end in ends) - started)
            for rank in (last, *waiting):
                rank.wait()
            for event in last.events:
                if event.name == "step":
                    steps.setdefault(event["text"].split(",")[0], []).append(event["at"] - started)
    return totals, steps


def _row(name: str, seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    low, high = ordered[int(0.05 * len(ordered))], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{name:<40}{statistics.median(ordered) * 1e3:>10.1f}{low * 1e3:>10.1f}{high * 1e3:>10.1f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    totals, steps = measure(arguments.hosts, arguments.rounds)
    print(f"{arguments.hosts} hosts, {arguments.rounds} rounds, milliseconds")
    print(f"{'':<40}{'median':>10}{'5 %':>10}{'95 %':>10}")
    print(_row("rank 0's start until every rank has GO", totals))
    print("since rank 0's start, on rank 0:")
    for name, seconds in steps.items():
        print(_row(f"  last seen {name}" if name == "open" else f"  {name}", seconds))


if __name__ == "__main__":
    # Ranks are forked elsewhere and find their function by the module's name, which here would be "__main__".
    from benchmarks import last_rank  # noqa: PLW0406

    last_rank.main()
