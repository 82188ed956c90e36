"""The seats of a session: which process holds which seat, on which connection, and how far it has come. Pure.

A member is known by its member id, and proves that it holds its seat by the seat's *token*. :class:`Seats` is the book
that the registrar keeps (:mod:`mingle.protocol.session.registrar`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from mingle.wire import frames
from mingle.wire.authentication import new_token, same_token

EXPLICIT = b"\x00"
"""The first byte of an order that begins with a node rank; its next four bytes are the number."""
CLAIM_BYTES = 5
"""The length of an order that is a node rank given by hand. A launcher's is longer, and several nodes can have it."""


class Stage(enum.IntEnum):
    """How far the holder of a seat has come in the present epoch. VOID takes it back to the first stage."""

    SEATED = 0
    ASKED = 1
    """It was sent CONFIRM."""
    CONFIRMED = 2
    SEALED = 3
    """It was sent SEALED."""
    DOUBTED = 4
    """It acknowledged so long ago that it can have left the session since, and is asked whether it has."""
    ACKNOWLEDGED = 5
    IN = 6
    """It was sent GO."""


class Seated(Struct):
    """A process that has a seat: a member, or a latecomer."""

    member: bytes
    conn: int | None
    """Its connection; None for the host itself, and for a member that was lost after GO."""
    applicant: frames.Join
    """Its JOIN."""
    paths: tuple[frames.Path, ...] = ()
    token: bytes = field(default_factory=new_token)
    """Only the process that knows it comes back into the seat; the host tells it to the holder in JOINED."""
    stage: Stage = Stage.SEATED
    admit_by: float = float("inf")
    """When a latecomer is dropped that is no member by then; infinity: it is a member."""
    place: frames.Place | None = None
    """The place of a latecomer in the job, once it was sent SEALED."""
    due: float = float("inf")
    """By when it must have acknowledged."""
    bound_at: float = float("-inf")
    """A moment after SEALED at which it was certainly in this session; or, in DOUBTED, when it was asked."""
    done: bool = False
    """Whether it has sent READY or LEAVE: the end of its connection is no loss from then on."""
    joined_at: float = float("-inf")
    """When it asked for its seat."""
    ahead: int = 0
    """Agents only: by how many seconds its wall clock is ahead of the host's, as far as it is known."""

    @property
    def is_latecomer(self) -> bool:
        """Whether it came after CONFIRM. It is no member before its own GO, and only takes up a seat."""
        return self.admit_by < float("inf")

    @property
    def who(self) -> frames.ProcessInfo:
        """The process, with the rank that it was given."""
        return msgspec.structs.replace(self.applicant.who, rank=self.applicant.rank)

    def belongs_to(self, applicant: frames.Join) -> bool:
        """Return whether a process that names this member is the member: only it knows the token."""
        return same_token(self.token, applicant.token)

    @property
    def key(self) -> tuple[bool, bytes, bool, int, int, bytes]:
        """What the members are sorted by: the order of the machine, the local rank or process id on it, the member id.

        It consists of what the member has said of itself and never changes, so all hosts sort alike.
        """
        applicant = self.applicant
        if not applicant.order:
            return True, b"", True, 0, 0, b""  # all alike: sorting leaves them in the order in which they came
        local = applicant.local_rank
        return False, applicant.order, local is None, local or 0, applicant.who.pid, self.member


class HostSeat(Struct, frozen=True, kw_only=True):
    """The host's own seat in its session."""

    member: bytes
    applicant: frames.Join
    """Its paths are its own addresses in order of preference."""
    prefix_lengths: Mapping[str, int]
    """The prefix lengths of its addresses; 0 or none where nothing is known of the subnet."""
    last_resort: frozenset[str] = frozenset()
    """Those of its addresses on tunnels and on bridges inside its machine, taken only if nothing better is shared."""
    named: bool = False
    """Whether the user named the interfaces; if so, their order decides."""
    readdressed_at: float = float("-inf")
    """When its addresses changed; minus infinity: they are the first ones."""

    @property
    def addresses(self) -> list[str]:
        """Its own addresses, the preferred one first."""
        return [path.host_address for path in self.applicant.paths]


