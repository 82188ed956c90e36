"""Hosts with several networks: the right one is found without being told, and NICs may come and go."""

from __future__ import annotations

import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import mingle
from tests.support.levels import chosen, repeated

from . import Host, Lab, Network, Rank, report
from .scenarios import TIMEOUT, describe, results, train, wait_for_log
from .test_election import assigned
from .test_timeouts import failure, timed

DOCKER = "172.17.0.1"
"""Docker gives this address to the bridge docker0 of every machine."""


def answer_everybody() -> None:
    """Accept whatever connects to this host's docker0, and never say a word."""
    with socket.create_server((DOCKER, 7000)) as server:
        report("listening")
        callers = []
        while True:
            callers.append(server.accept()[0])


def add_docker(host: Host) -> Rank[None]:
    """Give a host what Docker makes of it, with somebody behind every TCP port of the bridge's address."""
    host.ip("link add docker0 type bridge", f"address add {DOCKER}/16 dev docker0", "link set docker0 up")
    host.namespace.nft(
        f"table ip docker {{\nchain output {{\ntype nat hook output priority -100;\n"
        f"ip daddr {DOCKER} meta l4proto tcp redirect to :7000\n}}\n}}\n"
    )
    listener = host.start(answer_everybody)
    listener.wait_for("listening")
    return listener


def three_networks(lab: Lab, docker: bool = True) -> tuple[Network, Network, list[Host]]:
    """Four hosts: a network that only some share, one for management, a fast one, and docker0."""
    some = lab.network("10.60.0.0/24")
    management, fast = lab.network("10.70.0.0/24"), lab.network("10.80.0.0/24")
    hosts = []
    for number in range(4):
        networks = (some, management, fast) if number != 2 else (management, fast)
        names = ("some0", "mgmt0", "fast0") if number != 2 else ("mgmt0", "fast0")
        hosts.append(lab.host(*networks, interfaces=names))
    if docker:
        for host in hosts:
            add_docker(host)
    return management, fast, hosts


@pytest.mark.quick
@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize("ranks_are", chosen(["assigned"], soak=["given"]))
def test_a_network_that_all_share_is_chosen_among_many(lab: Lab, ranks_are: str, seed: int) -> None:
    management, _, hosts = three_networks(lab)
    if ranks_are == "given":
        ranks = [host.start(train, f"many {seed}", rank, 4) for rank, host in enumerate(hosts)]
    else:
        ranks = [host.start(assigned, f"many {seed}", 4) for host in hosts]
    found = results(ranks)
    for result, host in zip(found, hosts, strict=True):
        assert result["sum"] == 10
        assert result["interface"] == "mgmt0", "the first of the two that all share"
        assert result["address"] == host.address(management)
        assert result["exported"]["GLOO_SOCKET_IFNAME"] == "mgmt0"
        assert result["exported"]["NCCL_SOCKET_IFNAME"] is None
    host_zero = hosts[[result["rank"] for result in found].index(0)]
    assert {result["master_addr"] for result in found} == {host_zero.address(management)}
    assert max(result["elapsed"] for result in found) < 20


@pytest.mark.parametrize("named_by", ["rank 0", "the others"])
def test_the_named_interface_is_used(lab: Lab, named_by: str) -> None:
    _, fast, hosts = three_networks(lab)
    names = {"rank 0": {0}, "the others": {1, 2, 3}}[named_by]
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


def test_an_interface_is_named_by_its_address_and_others_by_a_list(lab: Lab) -> None:
    _, fast, hosts = three_networks(lab, docker=False)
    ranks = [
        host.start(train, "listed", rank, 4, env={"MINGLE_INTERFACE": value})
        for rank, (host, value) in enumerate(
            zip(hosts, [hosts[0].address(fast), "fast0,mgmt0", "fast0", "mgmt0,fast0"], strict=True)
        )
    ]
    for result, host in zip(results(ranks), hosts, strict=True):
        assert (result["interface"], result["master_addr"]) == ("fast0", hosts[0].address(fast))
        assert result["address"] == host.address(fast)


