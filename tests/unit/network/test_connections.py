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
from tests.support.failing import refusing
from tests.support.loopback import answers, closed_port
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

    def sockets(self) -> list[socket.socket]:
        """Return those that are watched."""
        return [key.fileobj for key in self.selector.get_map().values()]  # type: ignore[misc]

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


def keepalive_of(end: socket.socket) -> list[int]:
    """After how many seconds of silence a peer is probed, how often, and how many probes it may leave unanswered."""
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    return [end.getsockopt(socket.IPPROTO_TCP, option) for option in options]


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


@pytest.mark.parametrize(
    ("addresses", "problem", "times", "bound"),
    [
        pytest.param(["127.0.0.1", "127.0.0.2"], errno.EADDRINUSE, 3, 2, id="a port that one lacks is given up"),
        pytest.param(["127.0.0.1", "::1"], errno.EAFNOSUPPORT, 1, 1, id="a sandbox without IPv6", marks=needs_ipv6),
        pytest.param(["::1"], errno.EADDRNOTAVAIL, 3, 1, id="a duplicate check is waited for", marks=needs_ipv6),
    ],
)
def test_port_is_open_on_every_address_that_can_be_bound(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, addresses: list[str], problem: int, times: int, bound: int
) -> None:
    monkeypatch.setattr(connections, "DUPLICATE_CHECK_SECONDS", 60.0)  # a starved machine takes longer than the check
    busy_address(monkeypatch, addresses[-1], times, problem)
    wanted = [(address, LO.index) for address in addresses]
    assert loop.connections.listen(wanted) == {*wanted[:bound]}
    assert all(answers(loop.connections.port, address) for address, _ in wanted[:bound])
    assert len(loop.selector.get_map()) == bound


def test_an_address_that_is_not_ready_is_listened_on_later(loop: Loop) -> None:
    first, later, never = ("127.0.0.1", LO.index), ("127.0.0.3", LO.index), ("192.0.2.77", LO.index)
    assert loop.connections.listen([first, never]) == {first}
    port = loop.connections.port
    for _ in range(2):  # what is listened on already stays so
        assert loop.connections.listen_also([later, never, first]) == {first, later}
    assert loop.connections.port == port
    assert all(answers(port, address) for address in ("127.0.0.1", "127.0.0.3"))


@pytest.mark.parametrize(
    ("addresses", "problem", "check", "words"),
    [
        pytest.param(["127.0.0.1", "127.0.0.2"], errno.EADDRINUSE, 0.0, ["in use"], id="no port"),
        pytest.param(["192.0.2.77", "192.0.2.78"], 0, 0.0, ["no address is ready"], id="not here"),
        pytest.param(["2001:db8::77"], 0, 0.0, ["no address is ready", "duplicates"], id="a check that does not end"),
        pytest.param(["::1"], errno.EAFNOSUPPORT, 60.0, ["not supported"], id="a sandbox without the only family"),
    ],
)
def test_no_address_that_can_be_bound_is_an_error_at_once(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, addresses: list[str], problem: int, check: float, words: list[str]
) -> None:
    monkeypatch.setattr(connections, "DUPLICATE_CHECK_SECONDS", check)
    busy_address(monkeypatch, addresses[-1], 10**6 if problem else 0, problem)
    started = time.monotonic()
    with pytest.raises(InterfaceError) as caught:
        loop.connections.listen([(address, LO.index) for address in addresses])
    assert time.monotonic() - started < 45
    assert all(word in str(caught.value) for word in [", ".join(addresses), *words])
    assert not loop.selector.get_map()


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


@linux_only
@needs_ipv6
def test_an_interface_that_goes_while_the_port_is_opened_does_not_stop_the_others(loop: Loop) -> None:
    """One end of a container's cable, for example, which often has only a link-local address."""
    here, gone = ("127.0.0.1", LO.index), ("fe80::1", 9999)
    assert loop.connections.listen([here, gone]) == {here}
    assert loop.connections.listen_also([gone, here]) == {here}


