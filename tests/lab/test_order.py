"""Assigned ranks follow the machines on real hosts, in any order of starts: the first in order hosts the job."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import mingle
from tests.support.levels import chosen

from . import UDP, Host, Lab
from .scenarios import TIMEOUT, check, report_log, results, train

NAMES = ("node1", "node2", "node3", "node10")


@pytest.mark.quick
@pytest.mark.soak(5)
@pytest.mark.parametrize(
    ("first_last", "lost"),
    chosen([(True, 30)], soak=[(False, 0), (False, 30), (True, 0)]),
)
def test_any_order_of_starts(lab: Lab, first_last: bool, lost: int, seed: int) -> None:
    network = lab.network()
    # The addresses say the reverse.
    hosts = [lab.host(network, name=name) for name in reversed(NAMES)][::-1]
    for host in hosts if lost else []:
        host.drop_udp(lost)
    rng, before = random.Random(seed), 0.0
    moments = {host: rng.uniform(0, 2) for host in hosts}
    if first_last:
        moments[hosts[0]] = 4.0
    ranks = {}
    for host in sorted(hosts, key=lambda host: moments[host]):
        threading.Event().wait(moments[host] - before)
        before = moments[host]
        ranks[host] = host.start(train, "order", None, len(hosts))
    check(results([ranks[host] for host in hosts]), hosts)


# --- networks that are not healthy ------------------------------------------------------------------------------------

ONE_PROOF_SECONDS = 15.0
"""By when a job has formed that proves a broken mesh once: two tries take eight seconds, and another proof as many."""


def rank_of(job_id: str, **arguments: Any) -> int:
    """What every process runs: no group, which a mesh that is broken could not form."""
    report_log()
    with mingle.discover(job_id, world_size=3, discovery_timeout=TIMEOUT, **arguments) as job:
        return job.rank


def ranks_of(hosts: Sequence[Host], *, pause: float = 0.3, **arguments: Any) -> list[int]:
    """Start a process on each host, the last one first; return their ranks."""
    ranks = []
    for host in reversed(hosts):
        ranks.append(host.start(rank_of, "order", **arguments))
        time.sleep(pause)
    return results(ranks[::-1])


@pytest.mark.soak(10)
@pytest.mark.timeout(120)
def test_the_first_leads_on_a_network_of_link_local_addresses(lab: Lab) -> None:
    """The others hear of its session on their connections alone, which have the scope of its address."""
    hosts = lab.lan(3, None)
    hosts[0].isolate_one_way("out", match=UDP)
    assert ranks_of(hosts, pause=1.5) == [0, 1, 2]


@pytest.mark.soak(20)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("percent", chosen([10], soak=[5]))
def test_the_first_leads_where_packets_are_lost(lab: Lab, percent: int) -> None:
    """TCP's as well."""
    hosts = lab.lan(3)
    for host in hosts:
        host.drop(f'iifname != "lo" numgen random mod 100 < {percent}')
    assert ranks_of(hosts) == [0, 1, 2]


@pytest.mark.soak(10)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("dialer", "dialed", "ranks"), [(0, 2, [0, 1, 2]), (2, 0, [1, 0, 2])])
def test_a_broken_mesh_is_proved_once(lab: Lab, dialer: int, dialed: int, ranks: list[int]) -> None:
    """The first that all reach leads."""
    hosts = lab.lan(3)
    hosts[dialed].drop(f"ip saddr {hosts[dialer].address()} tcp flags & (syn | ack) == syn")
    began = time.monotonic()
    assert ranks_of(hosts, mesh="warn") == ranks
    assert time.monotonic() - began < ONE_PROOF_SECONDS