def test_a_vpn_that_all_share_comes_after_the_network(lab: Lab) -> None:
    """A tunnel is everybody's subnet, and the cables are not; they are routed."""
    tunnel = lab.network("10.99.0.0/24")
    cables = lab.network("10.10.0.0/16")
    hosts = [lab.host(tunnel, cables, interfaces=("wg0", "eth0")) for _ in range(3)]
    for host in hosts:
        # Each in a subnet of its own, behind a router that knows all of them: here, the wire itself.
        address = host.address(cables)
        host.ip(
            f"address del {address}/16 dev eth0",
            f"address add {address}/32 dev eth0",
            "route add 10.10.0.0/16 dev eth0",
        )
    ranks = [host.start(train, "tunnel", rank, 3) for rank, host in enumerate(hosts)]
    for result in results(ranks):
        assert (result["sum"], result["interface"]) == (6, "eth0")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_the_first_address_of_rank_0_is_filtered(lab: Lab, seed: int) -> None:
    first, second = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    hosts = [lab.host(first, second) for _ in range(3)]
    # Without an answer, not even a refusal: as many firewalls do. Datagrams come through.
    hosts[0].drop(f"ip daddr {hosts[0].address(first)} meta l4proto tcp")
    ranks = [host.start(train, f"filtered {seed}", rank, 3) for rank, host in enumerate(hosts)]
    for result in results(ranks):
        assert result["sum"] == 6
        assert (result["master_addr"], result["interface"]) == (hosts[0].address(second), "eth1")
        assert result["elapsed"] < 10  # a second for the filtered address, and what a busy machine adds
    for rank in ranks[1:]:
        joining = next(event for event in rank.events if event.name == "log" and event["text"].endswith("joining"))
        assert joining.time - rank.events[0].time < 8


def test_no_network_is_common_to_all(lab: Lab) -> None:
    """Rank 0 reaches both others, who don't reach each other: a star is no mesh."""
    left, right = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    hosts = [lab.host(left, right), lab.host(left), lab.host(right)]
    ranks = [host.start(timed, "star", rank, 3, discovery_timeout=8) for rank, host in enumerate(hosts)]
    for rank in ranks:
        error = failure(rank, 8)
        assert error.name == "InterfaceError"
        for host in hosts[1:]:
            assert host.name in error.message
        assert f"not {hosts[0].address(right)}" in error.message
        assert f"not {hosts[0].address(left)}" in error.message
        assert "fix:" in error.message


# --- the links of containers ------------------------------------------------------------------------------------------

FILES = 1024
"""The usual limit of open files."""


