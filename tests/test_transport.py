"""The sockets: on `lo`, and in network namespaces of the test's own."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_interface
from pathlib import Path

import pytest
from multicast_expert import MulticastExpertError

from mingle import udp
from mingle.errors import InterfaceError
from mingle.groups import LOBBY, job_group
from mingle.interfaces import Family, Interface, scan
from mingle.transport import MAX_DATAGRAM, Received, Transport
from tests.isolation import cable, host, inside, ip, needs_namespaces, nft, run_isolated

LO = next(interface for interface in scan() if interface.loopback)
GROUP = job_group("transport tests")
GHOST = Interface("ghost0", 9999, (ip_interface("192.0.2.77/24"), ip_interface("2001:db8::77/64")))
IS_LINUX = Path("/proc/self/fd").exists()


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


def on_lo(port: int) -> Transport:
    return Transport([LO], groups=[GROUP, LOBBY], port=port)


def gather(transport: Transport, count: int, *, seconds: float = 5.0) -> list[Received]:
    """What the transport receives until it has `count` datagrams or the time is over."""
    found: list[Received] = []
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for opened in transport.sockets():
            selector.register(opened, selectors.EVENT_READ)
        while len(found) < count and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                found += transport.receive(key.fileobj)
    return found


def nothing_more(transport: Transport) -> bool:
    """Whether nothing waits; on `lo` and on veth pairs a datagram has arrived when its sending returns."""
    return not any(transport.receive(opened) for opened in transport.sockets())


@contextlib.contextmanager
def no_descriptor_leaks() -> Iterator[None]:
    def open_descriptors() -> set[str]:
        return {
            f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}"
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        }

    # Not left to the collector: what it would close counts as leaked.
    gc.collect()
    gc.disable()
    try:
        before = open_descriptors()
        yield
        assert open_descriptors() - before == set()
    finally:
        gc.enable()


# On lo ----------------------------------------------------------------------------------------------------------


def test_two_transports_of_one_process_hear_each_other(port: int) -> None:
    with on_lo(port) as one, on_lo(port) as two:
        assert one.multicast("lo", b"hello", GROUP)
        for listener in (one, two):
            (heard,) = gather(listener, 1)
            assert heard.data == b"hello"
            assert (heard.interface, heard.family, heard.destination) == ("lo", "4", GROUP.ipv4)
            assert heard.multicast
            assert heard.local
            assert not heard.oversized
        assert (one.sent, one.received, two.received) == (1, 1, 1)
        assert not one.send_errors
        assert not one.receive_errors


def test_a_reply_to_a_multicast_reaches_its_sender_alone(port: int) -> None:
    with on_lo(port) as asking, on_lo(port) as answering, on_lo(port) as bystander:
        asking.multicast("lo", b"who?", GROUP)
        (question,) = gather(answering, 1)
        assert answering.reply(question, b"me")
        heard = gather(asking, 2)
        assert [(one.data, one.multicast) for one in heard if one.data == b"me"] == [(b"me", False)]
        assert [one.data for one in gather(bystander, 1)] == [b"who?"]
        assert nothing_more(bystander)


def test_unicast_to_the_shared_port_is_answered_from_it(port: int) -> None:
    # What a stateful firewall, or address translation, lets back in.
    with on_lo(port) as server, on_lo(free_port()) as client:
        assert client.unicast(b"who?", ("127.0.0.1", port))
        (question,) = gather(server, 1)
        assert (question.interface, question.multicast, question.destination) == ("lo", False, "127.0.0.1")
        assert server.reply(question, b"me")
        (answer,) = gather(client, 1)
        assert answer.data == b"me"
        assert answer.source == ("127.0.0.1", port)


def test_a_reply_comes_from_the_address_that_was_asked(port: int) -> None:
    with on_lo(port) as server, on_lo(free_port()) as client:
        client.unicast(b"who?", ("127.0.0.9", port))
        (question,) = gather(server, 1)
        server.reply(question, b"me")
        assert gather(client, 1)[0].source == ("127.0.0.9", port)


def test_a_reply_when_the_socket_of_the_question_has_gone(port: int) -> None:
    with on_lo(port) as server, on_lo(free_port()) as client:
        client.unicast(b"who?", ("127.0.0.1", port))
        (question,) = gather(server, 1)
        assert server.reply(replace(question, via=None), b"me")
        assert server.reply(replace(question, via=None, interface="gone0"), b"me")
        assert [one.data for one in gather(client, 2)] == [b"me", b"me"]


def test_other_groups_are_not_heard(port: int) -> None:
    other = job_group("another job")
    with on_lo(port) as mine, Transport([LO], groups=[other], port=port) as theirs:
        theirs.multicast("lo", b"theirs", other)
        mine.multicast("lo", b"lobby", LOBBY)
        assert [one.data for one in gather(mine, 1)] == [b"lobby"]
        assert nothing_more(mine)
        with pytest.raises(MulticastExpertError):
            mine.multicast("lo", b"not joined", other)


def test_a_datagram_too_long_is_cut_and_says_so(port: int) -> None:
    with on_lo(port) as transport:
        transport.multicast("lo", bytes(MAX_DATAGRAM), GROUP)
        transport.multicast("lo", bytes(MAX_DATAGRAM + 500), GROUP)
        fits, cut = gather(transport, 2)
        assert (len(fits.data), fits.oversized) == (MAX_DATAGRAM, False)
        assert (len(cut.data), cut.oversized) == (MAX_DATAGRAM + 1, True)


def test_a_burst_fits_the_buffer_and_is_taken_in_bounded_bites(port: int) -> None:
    with on_lo(port) as transport:
        for number in range(300):
            transport.multicast("lo", b"%d" % number, GROUP)
        bites = [transport.receive(opened) for opened in transport.sockets()]
        assert max(len(bite) for bite in bites) == 64
        rest = gather(transport, 300 - 64)
        assert [int(one.data) for one in rest] == list(range(64, 300))


def test_sending_to_where_nothing_is_open_is_counted_or_false(port: int) -> None:
    with on_lo(port) as transport:
        assert not transport.multicast("ghost0", b"x", GROUP)
        assert not transport.unicast(b"x", ("::1", port))
        assert not transport.unicast(b"x", ("fe80::1%ghost0", port))
        assert not transport.unicast(bytes(70000), ("127.0.0.1", port))
        assert transport.send_errors["EAFNOSUPPORT"] == 1
        assert transport.send_errors["EMSGSIZE"] == 1
        assert sum(transport.send_errors.values()) == 3
        assert transport.sent == 0
        with pytest.raises(ValueError, match="localhost"):
            transport.unicast(b"x", ("localhost", port))


def test_errors_of_a_socket_are_counted_and_do_not_hide_what_follows(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, pending = udp.read, [ConnectionRefusedError(111, "refused"), OSError(100, "down")]

    def failing_first(opened: socket.socket) -> udp.Datagram | None:
        if pending:
            raise pending.pop()
        return read(opened)

    with on_lo(port) as transport:
        transport.multicast("lo", b"x", GROUP)
        monkeypatch.setattr(udp, "read", failing_first)
        assert [one.data for one in gather(transport, 1)] == [b"x"]
        assert transport.receive_errors == {"ECONNREFUSED": 1, "ENETDOWN": 1}


def test_receiving_from_a_socket_that_was_closed_meanwhile(port: int) -> None:
    with on_lo(port) as transport:
        change = transport.update([])
        assert change.removed
        assert all(opened.fileno() == -1 for opened in change.removed)
        assert [transport.receive(opened) for opened in change.removed] == [[]] * len(change.removed)


def test_update_keeps_what_fits_and_reopens_what_changed(port: int) -> None:
    with on_lo(port) as transport:
        before = transport.sockets()
        assert transport.update([LO]) == ([], [])
        assert transport.sockets() == before
        renumbered = replace(LO, addresses=(ip_interface("127.0.0.2/8"),))
        added, removed = transport.update([renumbered])
        assert len(added) == len(removed) == 2
        assert transport.interfaces == (renumbered,)
        transport.multicast("lo", b"x", GROUP)
        (heard,) = gather(transport, 1)
        assert heard.source[0] == "127.0.0.2"


def test_refresh_keeps_hearing(port: int) -> None:
    with on_lo(port) as transport:
        assert transport.refresh() == ([], [])
        transport.multicast("lo", b"x", GROUP)
        assert len(gather(transport, 1)) == 1


def test_an_interface_that_cannot_be_opened_does_not_stop_the_others(port: int) -> None:
    with no_descriptor_leaks(), Transport([GHOST, LO], groups=[GROUP], port=port) as transport:
        assert transport.interfaces == (LO,)
        assert transport.failures["ghost0 IPv4"].startswith("ENODEV: ")
        assert set(transport.failures) >= {"ghost0 IPv4", "ghost0 IPv6"}
        transport.multicast("lo", b"x", GROUP)
        assert len(gather(transport, 1)) == 1


@pytest.mark.skipif(not IS_LINUX, reason="descriptors are counted in /proc")
@pytest.mark.parametrize("family", ["4", "auto"])
def test_nothing_leaks_when_all_is_well(port: int, family: Family) -> None:
    with no_descriptor_leaks():
        transport = Transport([LO], groups=[GROUP, LOBBY], port=port, family=family)
        transport.close()
        transport.close()
        assert transport.sockets() == []
        assert transport.interfaces == ()


@pytest.mark.skipif(not IS_LINUX, reason="descriptors are counted in /proc")
def test_a_port_held_by_another_program(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as selfish, no_descriptor_leaks():
        selfish.bind(("", port))
        with pytest.raises(InterfaceError) as caught:
            on_lo(port)
    assert f"another program holds UDP port {port}" in str(caught.value)
    assert f"ss -ulpn 'sport = :{port}'" in str(caught.value)
    assert "MINGLE_PORT" in str(caught.value)
    assert "lo IPv4: EADDRINUSE" in str(caught.value)


@pytest.mark.skipif(not IS_LINUX, reason="descriptors are counted in /proc")
@pytest.mark.parametrize("interfaces", [[], [GHOST]])
def test_nothing_to_open(port: int, interfaces: list[Interface]) -> None:
    with no_descriptor_leaks(), pytest.raises(InterfaceError, match="nothing could be opened") as caught:
        Transport(interfaces, groups=[GROUP], port=port, family="4")
    assert "mingle-discover interfaces" in str(caught.value)


@pytest.mark.skipif(not IS_LINUX, reason="descriptors are counted in /proc")
@pytest.mark.parametrize("failing", ["open_sender", "open_receiver", "open_unicast", "_prepare"])
def test_nothing_leaks_when_the_system_refuses(
    port: int, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(udp, failing, refuse)
    with no_descriptor_leaks(), pytest.raises(KeyboardInterrupt):
        on_lo(port)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_holds_none_of_the_sockets(port: int) -> None:
    with on_lo(port) as transport:
        assert len(transport.sockets()) == 3
        pid = os.fork()
        if pid == 0:
            os._exit(sum(opened.fileno() != -1 for opened in transport.sockets()))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        transport.multicast("lo", b"x", GROUP)
        assert len(gather(transport, 1)) == 1


# In namespaces --------------------------------------------------------------------------------------------------


def between(name: str, *, ttl: int = 1, family: Family = "auto", port: int = 29499) -> Transport:
    """A transport on all interfaces of a host but `lo`."""
    with inside(name):
        found = [interface for interface in scan() if interface.addresses and not interface.loopback]
        return Transport(found, groups=[GROUP, LOBBY], port=port, ttl=ttl, family=family)


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
            assert {one.interface for one in heard} == {"eth2"}
            assert {one.family for one in heard} == {"4", "6"}
            assert nothing_more(b)
            for one in heard:
                b.reply(one, b"me")
            assert {one.source[0] for one in gather(a, 4) if not one.multicast} == {"10.2.0.2", "fd00:2::2"}


def one_family_only() -> None:
    two_hosts()
    with between("a", family="6") as a, between("b") as b, between("b", family="4", port=29500) as only_ipv4:
        assert not [opened for opened in a.sockets() if opened.family == socket.AF_INET]
        a.multicast("eth1", b"x", LOBBY)
        assert [one.family for one in gather(b, 1)] == ["6"]
        assert nothing_more(b)
        assert not [opened for opened in only_ipv4.sockets() if opened.family == socket.AF_INET6]


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
        deadline = time.monotonic() + 20
        while a.failures and time.monotonic() < deadline:
            with inside("a"):
                a.update([one for one in scan() if one.name == "eth1"])
        assert not a.failures
        a.multicast("eth1", b"x", GROUP)
        assert {one.family for one in gather(a, 2)} == {"4", "6"}


def a_refused_send_is_not_final() -> None:
    two_hosts()
    with between("a", family="4") as a, between("b", family="4") as b:
        with inside("a"):
            nft("add table inet t")
            nft("add chain inet t out { type filter hook output priority 0; }")
            nft("add rule inet t out meta l4proto udp drop")
        assert not a.multicast("eth1", b"x", GROUP)
        assert a.send_errors == {"EPERM": 1}
        with inside("a"):
            nft("delete table inet t")
        assert a.multicast("eth1", b"y", GROUP)
        assert [one.data for one in gather(b, 1)] == [b"y"]
        ip("-n a link set eth1 down")
        assert not a.multicast("eth1", b"z", GROUP)
        ip("-n a link set eth1 up")
        assert a.multicast("eth1", b"z", GROUP)


def memberships_are_reported_again() -> None:
    two_hosts()
    with between("b") as b, inside("a"), socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0) as wire:
        wire.bind(("eth1", 0x0800))
        assert b.refresh() == ([], [])
        # IGMPv3 reports (RFC 3376) come within the robustness interval of a second.
        wire.settimeout(5)
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


def ipv6_on_loopback_alone() -> None:
    (loopback,) = scan()
    with no_descriptor_leaks():
        with Transport([loopback], groups=[GROUP], port=29499, family="6") as transport:
            assert transport.interfaces == (loopback,)
            assert not transport.failures
            assert not transport.multicast("lo", b"x", GROUP)
            assert transport.unicast(b"x", ("::1", 29499))
            (heard,) = gather(transport, 1)
            assert (heard.interface, heard.local, heard.family) == ("lo", True, "6")
        with Transport([loopback], groups=[GROUP], port=29499) as transport:
            assert {opened.family for opened in transport.sockets()} == {socket.AF_INET}


def an_ipv6_port_that_is_not_shared() -> None:
    two_hosts()
    with inside("a"), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as selfish:
        selfish.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        selfish.bind(("::", 29499))
        with no_descriptor_leaks():
            with Transport([interface_of("a")], groups=[GROUP, LOBBY], port=29499) as a:
                # multicast_expert fails half-way: the socket that could not be bound is closed as well.
                assert set(a.failures) == {"eth1 IPv6", "IPv6 unicast"}
                assert a.multicast("eth1", b"x", GROUP)
            with pytest.raises(InterfaceError, match="another program holds UDP port 29499"):
                Transport([interface_of("a")], groups=[GROUP], port=29499, family="6")


@pytest.mark.lab
@needs_namespaces
@pytest.mark.parametrize(
    "scenario",
    [
        both_families_reach_the_other_host,
        unicast_over_ipv6,
        several_interfaces_stay_apart,
        one_family_only,
        interfaces_come_and_go,
        an_address_under_duplicate_check_is_retried,
        a_refused_send_is_not_final,
        memberships_are_reported_again,
        ipv6_on_loopback_alone,
        an_ipv6_port_that_is_not_shared,
    ],
)
def test_in_namespaces(scenario: Callable[[], None]) -> None:
    run_isolated(scenario)
