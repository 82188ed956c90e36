"""The lobby: a well-known group on which nothing is said unless somebody asks.

A rank that is about to fail asks there who else is around, so that a mistyped job id, the commonest mistake
there is, can be named; ``mingle-discover list`` asks there too. Of each job the host and one seeker answer: a
seeker that hears an answer for its own job keeps its own back. Of the ranks that have their seats about one asks:
everybody hears the answers, and if a thousand asked as well, each of them would have to read a thousand questions.

Where there is no multicast the same is asked by unicast. Every process of the machine that is asked answers then, so
one question may have many answers, and its source may be forged: that is why each answers rarely.
"""

from __future__ import annotations

import random

EARLY_ASK_SECONDS = 3.0
"""When a rank asks for the first time: whoever waits longer than this may be waiting for the wrong job."""
LAST_ASK_SECONDS = 2.0
"""How long before its deadline it asks for the last time."""
ASK_JITTER_SECONDS = 0.5
OVERHEARD_SECONDS = 1.0
"""How long before the last question of a rank that has its seat another one's stands for it."""
ANSWER_JITTER_SECONDS = 0.1
ANSWER_GAP_SECONDS = 0.5
"""The least time between two answers, however many ask."""
UNICAST_ANSWERS_PER_SECOND = 2.0
"""How many questions by unicast one process answers in the long run …"""
UNICAST_ANSWERS_AT_ONCE = 8.0
"""… and how many at once: who gets no answer asks again."""


class BrowseGroup:
    """Decides when to ask there and when to answer."""

    def __init__(self, now: float, deadline: float, rng: random.Random) -> None:
        self._rng = rng
        last = max(now, deadline - LAST_ASK_SECONDS - rng.uniform(0, ASK_JITTER_SECONDS))
        early = now + EARLY_ASK_SECONDS + rng.uniform(0, ASK_JITTER_SECONDS)
        self._early: float | None = early if early < last else None
        self._last_due: float | None = last
        self._answer_at: float | None = None
        self._answered_at = float("-inf")
        self._credit = UNICAST_ANSWERS_AT_ONCE
        self._credited_at = now

    def next_timer(self) -> float | None:
        """When there is something to do."""
        times = [time for time in (self._early, self._last_due, self._answer_at) if time is not None]
        return min(times, default=None)

    def answer_timer(self) -> float | None:
        """When an answer is due; all that a host still does there once its job has formed."""
        return self._answer_at

    def found(self) -> None:
        """A host of the same job spoke: this is not the wrong one."""
        self._early = None

    def overheard(self, now: float, *, seated: bool) -> None:
        """Somebody of the same job asked who is there: we shall hear the answers, too.

        A rank that has no seat still asks before its deadline: how else would the others know of it who wait like it?
        """
        self._early = None
        if seated and self._last_due is not None and now >= self._last_due - OVERHEARD_SECONDS:
            self._last_due = None

    def asked(self, now: float) -> None:
        """Somebody asked who is there, and is to be answered."""
        if self._answer_at is None:
            at = now + self._rng.uniform(0, ANSWER_JITTER_SECONDS)
            self._answer_at = max(at, self._answered_at + ANSWER_GAP_SECONDS)

    def may_answer_by_unicast(self, now: float) -> bool:
        """Somebody asked by unicast: tells whether that is answered, and counts it."""
        earned = max(0.0, now - self._credited_at) * UNICAST_ANSWERS_PER_SECOND
        self._credit, self._credited_at = min(UNICAST_ANSWERS_AT_ONCE, self._credit + earned), now
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def answered(self) -> None:
        """Somebody of the same job spoke: everybody knows of it already."""
        self._answer_at = None

    def should_ask(self, now: float) -> bool:
        """Tells whether to ask now."""
        if self._early is not None and now >= self._early:
            self._early = None
            return True
        if self._last_due is not None and now >= self._last_due:
            self._last_due = None
            return True
        return False

    def should_answer(self, now: float) -> bool:
        """Tells whether to answer now."""
        if self._answer_at is None or now < self._answer_at:
            return False
        self._answer_at = None
        self._answered_at = now
        return True
