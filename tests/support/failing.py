"""Calls that fail as a test wants it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error, whatever its arguments."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def refusing(number: int) -> Callable[..., Any]:
    """Return a function that fails as a system call does, with that number of `errno`."""
    return raising(OSError(number, os.strerror(number)))


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Have each `open()` and `socket()` of this process fail."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
