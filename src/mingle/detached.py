"""Detached calls, which can block beyond every deadline, and the start of a thread.

An operation on a TCPStore whose host's link was cut blocks for minutes, whatever timeout it was given (observed with
torch 2.13: `add`, `get`, `check`, `compare_set` and `wait(3 s)` were all still blocked after 100 s). Nothing in Python
ends such a call. So it is made in a daemon thread, and its caller can stop waiting.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mingle.errors import MingleError

_T = TypeVar("_T")

LOOK_SECONDS = 0.05
"""How often `run` checks whether to go on waiting: a thread can't wait for two events at once."""


class AbandonedError(Exception):
    """The caller has stopped waiting for a call, which can still be running; its outcome is ignored."""


def run(function: Callable[[], _T], name: str, given_up: Callable[[], bool]) -> _T:
    """Call a function in a daemon thread and wait for it; an exception of a signal handler ends the waiting at once.

    Args:
        function: what can block.
        name: what it does.
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

    start(thread(name, call))
    while not ended.wait(LOOK_SECONDS):
        if given_up() and not ended.is_set():
            raise AbandonedError
    if errors:
        raise errors.pop()  # not kept: its traceback holds this frame, which would be a cycle
    return results.pop()


def thread(name: str, function: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Return a thread for calls that can block beyond every deadline; its name tells that it can be left behind."""
    return threading.Thread(target=function, args=arguments, name=f"mingle-abandoned-{name}", daemon=True)


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
