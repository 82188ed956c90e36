"""The TCP side of the loop: listening, dialling, reading and writing without ever blocking. Knows no protocol."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from msgspec import Struct, field

from mingle import forksafe
from mingle.errors import InterfaceError, lacks_descriptor, no_port
from mingle.network.routes import port_range

READ_BYTES = 65_536
DRAINED_READS = 16
"""The number of reads before a connection is closed; bounded against a peer that never stops sending."""
BACKLOG = 4096
"""A whole cluster connects within a moment; the kernel caps this at net.core.somaxconn."""
# A dead peer is noticed within about ten seconds, whether or not there is something to send: keepalive serves
# the idle connection (tcp(7)), TCP_USER_TIMEOUT the one with data under way (RFC 5482).
KEEPALIVE_IDLE_SECONDS = 4
KEEPALIVE_INTERVAL_SECONDS = 2
KEEPALIVE_PROBES = 3
USER_TIMEOUT_MILLISECONDS = 10_000
# Otherwise as TCP has it (tcp(7)). Clouds forget a connection that is idle for minutes, and torch keeps none alive.
PATIENT_IDLE_SECONDS = 60
PATIENT_INTERVAL_SECONDS = 75
PATIENT_PROBES = 9
CLOSED_BY_PEER = "the other side closed it"
"""The reason of an orderly end (TCP's FIN): a firewall that cuts a process off does not send one."""
# The limit of bytes kept for a peer that does not read; a roster of 100 000 ranks is smaller.
MAX_UNSENT_BYTES = 32 * 1024 * 1024
ACCEPTED_AT_ONCE = 32
STARVED_SECONDS = 0.1
"""How long a listener pauses when no descriptor or no memory is free for accept(2)."""
DUPLICATE_CHECK_SECONDS = 3.0
"""The longest wait for an IPv6 address: its check takes up to two seconds (RFC 4862, section 5.1 and 5.4.2)."""
_READY_AGAIN_SECONDS = 0.05
_PORT_TRIES = 20


class SocketAccepted(Struct, frozen=True):
    """A caller has connected to this process."""

    conn: int
    address: str
    index: int = 0
    """The interface of a link-local address; 0: it is another address."""


class SocketConnected(Struct, frozen=True):
    """An outgoing connection is established."""

    conn: int
    local_address: str


class SocketData(Struct, frozen=True):
    """Bytes came in."""

    conn: int
    data: bytes


class SocketEnded(Struct, frozen=True):
    """The connection ended, or never came to be."""

    conn: int
    reason: str


SocketEvent: TypeAlias = SocketAccepted | SocketConnected | SocketData | SocketEnded


class _Connection(Struct):
    conn: int
    socket: socket.socket
    events: int
    """What the selector waits for."""
    connecting: bool = False
    closing: bool = False
    """Hung up by us: what is unsent is still sent, what comes in is thrown away."""
    unsent: bytearray = field(default_factory=bytearray)


class Connections:
    """All TCP sockets of one process.

    Each is registered with the loop's selector, its key's data being a function that serves it: it takes the
    selector's mask and returns events.
    """

    def __init__(self, selector: selectors.BaseSelector, new_id: Callable[[], int]) -> None:
        self._selector = selector
        self._new_id = new_id
        self._connections: dict[int, _Connection] = {}
        self._listeners: dict[tuple[str, int], socket.socket] = {}
        """By address and scope. A listener whose address has gone stays, because the address can come back."""
        self._spare = -1
        """A spare descriptor, for a caller that arrives when no other descriptor is free."""
        self._keep_spare()
        self._deaf: list[socket.socket] = []
        """Listeners that are not polled, because accept(2) had no free descriptor, or no memory."""
        self.port = 0
        """The control port, once :meth:`listen` has found one."""

    # --- listening -------------------------------------------------------------------------------------------------

    def listen(self, addresses: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """Listen on each address (with its interface's index) at one port, the same for all; return those bound.

        An address that is not ready yet is left out (an IPv6 one can't be bound before its duplicate check is over:
        RFC 4862, section 5.4), and so is one that has just gone; :meth:`listen_also` tries it again. If there is no
        other address, this waits for the end of the check.

        Raises:
            InterfaceError: none of the addresses can be bound.
        """
        problem: OSError | None = None
        ready_by, tries = time.monotonic() + DUPLICATE_CHECK_SECONDS, 0
        while tries < _PORT_TRIES:
            try:
                self._listen_at(addresses)
            except OSError as error:
                problem = error
                self.stop_listening()
                if error.errno != errno.EADDRINUSE:
                    break
                tries += 1
            else:
                if self._listeners:
                    return self._listened(addresses)
                if time.monotonic() >= ready_by or not any(":" in address for address, _ in addresses):
                    break
                time.sleep(_READY_AGAIN_SECONDS)
        names = ", ".join(address for address, _ in addresses)
        if problem is not None and problem.errno == errno.EADDRINUSE:
            cause, remedy = no_port(*port_range())
            raise InterfaceError.explain(
                f"no control port could be opened on {names}: {problem}", cause=cause, remedy=remedy
            ) from problem
        raise InterfaceError.explain(
            f"no control port could be opened on {names}: {problem or 'no address is ready'}",
            cause="an address has just gone from its interface, or IPv6 still checks it for duplicates (`tentative`), "
            "or the system allows no more sockets",
            remedy="look at `ip address` and `ulimit -n`; name a working interface with MINGLE_INTERFACE.",
        ) from problem

    def _listen_at(self, addresses: Sequence[tuple[str, int]]) -> None:
        self.port = 0
        for number, (address, index) in enumerate(addresses, start=1):
            try:
                listener = self._open_listener(address, index)
            except OSError as error:
                # A sandbox without IPv6 (EAFNOSUPPORT) is none without IPv4, which comes first.
                if error.errno == errno.EAFNOSUPPORT and (self._listeners or number < len(addresses)):
                    continue
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):  # ENODEV: its interface has gone
                    raise
            else:
                self.port = listener.getsockname()[1]

    def listen_also(self, addresses: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """Listen on further addresses at the same port; return those of all given that are bound now."""
        for address, index in addresses:
            if _bound_as(address, index) not in self._listeners:
                with contextlib.suppress(OSError):  # not ready yet, or another program's: it is not announced
                    self._open_listener(address, index)
        return self._listened(addresses)

    @property
    def is_listening(self) -> bool:
        """Whether the control port is open on any address."""
        return bool(self._listeners)

    def _listened(self, addresses: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        return frozenset(each for each in addresses if _bound_as(*each) in self._listeners)

    def leave_interfaces(self, *, but: Collection[int]) -> None:
        """Close the link-local listeners of all interfaces but these, by index: each container brings and takes one."""
        for bound in [(address, index) for address, index in self._listeners if index and index not in but]:
            self._close_listener(self._listeners.pop(bound))

    def _open_listener(self, address: str, index: int) -> socket.socket:
        family, own = _endpoint(address, self.port, index)
        listener = forksafe.register(socket.socket(family, socket.SOCK_STREAM))
        try:
            listener.setblocking(False)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(own)
            listener.listen(BACKLOG)
            self._wait_for_callers(listener)
        except OSError:
            listener.close()
            raise
        self._listeners[_bound_as(address, index)] = listener
        return listener

    def _wait_for_callers(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, partial(self._serve_listener, listener))

    @property
    def starved(self) -> bool:
        """Whether callers wait for a free descriptor, or for memory: see `listen_again`."""
        return bool(self._deaf)

    def listen_again(self) -> None:
        """Poll the paused listeners again; call this after `STARVED_SECONDS`."""
        self._keep_spare()
        deaf, self._deaf = self._deaf, []
        for listener in deaf:
            try:
                self._wait_for_callers(listener)
            except OSError:  # it takes no more (ENOSPC, ENOMEM)
                self._deaf.append(listener)

    def stop_listening(self) -> None:
        """Close all listeners; connections stay."""
        for listener in self._listeners.values():
            self._close_listener(listener)
        self._listeners.clear()

    def _close_listener(self, listener: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(listener)
        if listener in self._deaf:
            self._deaf.remove(listener)
        listener.close()

    # --- what the machines want ------------------------------------------------------------------------------------

    def dial(self, conn: int, address: str, port: int, index: int, source: str = "") -> list[SocketEvent]:
        """Begin to connect.

        Args:
            conn: the number of the connection.
            address: where to.
            port: the port there.
            index: the interface that a link-local address was heard on.
            source: the address of this machine from which; empty: the kernel's choice.
        """
        family, target = _endpoint(address, port, index)
        try:
            sock = forksafe.register(socket.socket(family, socket.SOCK_STREAM))
        except OSError as error:
            return [SocketEnded(conn, _in_words(error))]
        sock.setblocking(False)
        tune(sock)
        try:
            if source:
                sock.bind((source, 0))
            sock.connect(target)
        except BlockingIOError:
            pass
        except OSError as error:
            sock.close()
            return [SocketEnded(conn, _in_words(error))]
        connection = _Connection(conn, sock, selectors.EVENT_WRITE, connecting=True)
        try:
            self._selector.register(sock, selectors.EVENT_WRITE, partial(self._serve, connection))
        except OSError as error:  # it takes no more (ENOSPC, ENOMEM)
            sock.close()
            return [SocketEnded(conn, _in_words(error))]
        self._connections[conn] = connection
        return []

    def write(self, conn: int, data: bytes) -> list[SocketEvent]:
        """Send as much as the kernel takes now, and keep the rest."""
        connection = self._connections.get(conn)
        if connection is None or connection.closing:
            return []
        if len(connection.unsent) + len(data) > MAX_UNSENT_BYTES:
            return self._end(connection, "it does not read what it is sent")
        connection.unsent += data
        return [] if connection.connecting else self._flush(connection)

    def unsent(self, conn: int) -> int:
        """Return the number of bytes that wait because the peer does not read."""
        connection = self._connections.get(conn)
        return 0 if connection is None else len(connection.unsent)

    def hang_up(self, conn: int) -> None:
        """Close a connection after its unsent bytes, and report nothing more about it."""
        connection = self._connections.get(conn)
        if connection is None:
            return
        if connection.unsent and not connection.connecting:
            connection.closing = True
            self._flush(connection)
        else:
            self._leave(connection)

    def reset(self, conn: int) -> None:
        """End a connection by a reset, and report nothing more about it."""
        connection = self._connections.get(conn)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._discard(connection)

    def close(self) -> None:
        """Close everything at once, after one last try to send what is unsent."""
        for connection in list(self._connections.values()):
            if connection.unsent and not connection.connecting:
                with contextlib.suppress(OSError):
                    connection.socket.send(connection.unsent)
            self._discard(connection)
        self.stop_listening()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def drop_strays(self, own: Container[str]) -> list[SocketEvent]:
        """End the connections whose local address this machine has no more: TCP would notice late, or never."""
        events: list[SocketEvent] = []
        for connection in list(self._connections.values()):
            try:
                local = bare_address(connection.socket.getsockname()[0])
            except OSError as error:  # macOS: the other end has reset it
                events += self._end(connection, _in_words(error))
                continue
            if not connection.connecting and local not in own:
                events += self._end(connection, f"the address {local} has gone from this machine")
        return events

    # --- what the selector says ------------------------------------------------------------------------------------

    def _serve(self, connection: _Connection, mask: int) -> list[SocketEvent]:
        if connection.conn not in self._connections:
            return []  # closed by what was served before it in the same round
        try:
            if connection.connecting:
                return self._finish_connecting(connection)
            events: list[SocketEvent] = []
            if mask & selectors.EVENT_WRITE:
                events += self._flush(connection)
            if mask & selectors.EVENT_READ and connection.conn in self._connections:
                events += self._read(connection)
        except OSError as error:  # of the selector, or of a socket that is asked for its name
            return self._end(connection, _in_words(error)) if connection.conn in self._connections else []
        return events

    def _serve_listener(self, listener: socket.socket, _mask: int) -> list[SocketEvent]:
        return list(self._accept(listener)) if listener.fileno() >= 0 else []

    def _accept(self, listener: socket.socket) -> Iterator[SocketEvent]:
        # Bounded: a flood must not starve the loop, and each excess connection stays open until the machine has seen
        # it.
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, remote = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EINTR):
                    continue
                if lacks_descriptor(error):
                    self._turn_away(listener)
                elif error.errno in (errno.ENOBUFS, errno.ENOMEM):
                    self._pause(listener)
                return
            forksafe.register(sock)
            connection = _Connection(self._new_id(), sock, selectors.EVENT_READ)
            try:
                sock.setblocking(False)
                tune(sock)
                self._selector.register(sock, selectors.EVENT_READ, partial(self._serve, connection))
            except OSError:  # the caller is gone already (macOS), or the selector takes no more (ENOSPC, ENOMEM)
                sock.close()
                continue
            self._connections[connection.conn] = connection
            yield SocketAccepted(connection.conn, bare_address(remote[0]), remote[3] if len(remote) == 4 else 0)

    def _turn_away(self, listener: socket.socket) -> None:
        """Out of descriptors: takes the caller with a spare one and hangs up. Left waiting, it would keep us busy."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        try:
            listener.accept()[0].close()
        except OSError as error:  # another thread took the spare one
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause(listener)
        self._keep_spare()

    def _pause(self, listener: socket.socket) -> None:
        """Stop polling a listener for a moment: its caller stays in the queue, and the loop would spin."""
        self._selector.unregister(listener)
        self._deaf.append(listener)

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _finish_connecting(self, connection: _Connection) -> list[SocketEvent]:
        problem = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            return self._end(connection, _in_words(OSError(problem, os.strerror(problem))))
        connection.connecting = False
        self._watch(connection, selectors.EVENT_READ)
        local = connection.socket.getsockname()[0]
        return [SocketConnected(connection.conn, bare_address(local)), *self._flush(connection)]

    def _flush(self, connection: _Connection) -> list[SocketEvent]:
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            return self._end(connection, _in_words(error))
        if connection.closing and not connection.unsent:
            self._leave(connection)
            return []
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._watch(connection, wanted)
        return []

    def _watch(self, connection: _Connection, events: int) -> None:
        if connection.events != events:
            key = self._selector.get_key(connection.socket)
            self._selector.modify(connection.socket, events, key.data)
            connection.events = events

    def _read(self, connection: _Connection) -> list[SocketEvent]:
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            return self._end(connection, _in_words(error))
        if not data:
            return self._end(connection, CLOSED_BY_PEER)
        return [] if connection.closing else [SocketData(connection.conn, data)]

    def _end(self, connection: _Connection, reason: str) -> list[SocketEvent]:
        quiet = connection.closing
        self._discard(connection)
        return [] if quiet else [SocketEnded(connection.conn, reason)]

    def _leave(self, connection: _Connection) -> None:
        """Close a connection whose bytes are all sent, after reading what came in.

        With unread bytes, closing would be a reset (RFC 2525, section 2.17), which discards our last bytes on their way
        to the peer.
        """
        with contextlib.suppress(OSError):
            for _ in range(DRAINED_READS):
                if not connection.socket.recv(READ_BYTES):
                    break
        self._discard(connection)

    def _discard(self, connection: _Connection) -> None:
        del self._connections[connection.conn]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()


def _endpoint(address: str, port: int, index: int) -> tuple[socket.AddressFamily, tuple[str | int, ...]]:
    """Return the family and the socket address of an address; ``index`` is the scope of a link-local one."""
    if ":" not in address:
        return socket.AF_INET, (address, port)
    return socket.AF_INET6, (address, port, 0, _bound_as(address, index)[1])


def _bound_as(address: str, index: int) -> tuple[str, int]:
    """Return an address with the scope that it is bound with; without one it outlives its interface."""
    return address, index if address.startswith("fe80:") else 0


def bare_address(host: str) -> str:
    """Return an address without its zone, IPv4 in its own notation."""
    bare = host.partition("%")[0]
    return bare[7:] if bare.startswith("::ffff:") and "." in bare else bare


def literal(answer: tuple[Any, ...]) -> str:
    """Return the address in one of getaddrinfo's answers; a link-local one with its zone, which it needs."""
    scope = answer[3] if len(answer) == 4 else 0
    return f"{answer[0]}%{scope}" if scope and "%" not in answer[0] else str(answer[0])


def canonical_address(text: str) -> str:
    """Return a written address as the kernel writes it, without its zone: IPv6 has many spellings (RFC 5952).

    Raises:
        ValueError: the text is not an address.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(address if mapped is None else mapped)


def tune(sock: socket.socket) -> None:
    """Make a connection carry small frames at once, and notice a dead peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # frames are small, and a peer waits for each
    _look_after(sock, KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES, USER_TIMEOUT_MILLISECONDS)


def keep_open(sock: socket.socket) -> None:
    """Have a connection outlast an outage of ten minutes, and keep it alive in firewalls, which forget an idle one."""
    _look_after(sock, PATIENT_IDLE_SECONDS, PATIENT_INTERVAL_SECONDS, PATIENT_PROBES, 0)


def _look_after(sock: socket.socket, idle: int, interval: int, probes: int, user_timeout: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE" if sys.platform == "linux" else "TCP_KEEPALIVE", idle),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", user_timeout),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _in_words(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{error.strerror or error} ({name})"
