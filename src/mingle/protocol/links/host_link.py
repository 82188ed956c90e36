"""A member's connection to its host, with its failure detector: a host that is suspected must answer in time. Pure.

The kernel does not report that a process was stopped, or that a machine has gone without a word. So a member that sees
a sign of it asks the host (PING), and gives it up if nothing comes.
"""

from __future__ import annotations

from msgspec import Struct

from mingle.protocol.sessions import KnownSession
from mingle.wire import frames

SUSPECT_SECONDS = 2.0
"""The time in which the host must answer once there is a sign that it has gone: another one offers itself, say."""


class Suspicion(Struct, frozen=True):
    """The host was asked for a sign of life."""

    since: float
    until: float
    """The time by which something must have come."""
    why: str


class HostLink(Struct):
    """The connection to the host, which has proved its session."""

    session: KnownSession
    silence: float | None
    """The time after which a host that does not answer is given up while this member is bound to it; None: never."""
    status_asked: bool = False
    """Whether the status was asked for that the error at the deadline needs."""
    _suspicion: Suspicion | None = None

    @property
    def suspicion(self) -> Suspicion | None:
        """The last suspicion, if nothing has come since."""
        suspicion = self._suspicion
        return None if suspicion is None or self.session.heard_at > suspicion.since else suspicion

    def suspect(self, why: str, now: float, *, seconds: float = SUSPECT_SECONDS) -> None:
        """Ask the host for a sign of life."""
        if self.suspicion is None:
            self._suspicion = Suspicion(now, now + seconds, why)
            self.session.send(frames.Ping())

    def offered(self, now: float) -> None:
        """Handle an OFFER of the host."""
        session = self.session
        if session.race is None:
            return
        if session.race.address not in session.offer.addresses:
            # The host has ended the connection by now; that goes unseen where its address has gone, and TCP would wait.
            self.suspect("silent, and it no longer offers the address in use", now)
        session.race.add(session.targets)

    def next_timer(self, *, bound: bool) -> float | None:
        """Return the time of the next call to :meth:`check`."""
        if self.suspicion is not None:
            return self.suspicion.until
        return self.session.heard_at + self.silence / 2 if self.silence is not None and bound else None

    def check(self, now: float, *, bound: bool) -> str:
        """Suspect a host that is silent; return why one is to be given up that has not answered, empty if none is."""
        due, silence = self.next_timer(bound=bound), self.silence
        if due is None or now < due:
            return ""
        if self.suspicion is not None:
            return self.suspicion.why
        if silence is not None:
            self.suspect(f"it was silent for {silence:.0f} s", now, seconds=silence / 2)
        return ""
