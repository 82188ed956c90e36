"""The side of a rank: what runs in the forked child, and the records that it sends to the test."""

from __future__ import annotations

import faulthandler
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from .errors import LabError

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of its Python threads to its stderr and go on."""


@dataclass(frozen=True)
class Event:
    """What a rank reported: a name, data, and the time of the monotonic clock that all ranks share."""

    name: str
    data: Mapping[str, Any]
    time: float = field(default_factory=time.monotonic)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]


@dataclass(frozen=True)
class Returned:
    """The function of a rank returned."""

    value: Any


@dataclass(frozen=True)
class RaisedError:
    """What the function of a rank raised, as text and plain values."""

    name: str
    """The name of the class, without its module."""
    message: str
    attributes: Mapping[str, Any]
    """What the exception object carries; a value that cannot be pickled comes as its repr."""
    bases: tuple[str, ...]
    """The names of all classes that an ``except`` clause could have caught it by."""
    traceback: str


_channel: Connection | None = None
_sending = threading.Lock()


def report(event: str, /, **data: Any) -> None:
    """Send an event from a rank's function to the test at once; any thread may call.

    Raises:
        LabError: the caller is not in a rank.
    """
    if _channel is None:
        raise LabError(
            f"report({event!r}) was called outside a rank, where no test listens: call it in a function "
            "that Host.start() runs"
        )
    _send(_channel, Event(event, data))


def run_rank(channel: Connection, call: bytes) -> int:
    """Run the pickled call in this process, send how it ended, and return the exit status."""
    global _channel
    _channel = channel
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    try:
        function, args, kwargs = pickle.loads(call)
        _send(channel, Returned(function(*args, **kwargs)))
    except BaseException as error:  # whatever it is, the test judges it
        _send(channel, _describe(error))
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _send(channel: Connection, record: Event | Returned | RaisedError) -> None:
    message = pickle.dumps(record)  # outside the lock, and before the first byte is sent: it may fail
    with _sending:
        channel.send_bytes(message)


def _describe(error: BaseException) -> RaisedError:
    return RaisedError(
        name=type(error).__name__,
        message=str(error),
        attributes={name: _plain(value) for name, value in vars(error).items()},
        bases=tuple(base.__name__ for base in type(error).__mro__),
        traceback="".join(traceback.format_exception(error)),
    )


def _plain(value: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # pickling runs the value's own code, which may raise anything
        return repr(value)
    return value
