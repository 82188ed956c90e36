"""Hosts with several networks: the right one is found without being told, and NICs may come and go."""

from __future__ import annotations

import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.levels import chosen

from . import Host, Lab, Network, Rank, report
from .scenarios import (
    TIMEOUT,
    describe_and_stay,
    failure,
    formed,
    ranks_are,
    results,
    start_ranks,
    timed,
    train,
    wait_for_log,
)

DOCKER = "172.17.0.1"
"""Docker gives this address to the bridge docker0 of every machine."""


def answer_everybody() -> None:
    """Accept whatever connects to this host's docker0, and never say a word."""
    with socket.create_server((DOCKER, 7000)) as server:
        report("listening")
        callers = []
        while True:
            callers.append(server.accept()[0])


def add_docker(host: Host) -> None:
    """Give a host what Docker makes of it, with somebody behind every TCP port of the bridge's address."""
    host.ip("link add docker0 type bridge", f"address add {DOCKER}/16 dev docker0", "link set docker0 up")
    host.namespace.nft(
        f"table ip docker {{\nchain output {{\ntype nat hook output priority -100;\n"
        f"ip daddr {DOCKER} meta l4proto tcp redirect to :7000\n}}\n}}\n"
    )
    host.start(answer_everybody).wait_for("listening")


def three_networks(lab: Lab) -> tuple[Network, Network, list[Host]]:
    """Four hosts: a network that only some share, one for management, a fast one, and docker0."""
    some, management, fast = (lab.network(f"10.{net}.0.0/24") for net in (60, 70, 80))
    hosts = []
    for number in range(4):
        networks = (some, management, fast) if number != 2 else (management, fast)
        names = ("some0", "mgmt0", "fast0") if number != 2 else ("mgmt0", "fast0")
        hosts.append(lab.host(*networks, interfaces=names))
        add_docker(hosts[-1])
    return management, fast, hosts


@pytest.mark.quick
@pytest.mark.soak(3)
@pytest.mark.parametrize("given", chosen([False], soak=[True]), ids=ranks_are)
def test_a_network_that_all_share_is_chosen_among_many(lab: Lab, given: bool) -> None:
    management, _, hosts = three_networks(lab)
    found = results(start_ranks(hosts, "many", given=given))
    for result, host in zip(found, hosts, strict=True):
        assert result["sum"] == 10
        assert result["interface"] == "mgmt0", "the first of the two that all share"
        assert result["address"] == host.address(management)
        assert result["exported"]["GLOO_SOCKET_IFNAME"] == "mgmt0"
        assert result["exported"]["NCCL_SOCKET_IFNAME"] is None
    host_zero = hosts[[result["rank"] for result in found].index(0)]
    assert {result["master_addr"] for result in found} == {host_zero.address(management)}
    assert max(result["elapsed"] for result in found) < 20


@pytest.mark.parametrize("names", [{0}, {1, 2, 3}], ids=["rank 0", "the others"])
def test_the_named_interface_is_used(lab: Lab, names: set[int]) -> None:
    _, fast, hosts = three_networks(lab)
    ranks = [
        host.start(train, "named", rank, 4, env={"MINGLE_INTERFACE": "fast0"} if rank in names else None)
        for rank, host in enumerate(hosts)
    ]
    for rank, (result, host) in enumerate(zip(results(ranks), hosts, strict=True)):
        assert result["sum"] == 10
        assert (result["interface"], result["address"]) == ("fast0", host.address(fast))
        assert result["master_addr"] == hosts[0].address(fast)
        assert result["exported"]["GLOO_SOCKET_IFNAME"] == result["exported"]["TP_SOCKET_IFNAME"] == "fast0"
        assert result["exported"]["NCCL_SOCKET_IFNAME"] == ("=fast0" if rank in names else None)


def test_a_vpn_that_all_share_comes_after_the_network(lab: Lab) -> None:
    """A tunnel is everybody's subnet, and the cables are not; they are routed."""
    tunnel, cables = lab.network("10.99.0.0/24"), lab.network("10.10.0.0/16")
    hosts = [lab.host(tunnel, cables, interfaces=("wg0", "eth0")) for _ in range(3)]
    for host in hosts:
        # Each in a subnet of its own, behind a router that knows all of them: here, the wire itself.
        address = host.address(cables)
        host.ip(
            f"address del {address}/16 dev eth0",
            f"address add {address}/32 dev eth0",
            "route add 10.10.0.0/16 dev eth0",
        )
    for result in results(start_ranks(hosts, "tunnel")):
        assert (result["sum"], result["interface"]) == (6, "eth0")


# --- the links of containers ------------------------------------------------------------------------------------------

FILES = 1024
"""The usual limit of open files."""


