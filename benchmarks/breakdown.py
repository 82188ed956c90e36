"""Where a script's start goes, by the clocks of its ranks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from itertools import pairwise

from tests.lab import Host, Lab

from benchmarks.hosts import name_each_other
from benchmarks.results import Comparison

HOSTS = 4
PORT = 29400
TIMEOUT = 120.0

SCRIPT = """
import os, sys, threading, time
clocks = {"the interpreter starts": time.monotonic()}
def clock(name):
    clocks.setdefault(name, time.monotonic())
import json
import torch
import torch.distributed as dist
clock("torch is imported")
"""
KNOWN = """
dist.init_process_group("gloo")
"""
MINGLE = """
import mingle
clock("mingle is imported")
def audit(event, arguments):
    if event in ("socket.sendto", "socket.sendmsg") and arguments[0].type == 2:  # SOCK_DGRAM
        if os.environ["RANK"] == "0":
            clock("modules, scan, sockets, first datagram")
    elif event == "socket.connect" and arguments[0].type == 1:  # SOCK_STREAM
        clock("modules, scan, sockets, rank 0 is found")
    elif event == "os.putenv" and arguments[0] == b"MASTER_PORT":
        clock("proof, joining, store, GO")
sys.addaudithook(audit)
mingle.init("bench-breakdown-{round}", backend="gloo")
"""
END = """
clock("the process group is there")
print(json.dumps(clocks), flush=True)
threading.Event().wait()
"""

TEXT = """\
4 hosts start the same script at once, as in "A script's start", and each rank notes the time. Shown is how long each
phase takes on rank 0 and on one member, from the end of the phase before; the first begins with the start of the
commands. The ranks share two cores, so a phase that computes also waits for the others, and a member finds rank 0 when
rank 0 has come as far. In mingle's script the marks come from the interpreter's audit events: rank 0's first datagram,
a member's first connection, and `MASTER_PORT`, which is exported after GO."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes ten seconds."""
    samples: dict[str, list[float]] = {}
    with Lab() as lab:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(HOSTS)]
        name_each_other(hosts)
        for round_ in range(-1, max(3, rounds // 2)):
            for name, body in {"mingle": MINGLE.replace("{round}", str(round_)), "known address": KNOWN}.items():
                phases = _once(hosts, name, SCRIPT + body + END)
                if round_ >= 0:  # the first round warms the caches of files
                    for phase, seconds in phases.items():
                        samples.setdefault(phase, []).append(seconds * 1e3)
    return Comparison(
        name="breakdown",
        title="Where a script's start goes",
        text=TEXT,
        unit="ms",
        samples=dict(sorted(samples.items())),
    )


def _once(hosts: list[Host], name: str, script: str) -> Mapping[str, float]:
    told = {"MASTER_ADDR": hosts[0].address(), "MASTER_PORT": str(PORT)} if name == "known address" else {}
    started = time.monotonic()
    processes = [
        host.run(
            [sys.executable, "-c", script],
            env={"RANK": str(rank), "WORLD_SIZE": str(HOSTS), "MINGLE_PROGRESS": "off", **told},
        )
        for rank, host in enumerate(hosts)
    ]
    for process in processes:
        process.wait_for_output("the process group", TIMEOUT)
    phases = {}
    for who, process in (("rank 0", processes[0]), ("a member", processes[-1])):
        clocks = json.loads(next(line for line in process.stdout.splitlines() if line.startswith("{")))
        for number, ((_, before), (what, at)) in enumerate(pairwise([("", started), *clocks.items()]), start=1):
            phases[f"{name}, {who}: {number}. {what}"] = at - before
    for host in reversed(hosts):
        host.kill()
    return phases
