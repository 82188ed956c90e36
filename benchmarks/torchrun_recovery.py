"""torchrun: until all that are left train again, by fault, with mingle and with stock c10d."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.lab import Host, Lab
from tests.lab.process import Process

from benchmarks.hosts import name_each_other
from benchmarks.results import Comparison
from benchmarks.samples import alternate
from benchmarks.torchrun import SCRIPT, STOCK_PORT

_STORE_AT = re.compile(r"the agents' store is at (\S+):\d+,")
START_SECONDS = 120.0
PATIENCE_SECONDS = 60.0
"""How long survivors may take; who has not trained by then is counted with this time."""

MINGLE, C10D, C10D_OWN_STORE = "mingle", "c10d", "c10d, own store"
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ENVIRONMENTS = {MINGLE: {"TORCH_LOGS": "mingle"}, C10D: {}, C10D_OWN_STORE: {VARIABLE: "1"}}
"""By contender what its torchrun finds; mingle's log tells where the store is."""

TEXT = f"""\
3 hosts with `--nnodes=2:3`, or 5 with `2:5`, one worker each, `--max-restarts=3`, otherwise torchrun's defaults; from
the fault until all that are left have made a step again, for {PATIENCE_SECONDS:.0f} s at most. The worker that crashes
has rank 0. "The store" is that of the agents; with c10d it is on the node of `--rdzv-endpoint`. "Killed": every process
of the node gets SIGKILL, and its kernel closes the connections. "Vanishes": the node is cut off from the network, then
killed. "Own store": the workers do not use the agents' store, by `{VARIABLE}=1`, which mingle sets."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes five minutes, so there are few."""
    with tempfile.TemporaryDirectory() as directory:
        rows = {
            f"{name}, {what}": partial(_once, Path(directory), name, size, fault)
            for what, (size, fault, names) in FAULTS.items()
            for name in names
        }
        samples = alternate(max(1, rounds // 4), rows)
    return Comparison(name="torchrun_recovery", title="torchrun, training again", text=TEXT, unit="s", samples=samples)


def _once(directory: Path, name: str, size: int, fault: Callable[[Run], float], round_: int) -> float:
    with Lab() as lab:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(size)]
        name_each_other(hosts)
        return fault(Run(name, hosts, directory / f"{name}-{fault.__name__}-{round_}"))


class Run:
    """One job: the line that each host runs, and what its workers have said.

    Args:
        name: the contender, one of `ENVIRONMENTS`.
        hosts: MAX hosts.
        stop: the file that ends the training.
    """

    def __init__(self, name: str, hosts: Sequence[Host], stop: Path) -> None:
        self.name, self.hosts, self.stop = name, hosts, stop
        self.processes: dict[Host, Process] = {}

    def start(self, *script: str) -> None:
        """Start the same line on every host."""
        for host in self.hosts:
            self.start_on(host, *script)

    def start_on(self, host: Host, *script: str) -> None:
        """Start the line on a host."""
        rendezvous = ["--rdzv-backend=mingle"]
        if self.name != MINGLE:
            endpoint = f"{self.hosts[0].address()}:{STOCK_PORT}"
            rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        line = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--rdzv-id=bench"]
        line += [f"--nnodes=2:{len(self.hosts)}", "--nproc-per-node=1", "--max-restarts=3"]
        command = [*line, str(SCRIPT), f"--until={self.stop}", *script]
        self.processes[host] = host.run(command, env=ENVIRONMENTS[self.name])

    def store_host(self) -> Host:
        """Return the host of the agents' store: with c10d the first one, with mingle the one that was elected."""
        if self.name != MINGLE:
            return self.hosts[0]
        (where,) = {_STORE_AT.findall(process.stderr)[-1] for process in self.processes.values()}
        return next(host for host in self.hosts if host.address() == where)

    def said(self, host: Host, event: str = "step") -> list[dict[str, Any]]:
        """Return what the workers of a host have said."""
        lines = (text for text in self.processes[host].stdout.splitlines() if text.startswith("{") and text[-1:] == "}")
        return [each for each in map(json.loads, lines) if each["event"] == event]

    def train(self, hosts: Sequence[Host], since: float, seconds: float) -> float | None:
        """Return when the last of these hosts made the first step of workers started since, or None if none did."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            firsts = [self._first_step(host, since) for host in hosts]
            if None not in firsts:
                return max(float(first) for first in firsts if first is not None)
            time.sleep(0.05)  # files give no notice
        return None

    def together(self, hosts: Sequence[Host], since: float, seconds: float) -> float | None:
        """Return when the last of these hosts made its first step with exactly these, or None if one made none."""
        names, deadline = {host.name for host in hosts}, time.monotonic() + seconds
        while time.monotonic() < deadline:
            steps = [[each for each in self.said(host) if set(each["hosts"]) == names] for host in hosts]
            firsts = [next((float(each["at"]) for each in every if each["at"] > since), None) for every in steps]
            if None not in firsts:
                return max(first for first in firsts if first is not None)
            time.sleep(0.05)  # files give no notice
        return None

    def _first_step(self, host: Host, since: float) -> float | None:
        started = [float(each["at"]) for each in self.said(host, "started") if each["at"] > since]
        if not started:
            return None
        return next((float(each["at"]) for each in self.said(host) if each["at"] > started[-1]), None)


def begin(run: Run, *script: str) -> None:
    """Start the line, and wait until all hosts train."""
    run.start(*script)
    if run.train(run.hosts, 0.0, START_SECONDS) is None:
        raise RuntimeError(f"{run.name} did not start to train")


def _crash(run: Run) -> float:
    begin(run, "--crash=1")
    steps = [step for host in run.hosts for step in run.said(host)]
    crashed = float(next(step["at"] for step in steps if step["rank"] == 0))
    again = run.train(run.hosts, crashed, PATIENCE_SECONDS)
    return PATIENCE_SECONDS if again is None else again - crashed


def _lose(run: Run, *lost: Host, cut: bool = False) -> float:
    since = time.monotonic()
    for host in lost:
        if cut:
            host.cut()
        host.kill()
    return _until(run, _without(run, *lost), since)


def _until(run: Run, hosts: Sequence[Host], since: float) -> float:
    again = run.together(hosts, since, PATIENCE_SECONDS)
    return PATIENCE_SECONDS if again is None else again - since


def _without(run: Run, *lost: Host) -> list[Host]:
    return [host for host in run.hosts if host not in lost]


def _store_killed(run: Run) -> float:
    begin(run)
    return _lose(run, run.store_host())


def _store_vanishes(run: Run) -> float:
    begin(run)
    return _lose(run, run.store_host(), cut=True)


def _other_killed(run: Run) -> float:
    begin(run)
    return _lose(run, _without(run, run.store_host())[0])


def _two_killed(run: Run) -> float:
    begin(run)
    store = run.store_host()
    return _lose(run, store, _without(run, store)[0])


def _started_again(run: Run) -> float:
    begin(run)
    lost = _without(run, run.store_host())[0]
    _lose(run, lost)
    since = time.monotonic()
    run.start_on(lost)
    return _until(run, run.hosts, since)


FAULTS: dict[str, tuple[int, Callable[[Run], float], tuple[str, ...]]] = {
    "a worker crashes": (3, _crash, (MINGLE, C10D, C10D_OWN_STORE)),
    "the store's node vanishes": (3, _store_vanishes, (MINGLE, C10D)),
    "another node is killed": (3, _other_killed, (MINGLE, C10D)),
    "the store's node is killed": (3, _store_killed, (MINGLE,)),
    "the store's node and another one of five are killed": (5, _two_killed, (MINGLE,)),
    "a killed node is started again": (3, _started_again, (MINGLE,)),
}
"""By name the number of hosts, what happens, and whom it is measured of: without the store's node c10d ends."""
