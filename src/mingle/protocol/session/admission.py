"""The rules by which a session admits members: how many form it, and which newcomers fit in. Pure.

:class:`Admission` has the rules for ranks. :class:`mingle.elastic.quorum.Quorum` derives from it and has the rules for
agents, whose session goes on admitting. The registrar tells its admission of each step of a member.
"""

from __future__ import annotations

from mingle.protocol.session.phases import HandingOver, State
from mingle.protocol.session.roster import described, whos
from mingle.protocol.session.seats import Seats
from mingle.wire import frames
from mingle.wire.datagrams import Kind

ACKNOWLEDGE_SECONDS = 10.0
"""The least time for the last ACK, after SEALED or after a member has said that it is still trying to reach the store;
then the epoch is voided."""
ACKNOWLEDGE_SECONDS_PER_RANK = 0.01
"""The time for each rank, if that is more: the store takes one after another, in about a millisecond."""


class Admission:
    """The rules for the members of a session of ranks: all of them form it, and then it is full.

    :class:`mingle.elastic.quorum.Quorum` has the rules for a session of agents, which goes on admitting.

    Args:
        world_size: how many seats there are.
    """

    kind: Kind = "ranks"
    takes_latecomers = False
    """Whether a sealed session takes latecomers, and the loss of a member after GO only frees its seat."""
    hands_over = True
    """Whether a host that is not the first in order asks that one to lead."""
    confirm_seconds = float("inf")
    """How long after CONFIRM the last CONFIRMED can come."""
    waits_for_proofs = True
    """Whether a member that is still trying to reach the store has more time for its ACK."""
    had_quorum = False
    """Whether so many members have formed the session that no other one can form."""
    seats: Seats
    """The registrar's seats."""
    due: float | None = None
    """When :meth:`complete` can change its answer without any event."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.acknowledge_seconds = max(ACKNOWLEDGE_SECONDS, ACKNOWLEDGE_SECONDS_PER_RANK * world_size)

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

    def refusal(self, applicant: frames.Join, state: State, now: float) -> frames.Refused | None:
        """Return why a newcomer can't have a seat now, even a free one, or None if it can.

        Args:
            applicant: the newcomer's JOIN.
            state: of the session.
            now: the time.
        """
        seats = self.seats
        misfit, host = self.misfit(applicant, assigned=seats.assigned), seats.own.who
        if state.sealed and not self.takes_latecomers and (misfit is None or misfit[0] != "kind"):
            # A newcomer of another size waits for the end of this session as well.
            return frames.Refused(reason="running", detail="the session is sealed already", who=host)
        if misfit is not None:
            return frames.Refused(reason=misfit[0], detail=misfit[1], who=host)
        if self.too_late(applicant):
            return frames.Refused(reason="running", detail="the session is about to end", who=host)
        waits = self.waits_outside(applicant) or isinstance(state, HandingOver)
        if applicant.rank is None and (seats.is_full or waits):
            surplus, members = self.is_surplus(applicant.who, now), described(whos(seats.members(), state.places))
            return frames.Refused(reason="surplus" if surplus else "full", detail=members, who=host)
        return None

    def is_surplus(self, newcomer: frames.ProcessInfo, now: float) -> bool:
        """Return whether a newcomer to a running session is certainly one too many."""
        return False

    def waits_outside(self, newcomer: frames.Join) -> bool:
        """Return whether a newcomer gets no seat before the session has formed."""
        return False

    def too_late(self, newcomer: frames.Join) -> bool:
        """Return whether the running session is about to end, and takes no newcomer that was not in it."""
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

    def enough(self, members: int) -> bool:
        """Return whether so many members form the session."""
        return members == self.world_size

    def leave_out(self, text: str) -> bool:
        """Take note that a newcomer and a member can't reach each other; return whether people are to be told."""
        return True

    def answers(self, member: bytes, now: float) -> bool:
        """Return whether a member was alive a moment ago, as far as it is known."""
        return True

    def acknowledged(self, member: bytes, now: float) -> bool:
        """Take note of an ACK; return whether the member counts, since its ACK came in time."""
        return True

    def can_go(self, now: float) -> bool:
        """Return whether enough of the members, which have all acknowledged, still count."""
        return True

    def formed(self) -> None:
        """Take note of GO."""

    def gone(self, member: bytes) -> None:
        """Take note that a member is gone."""

    def ended_by_member(self) -> None:
        """Take note that a member of the running session has said good-bye."""

    def shared_machines(self) -> str:
        """Return which members run on one machine that should not, as text for people; empty: none."""
        return ""

    def lacks(self) -> str:
        """Return what the session lacks before it can be sealed, as text for people; empty if nothing."""
        return ""
