"""torchrun on networks that carry no multicast, or no IPv4."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.soak import chosen

from . import Lab
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