class Seats(dict[bytes, Seated]):
    """All that have a seat in a session by their ids, the host first: its :meth:`members`, and its :meth:`latecomers`.

    A caller reads it as a mapping. Only the methods below change it, since they keep ranks and connections up to date.

    Args:
        host: the host's own seat.
        size: how many seats there are.
    """

    def __init__(self, host: HostSeat, size: int) -> None:
        super().__init__({host.member: Seated(host.member, None, host.applicant, host.applicant.paths)})
        self.host = host
        self.size = size
        self.departed_ranks: set[int] = set()
        """The given ranks whose members are gone."""
        self._conns: dict[int, bytes] = {}
        self._members: list[Seated] | None = None
        """What :meth:`members` returns until one comes or goes: the host of a thousand agents asks at each event."""
        self._ranks = {} if host.applicant.rank is None else {host.applicant.rank: host.member}
        """The member that holds each given rank."""

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def own(self) -> Seated:
        """The host's own seat, with what it has in common with the others."""
        return self[self.host.member]

    @property
    def assigned(self) -> bool:
        """Whether the session assigns the ranks."""
        return self.host.applicant.rank is None

    @property
    def is_full(self) -> bool:
        """Whether all seats are taken."""
        return len(self) >= self.size

    @property
    def missing(self) -> tuple[int, ...]:
        """The given ranks that never came."""
        if self.assigned:
            return ()
        return tuple(rank for rank in range(self.size) if rank not in self._ranks and rank not in self.departed_ranks)

    @property
    def all_ready(self) -> bool:
        """Whether every connected member has said READY: its process group stands."""
        return all(seat.done or seat.conn is None for seat in self.others())

    @property
    def all_left(self) -> bool:
        """Whether every member but the host has said good-bye, or was lost for good."""
        return all(seat.done and seat.conn is None for seat in self.others())

    def members(self) -> list[Seated]:
        """Return those that are in the session, or form it in the present epoch: another list after each change."""
        if self._members is None:
            self._members = [seat for seat in self.values() if not seat.is_latecomer]
        return self._members

    def latecomers(self) -> list[Seated]:
        """Return those that came after CONFIRM, and are no members yet."""
        if len(self.members()) == len(self):
            return []
        return [seat for seat in self.values() if seat.is_latecomer]

    def others(self) -> list[Seated]:
        """Return the members without the host."""
        return [seat for seat in self.members() if seat.member != self.host.member]

    def behind(self, stage: Stage) -> list[Seated]:
        """Return the members that have not come to a stage."""
        return [seat for seat in self.members() if seat.stage < stage]

    def have_come_to(self, stage: Stage) -> bool:
        """Return whether all members have come to a stage: the barrier before the next one."""
        # The members come in about the order of their seats, so the search for one that is awaited begins at the end.
        return all(seat.stage >= stage or seat.is_latecomer for seat in reversed(self.values()))

    def in_order(self) -> list[Seated]:
        """Return the members, the host first and the others in order: so ranks are assigned."""
        return [self.own, *sorted(self.others(), key=lambda seat: seat.key)]

    def before_host(self) -> list[Seated]:
        """Return the members that come before the host in order, the first first; none where ranks are given.

        A process id is no reason for a handover, since it is another one at each start.
        """
        own = self.own.key[:4]
        before = (seat for seat in self.others() if self.assigned and seat.key[:4] < own)
        return sorted(before, key=lambda seat: seat.key)

    def same_place(self, applicant: frames.Join) -> Seated | None:
        """Return who was given the node rank of a newcomer, on another machine or as a node of its own."""
        if not applicant.order.startswith(EXPLICIT) or len(applicant.order) > CLAIM_BYTES:
            return None
        machine, shares = machine_of(applicant), applicant.who.unit == "rank"
        alike = (seat for seat in self.values() if seat.applicant.order == applicant.order)
        return next((seat for seat in alike if not shares or machine_of(seat.applicant) != machine), None)

    def paths(self) -> list[tuple[frames.Path, ...]]:
        """Return the paths that each of the other members has proved."""
        return [seat.paths for seat in self.others()]

    def connections(self) -> list[int]:
        """Return the connections of all that have a seat."""
        return list(self._conns)

    def at(self, conn: int) -> Seated | None:
        """Return the seat of the process on a connection."""
        return self.get(self._conns.get(conn, b""))

    def holder(self, rank: int | None) -> Seated | None:
        """Return the member that holds a given rank."""
        return None if rank is None or rank not in self._ranks else self[self._ranks[rank]]

    # --- changes ---------------------------------------------------------------------------------------------------

    def readdress(self, host: HostSeat) -> None:
        """Take the host's new addresses; call it only before the session is sealed."""
        self.host = host
        own = self[host.member]
        own.applicant, own.paths = host.applicant, host.applicant.paths

    def take(self, seat: Seated) -> None:
        """Give a process its seat."""
        self[seat.member], self._members = seat, None
        self._connect(seat)
        rank = seat.applicant.rank
        if rank is not None:
            self._ranks[rank] = seat.member
            self.departed_ranks.discard(rank)

    def admit(self, seat: Seated) -> None:
        """Make a latecomer a member."""
        seat.admit_by, self._members = float("inf"), None

    def move(self, seat: Seated, conn: int) -> None:
        """Move a member to a new connection."""
        self.disconnect(seat)
        seat.conn = conn
        self._connect(seat)

    def disconnect(self, seat: Seated) -> None:
        """Keep the seat of a member that has lost its connection."""
        if seat.conn is not None:
            del self._conns[seat.conn]
            seat.conn = None

    def free(self, seat: Seated) -> None:
        """Free the seat of a process that is gone."""
        if seat.conn is not None:
            del self._conns[seat.conn]
        del self[seat.member]
        self._members = None
        rank = seat.applicant.rank
        if rank is not None:
            del self._ranks[rank]
            self.departed_ranks.add(rank)

    def _connect(self, seat: Seated) -> None:
        if seat.conn is not None:
            self._conns[seat.conn] = seat.member


def machine_of(applicant: frames.Join) -> str:
    """Return the key of an applicant's machine, which containers of that machine share."""
    return applicant.node.partition("/net:")[0]
