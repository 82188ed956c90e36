"""IPv6: hosts that have nothing else, hosts whose IPv4 is broken, and networks of link-local addresses alone."""

from __future__ import annotations

import pytest

from tests.support.levels import chosen

from . import Host, Lab
from .scenarios import results, start_ranks, train
from .torchrun_jobs import MakeJob

pytestmark = pytest.mark.timeout(600)


def test_every_door_on_hosts_without_ipv4(lab: Lab) -> None:
    hosts = lab.lan(3, None, ipv6="fd77::/64")
    ranks = [
        host.start(train, "doors", rank, 3, door=door)
        for rank, (host, door) in enumerate(zip(hosts, ["init", "env", "url"], strict=True))
    ]
    for result, host in zip(results(ranks), hosts, strict=True):
        assert result["sum"] == 6
        assert result["exported"]["MASTER_ADDR"] == hosts[0].address()
        assert result["exported"]["GLOO_SOCKET_IFNAME"] == host.interface()


def break_ipv4(hosts: list[Host], way_broken: str) -> None:
    """Leave the hosts of one network their IPv4 addresses, which lead nowhere: an error at once, or no answer."""
    for number, host in enumerate(hosts, start=1):
        if way_broken == "dropped":
            host.drop('meta nfproto ipv4 iifname != "lo"')
        else:
            host.ip("address flush dev eth0 scope global", "route flush dev eth0")
            host.ip(f"address add 10.{number}.0.1/24 dev eth0", f"address add fd77::{number}/64 dev eth0 nodad")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("way_broken", "door"),
    chosen([("dropped", "init"), ("no route", "env")], soak=[("dropped", "env"), ("no route", "init")]),
)
def test_dual_stack_with_ipv4_broken(lab: Lab, way_broken: str, door: str) -> None:
    hosts = lab.lan(3, ipv6="fd77::/64")
    break_ipv4(hosts, way_broken)
    for result, host in zip(results(start_ranks(hosts, "dual", door=door)), hosts, strict=True):
        assert result["sum"] == 6
        assert (result["interface"], result["address"]) == ("eth0", host.address(family=6))
        assert result["master_addr"] == hosts[0].address(family=6)


def test_link_local_addresses_alone(lab: Lab) -> None:
    """The scope of such an address is the receiver's own interface, and never the sender's."""
    first, second = lab.network(None), lab.network(None)
    hosts = [
        lab.host(first, second, interfaces=("eth0", "eth1")),
        lab.host(first, interfaces=("lan0",)),
        lab.host(first, second, interfaces=("up0", "up1")),
    ]
    for result, host in zip(results(start_ranks(hosts, "link")), hosts, strict=True):
        assert result["sum"] == 6
        assert result["interface"] == host.interface(first)
        assert result["address"].startswith("fe80:")


def routed_to_the_host(lab: Lab, count: int) -> list[Host]:
    """Hosts as in a fabric that is routed down to them: a service address on lo, and link-local ones on the port."""
    hosts = lab.lan(count, None)
    for number, host in enumerate(hosts, start=1):
        host.ip(f"address add 10.9.0.{number}/32 dev lo", f"address add fe80::{number}/64 dev eth0 nodad")
    for host in hosts:
        for number, other in enumerate(hosts, start=1):
            if other is not host:
                host.ip(f"route add 10.9.0.{number}/32 via inet6 fe80::{number} dev eth0")
    return hosts


@pytest.mark.soak(3)
@pytest.mark.parametrize(
    ("way", "door"), chosen([("multicast", "env"), ("peers", "init")], soak=[("multicast", "init"), ("peers", "env")])
)
def test_a_service_address_on_loopback_is_used(lab: Lab, way: str, door: str) -> None:
    hosts = routed_to_the_host(lab, 3)
    peers = None
    if way == "peers":
        peers = [f"10.9.0.{number}" for number in range(1, 4)]
        for host in hosts:
            host.drop_multicast()
    ranks = start_ranks(hosts, "service", door=door, peers=peers)
    for number, result in enumerate(results(ranks), start=1):
        assert (result["sum"], result["master_addr"], result["address"]) == (6, "10.9.0.1", f"10.9.0.{number}")


def test_a_service_address_on_loopback_is_used_where_ranks_are_assigned(lab: Lab) -> None:
    found = results(start_ranks(routed_to_the_host(lab, 3), "service", given=False))
    assert sorted(result["address"] for result in found) == ["10.9.0.1", "10.9.0.2", "10.9.0.3"]


# --- torchrun ---------------------------------------------------------------------------------------------------------


def test_torchrun_on_hosts_without_ipv4(lab: Lab, job: MakeJob) -> None:
    hosts = lab.lan(2, None, ipv6="fd77::/64")
    made = job("six", "2")
    made.start(*hosts)
    made.wait_for_group(hosts)
    for host in hosts:
        environment = made.said(host, "started")[0]["environment"]
        assert environment["MASTER_ADDR"] in {each.address() for each in hosts}
        assert environment["GLOO_SOCKET_IFNAME"] == host.interface()
    made.finish(*hosts)


def test_torchrun_on_link_local_addresses_alone(lab: Lab, job: MakeJob) -> None:
    """Two machines joined by one cable: the zone of the store's address is each worker's own interface."""
    cable = lab.network(None)
    hosts = [lab.host(cable, interfaces=(name,)) for name in ("eth0", "lan0")]
    made = job("cable", "2")
    made.start(*hosts)
    made.wait_for_group(hosts)
    for host in hosts:
        environment = made.said(host, "started")[0]["environment"]
        assert environment["MASTER_ADDR"].startswith("fe80:")
        assert environment["MASTER_ADDR"].endswith(f"%{host.interface()}")
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("way_broken", chosen(["dropped"], soak=["no route"]))
def test_torchrun_on_a_dual_stack_with_ipv4_broken(lab: Lab, job: MakeJob, way_broken: str) -> None:
    """Gloo prefers IPv4, and the workers, which know nothing of mingle, train all the same."""
    hosts = lab.lan(2, ipv6="fd77::/64")
    break_ipv4(hosts, way_broken)
    made = job("dual", "2")
    made.start(*hosts)
    made.wait_for_group(hosts)
    masters = {said["environment"]["MASTER_ADDR"] for host in hosts for said in made.said(host, "started")}
    assert len(masters) == 1
    assert masters <= {host.address(family=6) for host in hosts}
    made.finish(*hosts)
