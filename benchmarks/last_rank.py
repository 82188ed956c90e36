"""Rank 0 comes last: from its start until every rank has what it needs."""

from __future__ import annotations

import math

from tests.lab import Event

from benchmarks import bare_ranks, limit, mingle_ranks, zeroconf_ranks
from benchmarks.hosts import RankFunction, cpu, field, until_all
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, ratio

HOSTS = 8
FRESH = ", fresh interpreters"
FRESH_FROM = 10
"""The fewest rounds with which fresh interpreters are measured too: a round of them takes a quarter of a minute."""

TEXT = """\
8 hosts. Seven ranks wait, then rank 0 calls `discover`; measured until the last has GO. zeroconf's rank 0 registers a
service, mostly in RFC 6762's pauses. "bare pipeline" sends what mingle sends, without proofs and checks; "single
steps" is one datagram, connection, round trip and TCPStore client in turn."""


def run(rounds: int) -> Comparison:
    """Measure."""
    ends: dict[str, list[list[Event]]] = {"mingle": [], "zeroconf": [], "bare pipeline": []}
    with field(HOSTS) as hosts:

        def one(name: str, function: RankFunction) -> float:
            result = hosts.last(function)
            ends[name].append(result)
            return until_all(result)

        samples = alternate(
            rounds,
            {
                "mingle": lambda _: one("mingle", mingle_ranks.discover),
                "zeroconf": lambda _: one("zeroconf", zeroconf_ranks.find),
                "bare pipeline": lambda _: one("bare pipeline", bare_ranks.run),
            },
        )
        if rounds >= FRESH_FROM:
            samples |= alternate(
                math.ceil(rounds / 2),
                {
                    f"mingle{FRESH}": lambda _: until_all(hosts.last_fresh(mingle_ranks.discover)),
                    f"zeroconf{FRESH}": lambda _: until_all(hosts.last_fresh(zeroconf_ranks.find)),
                },
            )
    samples["single steps"] = limit.steps(rounds)
    kind = FRESH if rounds >= FRESH_FROM else ""
    against = ratio(samples[f"mingle{kind}"], samples[f"zeroconf{kind}"])
    return Comparison(
        name="last_rank",
        title="Rank 0 comes last",
        text=TEXT,
        unit="ms",
        samples=samples,
        goals=(Goal(f"rank 0 last against zeroconf{kind}", against, 0.01, "×"),),
        ratios={name: ratio(samples["mingle"], samples[name]) for name in ("zeroconf", "bare pipeline")},
        extra={name: {"CPU": median([cpu(end) for end in each])} for name, each in ends.items()},
    )