def add_pods(lab: Lab, host: Host, count: int) -> None:
    """Give a host what a network plugin of Kubernetes makes: the end of a link to each pod, without a subnet."""
    pods = lab.host()
    names = [f"cali{number:04x}" for number in range(count)]
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


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_the_links_of_250_pods_cost_nothing(lab: Lab, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    add_pods(lab, hosts[0], 250)
    ranks = [host.start(with_few_files, f"pods {seed} {rank}", 0, 2) for rank, host in enumerate(hosts)]
    for rank in ranks:
        wait_for_log(rank, "open, 1/2 joined")
    before = [datagrams_sent(host) for host in hosts]
    threading.Event().wait(5)
    crowded, plain = (datagrams_sent(host) - count for host, count in zip(hosts, before, strict=True))
    assert crowded < 3 * plain, "either may have had one more turn"
    assert open_files(ranks[0]) <= open_files(ranks[1]) + 2
    second = hosts[1].start(with_few_files, f"pods {seed} 0", 1, 2)
    for result in results([ranks[0], second]):
        assert (result["sum"], result["interface"]) == (3, "eth0")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_more_interfaces_than_files_leave_out_those_that_are_not_the_network(lab: Lab, seed: int) -> None:
    """As before, with a plugin whose names mingle does not know, and a card that comes after all of them."""
    network = lab.network()
    hosts = [lab.host(), lab.host(network)]
    pods = lab.host()
    names = [f"unknown{number:03}" for number in range(250)]
    hosts[0].ip(*(f"link add {name} type veth peer name {name} netns {pods.namespace.path}" for name in names))
    hosts[0].ip(*(f"link set {name} up" for name in names))
    pods.ip(*(f"link set {name} up" for name in names))
    hosts[0].attach(network)
    ranks = [host.start(with_few_files, f"many {seed}", rank, 2) for rank, host in enumerate(hosts)]
    wait_for_log(ranks[0], "the limit of open files has no room for")
    for result in results(ranks):
        assert (result["sum"], result["interface"]) == (3, "eth0")


# --- NICs that come and go -------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize("whose", chosen(["all"], soak=["rank 0", "a waiting rank"]))
def test_a_nic_goes_down_and_up_while_ranks_wait(lab: Lab, whose: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    ranks = [host.start(train, f"flap {seed}", rank, 3) for rank, host in enumerate(hosts[:2])]
    wait_for_log(ranks[0], "2/3 joined")
    unplugged = {"rank 0": hosts[:1], "a waiting rank": hosts[1:2], "all": hosts[:2]}[whose]
    for host in unplugged:
        host.ip(f"link set {host.interface()} down")
    threading.Event().wait(3)  # longer than mingle takes to see it
    for host in unplugged:
        host.ip(f"link set {host.interface()} up", f"route add default dev {host.interface()}")
        network.wait_forwarding([host.nic().port])
    ranks.append(hosts[2].start(train, f"flap {seed}", 2, 3))
    for result, host in zip(results(ranks), hosts, strict=True):
        assert (result["sum"], result["master_addr"]) == (6, hosts[0].address())
        assert (result["interface"], result["address"]) == (host.interface(), host.address())


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize("seconds", chosen([3], soak=[0, 14]))
@pytest.mark.parametrize("whose", chosen(["rank 0"], soak=["a waiting rank", "all"]))
def test_a_nic_comes_back_under_another_name_with_another_address(
    lab: Lab, whose: str, seconds: float, seed: int
) -> None:
    """As that of a container does that is moved; before it is seen to be gone, after that, and after it is lost."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    ranks = [host.start(train, f"moved {seed}", rank, 3) for rank, host in enumerate(hosts[:2])]
    wait_for_log(ranks[0], "2/3 joined")
    moved = {"rank 0": hosts[:1], "a waiting rank": hosts[1:2], "all": hosts[:2]}[whose]
    before = {(host.interface(), host.address()) for host in moved}
    for host in moved:
        host.detach()
    threading.Event().wait(seconds)
    for host in moved:
        host.attach(network)
    assert not before & {(host.interface(), host.address()) for host in moved}
    ranks.append(hosts[2].start(train, f"moved {seed}", 2, 3))
    for result, host in zip(results(ranks), hosts, strict=True):
        assert (result["sum"], result["master_addr"]) == (6, hosts[0].address())
        assert (result["interface"], result["address"]) == (host.interface(), host.address())


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_nic_that_appears_while_ranks_wait_is_used(lab: Lab, seed: int) -> None:
    """The ranks that share the first network wait for one that is on the second only."""
    first, second = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    hosts = [lab.host(first), lab.host(first), lab.host(second)]
    ranks = [host.start(train, f"new nic {seed}", rank, 3) for rank, host in enumerate(hosts)]
    wait_for_log(ranks[0], "2/3 joined")
    for host in hosts[:2]:
        host.attach(second)
    for result, host in zip(results(ranks), hosts, strict=True):
        assert (result["sum"], result["master_addr"]) == (6, hosts[0].address(second))
        assert (result["interface"], result["address"]) == (host.interface(second), host.address(second))


def test_a_nic_that_appears_is_used_where_ranks_are_assigned(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(), lab.host(), lab.host()]
    ranks = [host.start(assigned, "cables", 3) for host in hosts]
    for rank in ranks:
        wait_for_log(rank, "open, 1/3 joined")
    for host in hosts:
        host.attach(network)
    found = results(ranks)
    assert sorted(result["rank"] for result in found) == [0, 1, 2]
    for result, host in zip(found, hosts, strict=True):
        assert (result["sum"], result["interface"]) == (6, host.interface())


def test_a_nic_that_vanishes_while_ranks_wait_is_survived(lab: Lab) -> None:
    first, second = lab.network("10.60.0.0/24"), lab.network("10.70.0.0/24")
    hosts = [lab.host(first, second) for _ in range(3)]
    ranks = [host.start(train, "lost nic", rank, 3) for rank, host in enumerate(hosts[:2])]
    wait_for_log(ranks[0], "2/3 joined")
    hosts[0].detach(first)
    threading.Event().wait(2.5)
    ranks.append(hosts[2].start(train, "lost nic", 2, 3))
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


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize("astray", chosen(["rank 0"], soak=["both"]))
def test_packets_that_leave_by_another_interface_are_named_with_the_route(lab: Lab, astray: str, seed: int) -> None:
    hosts = joined_by_a_cable(lab, 2 if astray == "both" else 1)
    ranks = [host.start(timed, f"astray {seed}", rank, 2, discovery_timeout=15) for rank, host in enumerate(hosts)]
    errors = [failure(rank, 15).message for rank in ranks]
    for number, error in enumerate(errors):
        host, other = hosts[number], f"169.254.1.{2 - number}"
        if astray == "rank 0" and number == 1:
            continue  # its own packets leave by the cable, and no answer comes
        fact = f"the kernel sends to {other} through eth0, and {other} was heard on eth1"
        assert fact in next(line for line in error.splitlines() if "likely cause:" in line)
        (route,) = (line.strip() for line in error.splitlines() if line.strip().startswith("sudo ip route add"))
        host.ip(route.removeprefix("sudo ip "))
    ranks = [host.start(train, f"cable {seed}", rank, 2) for rank, host in enumerate(hosts)]
    assert [result["sum"] for result in results(ranks)] == [3, 3]


# --- machines that go offline ----------------------------------------------------------------------------------------


def go_offline(host: Host, way: str) -> None:
    match way:
        case "is down":
            host.ip("link set eth0 down")
        case "has lost its addresses":
            host.ip("address flush dev eth0")
        case "has gone":
            host.detach()
        case "has no carrier":
            host.cut()


def come_back(host: Host, network: Network, way: str) -> None:
    match way:
        case "is down":
            host.ip("link set eth0 up", "route add default dev eth0")
            network.wait_forwarding([host.nic().port])
        case "has lost its addresses":
            host.ip(f"address add {host.address()}/24 dev eth0", "route add default dev eth0")
        case "has gone":
            host.attach(network, "eth0")
        case "has no carrier":
            host.heal()


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize("way", chosen(["has gone"], soak=["is down", "has lost its addresses", "has no carrier"]))
def test_ranks_of_a_machine_that_is_offline_meet_and_the_others_come_later(lab: Lab, way: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network), lab.host(network)]
    ranks = [hosts[0].start(train, f"offline {seed}", 0, 3)]
    wait_for_log(ranks[0], "open, 1/3 joined")
    go_offline(hosts[0], way)
    ranks.append(hosts[0].start(train, f"offline {seed}", 1, 3))
    wait_for_log(ranks[0], "2/3 joined")
    come_back(hosts[0], network, way)
    ranks.append(hosts[1].start(train, f"offline {seed}", 2, 3))
    for result, host in zip(results(ranks), (hosts[0], *hosts), strict=True):
        assert (result["sum"], result["master_addr"]) == (6, hosts[0].address())
        assert (result["interface"], result["address"]) == ("eth0", host.address())


def test_a_rank_whose_machine_goes_offline_says_so(lab: Lab) -> None:
    """Four machines that know nothing of each other, each in its own way."""
    hosts = {
        way: lab.host(lab.network()) for way in ("is down", "has lost its addresses", "has gone", "has no carrier")
    }
    ranks = {way: host.start(timed, "offline", 0, 2, discovery_timeout=12) for way, host in hosts.items()}
    for way, rank in ranks.items():
        rank.wait_for("log", TIMEOUT)
        go_offline(hosts[way], way)
    for way, rank in ranks.items():
        message = failure(rank, 12).message
        assert f"likely cause: this machine is offline: eth0 {way}" in message
        assert f" ({way})" in message, "the interfaces of the report, too"
        assert "firewall" not in message
        assert "default route" not in message


# --- address translation -------------------------------------------------------------------------------------------


def describe_and_stay(job_id: str, rank: int, world_size: int, **arguments: Any) -> None:
    """Find the others, say what came of it, and hold on until killed."""
    with mingle.discover(job_id, rank=rank, world_size=world_size, discovery_timeout=TIMEOUT, **arguments) as job:
        report("formed", **describe(job))
        threading.Event().wait()


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
    for formed, host in zip(found, hosts, strict=True):
        assert (formed["interface"], formed["address"]) == (host.interface(), host.address())