def add_pods(lab: Lab, host: Host, prefix: str) -> None:
    """Give a host what a network plugin of Kubernetes makes: the ends of links to 250 pods, without a subnet."""
    pods = lab.host()
    names = [f"{prefix}{number:04x}" for number in range(250)]
    host.ip(*(f"link add {name} type veth peer name pod-{name} netns {pods.namespace.path}" for name in names))
    host.ip(*(f"link set {name} address ee:ee:ee:ee:ee:ee up" for name in names))
    pods.ip(*(f"link set pod-{name} up" for name in names))


def open_files(rank: Rank[Any]) -> int:
    return len(list(Path(f"/proc/{rank.pid}/fd").iterdir()))


def datagrams_sent(host: Host) -> int:
    """Return what the host's kernel has counted of both families."""
    ipv4 = [line.split() for line in host.namespace.tool(["cat", "/proc/net/snmp"]).splitlines()]
    names, values = (line for line in ipv4 if line[0] == "Udp:")
    ipv6 = dict(line.split() for line in host.namespace.tool(["cat", "/proc/net/snmp6"]).splitlines())
    return int(values[names.index("OutDatagrams")]) + int(ipv6["Udp6OutDatagrams"])


def with_few_files(job_id: str, rank: int, world_size: int) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    return train(job_id, rank, world_size)


@pytest.mark.soak(3)
def test_the_links_of_250_pods_cost_nothing(lab: Lab) -> None:
    hosts = lab.lan(2)
    add_pods(lab, hosts[0], "cali")
    ranks = [host.start(with_few_files, job_id, 0, 2) for host, job_id in zip(hosts, ("pods", "none"), strict=True)]
    for rank in ranks:
        wait_for_log(rank, "open, 1/2 joined")
    before = [datagrams_sent(host) for host in hosts]
    threading.Event().wait(5)
    crowded, plain = (datagrams_sent(host) - count for host, count in zip(hosts, before, strict=True))
    assert crowded < 3 * plain, "either may have had one more turn"
    assert open_files(ranks[0]) <= open_files(ranks[1]) + 2
    formed([ranks[0], hosts[1].start(with_few_files, "pods", 1, 2)], hosts)


@pytest.mark.soak(3)
def test_more_interfaces_than_files_leave_out_those_that_are_not_the_network(lab: Lab) -> None:
    """As before, with a plugin whose names mingle does not know, and a card that comes after all of them."""
    network = lab.network()
    hosts = [lab.host(), lab.host(network)]
    add_pods(lab, hosts[0], "unknown")
    hosts[0].attach(network)
    ranks = [host.start(with_few_files, "many", rank, 2) for rank, host in enumerate(hosts)]
    wait_for_log(ranks[0], "the limit of open files has no room for")
    for result in results(ranks):
        assert (result["sum"], result["interface"]) == (3, "eth0")


# --- NICs that come and go -------------------------------------------------------------------------------------------


@pytest.mark.soak(3)
@pytest.mark.parametrize("whose", chosen(["all"], soak=["rank 0", "a waiting rank"]))
@pytest.mark.parametrize(
    ("how", "seconds"), chosen([("down and up", 3), ("another", 3)], soak=[("another", 0), ("another", 14)])
)
def test_a_nic_goes_and_comes_while_ranks_wait(lab: Lab, whose: str, how: str, seconds: float) -> None:
    """Another one has another name and address, as that of a container has that is moved.

    It comes before the first one is seen to be gone, after that, and after it is lost.
    """
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    ranks = [hosts[rank].start(train, "moved", rank, 3) for rank in range(2)]
    wait_for_log(ranks[0], "2/3 joined")
    moved = {"rank 0": hosts[:1], "a waiting rank": hosts[1:2], "all": hosts[:2]}[whose]
    for host in moved:
        if how == "another":
            host.detach()
        else:
            host.ip(f"link set {host.interface()} down")
    threading.Event().wait(seconds)
    for host in moved:
        if how == "another":
            host.attach(network)
        else:
            host.ip(f"link set {host.interface()} up", f"route add default dev {host.interface()}")
            network.wait_forwarding([host.nic().port])
    ranks.append(hosts[2].start(train, "moved", 2, 3))
    formed(ranks, hosts)


@pytest.mark.soak(3)
def test_a_nic_that_appears_while_ranks_wait_is_used(lab: Lab) -> None:
    """The ranks that share the first network wait for one that is on the second only."""
    first, second = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    hosts = [lab.host(first), lab.host(first), lab.host(second)]
    ranks = start_ranks(hosts, "new")
    wait_for_log(ranks[0], "2/3 joined")
    for host in hosts[:2]:
        host.attach(second)
    for result, host in zip(results(ranks), hosts, strict=True):
        assert (result["sum"], result["master_addr"]) == (6, hosts[0].address(second))
        assert (result["interface"], result["address"]) == (host.interface(second), host.address(second))


