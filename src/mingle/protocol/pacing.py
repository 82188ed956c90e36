"""When to speak on the network: the timers of those who seek and of the one who offers. No sockets, no clock.

The rules, and what each is for:

* A seeker asks, in a large job after a short random delay, then ever more rarely. A question of the same job heard by
  multicast stands for its own: ten thousand waiting ranks together ask about as often as a few.
* A host speaks in a burst (single packets get lost), then at a slow period until its session is sealed, so
  that a seeker whose questions are lost still hears it. It answers questions to everybody at once, and no
  faster than a limit: the cost on the wire never grows with the square of anything.
"""

from __future__ import annotations

import random

FIRST_SEEK_SECONDS_PER_RANK = 0.0002
FIRST_SEEK_FREE_RANKS = 16
"""So few may all ask at once; each rank beyond them spreads the first questions of all."""
FIRST_SEEK_MAX_SECONDS = 0.5
SEEK_INTERVAL_SECONDS = 0.05
SEEK_INTERVAL_SECONDS_PER_RANK = 0.0002
"""A host that all of a large job call at once answers later; to ask again would be one more thing to read, for all."""
SEEK_GROWTH = 1.6
SEEK_INTERVAL_MAX_SECONDS = 1.0
SEEK_INTERVAL_MAX_SECONDS_PER_RANK = 0.004
"""The longest interval, if that is more: those who wait for a host are told of it anyway, once a second."""

BURST_SECONDS = (0.0, 0.03, 0.1, 0.25, 0.6, 1.2)
"""When a host speaks after its start, without being asked."""
OFFER_PERIOD_SECONDS = 1.0
"""How often it speaks after that, until the session is sealed."""
ANSWER_SPACING_SECONDS = 0.002
"""The least time between two OFFERs: what is asked meanwhile is answered by one."""
ANSWER_GAP_SECONDS = 0.02
"""So far apart are those of an open session in the long run …"""
ANSWER_CREDIT = 8
"""… of which so many may come at once: ranks that start together ask one after another, each when it listens."""
SEALED_ANSWER_GAP_SECONDS = 0.5
"""So far apart are those of a sealed one, at most two a second in the long run …"""
SEALED_ANSWER_CREDIT = 3
"""… of which so many may come at once: whoever asks is answered before it forms the job a second time."""


class Seeker:
    """Decides when a rank asks for its host."""

    def __init__(self, world_size: int, now: float, rng: random.Random) -> None:
        self._rng = rng
        beyond = max(0, world_size - FIRST_SEEK_FREE_RANKS)
        self._first = min(FIRST_SEEK_SECONDS_PER_RANK * beyond, FIRST_SEEK_MAX_SECONDS)
        self._longest = max(SEEK_INTERVAL_MAX_SECONDS, SEEK_INTERVAL_MAX_SECONDS_PER_RANK * world_size)
        shortest = SEEK_INTERVAL_SECONDS + SEEK_INTERVAL_SECONDS_PER_RANK * world_size
        self._shortest = self._interval = min(shortest, SEEK_INTERVAL_MAX_SECONDS)
        self._next: float | None = None
        self.resume(now)

    def next_timer(self) -> float | None:
        """When to ask next; None while there is nothing to look for."""
        return self._next

    def resume(self, now: float) -> None:
        """Starts (again) to ask, quickly first."""
        self._interval = self._shortest
        self._next = now + self._rng.uniform(0, self._first)

    def pause(self) -> None:
        """Stops asking: the rank has a host."""
        self._next = None

    def heard_seek(self, now: float) -> None:
        """Somebody asked everybody for the same job: as good as having asked."""
        if self._next is not None:
            self._schedule(now)

    def should_ask(self, now: float) -> bool:
        """Tells whether to ask now; if so, the next time is set."""
        if self._next is None or now < self._next:
            return False
        self._schedule(now)
        return True

    def _schedule(self, now: float) -> None:
        # Jitter of a quarter keeps seekers that started together from asking together for ever.
        self._next = now + self._interval * self._rng.uniform(0.75, 1.25)
        self._interval = min(self._interval * SEEK_GROWTH, self._longest)


class Announcer:
    """Decides when a host speaks."""

    def __init__(self, now: float) -> None:
        self.sealed = False
        self._last = float("-inf")
        self._debt = float("-inf")
        """The time by which all that was said is paid for (a leaky bucket)."""
        self._asked = False
        self._burst: list[float] = []
        self.burst(now)

    def burst(self, now: float) -> None:
        """Begins a fresh burst: at the start, and when a session takes members again."""
        self._burst = [now + offset for offset in BURST_SECONDS]

    def asked(self) -> None:
        """Somebody looks for this job, or claims to host it."""
        self._asked = True

    def next_timer(self) -> float | None:
        """When to speak next; None: only when asked."""
        gap, credit = self._allowance
        soonest = max(self._last + ANSWER_SPACING_SECONDS, self._debt - (credit - 1) * gap)
        if self._asked:
            return soonest
        if self.sealed:
            return None
        return max(self._burst[0], soonest) if self._burst else self._last + OFFER_PERIOD_SECONDS

    @property
    def _allowance(self) -> tuple[float, int]:
        if self.sealed:
            return SEALED_ANSWER_GAP_SECONDS, SEALED_ANSWER_CREDIT
        return ANSWER_GAP_SECONDS, ANSWER_CREDIT

    def should_speak(self, now: float) -> bool:
        """Tells whether to speak now; if so, the next time is set."""
        due = self.next_timer()
        if due is None or now < due:
            return False
        # An answer also serves for the part of the burst that was due by now.
        self._burst = [at for at in self._burst if at > now]
        self._asked = False
        self._last = now
        self._debt = max(now, self._debt) + self._allowance[0]
        return True
