"""The CPU of a rank's first `discover`, in a fresh interpreter."""

from __future__ import annotations

from benchmarks import stats
from benchmarks.results import ROOT, Comparison, Goal
from benchmarks.samples import median

RANKS = 8

TEXT = """\
8 ranks of one machine in fresh interpreters that have imported torch and mingle: the CPU of a rank from its call of
`discover` until GO. `python benchmarks/stats.py --against TREE` compares two versions."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes a quarter of a minute."""
    samples: dict[str, list[float]] = {"rank 0": [], "a member": []}
    for _ in range(rounds):
        for rank, figures in stats.run_job(ROOT, world_size=RANKS).items():
            samples["a member" if rank else "rank 0"].append(figures[stats.CPU])
    return Comparison(
        name="first_discover",
        title="A rank's first discover",
        text=TEXT,
        unit="ms of CPU",
        samples=samples,
        goals=(
            Goal(f"rank 0's first discover, {RANKS} ranks", median(samples["rank 0"]), 9, "ms of CPU"),
            Goal("a member's first discover", median(samples["a member"]), 6, "ms of CPU"),
        ),
    )
