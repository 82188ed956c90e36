"""How often a process may do something that strangers can ask of it: a sustained rate, and a burst."""

from __future__ import annotations

from msgspec import Struct


class TokenBucket(Struct):
    """A token bucket; :meth:`full` makes one.

    Args:
        per_second: the sustained rate.
        at_once: the burst.
        tokens: those that are left.
        counted_at: the time of the last count.
    """

    per_second: float
    at_once: float
    tokens: float
    counted_at: float

    @classmethod
    def full(cls, per_second: float, at_once: float, now: float) -> TokenBucket:
        """Return one that is full."""
        return cls(per_second, at_once, at_once, now)

    def wait(self, now: float) -> float:
        """Return the seconds until a token is available."""
        earned = max(0.0, now - self.counted_at) * self.per_second
        self.tokens, self.counted_at = min(self.at_once, self.tokens + earned), now
        return max(0.0, (1 - self.tokens) / self.per_second)

    def take(self, now: float) -> bool:
        """Take a token; return whether there was one."""
        if self.wait(now) > 0:
            return False
        self.tokens -= 1
        return True
