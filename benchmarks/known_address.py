"""A known address: what `mingle.init` adds to `init_process_group` where everybody was told where rank 0 is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from benchmarks import mingle_ranks, torch_ranks
from benchmarks.hosts import Field, RankFunction, cpu, field, from_begin
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, ratio

GOALS = {4: 1.25, 8: 1.6}
"""By the number of hosts the largest ratio."""
RETRY_MILLISECONDS = 400.0
"""A client of torch's that finds nobody listening tries again after half a second and more."""

TEXT = """\
Fresh interpreters that have imported torch and mingle, each on its own host, begin at one moment. Measured until the
last has its Gloo process group. A client of torch's that comes before rank 0 listens sleeps for half a second or
more."""


def run(rounds: int) -> Comparison:
    """Measure; a round of 8 ranks takes a quarter of a minute."""
    samples: dict[str, list[float]] = {}
    used: dict[str, dict[str, float]] = {}
    for size in GOALS:
        spent: dict[str, list[float]] = {"mingle.init": [], "known address": []}
        with field(size) as hosts:
            taken = alternate(
                rounds if size == min(GOALS) else math.ceil(rounds / 2),
                {
                    "mingle.init": partial(_once, hosts, mingle_ranks.init, spent["mingle.init"]),
                    "known address": partial(_once, hosts, torch_ranks.init, spent["known address"]),
                },
            )
        samples |= {f"{name}, {size} ranks": values for name, values in taken.items()}
        used |= {f"{name}, {size} ranks": {"CPU": median(values)} for name, values in spent.items()}
    return conclude(samples, used)


def conclude(samples: Mapping[str, list[float]], used: Mapping[str, Mapping[str, float]]) -> Comparison:
    """Return the outcome of these measurements."""
    ratios = {
        f"{size} ranks": ratio(samples[f"mingle.init, {size} ranks"], smooth)
        for size in GOALS
        if (smooth := _smooth(samples[f"known address, {size} ranks"]))
    }
    return Comparison(
        name="known_address",
        title="mingle.init beside a known address",
        text=TEXT,
        unit="ms",
        samples=samples,
        goals=tuple(
            Goal(f"mingle.init against a known address, {size} ranks", ratios[f"{size} ranks"], limit, "×")
            for size, limit in GOALS.items()
            if f"{size} ranks" in ratios
        ),
        ratios=ratios,
        extra=used,
    )


def _smooth(values: list[float]) -> list[float]:
    """Return the rounds in which no client of torch's came too early."""
    return [value for value in values if value < RETRY_MILLISECONDS]


def _once(hosts: Field, function: RankFunction, spent: list[float], _round: int) -> float:
    ends = hosts.together_fresh(function)
    spent.append(cpu(ends))
    return from_begin(ends)
