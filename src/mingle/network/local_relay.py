"""The local relay: unicast datagrams that one process of this machine hands to the others on the same UDP port.

Linux delivers a unicast datagram to one of the sockets that share a port, the one that was opened last. Its process
relays a copy to the others, once, marked as repeated and with its source, so that they can answer it as if they had
received it. The relay uses abstract Unix sockets (unix(7)): like UDP ports, their names belong to a network namespace,
and a firewall that drops multicast on loopback does not affect them. Other systems than Linux have none, so nothing is
relayed there.

Every process of the machine can send to these sockets, and so can a container that shares the network namespace.
Therefore a local message is as untrusted as a datagram, and every field is checked here. The kernel reports the
sender's user (SO_PASSCRED, unix(7)). A process of another user can relay only questions, which any sender can ask; an
OFFER or a BYE is accepted only from a process of this user or of root.

Any process can also bind all the names. That costs a process that starts later its place in the relay (`failure`), and
each relayed datagram one refused send for each name, at most `RELAYED_PER_SECOND` times.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections import Counter
from typing import Annotated

import msgspec
from msgspec import Meta

from mingle import forksafe
from mingle.network.transport import Received, SocketAddress, Version
from mingle.token_bucket import TokenBucket
from mingle.wire import datagrams
from mingle.wire.datagrams import List, Rejected, Seek

MAX_PROCESSES = 64
"""The number of processes that the relay reaches. Further ones need a port of their own, or multicast."""
RELAYED_PER_SECOND = 200.0
"""The sustained rate of relayed datagrams, so that the relay does not multiply a flood, …"""
RELAYED_AT_ONCE = 200.0
"""… and the burst."""
_MAX_BYTES = 4096
_CREDENTIALS = struct.Struct("=iII")  # struct ucred of <linux/socket.h>: process, user, group
_LIMITED_BROADCAST = "255.255.255.255"

_Scope = Annotated[int, Meta(ge=0, lt=2**32)]
_Port = Annotated[int, Meta(ge=1, lt=2**16)]
_InterfaceName = Annotated[str, Meta(max_length=15)]  # IFNAMSIZ, less the final zero


class _Relayed(msgspec.Struct, frozen=True, array_like=True):
    """A datagram and where it came from."""

    data: bytes
    interface: _InterfaceName
    host: str
    port: _Port
    scope: _Scope
    family: Version
    local: bool
    destination: str
    """Empty when the kernel did not say."""

    def __post_init__(self) -> None:
        if not _is_ours(self.data):
            raise ValueError("not a datagram of ours")
        if "/" in self.interface or not self.interface.isprintable():
            raise ValueError("not the name of an interface")
        _check_unicast(self.host, self.family)
        if self.destination:
            _check_unicast(self.destination, self.family)
        if self.scope and self.family == "4":
            raise ValueError("an IPv4 address has no scope")

    @property
    def source(self) -> SocketAddress:
        """The source as a socket address."""
        return (self.host, self.port) if self.family == "4" else (self.host, self.port, 0, self.scope)


class _Echo(msgspec.Struct, frozen=True):
    """What tells the messages of :mod:`mingle.wire.echo` apart."""

    type: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Relayed)
_echo_decoder = msgspec.msgpack.Decoder(_Echo)


def _is_ours(data: bytes) -> bool:
    return datagrams.is_datagram(data) or datagrams.is_echo(data)


def _check_unicast(text: str, family: Version) -> None:
    """Raise ValueError unless the text is the address of one host, without a zone.

    An answer is sent to it or from it: a name would be looked up, and a group or a broadcast would multiply the answer.
    """
    datagrams.check_address(text)
    address = ipaddress.ip_address(text)
    if str(address.version) != family or address.is_multicast or address.is_unspecified or text == _LIMITED_BROADCAST:
        raise ValueError(f"{text!r} is not the IPv{family} address of a host")


def decode(untrusted: bytes) -> Received:
    """Return the datagram in a local message, which any process of this machine can send.

    Raises:
        Rejected: ``relay``: a field is missing, of another type or out of range.
    """
    try:
        relayed = _decoder.decode(untrusted)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Rejected("relay") from None
    return Received(
        data=datagrams.as_repeated(relayed.data),
        interface=relayed.interface,
        source=relayed.source,
        family=relayed.family,
        multicast=False,
        local=relayed.local,
        destination=relayed.destination,
        shared=True,
    )


def _is_question(data: bytes) -> bool:
    """Return whether a datagram is a question that any sender can ask."""
    try:
        if datagrams.is_datagram(data):
            return isinstance(datagrams.decode(data), Seek | List)
        return _is_ping(data)
    except Rejected:
        return False


def _is_ping(data: bytes) -> bool:
    """Return whether a datagram asks for an echo; :mod:`mingle.wire.echo` is loaded only where a process pings."""
    datagrams.check_header(data, datagrams.ECHO_MAGIC)
    try:
        return _echo_decoder.decode(datagrams.payload_of(data)).type == "ping"
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Rejected("malformed") from None


def _is_trusted(ancillary: list[tuple[int, int, bytes]]) -> bool:
    """Return whether the kernel reports that the sender runs as this user or as root."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(value) == _CREDENTIALS.size:
            _, user, _ = _CREDENTIALS.unpack(value)
            return user in (0, os.getuid())  # the real user id is what the kernel names
    return False


