"""The sockets between hosts: network namespaces of the test's own, joined by cables."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mingle.config.launchers import Placement
from mingle.config.settings import Family, Settings
from mingle.engine.discovery import Discovery
from mingle.errors import ConfigurationError
from mingle.network import transport as sockets
from mingle.network.interfaces import Interface, scan
from mingle.network.transport import NothingOpenedError, Transport
from mingle.wire.datagrams import BROWSE_GROUP, job_group
from tests.support.isolation import cable, host, inside, ip, needs_namespaces, nft, run_isolated
from tests.support.receiving import gather, no_descriptor_leaks, nothing_more

GROUP = job_group("transport tests")


def between(name: str, *, ttl: int = 1, family: Family = "auto", port: int = 29499) -> contextlib.closing[Transport]:
    """A transport on all interfaces of a host but `lo`."""
    with inside(name):
        found = [interface for interface in scan() if interface.addresses and not interface.loopback]
        return contextlib.closing(Transport(found, groups=[GROUP, BROWSE_GROUP], port=port, ttl=ttl, family=family))


def two_hosts() -> None:
    host("a")
    host("b")
    cable(1, "a", "b")


def interface_of(name: str) -> Interface:
    with inside(name):
        return next(interface for interface in scan() if interface.name == "eth1")


def both_families_reach_the_other_host() -> None:
    two_hosts()
    with no_descriptor_leaks(), between("a") as a, between("b") as b:
        assert not a.failures
        assert a.multicast("eth1", b"hello", GROUP)
        heard = sorted(gather(b, 2), key=lambda one: one.family)
        assert [(one.data, one.interface, one.family, one.multicast, one.local) for one in heard] == [
            (b"hello", "eth1", "4", True, False),
            (b"hello", "eth1", "6", True, False),
        ]
        assert [one.source[0] for one in heard] == ["10.1.0.1", "fd00:1::1"]
        assert [one.destination for one in heard] == [GROUP.ipv4, GROUP.ipv6_link]
        assert all(one.local for one in gather(a, 2))
        for one in heard:
            assert b.reply(one, b"me " + one.family.encode())
        answers = sorted(gather(a, 2), key=lambda one: one.data)
        assert [(one.data, one.multicast, one.source[0]) for one in answers] == [
            (b"me 4", False, "10.1.0.2"),
            (b"me 6", False, "fd00:1::2"),
        ]
        assert a.sent == b.sent == 2
        assert nothing_more(a)
        assert nothing_more(b)


def the_families_take_turns() -> None:
    two_hosts()
    with between("a") as a, between("b") as b, between("a", family="4") as only_ipv4:
        for transport, families in ((a, "4646"), (only_ipv4, "4444")):
            for turn, family in enumerate(families):
                assert transport.multicast("eth1", b"x", GROUP, turn)
                assert [one.family for one in gather(b, 1)] == [family]
                assert nothing_more(b)
        with inside("a"):
            nft("add table ip6 t")
            nft("add chain ip6 t out { type filter hook output priority 0; }")
            nft("add rule ip6 t out meta l4proto udp drop")
        assert a.multicast("eth1", b"x", GROUP, 1)
        assert [one.family for one in gather(b, 1)] == ["4"], "IPv6 refuses to send"


def unicast_over_ipv6() -> None:
    two_hosts()
    link_local = next(address for address in interface_of("b").addresses if address.is_link_local).ip
    with no_descriptor_leaks(), between("a") as a, between("b") as b:
        index = interface_of("a").index
        # The zone as a number: its name is known only inside the namespace.
        for literal in ("fd00:1::2", f"{link_local}%{index}"):
            assert a.unicast(b"who?", (literal, 29499))
            (question,) = gather(b, 1)
            assert (question.family, question.multicast, question.interface) == ("6", False, "eth1")
            assert "%" not in question.source[0]
            assert b.reply(question, b"me")
            (answer,) = gather(a, 1)
            assert answer.source[:2] == (literal.partition("%")[0], 29499)
            assert a.reply(answer, b"thanks")
            assert [one.data for one in gather(b, 1)] == [b"thanks"]


def several_interfaces_stay_apart() -> None:
    two_hosts()
    cable(2, "a", "b")
    for ttl in (1, 2):
        with no_descriptor_leaks(), between("a", ttl=ttl) as a, between("b", ttl=ttl) as b:
            a.multicast("eth2", b"x", GROUP)
            heard = gather(b, 2)
            assert sorted((one.family, one.interface) for one in heard) == [("4", "eth2"), ("6", "eth2")]
            assert nothing_more(b)
            for one in heard:
                b.reply(one, b"me")
            assert {one.source[0] for one in gather(a, 4) if not one.multicast} == {"10.2.0.2", "fd00:2::2"}


def one_family_only() -> None:
    two_hosts()
    with between("a", family="6") as a, between("b") as b, between("b", family="4", port=29500) as only_ipv4:
        assert not [opened for opened in a.sockets() if opened.family == socket.AF_INET]
        a.multicast("eth1", b"x", BROWSE_GROUP)
        assert [one.family for one in gather(b, 1)] == ["6"]
        assert nothing_more(b)
        assert not [opened for opened in only_ipv4.sockets() if opened.family == socket.AF_INET6]


def an_older_kernel_gives_multicasts_to_plain_sockets_too() -> None:
    sockets._IPV6_MULTICAST_ALL = 9999  # "Protocol not available", as before Linux 4.20
    two_hosts()
    with between("a", family="6") as a, between("b", family="6") as b:
        a.multicast("eth1", b"x", GROUP)
        assert len(gather(b, 1)) == 1
        assert nothing_more(b)


def interfaces_come_and_go() -> None:
    two_hosts()
    with no_descriptor_leaks(), between("a") as a, between("b") as b:
        cable(2, "a", "b")
        for name, transport in (("a", a), ("b", b)):
            with inside(name):
                kept = set(transport.sockets())
                added, removed = transport.update([one for one in scan() if not one.loopback])
            assert removed == []
            # A receiver and a sender for IPv4; for IPv6 a receiver per group and a sender.
            assert len(added) == 5
            assert set(transport.sockets()) == kept | set(added)
        a.multicast("eth2", b"x", GROUP)
        assert {one.interface for one in gather(b, 2)} == {"eth2"}
        ip("-n b link delete eth1")
        assert not a.multicast("eth1", b"the other end of a cable goes with it", GROUP)
        with inside("b"):
            added, removed = b.update([one for one in scan() if not one.loopback])
        assert added == []
        assert len(removed) == 5
        assert [one.name for one in b.interfaces] == ["eth2"]
        gather(a, 2)
        b.multicast("eth2", b"y", GROUP)
        assert {one.data for one in gather(a, 2)} == {b"y"}


def an_interface_that_was_made_anew_is_opened_anew() -> None:
    two_hosts()
    with between("b", family="4") as b:
        ip("-n b link delete eth1")
        cable(1, "a", "b")
        with inside("b"):
            added, removed = b.update([one for one in scan() if one.name == "eth1"])
        assert (len(added), len(removed)) == (2, 2)
        with between("a", family="4") as a:
            assert a.multicast("eth1", b"x", GROUP)
            assert [one.data for one in gather(b, 1)] == [b"x"]


def an_address_under_duplicate_check_is_retried() -> None:
    host("a")
    ip("-n a link add eth1 type veth peer name eth1p")
    with inside("a"):
        for name in ("accept_dad", "dad_transmits"):
            value = "1" if name == "accept_dad" else "0"
            Path(f"/proc/sys/net/ipv6/conf/eth1/{name}").write_text(value)
    ip("-n a address add 10.1.0.1/24 dev eth1")
    ip("-n a address add fd00:1::1/64 dev eth1")
    ip("-n a link set eth1 up")  # without a carrier the check cannot end
    with no_descriptor_leaks(), between("a") as a:
        assert set(a.failures) == {"eth1 IPv6"}
        assert a.failures["eth1 IPv6"].startswith("EADDRNOTAVAIL: ")
        ip("-n a link set eth1p up")
        deadline = time.monotonic() + 45
        while a.failures and time.monotonic() < deadline:
            with inside("a"):
                a.update([one for one in scan() if one.name == "eth1"])
        assert not a.failures
        a.multicast("eth1", b"x", GROUP)
        assert {one.family for one in gather(a, 2)} == {"4", "6"}


def memberships_are_reported_again() -> None:
    two_hosts()
    with between("b") as b, inside("a"), socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0) as wire:
        wire.bind(("eth1", 0x0800))
        assert b.refresh() == ([], [])
        # IGMPv3 reports (RFC 3376) come within the robustness interval of a second.
        wire.settimeout(30)
        packet = b""
        while socket.inet_aton(GROUP.ipv4) not in packet:
            packet = wire.recv(2048)
        assert packet[9] == socket.IPPROTO_IGMP
        ip("-n b link delete eth1")
        assert b.refresh().removed  # ENODEV: opened anew, which fails as well
        assert set(b.failures) == {"eth1 IPv4", "eth1 IPv6"}
        cable(1, "a", "b")
        with inside("b"):
            added, _ = b.update([one for one in scan() if one.name == "eth1"])
        assert added
        assert not b.failures


def a_fixed_port_where_an_interface_has_only_a_link_local_address() -> None:
    """A card without a network, or Docker's end of a container's cable."""
    from tests.support.in_process import opened  # with torch, which takes seconds: each scenario has a new interpreter

    two_hosts()
    ip("-n a address flush dev eth1 scope global")
    (link_local,) = (str(address.ip) for address in interface_of("a").addresses)
    settings = Settings(
        job_id="a job",
        placement=Placement(rank=0, world_size=2),
        discovery_timeout=20.0,
        port=29499,
        master_port=29500,
        progress="off",
        mesh="off",
    )
    with no_descriptor_leaks(), inside("a"):
        opened(Discovery(settings)).close("the test is over")
        with socket.socket(socket.AF_INET6) as other:
            other.bind((link_local, 29500, 0, socket.if_nametoindex("eth1")))
            other.listen()
            with pytest.raises(ConfigurationError, match="29500: Address already in use"):
                Discovery(settings).run()


def an_ipv6_port_that_is_not_shared() -> None:
    two_hosts()
    with inside("a"), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as selfish:
        selfish.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        selfish.bind(("::", 29499))
        with no_descriptor_leaks():
            with contextlib.closing(Transport([interface_of("a")], groups=[GROUP, BROWSE_GROUP], port=29499)) as a:
                # multicast_expert fails half-way: the socket that could not be bound is closed as well.
                assert set(a.failures) == {"eth1 IPv6", "IPv6 unicast"}
                assert a.multicast("eth1", b"x", GROUP)
            with pytest.raises(NothingOpenedError) as caught:
                Transport([interface_of("a")], groups=[GROUP], port=29499, family="6")
        assert "UDP port 29499 is held by another program" in str(caught.value.diagnosed())


def a_broadcast_is_told_from_a_unicast() -> None:
    """The kernel's own routing decides, so an address that came a moment ago, or that a rule translates, is ours."""
    two_hosts()
    with between("a") as a, between("b") as b:
        with inside("a"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("10.1.0.1"))
            asking.bind(("10.1.0.1", 0))
            for everybody in ("10.1.0.255", "255.255.255.255"):
                asking.sendto(b"all", (everybody, 29499))
                (heard,) = gather(b, 1)
                assert heard.broadcast, everybody
                assert not heard.multicast
            asking.sendto(b"all systems (RFC 1112)", ("224.0.0.1", 29499))
            asking.sendto(b"all nodes of the job", (GROUP.ipv4, 29499))
            assert [one.data for one in gather(b, 1)] == [b"all nodes of the job"]
            ip("-n b address add 10.1.0.77/32 dev lo")
            ip("-n a route add 10.1.0.77 via 10.1.0.2")
            ip("-n b route add local 10.9.0.0/16 dev lo")  # a whole network whose addresses are all this host's
            ip("-n a route add 10.9.0.0/16 via 10.1.0.2")
            with inside("b"):
                nft("add table ip t")
                nft("add chain ip t in { type nat hook prerouting priority dstnat; }")
                nft("add rule ip t in ip daddr 10.1.0.99 dnat to 10.1.0.2")
            ip("-n a route add 10.1.0.99 via 10.1.0.2")
            for own in ("10.1.0.2", "10.1.0.77", "10.9.4.255", "10.1.0.99"):
                asking.sendto(b"who?", (own, 29499))
                (question,) = gather(b, 1)
                assert not question.broadcast, own
                assert b.reply(question, b"me")
                asking.settimeout(30)
                assert asking.recvfrom(99) == (b"me", (own, 29499))
        with inside("b"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as neighbor:
            neighbor.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            with contextlib.closing(Transport([interface_of("b")], groups=[GROUP], port=29600)) as third:
                for own, everybody in (("127.0.0.1", False), ("127.9.9.9", False), ("127.255.255.255", True)):
                    neighbor.sendto(b"x", (own, 29600))
                    assert [one.broadcast for one in gather(third, 1)] == [everybody], own
        assert a.unicast(b"x", ("fd00:1::2", 29499))
        assert [one.broadcast for one in gather(b, 1)] == [False]
        assert nothing_more(b)


@pytest.mark.lab
@needs_namespaces
@pytest.mark.parametrize(
    "scenario",
    [
        a_broadcast_is_told_from_a_unicast,
        both_families_reach_the_other_host,
        several_interfaces_stay_apart,
        one_family_only,
        an_older_kernel_gives_multicasts_to_plain_sockets_too,
        interfaces_come_and_go,
        an_interface_that_was_made_anew_is_opened_anew,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                the_families_take_turns,
                unicast_over_ipv6,
                an_address_under_duplicate_check_is_retried,
                memberships_are_reported_again,
                a_fixed_port_where_an_interface_has_only_a_link_local_address,
                an_ipv6_port_that_is_not_shared,
            )
        ),
    ],
)
def test_between_hosts(scenario: Callable[[], None]) -> None:
    run_isolated(scenario)
