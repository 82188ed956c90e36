"""Datagrams on the wire until a job has formed."""

from __future__ import annotations

import time

from benchmarks import mingle_ranks, zeroconf_ranks
from benchmarks.hosts import RankFunction, field
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, ratio

HOSTS = 8
SPREAD_SECONDS = 1.0
AFTERMATH_SECONDS = 0.3

TEXT = """\
8 hosts, IPv4 alone, started within a second. Each UDP packet that enters the bridge counts once, until every rank has
closed its job. zeroconf registers and resolves one service."""


def run(rounds: int) -> Comparison:
    """Measure."""
    octets: dict[str, list[float]] = {}
    with field(HOSTS) as hosts:

        def one(name: str, function: RankFunction, option: str, round_: int) -> float:
            hosts.count_udp()
            hosts.spread(function, SPREAD_SECONDS, round_, option=option)
            time.sleep(AFTERMATH_SECONDS)
            packets, length = hosts.counted_udp()
            octets.setdefault(name, []).append(length)
            return float(packets)

        samples = alternate(
            rounds,
            {
                "mingle": lambda round_: one("mingle", mingle_ranks.discover_and_end, "IPv4", round_),
                "zeroconf": lambda round_: one("zeroconf", zeroconf_ranks.find_and_end, "", round_),
            },
        )
    return Comparison(
        name="wire",
        title="Datagrams on the wire",
        text=TEXT,
        unit="datagrams",
        samples=samples,
        goals=(Goal("datagrams, 8 hosts within a second", median(samples["mingle"]), 15, ""),),
        ratios={"zeroconf": ratio(samples["mingle"], samples["zeroconf"])},
        extra={name: {"bytes": median(values)} for name, values in octets.items()},
    )