# --- one subnet on two ports -----------------------------------------------------------------------------------------


def joined_by_a_cable(lab: Lab, first: int) -> list[Host]:
    """Two machines whose ports all have addresses of 169.254.0.0/16: the first ``first`` send those out of eth0.

    eth0 leads to a controller of each machine's own, and eth1 to the other machine.
    """
    cable = lab.network(None, link_local=False)
    hosts = [lab.host(lab.network(None, link_local=False), cable) for _ in range(2)]
    for number, host in enumerate(hosts, start=1):
        ports = ("eth0", "eth1") if number <= first else ("eth1", "eth0")
        host.ip(*(f"address add 169.254.{port[-1]}.{number}/16 dev {port}" for port in ports))
    return hosts


@pytest.mark.soak(3)
@pytest.mark.parametrize("astray", chosen([1], soak=[2]), ids=lambda astray: "both" if astray == 2 else "rank 0")
def test_packets_that_leave_by_another_interface_are_named_with_the_route(lab: Lab, astray: int) -> None:
    hosts = joined_by_a_cable(lab, astray)
    ranks = [host.start(timed, "astray", rank, 2, discovery_timeout=15) for rank, host in enumerate(hosts)]
    errors = [failure(rank, 15).message for rank in ranks]
    # The packets of the other one leave by the cable, and no answer comes.
    for number, (host, error) in enumerate(zip(hosts[:astray], errors, strict=False)):
        other = f"169.254.1.{2 - number}"
        fact = f"the kernel sends to {other} through eth0, and {other} was heard on eth1"
        assert fact in next(line for line in error.splitlines() if "likely cause:" in line)
        (route,) = (line.strip() for line in error.splitlines() if line.strip().startswith("sudo ip route add"))
        host.ip(route.removeprefix("sudo ip "))
    assert [result["sum"] for result in results(start_ranks(hosts, "cable"))] == [3, 3]


# --- machines that go offline ----------------------------------------------------------------------------------------


@pytest.mark.soak(3)
def test_ranks_of_a_machine_that_is_offline_meet_and_the_others_come_later(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network), lab.host(network)]
    ranks = [hosts[0].start(train, "offline", 0, 3)]
    wait_for_log(ranks[0], "open, 1/3 joined")
    hosts[0].detach()
    ranks.append(hosts[0].start(train, "offline", 1, 3))
    wait_for_log(ranks[0], "2/3 joined")
    hosts[0].attach(network, "eth0")
    ranks.append(hosts[1].start(train, "offline", 2, 3))
    formed(ranks, [hosts[0], *hosts])


def test_a_rank_whose_machine_goes_offline_says_so(lab: Lab) -> None:
    """Four machines that know nothing of each other, each in its own way."""
    ways = ("is down", "has lost its addresses", "has gone", "has no carrier")
    hosts = {way: lab.host(lab.network()) for way in ways}
    ranks = {way: host.start(timed, "offline", 0, 2, discovery_timeout=12) for way, host in hosts.items()}
    for rank in ranks.values():
        rank.wait_for("log", TIMEOUT)
    hosts["is down"].ip("link set eth0 down")
    hosts["has lost its addresses"].ip("address flush dev eth0")
    hosts["has gone"].detach()
    hosts["has no carrier"].cut()
    for way, rank in ranks.items():
        message = failure(rank, 12).message
        assert f"likely cause: this machine is offline: eth0 {way}" in message
        assert f" ({way})" in message, "the interfaces of the report, too"


# --- address translation -------------------------------------------------------------------------------------------


def test_rank_0_behind_address_translation(lab: Lab) -> None:
    """Rank 0 sits behind a router that hides its address, and announces the router's."""
    inside, outside = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    router = lab.host(inside, outside, name="router")
    hosts = [lab.host(inside), lab.host(outside), lab.host(outside)]
    public = router.address(outside)
    router.forward(f"ip daddr {public} dnat to {hosts[0].address()}")
    hosts[0].ip(f"route replace default via {router.address(inside)}")
    for host in hosts[1:]:
        host.ip("route del default")  # else it would look for rank 0's own address on its own wire
    ranks = [hosts[0].start(describe_and_stay, "nat", 0, 3, advertise=public)]
    ranks += [
        host.start(describe_and_stay, "nat", rank, 3, peers=[public]) for rank, host in enumerate(hosts[1:], start=1)
    ]
    found = [rank.wait_for("formed") for rank in ranks]
    assert [result["master_addr"] for result in found] == [hosts[0].address(), public, public]
    assert {result["exported"]["MASTER_PORT"] for result in found} == {found[0]["exported"]["MASTER_PORT"]}
    for result, host in zip(found, hosts, strict=True):
        assert (result["interface"], result["address"]) == (host.interface(), host.address())
