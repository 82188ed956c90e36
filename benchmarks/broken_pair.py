"""Two of four nodes can't reach each other: until every rank has an error, with mingle and with a known address."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from functools import partial

from tests.lab import Lab
from tests.lab.errors import LabTimeoutError

from benchmarks.results import Comparison
from benchmarks.samples import alternate
from mingle.protocol.machine import Mesh

SIZE = 4
TIMEOUT = timedelta(seconds=20)
"""Torch's own default is half an hour."""
GIVEN_UP_SECONDS = 40.0
PORT = 29_777

TEXT = """\
4 hosts; a firewall on the second one drops TCP packets from the third, which breaks connections in both directions.
Each rank makes a Gloo process group with a timeout of 20 s and calls `all_reduce`. Measured until the last rank has an
error, for 40 s at most."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes almost two minutes."""
    contenders: dict[str, Mesh | None] = {"mingle": "on", "mingle, mesh off": "off", "known address": None}
    return Comparison(
        name="broken_pair",
        title="Two nodes that can't reach each other",
        text=TEXT,
        unit="s",
        samples=alternate(
            math.ceil(rounds / 10), {name: partial(_until_all_raise, mesh) for name, mesh in contenders.items()}
        ),
    )


def _until_all_raise(mesh: Mesh | None, round_: int) -> float:
    with Lab() as lab:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(SIZE)]
        hosts[1].drop(f"meta l4proto tcp ip saddr {hosts[2].address()}")
        began = time.monotonic()
        ranks = [host.start(train, f"pair-{round_}", hosts[0].address(), rank, mesh) for rank, host in enumerate(hosts)]
        ends = []
        for rank in ranks:
            try:
                ends.append(rank.result(max(0.1, began + GIVEN_UP_SECONDS - time.monotonic())))
            except LabTimeoutError:
                return GIVEN_UP_SECONDS
        return max(ends) - began


def train(job_id: str, address: str, rank: int, mesh: Mesh | None) -> float:
    """Make a process group and use it; return when that failed, by the clock that all hosts share."""
    import torch
    import torch.distributed as dist

    import mingle

    try:
        if mesh is not None:
            mingle.init(job_id, rank=rank, world_size=SIZE, backend="gloo", mesh=mesh, timeout=TIMEOUT)
        else:
            where = f"tcp://{address}:{PORT}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE, timeout=TIMEOUT)
        dist.all_reduce(torch.ones(1))
    except (mingle.MingleError, RuntimeError):
        return time.monotonic()
    raise AssertionError("a collective of nodes that can't reach each other has ended")
