"""Ranks on several hosts, told no address, find each other: in any order, through any door, under loss."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from mingle.config import placement
from tests.support.levels import chosen, repeated

from . import UDP, Host, Lab, Rank
from .host import Direction
from .scenarios import check, results, train


def start_in_order(hosts: list[Host], job_id: str, order: list[int], gaps: list[float]) -> list[Rank[dict[str, Any]]]:
    """Start rank ``order[0]`` first; ``gaps`` are the seconds before each further one."""
    ranks: dict[int, Rank[dict[str, Any]]] = {}
    pause = threading.Event()
    for rank, gap in zip(order, gaps, strict=True):
        pause.wait(gap)  # the scenario itself: people don't start machines at the same moment
        ranks[rank] = hosts[rank].start(train, job_id, rank, len(hosts))
    return [ranks[rank] for rank in range(len(hosts))]


def random_start(seed: int, world_size: int) -> tuple[list[int], list[float]]:
    rng = random.Random(seed)
    order = list(range(world_size))
    rng.shuffle(order)
    starts = sorted(rng.uniform(0, 3) for _ in order)
    return order, [later - earlier for earlier, later in itertools.pairwise([starts[0], *starts])]


@pytest.mark.quick
@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize(("machines", "per_machine"), chosen([(4, 1)], soak=[(2, 4)]))
def test_any_order_of_starts(lab: Lab, machines: int, per_machine: int, seed: int) -> None:
    network = lab.network()
    hosts = [host for _ in range(machines) for host in [lab.host(network)] * per_machine]
    order, gaps = random_start(seed, len(hosts))
    ranks = start_in_order(hosts, f"order {seed}", order, gaps)
    check(results(ranks), hosts, hosts[0])


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("percent", chosen([50], soak=[30]))
def test_loss_at_every_receiver(lab: Lab, percent: int, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    for host in hosts:
        host.drop_udp(percent)
    order, gaps = random_start(1000 + seed, 4)
    ranks = start_in_order(hosts, "loss", order, [gap / 3 for gap in gaps])
    check(results(ranks), hosts, hosts[0])


def train_on_a_clone(job_id: str, rank: int, world_size: int) -> dict[str, Any]:
    """Train on a machine whose boot id and namespaces look like those of every other machine."""
    placement._NAMESPACES = "/no/such/directory"
    return train(job_id, rank, world_size)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize(("victim", "direction"), chosen([(0, "out"), (1, "in")], soak=[(0, "in"), (1, "out")]))
def test_multicast_that_passes_one_way_only(lab: Lab, victim: int, direction: Direction, seed: int) -> None:
    """A host that hears none, or that none hears; unicast and TCP pass."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    hosts[victim].isolate_one_way(direction, match=f"meta pkttype multicast {UDP}")
    order, gaps = random_start(2000 + seed, 4)
    ranks = start_in_order(hosts, f"one way {seed}", order, gaps)
    found = results(ranks)
    check(found, hosts, hosts[0])
    print(f"GO after {min(result['elapsed'] for result in found):.1f} s of the last one's time")


@pytest.mark.quick
def test_clones_of_one_machine_are_different_nodes(lab: Lab) -> None:
    network, other = lab.network(), lab.network("10.78.0.0/24")
    machines = [lab.host(network, other), lab.host(network), lab.host(network, other)]
    for machine in machines:
        machine.ip("address add 172.17.0.1/16 dev lo")
    hosts = [machines[0], machines[1], machines[1], machines[2]]
    ranks = [host.start(train_on_a_clone, "clones", rank, len(hosts)) for rank, host in enumerate(hosts)]
    check(results(ranks), hosts, hosts[0])


def test_one_door_per_rank(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    for doors in itertools.islice(itertools.permutations(["init", "env", "url"]), 0, 6, 2):
        ranks = [
            host.start(train, "doors", rank, 3, door=door)
            for rank, (host, door) in enumerate(zip(hosts, doors, strict=True))
        ]
        for rank, result in enumerate(results(ranks)):
            assert result["sum"] == 6
            assert result["exported"]["MASTER_ADDR"] == hosts[0].address()
            assert result["exported"]["GLOO_SOCKET_IFNAME"] == hosts[rank].interface()


@pytest.mark.soak
@pytest.mark.parametrize("job_id", chosen(["a job/with tränen-任务"], soak=["ü" * 128]))
def test_job_ids_in_any_script(lab: Lab, job_id: str) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    ranks = [
        host.start(train, job_id, rank, 3, door=door)
        for rank, (host, door) in enumerate(zip(hosts, ["init", "env", "url"], strict=True))
    ]
    assert [result["sum"] for result in results(ranks)] == [6, 6, 6]


def test_a_host_with_only_loopback(lab: Lab) -> None:
    host = lab.host()
    ranks = [host.start(train, "lonely", rank, 3) for rank in (2, 1, 0)]
    for result in results(ranks):
        assert result["sum"] == 6
        assert (result["master_addr"], result["interface"]) == ("127.0.0.1", "lo")


def test_one_rank_sends_no_packet(lab: Lab) -> None:
    # Without IPv6 link-local addresses, which the kernel announces by itself.
    host = lab.host(lab.network(link_local=False))
    before = host.start(transmitted, host.interface()).result()
    assert host.start(train, "alone", 0, 1).result()["sum"] == 1
    assert host.start(transmitted, host.interface()).result() == before


def transmitted(interface: str) -> int:
    """Return how many packets have left by an interface of this host."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[9])
    raise LookupError(interface)


def test_a_foreign_address_in_the_environment_is_replaced(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    ranks = [
        hosts[0].start(train, "foreign", 0, 2, env={"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}),
        hosts[1].start(train, "foreign", 1, 2, env={"MASTER_PORT": "29500"}),
    ]
    check(results(ranks), hosts, hosts[0])


@pytest.mark.quick
def test_without_multicast_peers_are_asked(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    for host in hosts:
        host.drop("ip daddr 224.0.0.0/4")
    ranks = [host.start(train, "peers", rank, 3, peers=[hosts[0].address()]) for rank, host in enumerate(hosts)]
    check(results(ranks), hosts, hosts[0])
