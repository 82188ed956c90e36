"""Who has a seat in a session, and how it stands: what others read of the registrar. Pure."""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from mingle.protocol.seating import Place
from mingle.wire import frames
from mingle.wire.datagrams import Kind

# Memory for reports, bounded against a rank that crashes and restarts in a loop.
REMEMBERED_DEPARTURES = 16
REMEMBERED_TEXT = 256
"""Characters kept of each, so that STATUS fits into one frame whatever others call themselves."""


class Phase(enum.Enum):
    """Where a session stands."""

    OPEN = "open"
    CONFIRMING = "confirming"
    SEALING = "sealing"
    SEALED = "sealed"
    RUNNING = "running"


class Seated(Struct):
    """A member that has a seat."""

    member: bytes
    conn: int | None
    """None: the host itself."""
    applicant: frames.Join
    paths: tuple[frames.Path, ...] = ()
    acked: int = 0
    """The last epoch in which it has reached the store."""
    done: bool = False
    """READY or LEAVE was said: its going is no loss any more."""


class HostSeat(Struct, frozen=True, kw_only=True):
    """The host's own seat in its session."""

    member: bytes
    applicant: frames.Join
    """Its paths are its own addresses in order of preference."""
    prefix_lengths: Mapping[str, int]
    """Those of its addresses."""
    last_resort: frozenset[str] = frozenset()
    """Those of its addresses that are taken only if all share nothing better."""
    named: bool = False
    """The user named the interfaces: their order decides."""


class Seats:
    """The seats of a session, with its phase. Only :class:`mingle.protocol.registrar.Registrar` changes them.

    Args:
        session: its name.
        world_size: how many seats there are.
        host: the first of them.
        kind: what the members are.
    """

    def __init__(self, session: bytes, world_size: int, host: HostSeat, *, kind: Kind = "ranks") -> None:
        self.session = session
        self.world_size = world_size
        self.host = host
        self.kind = kind
        self.phase = Phase.OPEN
        self.epoch = 0
        self.held = False
        """This job may be held by another session: gather, but decide nothing that can't be taken back."""
        self.seats = {host.member: Seated(host.member, None, host.applicant, host.applicant.paths)}
        self.places: dict[bytes, Place] = {}
        self.store_address = ""
        self.departures: deque[str] = deque(maxlen=REMEMBERED_DEPARTURES)
        self.refusals: deque[str] = deque(maxlen=REMEMBERED_DEPARTURES)
        self.departed_ranks: set[int] = set()
        self._conns: dict[int, bytes] = {}
        self._ranks = {} if host.applicant.rank is None else {host.applicant.rank: host.member}
        """Who holds a given rank."""
        self._awaited: set[bytes] = set()
        """Who has not confirmed, or not acknowledged, in this epoch."""

    @property
    def assigned(self) -> bool:
        """Whether this session hands out ranks."""
        return self.host.applicant.rank is None

    @property
    def missing(self) -> tuple[int, ...]:
        """The given ranks that never came."""
        if self.assigned:
            return ()
        return tuple(
            rank for rank in range(self.world_size) if rank not in self._ranks and rank not in self.departed_ranks
        )

    def status(self) -> frames.Status:
        """How it stands, for people."""
        waiting = (self._rank_of(self.seats[member]) for member in self._awaited)
        return frames.Status(
            joined=len(self.seats),
            world_size=self.world_size,
            missing=self.missing[:4096],
            departed=tuple(sorted(self.departed_ranks))[:4096],
            left=tuple(self.departures),
            refused=tuple(self.refusals),
            phase=self.phase.value,
            unconfirmed=tuple(sorted(rank for rank in waiting if rank is not None))[:4096],
        )

    def roster(self) -> list[frames.Seat]:
        """Everybody's seat, in order of rank; of meaning once the session is sealed."""
        seats = []
        for member, seat in self.seats.items():
            where = self.places[member]
            seats.append(
                frames.Seat(
                    rank=where.rank,
                    local_rank=where.local_rank,
                    node_rank=where.node_rank,
                    hostname=seat.applicant.who.hostname,
                    address=self._address_of(seat),
                    pid=seat.applicant.who.pid,
                )
            )
        return sorted(seats, key=lambda seat: seat.rank)

    def _address_of(self, seat: Seated) -> str:
        for path in seat.paths:
            if path.host_address == self.store_address:
                return path.local_address
        return seat.applicant.who.address

    def has_seat(self, conn: int) -> bool:
        """Return whether a connection is that of a member."""
        return conn in self._conns

    def version(self) -> tuple[object, ...]:
        """Return a value that changes whenever the roster changes."""
        return (self.phase, self.epoch, self.store_address, tuple(self.seats), tuple(self.places))

    def status_version(self) -> tuple[object, ...]:
        """Return a value that changes whenever the status changes."""
        gone = tuple(self.departures), tuple(self.refusals), frozenset(self.departed_ranks)
        return (*self.version(), frozenset(self._awaited), *gone)

    def member_connections(self) -> list[int]:
        """The connections of all members but the host itself."""
        return list(self._conns)

    def whos(self) -> list[frames.ProcessInfo]:
        """Who has a seat, by rank."""
        everyone = [
            msgspec.structs.replace(seat.applicant.who, rank=self._rank_of(seat)) for seat in self.seats.values()
        ]
        return sorted(everyone, key=lambda who: -1 if who.rank is None else who.rank)

    def _rank_of(self, seat: Seated) -> int | None:
        where = self.places.get(seat.member)
        return where.rank if where else seat.applicant.rank

    def crowd(self) -> str:
        """Who is in, as text for an error; cut where it gets long."""
        names = [str(who) for who in self.whos()]
        shown = "; ".join(names[:8])
        return (shown if len(names) <= 8 else f"{shown}; and {len(names) - 8} more")[:2048]

    def _holder(self, rank: int | None) -> Seated | None:
        if rank is None:
            return None
        member = self._ranks.get(rank)
        return None if member is None else self.seats[member]

    def _seat_at(self, conn: int) -> Seated | None:
        member = self._conns.get(conn)
        return None if member is None else self.seats[member]

    @staticmethod
    def _describe(seat: Seated) -> str:
        return str(msgspec.structs.replace(seat.applicant.who, rank=seat.applicant.rank))


def roster_digest(seats: Sequence[frames.Seat]) -> bytes:
    """Returns a digest of the roster: what SEALED promises and the roster must keep."""
    return hashlib.sha256(msgspec.msgpack.encode(list(seats))).digest()
