"""Rank 0 came first: from a late rank's start until it has what it needs."""

from __future__ import annotations

from benchmarks import bare_ranks, limit, mingle_ranks, zeroconf_ranks
from benchmarks.hosts import alone, field
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, ratio

HOSTS = 8

TEXT = """\
8 hosts. Rank 0 and six others wait, then the last one is started. Measured from its call of `discover` until it has GO:
within that time all 8 are confirmed and sealed, and each has read the session's token in the store, to which those that
wait have connected before. zeroconf's service is registered long before; the late one browses and resolves it, or asks
for it by its full name. The limits are those of the comparison above; in the bare pipeline those that wait have
connected to the store before, too.

The goal of a tenth of zeroconf's time is out of reach by definition: zeroconf's time is a random pause of 20 to 120 ms
before its first question, after which one answer is enough, while mingle's holds the confirmation by all 8 ranks and
what each of them reads in the store."""


def run(rounds: int) -> Comparison:
    """Measures."""
    with field(HOSTS) as hosts:
        samples = alternate(
            rounds,
            {
                "mingle": lambda _: alone(hosts.late(mingle_ranks.discover)),
                "zeroconf, browse": lambda _: alone(hosts.late(zeroconf_ranks.find)),
                "zeroconf, by name": lambda _: alone(hosts.late(zeroconf_ranks.find, option="by name")),
                "bare pipeline": lambda _: alone(hosts.late(bare_ranks.run, option=bare_ranks.LATE)),
            },
        )
    samples["single steps"] = limit.steps(rounds)
    ours = median(samples["mingle"])
    return Comparison(
        name="late_rank",
        title="Rank 0 came first, a worker comes late",
        text=TEXT,
        unit="ms",
        samples=samples,
        goals=(
            Goal("late worker: over the single steps", ours - median(samples["single steps"]), 10, "ms"),
            Goal("late worker: over the bare pipeline", ours - median(samples["bare pipeline"]), 10, "ms"),
            Goal("late worker: of zeroconf's time", ratio(samples["mingle"], samples["zeroconf, browse"]), 0.1, "×"),
        ),
        ratios={name: ratio(samples["mingle"], samples[name]) for name in samples if name[:6] in ("zeroco", "bare p")},
    )
