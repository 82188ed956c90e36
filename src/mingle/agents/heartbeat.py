"""Whether the other side of a control connection between agents still lives: asked every second. Pure.

The kernel's keepalive notices a machine that is gone, not a process that has stopped; and a host has to notice that
it is cut off, and stop, before those who are cut off from it choose another, so its patience is the shorter one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from mingle.agents.quorum import LEASE_SECONDS

PING_SECONDS = 1.0
"""How often a host asks each of its members."""
MEMBER_SILENT_SECONDS = 7.0
"""How long a member may be silent until its host takes it for lost."""
HOST_SILENT_SECONDS = LEASE_SECONDS
"""How long a host may be silent until its member takes it for lost."""
LEASE_MARGIN_SECONDS = 2.0
"""How much longer a host holds a lost member for bound: its last word may have been under way for so long."""


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

    def watches(self, conn: int) -> bool:
        """Whether a connection is watched."""
        return conn in self._heard

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


@dataclass(slots=True)
class Leases:
    """For how long members are bound to this host, whether or not they are connected."""

    _asked: dict[bytes, deque[float]] = field(default_factory=dict)
    """When each was asked without an answer so far."""
    _told: dict[bytes, float] = field(default_factory=dict)
    """When it was last spoken to."""
    _heard_of: dict[bytes, float] = field(default_factory=dict)
    """When it was last asked something that it has answered."""

    def __contains__(self, member: object) -> bool:
        return member in self._told

    def begin(self, member: bytes, now: float) -> None:
        """GO was said to a member."""
        self._told[member] = self._heard_of[member] = now
        self._asked[member] = deque()

    def forget_all_but(self, members: AbstractSet[bytes]) -> None:
        """Of nobody else anything is asked any more."""
        for kept in (self._asked, self._told, self._heard_of):
            for member in kept.keys() - members:
                del kept[member]

    def asked(self, member: bytes, now: float) -> None:
        """A member was asked whether it lives."""
        self._told[member] = now
        self._asked[member].append(now)

    def answered(self, member: bytes) -> None:
        """It has answered; on one connection answers come in the order of the questions."""
        if self._asked.get(member):
            self._heard_of[member] = self._asked[member].popleft()

    def bound(self, member: bytes, now: float) -> bool:
        """Whether a member that was lost may still be bound: then it is in no other session."""
        return member in self._told and now < self._bound_until(member)

    def _bound_until(self, member: bytes) -> float:
        return self._told[member] + LEASE_SECONDS + LEASE_MARGIN_SECONDS

    def died_bound(self, member: bytes, at: float) -> bool:
        """Whether a member that was dead at that time was certainly bound until it died."""
        return member in self._heard_of and at < self._heard_of[member] + LEASE_SECONDS

    def next_timer(self, lost: Iterable[bytes], now: float) -> float | None:
        """When the next of those that are lost is bound no more."""
        times = [self._bound_until(member) for member in lost if member in self._told]
        return min((time for time in times if time > now), default=None)
