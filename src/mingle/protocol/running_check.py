"""The already-running check: whether a job runs in a session without this process, or may. Pure.

A session that is sealed without this process is no place to join, but it can be about to end. While it lives, or may
live, no other session is formed: two runs under one id would disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable

from mingle.errors import MingleError
from mingle.protocol import reports
from mingle.protocol.claims import SILENT_SECONDS, ClaimBudget
from mingle.protocol.connection_race import ConnectionRace, RaceState
from mingle.protocol.effects import Effect, Notice
from mingle.protocol.machine import Identity
from mingle.protocol.sessions import KnownSession, SessionTable
from mingle.wire import frames

RUNNING_NOTICE_SECONDS = 2.0
"""The time after which people are told that the job is already running."""
RUNNING_PATIENCE_SECONDS = 30.0
"""The longest time that a process waits for another run of the same job to end."""


class RunningCheck:
    """Whether the job runs in a session without this process, or may.

    Args:
        identity: of this process, for messages.
        table: the sessions that it has heard of.
        effects: the list to which the check adds its notice.
        claims: the budget for runs that are only claimed.
        patience: the time that a run is waited for, in seconds.
        freed: called when this process no longer waits for the end of a session.

    Attributes:
        told: called with what a session without this process says: RUNNING, or CLOSED if the job ran there.
    """

    def __init__(
        self,
        identity: Identity,
        table: SessionTable[KnownSession],
        effects: list[Effect],
        *,
        claims: ClaimBudget,
        patience: float,
        freed: Callable[[float], None] | None = None,
    ) -> None:
        self.patience = patience
        self.told: Callable[[bytes, frames.Running | frames.Closed], None] = lambda _session, _said: None
        self._identity = identity
        self._table = table
        self._effects = effects
        self._freed = freed
        self._budget = claims

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[frames.Running]:
        """The states that the sessions waited for have reported."""
        return [running for _, running, _ in self._in_the_way()]

    def _in_the_way(self) -> list[tuple[KnownSession, frames.Running, float]]:
        return [
            (each, each.running, each.alive_since)
            for each in self._table
            if each.running is not None and each.running.state == "running" and each.alive_since is not None
        ]

    def runs(self, but: KnownSession | None = None) -> bool:
        """Return whether the job runs in another session than this one."""
        return any(
            each.alive_since is not None and each is not but and (each.is_proved or not self._budget.spent)
            for each in self._table
        )

    def may_run(self, but: KnownSession | None = None) -> bool:
        """Return whether it runs there, or may, since a sealed session is just being asked."""
        if not self._table:  # a host asks this after each event
            return False
        return self.runs(but) or (not self._budget.spent and any(each.is_asked for each in self._table))

    # --- events ----------------------------------------------------------------------------------------------------

    def weigh(self, now: float) -> None:
        """Take note of how long this process has waited for sealed sessions that are only claimed."""
        claimed = (each.is_asked or (each.alive_since is not None and not each.is_proved) for each in self._table)
        self._budget.note(now, self, pending=any(claimed))

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
        if race.state is not RaceState.SILENT or race.call.purpose != "probe" or session.presumed_dead:
            return False
        if session.alive_since is None:
            session.alive_since = now
        session.presumed_dead = now - session.alive_since >= SILENT_SECONDS
        return not session.presumed_dead

    def free(self, session: KnownSession, now: float) -> None:
        """Stop waiting for the end of a session."""
        session.forget_life()
        if self._freed is not None:
            self._freed(now)

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        times = [self._budget.next_timer()]
        times += [each.mute_since + SILENT_SECONDS for each in self._table if each.mute_since is not None]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Hang up on hosts that have proved their sessions and then said nothing, or nothing after the seal."""
        for session in self._table:
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
                self._effects.append(Notice(reports.running_notice(self._identity, running, ago)))
            if waited >= self.patience:
                return reports.running(self._identity, running, ago)
        return None

    def failure(self, now: float) -> MingleError | None:
        """Return the error of a process whose own time is over while the job runs elsewhere."""
        for session in self._table:
            if session.ran is not None:
                return reports.running(self._identity, session.ran, now - session.said_at)
        return None
