"""What a pure machine of :mod:`mingle.protocol` is, and the records that each of them works with.

A machine never touches a socket or a clock. Its driver (:mod:`mingle.engine.driver`, or a simulator) hands it *events*
(:mod:`mingle.protocol.events`), each with the present time, and then carries out its *effects* in order
(:mod:`mingle.protocol.effects`).

Records are structs of msgspec here, and in all that a rank imports, rather than dataclasses: every two or three
dataclasses add a millisecond to the import of mingle, because the methods of each are compiled at import.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Collection, Container, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
from msgspec import Struct, field

from mingle.diagnostics import Detour
from mingle.errors import MingleError
from mingle.protocol.effects import Effect
from mingle.protocol.events import Address, Event
from mingle.protocol.links.claims import DialBudget
from mingle.protocol.links.handshake import Call
from mingle.protocol.links.link import Links
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import MAX_REASON_BYTES, Datagram, Failed, Kind, List, Offer, Seek, truncate_utf8
from mingle.wire.frames import MAX_OWN_ADDRESSES, Failure, Join, Path, Place, ProcessInfo, Purpose, Seat

Mesh: TypeAlias = Literal["on", "warn", "off"]
"""What a host does with nodes that can't reach each other: end the job, show a warning, or nothing."""
NewId: TypeAlias = Callable[[], int]
"""Gives each connection of a process its own number."""


class Identity(Struct, frozen=True, kw_only=True):
    """This process in its job."""

    job: str
    attempt: str
    member: bytes
    """Sixteen random bytes, fresh in each call."""
    rank: int | None
    world_size: int
    node: str
    who: ProcessInfo
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    node_rank_from: str = ""
    """What gives the node rank, for messages."""
    kind: Kind = "ranks"
    versions: dict[str, str] = field(default_factory=dict)
    addresses: Callable[[], Collection[str]] = tuple
    """Returns all addresses of this machine; none where its node key needs no second opinion."""
    minimum: int | None = None
    """Agents only: how many nodes there must be; ``world_size`` is how many there may be."""
    program_port: int = 0
    """``mingle-run`` only: a TCP port that is free on this machine for its program."""
    order: bytes = b""
    """Where this machine stands among those of the job; it never changes while the process lives."""

    def seek(self, unreached: bytes | None = None, how: str = "") -> Seek:
        """Return the SEEK that asks for the host of this process's job.

        Args:
            unreached: the session whose host this process hears and can't connect to, if there is one.
            how: how the connection failed.
        """
        return Seek(
            job=self.job,
            attempt=self.attempt,
            member=self.member,
            world_size=self.world_size,
            rank=self.rank,
            hostname=self.who.hostname,
            pid=self.who.pid,
            kind=self.kind,
            unreached=unreached,
            how=truncate_utf8(how),
        )

    def failed(self, error: MingleError) -> Failed:
        """Return what tells the others that this process ends with an error."""
        return Failed(
            job=self.job,
            attempt=self.attempt,
            member=self.member,
            rank=self.rank,
            hostname=self.who.hostname,
            pid=self.who.pid,
            kind=self.kind,
            reason=truncate_utf8(str(error).partition("\n")[0], MAX_REASON_BYTES),
        )

    def call(self, session: bytes, purpose: Purpose) -> Call:
        """Return what a HELLO to the host of a session is made of."""
        return Call(
            job=self.job, attempt=self.attempt, member=self.member, session=session, purpose=purpose, who=self.who
        )

    def join(self, who: ProcessInfo, paths: tuple[Path, ...], token: bytes = b"") -> Join:
        """Return the JOIN that asks for a seat.

        Args:
            who: this process as its host knows it.
            paths: the paths to the host that have been proved.
            token: the token of the seat, if this process has it already.
        """
        addresses = self.addresses()
        return Join(
            world_size=self.world_size,
            rank=self.rank,
            node=self.node,
            local_rank=self.local_rank,
            local_world_size=self.local_world_size,
            node_rank=self.node_rank,
            who=who,
            kind=self.kind,
            versions=self.versions,
            paths=paths,
            # A part of them could lack those that other processes use.
            addresses=tuple(sorted(addresses)) if len(addresses) <= MAX_OWN_ADDRESSES else (),
            minimum=self.minimum,
            token=token,
            program_port=self.program_port,
            order=self.order,
        )

    def list(self) -> List:
        """Return the LIST that asks which jobs there are."""
        return List(
            job=self.job,
            attempt=self.attempt,
            member=self.member,
            rank=self.rank,
            hostname=self.who.hostname,
            pid=self.who.pid,
        )


