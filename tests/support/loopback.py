"""What tests on `lo` share: ports, job ids, and waiting for what gives no notice."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_numbers = itertools.count()


def job_name(what: str) -> str:
    """Return a job id that no other test uses, not even one that runs at the same time."""
    return f"{what} {os.getpid()}.{next(_numbers)}"


@contextlib.contextmanager
def busy_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that refuses, and that nobody else gets meanwhile."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def answers(port: int, address: str = "127.0.0.1") -> bool:
    """Whether anybody listens at a TCP port."""
    try:
        socket.create_connection((address, port), timeout=30).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: the listener was closed during the handshake
        return False
    return True


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for what gives no notice: the end of a native thread, a step of a loop in a thread of its own."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.005)


def longer(ask: Callable[[float], T], enough: Callable[[T], object]) -> T:
    """Ask with a limit in seconds, then with longer ones, until the answer is enough: a busy machine hears late."""
    for seconds in (1.0, 4.0, 16.0):
        answer = ask(seconds)
        if enough(answer):
            break
    return answer
