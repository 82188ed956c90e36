"""The first in order hosts the job wherever all others reach it, and nowhere else: on networks that are not healthy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

import mingle
from tests.support.levels import chosen, repeated

from . import UDP, Host, Lab
from .scenarios import TIMEOUT, report_log, results

ONE_PROOF_SECONDS = 15.0
"""By when a job has formed that proves a broken mesh once: two tries take eight seconds, and another proof as many."""
SYN = "tcp flags & (syn | ack) == syn"


def rank_of(job_id: str, **arguments: Any) -> int:
    """What every process runs: no group, which a mesh that is broken could not form."""
    report_log()
    with mingle.discover(job_id, world_size=3, discovery_timeout=TIMEOUT, **arguments) as job:
        return job.rank


def hosts_of(lab: Lab, ipv4: str | None = "10.77.0.0/24") -> list[Host]:
    """Three hosts whose names are their order."""
    network = lab.network(ipv4)
    return [lab.host(network, name=f"n{number}") for number in range(3)]


def ranks_of(hosts: Sequence[Host], job_id: str, *, pause: float = 0.3, **arguments: Any) -> list[int]:
    """Start a process on each host, one after another in this order; return their ranks by the hosts' names."""
    ranks = {}
    for host in hosts:
        ranks[host.name] = host.start(rank_of, job_id, **arguments)
        time.sleep(pause)
    return results([ranks[name] for name in sorted(ranks)])


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mesh", chosen(["warn"], soak=["off"]))
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_a_first_that_not_all_reach_is_not_asked_to_lead(lab: Lab, mesh: str, seed: int) -> None:
    first, host, last = hosts_of(lab)
    first.drop(f"ip saddr {last.address()} {SYN}")
    last.drop(f"ip saddr {first.address()} {SYN}")
    assert ranks_of([host, first, last], f"apart {mesh} {seed}", pause=1.5, mesh=mesh) == [1, 0, 2]


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_the_first_leads_on_a_network_of_link_local_addresses(lab: Lab, seed: int) -> None:
    """The others hear of its session on their connections alone, which have the scope of its address."""
    hosts = hosts_of(lab, None)
    hosts[0].isolate_one_way("out", match=UDP)
    assert ranks_of(hosts[::-1], f"link-local {seed}", pause=1.5) == [0, 1, 2]


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("percent", chosen([10], soak=[5]))
@pytest.mark.parametrize("seed", repeated(1, soak=20))
def test_the_first_leads_where_packets_are_lost(lab: Lab, percent: int, seed: int) -> None:
    hosts = hosts_of(lab)
    for host in hosts:
        host.drop(f'iifname != "lo" numgen random mod 100 < {percent}')
    assert ranks_of(hosts[::-1], f"loss {percent} {seed}") == [0, 1, 2]


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("dialer", "dialed", "ranks"), [(0, 2, [0, 1, 2]), (2, 0, [1, 0, 2])])
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_a_broken_mesh_is_proved_once(lab: Lab, seed: int, dialer: int, dialed: int, ranks: list[int]) -> None:
    """The first that all reach leads."""
    hosts = hosts_of(lab)
    hosts[dialed].drop(f"ip saddr {hosts[dialer].address()} {SYN}")
    began = time.monotonic()
    assert ranks_of(hosts[::-1], f"one way {seed} {dialer}", mesh="warn") == ranks
    assert time.monotonic() - began < ONE_PROOF_SECONDS
