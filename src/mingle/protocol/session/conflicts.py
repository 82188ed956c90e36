"""Conflicting hosts: the other hosts of the same job, as one host sees them. Pure.

There are two kinds. An open one takes members, too: with given ranks it is a second rank 0, and if it stays, both
hosts report a conflict; without given ranks both compete (:mod:`mingle.protocol.election`). A sealed session means that
the job is already running under this id (:mod:`mingle.protocol.sightings`). Both kinds count once they are proved over
TCP, until their connection ends; a sealed session also while it is asked, for a limited time.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mingle.protocol.links.link import Links
from mingle.protocol.links.race import ConnectionRace, DialTarget
from mingle.protocol.machine import Identity
from mingle.protocol.sessions import KnownSession, SessionPolicy
from mingle.protocol.sightings import Sightings
from mingle.wire import frames
from mingle.wire.datagrams import Offer

CONFLICT_SECONDS = 2.0
"""The time for which each of two rank 0s waits for the other to go."""


class _OtherHost(Struct, frozen=True):
    member: bytes
    who: frames.ProcessInfo
    since: float


class ConflictingHosts(SessionPolicy[KnownSession]):
    """The other hosts that one host knows.

    Args:
        identity: of this process.
        sightings: the sessions that this process has heard of, also before it hosted.
        links: its connections.
    """

    def __init__(self, identity: Identity, sightings: Sightings, links: Links) -> None:
        self.sightings = sightings
        self._identity = identity
        self._links = links
        self._callers: dict[int, _OtherHost] = {}
        self._conceded: list[frames.ProcessInfo] = []
        """The open hosts that have ended because of the conflict with this host."""

    # --- what is known ---------------------------------------------------------------------------------------------

    def proved(self) -> list[tuple[Offer, frames.Running]]:
        """Return the other sessions that have reported their state, each with its last OFFER."""
        return [(each.offer, each.running) for each in self.sightings if each.running is not None and each.is_proved]

    @property
    def any_alive(self) -> bool:
        """Whether another host lives, or may hold a job that runs: then this host decides nothing."""
        return bool(self._calling()) or self.sightings.may_run()

    def _open(self) -> list[tuple[KnownSession, frames.Running, float]]:
        """Return the open sessions that live, each with what its host has said, and since when it lives."""
        return [
            (each, each.running, each.alive_since)
            for each in self.sightings
            if each.running is not None and each.running.state == "open" and each.alive_since is not None
        ]

    def lasting(self, now: float) -> list[frames.ProcessInfo]:
        """Return the open hosts that have been alive for long enough to be an error."""
        called = {each.member: each.who for each in self._calling() if now >= each.since + CONFLICT_SECONDS}
        dialed = {
            session.offer.host: running.host
            for session, running, since in self._open()
            if now >= since + CONFLICT_SECONDS
        }
        return list(dict.fromkeys([*self._conceded, *{**called, **dialed}.values()]))

    # --- other hosts that call -------------------------------------------------------------------------------------

    def caller(self, conn: int, member: bytes, who: frames.ProcessInfo, now: float) -> None:
        """Handle another host that has proved itself on a connection of its own making."""
        self._callers[conn] = _OtherHost(member, who, now)

    def _calling(self) -> list[_OtherHost]:
        """Return those whose connections stand."""
        if self._callers:
            self._callers = {conn: each for conn, each in self._callers.items() if conn in self._links}
        return list(self._callers.values())

    # --- other hosts that are heard of -----------------------------------------------------------------------------

    def heard(
        self, offer: Offer, targets: Sequence[DialTarget], now: float, *, sender: str = "", in_folder: bool = False
    ) -> None:
        """Check whether another session of this job lives that a datagram, or an object in a folder, has named."""
        session = self.sightings.remember(offer, targets, sender, in_folder=in_folder)
        if session is None or now < session.retry_at:
            return
        if session.running is not None:
            changed = (session.running.state == "open") != (offer.state == "open")
        else:  # a host that was called while it took members, and only competed
            lives = session.alive_since is not None or session.presumed_dead
            changed = offer.state == "sealed" and session.is_proved and not lives
        if changed:
            session.give_up(now)  # as the datagram says: ask again
        if session.race is None:
            self._prove(session, now)
        self.sightings.weigh(now)

    def reported(self, offer: Offer, interface: str, now: float) -> None:
        """Handle another host that a member, or that host itself, has reported: with given ranks nothing follows."""

    def _prove(self, session: KnownSession, now: float) -> None:
        purpose: frames.Purpose = "probe" if session.offer.state == "sealed" else "conflict"
        self.sightings.race(session, self._identity.call(session.name, purpose), now)

    def abandon(self) -> None:
        """Hang up on all other hosts and forget that they live."""
        self.sightings.serve(self)
        self._callers.clear()

    # --- what becomes of a session ---------------------------------------------------------------------------------

    def on_proved(self, session: KnownSession, now: float) -> None:
        """Handle a session whose host has just proved it."""
        if session.race is not None and session.is_in_the_way_of(session.race.call):
            self.sightings.proved(session, now)

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle what another host says."""
        if isinstance(frame, frames.Running):
            self.sightings.said(session, frame, now)
        elif isinstance(frame, frames.Closed) and not frame.conflict:
            self.sightings.closed(session, frame)
        elif isinstance(frame, frames.Closed):
            # The other host fails because of this one: its time was up a moment before ours, and both must fail.
            self._conceded += [
                running.host
                for each, running, since in self._open()
                if each is session and now >= since + CONFLICT_SECONDS / 2
            ]

    def on_unreached(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        """Handle a race that was lost on every address."""
        if self.sightings.unreached(session, race, now):
            self._prove(session, now)
        else:
            session.forget_life()

    def on_lost(self, session: KnownSession, race: ConnectionRace, reason: str, now: float) -> None:
        """Handle the end of the connection to another host."""
        session.forget_life()

    # --- time ------------------------------------------------------------------------------------------------------

    def verdict_timer(self) -> float | None:
        """The time at which :meth:`lasting` or the verdict on another run of the job can change."""
        times = [each.since + CONFLICT_SECONDS for each in self._calling()]
        times += [since + CONFLICT_SECONDS for _, _, since in self._open()]
        runs = self.sightings.verdict_timer()
        return min(times if runs is None else [*times, runs], default=None)
