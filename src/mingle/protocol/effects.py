"""What a machine has its driver do: the driver takes the effects out after each event and carries them out in order."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from mingle.protocol.events import Source
from mingle.wire.datagrams import Datagram
from mingle.wire.frames import ProcessInfo, Target


class Multicast(Struct, frozen=True):
    """Send to the job's group (or the browse group) on every interface."""

    message: Datagram
    browse: bool = False
    turn: int | None = None
    """The number of a datagram that goes out by one IP version, IPv4 and IPv6 in turn; None: by both."""
    padded: bool = False
    """Whether to make a question as long as the longest answer, so that it can be answered by unicast."""
    to_peers: bool = False
    """Whether it goes to the unicast peers as well, which are asked at times of their own (`Machine.calling`)."""


class Answer(Struct, frozen=True):
    """Send to the source of what was heard, by unicast."""

    source: Source
    message: Datagram


class Dial(Struct, frozen=True):
    """Connect. ``interface`` is where the address was heard: the scope of a link-local one."""

    conn: int
    address: str
    port: int
    interface: str
    as_torch: bool = False
    """Whether to leave source and interface to the kernel's routes, as torch does, whatever the user has named."""


class Write(Struct, frozen=True):
    """Write on a connection."""

    conn: int
    data: bytes


class Hangup(Struct, frozen=True):
    """Close a connection, after what was to be written on it. The machine is not told of the end."""

    conn: int


class Reset(Struct, frozen=True):
    """End a connection by a TCP reset, so that the peer does not take it for the end of this process."""

    conn: int


class OpenStore(Struct, frozen=True):
    """Open the store on this address of ours."""

    epoch: int
    address: str


class ProveStore(Struct, frozen=True):
    """Connect to the store and read the session's token there."""

    epoch: int
    address: str
    port: int
    session: bytes
    token: str


class FormedStore(Struct, frozen=True):
    """Take note that GO is decided; this effect comes before GO is sent."""


class CloseStore(Struct, frozen=True):
    """Close the store with all its connections: a rank was lost, and no other rank must wait for it."""

    reason: str
    lost: ProcessInfo | None = None
    """The rank that was lost; None: the session has ended for another reason."""
    how: str = ""
    """How it was lost."""


class Inspect(Struct, frozen=True):
    """Look whether this machine's firewall blocks TCP connections from or to these nodes."""

    number: int
    """The number of the answer, :class:`~mingle.protocol.events.Inspected`."""
    interface: str
    address: str
    """This machine's address on their network."""
    port: int
    """The port of this process there."""
    peers: tuple[Target, ...]


class Notice(Struct, frozen=True):
    """Show a message to people."""

    text: str
    warns: bool = True
    """Whether it is a warning."""


_StoreEffect: TypeAlias = OpenStore | ProveStore | FormedStore | CloseStore
Effect: TypeAlias = Multicast | Answer | Dial | Write | Hangup | Reset | _StoreEffect | Inspect | Notice
