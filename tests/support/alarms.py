"""A signal that comes while a test waits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """Send this process SIGALRM while it is in the block; a block that ends before that gets none."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