@pytest.mark.parametrize("gone", ["another address", "no address"])
def test_connection_ends_whose_own_address_has_gone(loop: Loop, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    """macOS says EINVAL of a socket that the other end has reset."""
    loop.connections.listen([("127.0.0.1", LO.index)])
    with socket.create_connection(("127.0.0.1", loop.connections.port), timeout=30) as caller:
        accepted = loop.wait_for(SocketAccepted)
        assert loop.connections.drop_strays({"127.0.0.1"}) == []
        with monkeypatch.context() as reset:
            if gone == "no address":
                reset.setattr(socket.socket, "getsockname", refusing(errno.EINVAL))
            (closed,) = loop.connections.drop_strays({"127.0.0.2" if gone == "another address" else "127.0.0.1"})
        assert isinstance(closed, SocketEnded)
        assert closed.conn == accepted.conn
        assert ("127.0.0.1" in closed.reason) is (gone == "another address")
        assert caller.recv(1) == b""


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
    ends = [end for end in loop.sockets() if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
    assert len(ends) == 2
    for end in ends:
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if sys.platform == "linux":
            idle, interval, probes = keepalive_of(end)
            assert idle + interval * probes <= 10
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000


def test_a_refused_connection(loop: Loop) -> None:
    with closed_port() as port:
        assert loop.connections.dial(DIALLED, "127.0.0.1", port, LO.index) == []
        assert loop.wait_for(SocketEnded) == SocketEnded(DIALLED, "Connection refused (ECONNREFUSED)")


@linux_only
@pytest.mark.parametrize(
    ("address", "fails", "problem"),
    [
        # The kernel refuses TCP to a broadcast address before it sends anything.
        pytest.param("255.255.255.255", None, errno.ENETUNREACH, id="an address"),
        pytest.param("127.0.0.1", "socket", errno.EMFILE, id="no socket is left"),
        # The number of files that epoll watches for a user is limited: fs.epoll.max_user_watches.
        pytest.param("127.0.0.1", "register", errno.ENOSPC, id="the selector takes no more"),
    ],
)
def test_what_cannot_be_dialed_is_told_at_once_and_closed(
    loop: Loop, server: socket.socket, monkeypatch: pytest.MonkeyPatch, address: str, fails: str | None, problem: int
) -> None:
    if fails is not None:
        monkeypatch.setattr(socket if fails == "socket" else loop.selector, fails, refusing(problem))
    port = server.getsockname()[1]
    with no_descriptor_leaks():
        (ended,) = loop.connections.dial(DIALLED, address, port, LO.index)
        assert ended == SocketEnded(DIALLED, f"{os.strerror(problem)} ({errno.errorcode[problem]})")
        assert loop.connections.write(DIALLED, b"hello") == []
        if fails is not None:
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


def test_a_reset_is_told_by_a_read_or_by_the_next_write(loop: Loop, server: socket.socket) -> None:
    for events in (lambda: [loop.wait_for(SocketEnded)], lambda: loop.connections.write(DIALLED, b"hello")):
        with dialed(loop, server) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        (event,) = events()
        assert event == SocketEnded(DIALLED, "Connection reset by peer (ECONNRESET)")
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
        assert select.select(loop.sockets(), [], [], 5)[0]
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
        kept = loop.connections.unsent(DIALLED)
        assert kept > 0
        read_exactly(peer, len(LARGE) - kept)
        loop.connections.close()
        assert read_all(peer)
    assert not answers(loop.connections.port)
    loop.connections.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_holds_none_of_the_sockets(loop: Loop) -> None:
    loop.connections.listen([("127.0.0.1", LO.index)])
    loop.connections.dial(DIALLED, "127.0.0.1", loop.connections.port, LO.index)
    loop.wait_for(SocketAccepted)
    held = loop.sockets()
    assert in_child(lambda: str([each.fileno() for each in held])) == "[-1, -1, -1]"


@pytest.mark.parametrize(
    ("written", "bare", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1", "fe80::1"),
        ("::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("::ffff:a00:1", "::ffff:a00:1", "10.0.0.1"),
        ("2001:DB8:0:0::1", "2001:DB8:0:0::1", "2001:db8::1"),
    ],
)
def test_an_address_is_one_however_it_is_written(written: str, bare: str, canonical: str) -> None:
    assert (bare_address(written), canonical_address(written)) == (bare, canonical)


def test_out_of_descriptors_a_caller_is_turned_away(loop: Loop) -> None:
    """Left in the backlog it would make the listener readable for ever, and the loop spin."""
    loop.connections.listen([("127.0.0.1", LO.index)])
    ((key, mask),) = [(key, selectors.EVENT_READ) for key in loop.selector.get_map().values()]
    caller = socket.create_connection(("127.0.0.1", loop.connections.port))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, limits[1]))

        def fill() -> None:
            with contextlib.suppress(OSError):
                while True:
                    stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))

        fill()
        assert key.data(mask) == []
        # Another thread took the descriptor that was kept for this: once more, without it.
        os.close(loop.connections._spare)
        loop.connections._spare = -1
        fill()
        assert key.data(mask) == []
        assert loop.connections.starved
        assert not loop.selector.get_map(), "the loop does not spin"
    with caller:
        assert caller.recv(1) == b""
    loop.connections.listen_again()
    assert not loop.connections.starved
    assert (loop.selector.select(0), len(loop.selector.get_map())) == ([], 1)


@pytest.mark.parametrize("problem", [errno.ENOBUFS, errno.ENOMEM])
def test_out_of_memory_callers_wait_and_the_loop_rests(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """The caller stays in the queue, so the listener would be readable for ever."""
    loop.connections.listen([("127.0.0.1", LO.index)])
    with monkeypatch.context() as broken, socket.create_connection(("127.0.0.1", loop.connections.port)):
        broken.setattr(socket.socket, "accept", refusing(problem))
        loop.turn(10.0)
        assert loop.connections.starved
        assert (loop.events, loop.selector.select(0)) == ([], [])
        broken.setattr(loop.selector, "register", refusing(problem))
        loop.connections.listen_again()
        assert loop.connections.starved, "epoll needs memory as well"
        broken.undo()
        loop.connections.listen_again()
        assert loop.wait_for(SocketAccepted)


@linux_only
def test_a_connection_that_is_kept_open_outlasts_an_outage_and_the_memory_of_firewalls() -> None:
    with socket.socket() as sock:
        connections.tune(sock)
        connections.keep_open(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, probes = keepalive_of(sock)
        assert idle < 4 * 60, "shorter than the memory of the most forgetful cloud"
        assert interval * probes >= 10 * 60
