"""What was dropped of what came in: counted by reason, and explained where the reason is a failure of ours."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable

from mingle.errors import MingleError

LOGGED_FAULTS = 16
"""The number of places in the code whose failures on input are logged, once each."""


class Rejections:
    """Counts what is dropped. No input from outside ends a loop.

    Args:
        say: shows a failure to people.
    """

    def __init__(self, say: Callable[[int, str, BaseException | None], None]) -> None:
        self.counts: Counter[str] = Counter()
        """How much was dropped, by reason."""
        self._say = say
        self._places: set[tuple[str, int]] = set()

    def fault(self, error: Exception, what: str) -> None:
        """Count input that was dropped because its handler raised; log it once for each place in the code."""
        self.counts["fault"] += 1
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        place = (frame.f_code.co_filename, line)
        if place in self._places or len(self._places) >= LOGGED_FAULTS:
            return
        self._places.add(place)
        explained = MingleError.explain(
            f"{what} could not be handled and was dropped ({type(error).__name__}: {error}); "
            "the discovery goes on, and further failures at the same place are only counted",
            cause="a defect in mingle, which a process on the network or on this machine can have provoked",
            remedy="report the traceback.",
        )
        self._say(logging.ERROR, str(explained), error)
