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
8 hosts. Seven ranks wait, then rank 0 is started. Measured from rank 0's call of `discover` until the last of the 8 has
GO: they are confirmed and sealed, and each has reached rank 0's TCPStore. For zeroconf rank 0 makes its `Zeroconf` and
registers a service, and the others browse and resolve it, which gives them an address only; most of its time is spent
in the pauses of RFC 6762's probing. "bare pipeline" sends what mingle sends, without proofs and checks: a datagram,
connections, as many messages of the same size, a TCPStore and its clients, in 8 processes on two cores. "single steps"
is one datagram, one connection, the round trips, and one TCPStore client, one after the other between two processes
that do nothing else. The column CPU is that of all 8 ranks, including their waiting, in ms.

These ranks are forked from a process that has imported all they need. In the lines with "fresh interpreters" each rank
is a new Python in each round, which has imported torch and mingle (or zeroconf) and then calls it for the first time.

In another run of 12 rounds with a median of 23 ms, the ranks' clocks gave these parts: rank 0's own start 2.8 ms,
proving and joining 8.5, confirming 0.7, opening the store 1.6, seven clients of the store 5.9, GO 3.3. Nearly all of it
is CPU of 8 interpreters that share two cores. Where 8 ranks begin together, perf(1) finds the cores idle for less than
a twentieth of the time, in the interpreter for six tenths, and in the kernel for a quarter."""


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
