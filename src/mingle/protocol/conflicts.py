"""Conflicting hosts: the other hosts of the same job, as one host sees them. Pure.

There are two kinds. An open one takes members, too: with given ranks it is a second rank 0, and if it stays, both
hosts report a conflict. A sealed session means that the job is already running under this id: see
:class:`~mingle.protocol.running_check.RunningCheck`. Both kinds count once they are proved over TCP, until their
connection ends; a sealed session also while it is asked, for a limited time.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mingle.protocol.connection_race import ConnectionRace, DialTarget, address_seconds
from mingle.protocol.machine import Context, Identity
from mingle.protocol.running_check import RUNNING_PATIENCE_SECONDS, RunningCheck
from mingle.protocol.sessions import KnownSession, SessionPolicy, SessionTable, remember
from mingle.wire import frames
from mingle.wire.datagrams import Offer

CONFLICT_SECONDS = 2.0
"""The time for which each of two rank 0s waits for the other to go."""


class _Caller(Struct, frozen=True):
    member: bytes
    who: frames.ProcessInfo
    since: float


class ConflictingHosts(SessionPolicy[KnownSession]):
    """The other hosts that one host knows.

    Args:
        identity: of this process.
        context: what connection races need; its timeout bounds the wait for another run of the job.
        competes: whether this host was given no rank. Another such host that takes members is then no conflict
            (:mod:`mingle.protocol.election`).
    """

    def __init__(
        self,
        identity: Identity,
        context: Context,
        *,
        competes: bool = False,
    ) -> None:
        self._identity = identity
        self._competes = competes
        self._table = SessionTable(self, context, patience=address_seconds(identity.world_size))
        self._links = context.links
        self._claims = context.claims
        self.running_check = RunningCheck(
            identity,
            self._table,
            context.links.effects,
            claims=context.claims,
            patience=min(RUNNING_PATIENCE_SECONDS, context.timeout),
        )
        self._callers: dict[int, _Caller] = {}
        self._conceded: list[frames.ProcessInfo] = []
        """The open hosts that have ended because of the conflict with this host."""

    # --- what is known ---------------------------------------------------------------------------------------------

    def proved(self) -> list[tuple[Offer, frames.Running]]:
        """Return the other sessions that have reported their state, each with its last OFFER."""
        return [(each.offer, each.running) for each in self._table if each.running is not None and each.is_proved]

    @property
    def any_alive(self) -> bool:
        """Whether another host lives, or may hold a job that runs: then this host decides nothing."""
        return bool(self._calling()) or self.running_check.may_run()

    def lasting(self, now: float) -> list[frames.ProcessInfo]:
        """Return the open hosts that have been alive for long enough to be an error."""
        dialed = {
            each.offer.host: each.running.host
            for each in self._table
            if each.running is not None
            and each.running.state == "open"
            and self._has_lasted(each, CONFLICT_SECONDS, now)
        }
        called = {each.member: each.who for each in self._calling() if now >= each.since + CONFLICT_SECONDS}
        return list(dict.fromkeys([*self._conceded, *{**called, **dialed}.values()]))

    @staticmethod
    def _has_lasted(session: KnownSession, seconds: float, now: float) -> bool:
        return session.alive_since is not None and now >= session.alive_since + seconds

    # --- other hosts that call -------------------------------------------------------------------------------------

    def caller(self, conn: int, member: bytes, who: frames.ProcessInfo, now: float) -> None:
        """Handle another host that has proved itself on a connection of its own making."""
        self._callers[conn] = _Caller(member, who, now)

    def _calling(self) -> list[_Caller]:
        """Return those whose connections stand."""
        if self._callers:
            self._callers = {conn: each for conn, each in self._callers.items() if conn in self._links}
        return list(self._callers.values())

    # --- other hosts that are heard of -----------------------------------------------------------------------------

    def heard(
        self, offer: Offer, targets: Sequence[DialTarget], now: float, *, sender: str = "", in_folder: bool = False
    ) -> None:
        """Check whether another session of this job lives that a datagram, or an object in a folder, has named."""
        session = remember(self._table, offer, targets, sender, in_folder=in_folder)
        if session is None or now < session.retry_at:
            return
        if session.running is not None and (session.running.state == "open") != (offer.state == "open"):
            session.give_up(now)  # the datagram says that it has changed: ask again
        if session.race is None:
            self._prove(session, now)
        self.running_check.weigh(now)

    def _prove(self, session: KnownSession, now: float) -> None:
        purpose: frames.Purpose = "probe" if session.offer.state == "sealed" else "conflict"
        self._table.race(session, self._identity.call(session.name, purpose), now)

    def abandon(self) -> None:
        """Hang up on all other hosts and forget them."""
        for session in self._table:
            self._table.remove(session)
        self._callers.clear()
        self._claims.withdraw(self.running_check)

    # --- what becomes of a session ---------------------------------------------------------------------------------

    def on_proved(self, session: KnownSession, now: float) -> None:
        """Handle a session whose host has just proved it."""
        if session.race is not None and session.race.call.purpose == "probe":
            self.running_check.proved(session, now)

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        """Handle what another host says."""
        if isinstance(frame, frames.Running):
            if frame.state == "open" and self._competes and session.offer.assigned:
                # The session was said to be sealed. Its next OFFER leads to a call that shows which host closes.
                session.give_up(now)
                session.forget_life()
            else:
                self.running_check.said(session, frame, now)
        elif isinstance(frame, frames.Closed) and not frame.conflict:
            self.running_check.closed(session, frame)
        elif isinstance(frame, frames.Closed):
            # The other host fails because of this one: its time was up a moment before ours, and both must fail.
            running, lasted = session.running, self._has_lasted(session, CONFLICT_SECONDS / 2, now)
            if running is not None and running.state == "open" and lasted:
                self._conceded.append(running.host)

    def on_unreached(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        """Handle a race that was lost on every address."""
        if self.running_check.unreached(session, race, now):
            self._prove(session, now)
        else:
            session.forget_life()

    def on_lost(self, session: KnownSession, race: ConnectionRace, reason: str, now: float) -> None:
        """Handle the end of the connection to another host."""
        session.forget_life()

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        times = (self._table.next_timer(), self.running_check.next_timer())
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Continue the races."""
        self._table.handle_timer(now)
        self.running_check.handle_timer(now)

    def verdict_timer(self) -> float | None:
        """The time at which :meth:`lasting` or the verdict of the already-running check can change."""
        times = [each.since + CONFLICT_SECONDS for each in self._calling()]
        times += [
            each.alive_since + CONFLICT_SECONDS
            for each in self._table
            if each.alive_since is not None and each.running is not None and each.running.state == "open"
        ]
        runs = self.running_check.verdict_timer()
        return min(times if runs is None else [*times, runs], default=None)
