"""The sockets, on `lo`."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from ipaddress import ip_interface
from pathlib import Path

import pytest
from msgspec import structs
from multicast_expert import MulticastExpertError

from mingle.config.settings import Family
from mingle.errors import InterfaceError
from mingle.network import transport as sockets
from mingle.network.interfaces import Interface, scan
from mingle.network.transport import NothingOpenedError, Transport
from mingle.wire.datagrams import BROWSE_GROUP, job_group
from tests.support.children import in_child
from tests.support.failing import raising, refusing
from tests.support.ports import free_udp_port
from tests.support.receiving import gather, no_descriptor_leaks, nothing_more

LO = next(interface for interface in scan() if interface.loopback)
GROUP = job_group("transport tests")
GHOST = Interface("ghost0", 9999, (ip_interface("192.0.2.77/24"), ip_interface("2001:db8::77/64")))
linux_only = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")


@pytest.fixture
def port() -> int:
    return free_udp_port()


def on_lo(port: int) -> contextlib.closing[Transport]:
    return contextlib.closing(Transport([LO], groups=[GROUP, BROWSE_GROUP], port=port))


def test_two_transports_of_one_process_hear_each_other(port: int) -> None:
    with no_descriptor_leaks(), on_lo(port) as one, on_lo(port) as two:
        assert one.multicast("lo", b"hello", GROUP)
        for listener in (one, two):
            (heard,) = gather(listener, 1)
            assert heard.data == b"hello"
            assert (heard.interface, heard.family, heard.destination) == ("lo", "4", GROUP.ipv4)
            assert (heard.multicast, heard.local) == (True, True)
        assert (one.sent, one.received, two.received) == (1, 1, 1)
        assert not one.send_errors
        for each in (one, one, two):
            each.close()
        assert (one.sockets(), one.interfaces) == ([], ())


def test_a_reply_to_a_multicast_reaches_its_sender_alone(port: int) -> None:
    with on_lo(port) as asking, on_lo(port) as answering, on_lo(port) as bystander:
        asking.multicast("lo", b"who?", GROUP)
        (question,) = gather(answering, 1)
        assert answering.reply(question, b"me")
        heard = gather(asking, 2)
        assert [(one.data, one.multicast) for one in heard if one.data == b"me"] == [(b"me", False)]
        assert [one.data for one in gather(bystander, 1)] == [b"who?"]
        assert nothing_more(bystander)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1"])
def test_unicast_to_the_shared_port_is_for_all_and_answered_from_where_it_was_asked(port: int, host: str) -> None:
    """What a stateful firewall, or address translation, lets back in; the answer is for one process alone."""
    family: Family = "6" if ":" in host else "4"
    with contextlib.ExitStack() as stack:
        server, client = (
            stack.enter_context(contextlib.closing(Transport([LO], groups=[GROUP], port=number, family=family)))
            for number in (port, free_udp_port())
        )
        assert client.unicast(b"who?", (host, port))
        (question,) = gather(server, 1)
        assert (question.interface, question.multicast, question.destination) == ("lo", False, host)
        gone = structs.replace(question, via=None)
        for each in (question, gone, structs.replace(gone, interface="gone0")):
            assert server.reply(each, b"me")
        first, *others = gather(client, 3)
        assert (first.data, first.source[:2]) == (b"me", (host, port))
        assert [each.data for each in others] == [b"me", b"me"]
        assert (question.shared, first.shared) == (True, False)


def test_other_groups_are_not_heard(port: int) -> None:
    other = job_group("another job")
    with on_lo(port) as mine, contextlib.closing(Transport([LO], groups=[other], port=port)) as theirs:
        theirs.multicast("lo", b"theirs", other)
        mine.multicast("lo", b"browse", BROWSE_GROUP)
        assert [one.data for one in gather(mine, 1)] == [b"browse"]
        assert nothing_more(mine)
        with pytest.raises(MulticastExpertError):
            mine.multicast("lo", b"not joined", other)


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


def test_errors_of_a_socket_do_not_hide_what_follows(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, pending = sockets.read, [ConnectionRefusedError(111, "refused"), OSError(100, "down")]

    def failing_first(opened: socket.socket) -> sockets.Received | None:
        if pending:
            raise pending.pop()
        return read(opened)

    with on_lo(port) as transport:
        transport.multicast("lo", b"x", GROUP)
        monkeypatch.setattr(sockets, "read", failing_first)
        assert [one.data for one in gather(transport, 1)] == [b"x"]
        assert not pending


def test_update_keeps_what_fits_and_reopens_what_changed(port: int) -> None:
    with on_lo(port) as transport:
        before = transport.sockets()
        assert transport.update([LO]) == transport.refresh() == ([], [])
        assert transport.sockets() == before
        renumbered = structs.replace(LO, addresses=(ip_interface("127.0.0.2/8"),))
        added, removed = transport.update([renumbered])
        assert len(added) == len(removed) == 2
        assert transport.interfaces == (renumbered,)
        assert [(opened.fileno(), transport.receive(opened)) for opened in removed] == [(-1, [])] * 2
        transport.multicast("lo", b"x", GROUP)
        (heard,) = gather(transport, 1)
        assert heard.source[0] == "127.0.0.2"


NOT_READY = structs.replace(LO, addresses=(ip_interface("192.0.2.77/24"), ip_interface("127.0.0.1/8")))


@pytest.mark.parametrize(
    ("interfaces", "failing"), [([GHOST, LO], {"ghost0 IPv4", "ghost0 IPv6"}), ([NOT_READY], set())]
)
def test_an_interface_or_an_address_that_cannot_be_opened_does_not_stop_the_others(
    port: int, interfaces: list[Interface], failing: set[str]
) -> None:
    with no_descriptor_leaks(), contextlib.closing(Transport(interfaces, groups=[GROUP], port=port)) as transport:
        assert transport.interfaces == (interfaces[-1],)
        assert set(transport.failures) >= failing
        assert all(transport.failures[each].startswith("ENODEV: ") for each in failing if each.endswith("4"))
        assert failing or not transport.failures
        transport.multicast("lo", b"x", GROUP)
        assert gather(transport, 1)[0].source[0] == "127.0.0.1"


@linux_only
def test_a_port_held_by_another_program(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as selfish, no_descriptor_leaks():
        selfish.bind(("", port))
        with pytest.raises(NothingOpenedError) as caught:
            on_lo(port)
        error = str(caught.value.diagnosed())
    # In this very process, which is no stranger to itself: in the lab another program is named.
    assert f"UDP port {port} is held by another program, which does not share it" in error
    assert f"ss -ulpn 'sport = :{port}'" in error
    assert "MINGLE_PORT" in error
    assert "lo IPv4: EADDRINUSE" in error


@linux_only
@pytest.mark.parametrize("opener", ["open_sender", "open_unicast"])
def test_no_free_port_is_no_other_program_there(port: int, monkeypatch: pytest.MonkeyPatch, opener: str) -> None:
    monkeypatch.setattr(sockets, opener, refusing(errno.EADDRINUSE))
    with no_descriptor_leaks():
        if opener == "open_unicast":
            with on_lo(port) as transport:
                unopened = NothingOpenedError(port, dict(transport.failures))
        else:
            with pytest.raises(NothingOpenedError) as caught:
                on_lo(port)
            unopened = caught.value
        error = str(unopened.diagnosed())
    assert "likely cause: no port is free among those that the system chooses from (net.ipv4.ip_local_port_r" in error
    assert "another program" not in error


@linux_only
@pytest.mark.parametrize("interfaces", [[], [GHOST]])
def test_nothing_to_open(port: int, interfaces: list[Interface]) -> None:
    with no_descriptor_leaks(), pytest.raises(NothingOpenedError) as caught:
        Transport(interfaces, groups=[GROUP], port=port, family="4")
    error = caught.value.diagnosed()
    assert isinstance(error, InterfaceError)
    assert "nothing could be opened" in error.observation
    assert "mingle-discover interfaces" in str(error)


@linux_only
@pytest.mark.parametrize("failing", ["open_sender", "open_receiver", "open_unicast", "_prepare"])
def test_nothing_leaks_when_the_system_refuses(port: int, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setattr(sockets, failing, raising(KeyboardInterrupt()))
    with no_descriptor_leaks(), pytest.raises(KeyboardInterrupt):
        on_lo(port)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_holds_none_of_the_sockets(port: int) -> None:
    with on_lo(port) as transport:
        assert in_child(lambda: str([opened.fileno() for opened in transport.sockets()])) == "[-1, -1, -1]"
        transport.multicast("lo", b"x", GROUP)
        assert len(gather(transport, 1)) == 1
