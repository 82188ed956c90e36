"""The agent that hosts a session of agents: a host (:mod:`mingle.host.hosting`) that goes on after GO. A pure machine.

From GO on it asks its members whether they live (:mod:`mingle.agents.heartbeat`), tells them who is in the session
(:mod:`mingle.agents.roll`) and admits others. It ends its session by itself in two cases: it has not the majority any
more, or it meets a session that comes before its own (:mod:`mingle.agents.superseding`). Either way it says that the
job is to be gathered anew; ``dissolved`` holds the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from mingle.agents import reports as agent_reports
from mingle.agents.heartbeat import MEMBER_SILENT_SECONDS, Heartbeat, Leases
from mingle.agents.obituaries import Obituaries
from mingle.agents.quorum import Nodes, Standing, machine_of
from mingle.agents.registrar import AgentsRegistrar
from mingle.agents.reports import Attendance
from mingle.agents.roll import Roll
from mingle.agents.superseding import Superseding
from mingle.errors import MingleError
from mingle.host.callers import Caller
from mingle.host.hosting import Host
from mingle.host.introduction import Introduction
from mingle.rules import reports
from mingle.rules.machine import CloseStore, Evidence, Identity, Means, Multicast, NetworkFacts, Notice, Reach, Source
from mingle.rules.proving import Endpoint
from mingle.rules.registrar import Registrar
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer

LOOK_AROUND_SECONDS = 3.0
"""How often a running host asks the network for other sessions of its job, give or take a third."""
MINORITY_SECONDS = 1.5
"""How long it may lack the majority: so long it may take to prove that those who are missed are dead."""


class AgentHost(Host):
    """The machine of an agent that hosts.

    Args:
        nodes: how many nodes the job may have.
        last_call: how long a gathering without a majority waits for one more, in seconds.
        allow_minority: whether it may go on although others may have the majority.
        standing: what this agent knows of earlier sessions.
        dead: who is proved dead, and since when; what is proved here is added.
        attendance: how many were there at most, for the report.
    """

    registrar: AgentsRegistrar

    def __init__(
        self,
        identity: Identity,
        session: bytes,
        reach: Reach,
        means: Means,
        started: float,
        *,
        nodes: Nodes,
        last_call: float,
        allow_minority: bool,
        standing: Standing,
        dead: dict[bytes, float],
        attendance: Attendance,
        evidence: Evidence | None = None,
    ) -> None:
        self.dissolved: str | None = None
        self.moved_to: Offer | None = None
        """The session for which it made way."""
        self._nodes = nodes
        self._last_call = last_call
        self._allow_minority = allow_minority
        self._standing = standing
        self._dead = dead
        self._attendance = attendance
        self.roll: Roll | None = None
        self._heartbeat = Heartbeat(MEMBER_SILENT_SECONDS)
        self._leases = Leases()
        self._nodes_seen: dict[bytes, frames.Node] = {}
        """Everybody who was in this session and may still count."""
        self._look_at = float("inf")
        self._lacking_since: float | None = None
        self._looked_at = started
        self._counted_dead = len(dead)
        super().__init__(identity, session, reach, means, started, evidence=evidence)
        self.rivals.longest_wait = means.timeout
        own = frozenset(each.address for each in reach.addresses)
        self._obituaries = Obituaries(means.new_id, self._effects, own, machine_of(identity.node), dead)
        self._superseding = Superseding(self._introduction.hello, means.key, means.new_id, self._effects)

    def _make_registrar(self, introduction: Introduction) -> Registrar:
        return AgentsRegistrar(
            self.session,
            introduction.seat(),
            nodes=self._nodes,
            last_call=self._last_call,
            allow_minority=self._allow_minority,
            standing=self._standing,
            dead=self._dead,
            now=self.started,
        )

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def _running(self) -> bool:
        return self.outcome is not None and not self.closed

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [super().next_timer(), self._obituaries.next_timer(), self._superseding.next_timer()]
        if self._running:
            times += [self._heartbeat.next_timer(pings=True), self._look_at]
            if self._lacking_since is not None:
                times.append(self._lacking_since + MINORITY_SECONDS)
            times.append(self._leases.next_timer(self._lost_members(), self._looked_at))
        return min((time for time in times if time is not None), default=None)

    def calling(self) -> Datagram | None:
        """What to tell unicast peers now: who runs looks out for others of its job."""
        return self.identity.seek() if self._running else super().calling()

    def offer(self) -> Offer:
        """What this host says of itself."""
        registrar = self.registrar
        joined = len(registrar.seats) + len(registrar.latecomers)
        return msgspec.structs.replace(super().offer(), generation=registrar.generation, joined=joined)

    # --- what happens ----------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in."""
        if not self._running:
            super().heard(message, source, now)
            return
        other = self._presence.heard(message, source, now)
        if other is not None:
            self._sighted(other, source.interface, now)

    def _sighted(self, offer: Offer, interface: str, now: float) -> None:
        """Another session of this job runs: does it come before ours?"""
        like_ours = offer.kind == "agents" and offer.world_size == self.identity.world_size
        runs = offer.state == "sealed" and offer.takes_members
        ours = self.registrar.generation
        before = offer.generation > ours or (offer.generation == ours and offer.host < self.identity.member)
        if like_ours and runs and before and offer.session != self.session:
            self._superseding.heard(offer, [Endpoint(address, interface) for address in offer.addresses], now)

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return super().owns(conn) or self._obituaries.owns(conn) or self._superseding.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """A connection that was dialled stands."""
        if self._obituaries.owns(conn):
            self._obituaries.connected(conn)
            self._look(now)
        elif self._superseding.owns(conn):
            self._superseding.connected(conn, local_address, interface)
        else:
            super().connected(conn, local_address, interface, now, weak=weak)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        if self._superseding.owns(conn):
            self._superseding.received(conn, untrusted, now)
        else:
            self._heartbeat.heard(conn, now)
            super().received(conn, untrusted, now)
        self._look(now)

    def lost(self, conn: int, reason: str, now: float) -> None:
        """A connection ended."""
        if self._obituaries.owns(conn):
            self._obituaries.closed(conn, reason, now)
        elif self._superseding.owns(conn):
            self._superseding.closed(conn, reason, now)
        else:
            super().lost(conn, reason, now)
        self._look(now)

    def _frame(self, conn: int, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        seat = self.registrar.seats.get(caller.hello.member)
        if isinstance(frame, frames.Pong) and self.roll is not None and seat is not None and seat.conn == conn:
            self.roll.acknowledged(seat.member, frame.number)
            self._leases.answered(seat.member)
        super()._frame(conn, caller, frame, now)

    def _hold(self, now: float) -> None:
        # Whoever runs without the majority that we have began anew, and makes way once we run.
        others = self.rivals.any_alive and not self.registrar.leads(now)
        self.registrar.hold(others or self.making_way.begun, now)
        self._decide(now)

    def store_opened(self, epoch: int, port: int, token: str, now: float) -> None:
        """The store listens."""
        super().store_opened(epoch, port, token, now)
        self._look(now)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        super().handle_timer(now)
        if self.closed:
            return
        self._obituaries.handle_timer(now)
        self._superseding.handle_timer(now)
        if self._running:
            self._keep_in_touch(now)
        self._look(now)

    # --- after everything that happened ----------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Looks what follows from it for the majority."""
        if self.closed:
            return
        if self.outcome is None:
            self._look_for_majority(now)
            return
        if self.roll is None:
            self._begin(now)
        for offer, _ in self.making_way.take_sightings():
            self._sighted(offer, "", now)
        self._keep_roll(now)
        if self._superseding.found is not None:
            there = self._superseding.found
            self._dissolve(agent_reports.superseded(self.identity, there.hostname or there.addresses[0]), there)

    def _look_for_majority(self, now: float) -> None:
        """Nobody else can go on without those that are missed, if they are dead."""
        if len(self.registrar.seats) > self._attendance.joined:
            self._attendance.note(self.registrar.status())
        self._obituaries.inquire(self.registrar.missed, now)
        if len(self._dead) > self._counted_dead:
            self._counted_dead = len(self._dead)
            self.registrar.look_again(now)
            self._decide(now)

    def _begin(self, now: float) -> None:
        """GO was decided: everybody has acknowledged the view that came before SEALED."""
        self.roll = Roll(self.registrar.view(self.registrar.epoch))
        self._look_at = now + LOOK_AROUND_SECONDS * self.rng.uniform(0.3, 1.3)
        joined = len(self.registrar.seats)
        if self.registrar.small:
            self._effects.append(Notice(agent_reports.small(self.identity, self._nodes, joined)))
        elif self.registrar.unsure:
            self._effects.append(Notice(agent_reports.unsure(self.identity, joined)))

    def _lost_members(self) -> list[bytes]:
        return [member for member in self._nodes_seen if member not in self.registrar.seats]

    def _gone(self) -> set[bytes]:
        """Who has left on purpose, or has certainly died as a member of this session."""
        died = {member for member, at in self._dead.items() if self._leases.died_bound(member, at)}
        return died | self.registrar.left_on_purpose

    def _keep_roll(self, now: float) -> None:
        roll, registrar = self.roll, self.registrar
        assert roll is not None
        self._looked_at = now
        self._welcome(roll, now)
        present, gone = set(registrar.seats), self._gone()
        bound = {member for member in self._lost_members() if self._leases.bound(member, now)}
        for member in [each for each in self._lost_members() if each in gone or each not in bound]:
            del self._nodes_seen[member]
        while True:
            if roll.settle(present, gone, bound):
                self._tell_members(lambda: frames.Members(view=roll.settled, settled=True))
                counting = roll.counted | self._nodes_seen.keys()
                self._leases.forget_all_but(counting)
                registrar.left_on_purpose &= counting
            if not roll.change(list(self._nodes_seen.values()), registrar.generation):
                break
            self._tell_members(lambda: frames.Members(view=roll.latest))
            # On one connection the answer to this comes after the view was read.
            self._ask([seat.member for seat in registrar.seats.values()], now)
        registrar.counted = roll.counted
        absent = [node for node in roll.absent(present) if node.member not in gone]
        self._obituaries.inquire([*absent, *registrar.questioned(now)], now)
        if self._allow_minority or roll.holds(present, gone):
            self._lacking_since = None
        elif self._lacking_since is None:
            self._lacking_since = now
        elif now >= self._lacking_since + MINORITY_SECONDS:
            self._dissolve(agent_reports.minority(self.identity, roll.settled, len(present)), None)

    def _welcome(self, roll: Roll, now: float) -> None:
        """Whoever is new is watched from now on, and told who was in before."""
        registrar = self.registrar
        for node in registrar.present_nodes():
            seat = registrar.seats[node.member]
            if node.member in self._nodes_seen and (seat.conn is None or self._heartbeat.watches(seat.conn)):
                continue
            self._nodes_seen[node.member] = node
            if seat.conn is not None:
                self._heartbeat.watch(seat.conn, now)
                self._leases.begin(node.member, now)
                self._callers.tell(seat.conn, frames.Members(view=roll.settled, settled=True))
                if roll.proposed is not None:
                    self._callers.tell(seat.conn, frames.Members(view=roll.proposed))
                    self._ask([node.member], now)

    def _ask(self, members: Iterable[bytes], now: float) -> None:
        """Asks members whether they live, and by that whether they know the latest view."""
        for member in members:
            seat = self.registrar.seats.get(member)
            if seat is not None and seat.conn is not None and self.roll is not None:
                self._leases.asked(member, now)
                self._callers.tell(seat.conn, frames.Ping(number=self.roll.latest.number))

    def _tell_members(self, frame: Callable[[], frames.AnyFrame]) -> None:
        said = frame()
        for seat in self.registrar.seats.values():
            if seat.conn is not None:
                self._callers.tell(seat.conn, said)

    def _keep_in_touch(self, now: float) -> None:
        seated = {seat.conn: seat.member for seat in self.registrar.seats.values()}
        for conn in self._heartbeat.silent(now):
            self._heartbeat.forget(conn)
            if conn in seated:
                self.registrar.lost(conn, now, f"it was silent for {MEMBER_SILENT_SECONDS:.0f} s")
                self._callers.hang_up(conn)
        for conn in self._heartbeat.due(now):
            if conn not in seated:
                self._heartbeat.forget(conn)
            else:
                self._ask([seated[conn]], now)
        if now >= self._look_at:
            self._look_at = now + LOOK_AROUND_SECONDS * self.rng.uniform(0.7, 1.3)
            self._effects.append(Multicast(self.identity.seek()))

    # --- the end ---------------------------------------------------------------------------------------------------

    def _dissolve(self, reason: str, moved_to: Offer | None) -> None:
        """Ends this session, not the job: everybody looks for a host again."""
        self.dissolved, self.moved_to = reason, moved_to
        if moved_to is not None:
            for conn in self.registrar.member_connections():
                self._callers.tell(conn, frames.Moved(offer=moved_to))
        self._effects.append(CloseStore(reason))
        self._end(reason, conflict=False, regather=True)

    def _end(self, reason: str, *, conflict: bool, network: bool = False, regather: bool = False) -> None:
        self._obituaries.abandon()
        self._superseding.abandon()
        super()._end(reason, conflict=conflict, network=network, regather=regather)

    def give_up(self, facts: NetworkFacts) -> None:
        """Ends at the deadline with the error that explains it."""
        blockers = self.rivals.blockers(self._deadline)
        failure: MingleError | None = None
        if blockers:
            failure = reports.running(self.identity, *blockers[0][:2])
        elif not self.has_members:
            failure = reports.authentication(self.identity, self.evidence, facts, secured=self.secured)
        if failure is None:
            status = self.registrar.status()
            failure = agent_reports.incomplete(
                self.identity, self._nodes, status, self.timeout, self._attendance, self.evidence, facts
            )
        self._fail(failure, conflict=False)
