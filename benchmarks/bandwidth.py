"""What mingle-check says of the bandwidth between two hosts, beside iperf3 between the same ones."""

from __future__ import annotations

import json
from statistics import mean

from tests.compose.commands import provide
from tests.lab import Host, Lab
from tests.lab.checks import hosts_of, outcomes, start

from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, ratio

TIMEOUT = 60.0
SERVES = "Server listening"

TEXT = """\
Two healthy hosts, the mean of both directions: `mingle-check` by Gloo's `send` and `recv`, iperf3 by one TCP
connection for two seconds."""


def run(rounds: int) -> Comparison:
    """Measure; install iperf3 where it is missing."""
    provide(("iperf3",))
    with Lab() as lab:
        hosts = hosts_of(lab, 2)
        for warm_up in (_check, _iperf3):
            warm_up(hosts)
        samples = alternate(rounds, {"mingle-check": lambda _: _check(hosts), "iperf3": lambda _: _iperf3(hosts)})
    against = ratio(samples["mingle-check"], samples["iperf3"])
    return Comparison(
        name="bandwidth",
        title="The bandwidth that mingle-check finds",
        text=TEXT,
        unit="MB/s",
        samples=samples,
        goals=(Goal("mingle-check's bandwidth away from iperf3's", 100 * abs(against - 1), 25, "%"),),
    )


def _check(hosts: list[Host]) -> float:
    (report, *_) = outcomes(start(hosts, max_size=1 << 26))
    return mean(float(pair["rate"]) for pair in report["pairs"]) / 1e6


def _iperf3(hosts: list[Host]) -> float:
    rates = []
    for client, server in (hosts, hosts[::-1]):
        serving = server.run(["iperf3", "--server", "--one-off", "--forceflush"])
        serving.wait_for_output(SERVES, TIMEOUT)
        asking = client.run(["iperf3", "--client", server.address(), "--time", "2", "--json"])
        assert asking.wait(TIMEOUT) == 0, asking.describe()
        serving.wait(TIMEOUT)
        rates.append(float(json.loads(asking.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e6)
    return mean(rates)
