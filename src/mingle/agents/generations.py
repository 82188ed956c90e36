"""An agent across the generations of its job: it gathers, and when its session is no more, gathers again.

A pure machine. In each generation an :class:`~mingle.election.electing.Elector` finds or becomes the host; from GO on
the host or the joiner in it goes on by itself, and when that one loses its session, the next elector begins. The
control port and the member id stay the same for as long as the agent lives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeGuard

from msgspec import structs

from mingle.agents.hosting import AgentHost
from mingle.agents.joining import AgentJoiner
from mingle.agents.quorum import Nodes, Standing
from mingle.agents.reports import Attendance
from mingle.election.candidacy import Candidacy
from mingle.election.electing import Elector
from mingle.errors import MingleError
from mingle.host.hosting import Host
from mingle.rules.machine import (
    Address,
    Effect,
    Formation,
    Hangup,
    Identity,
    Means,
    NetworkFacts,
    Notice,
    Reach,
    Snapshot,
    Source,
)
from mingle.wire.datagrams import Datagram, Offer


class AgentCandidacy(Candidacy):
    """Who makes way for whom among agents.

    A sealed session with a free seat comes before an open one, then the higher generation, then the lower host id.
    """

    def __init__(self, identity: Identity, generation: Callable[[], int]) -> None:
        super().__init__(identity)
        self._generation = generation

    def competes(self, message: Datagram) -> TypeGuard[Offer]:
        """Whether this is another session of our job that we could join."""
        return (
            isinstance(message, Offer)
            and (message.job, message.attempt) == (self._identity.job, self._identity.attempt)
            and message.kind == self._identity.kind
            and message.host != self._identity.member
            and message.takes_members
        )

    def loses_to(self, offer: Offer, *, stands: bool, now: float) -> bool:
        """Whether we make way for that host."""
        if self.stands_against(offer.host, now):
            return False
        if offer.state == "open" and not stands and offer.generation != self._generation():
            return offer.generation > self._generation()
        return offer.state == "sealed" or super().loses_to(offer, stands=stands, now=now)


class AgentElector(Elector):
    """An elector whose members may have room in a session that is sealed already."""

    def _leave_behind(self, host: Host, seat: bytes) -> None:
        winner = self.joiner.offer_of(seat)
        if winner is not None:
            host.send_after(winner)


class Agent:
    """The machine of an agent.

    ``outcome`` is set while it is in a session; ``lost``, ``ended`` and ``failure`` say why it is not.

    Args:
        identity: who it is; its world size is the greatest number of nodes.
        nodes: how many nodes the job may have.
        last_call: how long a gathering without a majority waits for one more, in seconds.
        allow_minority: whether it may go on although others may have the majority.
        new_session: makes the id of a session that it hosts.
    """

    def __init__(
        self,
        identity: Identity,
        reach: Reach,
        means: Means,
        now: float,
        *,
        nodes: Nodes,
        last_call: float,
        allow_minority: bool,
        new_session: Callable[[], bytes] | None = None,
    ) -> None:
        self.identity = identity
        self.reach = reach
        self._means = means
        self.standing = Standing()
        self.dead: dict[bytes, float] = {}
        self.outcome: Formation | None = None
        self.lost: str | None = None
        self.losses = 0
        """How many sessions it has lost; ``lost`` is the reason of the last."""
        self.ended: str | None = None
        self.failure: MingleError | None = None
        self.closed = False
        self._resting = False
        self._attendance = Attendance()
        self._effects: list[Effect] = []
        self._elector = functools.partial(
            AgentElector,
            identity,
            new_session=new_session,
            make_joiner=functools.partial(
                AgentJoiner, nodes=nodes, control_port=reach.port, standing=self.standing, attendance=self._attendance
            ),
            make_host=functools.partial(
                AgentHost,
                nodes=nodes,
                last_call=last_call,
                allow_minority=allow_minority,
                standing=self.standing,
                dead=self.dead,
                attendance=self._attendance,
            ),
        )
        self.part: Elector | AgentHost | AgentJoiner | None = None
        """The machine that acts now; None: nothing is looked for."""
        self.gather(now)

    # --- what the driver wants -------------------------------------------------------------------------------------

    def gather(self, now: float) -> None:
        """Looks for a session, unless it is in one, looks already, or the job has ended."""
        if self.part is None and not self.closed and self.ended is None:
            self.failure = self._attendance.best = None
            self.part = self._elector(self.reach, self._means, now, candidacy=self._candidacy())

    def _candidacy(self) -> AgentCandidacy:
        return AgentCandidacy(self.identity, self._own_generation)

    def _own_generation(self) -> int:
        """That of the session that we host, or would."""
        return self.host.registrar.generation if self.host is not None else self.standing.generation + 1

    @property
    def generation(self) -> int:
        """That of the session that it is in."""
        part = self.part.acting if isinstance(self.part, Elector) else self.part
        if isinstance(part, AgentHost):
            return part.registrar.generation
        return part.generation if isinstance(part, AgentJoiner) else max(self.standing.generation, 0)

    def readdress(self, addresses: tuple[Address, ...], now: float) -> None:
        """Our interfaces have changed: a session of ours listens at these addresses."""
        self.reach = structs.replace(self.reach, addresses=addresses)
        if isinstance(self.part, Elector | AgentHost):
            self.part.readdress(addresses, now)

    def rewired(self, now: float) -> None:
        """Likewise, as one that joins."""
        if isinstance(self.part, Elector | AgentJoiner):
            self.part.rewired(now)

    def rest(self) -> None:
        """Its workers are done: from now on it looks for nobody when its session is lost, or has just been."""
        self._resting = True
        if isinstance(self.part, Elector):
            self.part.leave("its workers are done")
            self._drop_part()

    @property
    def host(self) -> AgentHost | None:
        """Its machine that hosts, if it does."""
        host = self.part.host if isinstance(self.part, Elector) else self.part
        return host if isinstance(host, AgentHost) else None

    def close(self, reason: str) -> None:
        """Ends its part in the job on purpose and says so."""
        if self.closed:
            return
        self.closed = True
        part = self.part
        if isinstance(part, AgentHost):
            part.close(reason)
        elif part is not None:
            part.leave(reason)
        self._drop_part()

    def _drop_part(self) -> None:
        if self.part is not None:
            self._effects += self.part.effects()
        self.part = self.outcome = None

    # --- what the driver reads -------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        done, self._effects[:] = list(self._effects), []
        return done + (self.part.effects() if self.part is not None else [])

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        return self.part.next_timer() if self.part is not None else None

    def stage(self) -> str:
        """How far it has come, in a word, for the log."""
        return self.part.stage() if self.part is not None else "at rest"

    def snapshot(self) -> Snapshot:
        """How it stands, for the progress line."""
        return self.part.snapshot() if self.part is not None else Snapshot(False, 0, (), "at rest")

    def ask_status(self) -> None:
        """Asks the host how it stands."""
        if isinstance(self.part, Elector):
            self.part.ask_status()

    def calling(self) -> Datagram | None:
        """What to tell unicast peers now."""
        return self.part.calling() if self.part is not None else None

    def deadline_passed(self, now: float) -> bool:
        """Whether the time of the present gathering is up."""
        return isinstance(self.part, Elector) and self.part.expired(now)

    def give_up(self, facts: NetworkFacts, now: float) -> None:
        """Ends a gathering whose time is up with the error that explains it."""
        if isinstance(self.part, Elector):
            self.part.give_up(facts)
            self._look(now)

    # --- what happens ----------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in."""
        if self.part is not None and not (isinstance(message, Offer) and message.host == self.identity.member):
            self.part.heard(message, source, now)
            self._look(now)

    def heard_unverified(self, message: Datagram) -> None:
        """A datagram came in whose signature is missing or wrong."""
        if self.part is not None:
            self.part.heard_unverified(message)

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Somebody has connected to the control port."""
        if isinstance(self.part, Elector | AgentHost):
            self.part.accepted(conn, address, now)
        else:
            self._effects.append(Hangup(conn))

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return self.part is not None and self.part.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """A connection that was dialled stands."""
        assert self.part is not None
        self.part.connected(conn, local_address, interface, now, weak=weak)
        self._look(now)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        assert self.part is not None
        self.part.received(conn, untrusted, now)
        self._look(now)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        assert self.part is not None
        if isinstance(self.part, AgentHost):
            self.part.lost(conn, reason, now)
        else:
            self.part.closed(conn, reason, now)
        self._look(now)

    def store_opened(self, host: AgentHost, epoch: int, port: int, token: str, now: float) -> None:
        """The store of the session that we host listens."""
        if host is self.host:
            assert isinstance(self.part, Elector | AgentHost)
            self.part.store_opened(epoch, port, token, now)
            self._look(now)

    def store_failed(self, host: AgentHost, epoch: int, error: MingleError, now: float) -> None:
        """It could not be opened."""
        if host is self.host:
            assert isinstance(self.part, Elector | AgentHost)
            self.part.store_failed(epoch, error, now)
            self._look(now)

    def store_proved(self, part: object, epoch: int, now: float) -> None:
        """The store of the session that we joined was reached."""
        if part is self.part and isinstance(self.part, Elector):
            self.part.store_proved(epoch)
            self.standing.acknowledged(now)
            self._look(now)

    def store_unreachable(self, part: object, epoch: int, reason: str, now: float) -> None:
        """It was not."""
        if part is self.part and isinstance(self.part, Elector):
            self.part.store_unreachable(epoch, reason, now)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        if self.part is not None:
            self.part.handle_timer(now)
            self._look(now)

    # --- from one generation to the next ---------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Looks, after everything that happened, whether a session has formed or is no more."""
        part = self.part
        if isinstance(part, Elector) and part.failure is not None:
            self.failure = part.failure
            part.leave(type(part.failure).__name__)
            self._drop_part()
        elif isinstance(part, Elector) and part.outcome is not None:
            acting = part.acting
            self._effects += part.effects()
            assert isinstance(acting, AgentHost | AgentJoiner)
            self.part, self.outcome = acting, part.outcome
            self._look(now)
        elif isinstance(part, AgentHost) and part.outcome is not None:
            self._remember(part)
            if part.dissolved is not None:
                self._fall(part.dissolved, part.moved_to, now)
        elif isinstance(part, AgentJoiner):
            if part.ended is not None:
                self.ended = part.ended
                part.leave("its host has ended the job")
                self._drop_part()
            elif part.lost is not None:
                self._fall(part.lost, part.moved_to, now)

    def _remember(self, host: AgentHost) -> None:
        """The host's own standing is its roll."""
        roll = host.roll
        if roll is not None:
            self.standing.settled, self.standing.proposed = roll.settled, roll.proposed

    def _fall(self, reason: str, moved_to: Offer | None, now: float) -> None:
        """The session is no more: look for the next one."""
        part = self.part
        self.standing.reached = max(self.standing.reached, self.generation)
        self.lost, self.losses = reason, self.losses + 1
        if isinstance(part, AgentJoiner):
            part.leave("the session is lost")
        self._drop_part()
        self._effects.append(Notice(f"job {self.identity.job!r}: {reason}"))
        if self._resting:
            return
        self.gather(now)
        if moved_to is not None and isinstance(self.part, Elector):
            self.part.joiner.make_for(moved_to, "", now)
