"""The TCP side of the loop, on `lo`, against plain sockets that behave well or badly."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import resource
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mingle.errors import InterfaceError
from mingle.network import connections
from mingle.network.connections import (
    ACCEPTED_AT_ONCE,
    Connections,
    SocketAccepted,
    SocketConnected,
    SocketData,
    SocketEnded,
    SocketEvent,
    bare_address,
    canonical_address,
)
from mingle.network.interfaces import scan
from tests.support.children import in_child
from tests.support.loopback import answers
from tests.support.receiving import no_descriptor_leaks

LO = next(interface for interface in scan() if interface.loopback)
LARGE = bytes(range(256)) * 32 * 1024  # 8 MiB: more than the kernel buffers between two ends
DIALLED = 1000

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="this is how Linux behaves")
needs_ipv6 = pytest.mark.skipif(not LO.of_family("6"), reason="lo has no IPv6 address")

_E = TypeVar("_E", SocketAccepted, SocketConnected, SocketData, SocketEnded)


class Loop:
    """What the discovery's loop does with connections."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.connections = Connections(self.selector, itertools.count(1).__next__)
        self.events: list[SocketEvent] = []

    def dial(self, target: socket.socket) -> list[SocketEvent]:
        """Begin to connect to a socket of the test's."""
        address, port = target.getsockname()
        return self.connections.dial(DIALLED, address, port, LO.index)

    def turn(self, seconds: float) -> None:
        """Wait once and serve what is ready."""
        for key, mask in self.selector.select(seconds):
            self.events += key.data(mask)

    def wait_for(self, kind: type[_E]) -> _E:
        """Serve until an event of this kind comes, and take it."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
            self.turn(0.1)
        raise AssertionError(f"no {kind.__name__} came, only {self.events}")

    def serve_while(self, read: Callable[[], bytes], and_then: Callable[[], object] = lambda: None) -> bytes:
        """Serve while another thread reads; return what it has read."""
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            and_then()
            deadline = time.monotonic() + 60
            while not reading.done() and time.monotonic() < deadline:
                self.turn(0.01)
            return reading.result(0)

    def masks(self) -> list[int]:
        """What is waited for."""
        return [key.events for key in self.selector.get_map().values()]


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.connections.close()
    assert not loop.selector.get_map(), "something is still watched"
    loop.selector.close()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A listener of somebody else's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


def dialed(loop: Loop, server: socket.socket) -> socket.socket:
    """Connect to the server; its end, which reads with a deadline."""
    assert loop.dial(server) == []
    assert loop.wait_for(SocketConnected).conn == DIALLED
    peer, _ = server.accept()
    peer.settimeout(60)
    return peer


def read_all(peer: socket.socket) -> bytes:
    data = bytearray()
    while chunk := peer.recv(1 << 20):
        data += chunk
    return bytes(data)


def read_exactly(peer: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = peer.recv(count - len(data))
        assert chunk, "it ended early"
        data += chunk
    return bytes(data)


def busy_address(monkeypatch: pytest.MonkeyPatch, address: str, times: int, problem: int = errno.EADDRINUSE) -> None:
    """Let an address's port be taken for so many attempts: which port comes first can't be foreseen."""
    left = [times]

    class Socket(socket.socket):
        def bind(self, where: Any) -> None:
            if where[0] == address and left[0]:
                left[0] -= 1
                raise OSError(problem, os.strerror(problem))
            super().bind(where)

    monkeypatch.setattr(socket, "socket", Socket)


# --- listening ------------------------------------------------------------------------------------------------------


def test_all_addresses_listen_at_one_port(loop: Loop) -> None:
    addresses = ["127.0.0.1", "127.0.0.2"] + (["::1"] if LO.of_family("6") else [])
    loop.connections.listen([(address, LO.index) for address in addresses])
    for address in addresses:
        with socket.create_connection((address, loop.connections.port), timeout=30) as client:
            accepted = loop.wait_for(SocketAccepted)
            assert accepted.address == client.getsockname()[0]
            client.sendall(b"hello")
            assert loop.wait_for(SocketData) == SocketData(accepted.conn, b"hello")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", loop.connections.port), timeout=30)


def test_a_port_that_one_address_does_not_have_is_given_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    busy_address(monkeypatch, "127.0.0.2", times=3)
    loop.connections.listen([("127.0.0.1", LO.index), ("127.0.0.2", LO.index)])
    for address in ("127.0.0.1", "127.0.0.2"):
        socket.create_connection((address, loop.connections.port), timeout=30).close()
    assert len(loop.selector.get_map()) == 2


@pytest.mark.parametrize(
    ("addresses", "busy", "reason"),
    [(["127.0.0.1", "127.0.0.2"], 10**6, "in use"), (["192.0.2.77", "192.0.2.78"], 0, "no address is ready")],
)
def test_addresses_that_cannot_be_listened_on(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, addresses: list[str], busy: int, reason: str
) -> None:
    busy_address(monkeypatch, "127.0.0.2", times=busy)
    with pytest.raises(InterfaceError, match=reason) as caught:
        loop.connections.listen([(address, LO.index) for address in addresses])
    assert ", ".join(addresses) in caught.value.observation
    assert not loop.selector.get_map()


def test_an_address_that_is_not_ready_is_listened_on_later(loop: Loop) -> None:
    first, later, never = ("127.0.0.1", LO.index), ("127.0.0.3", LO.index), ("192.0.2.77", LO.index)
    assert loop.connections.listen([first, never]) == {first}
    port = loop.connections.port
    for _ in range(2):  # what is listened on already stays so
        assert loop.connections.listen_also([later, never, first]) == {first, later}
    for address in ("127.0.0.1", "127.0.0.3"):
        socket.create_connection((address, port), timeout=30).close()
    assert loop.connections.port == port


def test_an_address_whose_interface_is_replaced_stays_bound(loop: Loop) -> None:
    before, after = ("127.0.0.3", 7), ("127.0.0.3", 8)
    assert loop.connections.listen([before]) == {before}
    assert loop.connections.listen_also([after]) == {after}
    loop.connections.leave_interfaces(but={8})
    socket.create_connection(("127.0.0.3", loop.connections.port), timeout=30).close()


def test_link_local_listeners_end_with_their_interface(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {("fe80::1", 7): "127.0.0.3", ("fe80::1", 8): "127.0.0.4"}
    monkeypatch.setattr(
        connections, "_endpoint", lambda address, port, index: (socket.AF_INET, (places[address, index], port))
    )
    assert loop.connections.listen(list(places)) == set(places)
    loop.connections.leave_interfaces(but={8})
    assert not answers(loop.connections.port, "127.0.0.3")
    assert answers(loop.connections.port, "127.0.0.4")
    assert loop.connections.listen_also(list(places)) == set(places), "it comes back"


@needs_ipv6
def test_a_host_with_ipv6_alone_waits_for_the_duplicate_check(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DUPLICATE_CHECK_SECONDS", 60.0)  # a starved machine takes longer than the check
    busy_address(monkeypatch, "::1", times=3, problem=errno.EADDRNOTAVAIL)
    assert loop.connections.listen([("::1", LO.index)]) == {("::1", LO.index)}


@needs_ipv6
def test_a_sandbox_without_ipv6_does_not_stop_ipv4(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a unit of systemd with ``RestrictAddressFamilies=AF_INET``: the addresses are there, and no sockets."""
    busy_address(monkeypatch, "::1", times=1, problem=errno.EAFNOSUPPORT)
    addresses = [("127.0.0.1", LO.index), ("::1", LO.index)]
    assert loop.connections.listen(addresses) == {("127.0.0.1", LO.index)}


