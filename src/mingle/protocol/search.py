"""The search of a process for the host of its job: what it asks and hears, and for which sessions it races. Pure.

A datagram that names a session is a hint. The search races for the session (:mod:`mingle.protocol.links.race`):
to *join* it, or only to *probe* it, where it is said to be sealed and could be running without this process
(:class:`~mingle.protocol.sightings.Sightings`). The member joins the first session that proves itself.
"""

from __future__ import annotations

from typing import Protocol

from mingle.errors import MingleError
from mingle.protocol.events import Source
from mingle.protocol.explain import errors
from mingle.protocol.explain.observations import Diagnostics, note
from mingle.protocol.links.race import ConnectionRace, RaceState, named
from mingle.protocol.machine import Context, Identity
from mingle.protocol.pacing import DiscoveryClient
from mingle.protocol.sessions import KnownSession, SessionPolicy
from mingle.protocol.sightings import Sightings
from mingle.wire import frames
from mingle.wire.datagrams import Datagram, Offer, Seek


class Searcher(Protocol):
    """The member that searches."""

    @property
    def session(self) -> KnownSession | None:
        """The session whose host it is connected to."""

    @property
    def returns_to(self) -> KnownSession | None:
        """The session that it tries before any other."""

    def join(self, session: KnownSession, now: float) -> None:
        """Join a session, whose host has proved it."""

    def host_said(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of the host that it is connected to."""

    def host_lost(self, session: KnownSession, reason: str, now: float) -> None:
        """Handle the end of that connection."""

    def unreached(self, session: KnownSession, now: float, *, refused: bool) -> None:
        """Handle a race that was lost; ``refused``: on every address, so that the host's process has ended."""


class Search(SessionPolicy[KnownSession]):
    """The questions of a process, the sessions that it has heard of, and the races for them.

    Args:
        identity: of this process.
        context: what races need.
        now: the time.
        diagnostics: takes note of what was heard.
        sightings: the sessions.
        searcher: the member that searches.
    """

    def __init__(
        self,
        identity: Identity,
        context: Context,
        now: float,
        *,
        diagnostics: Diagnostics,
        sightings: Sightings,
        searcher: Searcher,
    ) -> None:
        self.conflict: MingleError | None = None
        """Why a session that this process waited for has ended, if that concerns every rank of the job."""
        self._sightings = sightings
        self._searcher = searcher
        self._identity = identity
        self._diagnostics = diagnostics
        self._client = DiscoveryClient(identity, context, now, diagnostics=diagnostics, effects=context.links.effects)

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float, *, seated: bool) -> KnownSession | None:
        """Handle a datagram, or an object in a folder; return the session of this job that it names, if any."""
        offer = self._client.heard(message, source, now, seated=seated)
        if offer is None:
            return None
        if offer.host_name not in self._diagnostics.hosts:
            note(self._diagnostics.hosts, offer.host_name, "heard")
        targets = named(offer, source.interface, source.address)
        return self._sightings.remember(offer, targets, source.address, in_folder=source.folder)

    @property
    def asked_at(self) -> float | None:
        """The time of the first question since it started to look for a host; None: it has not asked yet."""
        return self._client.seeker.asked_at

    @property
    def question(self) -> Seek:
        """What it asks."""
        return self._client.question

    def resume(self, now: float) -> None:
        """Ask for a host again."""
        self._client.seeker.resume(now)

    def pause(self) -> None:
        """Ask for no host."""
        self._client.seeker.pause()

    # --- races -----------------------------------------------------------------------------------------------------

    def offered(self, session: KnownSession, now: float) -> None:
        """Handle an OFFER of a session that this process is not in."""
        race = session.race
        if race is None:
            if now >= session.retry_at:
                self.race(session, now)
            return
        reopened = race.call.purpose == "probe" and session.has_room
        if not reopened or race.state is RaceState.RACING or now < session.retry_at:
            race.add(session.targets)
            return
        # It was sealed when it was asked, and says that it takes members again: joining it proves that.
        session.give_up(now)
        self.race(session, now)

    def look_again(self, winner: Offer, interface: str, now: float) -> None:
        """Look for a host, at first where the OFFER of the one that has won says."""
        self.resume(now)
        if winner.host != self._identity.member:
            self.make_for(winner, interface, now)

    def make_for(self, offer: Offer, interface: str, now: float) -> None:
        """Join this session, without waiting for a datagram of its host."""
        session = self._sightings.remember(offer, named(offer, interface))
        if session is None or (session.race is not None and session.race.call.purpose == "join"):
            return
        session.hang_up()  # it was only asked whether it lives
        self.race(session, now)

    def race(self, session: KnownSession, now: float) -> bool:
        """Start a race for a session, unless it is one to join and another comes first. Return whether it started."""
        bound = self._bound_elsewhere(session)
        has_room = session.has_room or session.confirmed
        if has_room and bound and (session.alive_since is None or session.offer.state == "sealed"):
            # It is said to have a free seat, so it does not run without this member. It will be heard again.
            session.forget_life()
            return False
        # A host that has said that it runs without this member is asked: only a datagram says that it is open again.
        joins = not bound and (has_room or session.said_open)
        purpose: frames.Purpose = "join" if joins else "probe"
        session.said_open = False
        self._sightings.race(session, self._identity.call(session.name, purpose), now)
        self._sightings.weigh(now)
        return True

    def _bound_elsewhere(self, candidate: KnownSession) -> bool:
        """Return whether the candidate must not be joined: there is a host, may be one, or the job runs elsewhere."""
        searcher = self._searcher
        if searcher.session is not None:
            return True
        if searcher.returns_to is not None:
            return candidate is not searcher.returns_to
        return self._sightings.runs(candidate)

    # --- what becomes of a session -----------------------------------------------------------------------------------

    def keeps(self, session: KnownSession) -> bool:
        """Return whether a session must not make room for another one."""
        return session is self._searcher.returns_to

    def on_proved(self, session: KnownSession, now: float) -> None:
        """Handle a session whose host has just proved it."""
        self._note_secret(session.race)
        self._diagnostics.reached(self._identity.member, session.offer.host)
        self._client.reached()
        note(self._diagnostics.hosts, session.host_name, "proved")
        note(self._diagnostics.proved, session.host_name, None)
        if session.race is None or session.race.call.purpose != "join":
            self._sightings.proved(session, now)
            return
        session.ask_anew()
        self.conflict = None
        if self._bound_elsewhere(session):
            # Another session was quicker, or the job runs elsewhere: this one will be heard again.
            session.hang_up()
            return
        self.pause()
        self._searcher.join(session, now)

    def on_unreached(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        """Handle a race that was lost on every address."""
        self._note_secret(race)
        note(self._diagnostics.hosts, session.host_name, f"not reached: {race.failure_text}")
        if how := session.lost(race):
            self._diagnostics.does_not_reach(self._identity, session.offer, how, now)
            self._client.cannot_reach(session.name, how, now)
        self._searcher.unreached(session, now, refused=race.state is RaceState.DEAD and not race.may_live)
        asked_again = self._sightings.unreached(session, race, now) and self.race(session, now)
        if not asked_again:
            # Dead, or said to take members while there is a host: in neither case it is in the way.
            self._forget(session, now)

    def on_lost(self, session: KnownSession, race: ConnectionRace, reason: str, now: float) -> None:
        """Handle the end of the connection to a host that has proved its session."""
        if session is self._searcher.session:
            session.ran = None
            self._searcher.host_lost(session, reason, now)
        else:
            self._forget(session, now)

    def _forget(self, session: KnownSession, now: float) -> None:
        if session.alive_since is None:
            session.ran = None
        else:
            self._sightings.free(session, now)

    def on_freed(self, now: float) -> None:
        """Ask for a host again: another run of the job is in the way no more."""
        self.resume(now)

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame that came from a host."""
        if session is self._searcher.session:
            self._searcher.host_said(session, frame, now)
        elif isinstance(frame, frames.Running):
            self._probed(session, frame, now)
        elif isinstance(frame, frames.Closed):
            self._sightings.closed(session, frame)
            if frame.conflict:
                # The next session can be free of the conflict: it counts if none comes.
                self.conflict = errors.closed_by_host(self._identity, frame)

    def _probed(self, session: KnownSession, running: frames.Running, now: float) -> None:
        if running.state == "open":
            # It reopened while it was asked, or was never sealed: its next OFFER leads to joining it, whatever it says.
            session.give_up(now)
            session.said_open = True
            self._sightings.free(session, now)
        else:
            self._sightings.said(session, running, now)

    def _note_secret(self, race: ConnectionRace | None) -> None:
        for address, reason in race.failures.items() if race is not None else ():
            if reason.startswith("secret"):
                note(self._diagnostics.secret_failures, f"{address}: {reason}", None)

    # --- the network -----------------------------------------------------------------------------------------------

    def rewired(self, now: float) -> None:
        """Handle a change of this machine's interfaces: other paths may lead to the hosts now, or to another host."""
        self.paths_broke()
        self._client.seeker.hurry(now)

    def paths_broke(self) -> None:
        """Take note that paths that were proved can be broken by now, and that others can be open."""
        for session in self._sightings:
            session.paths_stale = True

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`, or to the ``verdict`` of what was sighted."""
        times = [self._client.next_timer(), self._sightings.verdict_timer()]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Ask what is due."""
        self._client.handle_timer(now)
