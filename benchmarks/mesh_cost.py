"""What GO as a mesh costs: the same job with and without the proof that all nodes reach each other."""

from __future__ import annotations

from functools import partial

from benchmarks import mingle_ranks
from benchmarks.hosts import Field, RankFunction, cpu, field, from_begin, until_all
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, ratio

SIZES = (4, 8)
MOST = 1.1
"""The largest ratio of a start with the mesh to one without."""

TEXT = """\
One rank on each host. "init": fresh interpreters begin at one moment; measured until the last has its Gloo process
group. "rank 0 last": seven ranks wait for it; measured from its call of `discover` until the last of the 8 has GO. With
`mesh="on"` each host has opened a TCP connection to each other one before GO: 12 with 4 hosts, 56 with 8. All hosts
share two cores here, so all of these connections add up. The column CPU is that of all ranks together, in ms."""


def run(rounds: int) -> Comparison:
    """Measure."""
    samples: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for size in SIZES:
        with field(size) as hosts:
            kinds = [f"init, {size} hosts"]
            contenders = {
                f"{kinds[0]}, mesh {mesh}": partial(
                    _together, hosts, function, used.setdefault(f"{kinds[0]}, mesh {mesh}", [])
                )
                for mesh, function in (("off", mingle_ranks.init_without_mesh), ("on", mingle_ranks.init))
            }
            if size == max(SIZES):
                kinds.append("rank 0 last")
                contenders |= {
                    f"{kinds[1]}, mesh {mesh}": partial(
                        _last, hosts, function, used.setdefault(f"{kinds[1]}, mesh {mesh}", [])
                    )
                    for mesh, function in (("off", mingle_ranks.discover_without_mesh), ("on", mingle_ranks.discover))
                }
            samples |= alternate(rounds, contenders)
        ratios |= {kind: ratio(samples[f"{kind}, mesh on"], samples[f"{kind}, mesh off"]) for kind in kinds}
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


def _together(hosts: Field, function: RankFunction, spent: list[float], _round: int) -> float:
    ends = hosts.together_fresh(function)
    spent.append(cpu(ends))
    return from_begin(ends)


def _last(hosts: Field, function: RankFunction, spent: list[float], _round: int) -> float:
    ends = hosts.last(function)
    spent.append(cpu(ends))
    return until_all(ends)
