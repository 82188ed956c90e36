"""A rank that looks for its host, joins it and waits for GO: a state machine without sockets.

It asks by datagrams, races for every session that it hears of (:mod:`mingle.protocol.sessions`), and joins the first
that proves itself. The steps, and what leads back::

    SEEKING ──proved and JOIN sent──▶ JOINING ──JOINED──▶ SEATED ──CONFIRM──▶ CONFIRMED ──SEALED──▶ PROVING STORE
       ▲                                 │                  │  ▲                  │                      │
       └────────── connection lost ──────┴──────────────────┴──┼───── VOID ───────┴──────────────────────┤
                                                               └────── VOID ── ACKED ◀─── store proved ──┘
                                                                                 │
                                                                                 └──GO──▶ FORMED

This is the member's side of a two-phase commit: CONFIRMED and ACK are its votes, GO is commit, VOID is abort. A member
whose connection breaks after CONFIRMED tries the same session first, since the host may already have decided GO.
"""

from __future__ import annotations

import enum

import msgspec

from mingle.errors import MingleError
from mingle.protocol import reports
from mingle.protocol.connection_race import ConnectionRace, RaceState, address_seconds, named
from mingle.protocol.machine import (
    Context,
    Diagnostics,
    Effect,
    Formation,
    Hangup,
    Identity,
    NetworkFacts,
    ProveStore,
    ReachStore,
    Snapshot,
    Source,
    note,
    note_name,
    scoped,
)
from mingle.protocol.pacing import DiscoveryClient
from mingle.protocol.sessions import (
    RUNNING_PATIENCE_SECONDS,
    KnownSession,
    RunningCheck,
    SessionPolicy,
    SessionTable,
    remember,
)
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer

SUSPECT_SECONDS = 2.0
"""The time in which a host that has not confirmed must answer once another host offers itself, and the time in which it
must answer a good-bye that is repeated."""
RETURN_SECONDS = 5.0
"""The time for which a member that lost its connection after CONFIRMED tries the same session first."""
READY_HEARD_SECONDS = 15.0
"""The time after READY in which a loss of the connection can have lost READY as well. TCP ends a connection within 10 s
if what was sent on it is not acknowledged."""
STORE_RETRY_SECONDS = 0.5
HOST_SEEN_SECONDS = 1.0
"""The least time between two reports of the same other host to the own one."""
STATUS_BEFORE_DEADLINE_SECONDS = 1.0


class Step(enum.Enum):
    """How far a member has come."""

    SEEKING = "seeking"
    JOINING = "joining"
    SEATED = "seated"
    CONFIRMED = "confirmed"
    PROVING_STORE = "proving the store"
    ACKED = "acknowledged"
    FORMED = "formed"


BEFORE_GO = (Step.CONFIRMED, Step.PROVING_STORE, Step.ACKED)
"""The steps in which the host may decide GO with this member."""


