"""Hosts whose packets leave from another address, or by another interface, than the one where they are reached."""

from __future__ import annotations

import pytest

from tests.support.levels import repeated

from . import Host, Lab
from .scenarios import results, train
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
