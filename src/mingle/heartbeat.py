"""Whether the other side of a control connection between agents still lives: asked every two seconds. Pure.

The kernel's keepalive notices a machine that is gone, not a process that has stopped; and a host has to notice that
it is cut off before those who are cut off from it choose another, so its patience is the shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PING_SECONDS = 2.0
"""How often a host asks each of its members."""
MEMBER_SILENT_SECONDS = 8.0
"""How long a member may be silent until its host takes it for lost."""
HOST_SILENT_SECONDS = 10.0
"""How long a host may be silent until its member takes it for lost."""


@dataclass(slots=True)
class Heartbeat:
    """The connections that are watched, each with when it was last heard."""

    patience: float
    _heard: dict[int, float] = field(default_factory=dict)
    _ping_at: float | None = None

    def watch(self, conn: int, now: float) -> None:
        """From now on this connection is watched."""
        if conn not in self._heard:
            self._heard[conn] = now

    def forget(self, conn: int) -> None:
        """It has ended."""
        self._heard.pop(conn, None)

    def heard(self, conn: int, now: float) -> None:
        """Something came in on a connection."""
        if conn in self._heard:
            self._heard[conn] = now

    def next_timer(self, *, pings: bool) -> float | None:
        """When somebody has been silent for too long or, where this side asks, when to ask."""
        times = [at + self.patience for at in self._heard.values()]
        if pings and self._heard:
            times.append(self._ping_at if self._ping_at is not None else float("-inf"))
        return min(times, default=None)

    def silent(self, now: float) -> list[int]:
        """The connections that have been silent for too long."""
        return [conn for conn, at in self._heard.items() if now >= at + self.patience]

    def due(self, now: float) -> list[int]:
        """The connections to ask now; if there are any, the next time is set."""
        if not self._heard or (self._ping_at is not None and now < self._ping_at):
            return []
        self._ping_at = now + PING_SECONDS
        return list(self._heard)
