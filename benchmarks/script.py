"""A script in fresh interpreters: from ``python train.py`` to its process group, beside one that knows the address."""

from __future__ import annotations

import json
import math
import sys
import time
from functools import partial

from tests.lab import Host, Lab

from benchmarks.hosts import name_each_other
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, ratio

HOSTS = 4
PORT = 29400
TIMEOUT = 120.0

SCRIPT = """
import json, threading, time
import torch
import torch.distributed as dist
{init}
print(json.dumps({{"at": time.monotonic()}}), flush=True)
threading.Event().wait()
"""
INIT = {
    "mingle": "import mingle\nmingle.init('bench-script-{round}', backend='gloo')",
    "known address": "dist.init_process_group('gloo')",
}

TEXT = """\
4 hosts start a script in fresh interpreters, with mingle or a known `MASTER_ADDR`. Measured from the start of the
commands until the last rank has its Gloo process group."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes ten seconds."""
    with Lab() as lab:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(HOSTS)]
        name_each_other(hosts)
        for name in INIT:  # warms the caches of files
            _once(hosts, name, -1)
        samples = alternate(math.ceil(rounds / 2), {name: partial(_once, hosts, name) for name in INIT})
    against = ratio(samples["mingle"], samples["known address"])
    return Comparison(
        name="script",
        title="A script's start",
        text=TEXT,
        unit="s",
        samples=samples,
        goals=(Goal("a script with mingle.init against a known address", against, 1.03, "×"),),
        ratios={"known address": against},
    )


def _once(hosts: list[Host], name: str, round_: int) -> float:
    started, clocks = run_script(
        hosts, SCRIPT.format(init=INIT[name].format(round=round_)), "at", told=name != "mingle"
    )
    return max(each["at"] for each in clocks) - started


def run_script(hosts: list[Host], script: str, last: str, *, told: bool) -> tuple[float, list[dict[str, float]]]:
    """Run a script on all hosts; return when it was started, and by rank the clocks that it prints as JSON.

    Args:
        hosts: one for each rank.
        script: its text.
        last: the name of the last clock.
        told: whether the ranks are told rank 0's address.
    """
    address = {"MASTER_ADDR": hosts[0].address(), "MASTER_PORT": str(PORT)} if told else {}
    started = time.monotonic()
    processes = [
        host.run(
            [sys.executable, "-c", script],
            env={"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MINGLE_PROGRESS": "off", **address},
        )
        for rank, host in enumerate(hosts)
    ]
    for process in processes:
        process.wait_for_output(f'"{last}"', TIMEOUT)
    clocks = [json.loads(line) for each in processes for line in each.stdout.splitlines() if line.startswith("{")]
    for host in reversed(hosts):
        host.kill()
    return started, clocks
