"""Calls that fail as a test wants it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error, whatever its arguments."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def refusing(number: int) -> Callable[..., Any]:
    """Return a function that fails as a system call does, with that number of `errno`."""
    return raising(OSError(number, os.strerror(number)))
