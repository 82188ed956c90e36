"""IPv6: hosts that have nothing else, hosts whose IPv4 is broken, and networks of link-local addresses alone."""

from __future__ import annotations

import pytest

from tests.support.levels import chosen, repeated
from tests.support.loopback import longer

from . import Host, Lab, Process
from .scenarios import hold, results, train
from .test_election import assigned
from .test_election import check as check_assigned


def ipv6_only(lab: Lab, count: int) -> list[Host]:
    network = lab.network(None, ipv6="fd77::/64")
    return [lab.host(network) for _ in range(count)]


@pytest.mark.soak
@pytest.mark.parametrize("family", chosen([None], soak=["6"]))
def test_hosts_without_ipv4_and_ranks_assigned(lab: Lab, family: str | None) -> None:
    hosts = ipv6_only(lab, 3)
    check_assigned(results([host.start(assigned, "six", 3, family=family) for host in hosts]), hosts)


def test_every_door_on_hosts_without_ipv4(lab: Lab) -> None:
    hosts = ipv6_only(lab, 3)
    ranks = [
        host.start(train, "doors", rank, 3, door=door)
        for rank, (host, door) in enumerate(zip(hosts, ["init", "env", "url"], strict=True))
    ]
    for result, host in zip(results(ranks), hosts, strict=True):
        assert result["sum"] == 6
        assert result["exported"]["MASTER_ADDR"] == hosts[0].address()
        assert result["exported"]["GLOO_SOCKET_IFNAME"] == host.interface()


def test_the_commands_on_hosts_without_ipv4(lab: Lab) -> None:
    hosts = ipv6_only(lab, 3)
    ranks = [host.start(hold, "six", rank, 2) for rank, host in enumerate(hosts[:2])]
    for rank in ranks:
        rank.wait_for("running")

    def listing(seconds: float) -> Process:
        command = hosts[2].run(["python", "-m", "mingle", "list", "--timeout", f"{seconds:g}"])
        command.wait(60)
        return command

    found = hosts[2].run(["python", "-m", "mingle", "find", "six", "--timeout", "30"])
    assert found.wait(60) == 0, found.output
    assert found.stdout.startswith(f"[{hosts[0].address()}]:")
    listed = longer(listing, lambda command: f"[{hosts[0].address()}]" in command.stdout)
    assert listed.wait() == 0, listed.output
    assert "six" in listed.stdout
    assert f"[{hosts[0].address()}]" in listed.stdout


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
    network = lab.network(ipv6="fd77::/64")
    hosts = [lab.host(network) for _ in range(3)]
    break_ipv4(hosts, way_broken)
    ranks = [host.start(train, "dual", rank, 3, door=door) for rank, host in enumerate(hosts)]
    for result, host in zip(results(ranks), hosts, strict=True):
        assert result["sum"] == 6
        assert (result["interface"], result["address"]) == ("eth0", host.address(family=6))
        assert result["master_addr"] == hosts[0].address(family=6)


def test_one_family_alone_is_used_if_named(lab: Lab) -> None:
    network = lab.network(ipv6="fd77::/64")
    hosts = [lab.host(network) for _ in range(2)]
    ranks = [host.start(train, "family", rank, 2, env={"MINGLE_FAMILY": "6"}) for rank, host in enumerate(hosts)]
    for result, host in zip(results(ranks), hosts, strict=True):
        assert result["sum"] == 3
        assert (result["address"], result["master_addr"]) == (host.address(family=6), hosts[0].address(family=6))


def test_link_local_addresses_alone(lab: Lab) -> None:
    """The scope of such an address is the receiver's own interface, and never the sender's."""
    first, second = lab.network(None), lab.network(None)
    hosts = [
        lab.host(first, second, interfaces=("eth0", "eth1")),
        lab.host(first, interfaces=("lan0",)),
        lab.host(first, second, interfaces=("up0", "up1")),
    ]
    ranks = [host.start(train, "link", rank, 3) for rank, host in enumerate(hosts)]
    for result, host in zip(results(ranks), hosts, strict=True):
        assert result["sum"] == 6
        assert result["interface"] == host.interface(first)
        assert result["address"].startswith("fe80:")


def routed_to_the_host(lab: Lab, count: int) -> list[Host]:
    """Hosts as in a fabric that is routed down to them: a service address on lo, and link-local ones on the port."""
    fabric = lab.network(None)
    hosts = [lab.host(fabric) for _ in range(count)]
    for number, host in enumerate(hosts, start=1):
        host.ip(f"address add 10.9.0.{number}/32 dev lo", f"address add fe80::{number}/64 dev eth0 nodad")
    for host in hosts:
        for number, other in enumerate(hosts, start=1):
            if other is not host:
                host.ip(f"route add 10.9.0.{number}/32 via inet6 fe80::{number} dev eth0")
    return hosts


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize(
    ("way", "door"), chosen([("multicast", "env"), ("peers", "init")], soak=[("multicast", "init"), ("peers", "env")])
)
def test_a_service_address_on_loopback_is_used(lab: Lab, way: str, door: str, seed: int) -> None:
    hosts = routed_to_the_host(lab, 3)
    peers = None
    if way == "peers":
        peers = [f"10.9.0.{number}" for number in range(1, 4)]
        for host in hosts:
            host.drop_multicast()
    ranks = [host.start(train, f"service {seed}", rank, 3, door=door, peers=peers) for rank, host in enumerate(hosts)]
    for number, result in enumerate(results(ranks), start=1):
        assert (result["sum"], result["master_addr"], result["address"]) == (6, "10.9.0.1", f"10.9.0.{number}")


def test_a_service_address_on_loopback_is_used_where_ranks_are_assigned(lab: Lab) -> None:
    hosts = routed_to_the_host(lab, 3)
    found = results([host.start(assigned, "service", 3) for host in hosts])
    assert sorted(result["address"] for result in found) == ["10.9.0.1", "10.9.0.2", "10.9.0.3"]