class Endpoints(Struct, frozen=True, kw_only=True):
    """Where others can connect to this process."""

    addresses: tuple[Address, ...]
    """This process's own addresses, best first; it listens on each of them."""
    port: int
    """The TCP port on which it listens."""
    advertised: tuple[str, ...] = ()
    """Addresses to announce as well, because NAT hides the process's own."""
    named: bool = False
    """Whether the user named the interfaces; if so, their order counts."""


class Context(Struct, frozen=True, kw_only=True):
    """What its driver gives a machine to work with."""

    key: JobKey | None
    """The key for signatures and proofs; None: the job has no secret."""
    new_id: NewId
    rng: random.Random
    timeout: float
    """Seconds until a job that has not formed is an error."""
    folder_seconds: float = 0.0
    """How long shared folders can take until they show this process's own sign (`FoldersListed`); 0: there are none."""
    free_files: Callable[[], int] = lambda: 1_000_000
    """Return the number of further connections that this process can hold."""
    unsent: Callable[[int], int] = lambda _conn: 0
    """Return the number of unsent bytes of a connection."""
    astray: Callable[[str], Detour | None] = lambda _address: None
    """Return the wrong interface by which connections to an address leave, so that they can't be made."""
    dials: DialBudget = field(default_factory=DialBudget)
    """The budget for connections to unproved endpoints."""
    mesh: Mesh = "off"
    """Whether the job forms only if all its nodes reach each other (:mod:`mingle.protocol.links.prover`)."""
    reached: dict[tuple[bytes, str, int], float] = field(default_factory=dict)
    """When this process has last reached another member at an address and port."""
    failed: dict[tuple[bytes, str, int], tuple[float, bytes, Failure]] = field(default_factory=dict)
    """When, in which session and how it has last failed to reach one."""
    links: Links = field(default_factory=Links)
    """The connections of this process."""


def scoped(address: str, interface: str) -> str:
    """Return an address as torch and the kernel need it here: a link-local one with the interface it is reached by."""
    return f"{address}%{interface}" if address.lower().startswith("fe80:") else address


class Formation(Struct, frozen=True, kw_only=True):
    """A job that has formed, as one rank knows it."""

    session: bytes
    place: Place
    store_address: str
    store_port: int
    interface: str
    address: str
    roster_digest: bytes
    unproved: str = ""
    """What the proof of the mesh does not show, for people."""


def lone_formation(session: bytes, port: int, *, local_rank: int = 0) -> Formation:
    """Return the formation of a job of one process, whose store listens on loopback."""
    return Formation(
        session=session,
        place=Place(rank=0, world_size=1, local_rank=local_rank, local_world_size=1, node_rank=0, num_nodes=1),
        store_address="127.0.0.1",
        store_port=port,
        interface="lo" if sys.platform == "linux" else "lo0",
        address="127.0.0.1",
        roster_digest=b"",
    )


def roster_digest(seats: Sequence[Seat]) -> bytes:
    """Return the digest of a roster: SEALED promises it, and the roster must match it."""
    return hashlib.sha256(msgspec.msgpack.encode(list(seats))).digest()


# --- what a driver calls -------------------------------------------------------------------------------------------


class Machine(Protocol):
    """What every machine offers its driver."""

    @property
    def links(self) -> Container[int]:
        """The connections of this machine; only their events reach it."""

    def handle(self, event: Event, now: float, /) -> None:
        """Process what has happened."""

    def effects(self) -> list[Effect]:
        """Return what the driver has to do now, once."""

    def next_timer(self) -> float | None:
        """Return when to send :class:`~mingle.protocol.events.TimerDue`."""

    def calling(self) -> Datagram | None:
        """Return what to send to unicast peers now."""

    def showing(self) -> Seek | Offer | None:
        """Return what others are to find of this process in a shared folder now."""

    def close(self, reason: str, /) -> None:
        """End everything."""
