"""The virtual clock: a heap of events, a seeded random source, and nothing that waits."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mingle.wire.datagrams import Datagram
    from tests.lan.network import Network
    from tests.lan.process import Endpoint, Process

Action = Callable[[], None]


class World:
    """Time, chance and what happens next. ``trace`` keeps a line per step when asked to."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.steps = 0
        self.processes: list[Process] = []
        self.networks: list[Network] = []
        self.counts: Counter[str] = Counter()
        self.watchers: list[Callable[[Process], None]] = []
        self.before_write: list[Callable[[Process, Endpoint, bytes], None]] = []
        """Called before a process writes bytes to another one; the process can be stopped or killed there."""
        self.on_heard: list[Callable[[Process, Datagram], None]] = []
        """Called before the machine of a process is told of a datagram."""
        self.on_multicast: list[Callable[[Process, Datagram], None]] = []
        """Called when a process sends a datagram to its group."""
        self.trace: list[str] = []
        self.tracing = tracing
        self._heap: list[tuple[float, int, Action]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)

    def new_id(self) -> int:
        """Return a number that was never used in this world."""
        return next(self._numbers)

    def identifier(self) -> bytes:
        """Return sixteen bytes for a member or a session."""
        return self.rng.randbytes(16)

    def at(self, time: float, action: Action) -> None:
        """Plans something for a time; what is planned for the same time happens in the order of planning."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), action))

    def after(self, seconds: float, action: Action) -> None:
        """Plans something for later."""
        self.at(self.now + seconds, action)

    def note(self, text: str) -> None:
        """Keep a line of what happens."""
        if self.tracing:
            self.trace.append(f"{self.now - 1000:9.4f}  {text}")

    def run(self, seconds: float = float("inf"), *, until: Callable[[], bool] | None = None) -> bool:
        """Run for so long, or until the condition holds; tell whether it does."""
        end = self.now + seconds
        if until is not None and until():
            return True
        while self._heap and self._heap[0][0] <= end:
            time, _, action = heapq.heappop(self._heap)
            self.now = time
            self.steps += 1
            action()
            if until is not None and until():
                return True
        if end != float("inf"):
            self.now = end
        return False

    def when(self, condition: Callable[[], bool], action: Action) -> None:
        """Does something once, after the first step of a process that makes a condition true."""
        pending = [action]

        def watch(process: Process) -> None:
            if pending and condition():
                # After this step, not in the midst of it.
                self.at(self.now, pending.pop())

        self.watchers.append(watch)
