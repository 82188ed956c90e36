"""Processors. In this network work takes no time, unless the processes are given a processor on which it does.

What a host does for each of a thousand ranks, and a thousand ranks that share a few cores: both are late with all that
they do, while the clocks of all who wait for them run on.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from tests.lan.world import World

START_SECONDS = 0.006
"""Until a process listens."""
EVENT_SECONDS = 0.0003
"""To serve a datagram, some bytes of a connection or a timer."""
SLICE_SECONDS = 0.003
"""How long one process may work before it is another one's turn."""


@dataclass(eq=False, slots=True)
class _Work:
    todo: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    batch: int = 0
    """How much of it is still served in this round: what was there when it began."""
    timers: Callable[[], None] | None = None
    served: bool = False
    """What had come in has been served in this round, and the timers have not."""
    queued: bool = False


class Processor:
    """Cores that processes share, in turns.

    A process works in rounds, like the real one: it serves what has come in, in its order, then its timers.
    """

    def __init__(self, world: World, cores: int = 1, *, event_seconds: float = EVENT_SECONDS) -> None:
        self.world = world
        self._event_seconds = event_seconds
        self._idle = cores
        self._queue: deque[_Work] = deque()
        self._works: dict[Hashable, _Work] = {}

    def submit(self, owner: Hashable, action: Callable[[], None], seconds: float | None = None) -> None:
        """Have something done that takes so long (None: as long as an event), in the order in which it comes in."""
        work = self._works.setdefault(owner, _Work())
        work.todo.append((self._event_seconds if seconds is None else seconds, action))
        self._enqueue(work)

    def submit_timers(self, owner: Hashable, action: Callable[[], None]) -> None:
        """Have timers served: once, however often it is said meanwhile."""
        work = self._works.setdefault(owner, _Work())
        work.timers = action
        self._enqueue(work)

    def _enqueue(self, work: _Work) -> None:
        if not work.queued:
            work.queued = True
            self._queue.append(work)
            self._begin()

    def _begin(self) -> None:
        while self._idle and self._queue:
            self._idle -= 1
            self._turn(self._queue.popleft(), self.world.now + SLICE_SECONDS)

    def _turn(self, work: _Work, until: float) -> None:
        if work.served and not work.batch:
            work.served = False
            if work.timers is not None:
                action, work.timers = work.timers, None
                self.world.after(self._event_seconds, functools.partial(self._done, work, action, until))
                return
        if not work.todo and work.timers is None:
            work.queued = False
            self._leave()
        elif self.world.now >= until:
            self._queue.append(work)
            self._leave()
        else:
            if not work.batch:
                work.batch, work.served = len(work.todo), True
            if work.batch:
                work.batch -= 1
                seconds, action = work.todo.popleft()
                self.world.after(seconds, functools.partial(self._done, work, action, until))
            else:
                self._turn(work, until)

    def _leave(self) -> None:
        self._idle += 1
        self._begin()

    def _done(self, work: _Work, action: Callable[[], None], until: float) -> None:
        action()
        self._turn(work, until)