class Joiner(SessionPolicy[KnownSession]):
    """The machine of a member. ``outcome`` or ``failure`` ends it."""

    def __init__(self, identity: Identity, context: Context, now: float) -> None:
        self.identity = identity
        self.diagnostics = Diagnostics(unit=identity.who.unit)
        self.timeout = context.timeout
        self.step = Step.SEEKING
        self.current: KnownSession | None = None
        """The session whose host this member is connected to."""
        self.epoch = 0
        self.sealed: frames.Sealed | None = None
        self.outcome: Formation | None = None
        """The place in the job, once it has formed."""
        self.failure: MingleError | None = None
        self.status: frames.Status | None = None
        """The last status of the job from its host."""
        self._status_of = b""
        """The session of that status."""
        self.roster: list[frames.Seat] = []
        """The members of the job, as far as the host has answered."""
        self._roster_wanted = False
        """Whether the roster was asked for and is not complete."""
        self._secured = context.key is not None
        self._deadline = now + context.timeout
        self._heard_at = now
        self._effects: list[Effect] = []
        self._table = SessionTable(self, context, self._effects, patience=address_seconds(identity.world_size))
        self._client = DiscoveryClient(identity, context, now, diagnostics=self.diagnostics, effects=self._effects)
        self.running_check = RunningCheck(
            identity,
            self._table,
            self._effects,
            claims=context.claims,
            patience=min(RUNNING_PATIENCE_SECONDS, context.timeout),
            freed=self._client.seeker.resume,
        )
        self._conflict: MingleError | None = None
        """Why a session that this member waited for has ended, if that concerns every rank of the job."""
        self._return_to: KnownSession | None = None
        """The session to come back to before any other: its host may have decided GO with this member."""
        self._return_until = 0.0
        self._suspect_until: float | None = None
        """The time by which a frame must have come from the host."""
        self._suspicion = ""
        self._confirm_due = False
        self._store_retry_at: float | None = None
        self._paths_stale = False
        """Whether paths that were proved may be broken by now, or better ones open: the store was not reached, the
        interfaces have changed, or the connection to the host broke."""
        self._ready = False
        self._ready_heard_by = float("-inf")
        """When the host certainly has READY, if the connection stands until then."""
        self.loss = ""
        """The host that was lost and the reason, if the connection ended after GO and before READY."""
        self.close_reason = ""
        """Why the host has ended its session, or this member's part in it, after GO, if it has said so."""
        self._farewell: tuple[str, bool] | None = None
        """The reason of a good-bye that is repeated until the host answers, and whether this member has failed."""
        self._final_ask_done = False

    hosting = None
    """The machine that hosts a session: none."""
    host_silence: float | None = None
    """The time after which a host that does not answer is given up before GO; None: never."""

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether there is an outcome or a failure."""
        return self.outcome is not None or self.failure is not None

    def effects(self) -> list[Effect]:
        """Return what the driver has to do now, once."""
        self._table.flush()
        done, self._effects[:] = list(self._effects), []
        return done

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        if self.failure is not None:
            return None
        times = [self._table.next_timer()]
        if self._return_to is not None and self._return_to.race is None:
            times.append(self._return_to.retry_at)
        if self.leaving and self.connection_stands:
            times.append(self._heard_at + SUSPECT_SECONDS)
        if self.outcome is None:
            times += [self._deadline, self._store_retry_at, self._suspicion_timer()]
            times += [self._client.next_timer(), self.running_check.next_timer(), self.running_check.verdict_timer()]
            if self.seated and not self._final_ask_done:
                times.append(self._deadline - STATUS_BEFORE_DEADLINE_SECONDS)
        return min((time for time in times if time is not None), default=None)

    def stage(self) -> str:
        """Return the current step, in a word, for the log."""
        return self.step.value

    def snapshot(self) -> Snapshot:
        """Return the state for the progress line."""
        running = self.running_check.running
        text = f"the job is already running, hosted by {running[0].host}" if running else ""
        status, found = self.status, self.current is not None
        if status is None or not found:
            return Snapshot(found, 0, (), self.step.value, text)
        return Snapshot(True, status.joined, status.awaited or status.unconfirmed, status.phase, text, status.hosts)

    def cause(self, facts: NetworkFacts, now: float) -> reports.Cause | None:
        """Return the best cause so far why this member waits, for the progress line."""
        heard = self.diagnostics.lately(now)
        proved = bool(self.diagnostics.proved)
        apart = None if proved else reports.kept_apart(self.identity, heard, secured=self._secured)
        return apart or self._why_waiting(heard, facts)

    def _why_waiting(self, heard: Diagnostics, facts: NetworkFacts) -> reports.Cause | None:
        connected = self.current is not None
        status = self.status if connected else None
        return reports.waiting(self.identity, heard, facts, status=status, connected=connected)

    def calling(self) -> Datagram | None:
        """The datagram for unicast peers now."""
        return self.identity.seek() if self.current is None and not self.finished else None

    @property
    def seated(self) -> bool:
        """Whether this member has a seat."""
        return self.current is not None and self.step is not Step.JOINING

    @property
    def seat(self) -> bytes | None:
        """The session in which this member has a seat."""
        return self.current.name if self.current is not None and self.seated else None

    @property
    def has_confirmed(self) -> bool:
        """Whether the host may decide GO with this member, or has."""
        return self.step in BEFORE_GO or self.step is Step.FORMED

    @property
    def connection_stands(self) -> bool:
        """Whether this member is connected to its host."""
        return self.current is not None and self.current.race is not None

    @property
    def host_gone(self) -> bool:
        """Whether this member is neither connected to its host nor on its way back to it."""
        return not self.connection_stands and self._return_to is None

    @property
    def host_lost(self) -> MingleError | None:
        """The error of a member whose host was lost for good after GO and before READY: its store answers no more."""
        lost = self.loss and not self._ready and self.host_gone
        return reports.host_lost(self.identity, self.loss) if lost else None

    def send(self, frame: frames.AnyFrame) -> None:
        """Send a frame to the host."""
        assert self.current is not None
        self.current.send(frame)

    def ask_status(self) -> None:
        """Ask the host for the job's status, for the progress line of this node."""
        if self.seated:
            self.send(frames.Ask(what="status"))

    def ask_roster(self) -> None:
        """Ask the host for the members of the job, again if it is lost meanwhile; the answer gathers in ``roster``."""
        self.roster, self._roster_wanted = [], True
        if self.connection_stands:
            self.send(frames.Ask(what="roster"))

    # --- what is heard: for which sessions to race -----------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """Handle a valid datagram."""
        if not self.finished:
            offer = self._client.heard(message, source, now, seated=self.seated)
            if offer is not None:
                self._offered(offer, source.interface, source.address, now)

    def heard_unverified(self, message: Datagram) -> None:
        """Handle a datagram whose signature is missing or wrong."""
        self.diagnostics.unverified(self.identity, message)

    def _offered(self, offer: Offer, interface: str, sender: str, now: float) -> None:
        """Handle a datagram that names a host of this job."""
        if offer.host_name not in self.diagnostics.hosts:
            note(self.diagnostics.hosts, offer.host_name, "heard")
        session = remember(self._table, offer, named(offer, interface, sender), sender)
        if session is None:
            return
        if session.race is not None:
            self._offered_again(session, session.race, now)
        elif self.current is not None and session is not self.current and offer.takes_members:
            self._another_offers(now)
            if self.seated and self.identity.rank is None and now >= session.retry_at:
                # The host may not hear the other's datagrams.
                session.retry_at = now + HOST_SEEN_SECONDS
                self.send(frames.HostSeen(offer=offer))
        elif now >= session.retry_at and session is not self.current:
            self._prove(session, now)

    def _offered_again(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        """Handle an OFFER of a session that is being raced for, or is connected."""
        if session is self.current and race.address not in session.offer.addresses:
            # The host has ended the connection by now; that goes unseen where its address has gone, and TCP would wait.
            self._suspect(now, SUSPECT_SECONDS, "silent, and it no longer offers the address in use")
        reopened = race.call.purpose == "probe" and session.offer.takes_members
        if not reopened or race.state is RaceState.RACING or now < session.retry_at:
            race.add(session.targets)
            return
        # It was sealed when it was asked, and says that it takes members again: joining it proves that.
        session.give_up(now)
        self._prove(session, now)

    def make_for(self, offer: Offer, interface: str, now: float, *, sender: str = "") -> None:
        """Join this session, without waiting for a datagram of its host."""
        session = remember(self._table, offer, named(offer, interface, sender))
        if session is None or (session.race is not None and session.race.call.purpose == "join"):
            return
        session.hang_up()  # it was only asked whether it lives
        self._prove(session, now)

    def _prove(self, session: KnownSession, now: float) -> bool:
        """Start a race for a session, unless it is one to join and another comes first. Return whether it started."""
        bound = self._bound_elsewhere(session)
        has_room = session.offer.takes_members or session.confirmed
        if has_room and bound and (session.alive_since is None or session.offer.state == "sealed"):
            # It is said to have a free seat, so it does not run without this member. It will be heard again.
            session.forget_life()
            return False
        # A host that has said that it runs without this member is asked: only a datagram says that it is open again.
        joins = not bound and (has_room or session.said_open)
        purpose: frames.Purpose = "join" if joins else "probe"
        session.said_open = False
        self._table.race(session, self.identity.call(session.name, purpose), now)
        self.running_check.weigh(now)
        return True

    def _bound_elsewhere(self, candidate: KnownSession) -> bool:
        """Return whether the candidate must not be joined: there is a host, may be one, or the job runs elsewhere."""
        if self.current is not None or self._return_to is not None:
            return self.current is not None or candidate is not self._return_to
        return self.running_check.runs(candidate)

    def keeps(self, session: KnownSession) -> bool:
        """Return whether a session must not make room for another one."""
        return session is self._return_to

    def rewired(self, now: float) -> None:
        """Handle a change of this machine's interfaces: other paths may lead to the host now, or to another host.

        They are proved now, unless this member has confirmed, and once more when the host asks again: an attempt that
        is under way goes out by an old interface.
        """
        self._paths_stale = True
        self._client.seeker.hurry(now)
        if self.current is not None and self.current.race is not None and not self.has_confirmed:
            self.current.race.prove_again(now)
            self._confirm_if_due(now)  # the last other attempt can have been given up just now

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, conn: int, _address: str, _now: float) -> None:
        """Hang up: a member takes no callers, although the port of its candidacy may still be open."""
        self._effects.append(Hangup(conn))

    def owns(self, conn: int) -> bool:
        """Return whether a connection is this machine's."""
        return self._table.owns(conn)

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """Handle an established outgoing connection."""
        self._table.connected(conn, local_address, interface, now, weak=weak)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Handle bytes that came in on a connection."""
        session = self._table.owner(conn)
        race = session.race
        if session is self.current and race is not None and conn == race.winner:  # another can be a stranger's
            self._heard_at, self._suspect_until = now, None
        self._table.received(conn, untrusted, now)
        self._note_secret_failures(race)
        self._confirm_if_due(now)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """Handle a connection that ended or could not be made."""
        race = self._table.owner(conn).race
        self._table.disconnected(conn, reason, now)
        self._note_secret_failures(race)
        self._confirm_if_due(now)

    def _note_secret_failures(self, race: ConnectionRace | None) -> None:
        for address, reason in race.failures.items() if race is not None else ():
            if reason.startswith("secret"):
                note_name(self.diagnostics.secret_failures, f"{address}: {reason}")

    # --- what becomes of a session ---------------------------------------------------------------------------------

    def on_proved(self, session: KnownSession, now: float) -> None:
        """Handle a session whose host has just proved it."""
        note(self.diagnostics.hosts, session.host_name, "proved")
        note_name(self.diagnostics.proved, session.host_name)
        assert session.race is not None
        if session.race.call.purpose != "join":
            self.running_check.proved(session, now)
            return
        session.forget_life()
        self._conflict = None
        if self._bound_elsewhere(session):
            # Another session was quicker, or the job runs elsewhere: this one will be heard again.
            session.hang_up()
            return
        self._client.seeker.pause()
        self._join(session, now)

    def on_unreached(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        """Handle a race that was lost on every address."""
        failures = "; ".join(f"{address} {reason}" for address, reason in race.failures.items())
        note(self.diagnostics.hosts, session.host_name, f"not reached: {failures}")
        refused = race.state is RaceState.DEAD and not race.may_live
        if session is self._return_to and refused and (self.outcome is None or now >= self._return_until):
            # Refused on every address: its process has ended, and there is nothing to come back to.
            self._return_to = None
        asked_again = self.running_check.unreached(session, race, now) and self._prove(session, now)
        if not asked_again and session.alive_since is not None:
            # Dead, or said to take members while there is a host: in neither case it is in the way.
            self.running_check.free(session, now)

    def on_lost(self, session: KnownSession, race: ConnectionRace, reason: str, now: float) -> None:
        """Handle the end of the connection to a host that has proved its session."""
        if session is self.current:
            self._lost(session, reason, now)
        elif session.alive_since is not None:
            self.running_check.free(session, now)

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame that came from a host."""
        ours = session is self.current
        match frame:
            case frames.Refused() if ours:  # without a secret any process can prove a session and say this
                self._refused(session, frame, now)
            case frames.Running() if not ours:
                self._runs_elsewhere(session, frame, now)
            case frames.Closed() if ours:
                self._closed_by_host(frame, now)
            case frames.Closed(conflict=True):
                # The next session can be free of the conflict: it counts if none comes.
                self._conflict = reports.closed_by_host(self.identity, frame.reason, network=frame.network)
            case _ if ours:
                self._host_said(session, frame, now)

    def _runs_elsewhere(self, session: KnownSession, running: frames.Running, now: float) -> None:
        if running.state == "open":
            # It reopened while it was asked, or was never sealed: its next OFFER leads to joining it, whatever it says.
            session.give_up(now)
            session.said_open = True
            self.running_check.free(session, now)
        else:
            self.running_check.said(session, running, now)

    def _refused(self, session: KnownSession, frame: frames.Refused, now: float) -> None:
        session.hang_up()
        session.confirmed = False
        self.current = self._return_to = None
        if self.outcome is not None:
            return
        self._let_go()
        note(self.diagnostics.hosts, session.host_name, f"refused us: {frame.reason}")
        if frame.reason in ("session", "ended", "secret", "network"):
            session.retry_later(now)
            self._client.seeker.resume(now)
        elif frame.reason in ("running", "full"):
            # Full, or sealed without this member: wait for its end, like for any other run of the same job.
            full = session.offer.world_size
            session.offer = msgspec.structs.replace(session.offer, state="sealed", joined=full)
            self._prove(session, now)
            self._client.seeker.resume(now)
        else:
            self.failure = reports.refused(self.identity, frame)

    def _closed_by_host(self, frame: frames.Closed, now: float) -> None:
        if self.outcome is not None:
            self.close_reason = frame.reason or "it gave no reason"
        elif frame.conflict:
            self.failure = reports.closed_by_host(self.identity, frame.reason, network=frame.network)
        else:
            self.drop_host(f"it ended its session: {frame.reason}", now)

    # --- the steps -------------------------------------------------------------------------------------------------

    def _join(self, session: KnownSession, now: float) -> None:
        """SEEKING -> JOINING: ask the host of a session that has proved itself for a seat."""
        self.current, self._heard_at = session, now
        if self.outcome is None:
            self.step = Step.JOINING
        if session.name != self._status_of:
            self.status, self._final_ask_done = None, False
        self.send(self._application(session, now))

    def _application(self, session: KnownSession, now: float) -> frames.Join:
        return self.identity.join(self.identity.who, session.paths, session.token)

    def _host_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Go from step to step as the host says."""
        match frame:
            case frames.Joined() if self.step in (Step.JOINING, Step.FORMED):
                self._joined(session, frame, now)
            case frames.Store() if self.step is Step.SEATED:
                self._effects.append(ReachStore(session.scoped(frame.address), frame.port))
            case frames.Confirm() if frame.epoch >= self.epoch and self.outcome is None:
                self._asked_to_confirm(session, frame, now)
            case frames.Sealed() if frame.epoch == self.epoch and self.step is Step.CONFIRMED:
                self.step, self.sealed = Step.PROVING_STORE, frame
                self._prove_store(session, frame)
            case frames.Go() if self.sealed is not None and self.step is Step.ACKED:
                if frame.epoch == self.sealed.epoch:
                    self._go(session, self.sealed)
            case frames.Void() if frame.epoch == self.epoch and self.outcome is None:
                self.step, self.sealed = Step.SEATED, None
                self._confirm_due, self._store_retry_at = False, None
            case frames.Ping():
                self.send(frames.Pong(number=frame.number))
            case frames.Status():
                self.status, self._status_of = frame, session.name
            case frames.Roster() if frame.first == len(self.roster) < self.identity.world_size:
                self.roster += frame.seats
                self._roster_wanted = len(self.roster) < self.identity.world_size

    def _joined(self, session: KnownSession, frame: frames.Joined, now: float) -> None:
        """JOINING -> SEATED; or -> ACKED, if the member comes back after its ACK and only GO is lacking."""
        self._return_to, session.token = None, frame.token
        if self.outcome is not None:
            self.loss = ""
            if self._ready:
                self.ready(now)
            if self._farewell is not None:
                self._say_farewell(*self._farewell)
            if self._roster_wanted:
                self.ask_roster()
            return
        self.epoch = frame.epoch
        if self.sealed is not None and (self.sealed.session, self.sealed.epoch) == (session.name, frame.epoch):
            self.step = Step.ACKED
        else:
            self.step, self.sealed = Step.SEATED, None

    def _asked_to_confirm(self, session: KnownSession, frame: frames.Confirm, now: float) -> None:
        lacked_common = self.step is Step.CONFIRMED  # all were asked again: no path was common to them
        self.epoch, self.step, self._confirm_due = frame.epoch, Step.SEATED, True
        self.sealed = self._store_retry_at = None
        if session.race is not None:
            if self._paths_stale or lacked_common:
                session.race.prove_again(now)
            else:
                session.race.try_again(now)
        self._paths_stale = False

    @property
    def can_confirm(self) -> bool:
        """Whether the host waits for CONFIRMED and every path to it has been tried: the seal chooses among them."""
        race = self.current.race if self.current is not None else None
        return self._confirm_due and race is not None and not race.pending

    def _confirm_if_due(self, now: float) -> None:
        """SEATED -> CONFIRMED, unless the job runs without this member already, or may."""
        self.running_check.weigh(now)
        session = self.current
        if session is not None and self.can_confirm and self._may_confirm(session, now):
            self._confirm_due, self.step = False, Step.CONFIRMED
            session.confirmed = True
            self.send(frames.Confirmed(session=session.name, epoch=self.epoch, paths=session.paths))

    def _may_confirm(self, session: KnownSession, now: float) -> bool:
        return not self.running_check.may_run(session)

    def _prove_store(self, session: KnownSession, sealed: frames.Sealed) -> None:
        self._store_retry_at = None
        address = session.scoped(sealed.store_address)
        self._effects.append(ProveStore(sealed.epoch, address, sealed.store_port, sealed.session, sealed.store_token))

    def store_proved(self, session: bytes, epoch: int, now: float) -> None:
        """PROVING STORE -> ACKED: the store was reached and holds the session's token."""
        if self._proves_store(session, epoch):
            self.step = Step.ACKED
            self.send(frames.Ack(session=session, epoch=epoch))

    def store_unreachable(self, session: bytes, epoch: int, reason: str, now: float) -> None:
        """Handle the failure to reach the store; the member tries again until the host voids the epoch."""
        if self._proves_store(session, epoch):
            assert self.sealed is not None
            place = f"{self.sealed.store_address}:{self.sealed.store_port}"
            note(self.diagnostics.store_failures, place, reason)
            self._store_retry_at, self._paths_stale = now + STORE_RETRY_SECONDS, True

    def _proves_store(self, session: bytes, epoch: int) -> bool:
        """Return whether this member still has to prove the store of that epoch."""
        sealed = self.sealed
        if self.step is not Step.PROVING_STORE or sealed is None:
            return False
        return (sealed.session, sealed.epoch) == (session, epoch)

    def _go(self, session: KnownSession, sealed: frames.Sealed) -> None:
        """ACKED -> FORMED."""
        # The member can have come back over another path than the one that was sealed.
        path = session.path_to(sealed.store_address) or session.paths[0]
        self.step = Step.FORMED
        self._table.hang_up(but=session)
        self.outcome = Formation(
            session=sealed.session,
            place=sealed.place,
            store_address=scoped(sealed.store_address, path.interface),
            store_port=sealed.store_port,
            interface=path.interface,
            address=path.local_address,
            roster_digest=sealed.roster_digest,
        )

    # --- loss and time ---------------------------------------------------------------------------------------------

    def _suspect(self, now: float, seconds: float, why: str) -> None:
        """Ask the host for a sign of life: its process can be stopped, or its machine gone without a word."""
        if self._suspect_until is None:
            self._suspect_until, self._suspicion = now + seconds, why
            self.send(frames.Ping())

    def _another_offers(self, now: float) -> None:
        """Handle a sign that the host has gone: another host takes members."""
        if self.step in (Step.JOINING, Step.SEATED):
            self._suspect(now, SUSPECT_SECONDS, "silent while another host offered itself")

    def _suspicion_timer(self) -> float | None:
        silence = self.host_silence
        if self._suspect_until is not None or silence is None or self.step not in BEFORE_GO or self.current is None:
            return self._suspect_until
        return self._heard_at + silence / 2

    def _watch_host(self, now: float) -> None:
        """Ask a host that is silent before GO, and leave one that does not answer."""
        due, silence = self._suspicion_timer(), self.host_silence
        if due is None or now < due or self.current is None:
            return
        if self._suspect_until is None:
            assert silence is not None
            self._suspect(now, silence / 2, f"it was silent for {silence:.0f} s")
        else:
            self.drop_host(self._suspicion, now)

    def drop_host(self, reason: str, now: float) -> None:
        """Hang up on a host that is silent, or has ended its session."""
        session = self.current
        if session is not None:
            session.give_up(now)
            self._lost(session, reason, now)

    def _lost(self, session: KnownSession, reason: str, now: float) -> None:
        """Any step -> SEEKING; a member that the host may count on tries the same session first."""
        note(self.diagnostics.hosts, session.host_name, f"connection lost: {reason}")
        if self.outcome is not None:
            # The host counts a member as lost that does not come back and say READY, unless it has said CLOSED.
            heard = self._farewell is None and self._ready and now >= self._ready_heard_by
            returning = not heard and not self.close_reason
            how = f"it ended its session: {self.close_reason}" if self.close_reason else reason
            self.loss = f"{session.host_name}: {how}"
            self.current = self._suspect_until = None
        else:
            returning = self.step in BEFORE_GO
            self._paths_stale = True  # what broke this connection can fail the proof of another path as well
            # In JOINING it is a seal of before, if any: the connection can break again on the way back.
            self._let_go(keep_sealed=self.step in (Step.JOINING, Step.ACKED))
            self._client.seeker.resume(now)
        if returning:
            self._return_to, self._return_until = session, now + RETURN_SECONDS
            self._prove(session, now)

    def _let_go(self, *, keep_sealed: bool = False) -> None:
        """Forget the host. ``keep_sealed``: if it comes back, only GO is lacking."""
        self.current, self.step = None, Step.SEEKING
        self._suspect_until = self._store_retry_at = None
        self._confirm_due = False
        if not keep_sealed:
            self.sealed = None

    def handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        if self.failure is not None:
            return
        self._table.handle_timer(now)
        returning = self._return_to
        if returning is not None and returning.race is None and now >= returning.retry_at:
            if now < self._return_until or self._farewell is not None:
                self._prove(returning, now)
            else:
                self._return_to = None
        if self.leaving and self.connection_stands and now >= self._heard_at + SUSPECT_SECONDS:
            self.drop_host("it did not answer the good-bye", now)
        if self.outcome is None:
            self._gather(now)

    def _gather(self, now: float) -> None:
        """Do everything that is due until the job has formed."""
        self.running_check.handle_timer(now)
        self.failure = self.running_check.verdict(now)
        self._confirm_if_due(now)
        self._watch_host(now)
        if self._store_retry_at is not None and now >= self._store_retry_at:
            assert self.sealed is not None
            assert self.current is not None
            self._prove_store(self.current, self.sealed)
        self._client.handle_timer(now)
        if self.seated and not self._final_ask_done and now >= self._deadline - STATUS_BEFORE_DEADLINE_SECONDS:
            self._final_ask_done = True
            self.ask_status()

    def expired(self, now: float) -> bool:
        """Return whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, facts: NetworkFacts) -> None:
        """End at the deadline with the error that explains it."""
        failure = self.running_check.failure(self._deadline) or self._conflict or self.failure
        if failure is None and not self.diagnostics.proved:
            failure = reports.authentication(self.identity, self.diagnostics, facts, secured=self._secured)
        self.failure = failure or self._timeout(facts)

    def _timeout(self, facts: NetworkFacts) -> MingleError:
        """Return the error of a member whose time is up."""
        return reports.timeout(
            self.identity,
            self.diagnostics,
            facts,
            seconds=self.timeout,
            status=self.status,
            connected=self.current is not None,
        )

    # --- after GO --------------------------------------------------------------------------------------------------

    def ready(self, now: float = float("-inf")) -> None:
        """Tell the host that the process group stands.

        Args:
            now: the time; a member without it does not come back after a loss.
        """
        self._ready, self._ready_heard_by = True, now + READY_HEARD_SECONDS
        if self.current is not None and self.outcome is not None:
            self.send(frames.Ready(session=self.current.name))

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Send the good-byes and close every connection.

        A member that has heard GO says READY first. Without it the host takes LEAVE for what it is from a member that
        gave up before it heard GO: a loss, whether or not GO has been decided meanwhile.

        Args:
            reason: why.
            failed: whether the host must take this for a loss.
        """
        if not self.close_reason:
            self._say_farewell(*(self._farewell or (reason, failed)))
        self._farewell = None
        self._table.hang_up()

    def leave(self, reason: str, now: float, *, failed: bool = False) -> None:
        """Say the same good-byes as `close` after GO, and on each new connection again until the host answers.

        Go on with turns while this member is `leaving`, for as long as the host can be waited for, and close it then.
        """
        self._farewell, self._heard_at = (reason, failed), now
        self._say_farewell(reason, failed)

    @property
    def leaving(self) -> bool:
        """Whether the host has not answered the good-bye, and can be reached or is looked for."""
        return self._farewell is not None and not self.close_reason and not self.host_gone

    def _say_farewell(self, reason: str, failed: bool) -> None:
        if self.outcome is not None and not self._ready and not failed:
            self.ready()
        if self.current is not None:
            self.send(frames.Leave(session=self.current.name, reason=reason[:2048]))
