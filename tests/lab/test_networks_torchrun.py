"""torchrun on networks that carry no multicast or no IPv4, and on NICs that come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.levels import chosen, repeated

from . import Host, Lab
from .name_server import serve_name
from .test_networks_ipv6 import break_ipv4
from .test_networks_unicast import NAME, without_multicast
from .torchrun_jobs import Job, jobs

pytestmark = pytest.mark.timeout(600)
MakeJob = Callable[..., Job]


@pytest.fixture
def job() -> Iterator[MakeJob]:
    with jobs() as make:
        yield make


def test_without_multicast_and_with_a_name_that_is_complete_late(lab: Lab, job: MakeJob) -> None:
    network, hosts = without_multicast(lab, 2)
    server = lab.host(network, name="dns")
    addresses = [host.address() for host in hosts]
    name_server = server.start(serve_name, NAME, [(2.0, addresses[1:]), (5.0, addresses)], server.address())
    name_server.wait_for("listening")
    for host in hosts:
        host.resolver_file.write_text(f"nameserver {server.address()}\n")
    made = job("no-multicast", "2", env={"MINGLE_PEERS": NAME})
    made.start(*hosts)
    made.wait_for_group(hosts)
    masters = {made.said(host, "started")[0]["environment"]["MASTER_ADDR"] for host in hosts}
    assert len(masters) == 1
    assert masters <= set(addresses)
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_agents_have_their_round_before_a_silent_name_server_is_given_up(lab: Lab, job: MakeJob, seed: int) -> None:
    """Torch looks up the name of each host that it connects to, as the workers do then: for them it takes 10 s."""
    network = lab.network()
    silent, *hosts = [lab.host(network) for _ in range(4)]
    silent.drop("udp dport 53")
    for host in hosts:
        host.resolver_file.write_text(f"nameserver {silent.address()}\n")
    made = job(f"dns-{seed}", "3")
    began = time.monotonic()
    made.start(*hosts)
    had_rounds = [made.agents[host].wait_for("round").time - began for host in hosts]
    made.wait_for_group(hosts)
    made.finish(*hosts)
    assert max(had_rounds) < 9


def test_hosts_without_ipv4(lab: Lab, job: MakeJob) -> None:
    network = lab.network(None, ipv6="fd77::/64")
    hosts = [lab.host(network) for _ in range(2)]
    made = job("six", "2")
    made.start(*hosts)
    made.wait_for_group(hosts)
    for host in hosts:
        environment = made.said(host, "started")[0]["environment"]
        assert environment["MASTER_ADDR"] in {each.address() for each in hosts}
        assert environment["GLOO_SOCKET_IFNAME"] == host.interface()
    made.finish(*hosts)


def test_link_local_addresses_alone(lab: Lab, job: MakeJob) -> None:
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
def test_dual_stack_with_ipv4_broken(lab: Lab, job: MakeJob, way_broken: str) -> None:
    """Gloo prefers IPv4, and the workers, which know nothing of mingle, train all the same."""
    network = lab.network(ipv6="fd77::/64")
    hosts = [lab.host(network) for _ in range(2)]
    break_ipv4(hosts, way_broken)
    made = job(f"dual-{way_broken.replace(' ', '-')}", "2")
    made.start(*hosts)
    made.wait_for_group(hosts)
    masters = {said["environment"]["MASTER_ADDR"] for host in hosts for said in made.said(host, "started")}
    assert len(masters) == 1
    assert masters <= {host.address(family=6) for host in hosts}
    made.finish(*hosts)


# --- NICs that come and go -------------------------------------------------------------------------------------------


def elected(made: Job, hosts: list[Host], joined: str) -> Host:
    """The host of the agents that wait, once so many have joined it."""

    def found() -> list[Host]:
        return [
            host
            for host in hosts
            for event in made.agents[host].events
            if event.name == "log" and event["text"].endswith(f": open, {joined} joined")
        ]

    made.until(lambda: bool(found()), f"{joined} agents to join one of them")
    return found()[0]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("how", chosen(["down and up"], soak=["to another address"]))
@pytest.mark.parametrize("whose", chosen(["the host's"], soak=["another one's", "all"]))
def test_a_nic_goes_and_comes_while_agents_wait(lab: Lab, job: MakeJob, whose: str, how: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(f"nic-{seed}", "3")
    made.start(*hosts[:2])
    holder = elected(made, hosts[:2], "2/3")
    unplugged = [host for host in hosts[:2] if whose == "all" or (host is holder) == (whose == "the host's")]
    for host in unplugged:
        if how == "down and up":
            host.ip(f"link set {host.interface()} down")
        else:
            host.detach()
    threading.Event().wait(3)  # longer than mingle takes to see it
    for host in unplugged:
        if how == "down and up":
            host.ip(f"link set {host.interface()} up", f"route add default dev {host.interface()}")
            network.wait_forwarding([host.nic().port])
        else:
            host.attach(network)
    made.start(hosts[2])
    made.wait_for_group(hosts)
    environments = [made.said(host, "started")[0]["environment"] for host in hosts]
    (master,) = {environment["MASTER_ADDR"] for environment in environments}
    assert master in {host.address() for host in hosts}
    assert [environment["GLOO_SOCKET_IFNAME"] for environment in environments] == [host.interface() for host in hosts]
    made.finish(*hosts)
