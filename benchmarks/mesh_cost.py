"""What GO as a mesh costs: the same job with and without the proof that all nodes reach each other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

from tests.lab import Event

from benchmarks import mingle_ranks
from benchmarks.hosts import RankFunction, cpu, field, from_begin, until_all
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, ratio

SIZES = (4, 8)
LAST = "rank 0 last"
INIT: Mapping[str, RankFunction] = {"off": mingle_ranks.init, "on": mingle_ranks.init_with_mesh}
DISCOVER: Mapping[str, RankFunction] = {"off": mingle_ranks.discover, "on": mingle_ranks.discover_with_mesh}
MOST = 1.1
"""The largest ratio of a start with the mesh to one without."""

OWN = "own processors"
TEXT = f"""\
"init": until the last of the hosts has its Gloo process group; "{LAST}": as in "Rank 0 comes last". With the mesh, 4
hosts open 12 connections and 8 open 56, all on two cores. "{OWN}": each host has an equal part of the machine's time
to itself."""


def run(rounds: int) -> Comparison:
    """Measure."""
    samples: dict[str, list[float]] = {}
    used: defaultdict[str, list[float]] = defaultdict(list)
    kinds: list[str] = []
    for size, own in itertools.product(SIZES, (False, True)):
        with field(size, own_processors=own) as hosts:
            where = f", {OWN}" if own else ""
            kinds.append(f"init, {size} hosts{where}")
            contenders = _contenders(kinds[-1], INIT, hosts.together_fresh, from_begin, used)
            if size == max(SIZES):
                kinds.append(LAST + where)
                contenders |= _contenders(kinds[-1], DISCOVER, hosts.last, until_all, used)
            samples |= alternate(rounds, contenders)
    ratios = {kind: ratio(samples[f"{kind}, mesh on"], samples[f"{kind}, mesh off"]) for kind in kinds}
    return Comparison(
        name="mesh_cost",
        title="The cost of the mesh",
        text=TEXT,
        unit="ms",
        samples=samples,
        goals=tuple(Goal(f"{kind}, with the mesh against without", value, MOST, "×") for kind, value in ratios.items()),
        ratios=ratios,
        extra={name: {"CPU": median(values)} for name, values in used.items()},
    )


def _contenders(
    kind: str,
    functions: Mapping[str, RankFunction],
    start: Callable[[RankFunction], list[Event]],
    milliseconds: Callable[[list[Event]], float],
    used: defaultdict[str, list[float]],
) -> dict[str, Callable[[int], float]]:
    """Return what measures one kind of start once, with and without the mesh; the CPU goes to ``used``."""

    def once(name: str, function: RankFunction, _round: int) -> float:
        ends = start(function)
        used[name].append(cpu(ends))
        return milliseconds(ends)

    names = {f"{kind}, mesh {mesh}": function for mesh, function in functions.items()}
    return {name: partial(once, name, function) for name, function in names.items()}
