"""A job that runs already, as a rank sees it: how long it is waited for, and what is said of it. Pure.

A session that is sealed without us is no place to join, but it may be about to end. While it lives, or may live, no
other one is joined: two runs of one job under one id would be the end of both.
"""

from __future__ import annotations

from msgspec import Struct, field

from mingle.errors import MingleError
from mingle.protocol import reports
from mingle.protocol.connection_race import SILENT_SECONDS, ClaimBudget, Verdict
from mingle.protocol.machine import Effect, Identity, Notice
from mingle.protocol.pacing import Seeker
from mingle.protocol.sessions import Session, Sessions
from mingle.wire import frames

RUNNING_NOTICE_SECONDS = 2.0
RUNNING_PATIENCE_SECONDS = 30.0
"""How long at most a rank waits for another run of the same job to end."""


class Blocking(Struct):
    """Which sessions are in the way."""

    identity: Identity
    sessions: Sessions
    seeker: Seeker
    """Asks soon again when one of them is gone."""
    timeout: float
    effects: list[Effect]
    patience: float = RUNNING_PATIENCE_SECONDS
    _suspicion: ClaimBudget = field(default_factory=ClaimBudget)
    _conflict: MingleError | None = None
    """Why one that was in the way has ended, if that concerns every rank of the job."""

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> frames.Running | None:
        """What a session that runs says of itself."""
        return next((each.running for each in self.sessions if each.running is not None), None)

    def known(self, candidate: Session | None) -> bool:
        """Whether the job runs in another session than the candidate."""
        return any(
            each.blocking_since is not None and each is not candidate and (self._is_proved(each) or self._credulous)
            for each in self.sessions
        )

    def possible(self, candidate: Session | None) -> bool:
        """Whether it does, or may, since a sealed session is just being asked."""
        return self.known(candidate) or (self._credulous and any(self._is_asked(each) for each in self.sessions))

    @property
    def _credulous(self) -> bool:
        return not self._suspicion.spent

    @staticmethod
    def _is_asked(session: Session) -> bool:
        return session.races_to("probe") and not session.counted_dead

    @staticmethod
    def _is_proved(session: Session) -> bool:
        return session.running is not None or (session.race is not None and session.race.verdict is Verdict.PROVED)

    def weigh(self, now: float) -> None:
        """Takes note of how long sealed sessions have been in the way that are only claimed to be there."""
        claimed = any(
            self._is_asked(each) or (each.blocking_since is not None and not self._is_proved(each))
            for each in self.sessions
        )
        self._suspicion.note(now, pending=claimed)

    # --- what happens ----------------------------------------------------------------------------------------------

    @staticmethod
    def lives(session: Session, now: float) -> None:
        """A session that is sealed has proved itself; in what state it is, it is about to say."""
        if session.blocking_since is None:
            session.blocking_since = now

    def says(self, session: Session, frame: frames.Running, now: float) -> None:
        """A session that we only asked whether it lives says that it does."""
        if frame.state == "open":
            # It reopened while we asked; its next OFFER lets us join.
            session.hang_up()
            session.retry_later(now)
            self.free(session, now)
            return
        session.running, session.counted_dead = frame, False
        self.lives(session, now)

    def ended(self, frame: frames.Closed) -> None:
        """One that was in the way ends. A conflict may be solved by the next: it counts if none comes."""
        if frame.conflict:
            self._conflict = reports.closed_by_host(self.identity, frame.reason, network=frame.network)

    def over(self) -> None:
        """A host takes us: whatever was in the way is not."""
        self._conflict = None

    def silent(self, session: Session, now: float) -> bool:
        """A sealed session did not answer: tells whether it is still taken for alive."""
        if session.counted_dead:
            return False
        self.lives(session, now)
        assert session.blocking_since is not None
        session.counted_dead = now - session.blocking_since >= SILENT_SECONDS
        return not session.counted_dead

    @staticmethod
    def unblock(session: Session) -> None:
        """It is in the way no more."""
        session.blocking_since = session.running = None
        session.told = False
        if session.race is not None and session.race.purpose == "probe":
            session.race = None

    def free(self, session: Session, now: float) -> None:
        """It is in the way no more: look for another one at once."""
        self.unblock(session)
        self.seeker.resume(now)

    # --- time ------------------------------------------------------------------------------------------------------

    @property
    def _patience(self) -> float:
        return min(self.patience, self.timeout)

    @staticmethod
    def _is_mute(session: Session) -> bool:
        """Whether it has proved itself and not said yet in what state it is."""
        return session.running is None and session.race is not None and session.race.verdict is Verdict.PROVED

    def timers(self) -> list[float]:
        """When :meth:`watch` has something to do."""
        due = self._suspicion.next_timer()
        times = [] if due is None else [due]
        for session in self.sessions:
            if session.blocking_since is not None and self._is_mute(session):
                times.append(session.blocking_since + SILENT_SECONDS)
            elif session.blocking_since is not None and session.running is not None:
                times.append(session.blocking_since + self._patience)
                if not session.told:
                    times.append(session.blocking_since + RUNNING_NOTICE_SECONDS)
        return times

    def watch(self, now: float) -> MingleError | None:
        """Says what people should know by now; returns the error once patience is over."""
        self.weigh(now)
        failure = None
        for session in self.sessions:
            if session.blocking_since is None:
                continue
            waited = now - session.blocking_since
            if session.running is not None:
                failure = self._tell(session, session.running, waited) or failure
            elif self._is_mute(session) and waited >= SILENT_SECONDS:
                assert session.race is not None
                session.race.abandon()
                session.counted_dead = True
                self.free(session, now)
        return failure

    def _tell(self, session: Session, running: frames.Running, waited: float) -> MingleError | None:
        if waited >= RUNNING_NOTICE_SECONDS and not session.told:
            session.told = True
            self.effects.append(Notice(reports.running_notice(self.identity, running, waited)))
        return reports.running(self.identity, running, waited) if waited >= self._patience else None

    def failure(self, now: float) -> MingleError | None:
        """The error of one whose time is over while the job runs elsewhere, or after that has ended by a conflict."""
        failure = self._conflict
        for session in self.sessions:
            if session.running is not None and session.blocking_since is not None:
                failure = reports.running(self.identity, session.running, now - session.blocking_since)
        return failure
