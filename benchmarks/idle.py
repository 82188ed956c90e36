"""What mingle costs while nothing happens: a rank that waits for others, and the threads of a job that trains."""

from __future__ import annotations

import threading
import time
from functools import partial

from tests.lab import Host, Lab, report

import mingle
from benchmarks import capacity
from benchmarks.results import Comparison, Goal
from benchmarks.samples import median

SETTLE_SECONDS = 3.0
"""What a rank does in its first seconds is not counted: more questions, and the end of its UDP sockets after GO."""
SECONDS = 30.0
QUICK_SECONDS = 10.0
MEMBERS = 3
MANY = 1024
TIMEOUT = 300.0

TEXT = """\
CPU of one thread in a minute in which nothing happens, counted by the thread's own clock. A waiting rank looks for a
rank 0 that does not come; rank 0 waits for the last rank of its job; after GO a member and rank 0 keep a thread each
beside the training, rank 0 with 3 members and with 1,024."""


def run(rounds: int) -> Comparison:
    """Measures."""
    seconds = QUICK_SECONDS if rounds < 10 else SECONDS
    samples: dict[str, list[float]] = {}
    for _ in range(min(3, rounds)):
        with Lab() as lab:
            network = lab.network()
            hosts = [lab.host(network) for _ in range(MEMBERS + 2)]
            lonely = hosts[0].start(_wait, 1, seconds)
            hosting = hosts[1].start(_wait, 0, seconds)
            trains = [host.start(_train, rank, seconds) for rank, host in enumerate(hosts[1:])]
            ends = [each.wait_for("done", TIMEOUT) for each in (lonely, hosting, trains[1], trains[0])]
            names = ("a rank that waits for rank 0", "rank 0 that waits", "a member after GO", "rank 0 after GO")
            for name, end in zip(names, ends, strict=True):
                samples.setdefault(name, []).append(float(end["cpu"]))
            samples.setdefault(f"rank 0 after GO, {MANY} members", []).append(_many(hosts[:3], seconds))
    goals = {
        "a rank that waits for rank 0": 20,
        "a member after GO": 5,
        "rank 0 after GO": 5,
        f"rank 0 after GO, {MANY} members": 200,
    }
    return Comparison(
        name="idle",
        title="While nothing happens",
        text=TEXT,
        unit="ms of CPU a minute",
        samples=samples,
        goals=tuple(Goal(name, median(samples[name]), limit, "ms a minute") for name, limit in goals.items()),
    )


def _many(hosts: list[Host], seconds: float) -> float:
    first, *others = hosts
    crowds = [
        other.start(capacity.members, first.address(), range(1 + index, MANY + 1, 2), MANY)
        for index, other in enumerate(others)
    ]
    for each in crowds:
        each.wait_for("waiting", TIMEOUT)
    return float(first.start(_host_many, seconds).wait_for("done", TIMEOUT)["cpu"])


def _wait(rank: int, seconds: float) -> None:
    thread = threading.Thread(target=partial(_discover_alone, rank), daemon=True)
    thread.start()
    threading.Event().wait(SETTLE_SECONDS)
    _report_cpu(thread, seconds)


def _discover_alone(rank: int) -> None:
    mingle.discover(f"idle, rank {rank} alone", rank=rank, world_size=2, discovery_timeout=TIMEOUT)


def _train(rank: int, seconds: float) -> None:
    job = mingle.discover("idle", rank=rank, world_size=MEMBERS + 1, discovery_timeout=TIMEOUT)
    _report_cpu(_thread_of_mingle(), seconds)
    threading.Event().wait()
    del job


def _host_many(seconds: float) -> None:
    job = mingle.discover("capacity", rank=0, world_size=MANY + 1, discovery_timeout=TIMEOUT)
    _report_cpu(_thread_of_mingle(), seconds)
    threading.Event().wait()
    del job


def _thread_of_mingle() -> threading.Thread:
    threading.Event().wait(SETTLE_SECONDS)
    return next(each for each in threading.enumerate() if each.name in ("mingle-host", "mingle-member"))


def _report_cpu(thread: threading.Thread, seconds: float) -> None:
    """Report the thread's CPU in milliseconds a minute."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    threading.Event().wait(seconds)
    report("done", cpu=(time.clock_gettime(clock) - before) * 60e3 / seconds)
