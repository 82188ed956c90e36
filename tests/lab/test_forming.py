"""Ranks on several hosts, told no address, find each other: in any order, through any door, under loss."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pytest

from mingle.config import placement
from tests.support.levels import chosen

from . import Lab
from .scenarios import formed, results, start_ranks, train


def random_start(seed: int, world_size: int) -> list[tuple[int, float]]:
    """The ranks in the order of their starts, each with the seconds since the one before it."""
    rng = random.Random(seed)
    starts = sorted(rng.uniform(0, 3) for _ in range(world_size))
    gaps = [later - earlier for earlier, later in itertools.pairwise([starts[0], *starts])]
    return list(zip(rng.sample(range(world_size), world_size), gaps, strict=True))


@pytest.mark.quick
@pytest.mark.soak(5)
@pytest.mark.parametrize(
    ("machines", "per_machine", "lost"),
    chosen([(4, 1, 0), pytest.param(4, 1, 50, marks=pytest.mark.slow)], soak=[(2, 4, 0), (4, 1, 70)]),
)
def test_any_order_of_starts(lab: Lab, machines: int, per_machine: int, lost: int, seed: int) -> None:
    hosts = [host for host in lab.lan(machines) for _ in range(per_machine)]
    for host in hosts[::per_machine] if lost else []:
        host.drop_udp(lost)
    ranks = {}
    for rank, gap in random_start(seed, len(hosts)):
        threading.Event().wait(gap)  # the scenario itself: people don't start machines at the same moment
        ranks[rank] = hosts[rank].start(train, "order", rank, len(hosts))
    formed([ranks[rank] for rank in range(len(hosts))], hosts)


def train_on_a_clone(job_id: str, rank: int, world_size: int) -> dict[str, Any]:
    """Train on a machine whose boot id and namespaces look like those of every other machine."""
    placement._NAMESPACES = "/no/such/directory"
    return train(job_id, rank, world_size)


@pytest.mark.quick
def test_clones_of_one_machine_are_different_nodes(lab: Lab) -> None:
    network, other = lab.network(), lab.network("10.78.0.0/24")
    machines = [lab.host(network, other), lab.host(network), lab.host(network, other)]
    for machine in machines:
        machine.ip("address add 172.17.0.1/16 dev lo")
    hosts = [machines[0], machines[1], machines[1], machines[2]]
    formed([host.start(train_on_a_clone, "clones", rank, len(hosts)) for rank, host in enumerate(hosts)], hosts)


def test_one_door_per_rank_and_job_ids_in_any_script(lab: Lab) -> None:
    hosts = lab.lan(3)
    orders = (("init", "env", "url"), ("env", "url", "init"), ("url", "init", "env"))
    for doors, job_id in zip(orders, ("doors", "a job/with tränen-任务", "ü" * 128), strict=True):
        ranks = [
            host.start(train, job_id, rank, 3, door=door)
            for rank, (host, door) in enumerate(zip(hosts, doors, strict=True))
        ]
        for host, result in zip(hosts, results(ranks), strict=True):
            assert result["sum"] == 6
            assert result["exported"]["MASTER_ADDR"] == hosts[0].address()
            assert result["exported"]["GLOO_SOCKET_IFNAME"] == host.interface()


def test_a_host_with_only_loopback(lab: Lab) -> None:
    for result in results(start_ranks([lab.host()] * 3, "lonely")):
        assert result["sum"] == 6
        assert (result["master_addr"], result["interface"]) == ("127.0.0.1", "lo")
