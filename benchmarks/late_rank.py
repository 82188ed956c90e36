"""Rank 0 came first: from a late rank's start until it has what it needs."""

from __future__ import annotations

from benchmarks import bare_ranks, limit, mingle_ranks, zeroconf_ranks
from benchmarks.hosts import alone, field
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, ratio

HOSTS = 8
STORE = "zeroconf, by name, and the store"

TEXT = """\
8 hosts. Seven wait, then the last one calls `discover`; measured until it has GO. zeroconf's late rank browses for a
service, or asks for it by name; "and the store" also connects a TCPStore client."""


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
