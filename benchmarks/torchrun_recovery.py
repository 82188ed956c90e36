"""torchrun: until all train again, after a worker has crashed and after the machine with the store has died."""

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
from benchmarks.samples import alternate, ratio
from benchmarks.torchrun import SCRIPT, STOCK_PORT

_STORE_AT = re.compile(r"the agents' store is at (\S+):\d+,")
HOSTS = 3
START_SECONDS = 120.0
PATIENCE_SECONDS = 60.0
"""How long survivors may take; who has not trained by then is counted with this time."""

TEXT = f"""\
3 hosts with one worker each, `--nnodes=2:3 --max-restarts=3`, all else as torch has it, from the fault until all that
are left have made a step again; the waiting ended after {PATIENCE_SECONDS:.0f} s. With
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which mingle sets by itself, c10d's new workers fail in Gloo less often."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes minutes, so there are few."""
    with tempfile.TemporaryDirectory() as directory:
        samples = alternate(
            max(1, rounds // 7),
            {
                f"{name}, {what}": partial(_once, Path(directory), name, fault)
                for what, fault in (("a worker crashes", crash), ("the store's host dies", _host_death))
                for name in ("mingle", "c10d")
            },
        )
    against = ratio(samples["mingle, a worker crashes"], samples["c10d, a worker crashes"])
    return Comparison(
        name="torchrun_recovery",
        title="torchrun, training again",
        text=TEXT,
        unit="s",
        samples=samples,
        ratios={"c10d, a worker crashes": against},
    )


def _once(directory: Path, name: str, fault: Callable[[Run], float], round_: int) -> float:
    with Lab() as lab:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(HOSTS)]
        name_each_other(hosts)
        return fault(Run(name, hosts, directory / f"{name}-{fault.__name__}-{round_}"))


class Run:
    """One job: the line that each host runs, and what its workers have said.

    Args:
        name: "mingle" or "c10d".
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
        if self.name == "c10d":
            endpoint = f"{self.hosts[0].address()}:{STOCK_PORT}"
            rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        line = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--rdzv-id=bench"]
        line += [f"--nnodes=2:{len(self.hosts)}", "--nproc-per-node=1", "--max-restarts=3"]
        env = {"TORCH_LOGS": "mingle"} if self.name == "mingle" else {}
        self.processes[host] = host.run([*line, str(SCRIPT), f"--until={self.stop}", *script], env=env)

    def store_host(self) -> Host:
        """Return the host of the agents' store: with c10d the first one, with mingle the one that was elected."""
        if self.name == "c10d":
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


def crash(run: Run) -> float:
    """Let the worker of rank 0 crash."""
    begin(run, "--crash=1")
    steps = [step for host in run.hosts for step in run.said(host)]
    crashed = float(next(step["at"] for step in steps if step["rank"] == 0))
    again = run.train(run.hosts, crashed, PATIENCE_SECONDS)
    return PATIENCE_SECONDS if again is None else again - crashed


def _host_death(run: Run) -> float:
    begin(run)
    lost = run.store_host()
    lost.cut()
    died = time.monotonic()
    lost.kill()
    again = run.train([host for host in run.hosts if host is not lost], died, PATIENCE_SECONDS)
    return PATIENCE_SECONDS if again is None else again - died
