"""The agent that hosts a session of agents: a host (:mod:`mingle.protocol.host`) that stays after GO. Pure.

From GO on the host renews its members' leases (:mod:`mingle.elastic.leases`), sends them the list of members, and
admits others. The host ends its session in three cases: fewer than K leases are valid, the address of its store is
gone, or it meets a session that takes precedence. Each time it sends CLOSED with ``regather``, so that the members look
for a host again; ``end`` holds the reason.
"""

from __future__ import annotations

from msgspec import structs

from mingle.elastic import reports
from mingle.elastic.leases import PING_SECONDS, Hold, is_fresh
from mingle.elastic.memory import Memory, SessionEnd
from mingle.elastic.quorum import Quorum
from mingle.elastic.rounds import Rounds
from mingle.protocol.effects import CloseStore, Multicast, Notice
from mingle.protocol.events import Source
from mingle.protocol.explain.observations import Diagnostics, Situation
from mingle.protocol.host import Host
from mingle.protocol.links.callers import Caller
from mingle.protocol.links.race import named
from mingle.protocol.machine import Context, Endpoints, Identity
from mingle.protocol.sightings import Sightings
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer

LOOK_AROUND_SECONDS = 3.0
"""How often a running host asks the network for other sessions of its job, give or take a third."""
CLOCKS_APART_SECONDS = 60.0
"""Wall clocks that are further apart cause a warning; a node with NTP is right to a fraction of a second."""
ROUND_PING_SECONDS = 0.01
ROUND_PING_SECONDS_PER_NODE = 0.0005
"""The least time between two PINGs for the questions about a round: each member asks, and each answers."""
QUESTIONS = 4
"""How many questions about a round are kept of one member: it asks once a second, and the oldest is soon too old."""
STORE_GONE_SECONDS = 5.0
"""How long the address of the store can be gone. A DHCP client takes one away and gives it back, and TCP connections
survive that."""


