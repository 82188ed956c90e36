"""What an agent of an elastic job knows across its sessions. Pure.

Its roles (:mod:`mingle.elastic.member`, :mod:`mingle.elastic.host`) tell it what happens, and it alone says what
follows for the next session. Each agent has one for its whole life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from mingle.elastic.leases import Binding
from mingle.protocol.explain.observations import Agents
from mingle.wire import frames
from mingle.wire.datagrams import Offer

if TYPE_CHECKING:
    from mingle.elastic.quorum import Policy


class SessionEnd(Struct, frozen=True):
    """How a session that had formed has ended for this agent."""

    reason: str
    moved_to: Offer | None = None
    """The session for which its host has ended it."""
    of_job: bool = False
    """Whether the host has ended the job with it, on purpose."""


@dataclass(slots=True)
class Memory:
    """What one agent knows across its sessions. A restarted agent is a new one and knows nothing."""

    policy: Policy
    wall_clock: Callable[[], float] = lambda: 0.0
    """Returns the seconds since 1970. A clock can be wrong, so it orders generations and nothing else."""
    began_at: float = float("-inf")
    """When the agent began."""
    binding: Binding = field(default_factory=Binding)
    generation: int = -1
    """The highest generation of the sessions that it was in; -1 before the first."""
    had_quorum: bool = False
    """Whether it was in a session that had its quorum; such an agent takes part in no small start."""
    ran: tuple[bytes, str] = (b"", "")
    """The last session that ran without this agent, and its agents, as it said."""
    surplus: bool = False
    """Whether a session with MAX answering agents refused it; such an agent counts for no founding until it is
    admitted, or that job has ended in an orderly way."""
    seat: tuple[bytes, bytes] = (b"", b"")
    """The last session in which it had a seat, and the token of that seat."""
    companions: tuple[frames.ProcessInfo, ...] = ()
    """The agents in its last session, for messages."""
    left_out: frames.Refused | None = None
    """Why it was refused a seat, if it and a member can't reach each other; None once it has one."""
    host_lost: tuple[str, int] = ("", 0)
    """The host name and process id of the host whose session it has lost last."""
    asked: frames.Next | None = None
    """What its torchrun waits for: the next round of the present session."""
    round: frames.Begin | None = None
    """The last round of the present session that it is in."""
    round_wanted: bool = False
    """Whether another round has to follow that one."""
    best_status: frames.Status | None = None
    """The status of the present gathering when most agents were there. Deadlines pass one after another, and the last
    agent names the others, too."""
    _in_doubt: tuple[bytes, int, bool] | None = None
    """The session whose GO this agent may never hear of; its generation and quorum before it."""

    @property
    def clock(self) -> int:
        """The time by the wall clock, as JOIN has it."""
        return min(max(0, int(self.wall_clock())), frames.MAX_GENERATION)

    # --- the present session ---------------------------------------------------------------------------------------

    def take_seat(self, session: bytes, token: bytes) -> None:
        """Take note that this agent has a seat in a session."""
        self.seat = session, token

    def acknowledge(self, session: bytes, members: frames.Members) -> None:
        """Take note that the host may decide GO from now on, even if this agent never hears of it."""
        self._in_doubt = session, self.generation, self.had_quorum
        self._raise(members)

    def called_off(self, session: bytes) -> None:
        """Take note that the host has not decided GO."""
        self.binding.release(session)
        if self._in_doubt is not None and self._in_doubt[0] == session:
            _, self.generation, self.had_quorum = self._in_doubt
            self._in_doubt = None

    def begin(self) -> None:
        """Begin a search for the next session."""
        self.best_status = self._in_doubt = None

    def formed(self, *, hosts: bool) -> None:
        """Take note that this agent is in a session, or hosts it."""
        self.surplus, self.left_out = False, None
        if hosts:
            self.host_lost = "", 0  # the host that is lost next is this agent

    def lose_host(self, hostname: str, pid: int) -> None:
        """Take note of the host whose session is lost."""
        self.host_lost = hostname, pid

    def learn(self, members: frames.Members) -> list[str]:
        """Take note of the agents in the session that has formed; return those that are lost to the next round."""
        self._raise(members)
        next_round = (self.round_wanted or self.asked is not None) and not members.ending
        complete = len(members.present) < frames.MAX_PRESENT
        lost = self.missed(members.present) if next_round and complete else []
        self.companions = members.present
        return lost

    def _raise(self, members: frames.Members) -> None:
        self.generation = max(self.generation, members.generation)
        self.had_quorum |= members.quorum

    def wait_for_round(self, asked: frames.Next | None) -> None:
        """Take note that the agent is in no round, and which one it waits for; None: it is in no session."""
        self.asked, self.round, self.round_wanted = asked, None, False

    def hear_of_round(self, frame: frames.Begin | frames.Wanted) -> None:
        """Take note of a round that begins, or has to follow, if the agent waits for it."""
        if isinstance(frame, frames.Begin) and self.asked is not None:
            self.asked, self.round = None, frame
        elif isinstance(frame, frames.Wanted) and self.round is not None and frame.number == self.round.number:
            self.round_wanted = True

    # --- other sessions ----------------------------------------------------------------------------------------------

    def refused_as_surplus(self, session: bytes, agents: str) -> None:
        """Take note that a session that runs has no seat for this agent; its agents, as it said."""
        self.surplus, self.ran = True, (session, agents)

    def refused_for_its_paths(self, refusal: frames.Refused) -> bool:
        """Take note that this agent and a member can't reach each other; return whether that is news."""
        before, self.left_out = self.left_out, refusal
        return before is None or before.detail != refusal.detail

    def note_run(self, session: bytes, said: frames.Running | frames.Closed) -> None:
        """Take note of what a session says of itself that this agent is not in."""
        if isinstance(said, frames.Running):
            if said.state == "running":
                self.surplus |= said.surplus
                self.ran = session, said.roster
        elif session == self.ran[0] and not said.regather:
            # The job has ended for all its agents, so none of them can hold it elsewhere. The end of an earlier run
            # says nothing: it can be heard late, while the next one runs.
            self.surplus = False

    # --- what people are told --------------------------------------------------------------------------------------

    def note_status(self, status: frames.Status) -> None:
        """Keep a status, unless more agents were there before."""
        if self.best_status is None or status.joined >= self.best_status.joined:
            self.best_status = status

    def missed(self, present: Iterable[frames.ProcessInfo]) -> list[str]:
        """Return the agents of the last session that are not here."""
        here = {(who.hostname, who.pid) for who in present}
        return [str(who) for who in self.companions if (who.hostname, who.pid) not in here]

    def told(self, who: frames.ProcessInfo, *, away: bool = False, surplus: bool = False) -> Agents:
        """Return what the likely cause follows from.

        Args:
            who: this agent.
            away: whether it has no host, or is one without members.
            surplus: whether it waits for the end of a run that had no place for it.
        """
        nodes = self.policy.nodes
        return Agents(
            who=str(who),
            nodes=str(nodes),
            minimum=nodes.minimum,
            maximum=nodes.maximum,
            founders=nodes.founders,
            had_quorum=self.had_quorum,
            others=self.ran[1],
            missed=self.missed(()),
            best=self.best_status,
            left_out=self.left_out if away else None,
            surplus=surplus,
        )
