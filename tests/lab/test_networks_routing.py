"""Hosts whose packets leave from another address, or by another interface, than the one where they are reached."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.levels import chosen

from . import Host, Lab, Network, Rank, report
from .scenarios import TIMEOUT, describe_and_stay, ranks_are, results, start_ranks
from .torchrun_jobs import MakeJob

pytestmark = [pytest.mark.timeout(300), pytest.mark.soak(3)]


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


@pytest.mark.parametrize("named", ["", "eth0"])
def test_hosts_whose_routes_carry_a_service_address_form_a_mesh(lab: Lab, named: str) -> None:
    hosts = service_addresses(lab, 3)
    env = {"MINGLE_INTERFACE": named or None}
    found = results(start_ranks(hosts, "service", mesh="on", env=env))
    assert [result["sum"] for result in found] == [6] * 3
    used = [host.address() for host in hosts] if named else [hosts[0].address(), "10.9.0.2", "10.9.0.3"]
    assert [result["address"] for result in found] == used


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
    return start_ranks(hosts, job_id, mesh="on", env=variables)


@pytest.mark.parametrize(
    ("variable", "filtered"),
    chosen(
        [("GLOO_SOCKET_IFNAME", 0), ("MINGLE_INTERFACE", 1)], soak=[("GLOO_SOCKET_IFNAME", 1), ("MINGLE_INTERFACE", 0)]
    ),
)
def test_the_second_nic_of_a_subnet_is_used_if_it_is_named(lab: Lab, variable: str, filtered: int) -> None:
    """Also with a strict reverse path filter, which lets nothing in by eth1; the kernel's choice is said once."""
    hosts, _ = two_nics(lab, 3)
    for host in hosts:
        for name in ("all", "eth0", "eth1"):
            host.namespace.tool(["sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter={filtered}"])
    ranks = start(hosts, "second", **{variable: "eth1"})
    found = results(ranks)
    assert [result["sum"] for result in found] == [6] * 3
    assert {result["interface"] for result in found} == {"eth1"}
    assert [result["address"] for result in found] == [second(number) for number in (1, 2, 3)]
    for rank, other in ((0, 2), (1, 1)):
        (said,) = [text for text in logged(ranks[rank]) if "through eth0" in text]
        assert f"the kernel sends to {second(other)} through eth0, and eth1 was named" in said
        assert said.endswith(f"through eth1, as this one: sudo ip route add {second(other)}/32 dev eth1")


def logged(rank: Rank[Any]) -> list[str]:
    """Return what a rank has logged."""
    return [event["text"] for event in rank.events if event.name == "log"]


def test_torchrun_uses_the_second_nic_of_a_subnet_if_it_is_named(lab: Lab, job: MakeJob) -> None:
    hosts, _ = two_nics(lab, 3)
    made = job("second", "3", conf="last_call_timeout=3,mesh=on")
    made.start(*hosts, GLOO_SOCKET_IFNAME="eth1")
    made.wait_for_group(hosts)
    made.finish(*hosts)


def test_hosts_with_rules_of_policy_routing_for_the_second_nic_form_a_job(lab: Lab) -> None:
    hosts, _ = two_nics(lab, 3)
    for number, host in enumerate(hosts, start=1):
        host.ip(f"rule add from {second(number)} table 100", "route add 10.77.0.0/24 dev eth1 table 100")
    found = results(start(hosts, "rules", MINGLE_INTERFACE="eth1"))
    assert {(result["sum"], result["interface"]) for result in found} == {(6, "eth1")}


