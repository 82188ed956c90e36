"""A thread that is there before there is work for it.

Starting a thread means waiting until the scheduler has run it once. Where there are more ranks than cores that takes
milliseconds, and a rank would spend them when all others have been found already: before it proves the store, and
before it returns from its call. So the thread is started while there is somebody to wait for anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

Work: TypeAlias = Callable[[], object]

NAME = "mingle-spare"
"""The thread's, while it has nothing to do."""
INTERRUPTED_SECONDS = 0.5
"""How long a start that was interrupted may take to show whether there is a thread."""


class SpareThread:
    """Daemon threads, one at a time: the spare one takes what is to be done, and is spare again when that is done.

    Work may block beyond every deadline. A thread that is still at work when there is more to do is left to itself,
    and a new one takes its place. Not thread-safe: one thread hands out work.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._ended = False

    def prepare(self) -> None:
        """Starts the thread, unless it is there."""
        if self._worker is None:
            self._worker = worker = _Worker()  # known before it is started: Ctrl-C may come between any two steps
            try:
                worker.thread.start()
            except BaseException as error:
                self._worker = None
                worker.give_up()
                if isinstance(error.__context__, KeyboardInterrupt):
                    # CPython's Condition, on which start() waits, may fail itself when it is interrupted.
                    raise error.__context__ from None
                raise

    def run(self, name: str, work: Work) -> threading.Thread:
        """Has ``work`` done by the spare thread, or by a new one, and returns the thread.

        Args:
            name: the thread's for that time.
            work: what is to be done. What it raises ends the thread, as in every thread.
        """
        if self._worker is not None and self._worker.busy:
            self._worker.let_go()
            self._worker = None
        self.prepare()
        assert self._worker is not None
        self._worker.take(name, work)
        if self._ended:
            self._worker.let_go()
        return self._worker.thread

    def end(self) -> None:
        """Ends the thread as soon as it has nothing to do; waits for that only if it has nothing to do now."""
        self._ended = True
        if self._worker is not None:
            self._worker.let_go()
            if not self._worker.busy and self._worker.thread is not threading.current_thread():
                self._worker.join()


class _Worker:
    def __init__(self) -> None:
        self.busy = False
        self._errands: SimpleQueue[tuple[str, Work] | None] = SimpleQueue()
        self._runs = threading.Event()
        self.thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    def give_up(self) -> None:
        """Its start was interrupted, most likely while the thread came up: an idle one would stay for ever."""
        self.let_go()
        if self._runs.wait(INTERRUPTED_SECONDS):
            self.thread.join()

    def join(self) -> None:
        if self.thread.ident is not None:  # else it was never started
            self.thread.join()

    def take(self, name: str, work: Work) -> None:
        self.busy = True
        self._errands.put((name, work))

    def let_go(self) -> None:
        self._errands.put(None)

    def _run(self) -> None:
        self._runs.set()
        while errand := self._errands.get():
            self.thread.name, work = errand
            work()
            self.thread.name = NAME
            self.busy = False
