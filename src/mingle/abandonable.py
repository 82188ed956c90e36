"""Calls that may block beyond every deadline, made in a thread that can be left to itself.

An operation on a TCPStore whose host's link was cut blocks for minutes, whatever timeout it was given (seen with torch
2.13: `add`, `get`, `check`, `compare_set` and `wait(3 s)` were all still blocked after 100 s). Nothing in Python ends
it, so who must go on makes it in a daemon thread and stops waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

LOOK_SECONDS = 0.05
"""How often `Call.outcome` looks whether it shall go on waiting: a thread can't wait for two events at once."""


class AbandonedError(Exception):
    """A call was left to itself; it may still be running, and its outcome is nobody's."""


class Call(Generic[_T]):
    """One call, running in a daemon thread from the moment on that this is made."""

    def __init__(self, function: Callable[[], _T], name: str) -> None:
        self._function = function
        self._ended = threading.Event()
        self._result: list[_T] = []
        self._error: BaseException | None = None
        # The name tells what may be left behind from what must not.
        threading.Thread(target=self._run, name=f"mingle-abandoned-{name}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            self._error = error
        finally:
            self._ended.set()

    def outcome(self, given_up: Callable[[], bool]) -> _T:
        """Waits for the call and returns or raises what it did; a signal's exception ends the waiting at once.

        Raises:
            AbandonedError: ``given_up()`` became true first.
        """
        while not self._ended.wait(LOOK_SECONDS):
            if given_up() and not self._ended.is_set():
                raise AbandonedError
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds this frame: a cycle otherwise
        return self._result.pop()


def run(function: Callable[[], _T], name: str, given_up: Callable[[], bool]) -> _T:
    """Calls ``function`` in a daemon thread and waits for it, as `Call.outcome` does."""
    return Call(function, name).outcome(given_up)
