"""One datagram, once: how often a job forms that way, by the order of start and by loss, beside mingle."""

from __future__ import annotations

from benchmarks import mingle_ranks, original_ranks
from benchmarks.hosts import Field, RankFunction, field
from benchmarks.results import Comparison, Goal

HOSTS = 4
LOSSES = (0, 10, 30, 50)
SPREAD_SECONDS = 1.0
PATIENCE_SECONDS = {"mingle": 20.0, "one datagram": 2.0}
"""How long after the last start a job may take; of one datagram nothing can come after a moment."""

TEXT = """\
4 hosts. "One datagram" is what an earlier prototype did: rank 0 multicasts its address once, when it starts. The
percentage of jobs in which all ranks had what they need."""


def run(rounds: int) -> Comparison:
    """Measure."""
    contenders: dict[str, RankFunction] = {"mingle": mingle_ranks.discover, "one datagram": original_ranks.run}
    samples: dict[str, list[float]] = {}
    with field(HOSTS) as hosts:
        for loss in LOSSES:
            hosts.lose_udp(loss)
            for round_ in range(rounds):
                for name, function in contenders.items():
                    key = f"{name}, rank 0 last, {loss} % lost"
                    samples.setdefault(key, []).append(_formed_last(hosts, name, function))
                    if loss == 0:
                        key = f"{name}, any order, none lost"
                        samples.setdefault(key, []).append(_formed_spread(hosts, name, function, round_))
    ours = [value for name, values in samples.items() if name.startswith("mingle") for value in values]
    shares = {name: [100 * sum(values) / len(values)] for name, values in samples.items()}
    return Comparison(
        name="one_datagram",
        title="One datagram, once",
        text=f"{TEXT} Jobs in each line: {rounds}.",
        unit="%",
        samples=shares,
        goals=(Goal("mingle's jobs that did not form", 100 - 100 * sum(ours) / len(ours), 0, "%"),),
    )


def _formed_last(hosts: Field, name: str, function: RankFunction) -> float:
    return float(hosts.forms_last(function, PATIENCE_SECONDS[name]))


def _formed_spread(hosts: Field, name: str, function: RankFunction, seed: int) -> float:
    return float(hosts.forms_spread(function, SPREAD_SECONDS, seed, PATIENCE_SECONDS[name]))
