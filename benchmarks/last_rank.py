"""All ranks but one wait, and the last one comes: until every rank has what it needs."""

from __future__ import annotations

import math

from tests.lab import Event

from benchmarks import mingle_ranks, zeroconf_ranks
from benchmarks.hosts import RankFunction, alone, cpu, field, until_all
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, ratio

HOSTS = 8
FRESH = ", fresh interpreters"
FRESH_FROM = 10
"""The fewest rounds with which fresh interpreters are measured too: a round of them takes a quarter of a minute."""
MESH = "mingle, with the mesh"
LATE = "a worker, "
STORE = f"{LATE}zeroconf, by name, and the store"

TEXT = """\
8 hosts. Seven ranks wait, then rank 0 calls `discover`; measured until the last has GO. zeroconf's rank 0 registers a
service, mostly in RFC 6762's pauses. With the mesh, the hosts open 56 connections on two cores. "a worker": rank 0 and
six others wait; measured until the last one has GO. zeroconf's worker browses for a service, or asks for it by name;
"and the store" also connects a TCPStore client."""


def run(rounds: int) -> Comparison:
    """Measure."""
    ends: dict[str, list[list[Event]]] = {"mingle": [], MESH: [], "zeroconf": []}
    datagrams: dict[str, list[float]] = {name: [] for name in ends}
    with field(HOSTS) as hosts:

        def one(name: str, function: RankFunction) -> float:
            hosts.count_udp()
            result = hosts.last(function)
            datagrams[name].append(hosts.counted_udp())
            ends[name].append(result)
            return until_all(result)

        samples = alternate(
            rounds,
            {
                "mingle": lambda _: one("mingle", mingle_ranks.discover),
                MESH: lambda _: one(MESH, mingle_ranks.discover_with_mesh),
                "zeroconf": lambda _: one("zeroconf", zeroconf_ranks.find),
                f"{LATE}mingle": lambda _: alone(hosts.late(mingle_ranks.discover)),
                f"{LATE}zeroconf, browse": lambda _: alone(hosts.late(zeroconf_ranks.find)),
                f"{LATE}zeroconf, by name": lambda _: alone(hosts.late(zeroconf_ranks.find, option="by name")),
                STORE: lambda _: alone(hosts.late(zeroconf_ranks.find_and_connect)),
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
    kind = FRESH if rounds >= FRESH_FROM else ""
    against = ratio(samples[f"mingle{kind}"], samples[f"zeroconf{kind}"])
    late = ratio(samples[f"{LATE}mingle"], samples[STORE])
    return Comparison(
        name="last_rank",
        title="The last rank comes",
        text=TEXT,
        unit="ms",
        samples=samples,
        goals=(
            Goal(f"rank 0 last against zeroconf{kind}", against, 0.01, "×"),
            Goal("a late worker against zeroconf by name and a store", late, 2, "×"),
        ),
        ratios={
            "zeroconf": ratio(samples["mingle"], samples["zeroconf"]),
            "zeroconf's datagrams": ratio(datagrams["mingle"], datagrams["zeroconf"]),
            "the mesh": ratio(samples[MESH], samples["mingle"]),
            "a worker, and the store": late,
        },
        extra={
            name: {"CPU": median([cpu(end) for end in each]), "datagrams": median(datagrams[name])}
            for name, each in ends.items()
        },
    )
