"""A rank that looks for its host, joins it and waits for GO: a pure machine.

It asks by datagrams, races for every session that it hears of (``sessions``), and takes the first that proves itself.
From there on ``membership`` has its steps; the job may run already (``blocking``), or the host makes way (``moving``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mingle.errors import MingleError
from mingle.protocol import reports
from mingle.protocol.asking import Asking
from mingle.protocol.blocking import Blocking
from mingle.protocol.connection_race import ConnectionRace, DialTarget
from mingle.protocol.handshake import HandshakeFailed
from mingle.protocol.lobby import BrowseGroup
from mingle.protocol.machine import (
    Context,
    Diagnostics,
    Effect,
    Formation,
    Hangup,
    Identity,
    NetworkFacts,
    Snapshot,
    Source,
    note,
    note_name,
)
from mingle.protocol.membership import Membership, Step
from mingle.protocol.moving import Moving
from mingle.protocol.pacing import Seeker
from mingle.protocol.racing import Racing
from mingle.protocol.sessions import Session, Sessions
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer, Rejected

STATUS_BEFORE_DEADLINE_SECONDS = 1.0


class Joiner:
    """The machine of a rank that is not the host. ``outcome`` or ``failure`` ends it."""

    def __init__(self, identity: Identity, context: Context, now: float) -> None:
        self.identity = identity
        self.failure: MingleError | None = None
        self.diagnostics = Diagnostics()
        self.timeout = context.timeout
        self._secured = context.key is not None
        self._deadline = now + context.timeout
        self._effects: list[Effect] = []
        self._seeker = Seeker(identity.world_size, now, context.rng)
        self._sessions = Sessions(identity, context.key, context.new_id, self._effects, context.dials)
        self.membership = Membership(identity, self._sessions, self._effects, self.diagnostics)
        self._blocking = Blocking(identity, self._sessions, self._seeker, context.timeout, self._effects)
        self._moving = Moving(self._sessions, self.membership)
        self._racing = Racing(self._sessions, self.membership, self._blocking, self._moving, self.diagnostics)
        self._asking = Asking(
            identity,
            self.membership,
            self._seeker,
            BrowseGroup(now, self._deadline, context.rng),
            self._secured,
            self._effects,
            self.diagnostics,
        )
        self._final_ask_done = False

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def step(self) -> Step:
        """How far it has come."""
        return self.membership.step

    @property
    def outcome(self) -> Formation | None:
        """The place in the job, once it has formed."""
        return self.membership.outcome

    @property
    def finished(self) -> bool:
        """Whether there is an outcome or a failure."""
        return self.outcome is not None or self.failure is not None

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        self._sessions.flush()
        done, self._effects[:] = list(self._effects), []
        return done

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        if self.failure is not None:
            return None
        times = self._racing.timers()
        if self.outcome is None:
            times += [self._deadline, self._moving.until]
            times += [*self._asking.timers(), *self.membership.timers(), *self._blocking.timers()]
            if self.membership.seated and not self._final_ask_done:
                times.append(self._deadline - STATUS_BEFORE_DEADLINE_SECONDS)
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """How far it has come, in a word, for the log."""
        return self.step.value

    def snapshot(self) -> Snapshot:
        """How it stands, for the progress line."""
        blocker = self._blocking.running
        note_text = f"the job runs already, hosted by {blocker.host}" if blocker is not None else ""
        status, found = self.membership.status, self.membership.current is not None
        if status is None or not found:
            return Snapshot(found, 0, (), self.step.value, note_text)
        return Snapshot(True, status.joined, status.awaited or status.unconfirmed, status.phase, note_text)

    def calling(self) -> Datagram | None:
        """What to ask unicast peers now."""
        return self.identity.seek() if self.membership.current is None and not self.finished else None

    def ask_status(self) -> None:
        """Asks the host how it stands (for the progress line of this node)."""
        if self.membership.seated:
            self.membership.send(frames.Ask(what="status"))

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in."""
        if self.finished:
            return
        offer = self._asking.heard(message, source, now)
        if offer is not None:
            self._racing.offered(offer, source.interface, now, sender=source.address)

    def rewired(self, now: float) -> None:
        """Our interfaces have changed."""
        self._racing.rewired(now)

    def heard_unverified(self, message: Datagram) -> None:
        """A datagram came in whose signature is missing or wrong: a hint for the report, and no more than that."""
        self._asking.heard_unverified(message)

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, conn: int, _address: str, _now: float) -> None:
        """Hang up: a member takes no callers, although the port of its candidacy may still be open."""
        self._effects.append(Hangup(conn))

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return self._sessions.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """A connection that was dialled stands."""
        _, race = self._sessions.owner(conn)
        race.connected(conn, local_address, interface, weak=weak)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        session, race = self._sessions.owner(conn)
        won_before = race.winner
        try:
            received = race.received(conn, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            self._effects.append(Hangup(conn))
            self.disconnected(conn, str(failure), now)
            return
        if session is self.membership.current:
            self.membership.doubt_until = None
        self._note_secret_failures(race)
        if won_before is None and race.winner is not None:
            self._won(session, race, now)
        elif race.winner is None:
            self._racing.settle(session, now)
        for frame in received:
            if session.race is not race:
                break
            self._frame(session, frame, now)
        self._confirm_if_due(now)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        session, race = self._sessions.owner(conn)
        was_winner = conn == race.winner
        race.disconnected(conn, reason, now)
        self._note_secret_failures(race)
        if was_winner:
            session.hang_up()
            session.retry_later(now)
            if session is self.membership.current:
                self._lost(session, reason, now)
            elif session.blocking_since is not None:
                self._blocking.free(session, now)
        else:
            self._racing.settle(session, now)
        self._confirm_if_due(now)

    def _note_secret_failures(self, race: ConnectionRace) -> None:
        for address, reason in race.failures.items():
            if reason.startswith("secret"):
                note_name(self.diagnostics.secret_failures, f"{address}: {reason}")

    def _won(self, session: Session, race: ConnectionRace, now: float) -> None:
        note(self.diagnostics.hosts, session.host_name, "proved")
        note_name(self.diagnostics.proved, session.host_name)
        if race.purpose != "join":
            self._blocking.lives(session, now)
            return
        self._blocking.unblock(session)
        self._blocking.over()
        if self._racing.bound_elsewhere(session):
            # Another session was quicker, or the job runs elsewhere: this one will be heard again.
            session.hang_up()
            return
        if session.name == self._moving.to:
            self._moving.arrived(now)
        self._seeker.pause()
        self.membership.join(session)

    # --- frames ----------------------------------------------------------------------------------------------------

    def _frame(self, session: Session, frame: frames.AnyFrame, now: float) -> None:
        ours = session is self.membership.current
        if isinstance(frame, frames.Running):
            if not ours:
                self._blocking.says(session, frame, now)
        elif isinstance(frame, frames.Refused):
            self._refused(session, frame, now)
        elif ours and isinstance(frame, frames.Redirect):
            if self._moving.sent_after(frame.offer, now):
                ways = list(session.race.paths.values()) if session.race is not None else []
                self.make_for(frame.offer, ways[0].interface if ways else "", now)
        elif ours and isinstance(frame, frames.Closed):
            self._closed_by_host(session, frame)
        elif isinstance(frame, frames.Closed):
            self._blocking.ended(frame)
        elif ours:
            self.membership.received(frame, now)

    def _refused(self, session: Session, frame: frames.Refused, now: float) -> None:
        self.membership.refused(session)
        if self.outcome is not None:
            return
        note(self.diagnostics.hosts, session.host_name, f"refused us: {frame.reason}")
        if frame.reason in ("session", "ended", "secret", "network"):
            session.retry_later(now)
            self._seeker.resume(now)
        elif frame.reason in ("running", "full"):
            # Full or sealed without us: wait for its end, like for any other run of the same job.
            full = session.offer.world_size
            session.offer = msgspec.structs.replace(session.offer, state="sealed", joined=full)
            self._racing.prove(session, now)
            self._seeker.resume(now)
        else:
            self.failure = reports.refused(self.identity, frame)

    def _closed_by_host(self, session: Session, frame: frames.Closed) -> None:
        if self.outcome is not None:
            self.membership.close_reason = f"it ended its session: {frame.reason}"
        elif frame.conflict:
            self.failure = reports.closed_by_host(self.identity, frame.reason, network=frame.network)
        else:
            note(self.diagnostics.hosts, session.host_name, f"ended the session: {frame.reason}")

    def _confirm_if_due(self, now: float) -> None:
        """Confirms, unless the job runs without us already, or may."""
        self._blocking.weigh(now)
        if self.membership.can_confirm and not self._blocking.possible(self.membership.current):
            self.membership.confirm()

    def store_proved(self, epoch: int) -> None:
        """The store was reached and holds the session's token."""
        self.membership.store_proved(epoch)

    def store_unreachable(self, epoch: int, reason: str, now: float) -> None:
        """The store was not reached; it is tried again until the host voids the epoch."""
        self.membership.store_unreachable(epoch, reason, now)

    # --- where ranks are assigned ----------------------------------------------------------------------------------

    @property
    def seat(self) -> bytes | None:
        """The session in which we have a seat."""
        membership = self.membership
        return membership.current.name if membership.current is not None and membership.seated else None

    @property
    def has_confirmed(self) -> bool:
        """Whether our host may decide GO with us in it."""
        return self.membership.has_confirmed

    @property
    def host_in_sight(self) -> bool:
        """Whether we have a host, or are about to see whether we have one."""
        return self._racing.host_in_sight

    def expects_host(self, now: float) -> bool:
        """Likewise, but hosts that are only claimed to be there are not waited for long."""
        return self._racing.expects_host(now)

    @property
    def blocked(self) -> bool:
        """Whether the job runs without us, or may."""
        return self._blocking.possible(None)

    def offer_of(self, name: bytes) -> Offer | None:
        """What a session's host last said of itself."""
        session = self._sessions.get(name)
        return None if session is None else session.offer

    def sealed(self) -> list[tuple[Offer, Sequence[DialTarget]]]:
        """The sessions that were last known to run, or about to."""
        return [(each.offer, each.targets) for each in self._sessions if each.offer.state == "sealed"]

    def pause(self, reason: str = "it hosts a session of its own") -> None:
        """Stops looking and leaves its seat: this process hosts a session of its own."""
        if self.membership.current is not None:
            self.membership.send(frames.Leave(session=self.membership.current.name, reason=reason))
        self._racing.stop()
        for session in self._sessions:
            self._blocking.unblock(session)
        self.membership.let_go()
        self.membership.return_to = None
        self._moving.stop()
        self._seeker.pause()

    def make_for(self, offer: Offer, interface: str, now: float, *, sender: str = "") -> None:
        """Joins that session, without asking for others: this process makes way for its host."""
        self._racing.make_for(offer, interface, now, sender=sender)

    # --- loss and time ---------------------------------------------------------------------------------------------

    def _lost(self, session: Session, reason: str, now: float) -> None:
        note(self.diagnostics.hosts, session.host_name, f"connection lost: {reason}")
        returning = self.membership.lost(session, reason, now)
        if self.outcome is None:
            self._moving.stop()
            self._seeker.resume(now)
        if returning:
            self._racing.prove(session, now)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        if self.failure is not None:
            return
        self._racing.handle_timer(now)
        if self.outcome is None:
            self._gather(now)

    def _gather(self, now: float) -> None:
        self.failure = self._blocking.watch(now)
        self._confirm_if_due(now)
        silent = self.membership.doubted(now)
        if silent is not None:
            silent.hang_up()
            silent.retry_later(now)
            self._lost(silent, "silent while another host offered itself", now)
        self._moving.handle_timer(now)
        self.membership.handle_timer(now)
        self._asking.handle_timer(now)
        seated = self.membership.seated
        if seated and not self._final_ask_done and now >= self._deadline - STATUS_BEFORE_DEADLINE_SECONDS:
            self._final_ask_done = True
            self.ask_status()

    def expired(self, now: float) -> bool:
        """Tells whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, facts: NetworkFacts) -> None:
        """Ends at the deadline with the error that explains it."""
        status, connected = self.membership.status, self.membership.current is not None
        self.failure = self._blocking.failure(self._deadline) or self.failure
        if self.failure is None and status is None and not connected:
            self.failure = reports.authentication(self.identity, self.diagnostics, facts, secured=self._secured)
        if self.failure is None:
            self.failure = reports.timeout(
                self.identity, self.diagnostics, facts, seconds=self.timeout, status=status, connected=connected
            )

    # --- after GO --------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Tells the host that the process group stands."""
        self.membership.ready()

    @property
    def roster(self) -> list[frames.Seat]:
        """Who is in the job, as far as the host has answered."""
        return self.membership.roster

    def ask_roster(self) -> None:
        """Asks the host who is in the job; the answer gathers in ``roster``."""
        self.membership.roster = []
        self.membership.send(frames.Ask(what="roster"))

    @property
    def host_lost(self) -> MingleError | None:
        """Why nobody need wait for the host's store any more, once the host is gone before the process group stood."""
        return reports.host_lost(self.identity, self.membership.loss) if self.membership.host_lost else None

    @property
    def connection_stands(self) -> bool:
        """Whether the host can still be asked."""
        return self.membership.current is not None and self.membership.current.race is not None

    def leave(self, reason: str) -> None:
        """Says good-bye and hangs up everywhere."""
        self.membership.leave(reason)
        self._sessions.hang_up()
