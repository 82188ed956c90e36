"""One agent of an elastic job: it finds or founds a session, and looks for the next one when that session ends.

A pure machine. For each session an :class:`~mingle.protocol.election.Elector` finds or becomes the host. From GO on,
the host or joiner inside the elector continues alone; when it loses its session, the agent starts the next elector. The
agent keeps its control port and member id for its whole life.

All times are of CLOCK_BOOTTIME. Each event first checks, by its own time, whether a lease has ended: a process that was
stopped, or a machine that was suspended, must not act on the state from before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeGuard

from msgspec import structs

from mingle.elastic.host import ElasticHost
from mingle.elastic.leases import Hold
from mingle.elastic.member import AgentMember
from mingle.elastic.quorum import Memory, Policy
from mingle.errors import MingleError
from mingle.protocol.effects import Effect, Notice
from mingle.protocol.election import Candidacy, Elector
from mingle.protocol.events import Accepted, AddressesChanged, Event, Heard
from mingle.protocol.explain.observations import Situation
from mingle.protocol.host import Host
from mingle.protocol.machine import Context, Endpoints, Formation, Identity
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer, Seek


class ElasticCandidacy(Candidacy):
    """Decide which of two hosts closes: an open one for a sealed one with a free seat, else that with the higher id."""

    def competes(self, message: Datagram) -> TypeGuard[Offer]:
        """Return whether this is another session of the same job that this agent could join."""
        return self.is_other_host(message) and message.takes_members

    def loses_to(self, offer: Offer) -> bool:
        """Return whether this host closes for the other one."""
        return offer.state == "sealed" or super().loses_to(offer)


class Agent:
    """The machine of an agent.

    ``outcome`` is set while it is in a session; ``lost``, ``ended`` and ``failure`` say why it is not.

    Args:
        identity: of the agent; its world size is the greatest number of nodes.
        policy: how many agents found and keep a session.
        wall_clock: returns the seconds since 1970; see :class:`mingle.elastic.quorum.Memory`.
        new_session: makes the id of a session that the agent hosts.
    """

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
        self.identity = identity
        self.endpoints = endpoints
        self.memory = Memory(policy, wall_clock, now)
        self.outcome: Formation | None = None
        self.lost: str | None = None
        self.losses = 0
        """How many sessions it has lost; ``lost`` is the reason of the last."""
        self.ended: str | None = None
        self.failure: MingleError | None = None
        self.closed = False
        self.part: Elector | ElasticHost | AgentMember | None = None
        """The machine that acts now; None while the agent looks for no session."""
        self._context = context
        self._new_session = new_session
        self._stopped_electing = False
        self.links = context.links
        self.gather(now)

    # --- what the driver wants -------------------------------------------------------------------------------------

    def gather(self, now: float) -> None:
        """Look for a session, unless the agent is in one, looks already, or the job has ended."""
        if self.part is not None or self.closed or self.ended is not None or self.memory.ending:
            return
        self.failure = self.memory.best_status = None
        self.part = Elector(
            self.identity,
            self.endpoints,
            self._context,
            now,
            new_session=self._new_session,
            make_joiner=functools.partial(AgentMember, memory=self.memory),
            make_host=functools.partial(ElasticHost, memory=self.memory),
            candidacy=ElasticCandidacy(self.identity),
        )

    def next_round(self, first: tuple[int, int], now: float) -> None:
        """Say that the workers are stopped and wait for a round; ``memory.round`` tells which one begins.

        Each NEXT is answered by one BEGIN. A second NEXT could cross the answer to the first, and the host would take
        it for a failure in the round that has just begun.

        Args:
            first: the generation and the number of the first round that torchrun got; -1 each: it got none.
            now: the time.
        """
        self.check(now)
        if isinstance(self.part, ElasticHost | AgentMember) and self.memory.asked is None:
            asked = frames.Next(generation=first[0], number=first[1])
            self.memory.wait_for_round(asked)
            self.part.say_of_round(asked, now)

    def ask_round(self, now: float) -> None:
        """Find out whether the session still stands, since a round has begun: ``hold`` tells the result."""
        self.check(now)
        if isinstance(self.part, ElasticHost | AgentMember):
            self.part.ask_round(now)

    def stop_electing(self, now: float) -> None:
        """Look for no other session after the present one: the agent's workers are done."""
        self._stopped_electing = True
        if isinstance(self.part, ElasticHost | AgentMember):
            self.part.say_of_round(frames.Done(), now)
        if isinstance(self.part, Elector):
            self.part.close("its workers are done")
            self._drop_part()

    def close(self, reason: str, *, failed: bool = False) -> None:
        """End the agent's part in the job on purpose and say so.

        Args:
            reason: why.
            failed: whether torchrun has no round, so that the job goes on without this agent.
        """
        if self.closed:
            return
        self.closed = True
        if isinstance(self.part, ElasticHost):
            if failed:
                self.part.give_up_session(reason)
            else:
                self.part.close(reason)
        elif self.part is not None:
            self.part.close(reason, failed=failed)
        self._drop_part()

    def _drop_part(self) -> None:
        self.part = self.outcome = None
        self.memory.wait_for_round(None)

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def hosting(self) -> Host | None:
        """The machine that hosts a session, if one does."""
        return self.part.hosting if self.part is not None else None

    @property
    def finished(self) -> bool:
        """Whether the agent is in a session."""
        return self.outcome is not None

    @property
    def generation(self) -> int:
        """The number of the session that the agent is in; 0 if it is in none."""
        if isinstance(self.part, ElasticHost):
            return self.part.quorum.generation
        return self.part.generation if isinstance(self.part, AgentMember) else 0

    @property
    def small(self) -> bool:
        """Whether the session that the agent is in began with few agents, after a last call."""
        if isinstance(self.part, ElasticHost):
            return self.part.quorum.small
        return isinstance(self.part, AgentMember) and self.part.small

    @property
    def hold(self) -> Hold:
        """How firmly the agent knows that its session is the only one; torchrun gets only rounds that this allows."""
        if self.outcome is None:
            return Hold()
        if isinstance(self.part, ElasticHost):
            return self.part.hold
        assert isinstance(self.part, AgentMember)
        return Hold(self.memory.binding.until, self.part.proved_at)

    def effects(self) -> list[Effect]:
        """Return what the driver has to do now, once."""
        return self.links.take_effects()

    def next_timer(self) -> float | None:
        """The time of the next `TimerDue`."""
        return self.part.next_timer() if self.part is not None else None

    def stage(self) -> str:
        """Return the current step, in a word, for the log."""
        return self.part.stage() if self.part is not None else "at rest"

    def situation(self) -> Situation | None:
        """Return how far the session has come, and what explains why this agent waits; None if it does not."""
        return self.part.situation() if isinstance(self.part, Elector) else None

    def ask_status(self) -> None:
        """Ask the host for the job's status."""
        if isinstance(self.part, Elector):
            self.part.ask_status()

    def calling(self) -> Datagram | None:
        """The datagram for unicast peers now."""
        return self.part.calling() if self.part is not None else None

    def showing(self) -> Seek | Offer | None:
        """The sign in a shared folder now."""
        return self.part.showing() if self.part is not None else None

    def expired(self, now: float) -> bool:
        """Return whether the deadline of the present gathering has passed."""
        return isinstance(self.part, Elector) and self.part.expired(now)

    def give_up(self, error: MingleError) -> None:
        """End a gathering whose time is up, with this error unless what happened before has its own."""
        if isinstance(self.part, Elector):
            self.part.give_up(error)
            self._end_failed()

    # --- what happens ----------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> None:
        """Have the part that acts now process what has happened, after a look whether a lease has ended by then."""
        self.check(now)
        match event:
            case AddressesChanged(addresses):
                self.endpoints = structs.replace(self.endpoints, addresses=addresses)
            case Accepted(conn) if self.part is None:
                self.links.refuse(conn)
            case Heard(Offer(host=host)) if host == self.identity.member:
                return  # of this agent's own session, or of one that it has lost
        if self.part is not None:
            self.part.handle(event, now)
            self._look(now)

    def check(self, now: float) -> None:
        """Check whether a lease has ended."""
        if isinstance(self.part, ElasticHost | AgentMember):
            self.part.check(now)
            self._look(now)

    # --- from one session to the next ------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Check, after every event, whether a session has formed or was lost."""
        self._end_failed()
        part = self.part
        if isinstance(part, Elector) and part.outcome is not None:
            acting = part.acting
            assert isinstance(acting, ElasticHost | AgentMember)
            self.part, self.outcome = acting, part.outcome
            self._look(now)
        elif isinstance(part, ElasticHost) and part.dissolved is not None:
            self._fall(part.dissolved, part.moved_to, now)
        elif isinstance(part, AgentMember) and part.ended_because is not None:
            self.ended = part.ended_because
            part.close("its host has ended the job")
            self._drop_part()
        elif isinstance(part, AgentMember) and part.lost_because is not None:
            part.close("the session is lost")
            self._fall(part.lost_because, part.moved_to, now)

    def _end_failed(self) -> None:
        """End the present gathering if it has failed."""
        part = self.part
        if isinstance(part, Elector) and part.failure is not None:
            self.failure = part.failure
            part.close(type(part.failure).__name__)
            self._drop_part()

    def _fall(self, reason: str, moved_to: Offer | None, now: float) -> None:
        """Record the loss of the session, and look for the next one."""
        self.lost, self.losses = reason, self.losses + 1
        self._drop_part()
        self.links.effects.append(Notice(f"job {self.identity.job!r}: {reason}"))
        if self._stopped_electing:
            return
        self.gather(now)
        if moved_to is not None and isinstance(self.part, Elector):
            self.part.joiner.search.make_for(moved_to, "", now)
