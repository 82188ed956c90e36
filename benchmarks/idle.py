"""What mingle costs while nothing happens: a rank that waits for others, and the threads of a job that trains."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from tests.lab import Host, Lab, report

import mingle
from benchmarks import capacity
from benchmarks.results import Comparison, Goal
from benchmarks.samples import median

SETTLE_SECONDS = 11.0
"""What a rank does in its first seconds is not counted: more questions, the end of its UDP sockets after GO, and the
closer watch for the process group."""
SECONDS = 30.0
QUICK_SECONDS = 10.0
MEMBERS = 3
MANY = 1024
TIMEOUT = 300.0

TEXT = """\
CPU of mingle's thread in a minute in which nothing happens. Rank 0 with 1,024 members has no process group, so it
looks for one twice a second."""


def run(rounds: int) -> Comparison:
    """Measure."""
    seconds = QUICK_SECONDS if rounds < 10 else SECONDS
    samples: dict[str, list[float]] = {}
    datagrams: list[float] = []
    for _ in range(min(2, rounds)):
        with Lab() as lab:
            network = lab.network()
            hosts = [lab.host(network) for _ in range(MEMBERS + 2)]
            lonely = hosts[0].start(_wait, 1, seconds)
            hosting = hosts[1].start(_wait, 0, seconds)
            trains = [host.start(_train, rank, seconds) for rank, host in enumerate(hosts[1:])]
            ends = [each.wait_for("done", TIMEOUT) for each in (lonely, hosting, trains[1], trains[0])]
            datagrams.append(float(ends[0]["datagrams"]))
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
        goals=(
            *(Goal(name, median(samples[name]), limit, "ms a minute") for name, limit in goals.items()),
            Goal("datagrams of a rank that waits for rank 0", median(datagrams), 30, "a minute"),
        ),
        extra={"a rank that waits for rank 0": {"datagrams a minute": median(datagrams)}},
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
    job = mingle.init("idle", backend="gloo", rank=rank, world_size=MEMBERS + 1, discovery_timeout=TIMEOUT)
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
    return next(each for each in threading.enumerate() if each.name == "mingle-rank")


def _report_cpu(thread: threading.Thread, seconds: float) -> None:
    """Report the thread's CPU in milliseconds a minute."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before, sent = time.clock_gettime(clock), _datagrams_sent()
    threading.Event().wait(seconds)
    cpu, datagrams = time.clock_gettime(clock) - before, _datagrams_sent() - sent
    report("done", cpu=cpu * 60e3 / seconds, datagrams=datagrams * 60 / seconds)


def _datagrams_sent() -> int:
    """Return how many UDP packets this host has sent, by IPv4 and IPv6, but for those between its own processes."""
    heading, values = (
        line.split() for line in Path("/proc/net/snmp").read_text("ascii").splitlines() if line.startswith("Udp:")
    )
    six = dict(line.split() for line in Path("/proc/net/snmp6").read_text("ascii").splitlines())
    return int(values[heading.index("OutDatagrams")]) + int(six["Udp6OutDatagrams"])
