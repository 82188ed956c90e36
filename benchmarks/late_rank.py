"""Rank 0 came first: from a late rank's start until it has what it needs."""

from __future__ import annotations

from benchmarks import bare_ranks, limit, mingle_ranks, zeroconf_ranks
from benchmarks.hosts import alone, field
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, ratio

HOSTS = 8
STORE = "zeroconf, by name, and the store"

TEXT = """\
8 hosts. Rank 0 and six others wait, then the last one is started. Measured from its call of `discover` until it has GO:
within that time all 8 are confirmed and sealed, and each has connected to the store and read the session's token there.
zeroconf's service is registered long before; the late rank browses and resolves it, or asks for it by its full name.
"by name, and the store" also connects a TCPStore client to the address found, where rank 0's store already serves the
other ranks. That is the least that a rank needs for a process group, but no rank learns whether all others have come.
"bare pipeline" and "single steps" are explained in the next comparison."""


def run(rounds: int) -> Comparison:
    """Measure."""
    with field(HOSTS) as hosts:
        samples = alternate(
            rounds,
            {
                "mingle": lambda _: alone(hosts.late(mingle_ranks.discover)),
                "zeroconf, browse": lambda _: alone(hosts.late(zeroconf_ranks.find)),
                "zeroconf, by name": lambda _: alone(hosts.late(zeroconf_ranks.find, option="by name")),
                STORE: lambda _: alone(hosts.late(zeroconf_ranks.find_and_connect)),
                "bare pipeline": lambda _: alone(hosts.late(bare_ranks.run, option=bare_ranks.LATE)),
            },
        )
    samples["single steps"] = limit.steps(rounds)
    return Comparison(
        name="late_rank",
        title="Rank 0 came first, a worker comes late",
        text=TEXT,
        unit="ms",
        samples=samples,
        goals=(
            Goal(
                "a late worker against zeroconf by name and a store", ratio(samples["mingle"], samples[STORE]), 2, "×"
            ),
        ),
        ratios={name: ratio(samples["mingle"], samples[name]) for name in samples if name[:6] in ("zeroco", "bare p")},
    )
