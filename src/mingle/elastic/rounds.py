"""The rounds of a session of agents: when one begins, who takes part, and in which order. Pure.

torchrun starts its workers once for each *round*. The host of the session alone begins rounds, so no shared state is
raced for. An agent whose workers are stopped says NEXT. Once all that are awaited have said it, the host tells each
participant its rank (BEGIN). If a participant is lost or says NEXT again, or newcomers wait, the host tells the others
that another round has to follow (WANTED), so that they stop their workers as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

from mingle.config.order import asks
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Quorum
from mingle.protocol.session.seats import Seated
from mingle.text import few
from mingle.wire import frames

STOP_SECONDS = 60.0
"""How long a round waits for agents that have not said NEXT: torchrun kills workers that have not ended after 30 s."""
COMPANIONS_SECONDS = 3.0
"""How long the first round after the loss of a session waits for the agents that were in that session."""


class Rounds:
    """The rounds of one session, on its host.

    Args:
        quorum: the rules for its members.
        memory: what the host knew before the session.
        send: sends BEGIN or WANTED to a member, or to the host's own agent.

    Attributes:
        due: when the next call of :meth:`look` can have a result without any event; None: never.
        number: of the present round; -1 before the first.
        participants: the agents of the present round that are neither lost nor done.
        over: whether the agents of the present round that are done wait for others in vain.
    """

    def __init__(
        self, quorum: Quorum, memory: Memory, send: Callable[[bytes, frames.Begin | frames.Wanted], None]
    ) -> None:
        self.due: float | None = None
        self._quorum = quorum
        self._policy = memory.policy
        self._send = send
        # The agent that hosted the last session is not waited for: its loss was the end of that session.
        self._companions = {(who.hostname, who.pid) for who in memory.companions} - {memory.host_lost}
        self.number = -1
        self.participants: set[bytes] = set()
        self.over = False
        self._size = 0
        """How many agents the present round began with."""
        self._done: set[bytes] = set()
        """The agents of the present round whose workers are done."""
        self._waiting: dict[bytes, frames.Next] = {}
        """The agents that have said NEXT since they were last in a round."""
        self._known: tuple[Sequence[Seated] | None, int] = None, 0
        """The members, and the least number of them in a round, at the last look."""
        self._news = False
        """Whether an agent has said something since."""
        self._wanted_at: float | None = None
        self._enough_at: float | None = None
        """Since when enough agents for a round have waited."""
        self._began_at = self._for_newcomers_at = float("-inf")
        """When the present round began, and when newcomers last made one wanted."""

    # --- what the agents say ---------------------------------------------------------------------------------------

    def said_next(self, member: bytes, said: frames.Next, now: float) -> None:
        """Handle NEXT: a member, or the host itself, waits for a round."""
        self._waiting[member], self._news = said, True
        if member in self.participants:
            self._want(now)

    def said_done(self, member: bytes) -> None:
        """Handle DONE: neither the loss of this member nor newcomers make another round wanted: the job is ending."""
        self._news = True
        self._done |= self.participants & {member}
        self.participants.discard(member)
        self._waiting.pop(member, None)

    # --- after every event -----------------------------------------------------------------------------------------

    def look(self, seats: Sequence[Seated], now: float) -> None:
        """Find out whether another round is wanted, or begins.

        Args:
            seats: of all members, the host's own included; the same object as before if they are the same.
            now: the time.
        """
        minimum = self._quorum.round_minimum
        same = not self._news and seats is self._known[0] and minimum == self._known[1]
        if same and (self.due is None or now < self.due):
            return
        self._known, self._news = (seats, minimum), False
        present = {seat.member: seat for seat in seats}
        if self._quorum.ending:  # no round begins any more
            self.participants &= present.keys()
            self.over, self.due = self.is_over(present), None
            return
        self._waiting = {member: said for member, said in self._waiting.items() if member in present}
        if self.number < 0 and self._wanted_at is None:
            self._wanted_at = now
        if lost := self.lost(self.participants, present):
            self.participants -= lost
            self._want(now)
        self.over = self.is_over(present)
        self.due = None
        if self._wanted_at is None and (at := self.newcomers_at(len(present))) is not None:
            if now >= at:
                self._for_newcomers_at = now
                self._want(now)
            else:
                self.due = at
        if self._wanted_at is not None and (at := self.begins_at(present, self._wanted_at, now)) is not None:
            if now >= at:
                self._begin([present[member] for member in self._waiting], now)
            else:
                self.due = at

    def _want(self, now: float) -> None:
        if self._wanted_at is None:
            self._wanted_at = now
            for member in self.participants:
                self._send(member, frames.Wanted(number=self.number))

    # --- the rules -------------------------------------------------------------------------------------------------

    def lost(self, participants: Collection[bytes], present: Container[bytes]) -> set[bytes]:
        """Return the participants without which the workers of the others can't go on."""
        return {member for member in participants if member not in present}

    def is_over(self, present: Collection[bytes]) -> bool:
        """Return whether nothing is left for which the agents that are done would have to wait.

        The workers of all others have ended before they were done, and no round can follow: an agent has ended the
        job, or as long as those that are done have their seats, too few other agents can come.
        """
        others = self._policy.nodes.maximum - len(self._done.intersection(present))
        unfinished = len(self._done) < self._size and self.participants <= self._waiting.keys()
        return bool(self._done) and unfinished and (self._quorum.ending or others < self._quorum.round_minimum)

    def newcomers_at(self, present: int) -> float | None:
        """Return the time from which the waiting agents make another round wanted; None: they do not.

        Nodes that come one by one must not restart all workers each time, so newcomers wait until the round is older
        than a last call. Newcomers that make the session full need not, but two such restarts are a last call apart:
        otherwise a node that crashes again and again would restart all others each time. Once an agent of the round is
        done, newcomers make no round wanted: the job is ending.
        """
        if not self._waiting or self._done:
            return None
        full = present == self._policy.nodes.maximum
        return (self._for_newcomers_at if full else self._began_at) + self._policy.last_call

    def begins_at(self, present: Mapping[bytes, Seated], wanted_at: float, now: float) -> float | None:
        """Return the time from which the round can begin with those that wait; None: too few do."""
        if len(self._waiting) < self._quorum.round_minimum:
            self._enough_at = None
            return None
        self._enough_at = now if self._enough_at is None else self._enough_at
        awaited = self.participants if self.number >= 0 else present.keys()
        stopped_at = wanted_at + STOP_SECONDS if awaited - self._waiting.keys() else wanted_at
        if len(self._waiting) == self._policy.nodes.maximum:
            return stopped_at
        return max(stopped_at, self._enough_at + self._pause(present))

    def _pause(self, present: Mapping[bytes, Seated]) -> float:
        """Return for how long an incomplete round waits for more agents.

        After a failure the host knows which agents live, so by default it makes no last call. Torch makes one each
        time.
        """
        set_by_user = self._policy.last_call if self._policy.last_call_is_set else 0.0
        if self.number >= 0:
            return set_by_user
        if self._quorum.small:  # the gathering had its last call
            return 0.0
        if all(said.generation < 0 for said in self._waiting.values()):
            return self._policy.last_call
        here = {(seat.applicant.who.hostname, seat.applicant.who.pid) for seat in present.values()}
        return set_by_user if self._companions and self._companions <= here else max(set_by_user, COMPANIONS_SECONDS)

    def seniority(self, seat: Seated) -> tuple[object, ...]:
        """Return the key by which the participants are sorted.

        Agents that were in an earlier round come first: a newcomer can have an empty disk, and rank 0 sends its own
        state to all. Agents with the same first round follow the order of nodes.
        """
        said = self._waiting[seat.member]
        return said.generation < 0, said.generation, said.number, seat.key

    def _begin(self, waiting: list[Seated], now: float) -> None:
        seats = sorted(waiting, key=self.seniority)
        missing = missing_node_ranks(seats)
        self.number += 1
        self.participants = {seat.member for seat in seats}
        self._size, self._done, self.over = len(seats), set(), False
        self._wanted_at = self._enough_at = None
        self._began_at = now
        self._waiting.clear()
        for rank, seat in enumerate(seats):
            self._send(seat.member, frames.Begin(number=self.number, rank=rank, size=len(seats), doubts=missing))


def missing_node_ranks(seats: Iterable[Seated]) -> str:
    """Return a warning if only some agents of a round ask for a node rank; empty otherwise.

    Two agents of a round never ask for the same one: the host of the session accepts each node rank once.
    """
    applicants = [seat.applicant for seat in seats]
    without = sorted(each.who.address or each.who.hostname for each in applicants if not asks(each.order))
    if not 0 < len(without) < len(applicants):
        return ""
    return (
        f"some nodes ask for a node rank, and come first; these do not: {few(without)}; "
        "fix: give each node a node rank of its own, or none"
    )
