"""What a driver tells a machine: one record for each thing that can happen to a process.

A machine has one entry for all of them, ``handle(event, now)`` (:class:`mingle.protocol.machine.Machine`). An event
that means nothing to a machine, or to the part of the protocol that it is in, changes nothing. So a list of events with
their times is a recording of all that a machine was told.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from mingle.errors import MingleError
from mingle.wire.datagrams import Datagram
from mingle.wire.frames import Blocked


class Source(Struct, frozen=True, kw_only=True):
    """Where a datagram came from."""

    interface: str
    multicast: bool = True
    signed: bool = False
    verified: bool = False
    """An OFFER that our secret has signed."""
    address: str = ""
    off_link: bool = False
    """Whether it came by multicast that no router passes on, from an IPv4 address that is in none of our subnets."""
    folder: bool = False
    """Whether it is an object in a shared folder, which can be older than its host's last datagram, or than its end."""
    reply_to: object = None
    """The driver's own handle for an answer by unicast."""


class Address(Struct, frozen=True):
    """One of this machine's own addresses."""

    address: str
    interface: str
    prefix_length: int
    index: int = 0
    """The kernel's number of the interface, which is the scope of a link-local address."""
    last_resort: bool = False
    """Whether it is on a tunnel, or on a bridge inside this machine: it is used only if all share nothing better."""


# --- datagrams -----------------------------------------------------------------------------------------------------


class Heard(Struct, frozen=True):
    """A valid datagram came in."""

    message: Datagram
    source: Source


class HeardUnverified(Struct, frozen=True):
    """A datagram came in whose signature is missing or wrong: a hint for the report, and no more than that."""

    message: Datagram


class FoldersListed(Struct, frozen=True):
    """The shared folders show this process's sign, or can't be used: what others wrote before it was heard."""

    lower: bool = False
    """Whether a process with a lower member id looks for a host there as well."""


# --- connections ---------------------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True):
    """Another process has connected to the control port."""

    conn: int
    address: str
    interface: str = ""
    """The interface of a link-local address; empty: it is another address."""


class Connected(Struct, frozen=True):
    """An outgoing connection is established."""

    conn: int
    local_address: str
    interface: str
    weak: bool = False
    """Whether it says nothing about the peer's network."""


class BytesReceived(Struct, frozen=True):
    """Bytes came in on a connection."""

    conn: int
    untrusted: bytes


class Disconnected(Struct, frozen=True):
    """A connection ended, or could not be made."""

    conn: int
    reason: str


# --- the store -----------------------------------------------------------------------------------------------------


class StoreOpened(Struct, frozen=True):
    """The store of this host's session listens."""

    epoch: int
    port: int
    token: str


class StoreFailed(Struct, frozen=True):
    """The store of this host's session could not be opened."""

    epoch: int
    error: MingleError


class StoreProved(Struct, frozen=True):
    """The store of the session that this process joined was reached, and holds the session's token."""

    session: bytes
    epoch: int


class StoreUnreachable(Struct, frozen=True):
    """The store of the session that this process joined was not reached, or is another session's."""

    session: bytes
    epoch: int
    reason: str


# --- this machine and its clock ------------------------------------------------------------------------------------


class AddressesChanged(Struct, frozen=True):
    """The control port listens on these addresses now, best first. They can be the same as before."""

    addresses: tuple[Address, ...]


class Inspected(Struct, frozen=True):
    """What was to be found out about this machine's firewall is known."""

    number: int
    blocked: Blocked | None
    """None: nothing in it blocks the nodes, or its rules can't be read."""


class InterfacesChanged(Struct, frozen=True):
    """The interfaces or their addresses have changed: other paths can lead to other processes now."""


class TimerDue(Struct, frozen=True):
    """The time has come that ``next_timer()`` named, or a later one."""


ConnectionEvent: TypeAlias = Connected | BytesReceived | Disconnected
"""What happens on a connection that a machine owns."""
StoreEvent: TypeAlias = StoreOpened | StoreFailed | StoreProved | StoreUnreachable
Event: TypeAlias = (
    Heard
    | HeardUnverified
    | FoldersListed
    | Accepted
    | ConnectionEvent
    | StoreEvent
    | AddressesChanged
    | Inspected
    | InterfacesChanged
    | TimerDue
)