class LocalRelay:
    """This process's socket in the relay. ``socket`` is None if no socket or no name is available.

    Args:
        port: the UDP port that the processes share.
        rejected: counts dropped messages, by reason.
    """

    def __init__(self, port: int, rejected: Counter[str] | None = None) -> None:
        self.rejected: Counter[str] = Counter() if rejected is None else rejected
        self.failure = ""
        """Why this process has no place in the relay; empty if it has one, and on systems without a relay."""
        self._names = [f"\0mingle/udp-{port}/{number}" for number in range(MAX_PROCESSES)]
        self._own = ""
        self._tokens = TokenBucket.full(RELAYED_PER_SECOND, RELAYED_AT_ONCE, float("-inf"))
        self.socket: socket.socket | None = self._open() if sys.platform == "linux" else None

    def _open(self) -> socket.socket | None:
        try:
            opened = forksafe.register(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        except OSError as error:
            self.failure = f"no socket: {error.strerror}"
            return None
        opened.setblocking(False)
        with contextlib.suppress(OSError):  # a sandbox without it: then every message counts as another user's
            # Set the option before bind(2): an earlier message would carry no credentials.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for name in self._names:
            try:
                opened.bind(name)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # the name of another process
                    continue
                self.failure = f"no name: {error.strerror}"
                break
            self._own = name
            return opened
        else:
            self.failure = f"all {len(self._names)} names are taken"
        opened.close()
        return None

    def close(self) -> None:
        """Leave the relay; a second call does nothing."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def relay(self, received: Received, now: float) -> None:
        """Send a datagram to all other processes, unless it was relayed already or the rate is exceeded."""
        if self.socket is None or not _is_ours(received.data) or datagrams.is_repeated(received.data):
            return
        if not self._tokens.take(now):
            return
        copy = _encoder.encode(
            _Relayed(
                datagrams.as_repeated(received.data),
                received.interface,
                received.source[0],
                received.source[1],
                received.source[3] if len(received.source) == 4 else 0,
                received.family,
                received.local,
                received.destination,
            )
        )
        for name in self._names:
            if name != self._own:
                with contextlib.suppress(OSError):  # no process has that name, or its buffer is full
                    self.socket.sendto(copy, name)

    def receive(self) -> list[Received]:
        """Return the datagrams that other processes have relayed; drop and count anything else."""
        taken: list[Received] = []
        for _ in range(MAX_PROCESSES):
            if self.socket is None:
                break
            try:
                # The buffer fits only the credentials, so the kernel drops descriptors that a sender attaches.
                data, ancillary, _, _ = self.socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                break
            try:
                received = decode(data)
            except Rejected as rejected:
                self.rejected[rejected.reason] += 1
                continue
            if _is_trusted(ancillary) or _is_question(received.data):
                taken.append(received)
            else:
                self.rejected["relay of another user"] += 1
        return taken
