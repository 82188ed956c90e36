"""A member's place in a job that has formed: READY, the way back to the host, the roster, and the good-bye. Pure.

A rank needs its host until its process group stands, because torch reads the group's addresses in the host's store. So
a member that loses its connection calls the host again for a while, and a host that does not come back is an error.
From READY on the end of the connection is no loss to either side.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from mingle.errors import MingleError
from mingle.protocol.explain import errors
from mingle.protocol.machine import Formation, Identity
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames

RETURN_SECONDS = 5.0
"""The time for which a member whose connection broke calls that session only: before GO if it has sent CONFIRMED
and after GO (:class:`~mingle.protocol.member.Away`). After GO the registrar waits as long for it; before GO it frees
the seat at once."""
READY_HEARD_SECONDS = 15.0
"""The time after READY in which a loss of the connection can have lost READY as well. TCP ends a connection within 10 s
if what was sent on it is not acknowledged."""
ANSWER_SECONDS = 2.0
"""The time in which the host must answer a good-bye that is repeated."""


class Farewell(Struct, frozen=True):
    """A good-bye that is repeated until the host answers."""

    reason: str
    failed: bool
    """Whether the host must take it for a loss."""
    said_at: float = float("-inf")


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
        roster: of the job; it is asked for again if the host is lost meanwhile.
        host: returns the session, while this member is connected to its host.
    """

    def __init__(
        self, identity: Identity, outcome: Formation, roster: RosterAnswer, host: Callable[[], KnownSession | None]
    ) -> None:
        self.outcome = outcome
        self.host_gone = False
        """Whether this member is neither connected to its host nor on its way back to it."""
        self.loss = ""
        """The host that was lost and the reason, while this member is not connected to it."""
        self.close_reason = ""
        """Why the host has ended its session, or this member's part in it, if it has said so."""
        self.roster = roster
        self._identity = identity
        self._host = host
        self._ready = False
        self._ready_heard_by = float("-inf")
        """When the host certainly has READY, if the connection stands until then."""
        self._farewell: Farewell | None = None

    # --- the host --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether this member is connected to its host."""
        return self._host() is not None

    @property
    def host_lost_error(self) -> MingleError | None:
        """The error of a member whose host is gone before READY: its store no longer answers."""
        lost = self.loss and not self._ready and self.host_gone
        return errors.host_lost_error(self._identity, self.loss) if lost else None

    def send(self, frame: frames.AnyFrame) -> None:
        """Send a frame to the host, if this member is connected to it."""
        if (session := self._host()) is not None:
            session.send(frame)

    def ready(self, now: float = float("-inf")) -> None:
        """Tell the host that the process group stands.

        Args:
            now: the time; a member without it does not come back after a loss.
        """
        self._ready, self._ready_heard_by = True, now + READY_HEARD_SECONDS
        self.send(frames.Ready(session=self.outcome.session))

    def ask_roster(self) -> None:
        """Ask the host for the members of the job; the answer gathers in ``roster``."""
        self.roster.ask(self._host())

    # --- the way back ----------------------------------------------------------------------------------------------

    def lost(self, session: KnownSession, reason: str, now: float) -> bool:
        """Handle the end of the connection; return whether the host is needed.

        The host counts a member as lost that does not come back and say READY.
        """
        ready_heard = self._farewell is None and self._ready and now >= self._ready_heard_by
        how = f"it ended its session: {self.close_reason}" if self.close_reason else reason
        self.loss = f"{session.host_name}: {how}"
        return not (ready_heard or self.close_reason)

    def came_back(self, now: float) -> None:
        """Say again what the host may not have heard: it has given this member its seat again."""
        self.loss = ""
        if self._ready:
            self.ready(now)
        if self._farewell is not None:
            self._say(self._farewell)
        if self.roster.wanted:
            self.ask_roster()

    # --- the end ---------------------------------------------------------------------------------------------------

    def leave(self, reason: str, now: float, *, failed: bool = False) -> None:
        """Say good-bye, and again on each new connection until the host answers.

        Go on with turns while this member is `leaving`, for as long as the host can be waited for, and close it then.

        Args:
            reason: why.
            now: the time.
            failed: whether the host must take this for a loss.
        """
        self._farewell = Farewell(reason, failed, now)
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

    def _say(self, farewell: Farewell) -> None:
        # Without READY the host takes LEAVE for what it is from a member that gave up before it heard GO: a loss.
        if not self._ready and not farewell.failed:
            self.ready()
        reason = farewell.reason[: frames.MAX_TEXT_CHARACTERS]
        self.send(frames.Leave(session=self.outcome.session, reason=reason, failed=farewell.failed))

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return the time from which the good-bye is :meth:`unanswered`; None: it is not waited for."""
        session, farewell = self._host(), self._farewell
        if not self.leaving or session is None or farewell is None:
            return None
        return max(session.heard_at, farewell.said_at) + ANSWER_SECONDS

    def unanswered(self, now: float) -> bool:
        """Return whether the host has not answered the good-bye in time."""
        due = self.next_timer()
        return due is not None and now >= due
