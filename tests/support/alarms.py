"""A signal that comes while a test waits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """Send this process SIGALRM while it is in the block; a block that ends before that gets none."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextlib.contextmanager
def alarm_is_passed_on() -> Iterator[Callable[..., Any]]:
    """Make a call that SIGALRM interrupts; the block must pass on what the application's handler raises.

    That is a TimeoutError, the usual one of a deadline. It is an OSError as well, as each error of a socket is.
    """

    def alarmed(*_: object) -> None:
        raise TimeoutError("the alarm")

    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        with pytest.raises(TimeoutError, match="the alarm") as caught:
            yield lambda *_, **__: signal.raise_signal(signal.SIGALRM)
        assert type(caught.value) is TimeoutError
    finally:
        signal.signal(signal.SIGALRM, before)
