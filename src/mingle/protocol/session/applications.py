"""The applications for seats: what becomes of a JOIN. Pure.

A newcomer gets a free seat if the admission takes it (:mod:`mingle.protocol.session.admission`). One that wants a seat
that is taken becomes a :class:`Challenge`: it waits until the holder of the seat has shown that it lives, or has lost
the seat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from mingle.protocol.session.admission import Admission
from mingle.protocol.session.phases import Committed, State
from mingle.protocol.session.seats import Seated, Seats
from mingle.wire import frames

Verdict: TypeAlias = Literal["nothing", "seat it", "it comes back", "it joins anew"]
"""What the registrar has to do about an application: nothing, if it was refused or waits; give it a free seat; move the
seat of the member that it is; or free that seat, since an agent joins a session that runs anew."""
CHALLENGE_SECONDS = 1.0
"""How long a seated member has to answer when another process claims its seat."""


def rank_taken(holder: Seated) -> frames.Refused:
    """Return the refusal of a newcomer that wants the rank, or the node rank, of a live process."""
    applicant = holder.applicant
    if applicant.rank is None:
        number = int.from_bytes(applicant.order[1:5], "big")
        detail = f"node rank {number} is held by another live node"
        return frames.Refused(reason="node rank taken", detail=detail, who=holder.who)
    detail = f"rank {applicant.rank} is held by a live process"
    return frames.Refused(reason="rank taken", detail=detail, who=holder.who)


class Challenge(Struct, frozen=True):
    """A newcomer that wants a taken seat, while the holder of the seat is asked whether it lives."""

    conn: int
    member: bytes
    applicant: frames.Join
    seat: bytes
    """The holder's member id."""
    deadline: float
    """When a holder that has not answered loses the seat."""
    asked_at: float
    """When the holder was asked."""


class Applications:
    """The processes that apply for seats, and those that wait for the answers of holders.

    Args:
        seats: of the session.
        admission: which newcomers fit in.
        refuse: refuses the newcomer on a connection.
        ping: asks the member on a connection whether it lives.
    """

    def __init__(
        self,
        seats: Seats,
        admission: Admission,
        *,
        refuse: Callable[[int, frames.Join, frames.Refused], None],
        ping: Callable[[int, float], None],
    ) -> None:
        self._seats = seats
        self._admission = admission
        self._refuse = refuse
        self._ping = ping
        self._waiting: list[Challenge] = []

    def judge(self, conn: int, member: bytes, applicant: frames.Join, state: State, now: float) -> Verdict:
        """Return what is to be done about a JOIN, after it was refused or its newcomer waits.

        Args:
            conn: the connection on which it came.
            member: the member id that the newcomer names.
            applicant: the JOIN.
            state: of the session.
            now: the time.
        """
        self.withdraw(conn)
        seats, takes_latecomers = self._seats, self._admission.takes_latecomers
        if member == seats.host.member:
            # A forged OFFER can name this session with another host id; the host then joins itself.
            detail = "the caller is the host of this session"
            self._refuse(conn, applicant, frames.Refused(reason="session", detail=detail))
            return "nothing"
        known, refusal = seats.get(member), self._admission.refusal(applicant, state, now)
        if known is not None:
            if known.conn == conn:
                return "nothing"
            if not known.belongs_to(applicant):
                # JOINED can be lost with the first connection. All members of a sealed session of ranks have heard it.
                if not state.sealed or takes_latecomers:
                    return self._challenge(known, conn, member, applicant, state, now)
            else:
                self.holder_lives(known)  # none of them must get the seat if it is free for a moment
                agent = known.is_latecomer or (takes_latecomers and isinstance(state, Committed))
                return "it joins anew" if agent else "it comes back"
        if refusal is not None:
            self._refuse(conn, applicant, refusal)
            return "nothing"
        holder = seats.holder(applicant.rank)
        if holder is None and seats.assigned:
            holder = seats.same_place(applicant)
        if holder is not None:
            return self._challenge(holder, conn, member, applicant, state, now)
        return "seat it"

    def _challenge(
        self, holder: Seated, conn: int, member: bytes, applicant: frames.Join, state: State, now: float
    ) -> Verdict:
        """Ask the holder of a seat whether it lives, because another process wants the seat."""
        if holder.conn is None:
            self._refuse(conn, applicant, rank_taken(holder))
            return "nothing"
        # In a running session leases decide which member is lost: no caller must be able to shorten them.
        deadline = float("inf") if isinstance(state, Committed) else now + CHALLENGE_SECONDS
        self._ping(holder.conn, now)
        self._waiting.append(Challenge(conn, member, applicant, holder.member, deadline, asked_at=now))
        return "nothing"

    def withdraw(self, conn: int) -> None:
        """Forget the newcomer on a connection."""
        self._waiting = [each for each in self._waiting if each.conn != conn]

    def answered(self, holder: Seated, answered_at: float) -> None:
        """Refuse the newcomers for whom a holder was asked by the moment of the question that it has answered."""
        self._refuse_all(holder, self._take(lambda each: each.seat == holder.member and each.asked_at <= answered_at))

    def holder_lives(self, holder: Seated) -> None:
        """Refuse all that wait for a seat: its holder lives."""
        self._refuse_all(holder, self.take(holder.member))

    def _refuse_all(self, holder: Seated, challenges: Sequence[Challenge]) -> None:
        for challenge in challenges:
            refusal = rank_taken(holder)
            if challenge.member == holder.member:
                # It looks further, as a member does whose own answer was still on its way.
                detail = "a live process with this member id has a seat, and its token"
                refusal = frames.Refused(reason="session", detail=detail, who=holder.who)
            self._refuse(challenge.conn, challenge.applicant, refusal)

    def take(self, seat: bytes) -> list[Challenge]:
        """Return, once, those that wait for a seat, the first first."""
        return self._take(lambda each: each.seat == seat)

    def _take(self, wanted: Callable[[Challenge], bool]) -> list[Challenge]:
        taken = [each for each in self._waiting if wanted(each)]
        self._waiting = [each for each in self._waiting if not wanted(each)]
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
