"""Detached calls, which can block beyond every deadline, and a worker thread that is started before it is needed.

An operation on a TCPStore whose host's link was cut blocks for minutes, whatever timeout it was given (observed with
torch 2.13: `add`, `get`, `check`, `compare_set` and `wait(3 s)` were all still blocked after 100 s). Nothing in Python
ends such a call. So it is made in a daemon thread, and its caller can stop waiting.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from mingle.errors import MingleError

_T = TypeVar("_T")
Work: TypeAlias = Callable[[], object]

LOOK_SECONDS = 0.05
"""How often `run` checks whether to go on waiting: a thread can't wait for two events at once."""
IDLE_NAME = "mingle-idle"
"""The name of a pre-started worker's thread while it has nothing to do."""
INTERRUPTED_SECONDS = 0.5
"""How long an interrupted start of a thread can take to show whether the thread exists."""


class AbandonedError(Exception):
    """The caller has stopped waiting for a call, which can still be running; its outcome is ignored."""


def run(function: Callable[[], _T], name: str, given_up: Callable[[], bool]) -> _T:
    """Call a function in a daemon thread and wait for it; an exception of a signal handler ends the waiting at once.

    Args:
        function: what can block.
        name: what it does. It is part of the thread's name, which tells that the thread can be left behind.
        given_up: whether to stop waiting.

    Raises:
        AbandonedError: ``given_up()`` became true first.
    """
    results: list[_T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            errors.append(error)
        finally:
            ended.set()

    start(threading.Thread(target=call, name=f"mingle-abandoned-{name}", daemon=True))
    while not ended.wait(LOOK_SECONDS):
        if given_up() and not ended.is_set():
            raise AbandonedError
    if errors:
        raise errors.pop()  # not kept: its traceback holds this frame, which would be a cycle
    return results.pop()


def start(thread: threading.Thread) -> None:
    """Start a thread; what a signal handler raises meanwhile is raised, whatever it breaks in `threading`."""
    handled = sys.exc_info()[1]
    try:
        thread.start()
    except (RuntimeError, KeyError) as error:
        # CPython's Condition, on which start() waits, can fail when it is interrupted: "release unlocked lock".
        if (raised := error.__context__) is not None and raised is not handled:
            raise raised from None
        raise


def start_explained(thread: threading.Thread) -> None:
    """Start a thread that the caller cannot go on without.

    Raises:
        MingleError: the system allows no more threads.
    """
    try:
        start(thread)
    except RuntimeError as error:
        raise MingleError.explain(
            f"a thread of the discovery can't be started: {error}",
            cause="the limit of threads of this user or of its container is reached",
            remedy="look at `ulimit -u`, at the pids limit of the container, and at how many threads the job uses.",
        ) from error


class PreStartedWorker:
    """A daemon thread that exists before it has work. It does one thing at a time, and is idle again after it.

    To start a thread means to wait until the scheduler has run it once. Where there are more ranks than cores that
    takes milliseconds, and a rank would spend them when all others have been found: before it proves the store, and
    before it returns from its call. So the thread is started while the rank waits for the others anyway.

    Work can block beyond every deadline. A thread that is still at work when there is more to do is left to itself,
    and a new one takes its place. Not thread-safe: one thread hands out work.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._ended = False

    def prepare(self) -> None:
        """Start the thread, unless it exists."""
        if self._worker is None:
            self._worker = worker = _Worker()  # known before it is started: Ctrl-C may come between any two steps
            try:
                start_explained(worker.thread)
            except BaseException:
                self._worker = None
                worker.give_up()
                raise

    def run(self, name: str, work: Work) -> threading.Thread:
        """Do ``work`` in the idle thread, or in a new one, and return the thread.

        Args:
            name: the thread's name for that time.
            work: what to do. An exception of it ends the thread, as in every thread.
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
        """End the thread as soon as it is idle; wait for that only if it is idle now."""
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
        self.thread = threading.Thread(target=self._run, name=IDLE_NAME, daemon=True)

    def give_up(self) -> None:
        """End the thread after an interrupted start, which the thread can have survived: it would stay for ever."""
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
            self.thread.name = IDLE_NAME
            self.busy = False
