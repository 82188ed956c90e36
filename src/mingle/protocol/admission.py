"""The rules by which a session admits members: how many form it, and which newcomers fit in. Pure.

:class:`Admission` has the rules for ranks. :class:`mingle.elastic.quorum.Quorum` derives from it and has the rules for
agents, whose session goes on admitting. The registrar tells its admission of each step of a member.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from mingle.wire import frames
from mingle.wire.authentication import new_token
from mingle.wire.datagrams import Kind

ACKNOWLEDGE_SECONDS = 10.0
"""The least time after SEALED for the last ACK; then the epoch is voided."""
ACKNOWLEDGE_SECONDS_PER_RANK = 0.01
"""The time for each rank, if that is more: the store takes one after another, in about a millisecond."""


class Seated(Struct):
    """A member that has a seat, or a latecomer."""

    member: bytes
    conn: int | None
    """Its connection; None for the host itself."""
    applicant: frames.Join
    paths: tuple[frames.Path, ...] = ()
    token: bytes = field(default_factory=new_token)
    """Only the process that knows it comes back into the seat; the host tells it to the holder in JOINED."""
    acked: int = 0
    """The last epoch in which it has reached the store."""
    done: bool = False
    """Whether it has sent READY or LEAVE: the end of its connection is no loss from then on."""
    joined_at: float = float("-inf")
    """When it asked for its seat."""
    asked: bool = False
    """Whether a latecomer was asked to confirm."""
    admit_by: float = float("inf")
    """When a latecomer that has not acknowledged is dropped."""
    ahead: int = 0
    """Agents only: by how many seconds its wall clock is ahead of the host's, as far as it is known."""

    @property
    def who(self) -> frames.ProcessInfo:
        """The process, with the rank that it was given."""
        return msgspec.structs.replace(self.applicant.who, rank=self.applicant.rank)


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

    @property
    def addresses(self) -> list[str]:
        """Its own addresses, the preferred one first."""
        return [path.host_address for path in self.applicant.paths]


class Challenge(Struct, frozen=True):
    """A newcomer that wants a taken seat, while the holder of the seat is asked whether it lives."""

    conn: int
    member: bytes
    applicant: frames.Join
    seat: bytes
    """The holder's member id."""
    deadline: float
    """When a holder that has not answered loses the seat."""


class Challenges:
    """The newcomers that wait for the answers of such holders."""

    def __init__(self) -> None:
        self._waiting: list[Challenge] = []

    def add(self, challenge: Challenge) -> None:
        """Let a newcomer wait."""
        self._waiting.append(challenge)

    def withdraw(self, conn: int) -> None:
        """Forget the newcomer on a connection."""
        self._waiting = [each for each in self._waiting if each.conn != conn]

    def take(self, seat: bytes) -> list[Challenge]:
        """Return, once, those that wait for a seat, the first first."""
        taken = [each for each in self._waiting if each.seat == seat]
        self._waiting = [each for each in self._waiting if each.seat != seat]
        return taken

    def take_all(self) -> list[Challenge]:
        """Return all, once."""
        taken, self._waiting = self._waiting, []
        return taken

    def unanswered(self, now: float) -> list[bytes]:
        """Return the holders whose time to answer is over."""
        return list(dict.fromkeys(each.seat for each in self._waiting if now >= each.deadline))

    def next_timer(self) -> float:
        """Return when that is the case for the next one; infinity: never."""
        return min((each.deadline for each in self._waiting), default=float("inf"))


class Admission:
    """The rules for the members of a session of ranks: all of them form it, and then it is full.

    :class:`mingle.elastic.quorum.Quorum` has the rules for a session of agents, which goes on admitting.

    Args:
        world_size: how many seats there are.
    """

    kind: Kind = "ranks"
    takes_latecomers = False
    """Whether a sealed session takes members, and the loss of a member after GO only frees its seat."""
    store_ahead = True
    """Whether the store is opened while seats are free."""
    confirm_seconds = float("inf")
    """How long after CONFIRM the last CONFIRMED can come."""
    had_quorum = False
    """Whether so many members have formed the session that no other one can form."""
    due: float | None = None
    """When :meth:`complete` can change its answer without any event."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.acknowledge_seconds = max(ACKNOWLEDGE_SECONDS, ACKNOWLEDGE_SECONDS_PER_RANK * world_size)
        self.seats: Mapping[bytes, Seated] = {}
        """The registrar's seats."""

    def mismatch(self, applicant: frames.Join) -> str:
        """Return why a newcomer's numbers do not fit this session; empty if they do."""
        if applicant.world_size == self.world_size:
            return ""
        name = "--nnodes" if applicant.who.unit == "node" else "world_size"
        return f"the host was started with {name}={self.world_size}, the newcomer with {name}={applicant.world_size}"

    def misfit(self, applicant: frames.Join, *, assigned: bool) -> tuple[frames.RefusalReason, str] | None:
        """Return why a newcomer can never be in this session, or None if it can.

        Args:
            applicant: the newcomer's JOIN.
            assigned: whether this session assigns the ranks.
        """
        if applicant.kind != self.kind:
            return "kind", f"this session is one of {self.kind}, the newcomer is one of {applicant.kind}"
        if mismatch := self.mismatch(applicant):
            return "world size", mismatch
        if assigned and applicant.rank is not None:
            return "ranks mixed", f"the newcomer was given rank {applicant.rank} while the host was given none"
        if not assigned and applicant.rank is None:
            return "ranks mixed", "the newcomer has no rank while the host was given one"
        if applicant.rank is not None and applicant.rank >= self.world_size:
            return "rank out of range", f"rank {applicant.rank} of {self.world_size}"
        return None

    def is_surplus(self, newcomer: frames.ProcessInfo, now: float) -> bool:
        """Return whether a newcomer to a running session is certainly one too many."""
        return False

    def came(self, now: float) -> None:
        """Take note of a new member."""

    def admits(self, now: float) -> bool:
        """Return whether a running session can take a latecomer now."""
        return True

    def complete(self, now: float) -> bool:
        """Return whether the present members can form the session."""
        return len(self.seats) == self.world_size

    def seal(self) -> None:
        """Take note that SEALED is about to be sent to all members."""

    def sealed(self, member: bytes, now: float) -> None:
        """Take note that SEALED is sent to a member."""

    def members(self, *, joining: int = 0) -> frames.Members | None:
        """Return what the members are told of each other before SEALED, if anything.

        Args:
            joining: how many latecomers are about to become members.
        """
        return None

    def acknowledged(self, member: bytes, now: float) -> bool:
        """Take note of an ACK; return whether the member counts, since its ACK came in time."""
        return True

    def can_go(self, now: float) -> bool:
        """Return whether enough of the members, which have all acknowledged, still count."""
        return True

    def formed(self) -> None:
        """Take note of GO."""

    def gone(self, member: bytes) -> None:
        """Take note that a member, or its vote in this epoch, no longer counts."""

    def ended_by_member(self) -> None:
        """Take note that a member of the running session has said good-bye."""

    def lacks(self) -> str:
        """Return what the session lacks before it can be sealed, as text for people; empty if nothing."""
        return ""