class ElasticHost(Host):
    """The machine of an agent that hosts.

    Args:
        memory: what this agent knows across its sessions.
    """

    def __init__(
        self,
        identity: Identity,
        session: bytes,
        endpoints: Endpoints,
        context: Context,
        started: float,
        *,
        memory: Memory,
        deadline: float,
        diagnostics: Diagnostics,
        sightings: Sightings,
    ) -> None:
        self.end: SessionEnd | None = None
        """How the session has ended, if the job continues."""
        self.quorum = Quorum(session, memory, started)
        self._memory = memory
        self.members: frames.Members | None = None
        """The members, as they were told last."""
        self._ping_at = self._look_at = self._lease_ends_at = float("inf")
        self._clocks_warned = False
        self.rounds = Rounds(self.quorum, memory, self._say_of_round)
        self._shared_machines = ""
        """Which members ran on one machine, as was last found."""
        self._pinged_at = float("-inf")
        self._rounds_asked: dict[int, dict[int, float]] = {}
        """When each question about a round came that is not answered: by the connection, and the question's number."""
        self._rounds_answered_for = float("-inf")
        """For which moment at which members were together the questions about rounds were looked through."""
        self._store_gone_at: float | None = None
        """When the address of the store was first seen to be gone, if it is."""
        super().__init__(
            identity,
            session,
            endpoints,
            context,
            started,
            deadline=deadline,
            diagnostics=diagnostics,
            sightings=sightings,
            admission=self.quorum,
        )

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the session has formed and is kept."""
        return self.outcome is not None and not self.closed

    @property
    def hold(self) -> Hold:
        """How firmly this agent knows that its session is the only one."""
        if not self.running or self.quorum.ending:
            return Hold()
        return Hold(self.quorum.kept_until(), self.quorum.proved_at())

    def next_timer(self) -> float | None:
        """The time of the next `TimerDue`."""
        times = [super().next_timer()]
        if self.running:
            times += [self._ping_at, self._look_at, self._lease_ends_at]
            if self._store_gone_at is not None:
                times.append(self._store_gone_at + STORE_GONE_SECONDS)
            if self.rounds.due is not None:
                times.append(self.rounds.due)
        return min((time for time in times if time is not None), default=None)

    def explained(self, situation: Situation) -> Situation:
        """Return the node's situation with what explains why no session forms."""
        alone = len(self.registrar.seats.members()) == 1
        return structs.replace(super().explained(situation), agents=self._memory.told(self.identity.who, away=alone))

    def calling(self) -> Datagram | None:
        """The datagram for unicast peers now; a running host looks for other sessions of its job."""
        return self.identity.seek() if self.running else super().calling()

    # --- what happens ----------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Check whether the session is still held. The agent calls this before each datagram, connection and timer."""
        if not self.running or self.quorum.ending:
            return
        if not self._is_unreachable():
            self._store_gone_at = None
        elif self._store_gone_at is None:
            self._store_gone_at = now
        if now >= self.quorum.kept_until():
            present = len(self.quorum.counting(now))
            self._dissolve(reports.too_few(self.identity, present, self.quorum.wanted), None)
        elif self._store_gone_at is not None and now >= self._store_gone_at + STORE_GONE_SECONDS:
            self._dissolve(reports.address_gone(self.identity), None)

    def _is_unreachable(self) -> bool:
        """Return whether other agents, members too, can't reach the store any more: its address has gone.

        A link-local address stays although it is not listed beside a routable one, so it does not count while the
        members hold the session.
        """
        assert self.outcome is not None
        seats, maximum = len(self.registrar.seats.members()), self.quorum.policy.nodes.maximum
        store, zone, _ = self.outcome.store_address.partition("%")
        needed = maximum > 1 and (seats == 1 or not zone)
        return needed and not self._description.has(store)

    def _sighted(self, offer: Offer, source: Source, now: float) -> None:
        """Probe another session of this job; a running host probes only sessions that take precedence."""
        if not self.running:
            super()._sighted(offer, source, now)
        elif offer.kind == "agents" and offer.state == "sealed" and self.yields_to(offer):
            targets = named(offer, source.interface, source.address)
            self.conflicts.heard(offer, targets, now, sender=source.address, in_folder=source.folder)

    def yields_to(self, offer: Offer) -> bool:
        """Return whether another session takes precedence: the one that has had its quorum, then the lower host id."""
        quorum = self.quorum.had_quorum
        ours = offer.session == self.session
        return not ours and (not offer.quorum, offer.host) < (not quorum, self.identity.member)

    def caller_said(self, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of a caller: also the answers that renew leases, and questions about rounds."""
        conn = caller.conn
        seat = self.registrar.seats.at(conn)
        is_member = seat is not None and not seat.is_latecomer
        if isinstance(frame, frames.Pong) and is_member:
            self.quorum.leases.answered(caller.hello.member, caller.answered_at)
        elif isinstance(frame, frames.Round) and is_member and self.running:
            before = self._rounds_asked.get(conn, {})
            asked = self._rounds_asked[conn] = {number: at for number, at in before.items() if is_fresh(at, now)}
            if len(asked) < QUESTIONS:
                asked[frame.number] = now
                self.ask_round(now)
        elif isinstance(frame, frames.Next | frames.Done) and is_member and self.running:
            self._round_said(caller.hello.member, frame, now)
        elif isinstance(frame, frames.HostSeen) and self.running:
            self._sighted(frame.offer, Source(interface=caller.interface), now)
        elif isinstance(frame, frames.Leave) and frame.failed:
            self.registrar.lost(conn, now, frame.reason or "it left")
        super().caller_said(caller, frame, now)
        if isinstance(frame, frames.Join) and frame.clock:
            seat = self.registrar.seats.at(conn)
            if seat is not None:
                seat.ahead = frame.clock - self._memory.clock

    def handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        if self.running:
            self._keep_in_touch(now)
        super().handle_timer(now)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def say_of_round(self, frame: frames.Next | frames.Done, now: float) -> None:
        """Have this agent itself say something of a round."""
        self._round_said(self.identity.member, frame, now)
        self._look(now)

    def _round_said(self, member: bytes, frame: frames.Next | frames.Done, now: float) -> None:
        if isinstance(frame, frames.Done):
            self.rounds.said_done(member)
        elif not self.quorum.ending:
            self.rounds.said_next(member, frame, now)

    def _say_of_round(self, member: bytes, frame: frames.Begin | frames.Wanted) -> None:
        """Tell a member, or this agent itself, of a round."""
        seat = self.registrar.seats.get(member)
        if member == self.identity.member:
            self._memory.hear_of_round(frame)
        elif seat is not None and seat.conn is not None:
            self._callers.send(seat.conn, frame)

    def ask_round(self, now: float) -> None:
        """Ask the members whether they are still there, since a round has begun."""
        pause = ROUND_PING_SECONDS + ROUND_PING_SECONDS_PER_NODE * self.quorum.policy.nodes.maximum
        self._ping_at = min(self._ping_at, max(now, self._pinged_at + pause))

    def _answer_rounds(self, now: float) -> None:
        hold, waiting = self.hold, dict[int, dict[int, float]]()
        if hold.proved_at == self._rounds_answered_for < now:
            return  # it answers none of those that wait
        self._rounds_answered_for = hold.proved_at
        for conn, asked in self._rounds_asked.items():
            for number, asked_at in asked.items() if self.registrar.seats.at(conn) is not None else ():
                if hold.allows(asked_at, now):
                    self._callers.send(conn, frames.RoundHeld(number=number))
                elif is_fresh(asked_at, now):
                    waiting.setdefault(conn, {})[number] = asked_at
        self._rounds_asked = waiting

    # --- after everything that happened ----------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        super()._advance(now)
        self._look(now)

    def _look(self, now: float) -> None:
        """Check what the last event means for the session."""
        registrar = self.registrar
        best = self._memory.best_status
        if self.outcome is None and (best is None or len(registrar.seats.members()) > best.joined):
            self._memory.note_status(registrar.status())
        if not self.running:
            return
        if self.members is None:
            self._begin(now)
        self.quorum.note_quorum(now)
        self.rounds.look(self.registrar.seats.members(), now)
        self._tell_members()
        self.check(now)
        for offer, running in [] if self.closed else self.conflicts.proved():
            if running.state != "open" and self.yields_to(offer):
                self._dissolve(reports.comes_second(self.identity, offer.host_name), offer)
                break
        if self._rounds_asked:
            self._answer_rounds(now)

    def _begin(self, now: float) -> None:
        """Act on the decision for GO."""
        self._ping_at, self._look_at = now, now + LOOK_AROUND_SECONDS * self.rng.uniform(0.3, 1.3)
        self._memory.formed(hosts=True)
        if self.quorum.small:
            text = reports.small(self.identity, self._memory.policy, len(self.registrar.seats.members()))
            self._effects.append(Notice(text))

    def _tell_members(self) -> None:
        """Send MEMBERS to every member if the list of members has changed."""
        members = self.quorum.members()
        if members == self.members:
            return
        self.members = members
        if lost := self._memory.learn(members):
            gone = self.registrar.history.departures
            whys = [next((text for text in reversed(gone) if text.startswith(f"{who}: ")), who) for who in lost]
            self._effects.append(Notice(reports.nodes_lost(self.identity, self.quorum.policy, members, whys)))
        for conn in self.registrar.seats.connections():
            self._callers.send(conn, members)
        self._compare_clocks()
        if (shared := self.quorum.shared_machines()) and shared != self._shared_machines and not lost:
            self._effects.append(Notice(reports.shared_machine(self.identity, shared)))
        self._shared_machines = shared

    def _compare_clocks(self) -> None:
        """Warn, once in a session, of clocks that are too far apart to order the sessions of the job."""
        seats = sorted(self.registrar.seats.members(), key=lambda seat: seat.ahead)
        apart = seats[-1].ahead - seats[0].ahead
        if apart > CLOCKS_APART_SECONDS and not self._clocks_warned:
            self._clocks_warned = True
            text = reports.clocks_apart(self.identity, seats[0].who, seats[-1].who, apart)
            self._effects.append(Notice(text))

    def _members(self) -> list[tuple[bytes, int]]:
        """Return the members other than this agent, each with its connection."""
        return [(seat.member, seat.conn) for seat in self.registrar.seats.members() if seat.conn is not None]

    def _keep_in_touch(self, now: float) -> None:
        leases = self.quorum.leases
        for member, conn in self._members():
            if now >= leases.until(member):
                self.registrar.lost(conn, now, "it has not answered for too long")
                # Reset the connection: the member would take an orderly close for the end of this process.
                self._callers.reset(conn)
            elif now >= self._ping_at:
                self._callers.ping(conn, now)
        if now >= self._ping_at:
            self._pinged_at, self._ping_at = now, now + PING_SECONDS
        # Answers make it later, and each PING comes before the lease of a newcomer ends.
        self._lease_ends_at = min((leases.until(member) for member, _ in self._members()), default=float("inf"))
        if now >= self._look_at:
            self._look_at = now + LOOK_AROUND_SECONDS * self.rng.uniform(0.7, 1.3)
            self._effects.append(Multicast(self.identity.seek()))

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self, reason: str, *, failed: bool = False, winner: Offer | None = None) -> None:
        """End the session on purpose: the job with it, unless this agent alone has failed."""
        if failed and self.running:
            self._dissolve(f"job {self.identity.job!r}: {reason}", None)
        else:
            super().close(reason, winner=winner)

    def _dissolve(self, reason: str, moved_to: Offer | None) -> None:
        """End this session, not the job: all agents look for a host again."""
        self.end = SessionEnd(reason, moved_to)
        self._effects.append(CloseStore(reason))
        self._end(frames.Closed(session=self.session, reason=reason, regather=True, offer=moved_to))
