"""Hosts whose packets leave from another address, or by another interface, than the one where they are reached."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.levels import repeated

from . import Host, Lab, Network, Rank
from .scenarios import TIMEOUT, results, train
from .test_election import assigned
from .torchrun_jobs import jobs

pytestmark = pytest.mark.timeout(300)


# --- routes that carry a source ---------------------------------------------------------------------------------------


def service_addresses(lab: Lab, count: int) -> list[Host]:
    """Hosts with an address on loopback, from which their packets leave: as with BGP down to the host."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(count)]
    for number, host in enumerate(hosts, start=1):
        own, interface = f"10.9.0.{number}", host.interface()
        host.ip(f"address add {own}/32 dev lo", f"route replace {network.ipv4} dev {interface} src {own}")
        for other in range(1, count + 1):
            if other != number:
                host.ip(f"route add 10.9.0.{other}/32 via {hosts[other - 1].address()} src {own}")
    return hosts


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_hosts_whose_routes_carry_a_service_address_form_a_mesh(lab: Lab, seed: int) -> None:
    hosts = service_addresses(lab, 3)
    ranks = [host.start(train, f"service {seed}", rank, 3, mesh="on") for rank, host in enumerate(hosts)]
    found = results(ranks)
    assert [result["sum"] for result in found] == [6] * 3
    assert [result["address"] for result in found] == [hosts[0].address(), "10.9.0.2", "10.9.0.3"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_torchrun_gives_places_to_nodes_whose_routes_carry_a_service_address(lab: Lab, seed: int) -> None:
    hosts = service_addresses(lab, 3)
    with jobs() as make:
        job = make(f"service-{seed}", "3", conf="last_call_timeout=3,mesh=on")
        job.start(*hosts)
        job.wait_for_group(hosts)
        job.finish(*hosts)


# --- two NICs in one subnet -------------------------------------------------------------------------------------------


def two_nics(lab: Lab, count: int, *, apart: bool = False) -> tuple[list[Host], Network]:
    """Hosts with eth0 and eth1 in one subnet: the kernel sends by eth0, whose route came first.

    Args:
        lab: makes them.
        count: how many.
        apart: whether the cables of eth1 lead to a switch of their own.
    """
    network = lab.network()
    other = lab.network(str(network.ipv4)) if apart else network
    hosts = [lab.host(network) for _ in range(count)]
    for number, host in enumerate(hosts, start=1):
        _, port = other.next_port()
        host.ip(
            f"link add eth1 type veth peer name {port} netns {other.namespace.path}",
            "link set eth1 up",
            f"address add {second(number)}/24 dev eth1",
        )
        other.plug(port)
        other.wait_forwarding([port])
    return hosts, network


def second(number: int) -> str:
    """Return the address of eth1 on a host."""
    return f"10.77.0.{100 + number}"


def start(hosts: list[Host], job_id: str, **variables: str) -> list[Rank[Any]]:
    """Start a rank on each host."""
    size = len(hosts)
    return [host.start(train, job_id, rank, size, mesh="on", env=variables) for rank, host in enumerate(hosts)]


@pytest.mark.soak
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "MINGLE_INTERFACE"])
@pytest.mark.parametrize("filtered", [0, 1])
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_the_second_nic_of_a_subnet_is_used_if_it_is_named(lab: Lab, variable: str, filtered: int, seed: int) -> None:
    """Also with a strict reverse path filter, which lets nothing in by eth1; the kernel's choice is said once."""
    hosts, _ = two_nics(lab, 3)
    for host in hosts:
        for name in ("all", "eth0", "eth1"):
            host.namespace.tool(["sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter={filtered}"])
    ranks = start(hosts, f"second {seed}", **{variable: "eth1"})
    found = results(ranks)
    assert [result["sum"] for result in found] == [6] * 3
    assert {result["interface"] for result in found} == {"eth1"}
    assert [result["address"] for result in found] == [second(number) for number in (1, 2, 3)]
    (said,) = [text for text in logged(ranks[1]) if "through eth0" in text]
    assert f"the kernel sends to {second(1)} through eth0, and eth1 was named" in said
    assert said.endswith(f"route each other node through eth1, as this one: sudo ip route add {second(1)}/32 dev eth1")


def logged(rank: Rank[Any]) -> list[str]:
    """Return what a rank has logged."""
    return [event["text"] for event in rank.events if event.name == "log"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_torchrun_uses_the_second_nic_of_a_subnet_if_it_is_named(lab: Lab, seed: int) -> None:
    hosts, _ = two_nics(lab, 3)
    with jobs() as make:
        job = make(f"second-{seed}", "3", conf="last_call_timeout=3,mesh=on")
        job.start(*hosts, GLOO_SOCKET_IFNAME="eth1")
        job.wait_for_group(hosts)
        job.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("ranks_are", ["given", "assigned"])
@pytest.mark.parametrize(
    "why", ["another switch", "another switch, and a rule", "no carrier", "no carrier, none named"]
)
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_a_nic_to_which_the_kernel_does_not_send_is_the_cause_and_what_is_printed_mends_it(
    lab: Lab, ranks_are: str, why: str, seed: int
) -> None:
    """torch binds no address, so it does not reach the others even where a rule leads mingle to them."""
    hosts, network = two_nics(lab, 2, apart=True)
    for number, host in enumerate(hosts, start=1):
        # The addresses of eth1 are not answered for on the switch of eth0.
        host.namespace.tool(["sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1"])
        if why.startswith("no carrier"):
            host.cut(network)
        if why.endswith("a rule"):
            host.ip(f"rule add from {second(number)} table 100", "route add 10.77.0.0/24 dev eth1 table 100")
    env = {} if why.endswith("none named") else {"MINGLE_INTERFACE": "eth1"}

    def begin(name: str, seconds: float) -> list[Rank[Any]]:
        arguments: dict[str, Any] = {"mesh": "on", "discovery_timeout": seconds, "env": env}
        if ranks_are == "assigned":
            return [host.start(assigned, name, 2, **arguments) for host in hosts]
        return [host.start(train, name, rank, 2, **arguments) for rank, host in enumerate(hosts)]

    ranks = begin(f"astray {seed}", 12.0)
    texts = [rank.error(2 * TIMEOUT).message for rank in ranks]
    print("\n\n".join(texts))
    causes = [text.partition("likely cause: ")[2] for text in texts]
    assert any("the kernel" in cause for cause in causes)
    assert not any("firewall" in cause for cause in causes if "the kernel" in cause)
    fixes = [
        "sudo ip link set eth0 down"
        if why.startswith("no carrier")
        else f"sudo ip route add {second(other)}/32 dev eth1"
        for other in (2, 1)
    ]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    assert any(fix in lines for fix in fixes), "on a line of its own"
    for host, fix in zip(hosts, fixes, strict=True):
        host.ip(fix.removeprefix("sudo ip "))
    assert {result["sum"] for result in results(begin(f"mended {seed}", TIMEOUT))} == {3}


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_a_detour_by_which_packets_arrive_is_not_blamed_for_a_filter(lab: Lab, seed: int) -> None:
    hosts, _ = two_nics(lab, 3)
    hosts[1].drop(f"meta l4proto tcp ip saddr {{ {hosts[2].address()}, {second(3)} }}")
    ranks = start(hosts, f"filtered {seed}", MINGLE_INTERFACE="eth1")
    for rank in ranks:
        cause = rank.error(2 * TIMEOUT).message.partition("likely cause: ")[2]
        assert "as host2 finds in its own firewall" in cause, cause
