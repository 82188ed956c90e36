"""How often a process may do something that strangers can ask of it: a sustained rate, and a burst."""

from __future__ import annotations

from msgspec import Struct


class TokenBucket(Struct):
    """A token bucket, which is full at first.

    Args:
        per_second: the sustained rate.
        at_once: the burst.
        counted_at: the time of the last count; at first, now.
        spent: the tokens that are missing.
    """

    per_second: float
    at_once: float
    counted_at: float
    spent: float = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until a token is available."""
        earned = max(0.0, now - self.counted_at) * self.per_second
        self.spent, self.counted_at = max(0.0, self.spent - earned), now
        return max(0.0, (1 - (self.at_once - self.spent)) / self.per_second)

    def take(self, now: float) -> bool:
        """Take a token; return whether there was one."""
        if self.wait(now) > 0:
            return False
        self.spent += 1
        return True
