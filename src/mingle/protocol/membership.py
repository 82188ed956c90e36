"""A member's place in a job that has formed: READY, the way back to the host, the roster, and the good-bye. Pure.

A rank needs its host until its process group stands, because torch reads the group's addresses in the host's store. So
a member that loses its connection calls the host again for a while, and a host that does not come back is an error.
From READY on the end of the connection is no loss to either side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeAlias

from msgspec import Struct

from mingle.errors import MingleError
from mingle.protocol import reports
from mingle.protocol.machine import Formation, Identity
from mingle.protocol.sessions import KnownSession
from mingle.protocol.states import Transitions, transition
from mingle.wire import frames

RETURN_SECONDS = 5.0
"""The time for which a member whose connection broke calls that session only: before GO if it has sent CONFIRMED
(:class:`~mingle.protocol.member.Returning`), and after GO (:class:`Reconnecting`). After GO the registrar waits as long
for it; before GO it frees the seat at once."""
READY_HEARD_SECONDS = 15.0
"""The time after READY in which a loss of the connection can have lost READY as well. TCP ends a connection within 10 s
if what was sent on it is not acknowledged."""
ANSWER_SECONDS = 2.0
"""The time in which the host must answer a good-bye that is repeated."""


class Attached(Struct, frozen=True):
    """The member is connected to its host."""

    session: KnownSession


class Reconnecting(Struct, frozen=True):
    """The connection broke, and the member calls the host again."""

    session: KnownSession
    until: float
    """The time after which it gives up."""


class Rejoining(Struct, frozen=True):
    """The host has proved its session again, and has not answered JOIN yet."""

    session: KnownSession


class Detached(Struct, frozen=True):
    """The member has no host: it is gone, or no longer needed."""

    session: ClassVar[None] = None


State: TypeAlias = Attached | Reconnecting | Rejoining | Detached

CLOSED = "this process leaves the job"
TRANSITIONS: Transitions = {
    Attached: {
        "connection lost, the host is needed": Reconnecting,
        "connection lost, the host is not needed": Detached,
        "REFUSED": Detached,
        CLOSED: Detached,
    },
    Reconnecting: {
        "the host proves the session: JOIN": Rejoining,
        "the host is not reached in time": Detached,
        CLOSED: Detached,
    },
    Rejoining: {
        "JOINED": Attached,
        "connection lost, the host is needed": Reconnecting,
        "connection lost, the host is not needed": Detached,
        "REFUSED": Detached,
        CLOSED: Detached,
    },
    Detached: {},
}


class Farewell(Struct, frozen=True):
    """A good-bye that is repeated until the host answers."""

    reason: str
    failed: bool
    """Whether the host must take it for a loss."""


class RosterAnswer:
    """The members of a job, as far as the host has answered.

    Args:
        size: the world size.
    """

    def __init__(self, size: int) -> None:
        self.seats: list[frames.Seat] = []
        self.wanted = False
        """Whether the roster was asked for and is not complete."""
        self._size = size

    def ask(self, session: KnownSession | None) -> None:
        """Ask the host, if there is one; else the question waits for it."""
        self.seats, self.wanted = [], True
        if session is not None:
            session.send(frames.Ask(what="roster"))

    def said(self, frame: frames.Roster) -> None:
        """Add a part of the answer; what is left of an earlier answer does not fit."""
        if frame.first == len(self.seats) < self._size:
            self.seats += frame.seats
            self.wanted = len(self.seats) < self._size


class Membership:
    """The place of a member in its job, from GO to the end.

    Args:
        identity: of this process.
        outcome: the place.
        session: of the host, to which this member is connected.
        roster: of the job; it is asked for again if the host is lost meanwhile.
        call: starts a race for the session, to join it again.
    """

    def __init__(
        self,
        identity: Identity,
        outcome: Formation,
        session: KnownSession,
        roster: RosterAnswer,
        call: Callable[[KnownSession, float], object],
    ) -> None:
        self.outcome = outcome
        self.state: State = Attached(session)
        self.loss = ""
        """The host that was lost and the reason, while this member is not connected to it."""
        self.close_reason = ""
        """Why the host has ended its session, or this member's part in it, if it has said so."""
        self.roster = roster
        self._identity = identity
        self._call = call
        self._ready = False
        self._ready_heard_by = float("-inf")
        """When the host certainly has READY, if the connection stands until then."""
        self._farewell: Farewell | None = None
        self._heard_at = float("-inf")
        """When the host was heard last, or was said good-bye to."""

    def _change(self, why: str, state: State) -> None:
        self.state = transition(TRANSITIONS, self.state, why, state)

    # --- the host --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether this member is connected to its host."""
        return isinstance(self.state, Attached | Rejoining)

    @property
    def host_gone(self) -> bool:
        """Whether this member is neither connected to its host nor on its way back to it."""
        return isinstance(self.state, Detached)

    @property
    def returns_to(self) -> KnownSession | None:
        """The session that this member calls again."""
        return self.state.session if isinstance(self.state, Reconnecting) else None

    @property
    def host_lost_error(self) -> MingleError | None:
        """The error of a member whose host is gone before READY: its store no longer answers."""
        lost = self.loss and not self._ready and self.host_gone
        return reports.host_lost_error(self._identity, self.loss) if lost else None

    def send(self, frame: frames.AnyFrame) -> None:
        """Send a frame to the host, if this member is connected to it."""
        if isinstance(self.state, Attached | Rejoining):
            self.state.session.send(frame)

    def heard(self, now: float) -> None:
        """Take note that the host lives."""
        self._heard_at = now

    def said(self, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of the host."""
        match frame:
            case frames.Joined() if isinstance(self.state, Rejoining):
                self._rejoined(frame, now)
            case frames.Closed():
                self.close_reason = frame.reason or "it gave no reason"

    def ready(self, now: float = float("-inf")) -> None:
        """Tell the host that the process group stands.

        Args:
            now: the time; a member without it does not come back after a loss.
        """
        self._ready, self._ready_heard_by = True, now + READY_HEARD_SECONDS
        self.send(frames.Ready(session=self.outcome.session))

    def ask_roster(self) -> None:
        """Ask the host for the members of the job; the answer gathers in ``roster``."""
        self.roster.ask(self.state.session if self.connected else None)

    # --- the way back ----------------------------------------------------------------------------------------------

    def lost(self, session: KnownSession, reason: str, now: float) -> None:
        """Handle the end of the connection; the host counts a member as lost that does not come back and say READY."""
        ready_heard = self._farewell is None and self._ready and now >= self._ready_heard_by
        how = f"it ended its session: {self.close_reason}" if self.close_reason else reason
        self.loss = f"{session.host_name}: {how}"
        if ready_heard or self.close_reason:
            self._change("connection lost, the host is not needed", Detached())
        else:
            self._change("connection lost, the host is needed", Reconnecting(session, now + RETURN_SECONDS))
            self._call(session, now)

    def rejoining(self, session: KnownSession, now: float) -> None:
        """Take note that the host has proved the session again, and that JOIN was sent."""
        self._heard_at = now
        self._change("the host proves the session: JOIN", Rejoining(session))

    def _rejoined(self, frame: frames.Joined, now: float) -> None:
        """Say again what the host may not have heard."""
        assert self.state.session is not None
        self.state.session.token = frame.token
        self._change("JOINED", Attached(self.state.session))
        self.loss = ""
        if self._ready:
            self.ready(now)
        if self._farewell is not None:
            self._say(self._farewell)
        if self.roster.wanted:
            self.ask_roster()

    def unreached(self, session: KnownSession, now: float, *, refused: bool) -> None:
        """Handle a call that led nowhere; ``refused``: on every address, so that the host's process has ended."""
        state = self.state
        if refused and isinstance(state, Reconnecting) and session is state.session and now >= state.until:
            self._change("the host is not reached in time", Detached())

    def refused(self) -> None:
        """Handle REFUSED: the host has no seat for this process any more."""
        self._change("REFUSED", Detached())

    # --- the end ---------------------------------------------------------------------------------------------------

    def leave(self, reason: str, now: float, *, failed: bool = False) -> None:
        """Say good-bye, and again on each new connection until the host answers.

        Go on with turns while this member is `leaving`, for as long as the host can be waited for, and close it then.

        Args:
            reason: why.
            now: the time.
            failed: whether the host must take this for a loss.
        """
        self._farewell, self._heard_at = Farewell(reason, failed), now
        self._say(self._farewell)

    @property
    def leaving(self) -> bool:
        """Whether the host has not answered the good-bye, and can be reached or is looked for."""
        return self._farewell is not None and not self.close_reason and not self.host_gone

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Say good-bye for the last time, unless the host has closed this member's part."""
        if not self.close_reason:
            self._say(self._farewell or Farewell(reason, failed))
        self._farewell = None
        if not self.host_gone:
            self._change(CLOSED, Detached())

    def _say(self, farewell: Farewell) -> None:
        # Without READY the host takes LEAVE for what it is from a member that gave up before it heard GO: a loss.
        if not self._ready and not farewell.failed:
            self.ready()
        self.send(frames.Leave(session=self.outcome.session, reason=farewell.reason[: frames.MAX_TEXT_CHARACTERS]))

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`, or to :meth:`unanswered`."""
        if isinstance(self.state, Reconnecting) and self.state.session.race is None:
            return self.state.session.retry_at
        return self._heard_at + ANSWER_SECONDS if self.leaving and self.connected else None

    def unanswered(self, now: float) -> bool:
        """Return whether the host has not answered the good-bye in time."""
        return self.leaving and self.connected and now >= self._heard_at + ANSWER_SECONDS

    def handle_timer(self, now: float) -> None:
        """Call the host again, or give it up, if either is due."""
        state = self.state
        if not isinstance(state, Reconnecting) or state.session.race is not None or now < state.session.retry_at:
            return
        if now < state.until or self._farewell is not None:
            self._call(state.session, now)
        else:
            self._change("the host is not reached in time", Detached())
