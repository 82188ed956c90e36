"""How many agents found a session of an elastic job, and how many keep it: a quorum of fixed size. Pure.

A job of MIN to MAX nodes is founded by F = max(MIN, MAX // 2 + 1) agents and kept by K = MAX - F + 1, as etcd and
ZooKeeper count over a fixed membership. F + K > MAX: while at most MAX agents of a job are alive, the agents that
found a session and those that keep another one have an agent in common, and its lease (:mod:`mingle.elastic.leases`)
allows it only one of the two. So the protocol never has to decide that an agent is dead, which no packet can prove.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from mingle.elastic.leases import GROWN_SECONDS, LEASE_SECONDS, Leases, is_fresh, latest_common
from mingle.errors import ConfigurationError, counted
from mingle.protocol.explain.errors import SHARED_MACHINE
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.seating import node_keys
from mingle.protocol.session.seats import Seated
from mingle.text import few, nnodes_text
from mingle.wire import frames

if TYPE_CHECKING:
    from mingle.elastic.memory import Memory

ACKNOWLEDGE_SECONDS = 8.0
"""How long after SEALED the last ACK can come: less than a lease, which begins with SEALED."""
CONFIRM_SECONDS = 12.0
"""How long after CONFIRM the last CONFIRMED can come: a member can be bound to another session meanwhile."""
CLOCK_ERROR_SECONDS = 86_400.0
"""A generation that is further ahead of all clocks than this is forged, or stems from a clock that was wrong."""
LEFT_OUT_REMEMBERED = 64
"""Of how many nodes that were left out, each with the reason, the others are not told again."""
ANSWERS_SECONDS = 3.0
"""A member that has answered a PING within this time is alive, so its seat will not be free soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How many nodes a job may have: torchrun's ``--nnodes=MIN:MAX``.

    Raises:
        ConfigurationError: MIN and MAX are not 1 <= MIN <= MAX <= the limit.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum <= frames.MAX_NODES:
            raise ConfigurationError.explain(
                f"a job can't have {self.minimum} to {counted(self.maximum, 'node')}",
                cause="the two numbers of --nnodes=MIN:MAX are mixed up, or one of them is mistyped",
                remedy=f"give 1 <= MIN <= MAX <= {frames.MAX_NODES}",
            )

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum} to {self.maximum}"

    @property
    def founders(self) -> int:
        """F: the number of agents that found a session. Two disjoint groups of the job's agents cannot both have F."""
        return max(self.minimum, self.maximum // 2 + 1)

    @property
    def keepers(self) -> int:
        """K: the number of agents, including the host, that keep a session that has had its quorum."""
        return self.maximum - self.founders + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The user's settings for the size of a session.

    Attributes:
        nodes: how many nodes the job can have.
        last_call: seconds that a gathering below its quorum waits for another agent before it can start small, and the
            first round of all for more nodes than it needs.
        last_call_is_set: whether the user has set it: then also a round after a failure waits so long.
        allow_minority: whether MIN agents can always found and keep a session; two parts of the job can then run.
    """

    nodes: Nodes
    last_call: float
    last_call_is_set: bool = False
    allow_minority: bool = False

    def may_start_small(self, *, experienced: bool) -> bool:
        """Return whether MIN agents can found a session after a last call.

        Args:
            experienced: whether any agent of the gathering was in a session that had its quorum.
        """
        return self.allow_minority or not experienced

    def to_keep(self, *, had_quorum: bool) -> int:
        """Return how many agents, including the host, keep a session."""
        if self.allow_minority:
            return min(self.nodes.minimum, self.nodes.keepers)
        return self.nodes.keepers if had_quorum else self.nodes.minimum

    def round_minimum(self, *, had_quorum: bool) -> int:
        """Return the least number of agents in a round: MIN, and no fewer than keep the session."""
        return max(self.nodes.minimum, self.to_keep(had_quorum=had_quorum))


class Quorum(Admission):
    """The rules for the members of a session of agents: F found it, K keep it, and it admits others until MAX are in.

    CONFIRM goes out once F agents are seated, or MIN after a last call where that is allowed. GO is decided, and the
    session is kept, only while the leases of that many agents are valid (:mod:`mingle.elastic.leases`). An agent that
    was refused because MAX agents held all seats and answered is *surplus*: until a session has admitted it, or the
    host that refused it has ended the job, it counts for no founding, hosts no session, and gets a seat only in one
    that has formed. Otherwise surplus agents could fill a gathering that lacks agents that count.

    Args:
        session: the session's name.
        memory: what the host knows, with the user's settings.
        now: the present time.
    """

    kind = "agents"
    takes_latecomers = True
    hands_over = False  # each round has ranks of its own
    confirm_seconds = CONFIRM_SECONDS
    waits_for_proofs = False  # the leases begin with SEALED, and end

    def __init__(self, session: bytes, memory: Memory, now: float) -> None:
        super().__init__(memory.policy.nodes.maximum)
        self.acknowledge_seconds = ACKNOWLEDGE_SECONDS
        self.policy = memory.policy
        self.leases = Leases()
        self.had_quorum = False
        """Whether the session has had F members at once: from then on K keep it."""
        self.small = False
        """Whether fewer than F founded it, after a last call."""
        self.running = False
        """Whether GO was decided."""
        self.ending = False
        """Whether a member has ended the job for all; no round begins after that, so no quorum is needed."""
        self.generation = 0
        """The number of the session, fixed at the seal."""
        self.left_out: deque[str] = deque(maxlen=frames.MAX_LEFT_OUT)
        """Which nodes got no seat lately, since they and members can't reach each other."""
        self._left_out_before: deque[str] = deque(maxlen=LEFT_OUT_REMEMBERED)
        self._session = session
        self._memory = memory
        self._newcomer_at = now
        self._bound = False
        """Whether the host is still bound to another session."""
        self._seated: list[Seated] | None = None
        self._other_ids: list[bytes] = []

    # --- the members that count --------------------------------------------------------------------------------------

    def _others(self) -> list[bytes]:
        if self._seated is not (seated := self.seats.members()):
            self._seated, self._other_ids = seated, [seat.member for seat in seated if seat.conn is not None]
        return self._other_ids

    def counting(self, now: float) -> list[bytes]:
        """Return the members whose lease is valid, including the host."""
        members = self.seats.members()
        return [seat.member for seat in members if seat.conn is None or now < self.leases.until(seat.member)]

    def _candidates(self) -> list[bytes]:
        """The agents that count for the founding once they are old enough."""
        return [seat.member for seat in self.seats.members() if self.may_found(seat)]

    def may_found(self, seat: Seated) -> bool:
        """Return whether an agent counts for a founding: a surplus one does not."""
        return not self._past(seat).surplus

    def is_grown(self, member: bytes, now: float) -> bool:
        """Return whether an agent is old enough to count for a founding."""
        return now >= self._grown_at(member)

    def _grown_at(self, member: bytes) -> float:
        """Return when an agent becomes old enough to count for a founding."""
        seat = self.seats[member]
        began_at = self._memory.began_at if seat.conn is None else seat.joined_at - seat.applicant.age
        return began_at + GROWN_SECONDS

    def _founders_among(self, members: list[bytes], now: float) -> list[bytes]:
        """Return the agents that count: all if they are MAX, else those that are old enough.

        An agent that was killed a moment ago can have answered a PING of its host. The one in its place helps no other
        session to a round until that answer is too old for a round.
        """
        if len(members) == self.policy.nodes.maximum:
            return members
        return [member for member in members if self.is_grown(member, now)]

    @property
    def _experienced(self) -> bool:
        return any(self._past(seat).had_quorum for seat in self.seats.members())

    def _past(self, seat: Seated) -> frames.Join | Memory:
        """The past of an agent: from JOIN for a member, from memory for the host."""
        return self._memory if seat.conn is None else seat.applicant

    @property
    def wanted(self) -> int:
        """The number of agents that found the session, or that keep it once it runs."""
        if self.running:
            return self.policy.to_keep(had_quorum=self.had_quorum)
        return self.policy.nodes.minimum if self.small else self.policy.nodes.founders

    @property
    def round_minimum(self) -> int:
        """The least number of agents in a round."""
        return self.policy.round_minimum(had_quorum=self.had_quorum)

    def kept_until(self) -> float:
        """Return the time at which too few leases will be valid to keep the session."""
        return self.leases.kept_until(self._others(), self.wanted - 1)

    def proved_at(self) -> float:
        """Return the latest moment at which enough members were alive and in the session, all together."""
        return self.leases.together_at(self._others(), self.wanted - 1)

    def note_quorum(self, now: float) -> None:
        """Check whether a session that started small has had F members that could have founded it.

        They must have been there at one moment: an agent that was killed has a lease for a while, and the one in its
        place can help another session.
        """
        nodes = self.policy.nodes
        if self.had_quorum or len(self.seats.members()) < nodes.founders:
            return
        alive = {member: self.leases.alive(member) for member in self._others()}
        alive[self.seats.own.member] = float("-inf"), now
        grown = [(max(begin, self._grown_at(member)), end) for member, (begin, end) in alive.items()]
        moments = latest_common(grown, nodes.founders), latest_common(alive.values(), nodes.maximum)
        self.had_quorum = max(moments) > float("-inf")

    # --- the newcomers that fit in -----------------------------------------------------------------------------------

    def mismatch(self, applicant: frames.Join) -> str:
        """Return why a newcomer's numbers do not fit this session; empty if they do."""
        nodes = self.policy.nodes
        if (applicant.minimum, applicant.world_size) == (nodes.minimum, nodes.maximum):
            return ""
        return (
            f"the host was started with --nnodes={nnodes_text(nodes.minimum, nodes.maximum)}, "
            f"the newcomer with --nnodes={nnodes_text(applicant.minimum, applicant.world_size)}"
        )

    def misfit(self, applicant: frames.Join, *, assigned: bool) -> tuple[frames.RefusalReason, str] | None:
        """Return why a newcomer can never be in this session, or None if it can."""
        if applicant.kind == self.kind and not applicant.rounds:
            host = next(iter(self.seats.values())).applicant
            newcomers, hosts = (each.versions.get("mingle", "unknown") for each in (applicant, host))
            return "version", f"the newcomer has mingle {newcomers}, the host {hosts}, which begins the rounds itself"
        return super().misfit(applicant, assigned=assigned)

    def is_surplus(self, newcomer: frames.ProcessInfo, now: float) -> bool:
        """Return whether every one of MAX seats of the running session belongs to an agent that has answered lately.

        A newcomer on a host that already has a seat is more likely the same agent, restarted.
        """
        if not self.running or len(self.seats.members()) < self.policy.nodes.maximum:
            return False
        answered = now + LEASE_SECONDS - ANSWERS_SECONDS
        alive = all(self.leases.until(member) >= answered for member in self._others())
        return alive and all(newcomer.hostname != seat.applicant.who.hostname for seat in self.seats.members())

    def waits_outside(self, newcomer: frames.Join) -> bool:
        """Return whether a newcomer is surplus, and would take the seat of an agent that counts for the founding."""
        return newcomer.surplus and not self.running

    def too_late(self, newcomer: frames.Join) -> bool:
        """Return whether a member has ended the job, and the newcomer was never in this session: it waits for the end.

        It would find that no round begins any more, and the next run of the job is another session.
        """
        return self.ending and newcomer.generation < self.generation

    def admits(self, now: float) -> bool:
        """Return whether enough members have answered lately: no newcomer fills a session that the others have left."""
        return self.ending or is_fresh(self.proved_at(), now)

    # --- when to found ---------------------------------------------------------------------------------------------

    def came(self, now: float) -> None:
        """Begin the last call anew."""
        self._newcomer_at = now

    def complete(self, now: float) -> bool:
        """Return whether the present agents can found the session."""
        nodes, candidates = self.policy.nodes, self._candidates()
        founding = len(self._founders_among(candidates, now))
        self.small, self.due = founding < nodes.founders, None
        self._bound = self._memory.binding.elsewhere(self._session, now)
        if self._bound:
            self.due = self._memory.binding.until
            return False
        if not self.small:
            return True
        self.due = min((at for at in map(self._grown_at, candidates) if now < at), default=None)
        enough_soon = len(candidates) >= nodes.founders
        if founding < nodes.minimum or enough_soon or not self.policy.may_start_small(experienced=self._experienced):
            return False
        last_call_ends = self._newcomer_at + self.policy.last_call
        if now < last_call_ends:
            self.due = last_call_ends if self.due is None else min(self.due, last_call_ends)
        return now >= last_call_ends

    def seal(self) -> None:
        """Fix the generation: higher than any that a founder knows, and no earlier than the founders' clocks.

        Agents that were all started again know no generation. Their clocks order the session after the earlier ones.
        """
        pasts = [self._past(seat) for seat in self.seats.members()]
        clock = max(past.clock for past in pasts)
        known = max((past.generation for past in pasts if past.generation <= clock + CLOCK_ERROR_SECONDS), default=-1)
        self.generation = min(max(known + 1, clock), frames.MAX_GENERATION)

    def sealed(self, member: bytes, now: float) -> None:
        """Start a member's lease."""
        self.leases.sealed(member, now)

    def members(self, *, joining: int = 0) -> frames.Members:
        """Return the MEMBERS frame; before SEALED it says whether the session has its quorum when members hear GO."""
        if self.running:
            soon = joining > 0 and len(self.seats.members()) + joining >= self.policy.nodes.founders
        else:
            soon = not self.small
        shown = self.seats.members()[: frames.MAX_PRESENT]
        return frames.Members(
            generation=self.generation,
            quorum=self.had_quorum or soon,
            present=tuple(msgspec.structs.replace(seat.applicant.who, rank=None) for seat in shown),
            left_out=tuple(self.left_out),
            ending=self.ending,
        )

    def enough(self, members: int) -> bool:
        """Return whether so many members found the session."""
        return members >= self.wanted

    def leave_out(self, text: str) -> bool:
        """Remember it, for the members, unless they were told lately; return whether it is news."""
        if text in self._left_out_before:
            return False
        self._left_out_before.append(text)
        self.left_out.append(text)
        return True

    def answers(self, member: bytes, now: float) -> bool:
        """Return whether a member has answered a PING of the last seconds."""
        return self.seats[member].conn is None or is_fresh(self.leases.answered_at(member), now)

    def acknowledged(self, member: bytes, now: float) -> bool:
        """Renew a member's lease from SEALED; return whether it is valid."""
        self.leases.acknowledged(member)
        return now < self.leases.until(member)

    def can_go(self, now: float) -> bool:
        """Return whether the leases of enough founding agents are valid."""
        return len(set(self._founders_among(self._candidates(), now)) & set(self.counting(now))) >= self.wanted

    def formed(self) -> None:
        """Take note of GO."""
        self.running, self.had_quorum = True, not self.small

    def gone(self, member: bytes) -> None:
        """End a member's lease."""
        self.leases.forget(member)

    def ended_by_member(self) -> None:
        """Take note that a member's workers are done or have failed for good, which ends the job."""
        self.ending = True

    def shared_machines(self) -> str:
        """Return which members are agents of one machine, as text for people; empty: none."""
        applicants = [seat.applicant for seat in self.seats.members()]
        machines: dict[object, list[frames.ProcessInfo]] = {}
        for key, applicant in zip(node_keys(applicants), applicants, strict=True):
            machines.setdefault(key, []).append(applicant.who)
        shared = [agents for agents in machines.values() if len(agents) > 1]
        named = (f"{agents[0].hostname}, pids {few(sorted(each.pid for each in agents))}" for agents in shared)
        return f"{SHARED_MACHINE} ({few(named, '; ')})" if shared else ""

    def lacks(self) -> str:
        """Return what this gathering lacks before it can be sealed, as text for people; empty if nothing."""
        nodes, founding = self.policy.nodes, len(self._candidates())
        if self._bound:
            return "the end of its lease in the previous session"
        if founding >= nodes.founders:
            return ""
        text = f"{counted(nodes.founders - founding, 'more node')}: it takes {nodes.founders} to begin"
        if self.policy.may_start_small(experienced=self._experienced):
            if founding >= nodes.minimum:
                text += f", or {self.policy.last_call:g} s without a newcomer"
        elif nodes.minimum < nodes.founders:
            text += f", or {nodes.minimum} with --rdzv-conf allow_minority=1"
        missed = self._memory.missed(seat.applicant.who for seat in self.seats.members())
        return f"{text}; missed: {few(missed, '; ')}" if missed else text
