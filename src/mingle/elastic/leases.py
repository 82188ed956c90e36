"""Leases between the host of an elastic job and its members: how long each can count on the other. Pure.

The host counts a member for :data:`LEASE_SECONDS` from the *sending* of the last PING that the member has answered. The
member is bound to its host for :data:`BINDING_SECONDS` from the *processing* of the host's last message. A message is
sent before it is processed, so the host stops counting a member before that member is free, even if packets are lost,
delayed or retransmitted, or one of the two processes is stopped. The difference covers clocks that run at different
rates.

All times are of CLOCK_BOOTTIME, which goes on while a machine is suspended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

PING_SECONDS = 1.0
"""How often a host asks each of its members."""
LEASE_SECONDS = 8.5
"""How long a member counts after the host sent the last PING (or SEALED) that the member has answered."""
ANSWER_SECONDS = 2.0
"""How old the PINGs can be whose answers allow a round: less than agents that were killed and started again take to
found a session that has a round."""
GROWN_SECONDS = 2.1
"""How old an agent must be to count for a founding without all others. The difference covers clocks that run at
different rates."""
BINDING_SECONDS = 10.0
"""How long a member is bound to its host after it has last processed something from it."""


def is_fresh(at: float, now: float) -> bool:
    """Return whether the answer to a PING or a question of this moment can allow a round now."""
    return now < at + ANSWER_SECONDS


def latest_common(spans: Iterable[tuple[float, float]], needed: int) -> float:
    """Return the latest moment that is in so many of these spans, each from a moment to another; or minus infinity."""
    if needed <= 0:
        return float("inf")
    ends = [(at, is_end) for begin, end in spans if begin <= end for at, is_end in ((begin, False), (end, True))]
    present = 0
    for at, is_end in sorted(ends, reverse=True):  # a span's end comes before the begin of one at the same moment
        present += 1 if is_end else -1
        if present >= needed:
            return at
    return float("-inf")


@dataclass(slots=True)
class Latest:
    """The latest moment that suits enough members. It is found anew only when enough later answers have come.

    A host of a thousand agents gets a thousand answers each second.
    """

    at: float = float("-inf")
    awaited: int = 0
    """How many later answers can leave it as it is, and one more."""
    _of: tuple[Sequence[bytes], int] = (), 0

    def find(self, spans: Callable[[bytes], tuple[float, float]], members: Sequence[bytes], needed: int) -> float:
        """Return it, if members is the same object as before and no change of a member was noted since."""
        if members is not self._of[0] or needed != self._of[1] or self.awaited <= 0:
            found = [spans(member) for member in members]
            self.at, self._of = latest_common(found, needed), (members, needed)
            self.awaited = max(1, needed - sum(end > self.at for _, end in found))
        return self.at

    def note(self, end: float) -> None:
        """Take note that the span of a member ends later now."""
        self.awaited -= end > self.at


@dataclass(slots=True)
class Leases:
    """The host's side: the time until which each member counts. Only an answer renews a lease."""

    _sealed_at: dict[bytes, float] = field(default_factory=dict)
    _until: dict[bytes, float] = field(default_factory=dict)
    _answered: dict[bytes, float] = field(default_factory=dict)
    """When the last PING that each member has answered was sent."""
    _kept: Latest = field(default_factory=Latest)
    _together: Latest = field(default_factory=Latest)

    def sealed(self, member: bytes, now: float) -> None:
        """Start a lease when SEALED is sent to a member; an earlier lease ends."""
        self.forget(member)
        self._sealed_at[member] = now

    def acknowledged(self, member: bytes) -> None:
        """Renew the lease of a member that has answered SEALED."""
        if member in self._sealed_at:
            self._until[member] = self._sealed_at[member] + LEASE_SECONDS
            self._changed()

    def answered(self, member: bytes, asked_at: float) -> None:
        """Renew the lease of a member that has answered a PING of this moment.

        A lease is never shortened: the PING can have been sent before SEALED.
        """
        if member in self._until:
            self._until[member] = max(self._until[member], asked_at + LEASE_SECONDS)
            self._answered[member] = max(self.answered_at(member), asked_at)
            self._kept.note(asked_at + LEASE_SECONDS)
            self._together.note(asked_at)

    def until(self, member: bytes) -> float:
        """Return when a member stops counting."""
        return self._until.get(member, float("-inf"))

    def answered_at(self, member: bytes) -> float:
        """Return when the last PING that a member has answered was sent."""
        return self._answered.get(member, float("-inf"))

    def alive(self, member: bytes) -> tuple[float, float]:
        """Return from when to when a member was certainly alive and in this session.

        An agent that was killed and the one that was started in its place are not so at any moment together.
        """
        return self._sealed_at.get(member, float("inf")), self.answered_at(member)

    def forget(self, member: bytes) -> None:
        """End the lease of a member."""
        for kept in (self._sealed_at, self._until, self._answered):
            kept.pop(member, None)
        self._changed()

    def _changed(self) -> None:
        self._kept.awaited = self._together.awaited = 0

    def kept_until(self, members: Sequence[bytes], needed: int) -> float:
        """Return until when so many of these members count. Another list of members is another object."""
        return self._kept.find(lambda member: (float("-inf"), self.until(member)), members, needed)

    def together_at(self, members: Sequence[bytes], needed: int) -> float:
        """Return the latest moment at which so many of these members were alive and in this session, all together."""
        return self._together.find(self.alive, members, needed)


@dataclass(frozen=True, slots=True)
class Hold:
    """How firmly an agent knows that its session is the only one.

    Attributes:
        until: when the session is lost if nothing more is heard of it.
        proved_at: a moment at which no other session had a round. On the host, enough members were in the session at
            this moment, as they have answered since; a member asked its host at this moment, and the host has said so.
    """

    until: float = float("-inf")
    proved_at: float = float("-inf")

    def allows(self, made: float, now: float) -> bool:
        """Return whether torchrun can get a round at ``now`` that was complete at ``made``."""
        return made <= self.proved_at and now < self.until and is_fresh(self.proved_at, now)


@dataclass(slots=True)
class Binding:
    """The member's side: the session that the member helps to hold. A bound member helps no other session."""

    session: bytes = b""
    until: float = float("-inf")

    def renew(self, session: bytes, now: float) -> None:
        """Extend the binding: the member processes a message from the host of this session."""
        self.session, self.until = session, now + BINDING_SECONDS

    def release(self, session: bytes) -> None:
        """End the binding: the host of this session has released it, or the host's process has ended."""
        if session == self.session:
            self.until = float("-inf")

    def holds(self, now: float) -> bool:
        """Whether the agent is bound to any session."""
        return now < self.until

    def elsewhere(self, session: bytes, now: float) -> bool:
        """Whether the agent is bound to another session than this one."""
        return self.holds(now) and session != self.session
