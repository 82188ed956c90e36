"""The processes of this machine that discover at the same UDP port, and what they hand to each other.

Linux gives a unicast datagram to one of the sockets that share a port, the one that was opened last. Whose process
gets one hands a copy of it to the others, once, marked as repeated, with the word where it came from, so that
they answer it as if they had got it themselves. It goes over abstract Unix sockets (unix(7)): as UDP ports do, their
names belong to a network namespace, and they work where a firewall drops multicast on loopback as well. Elsewhere than
on Linux there are none, and nothing is handed on.

Every process of the machine can send to these sockets, and so can a container that shares the network namespace. So a
local message is as untrusted as a datagram: every field is checked here, at the door. The kernel names the sender's
user (SO_PASSCRED, unix(7)). Another user's process can hand on questions, which any sender can ask; where an OFFER or a
BYE came from is believed only from a process of this user or of root.
"""

from __future__ import annotations

import contextlib
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
from mingle.wire import datagrams, echo
from mingle.wire.datagrams import List, Rejected, Seek

MAX_SIBLINGS = 64
"""Processes that are reached; further ones must have a port of their own, or multicast."""
HANDED_PER_SECOND = 200.0
"""How many datagrams are handed on in the long run: a flood shall not be multiplied …"""
HANDED_AT_ONCE = 200.0
"""… and how many at once."""
_MAX_BYTES = 4096
_CREDENTIALS = struct.Struct("=iII")  # struct ucred of <linux/socket.h>: process, user, group
_LIMITED_BROADCAST = "255.255.255.255"

_Scope = Annotated[int, Meta(ge=0, lt=2**32)]
_Port = Annotated[int, Meta(ge=1, lt=2**16)]
_InterfaceName = Annotated[str, Meta(max_length=15)]  # IFNAMSIZ, less the final zero


class _Handed(msgspec.Struct, frozen=True, array_like=True):
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
        """Where it came from, as the kernel takes it."""
        return (self.host, self.port) if self.family == "4" else (self.host, self.port, 0, self.scope)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Handed)


def _is_ours(data: bytes) -> bool:
    return datagrams.is_one(data) or echo.is_one(data)


def _check_unicast(text: str, family: Version) -> None:
    """Raises ValueError unless the text is the address of one host, without a zone.

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
        handed = _decoder.decode(untrusted)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Rejected("relay") from None
    return Received(
        data=datagrams.as_repeated(handed.data),
        interface=handed.interface,
        source=handed.source,
        family=handed.family,
        multicast=False,
        local=handed.local,
        destination=handed.destination,
        shared=True,
    )


def _is_question(data: bytes) -> bool:
    """Return whether a datagram is a question that any sender can ask."""
    try:
        if datagrams.is_one(data):
            return isinstance(datagrams.decode(data), Seek | List)
        return isinstance(echo.decode(data), echo.Ping)
    except Rejected:
        return False


def _is_trusted(ancillary: list[tuple[int, int, bytes]]) -> bool:
    """Return whether the kernel reports that the sender runs as this user or as root."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(value) == _CREDENTIALS.size:
            _, user, _ = _CREDENTIALS.unpack(value)
            return user in (0, os.getuid())  # the real user id is what the kernel names
    return False


class Siblings:
    """This process's socket for its siblings. ``socket`` is None if no socket is available.

    Args:
        port: the UDP port that the siblings share.
        rejected: counts what is dropped, by reason.
    """

    def __init__(self, port: int, rejected: Counter[str] | None = None) -> None:
        self.rejected: Counter[str] = Counter() if rejected is None else rejected
        self._names = [f"\0mingle/udp-{port}/{number}" for number in range(MAX_SIBLINGS)]
        self._own = ""
        self._credit = HANDED_AT_ONCE
        self._credited_at = float("-inf")
        self.socket: socket.socket | None = self._open() if sys.platform == "linux" else None

    def _open(self) -> socket.socket | None:
        try:
            opened = forksafe.register(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        except OSError:  # EMFILE: this process is alone, then
            return None
        opened.setblocking(False)
        with contextlib.suppress(OSError):  # a sandbox without it: then every message counts as another user's
            # Set the option before bind(2): an earlier message would carry no credentials.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for name in self._names:
            with contextlib.suppress(OSError):  # EADDRINUSE: a sibling's
                opened.bind(name)
                self._own = name
                return opened
        opened.close()
        return None

    def close(self) -> None:
        """Leaves the others; a second call does nothing."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def hand_on(self, received: Received, now: float) -> None:
        """Gives a datagram to all siblings, unless it has been handed on already or there are too many."""
        if self.socket is None or not _is_ours(received.data) or datagrams.is_repeated(received.data):
            return
        self._credit = min(HANDED_AT_ONCE, self._credit + (now - self._credited_at) * HANDED_PER_SECOND)
        self._credited_at = now
        if self._credit < 1:
            return
        self._credit -= 1
        copy = _encoder.encode(
            _Handed(
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
                with contextlib.suppress(OSError):  # nobody has that name, or it does not read: as with any datagram
                    self.socket.sendto(copy, name)

    def receive(self) -> list[Received]:
        """Return the datagrams that siblings have handed on; drop and count anything else."""
        taken: list[Received] = []
        for _ in range(MAX_SIBLINGS):
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