@pytest.mark.parametrize(
    ("why", "given"),
    chosen(
        [("another switch, and a rule", False), ("no carrier, none named", True)],
        soak=[("another switch", True), ("no carrier", False)],
    ),
)
def test_a_nic_to_which_the_kernel_does_not_send_is_the_cause_and_what_is_printed_mends_it(
    lab: Lab, given: bool, why: str
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
        return start_ranks(hosts, name, given=given, mesh="on", discovery_timeout=seconds, env=env)

    ranks = begin("astray", 12.0)
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
    assert {result["sum"] for result in results(begin("mended", TIMEOUT))} == {3}


def test_a_detour_by_which_packets_arrive_is_not_blamed_for_a_filter(lab: Lab) -> None:
    hosts, _ = two_nics(lab, 3)
    hosts[1].drop(f"meta l4proto tcp ip saddr {{ {hosts[2].address()}, {second(3)} }}")
    ranks = start(hosts, "filtered", MINGLE_INTERFACE="eth1")
    for rank in ranks:
        cause = rank.error(2 * TIMEOUT).message.partition("likely cause: ")[2]
        assert "as host2 finds in its own firewall" in cause, cause


# --- a sidecar --------------------------------------------------------------------------------------------------------

SIDECAR = "127.0.0.6"
"""The address from which Istio's proxy connects to the program that it stands before."""


def sidecar(denied: Sequence[str]) -> None:
    """Take every TCP connection to this host, and make one from `SIDECAR`; close what a policy denies."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve(caller: socket.socket) -> None:
        _, port, address = struct.unpack_from("!HH4s", caller.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16))
        inner = socket.socket()
        inner.bind((SIDECAR, 0))
        try:
            inner.connect((socket.inet_ntoa(address), port))
        except OSError:
            caller.close()
            return
        threading.Thread(target=pump, args=(inner, caller), daemon=True).start()
        pump(caller, inner)

    with socket.create_server(("", 15006), backlog=128) as server:
        report("redirects")
        while True:
            caller, (address, _) = server.accept()
            if address in denied:
                caller.close()
            else:
                threading.Thread(target=serve, args=(caller,), daemon=True).start()


SO_ORIGINAL_DST = 80


def add_sidecar(host: Host, *denied: Host) -> None:
    """Put a sidecar before the programs of a host, whose policy denies connections of some others."""
    proxy = host.start(sidecar, [each.address() for each in denied])
    proxy.wait_for("redirects")
    rule = 'iifname != "lo" meta l4proto tcp redirect to :15006'
    host.namespace.nft(f"table ip sidecar {{ chain c {{ type nat hook prerouting priority dstnat; {rule}; }}; }}")


@pytest.mark.parametrize("given", chosen([False], soak=[True]), ids=ranks_are)
def test_a_mesh_is_proved_through_sidecars(lab: Lab, given: bool) -> None:
    hosts = lab.lan(3)
    for host in hosts:
        add_sidecar(host)
    ranks = start_ranks(hosts, "sidecar", given=given, mesh="on")
    assert [result["sum"] for result in results(ranks)] == [6] * 3
    assert not [text for rank in ranks for text in logged(rank) if "is not proved" in text]


def test_a_pair_that_the_policy_of_a_sidecar_closes_is_named(lab: Lab) -> None:
    hosts = lab.lan(3)
    for host in hosts:
        add_sidecar(host, *([hosts[2]] if host is hosts[1] else [hosts[1]] if host is hosts[2] else []))
    for rank in start(hosts, "policy"):
        error = rank.error(2 * TIMEOUT)
        assert error.name == "ConnectivityError"
        pairs, _, cause = error.message.partition("likely cause: ")
        assert "rank 1 on host host2" in pairs
        assert "rank 2 on host host3" in pairs
        assert "do not reach each other: TCP port" in pairs
        assert cause.startswith(f"a sidecar of a service mesh takes the connections (they come from {SIDECAR})"), cause


def test_what_address_translation_leaves_unproved_is_said_by_all_ranks(lab: Lab) -> None:
    inside, outside = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    router = lab.host(inside, outside, name="router")
    router.namespace.tool(["sysctl", "-qw", "net.ipv4.ip_forward=1"])
    router.namespace.nft(
        "table ip hide { chain c { type nat hook postrouting priority srcnat; oifname eth1 masquerade; }; }"
    )
    hosts = [lab.host(outside), lab.host(outside), lab.host(inside)]
    hosts[2].ip(f"route replace default via {router.address(inside)}")
    peers = [hosts[0].address()]  # the router carries no multicast
    ranks = [host.start(describe_and_stay, "hidden", rank, 3, peers=peers) for rank, host in enumerate(hosts)]
    for rank in ranks:
        rank.wait_for("formed", TIMEOUT)
        said = [text for text in logged(rank) if "is not proved" in text]
        assert len(said) == (2 if rank is ranks[0] else 1), "a warning on rank 0, and the line of the job"
        for text in said:
            assert f"rank 2 on host host4 (eth0), whose connections come from {router.address(outside)}" in text
