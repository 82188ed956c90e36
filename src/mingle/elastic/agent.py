"""One agent of an elastic job: a node that looks for the next session when its session ends. A pure machine.

For each session it looks for a host or is elected, like any node without a rank (:mod:`mingle.protocol.node`), with
roles of its own: :class:`~mingle.elastic.member.ElasticMember` and :class:`~mingle.elastic.host.ElasticHost`. It keeps
its control port and member id for its whole life.

All times are of CLOCK_BOOTTIME. Each event first checks, by its own time, whether a lease has ended: a process that was
stopped, or a machine that was suspended, must not act on the state from before.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import TypeGuard

from mingle.elastic.host import ElasticHost
from mingle.elastic.leases import Hold
from mingle.elastic.member import ElasticMember
from mingle.elastic.memory import Memory, SessionEnd
from mingle.elastic.quorum import Policy
from mingle.errors import MingleError
from mingle.protocol.effects import Notice
from mingle.protocol.election import Candidacy
from mingle.protocol.events import Event
from mingle.protocol.machine import Context, Endpoints, Formation, Identity
from mingle.protocol.node import Node
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer


class JobEnd(enum.IntEnum):
    """How near the end of its job an agent is, which only comes nearer. It decides whether a session follows."""

    OPEN = 0
    """The agent looks for the next session when it has lost the present one."""
    DONE = 1
    """Its workers are done: it looks for another session only if it is asked to."""
    ANNOUNCED = 2
    """An agent has ended the job for all: no round begins any more, and no session follows."""
    REACHED = 3
    """The host has ended the job, or this agent its own part in it."""


class ElasticCandidacy(Candidacy):
    """Decide which of two hosts closes: an open one for a sealed one with a free seat, else that with the higher id."""

    def competes(self, message: Datagram) -> TypeGuard[Offer]:
        """Return whether this is another session of the same job that this agent could join."""
        return self.is_other_host(message) and message.takes_members

    def loses_to(self, offer: Offer) -> bool:
        """Return whether this host closes for the other one."""
        return offer.state == "sealed" or super().loses_to(offer)


class Agent(Node):
    """The machine of an agent.

    ``outcome`` is set while it is in a session; ``lost``, ``ended`` and ``failure`` say why it is not. It is closed
    while it looks for none.

    Args:
        identity: of the agent; its world size is the greatest number of nodes.
        policy: how many agents found and keep a session.
        wall_clock: returns the seconds since 1970; see :class:`mingle.elastic.memory.Memory`.
        new_session: makes the id of a session that the agent hosts.
    """

    joiner: ElasticMember
    host: ElasticHost | None

    def __init__(
        self,
        identity: Identity,
        endpoints: Endpoints,
        context: Context,
        now: float,
        *,
        policy: Policy,
        wall_clock: Callable[[], float],
        new_session: Callable[[], bytes] | None = None,
    ) -> None:
        self.memory = Memory(policy, wall_clock, now)
        self.lost: str | None = None
        self.losses = 0
        """How many sessions it has lost; ``lost`` is the reason of the last."""
        self.ended: str | None = None
        self.job_end = JobEnd.OPEN
        super().__init__(
            identity,
            endpoints,
            context,
            now,
            new_session=new_session,
            candidacy=ElasticCandidacy(identity),
            make_joiner=functools.partial(ElasticMember, memory=self.memory),
            make_host=functools.partial(ElasticHost, memory=self.memory),
        )

    def _begin(self, now: float) -> None:
        super()._begin(now)
        self.sightings.patience, self.sightings.told = self._context.timeout, self.memory.note_run

    # --- what the driver wants -------------------------------------------------------------------------------------

    def gather(self, now: float) -> None:
        """Look for a session, unless the agent is in one, looks already, or the job has ended."""
        if self.closed and self.job_end <= JobEnd.DONE:
            self.memory.begin()
            self._begin(now)

    def next_round(self, first: tuple[int, int], now: float) -> None:
        """Say that the workers are stopped and wait for a round; ``memory.round`` tells which one begins.

        Each NEXT is answered by one BEGIN. A second NEXT could cross the answer to the first, and the host would take
        it for a failure in the round that has just begun.

        Args:
            first: the generation and the number of the first round that torchrun got; -1 each: it got none.
            now: the time.
        """
        self.check(now)
        if self.outcome is not None and self.memory.asked is None:
            asked = frames.Next(generation=first[0], number=first[1])
            self.memory.wait_for_round(asked)
            self.role.say_of_round(asked, now)

    def ask_round(self, now: float) -> None:
        """Find out whether the session still stands, since a round has begun: ``hold`` tells the result."""
        self.check(now)
        if self.outcome is not None:
            self.role.ask_round(now)

    def stop_electing(self, now: float) -> None:
        """Look for no other session after the present one: the agent's workers are done."""
        self._near(JobEnd.DONE)
        if self.outcome is not None:
            self.role.say_of_round(frames.Done(), now)
        else:
            self._rest("its workers are done")

    def close(self, reason: str, *, failed: bool = False) -> None:
        """End the agent's part in the job on purpose and say so.

        Args:
            reason: why.
            failed: whether torchrun has no round, so that the job goes on without this agent.
        """
        self._near(JobEnd.REACHED)
        self._rest(reason, failed=failed)

    def _rest(self, reason: str, *, failed: bool = False) -> None:
        """End the present session, or the search for one."""
        super().close(reason, failed=failed)
        self.memory.wait_for_round(None)

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def role(self) -> ElasticHost | ElasticMember:
        """The part that acts now."""
        return self.joiner if self.host is None else self.host

    @property
    def outcome(self) -> Formation | None:
        """The session that the agent is in."""
        return None if self.closed else self.role.outcome

    @property
    def members(self) -> frames.Members | None:
        """The agents of the session that this agent is in, as all of them were told last."""
        return None if self.outcome is None else self.role.members

    @property
    def generation(self) -> int:
        """The number of the session that the agent is in; 0 if it is in none."""
        return 0 if self.members is None else self.members.generation

    @property
    def hold(self) -> Hold:
        """How firmly the agent knows that its session is the only one; torchrun gets only rounds that this allows."""
        return Hold() if self.outcome is None else self.role.hold

    @property
    def round_over(self) -> bool:
        """Whether this agent is the host, and the agents of its round that are done wait for others in vain."""
        return self.host is not None and self.host.rounds.over

    def give_up(self, error: MingleError) -> None:
        """End a gathering whose time is up, with this error unless what happened before has its own."""
        super().give_up(error)
        self._rest_if_failed()

    # --- what happens ----------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> None:
        """Process what has happened, after a look whether a lease has ended by then."""
        self.check(now)
        super().handle(event, now)
        self._look(now)

    def check(self, now: float) -> None:
        """Check whether a lease has ended."""
        if self.outcome is not None:
            self.role.check(now)
            self._look(now)

    # --- from one session to the next ------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Check, after every event, whether the session was lost, or the gathering has failed."""
        self._rest_if_failed()
        if self.closed:
            return
        if self.members is not None and self.members.ending:
            self._near(JobEnd.ANNOUNCED)
        if (end := self.role.end) is None:
            return
        if end.of_job:
            self.ended = end.reason
            self._near(JobEnd.REACHED)
            self._rest("its host has ended the job")
        else:
            self._rest("the session is lost")
            self._fall(end, now)

    def _near(self, end: JobEnd) -> None:
        self.job_end = max(self.job_end, end)

    def _rest_if_failed(self) -> None:
        if self.failure is not None and not self.closed:
            self._rest(type(self.failure).__name__)

    def _fall(self, end: SessionEnd, now: float) -> None:
        """Record the loss of the session, and look for the next one."""
        self.lost, self.losses = end.reason, self.losses + 1
        self.links.effects.append(Notice(f"job {self.identity.job!r}: {end.reason}"))
        if self.job_end is not JobEnd.OPEN:
            return
        self.gather(now)
        if end.moved_to is not None and not self.closed:
            self.joiner.search.make_for(end.moved_to, "", now)
