"""Half of all datagrams lost: how long the slowest jobs take."""

from __future__ import annotations

from benchmarks import mingle_ranks
from benchmarks.hosts import field, until_all
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, percentile

HOSTS = 8
PERCENT = 50
ROUNDS_PER_ROUND = 5
"""A 99th percentile needs more measurements than a median."""

TEXT = """\
8 hosts, each of which loses every second UDP packet. Seven ranks wait; measured from rank 0's call until all 8 have
GO."""


def run(rounds: int) -> Comparison:
    """Measure."""
    with field(HOSTS) as hosts:

        def one(percent: int) -> float:
            hosts.lose_udp(percent)
            return until_all(hosts.last(mingle_ranks.discover))

        samples = alternate(rounds * ROUNDS_PER_ROUND, {"mingle": lambda _: one(PERCENT)})
    worst = percentile(samples["mingle"], 0.99)
    return Comparison(
        name="loss",
        title="Half of all datagrams lost",
        text=f"{TEXT} The 99th percentile is {worst:.0f} ms.",
        unit="ms",
        samples=samples,
        goals=(Goal("50 % loss, 8 hosts: 99th percentile", worst, 1000, "ms"),),
    )
