"""The processes of this machine that discover at the same UDP port, and what they hand to each other.

Linux gives a unicast datagram to one of the sockets that share a port, the one that was opened last. Whose process
gets one hands a copy of it to the others, once, marked as repeated, with the word where it came from, so that
they answer it as if they had got it themselves. It goes over abstract Unix sockets (unix(7)): as UDP ports do, their
names belong to a network namespace, and they work where a firewall drops multicast on loopback as well. Elsewhere than
on Linux there are none, and nothing is handed on.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from typing import Annotated

import msgspec
from msgspec import Meta

from mingle import forksafe
from mingle.network.transport import Received, SocketAddress, Version
from mingle.wire import datagrams, echo

MAX_SIBLINGS = 64
"""Processes that are reached; further ones must have a port of their own, or multicast."""
HANDED_PER_SECOND = 200.0
"""How many datagrams are handed on in the long run: a flood shall not be multiplied …"""
HANDED_AT_ONCE = 200.0
"""… and how many at once."""
_MAX_BYTES = 4096


_Number = Annotated[int, Meta(ge=0, lt=2**32)]
_Port = Annotated[int, Meta(ge=0, lt=2**16)]


class _Handed(msgspec.Struct, frozen=True, array_like=True):
    """A datagram and where it came from."""

    data: bytes
    interface: str
    host: str
    port: _Port
    scope: _Number
    family: Version
    local: bool
    destination: str

    def __post_init__(self) -> None:
        # Any process of this machine may have sent it, and an answer to a name would be looked up.
        ipaddress.ip_address(self.host)

    @property
    def source(self) -> SocketAddress:
        """Where it came from, as the kernel takes it."""
        return (self.host, self.port) if self.family == "4" else (self.host, self.port, 0, self.scope)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Handed)


def _is_ours(data: bytes) -> bool:
    return datagrams.is_one(data) or echo.is_one(data)


class Siblings:
    """This process's place among them. ``socket`` is None where there is none to be had."""

    def __init__(self, port: int) -> None:
        self._names = [f"\0mingle/udp-{port}/{number}" for number in range(MAX_SIBLINGS)]
        self._own = ""
        self._credit = HANDED_AT_ONCE
        self._credited_at = float("-inf")
        self.socket: socket.socket | None = self._open() if sys.platform == "linux" else None

    def _open(self) -> socket.socket | None:
        opened = forksafe.register(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        opened.setblocking(False)
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
        """What siblings have handed to us; what is no such thing is dropped."""
        taken: list[Received] = []
        while self.socket is not None and len(taken) < MAX_SIBLINGS:
            try:
                handed = _decoder.decode(self.socket.recv(_MAX_BYTES))
            except OSError:
                break
            except (msgspec.DecodeError, ValueError):
                continue
            taken.append(
                Received(
                    data=datagrams.as_repeated(handed.data),
                    interface=handed.interface,
                    source=handed.source,
                    family=handed.family,
                    multicast=False,
                    local=handed.local,
                    destination=handed.destination,
                    shared=True,
                )
            )
        return taken
