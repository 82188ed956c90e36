"""Where a script's start goes, by the clocks of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from tests.lab import Host, Lab

from benchmarks.hosts import name_each_other
from benchmarks.results import Comparison
from benchmarks.script import HOSTS, run_script

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
The phases of "A script's start", on rank 0 and on one member; all ranks share two cores, so a phase also waits for
the others. The marks come from the interpreter's audit events."""


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
    started, clocks = run_script(hosts, script, "the process group is there", told=name != "mingle")
    phases = {}
    for who, marks in (("rank 0", clocks[0]), ("a member", clocks[-1])):
        for number, ((_, before), (what, at)) in enumerate(pairwise([("", started), *marks.items()]), start=1):
            phases[f"{name}, {who}: {number}. {what}"] = at - before
    return phases
