"""The routes of a machine: the kernel of a namespace of the test, and machines that the test makes up."""

from __future__ import annotations

import socket

import pytest

from mingle.network import routes
from mingle.network.interfaces import owner, scan
from tests.support.isolation import ip, needs_namespaces, run_isolated
from tests.support.nics import nic


@pytest.mark.parametrize(
    ("local", "remote", "on_link", "weak"),
    [
        ("10.0.0.1", "10.0.0.2", True, False),  # on the same subnet
        ("10.0.0.1", "10.1.0.2", True, True),  # on the wire, and on none of its subnets
        ("10.0.0.1", "10.1.0.2", False, False),  # through a router
        ("10.8.0.1", "10.1.0.2", True, False),  # a tunnel's end has no subnet
        ("127.0.0.1", "10.1.0.2", True, False),
        ("192.0.2.9", "10.1.0.2", True, False),  # an address that has gone
        ("fd00::1", "fd01::2", True, False),  # IPv6 neighbors answer for the addresses of that wire only
    ],
)
def test_weakly_reached(monkeypatch: pytest.MonkeyPatch, local: str, remote: str, on_link: bool, weak: bool) -> None:
    monkeypatch.setattr(routes, "has_direct_route", lambda address: on_link)
    # 10.0.0.99, which moves between machines (VRRP), has no subnet; those of its interface count all the same.
    eth0 = nic("eth0", 2, "10.0.0.1/24", "10.0.5.1/24", "10.0.0.99/32", "fd00::1/64")
    found = [nic("lo", 1, "127.0.0.1/8"), eth0, nic("wg0", 4, "10.8.0.1/32")]
    assert routes.reached_weakly(owner(found, local), remote) is weak


@pytest.mark.lab
@needs_namespaces
def test_the_kernel_says_what_needs_a_router() -> None:
    run_isolated(routes_of_every_sort)


def routes_of_every_sort() -> None:
    ip("link add eth1 type veth peer name other")
    ip("link set other addrgenmode none up")
    ip("address add 10.0.0.1/24 dev eth1")
    ip("link set eth1 up")
    ip("route add 10.1.0.0/24 dev eth1")
    ip("route add 10.2.0.0/24 via 10.0.0.254")
    wire = owner(scan(), "10.0.0.1")
    assert wire is not None
    assert routes.reached_weakly(wire, "10.1.0.2")
    for remote in ("10.0.0.2", "10.2.0.2", "10.3.0.2"):  # the wire's own, behind a router, without a route
        assert not routes.reached_weakly(wire, remote)


def test_the_kernel_says_by_which_interface_it_sends() -> None:
    assert routes.egress("127.0.0.1") == routes.egress("127.0.0.1", "127.0.0.1") == socket.if_nametoindex("lo")
    assert routes.egress("127.0.0.1", "192.0.2.1") == 0, "that is no address of this machine"
