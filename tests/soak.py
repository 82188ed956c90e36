"""How often a scenario runs: a few times in the test suite, as often as the promises count in ``make soak``."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def soaking() -> bool:
    """Whether this is ``make soak``."""
    return os.environ.get("MINGLE_SOAK") == "1"


def repeated(times: int, *, soak: int) -> range:
    """Seeds to run: ``times`` of them, or ``soak`` in ``make soak``."""
    return range(soak if soaking() else times)


def chosen(always: list[T], *, soak: list[T]) -> list[T]:
    """Scenarios to run: one of each kind in the test suite, and those besides in ``make soak``."""
    return [*always, *soak] if soaking() else always
