"""The other sessions of the job that a process has heard of, and whether the job runs in one of them, or may. Pure.

A process has one such table, whether it looks for a host, is a member, or hosts a session itself; what follows from a
session that proves itself, speaks or is lost depends on that role (:class:`~mingle.protocol.sessions.SessionPolicy`).

A session that is sealed without this process is no place to join, but it can be about to end. While it lives, or may
live, no other session is formed: two runs under one id would disturb each other. A claim in a datagram proves nothing
but can be true, so each claimed session is probed, and holds up those that have proved themselves for a limited time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mingle.errors import MingleError
from mingle.protocol.effects import Notice
from mingle.protocol.explain import errors
from mingle.protocol.links.race import ConnectionRace, DialTarget, RaceState, address_seconds, merged
from mingle.protocol.machine import Context, Identity
from mingle.protocol.sessions import KnownSession, SessionPolicy, SessionTable
from mingle.wire import frames
from mingle.wire.datagrams import Offer

SILENT_SECONDS = 10.0
"""The time for which sealed sessions that do not answer count as alive, one of them or all together."""
CLAIM_GAP_SECONDS = 1.0
"""The time between two claims that counts like the claims: in so short a time no host is elected."""
CLAIM_PAUSE_SECONDS = 10.0
"""The time without any claim after which the next claim has a time of its own: a job whose ranks are all there forms in
less."""
RUNNING_NOTICE_SECONDS = 2.0
"""The time after which people are told that the job is already running."""
RUNNING_PATIENCE_SECONDS = 30.0
"""The longest time that a process waits for another run of the same job to end."""


class Sightings(SessionTable[KnownSession]):
    """The other sessions of the job, by name.

    Args:
        policy: what follows from their events, as long as this process has its present role.
        identity: of this process.
        context: what races need.

    Attributes:
        patience: the time that another run of the job is waited for, in seconds.
        told: called with what a session without this process says: RUNNING, or CLOSED if the job ran there.
        claims_spent: whether the time for claims is over: only proved sessions count, until none has been claimed for a
            while. So no sender delays a rank forever, whatever it claims and in whatever order.
    """

    def __init__(self, policy: SessionPolicy[KnownSession], identity: Identity, context: Context) -> None:
        super().__init__(policy, context, patience=address_seconds(identity.world_size))
        self.patience = min(RUNNING_PATIENCE_SECONDS, context.timeout)
        self.told: Callable[[bytes, frames.Running | frames.Closed], None] = lambda _session, _said: None
        self.claims_spent = False
        self._identity = identity
        self._effects = context.links.effects
        self._claims_since = float("-inf")
        self._claimed_at = float("-inf")
        """The last time at which a claim was being probed."""
        self._claimed = False
        """Whether one is being probed now."""

    def serve(self, policy: SessionPolicy[KnownSession]) -> None:
        """Begin another role: hang up on all sessions, and wait for the end of none of them."""
        self.policy = policy
        self.hang_up()
        for session in self:
            session.forget_life()

    def remember(
        self, offer: Offer, targets: Sequence[DialTarget], sender: str = "", *, in_folder: bool = False
    ) -> KnownSession | None:
        """Return the session of an OFFER, with what the OFFER says of it; None if the table has no room.

        Args:
            offer: the OFFER.
            targets: the addresses that the OFFER names.
            sender: the address whose datagram it was; empty if a proved connection named the session.
            in_folder: whether it lay in a shared folder. There it outlives its host, so the session counts as alive
                only when the host itself says so.
        """
        session = self.get(offer.session)
        if session is None:
            session = KnownSession(offer, targets, sender, presumed_dead=in_folder)
            if not self.add(session):
                return None
        self.heard(session)
        session.offer, session.targets = offer, merged(targets, session.targets)
        return session

    # --- whether the job runs there --------------------------------------------------------------------------------

    @property
    def running(self) -> list[frames.Running]:
        """The states that the sessions waited for have reported."""
        return [running for _, running, _ in self._in_the_way()]

    def _in_the_way(self) -> list[tuple[KnownSession, frames.Running, float]]:
        return [
            (each, each.running, each.alive_since)
            for each in self
            if each.running is not None and each.running.state == "running" and each.alive_since is not None
        ]

    def runs(self, but: KnownSession | None = None) -> bool:
        """Return whether the job runs in another session than this one."""
        return any(
            each.alive_since is not None and each is not but and (each.is_proved or not self.claims_spent)
            for each in self
        )

    def may_run(self, but: KnownSession | None = None) -> bool:
        """Return whether it runs there, or may, since a sealed session is just being asked."""
        if not len(self):  # a host asks this after each event
            return False
        return self.runs(but) or (not self.claims_spent and any(each.is_asked for each in self))

    # --- what is heard of a session --------------------------------------------------------------------------------

    def proved(self, session: KnownSession, now: float) -> None:
        """Handle a sealed session that has proved itself. It lives; in what state, it is about to say."""
        if session.alive_since is None and not session.presumed_dead:
            session.alive_since = now

    def said(self, session: KnownSession, running: frames.Running, now: float) -> None:
        """Handle what a session says of itself."""
        self.told(session.name, running)
        changed = session.running is not None and (session.running.state == "open") != (running.state == "open")
        session.running, session.said_at, session.presumed_dead = running, now, False
        if running.state == "running":
            session.ran = running
        if session.alive_since is None or changed:
            session.alive_since, session.notified = now, False

    def closed(self, session: KnownSession, closed: frames.Closed) -> None:
        """Handle the end of a session, as its host says."""
        if session.running is not None and session.running.state == "running":
            self.told(session.name, closed)

    def unreached(self, session: KnownSession, race: ConnectionRace, now: float) -> bool:
        """Handle a race that was lost; return whether the session still counts as alive, so that it is asked again."""
        if race.state is not RaceState.SILENT or not session.is_in_the_way_of(race.call) or session.presumed_dead:
            return False
        if session.alive_since is None:
            session.alive_since = now
        session.presumed_dead = now - session.alive_since >= SILENT_SECONDS
        return not session.presumed_dead

    def free(self, session: KnownSession, now: float) -> None:
        """Stop waiting for the end of a session."""
        session.forget_life()
        self.policy.on_freed(now)

    # --- claims ----------------------------------------------------------------------------------------------------

    def weigh(self, now: float) -> None:
        """Take note of whether a session that is only claimed is waited for."""
        elects = self._identity.rank is None
        claimed = any(
            each.is_asked
            or (each.alive_since is not None and not each.is_proved)
            or (elects and each.races_to("join") and not each.called_in_vain)
            for each in self
        )
        if self._claimed:
            self._claimed_at = now
        pause = now - self._claimed_at
        if claimed and pause > CLAIM_PAUSE_SECONDS:
            self._claims_since = now
        elif claimed and pause > CLAIM_GAP_SECONDS:
            self._claims_since += pause  # it is the time of waiting that is limited
        if claimed:
            self._claimed_at = now
        self._claimed = claimed
        self.claims_spent = claimed and now >= self._claims_since + SILENT_SECONDS

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        times = [super().next_timer()]
        if self._claimed and not self.claims_spent:
            times.append(self._claims_since + SILENT_SECONDS)
        times += [each.mute_since + SILENT_SECONDS for each in self if each.mute_since is not None]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Continue the races, and hang up on hosts that have proved their sessions and then say nothing."""
        super().handle_timer(now)
        for session in self:
            if session.mute_since is not None and now >= session.mute_since + SILENT_SECONDS:
                session.give_up(now)
                session.presumed_dead = True
                self.free(session, now)
        self.weigh(now)

    def verdict_timer(self) -> float | None:
        """The time of the next call to :meth:`verdict`."""
        times = []
        for session, _, since in self._in_the_way():
            times.append(since + self.patience)
            if not session.notified:
                times.append(since + RUNNING_NOTICE_SECONDS)
        return min(times, default=None)

    def verdict(self, now: float) -> MingleError | None:
        """Tell people that the job runs; return the error once patience is over."""
        for session, running, since in self._in_the_way():
            waited, ago = now - since, now - session.said_at
            if waited >= RUNNING_NOTICE_SECONDS and not session.notified:
                session.notified = True
                self._effects.append(Notice(errors.running_notice(self._identity, running, ago)))
            if waited >= self.patience:
                return errors.running(self._identity, running, ago)
        return None

    def failure(self, now: float) -> MingleError | None:
        """Return the error of a process whose own time is over while the job runs elsewhere."""
        for session in self:
            if session.ran is not None:
                return errors.running(self._identity, session.ran, now - session.said_at)
        return None
