"""Leader election: a process that was given no rank looks for a host, and becomes one when there is none. Pure.

Every process runs the same command. It begins as a :class:`Candidate`; one that hears no host for a
while (shorter for a lower member id) opens a session as a :class:`~mingle.protocol.host.Host`. So there can
be several hosts for a moment, and these rules make them one:

* Only open sessions compete, and the lower host id wins. Ids are totally ordered, so moves cannot cycle.
* Multicast can reach one way only. So a host that hears of the other one acts, and over TCP: the winner notifies the
  loser's control port (HOST_SEEN), and members notify their host.
* The loser steps down: it joins the winner itself first. Only when it has a seat there does it send its members after
  it (REDIRECT), and in the meantime it confirms nothing.
* A member that cannot reach the winner says so (UNREACHABLE) and stays. Then the loser, unless it has confirmed to the
  winner, leaves it and opens again. For a while that winner does not win: the loser stays a candidate (*stands*), and
  says so when it notifies the winner.
* A firewall can keep every connection away from the winner. So a host that is called by another one, and stands against
  it, says so on that connection as well; the caller then steps down.

So a process is never in two sessions that can both seal: its own session confirms nothing while the process has a
seat elsewhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TypeGuard

from msgspec import Struct, structs

from mingle.errors import MingleError
from mingle.protocol.connection_race import address_seconds, named
from mingle.protocol.host import Host
from mingle.protocol.machine import (
    Address,
    Context,
    Effect,
    Endpoints,
    Formation,
    Hangup,
    Identity,
    NetworkFacts,
    Snapshot,
    Source,
)
from mingle.protocol.member import RETURN_SECONDS, Joiner
from mingle.protocol.registrar import Phase
from mingle.protocol.reports import Cause
from mingle.protocol.sessions import KnownSession, SessionPolicy, SessionTable, remember
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer

ELECT_AFTER_SECONDS = 0.6
"""The time for which every process looks for a host before the first becomes one. It covers a few questions, so that
one can be lost, and it is longer than a job that is already running keeps back its next answer
(:data:`mingle.protocol.pacing.SEALED_ANSWER_GAP_SECONDS`)."""
ELECT_SPREAD_SECONDS = 0.3
"""The time after that over which the processes become hosts, by their member ids."""
ELECT_SPREAD_SECONDS_PER_RANK = 0.0005
ELECT_SPREAD_MAX_SECONDS = 3.0
"""The bound of that time in a large job."""
REDIRECT_SECONDS = 2.0
"""The time that a member has to reach the host that its own host sends it to."""
STAND_SECONDS = 10.0
"""The time for which a host that some member could not reach does not win; after it the host may be reachable."""
YIELD_SECONDS = 2.0
"""The time that the loser has to get a seat at the winner."""
EMPTY_SECONDS = 5.0
"""The time for which the loser waits for its members to be gone; then it hangs up on the silent ones."""
NOTIFY_AGAIN_SECONDS = 1.0
"""The least time between two calls that notify the same other host."""
REMEMBERED = 64
"""The number of hosts to remember that do not win; bounded against a sender that invents them."""


class Candidacy:
    """The rules among processes that can all become the host: how long each waits first, and which host steps down."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._stands: dict[bytes, float] = {}
        """The hosts that do not win against this one since a member cannot reach them, with the end of that time."""

    def patience(self) -> float:
        """Return how long to look for a host before becoming one, in seconds: a lower member id waits less."""
        spread = min(
            ELECT_SPREAD_SECONDS + ELECT_SPREAD_SECONDS_PER_RANK * self._identity.world_size, ELECT_SPREAD_MAX_SECONDS
        )
        return ELECT_AFTER_SECONDS + spread * int.from_bytes(self._identity.member[:8], "big") / 2**64

    def is_other_host(self, message: Datagram) -> TypeGuard[Offer]:
        """Return whether this is the OFFER of another host of the same job."""
        return (
            isinstance(message, Offer)
            and (message.job, message.attempt) == (self._identity.job, self._identity.attempt)
            and message.kind == self._identity.kind
            and message.host != self._identity.member
        )

    def competes(self, message: Datagram) -> TypeGuard[Offer]:
        """Return whether this is another open session of the same job."""
        return self.is_other_host(message) and message.state == "open"

    def loses_to(self, offer: Offer, *, stands: bool, now: float) -> bool:
        """Return whether this host steps down for that one; a host that ``stands`` can win with the higher id."""
        # A host that was given its rank is no candidate: a process that joins it is told that ranks are mixed.
        better = offer.host < self._identity.member or stands or not offer.assigned
        return better and not self.stands_against(offer.host, now)

    def stands_against(self, host: bytes, now: float) -> bool:
        """Return whether that host does not win at present."""
        return now < self._stands.get(host, now)

    def stand_against(self, host: bytes, now: float) -> None:
        """Let that host not win for a while, because a member cannot reach it."""
        self._stands.pop(host, None)
        if len(self._stands) >= REMEMBERED:
            del self._stands[next(iter(self._stands))]
        self._stands[host] = now + STAND_SECONDS


