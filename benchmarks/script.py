"""A script in fresh interpreters: from ``python train.py`` to its process group, beside one that knows the address."""

from __future__ import annotations

import json
import math
import sys
import time
from functools import partial

from tests.lab import Host, Lab

from benchmarks.hosts import name_each_other
from benchmarks.results import Comparison
from benchmarks.samples import alternate

HOSTS = 4
PORT = 29400
TIMEOUT = 120.0

SCRIPT = """
import json, sys, threading, time
import torch
import torch.distributed as dist
clocks = {{}}
{init}
clocks["at"] = time.monotonic()
print(json.dumps(clocks), flush=True)
threading.Event().wait()
"""
MINGLE = """
import mingle
clocks["called"] = time.monotonic()
def audit(event, arguments):
    if event == "socket.connect" and arguments[0].type == 1:  # SOCK_STREAM
        clocks.setdefault("found", time.monotonic())
    elif event == "os.putenv" and arguments[0] == b"MASTER_PORT":
        clocks["formed"] = time.monotonic()
sys.addaudithook(audit)
mingle.init("bench-script-{round}", backend="gloo")
"""
INIT = {"mingle": MINGLE, "known address": "dist.init_process_group('gloo')"}
FOUND, FORMED = "ms from a member's call until it dials rank 0", "ms from a member's call until it has GO"
"""By the interpreter's audit events."""

TEXT = """\
4 hosts start a script in fresh interpreters, with mingle or a known `MASTER_ADDR`. Measured from the start of the
commands until the last rank has its Gloo process group; with the known address this includes torch's retries. The
member is the last rank: it has imported torch when it calls `mingle.init`."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes ten seconds."""
    members: list[dict[str, float]] = []
    with Lab() as lab:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(HOSTS)]
        name_each_other(hosts)

        def once(name: str, round_: int) -> float:
            started, clocks = _run_script(hosts, name, round_)
            if name == "mingle" and round_ >= 0:
                members.append(clocks[-1])
            return max(each["at"] for each in clocks) - started

        for name in INIT:  # warms the caches of files
            once(name, -1)
        samples = alternate(math.ceil(rounds / 2), {name: partial(once, name) for name in INIT})
    return Comparison(
        name="script",
        title="A script's start",
        text=TEXT,
        unit="s",
        samples=samples,
        extra={
            "mingle": {
                FOUND: [1e3 * (each["found"] - each["called"]) for each in members],
                FORMED: [1e3 * (each["formed"] - each["called"]) for each in members],
            }
        },
    )


def _run_script(hosts: list[Host], name: str, round_: int) -> tuple[float, list[dict[str, float]]]:
    """Run a script on all hosts; return when it was started, and by rank the clocks that it prints as JSON."""
    script = SCRIPT.format(init=INIT[name].replace("{round}", str(round_)))
    address = {} if name == "mingle" else {"MASTER_ADDR": hosts[0].address(), "MASTER_PORT": str(PORT)}
    started = time.monotonic()
    processes = [
        host.run(
            [sys.executable, "-c", script],
            env={"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MINGLE_PROGRESS": "off", **address},
        )
        for rank, host in enumerate(hosts)
    ]
    for process in processes:
        process.wait_for_output('"at"', TIMEOUT)
    clocks = [json.loads(line) for each in processes for line in each.stdout.splitlines() if line.startswith("{")]
    for host in reversed(hosts):
        host.kill()
    return started, clocks