def test_a_sandbox_without_the_only_family_is_an_error_at_once(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DUPLICATE_CHECK_SECONDS", 60.0)
    busy_address(monkeypatch, "::1", times=10_000, problem=errno.EAFNOSUPPORT)
    started = time.monotonic()
    with pytest.raises(InterfaceError, match="not supported"):
        loop.connections.listen([("::1", LO.index)])
    assert time.monotonic() - started < 45


def test_a_duplicate_check_that_does_not_end_is_not_waited_for(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DUPLICATE_CHECK_SECONDS", 0.0)
    with pytest.raises(InterfaceError, match="no address is ready") as caught:
        loop.connections.listen([("2001:db8::77", LO.index)])
    assert "duplicates" in str(caught.value.cause)


@linux_only
@needs_ipv6
def test_an_interface_that_goes_while_the_port_is_opened_does_not_stop_the_others(loop: Loop) -> None:
    """One end of a container's cable, for example, which often has only a link-local address."""
    here, gone = ("127.0.0.1", LO.index), ("fe80::1", 9999)
    assert loop.connections.listen([here, gone]) == {here}
    assert loop.connections.listen_also([gone, here]) == {here}


def test_connections_end_whose_own_address_has_gone(loop: Loop) -> None:
    loop.connections.listen([("127.0.0.1", LO.index)])
    with socket.create_connection(("127.0.0.1", loop.connections.port), timeout=30) as caller:
        accepted = loop.wait_for(SocketAccepted)
        assert loop.connections.drop_strays({"127.0.0.1"}) == []
        (closed,) = loop.connections.drop_strays({"127.0.0.2"})
        assert isinstance(closed, SocketEnded)
        assert (closed.conn, "127.0.0.1" in closed.reason) == (accepted.conn, True)
        assert caller.recv(1) == b""


def test_a_connection_that_cannot_say_its_address_is_ended(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS says EINVAL of a socket that the other end has reset."""
    loop.connections.listen([("127.0.0.1", LO.index)])
    with socket.create_connection(("127.0.0.1", loop.connections.port), timeout=30):
        accepted = loop.wait_for(SocketAccepted)

        def reset(_socket: socket.socket) -> object:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(socket.socket, "getsockname", reset)
        (closed,) = loop.connections.drop_strays({"127.0.0.1"})
        assert isinstance(closed, SocketEnded)
        assert closed.conn == accepted.conn


def test_a_flood_of_connections_is_taken_in_bounded_bites(loop: Loop) -> None:
    loop.connections.listen([("127.0.0.1", LO.index)])
    target = ("127.0.0.1", loop.connections.port)
    clients = [socket.create_connection(target, timeout=30) for _ in range(ACCEPTED_AT_ONCE + 14)]
    try:
        loop.turn(5)
        assert len(loop.events) == ACCEPTED_AT_ONCE
        loop.turn(5)
        accepted = [event.conn for event in loop.events if isinstance(event, SocketAccepted)]
        assert len(set(accepted)) == ACCEPTED_AT_ONCE + 14
    finally:
        for client in clients:
            client.close()


# --- dialling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_dialed_connection_reports_its_local_address(loop: Loop, address: str) -> None:
    loop.connections.listen([(address, LO.index)])
    assert loop.connections.dial(DIALLED, address, loop.connections.port, LO.index) == []
    assert loop.wait_for(SocketConnected) == SocketConnected(DIALLED, address)
    assert loop.wait_for(SocketAccepted).address == address


def test_a_dead_peer_is_noticed_on_either_end(loop: Loop) -> None:
    loop.connections.listen([("127.0.0.1", LO.index)])
    loop.connections.dial(DIALLED, "127.0.0.1", loop.connections.port, LO.index)
    loop.wait_for(SocketConnected)
    loop.wait_for(SocketAccepted)
    ends = list(loop.connections._connections.values())
    assert len(ends) == 2
    for end in ends:
        assert end.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if sys.platform == "linux":
            idle, interval, probes, timeout = (
                end.socket.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                    socket.TCP_USER_TIMEOUT,
                )
            )
            assert idle + interval * probes <= 10
            assert timeout == 10_000


def test_a_refused_connection(loop: Loop) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # reserved, and not listening
        assert loop.dial(closed) == []
        assert loop.wait_for(SocketEnded) == SocketEnded(DIALLED, "Connection refused (ECONNREFUSED)")


@linux_only
def test_an_address_that_cannot_be_dialed_is_told_at_once(loop: Loop) -> None:
    # The kernel refuses TCP to a broadcast address before it sends anything.
    (event,) = loop.connections.dial(DIALLED, "255.255.255.255", 9, LO.index)
    assert event == SocketEnded(DIALLED, "Network is unreachable (ENETUNREACH)")


def test_no_socket_left_to_dial_with(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    (event,) = loop.connections.dial(DIALLED, "127.0.0.1", 9, LO.index)
    assert event == SocketEnded(DIALLED, "Too many open files (EMFILE)")


def test_a_socket_that_the_selector_does_not_take_is_told_and_closed(
    loop: Loop, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of files that epoll watches for a user is limited: fs.epoll.max_user_watches."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop.selector, "register", refuse)
    with no_descriptor_leaks():
        assert loop.dial(server) == [SocketEnded(DIALLED, "No space left on device (ENOSPC)")]
        assert loop.connections.write(DIALLED, b"hello") == []
        assert loop.connections.listen_also([("127.0.0.3", LO.index)]) == frozenset()


@linux_only
def test_a_host_that_does_not_answer_can_be_given_up(loop: Loop) -> None:
    # Once its queue of one is full, the kernel lets the listener drop what comes: as a filter would.
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        socket.create_connection(silent.getsockname(), timeout=30),
    ):
        assert loop.dial(silent) == []
        assert loop.connections.write(DIALLED, b"hello") == []
        loop.turn(0.1)
        assert loop.events == []
        loop.connections.hang_up(DIALLED)
        assert not loop.selector.get_map()


def test_early_writes_are_sent_once_connected(loop: Loop, server: socket.socket) -> None:
    assert loop.dial(server) == []
    assert loop.connections.write(DIALLED, b"hel") == []
    assert loop.connections.write(DIALLED, b"lo") == []
    loop.wait_for(SocketConnected)
    peer, _ = server.accept()
    with peer:
        peer.settimeout(60)
        assert peer.recv(16) == b"hello"


# --- talking --------------------------------------------------------------------------------------------------------


def test_last_data_comes_before_the_end_event(loop: Loop, server: socket.socket) -> None:
    with dialed(loop, server) as peer:
        peer.sendall(b"the first half of a fra")
    assert loop.wait_for(SocketData) == SocketData(DIALLED, b"the first half of a fra")
    assert loop.wait_for(SocketEnded) == SocketEnded(DIALLED, "the other side closed it")
    assert not loop.selector.get_map()


def test_a_reset_connection(loop: Loop, server: socket.socket) -> None:
    with dialed(loop, server) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert loop.wait_for(SocketEnded) == SocketEnded(DIALLED, "Connection reset by peer (ECONNRESET)")


def test_writing_on_what_the_peer_has_closed(loop: Loop, server: socket.socket) -> None:
    with dialed(loop, server) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    (event,) = loop.connections.write(DIALLED, b"hello")
    assert isinstance(event, SocketEnded)
    assert "ECONNRESET" in event.reason
    assert loop.connections.write(DIALLED, b"hello") == []


def test_partial_write_is_continued_in_order(loop: Loop, server: socket.socket) -> None:
    with dialed(loop, server) as peer:
        assert loop.connections.write(DIALLED, LARGE[:-1]) == []
        assert loop.masks() == [selectors.EVENT_READ | selectors.EVENT_WRITE]
        received = loop.serve_while(
            lambda: read_exactly(peer, len(LARGE)),
            # What comes last is written last, although the kernel has room again by then.
            and_then=lambda: loop.connections.write(DIALLED, LARGE[-1:]),
        )
        assert hashlib.sha256(received).digest() == hashlib.sha256(LARGE).digest()
        assert loop.masks() == [selectors.EVENT_READ]
        assert loop.events == []


def test_a_peer_that_never_reads_is_dropped(loop: Loop, server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", 10_000)
    with dialed(loop, server):
        events: list[SocketEvent] = []
        for _ in range(10_000):  # until the kernel's buffers of both ends are full, and ours
            events = loop.connections.write(DIALLED, bytes(5_000))
            assert loop.connections.unsent(DIALLED) <= 10_000
            if events:
                break
        assert events == [SocketEnded(DIALLED, "it does not read what it is sent")]
        assert not loop.selector.get_map()


def test_hanging_up_with_nothing_to_send_is_immediate(loop: Loop, server: socket.socket) -> None:
    with dialed(loop, server) as peer:
        loop.connections.write(DIALLED, b"bye")
        loop.connections.hang_up(DIALLED)
        assert not loop.selector.get_map()
        assert read_all(peer) == b"bye"
    loop.connections.hang_up(DIALLED)


def test_a_reset_is_no_orderly_end_for_the_peer(loop: Loop, server: socket.socket) -> None:
    with dialed(loop, server) as peer:
        loop.connections.reset(DIALLED)
        loop.connections.reset(DIALLED)
        with pytest.raises(ConnectionResetError):
            peer.recv(16)
    assert not loop.selector.get_map()


@pytest.mark.parametrize("data", [b"bye", LARGE], ids=["short", "large"])
def test_hanging_up_on_a_peer_that_still_speaks_sends_what_was_written_and_reports_nothing(
    loop: Loop, server: socket.socket, data: bytes
) -> None:
    with dialed(loop, server) as peer:
        peer.sendall(b"not interesting any more")
        (ours,) = (key.fileobj for key in loop.selector.get_map().values())
        assert select.select([ours], [], [], 5)[0]
        loop.connections.write(DIALLED, data)
        loop.connections.hang_up(DIALLED)
        assert loop.connections.write(DIALLED, b"too late") == []
        assert loop.serve_while(lambda: read_all(peer)) == data, "a reset would cut it"
    assert loop.events == []
    assert not loop.selector.get_map()


def test_a_peer_that_goes_while_we_hang_up_is_not_reported(loop: Loop, server: socket.socket) -> None:
    with dialed(loop, server) as peer:
        loop.connections.write(DIALLED, LARGE)
        loop.connections.hang_up(DIALLED)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    while loop.selector.get_map():
        loop.turn(5)
    assert loop.events == []


def test_connection_hung_up_in_the_same_round_is_not_served(loop: Loop, server: socket.socket) -> None:
    with dialed(loop, server) as peer:
        peer.sendall(b"x")
        ((key, _),) = loop.selector.select(5)
        loop.connections.hang_up(DIALLED)
        for mask in (selectors.EVENT_READ, selectors.EVENT_WRITE, selectors.EVENT_READ | selectors.EVENT_WRITE):
            assert key.data(mask) == []


def test_closing_gives_what_is_unsent_one_last_try(loop: Loop, server: socket.socket) -> None:
    loop.connections.listen([("127.0.0.1", LO.index)])
    with dialed(loop, server) as peer:
        loop.connections.write(DIALLED, LARGE)
        kept = len(loop.connections._connections[DIALLED].unsent)
        sent = len(LARGE) - kept
        assert kept > 0
        read_exactly(peer, sent)
        loop.connections.close()
        assert read_all(peer)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", loop.connections.port), timeout=30)
    loop.connections.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_holds_none_of_the_sockets(loop: Loop) -> None:
    loop.connections.listen([("127.0.0.1", LO.index)])
    loop.connections.dial(DIALLED, "127.0.0.1", loop.connections.port, LO.index)
    loop.wait_for(SocketAccepted)
    held = [key.fileobj for key in loop.selector.get_map().values()]
    assert len(held) == 3
    assert in_child(lambda: str([each.fileno() for each in held])) == "[-1, -1, -1]"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("host", "bare"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::ffff:a00:1", "::ffff:a00:1"),
        ("::1", "::1"),
    ],
)
def test_bare_addresses(host: str, bare: str) -> None:
    assert bare_address(host) == bare


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
    ],
)
def test_an_address_is_one_however_it_is_written(written: str, canonical: str) -> None:
    assert canonical_address(written) == canonical


def test_out_of_descriptors_a_caller_is_turned_away() -> None:
    """Left in the backlog it would make the listener readable for ever, and the loop spin."""
    with selectors.DefaultSelector() as selector:
        connections = Connections(selector, itertools.count(1).__next__)
        try:
            connections.listen([("127.0.0.1", 0)])
            (key,) = selector.get_map().values()
            caller = socket.create_connection(("127.0.0.1", connections.port))
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
            fillers = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        fillers.append(os.open(os.devnull, os.O_RDONLY))
                assert key.data(selectors.EVENT_READ) == []
                # Another thread took the descriptor that was kept for this: once more, without it.
                os.close(connections._spare)
                connections._spare = -1
                fillers.append(os.open(os.devnull, os.O_RDONLY))
                assert key.data(selectors.EVENT_READ) == []
                assert connections._spare == -1
                assert connections.starved
                assert not selector.get_map(), "the loop does not spin"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for filler in fillers:
                    os.close(filler)
            with caller:
                assert caller.recv(1) == b""
            assert selector.select(0) == []
            connections.listen_again()
            assert not connections.starved
            assert len(selector.get_map()) == 1
        finally:
            connections.close()


@pytest.mark.parametrize("problem", [errno.ENOBUFS, errno.ENOMEM])
def test_out_of_memory_a_caller_waits_and_the_loop_rests(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """The caller stays in the queue, so the listener would be readable for ever."""

    def refuse(*_: object) -> None:
        raise OSError(problem, os.strerror(problem))

    loop.connections.listen([("127.0.0.1", LO.index)])
    with monkeypatch.context() as broken, socket.create_connection(("127.0.0.1", loop.connections.port)):
        broken.setattr(socket.socket, "accept", refuse)
        ((key, mask),) = loop.selector.select(10.0)
        assert key.data(mask) == []
        assert loop.connections.starved
        assert loop.selector.select(0) == []
        broken.setattr(loop.selector, "register", refuse)
        loop.connections.listen_again()
        assert loop.connections.starved, "epoll needs memory as well"
        broken.undo()
        loop.connections.listen_again()
        ((key, mask),) = loop.selector.select(10.0)
        (event,) = key.data(mask)
        assert isinstance(event, SocketAccepted)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this option")
def test_a_connection_that_is_kept_open_outlasts_an_outage_and_the_memory_of_firewalls() -> None:
    with socket.socket() as sock:
        connections.tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == connections.USER_TIMEOUT_MILLISECONDS
        connections.keep_open(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, probes = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle < 4 * 60, "shorter than the memory of the most forgetful cloud"
        assert interval * probes >= 10 * 60