class Candidate(Joiner):
    """A member that was given no rank: its host can send it to another host, and it can become a host itself."""

    def __init__(self, identity: Identity, context: Context, now: float) -> None:
        super().__init__(identity, context, now)
        self._redirected_to: bytes | None = None
        self._redirected_until = 0.0
        self._claims = context.claims

    # --- where to look ---------------------------------------------------------------------------------------------

    @property
    def host_in_sight(self) -> bool:
        """Whether this process has a host, or is connecting to one."""
        return self._has_host or self._races

    def expects_host(self, now: float) -> bool:
        """Return whether there is a host in sight; hosts that are only claimed count for a limited time."""
        self._claims.note(now, self, pending=self._races)
        return self._has_host or (self._races and not self._claims.spent)

    @property
    def _has_host(self) -> bool:
        return self.current is not None or self._return_to is not None

    @property
    def _races(self) -> bool:
        return any(each.races_to("join") for each in self._table)

    def sealed_sessions(self) -> list[KnownSession]:
        """Return the sessions that were sealed or running when last heard of."""
        return [each for each in self._table if each.offer.state == "sealed"]

    def pause(self, reason: str = "it hosts a session of its own") -> None:
        """Stop looking and leave the seat: this process hosts a session of its own."""
        if self.current is not None:
            self.send(frames.Leave(session=self.current.name, reason=reason))
        self._table.hang_up()
        self._claims.withdraw(self, self.running_check)
        for session in self._table:
            session.forget_life()
        self._let_go()
        self._return_to = self._redirected_to = None
        self._client.seeker.pause()

    # --- redirects -------------------------------------------------------------------------------------------------

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame that came from a host."""
        if not isinstance(frame, frames.Redirect):
            super().on_frame(session, frame, now)
        elif session is self.current:
            self._redirect(session, frame.offer, now)

    def _redirect(self, session: KnownSession, offer: Offer, now: float) -> None:
        """The host steps down for another one and sends this member there; it stays the host until that is reached."""
        if self.has_confirmed or offer.session == session.name:
            return
        if offer.host == self.identity.member:
            # Each steps down for the other, perhaps in a circle of several: the lower id hosts again.
            if self.identity.member < session.offer.host:
                self._move_on(now)
            else:
                self.send(frames.Unreachable(session=offer.session))
            return
        self._redirected_to, self._redirected_until = offer.session, now + REDIRECT_SECONDS
        paths = session.paths
        self.make_for(offer, paths[0].interface if paths else "", now)

    def _bound_elsewhere(self, candidate: KnownSession) -> bool:
        return candidate.name != self._redirected_to and super()._bound_elsewhere(candidate)

    def _join(self, session: KnownSession, now: float) -> None:
        if session.name == self._redirected_to:
            self._redirected_to = None
            self._move_on(now)
        super()._join(session, now)

    def _redirect_failed(self, name: bytes, now: float) -> None:
        """The other host was not reached in time: report it, and stay."""
        self._redirected_to = None
        session = self._table.get(name)
        if session is not None:
            session.give_up(now)
            session.forget_life()
        if self.seated:
            self.send(frames.Unreachable(session=name))

    def _move_on(self, now: float) -> None:
        """Send LEAVE to the host and join another one; this host is not tried again soon."""
        if self.current is not None:
            self.send(frames.Leave(session=self.current.name, reason="it went to another host"))
            self.current.hang_up()
            self.current.retry_at = now + RETURN_SECONDS
            self._let_go()

    def _lost(self, session: KnownSession, reason: str, now: float) -> None:
        if self.outcome is None:
            self._redirected_to = None
        super()._lost(session, reason, now)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        times = [super().next_timer()]
        if not self.finished:
            times += [self._claims.next_timer(), None if self._redirected_to is None else self._redirected_until]
        return min((time for time in times if time is not None), default=None)

    def _gather(self, now: float) -> None:
        self._claims.note(now, self, pending=self._races)
        if self._redirected_to is not None and now >= self._redirected_until:
            self._redirect_failed(self._redirected_to, now)
        super()._gather(now)


class _Winner(Struct):
    """The host for which this one steps down."""

    session: bytes
    host: bytes
    until: float
    """The time by which this process must have a seat there."""
    seated: bool = False
    """Whether it has one, and has sent its members there."""
    empty_by: float = 0.0
    """The time by which the members must be gone."""


class Elector(SessionPolicy[KnownSession]):
    """The machine of a process without a rank. ``outcome`` or ``failure`` ends it.

    Args:
        identity: of this process.
        endpoints: where others can connect to it.
        context: what its machines need.
        now: the time.
        new_session: returns the id of a session that this process hosts.
        make_joiner: makes the machine that looks for a host.
        make_host: makes the machine that hosts.
        candidacy: the rules by which hosts compete.
    """

    def __init__(
        self,
        identity: Identity,
        endpoints: Endpoints,
        context: Context,
        now: float,
        *,
        new_session: Callable[[], bytes] | None = None,
        make_joiner: Callable[[Identity, Context, float], Candidate] = Candidate,
        make_host: Callable[..., Host] = Host,
        candidacy: Candidacy | None = None,
    ) -> None:
        self.identity = identity
        self.endpoints = endpoints
        self.joiner = make_joiner(identity, context, now)
        self.host: Host | None = None
        self._make_host = make_host
        self._context = context
        self._new_session = new_session or functools.partial(os.urandom, 16)
        self._deadline = now + context.timeout
        self._failure: MingleError | None = None
        """Why the own session failed, once it is gone."""
        self._effects: list[Effect] = []
        self._candidacy = candidacy or Candidacy(identity)
        self._elect_at: float | None = now + self._candidacy.patience()
        self._winner: _Winner | None = None
        self._claims = context.claims
        self._notified = SessionTable(self, context, self._effects, patience=address_seconds(identity.world_size))
        """The hosts that have to step down, while they are told."""

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def acting(self) -> Host | Candidate:
        """The machine that speaks for this process: the host unless it steps down, else the joiner."""
        return self.joiner if self.host is None or self._winner is not None else self.host

    @property
    def hosting(self) -> Host | None:
        """The machine that hosts a session, if one does."""
        return self.host

    @property
    def outcome(self) -> Formation | None:
        """The place in the job, once it has formed."""
        return self.joiner.outcome or (self.host.outcome if self.host is not None else None)

    @property
    def failure(self) -> MingleError | None:
        """Why the job has not formed."""
        hosted = self.host.failure if self.host is not None else self._failure
        return hosted or self.joiner.failure

    @property
    def finished(self) -> bool:
        """Whether there is an outcome or a failure."""
        return self.outcome is not None or self.failure is not None

    def effects(self) -> list[Effect]:
        """Return what the driver has to do now, once."""
        self._notified.flush()
        done, self._effects[:] = list(self._effects), []
        if self.host is not None:
            done += self.host.effects()
        return done + self.joiner.effects()

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        if self.finished:
            return self.acting.next_timer()
        times = [self._elect_at, self._deadline, self._notified.next_timer()]
        if self.host is not None:
            times.append(self.host.next_timer())
        if self._joining:
            times.append(self.joiner.next_timer())
        if self._winner is not None:
            # While this process follows the winner to another one it has no seat for a moment.
            times.append(self._winner.until if self.joiner.seat is None else self._winner.empty_by)
        return min((time for time in times if time is not None), default=None)

    @property
    def _joining(self) -> bool:
        """Whether the joiner is at work: there is no own session, or its host steps down."""
        return self.host is None or self._winner is not None

    def stage(self) -> str:
        """Return the current step, in a word, for the log."""
        if self._winner is not None:
            return f"stepping down for another host, {self.joiner.stage()}"
        return self.acting.stage()

    def snapshot(self) -> Snapshot:
        """Return the state for the progress line."""
        return self.acting.snapshot()

    def cause(self, facts: NetworkFacts, now: float) -> Cause | None:
        """Return the best cause so far why this process waits, for the progress line."""
        return self.acting.cause(facts, now)

    def ask_status(self) -> None:
        """Ask the host for the job's status."""
        self.joiner.ask_status()

    def calling(self) -> Datagram | None:
        """The datagram for unicast peers now."""
        return None if self._winner is not None else self.acting.calling()

    def readdress(self, addresses: tuple[Address, ...], now: float) -> None:
        """Handle a change of this machine's interfaces: a session of this process listens at these addresses."""
        self.endpoints = structs.replace(self.endpoints, addresses=addresses)
        if self.host is not None:
            self.host.readdress(addresses, now)

    def rewired(self, now: float) -> None:
        """Handle the same change as a member."""
        self.joiner.rewired(now)

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """Handle a valid datagram."""
        if isinstance(message, Offer) and message.host == self.identity.member:
            return  # of this process, from this session or from one that it has given up
        if self.host is None:
            self.joiner.heard(message, source, now)
        elif self._candidacy.competes(message):
            if not self._claims.spent or not self._candidacy.loses_to(message, stands=False, now=now):
                self._compete(message, source, stands=False, now=now)
            # Otherwise a real winner notifies this process on a connection.
        elif self._winner is not None and isinstance(message, Offer):
            self.joiner.heard(message, source, now)
        else:
            self.host.heard(message, source, now)
        self._watch(now)

    def heard_unverified(self, message: Datagram) -> None:
        """Handle a datagram whose signature is missing or wrong."""
        self.acting.heard_unverified(message)

    # --- competing -------------------------------------------------------------------------------------------------

    def _compete(self, offer: Offer, source: Source, *, stands: bool, now: float, caller: int | None = None) -> None:
        """Decide which host steps down, this one or another one of the job that takes members.

        Args:
            offer: of the other host.
            source: where it was heard.
            stands: whether that host stays a candidate although its id is the higher one.
            now: the time.
            caller: the connection on which the other host has called this one; None: it has not.
        """
        host = self.host
        if host is None or host.finished:
            return
        if self._winner is not None:
            if offer.session == self._winner.session:
                self.joiner.heard(offer, source, now)
        elif host.registrar.phase is not Phase.OPEN:
            return  # it will be sealed, or open again
        elif self._candidacy.loses_to(offer, stands=stands, now=now):
            self._step_down(host, offer, source, now)
        elif caller is not None:
            # Its firewall can let its own calls out and ours not in.
            host.send(caller, self._claim(offer.host, now))
        else:
            self._notify(offer, source, now)

    def _claim(self, other: bytes, now: float) -> frames.HostSeen:
        """Return what tells another host that it has to step down for this one."""
        assert self.host is not None
        return frames.HostSeen(offer=self.host.offer(), stays=self._candidacy.stands_against(other, now))

    def _step_down(self, host: Host, offer: Offer, source: Source, now: float) -> None:
        self._notified.hang_up()
        self._winner = _Winner(offer.session, offer.host, now + YIELD_SECONDS)
        host.step_down(now)
        self.joiner.make_for(offer, source.interface, now, sender=source.address)

    def _notify(self, offer: Offer, source: Source, now: float) -> None:
        """Tell a host that it has to step down, unless it was told a moment ago: it may not hear our datagrams.

        The connection stays, so that the other host can answer on it, and serves for the next time as well.
        """
        targets = named(offer, source.interface, source.address)
        session = remember(self._notified, offer, targets, source.address)
        if session is None or session.races_to("conflict") or now < session.retry_at:
            return
        session.retry_at = now + NOTIFY_AGAIN_SECONDS
        if session.is_proved:
            session.send(self._claim(offer.host, now))
        else:
            self._notified.race(session, self.identity.call(session.name, "conflict"), now)

    def on_proved(self, session: KnownSession, now: float) -> None:
        """Tell another host of this one; a host that steps down itself by now says nothing."""
        if self.host is not None and self._winner is None:
            session.send(self._claim(session.offer.host, now))
        if not session.offer.assigned:  # it takes every host that stays connected for a second rank 0
            session.hang_up()

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle the answer of a host that was told to step down, and stands."""
        if not isinstance(frame, frames.HostSeen) or frame.offer.session != session.name or session.race is None:
            return
        if self._candidacy.competes(frame.offer):
            path = next(iter(session.race.paths.values()))
            self._compete(frame.offer, Source(interface=path.interface), stands=frame.stays, now=now)

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Handle a connection to the control port."""
        if self.host is None:
            self._effects.append(Hangup(conn))
        else:
            self.host.accepted(conn, address, now)

    def _owner(self, conn: int) -> SessionTable[KnownSession] | Host | Joiner | None:
        parts = (self._notified, self.joiner, self.host)
        return next((each for each in parts if each is not None and each.owns(conn)), None)

    def owns(self, conn: int) -> bool:
        """Return whether a connection is this machine's."""
        return self._owner(conn) is not None

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """Handle an established outgoing connection."""
        if (owner := self._owner(conn)) is not None:
            owner.connected(conn, local_address, interface, now, weak=weak)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Handle bytes that came in on a connection."""
        if (owner := self._owner(conn)) is not None:
            owner.received(conn, untrusted, now)
        self._watch(now)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """Handle a connection that ended or could not be made."""
        if (owner := self._owner(conn)) is not None:
            owner.disconnected(conn, reason, now)
        self._watch(now)

    # --- the store -------------------------------------------------------------------------------------------------

    def store_opened(self, epoch: int, port: int, token: str, now: float) -> None:
        """Handle the opening of the store of this process's own session."""
        if self.host is not None:
            self.host.store_opened(epoch, port, token, now)
            self._watch(now)

    def store_failed(self, epoch: int, error: MingleError, now: float) -> None:
        """Handle the failure to open it."""
        if self.host is not None:
            self.host.store_failed(epoch, error, now)
            self._watch(now)

    def store_proved(self, session: bytes, epoch: int, now: float) -> None:
        """Handle the proof of the store of the session that this process joined."""
        self.joiner.store_proved(session, epoch, now)

    def store_unreachable(self, session: bytes, epoch: int, reason: str, now: float) -> None:
        """Handle the failure to reach it."""
        self.joiner.store_unreachable(session, epoch, reason, now)

    # --- time ------------------------------------------------------------------------------------------------------

    def handle_timer(self, now: float) -> None:
        """Do everything that is due."""
        if self.finished:
            self.acting.handle_timer(now)
            return
        self._notified.handle_timer(now)
        if self.host is not None:
            self.host.handle_timer(now)
        self._watch(now)
        if self._elect_at is not None and now >= self._elect_at:
            self._become_host(now)
        elif self._joining:
            self.joiner.handle_timer(now)
            self._watch(now)

    def _become_host(self, now: float) -> None:
        self._elect_at = None
        self.joiner.pause()
        self.host = self._make_host(
            self.identity,
            self._new_session(),
            self.endpoints,
            structs.replace(self._context, timeout=max(0.0, self._deadline - now)),
            now,
            diagnostics=self.joiner.diagnostics,
        )
        self.host.timeout = self._context.timeout  # what reports name
        self.host.handle_timer(now)

    def _watch(self, now: float) -> None:
        """Check, after every event, what follows from it for the election."""
        if self.finished:
            self._notified.hang_up()
            if self.joiner.finished:
                self._end_host("it has joined another host")
            return
        if self.host is not None:
            for seen in self.host.take_hosts_seen():
                if self._candidacy.competes(seen.offer):
                    source = Source(interface="")
                    self._compete(seen.offer, source, stands=seen.stays, now=now, caller=seen.caller)
        if self._winner is not None:
            self._go_on_stepping_down(self._winner, now)
        self._claims.note(now, self, pending=self._winner is not None and not self._winner.seated)
        if self.host is not None or self.joiner.expects_host(now) or self.joiner.running_check.may_run():
            self._elect_at = None
        elif self._elect_at is None:
            self._elect_at = now + self._candidacy.patience()

    def _go_on_stepping_down(self, winner: _Winner, now: float) -> None:
        host, seat = self.host, self.joiner.seat
        assert host is not None
        if self.joiner.has_confirmed:
            # That job can form with this process in it, and is full: the members that are still here look for others.
            self._end_host("it has a place in another session")
        elif seat is None:
            if now >= winner.until or not self.joiner.host_in_sight:
                self._open_again(winner, now, stand=not winner.seated)
        elif not winner.seated or seat != winner.session:
            # Also when that host has stepped down in its turn, and this process went with it.
            assert self.joiner.current is not None
            offer = self.joiner.current.offer
            winner.session, winner.host = seat, offer.host
            winner.seated, winner.empty_by = True, now + EMPTY_SECONDS
            host.redirect_members(offer)
        elif host.redirect_failed:
            self._open_again(winner, now, stand=True)
        elif now >= winner.empty_by or not host.has_members:
            self._end_host("its members were sent to another host")
        if seat is not None:
            winner.until = now + YIELD_SECONDS

    def _open_again(self, winner: _Winner, now: float, *, stand: bool) -> None:
        """Host the remaining members again: the winner is gone, or some member cannot reach it."""
        assert self.host is not None
        if stand:
            self._candidacy.stand_against(winner.host, now)
        self._winner = None
        self.joiner.pause("this host is not reached by all members" if stand else "it hosts its own session again")
        for session in self.joiner.sealed_sessions():
            # Perhaps the winner itself: it can run without this process, and then no other session must.
            self.host.conflicts.heard(session.offer, session.targets, now)
        self.host.stay_host(now)
        self.host.handle_timer(now)

    def _end_host(self, reason: str) -> None:
        if self.host is not None:
            self._failure = self.host.failure
            self.host.close(reason)
            self._effects += self.host.effects()
            self.host = self._winner = None
            self._notified.hang_up()

    def expired(self, now: float) -> bool:
        """Return whether the deadline has passed without an end."""
        return not self.finished and now >= self._deadline

    def give_up(self, facts: NetworkFacts) -> None:
        """End at the deadline with the error that explains it."""
        if self.host is not None and self._winner is None:
            self.host.give_up(facts)
        else:
            self.joiner.give_up(facts)
            self._end_host("it gave up")

    def close(self, reason: str) -> None:
        """Send the good-byes and close every connection."""
        self._notified.hang_up()
        self._end_host(reason)
        self.joiner.close(reason)
