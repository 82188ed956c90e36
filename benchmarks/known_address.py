"""A known address: what `mingle.init` adds to `init_process_group` where everybody was told where rank 0 is."""

from __future__ import annotations

import math
import os
import threading
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist
from tests.lab import report

from benchmarks import mingle_ranks
from benchmarks.hosts import Field, Place, field, from_begin
from benchmarks.results import Comparison
from benchmarks.samples import alternate

SIZES = (4, 8)
PORT = 29400
OURS, MESH_OFF = "mingle.init", f"mingle.init, {mingle_ranks.MESH_OFF}"
KNOWN, EARLY = "known address", "known address, a client early"

TEXT = """\
Fresh interpreters that have imported torch and mingle, each on its own host, begin at one moment. Measured until the
last has its Gloo process group. A torch client that connects before the store is listening sleeps for 250 to 750 ms
and tries again. The runs in which that happened, because a kernel counted a refused connection, are "a client early".
For the mesh, 4 hosts open 12 connections and 8 open 56, all on two cores."""


def run(rounds: int) -> Comparison:
    """Measure; a round of 4 ranks takes a quarter of a minute, one of 8 half a minute."""
    samples: dict[str, list[float]] = {}
    for size in SIZES:
        with field(size) as hosts:
            taken = _measure(hosts, rounds if size == min(SIZES) else math.ceil(rounds / 2))
        samples |= {f"{name}, {size} ranks": values for name, values in taken.items() if values}
    return Comparison(
        name="known_address", title="mingle.init beside a known address", text=TEXT, unit="ms", samples=samples
    )


def _measure(hosts: Field, rounds: int) -> dict[str, list[float]]:
    early: list[bool] = []

    def ours(option: str, _round: int) -> float:
        return from_begin(hosts.together_fresh(mingle_ranks.init, option=option))

    def known() -> float:
        ends = hosts.together_fresh(init)
        early.append(any(end["refused"] for end in ends))
        return from_begin(ends)

    taken = alternate(
        rounds, {OURS: partial(ours, ""), MESH_OFF: partial(ours, mingle_ranks.MESH_OFF), KNOWN: lambda _: known()}
    )
    for name, kind in ((EARLY, True), (KNOWN, False)):
        taken[name] = [value for value, each in zip(taken[KNOWN], early, strict=True) if each is kind]
    return taken


def init(place: Place) -> None:
    """Make the process group at an address that everybody was told; the rank stays until it is killed."""
    os.environ["MASTER_ADDR"] = place.address
    os.environ["MASTER_PORT"] = str(PORT)
    started, refused = place.wait(), _refused()
    dist.init_process_group("gloo", rank=place.rank, world_size=place.world_size)
    report("done", started=started, at=time.monotonic(), refused=_refused() - refused)
    threading.Event().wait()


def _refused() -> int:
    """Return how many connections from this host were refused so far: the kernel's AttemptFails (RFC 4022)."""
    heading, values = (
        line.split() for line in Path("/proc/net/snmp").read_text("ascii").splitlines() if line.startswith("Tcp:")
    )
    return int(values[heading.index("AttemptFails")])
