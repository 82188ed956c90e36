"""torchrun: from the command to the first training step, with mingle and with stock c10d that is told the endpoint."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.lab import Host, Lab

from benchmarks.hosts import name_each_other
from benchmarks.results import Comparison
from benchmarks.samples import alternate

HOSTS = 3
SCRIPT = Path(__file__).parents[1] / "tests" / "lab" / "training.py"
STOCK_PORT = 29400

TEXT = """\
3 hosts with one worker each start together in fresh interpreters; c10d is told the first host's address. Measured
until every worker has made a step; most of it is the import of torch, twice on each host."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes half a minute."""
    with Lab() as lab, tempfile.TemporaryDirectory() as directory:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(HOSTS)]
        name_each_other(hosts)
        stop = Path(directory, "stop")
        once = partial(_once, hosts, stop)
        once("mingle", -1)  # warms the caches of files
        samples = alternate(math.ceil(rounds / 2), {"mingle": partial(once, "mingle"), "c10d": partial(once, "c10d")})
    return Comparison(name="torchrun", title="torchrun's first step", text=TEXT, unit="s", samples=samples)


def _once(hosts: list[Host], stop: Path, name: str, round_: int) -> float:
    endpoint = f"{hosts[0].address()}:{STOCK_PORT + round_ + 1}"
    rendezvous = {
        "mingle": ["--rdzv-backend=mingle"],
        "c10d": [f"--rdzv-endpoint={endpoint}", "--rdzv-backend=c10d"],
    }[name]
    return _first_step(hosts, [*rendezvous, f"--rdzv-id=bench-{round_ + 1}"], stop)


def _first_step(hosts: Sequence[Host], rendezvous: Sequence[str], stop: Path) -> float:
    """Return the seconds from the start of the commands until every worker has made a step."""
    line = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nnodes={len(hosts)}"]
    line += ["--nproc-per-node=1", str(SCRIPT), f"--until={stop}"]
    started = time.monotonic()
    processes = [host.run(line, env={"MINGLE_PROGRESS": "off"}) for host in hosts]
    for process in processes:
        process.wait_for_output('"event": "step"', 120)
    stop.touch()
    for process in processes:
        if process.wait(120) != 0:
            raise RuntimeError(process.describe())
    stop.unlink()
    said = [json.loads(text) for each in processes for text in each.stdout.splitlines() if text.startswith("{")]
    steps = [each for each in said if each["event"] == "step"]
    return max(min(float(each["at"]) for each in steps if each["rank"] == rank) for rank in range(len(hosts))) - started
