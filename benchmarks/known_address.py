"""A known address: what `mingle.init` adds to `init_process_group` where everybody was told where rank 0 is."""

from __future__ import annotations

import math
import os
import threading
import time
from functools import partial

import torch.distributed as dist
from tests.lab import report

from benchmarks import mingle_ranks
from benchmarks.hosts import Field, Place, RankFunction, cpu, field, from_begin
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, ratio

GOALS = {4: 1.25, 8: 1.6}
"""By the number of hosts the largest ratio."""
MOST_FOR_MESH = 1.1
RETRY_MILLISECONDS = 400.0
"""A client of torch's that finds nobody listening tries again after half a second and more."""
PORT = 29400

TEXT = """\
Fresh interpreters that have imported torch and mingle, each on its own host, begin at one moment. Measured until the
last has its Gloo process group. A client of torch's that comes before rank 0 listens sleeps for half a second or
more. With the mesh, 4 hosts open 12 connections and 8 open 56, all on two cores."""


def run(rounds: int) -> Comparison:
    """Measure; a round of 8 ranks takes half a minute."""
    samples: dict[str, list[float]] = {}
    used: dict[str, dict[str, float]] = {}
    contenders: dict[str, RankFunction] = {
        "mingle.init": mingle_ranks.init,
        "mingle.init with the mesh": mingle_ranks.init_with_mesh,
        "known address": init,
    }
    for size in GOALS:
        spent: dict[str, list[float]] = {name: [] for name in contenders}
        with field(size) as hosts:
            taken = alternate(
                math.ceil(rounds / (2 if size == min(GOALS) else 4)),
                {name: partial(_once, hosts, function, spent[name]) for name, function in contenders.items()},
            )
        samples |= {f"{name}, {size} ranks": values for name, values in taken.items()}
        used |= {f"{name}, {size} ranks": {"CPU": median(values)} for name, values in spent.items()}
    ratios = {
        f"{size} ranks": ratio(samples[f"mingle.init, {size} ranks"], smooth)
        for size in GOALS
        if (smooth := _smooth(samples[f"known address, {size} ranks"]))
    }
    mesh = {
        f"the mesh, {size} ranks": ratio(
            samples[f"mingle.init with the mesh, {size} ranks"], samples[f"mingle.init, {size} ranks"]
        )
        for size in GOALS
    }
    return Comparison(
        name="known_address",
        title="mingle.init beside a known address",
        text=TEXT,
        unit="ms",
        samples=samples,
        goals=(
            *(
                Goal(f"mingle.init against a known address, {size} ranks", ratios[f"{size} ranks"], limit, "×")
                for size, limit in GOALS.items()
                if f"{size} ranks" in ratios
            ),
            *(
                Goal(f"mingle.init with {what}, against without", each, MOST_FOR_MESH, "×")
                for what, each in mesh.items()
            ),
        ),
        ratios={**ratios, **mesh},
        extra=used,
    )


def _smooth(values: list[float]) -> list[float]:
    """Return the rounds in which no client of torch's came too early."""
    return [value for value in values if value < RETRY_MILLISECONDS]


def _once(hosts: Field, function: RankFunction, spent: list[float], _round: int) -> float:
    ends = hosts.together_fresh(function)
    spent.append(cpu(ends))
    return from_begin(ends)


def init(place: Place) -> None:
    """Make the process group at an address that everybody was told; the rank stays until it is killed."""
    os.environ["MASTER_ADDR"] = place.address
    os.environ["MASTER_PORT"] = str(PORT)
    started, used = place.wait(), time.process_time()
    dist.init_process_group("gloo", rank=place.rank, world_size=place.world_size)
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - used)
    threading.Event().wait()
