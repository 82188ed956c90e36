"""The figures of a ping: what was sent, answered and lost, by peer and by way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mingle.wire.echo import WAYS, Way


@dataclass(slots=True)
class Row:
    """What came of one way to one peer."""

    sent: int = 0
    """PINGs whose answer came, or should have come by now."""
    received: int = 0
    """Answers."""
    total: float = 0.0
    """The sum of the round trips, in seconds."""
    shortest: float = math.inf
    """The shortest round trip, likewise; infinite before the first."""
    longest: float = 0.0
    arrived: int = 0
    """The peer's own PINGs that reached us this way."""
    reason: str = ""
    """Why the last one failed, where the system said so."""
    pending: dict[int, float] = field(default_factory=dict)
    """When each unanswered one was sent."""

    @property
    def figures(self) -> tuple[float, float, float] | None:
        """The shortest, the mean and the longest round trip, in seconds; None while there is none."""
        return (self.shortest, self.total / self.received, self.longest) if self.received else None

    @property
    def loss(self) -> float:
        """The share that was lost, 0 to 1."""
        return 0.0 if not self.sent else 1 - self.received / self.sent

    def answered(self, number: int, now: float) -> None:
        """An answer came; a second one to the same PING counts for nothing."""
        sent_at = self.pending.pop(number, None)
        if sent_at is not None:
            self.sent += 1
            self.received += 1
            round_trip = now - sent_at
            self.total += round_trip
            self.shortest, self.longest = min(self.shortest, round_trip), max(self.longest, round_trip)

    def failed(self, number: int, reason: str) -> None:
        """The system says that no answer will come."""
        if self.pending.pop(number, None) is not None:
            self.sent += 1
            self.reason = reason

    def expire(self, before: float) -> None:
        """Counts those as lost that were sent before this time."""
        late = [number for number, at in self.pending.items() if at <= before]
        for number in late:
            del self.pending[number]
        self.sent += len(late)


@dataclass(slots=True)
class Peer:
    """Another process that pings."""

    pinger: bytes
    hostname: str
    pid: int
    address: str
    interface: str
    port: int
    rows: dict[Way, Row] = field(default_factory=lambda: {way: Row() for way in WAYS})
    gone: bool = False
    heard_at: float = 0.0

    @property
    def answers(self) -> bool:
        """Whether the peer has ever answered."""
        return any(row.received for row in self.rows.values())

    def __str__(self) -> str:
        return f"{self.hostname or 'unknown'} ({self.address})"
