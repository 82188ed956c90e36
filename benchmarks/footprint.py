"""What mingle costs beside the training: its import, its memory, a rank that waits, and the threads after GO."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

from tests.lab import Host, Lab, report

import mingle
from benchmarks import capacity, precedence, stats
from benchmarks.results import ROOT, Comparison
from benchmarks.samples import alternate

SETTLE_SECONDS = 11.0
"""What a rank does in its first seconds is not counted: more questions, the end of its UDP sockets after GO, and the
closer watch for the process group."""
SECONDS = 30.0
MEMBERS = 3
MANY = 1024
RANKS = 8
TIMEOUT = 300.0

MEMORY = "memory of a waiting rank, MiB"
EMPTY = "python -c pass, ms"
IMPORT = "import mingle, ms"
EVERYTHING = "import mingle, and all that init needs, ms"
HELP = "mingle-discover --help, ms"
FIRST = {0: "rank 0's first discover, ms of CPU", 1: "a member's first discover, ms of CPU"}
WAITS = "a rank that waits for rank 0, ms of CPU a minute"
SENDS = "a rank that waits for rank 0, datagrams a minute"
HOSTS_ALONE = "rank 0 that waits, ms of CPU a minute"
MEMBER_AFTER_GO = "a member after GO, ms of CPU a minute"
HOST_AFTER_GO = "rank 0 after GO, ms of CPU a minute"
MANY_AFTER_GO = f"rank 0 after GO, {MANY} members, ms of CPU a minute"
COMMANDS = {
    EMPTY: ["-c", "pass"],
    IMPORT: ["-c", "import mingle"],
    EVERYTHING: ["-c", "import mingle, mingle.distributed.rendezvous"],
    HELP: ["-m", "mingle", "--help"],
}
GROWTH = """
import threading, torch.distributed
def resident():
    status = open("/proc/self/status", encoding="utf-8").read()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024
before = resident()
timer = threading.Timer(2.0, lambda: print(resident() - before))
timer.start()
import mingle
try:
    mingle.discover("nobody", rank=1, world_size=2, discovery_timeout=2.5)
except mingle.DiscoveryTimeoutError:
    timer.join()
"""

TEXT = f"""\
Memory: the growth after `import torch`. Interpreters: from start to end; "all that init needs" leaves torch out. First
discover: of {RANKS} ranks that have imported torch and mingle, until GO. The others are one thread's CPU while nothing
happens; {MANY:,} members are state machines, without a process group and a mesh."""


def run(rounds: int) -> Comparison:
    """Measure."""
    samples = _interpreters(rounds)
    samples[MEMORY] = [_memory() for _ in range(max(3, rounds // 4))]
    for _ in range(max(2, rounds // 2)):
        for rank, figures in stats.run_job(ROOT, world_size=RANKS).items():
            samples.setdefault(FIRST[min(rank, 1)], []).append(figures[stats.CPU])
    for _ in range(min(2, rounds)):
        for name, value in _idle().items():
            samples.setdefault(name, []).append(value)
    return Comparison(name="footprint", title="Footprint", text=TEXT, unit="", samples=samples)


# --- interpreters ------------------------------------------------------------------------------------------------


def _interpreters(rounds: int) -> dict[str, list[float]]:
    for command in COMMANDS.values():  # the first of each writes the bytecode
        _seconds(command)
    return alternate(rounds, {name: partial(_seconds, words) for name, words in COMMANDS.items()})


def _seconds(words: list[str], _round: int = 0) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    started = time.monotonic()
    subprocess.run(
        [sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=True, preexec_fn=precedence.take
    )
    return (time.monotonic() - started) * 1e3


def _memory() -> float:
    with Lab() as lab:
        process = lab.host(lab.network()).run([sys.executable, "-c", GROWTH])
        if process.wait(120) != 0:
            raise RuntimeError(process.output)
        return float(process.stdout.split()[-1])


# --- while nothing happens ---------------------------------------------------------------------------------------


def _idle() -> dict[str, float]:
    """Return the CPU of each kind of rank, and the datagrams of one that waits, both for a minute."""
    with Lab() as lab:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(MEMBERS + 2)]
        lonely = hosts[0].start(_wait, 1)
        hosting = hosts[1].start(_wait, 0)
        trains = [host.start(_train, rank) for rank, host in enumerate(hosts[1:])]
        ends = [each.wait_for("done", TIMEOUT) for each in (lonely, hosting, trains[1], trains[0])]
        names = (WAITS, HOSTS_ALONE, MEMBER_AFTER_GO, HOST_AFTER_GO)
        used = {name: float(end["cpu"]) for name, end in zip(names, ends, strict=True)}
        return {**used, MANY_AFTER_GO: _many(hosts[:3]), SENDS: float(ends[0]["datagrams"])}


def _many(hosts: list[Host]) -> float:
    first, *others = hosts
    crowds = [
        other.start(capacity.members, first.address(), range(1 + index, MANY + 1, 2), MANY)
        for index, other in enumerate(others)
    ]
    for each in crowds:
        each.wait_for("waiting", TIMEOUT)
    return float(first.start(_host_many).wait_for("done", TIMEOUT)["cpu"])


def _wait(rank: int) -> None:
    thread = threading.Thread(target=partial(_discover_alone, rank), daemon=True)
    thread.start()
    threading.Event().wait(SETTLE_SECONDS)
    _report_cpu(thread)


def _discover_alone(rank: int) -> None:
    mingle.discover(f"idle, rank {rank} alone", rank=rank, world_size=2, discovery_timeout=TIMEOUT)


def _train(rank: int) -> None:
    job = mingle.init("idle", backend="gloo", rank=rank, world_size=MEMBERS + 1, discovery_timeout=TIMEOUT)
    _report_cpu(_thread_of_mingle())
    threading.Event().wait()
    del job


def _host_many() -> None:
    job = mingle.discover("capacity", rank=0, world_size=MANY + 1, discovery_timeout=TIMEOUT)
    _report_cpu(_thread_of_mingle())
    threading.Event().wait()
    del job


def _thread_of_mingle() -> threading.Thread:
    threading.Event().wait(SETTLE_SECONDS)
    return next(each for each in threading.enumerate() if each.name == "mingle-rank")


def _report_cpu(thread: threading.Thread) -> None:
    """Report the thread's CPU in milliseconds a minute."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before, sent = time.clock_gettime(clock), _datagrams_sent()
    threading.Event().wait(SECONDS)
    cpu, datagrams = time.clock_gettime(clock) - before, _datagrams_sent() - sent
    report("done", cpu=cpu * 60e3 / SECONDS, datagrams=datagrams * 60 / SECONDS)


def _datagrams_sent() -> int:
    """Return how many UDP packets this host has sent, by IPv4 and IPv6, but for those between its own processes."""
    heading, values = (
        line.split() for line in Path("/proc/net/snmp").read_text("ascii").splitlines() if line.startswith("Udp:")
    )
    six = dict(line.split() for line in Path("/proc/net/snmp6").read_text("ascii").splitlines())
    return int(values[heading.index("OutDatagrams")]) + int(six["Udp6OutDatagrams"])
