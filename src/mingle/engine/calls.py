"""Calls of other threads: each runs in the thread whose selector they wake."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable

from mingle import forksafe
from mingle.errors import suppressed


class Calls:
    """Functions that wait to be run in one thread. The selector has no data for their socket.

    Args:
        selector: of that thread.
        stack: closes the sockets.
    """

    def __init__(self, selector: selectors.BaseSelector, stack: contextlib.ExitStack) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            stack.callback(end.close)
            forksafe.register(end).setblocking(False)
        selector.register(self._reader, selectors.EVENT_READ)

    @property
    def wakeup_fd(self) -> int:
        """A descriptor that ends a wait when a byte is written to it: for `signal.set_wakeup_fd`."""
        return self._writer.fileno()

    def put(self, function: Callable[[], None]) -> None:
        """Have a function run; callable from any thread."""
        self._waiting.append(function)
        with suppressed(OSError):  # full: it will wake up anyway; closed: there is no thread to wake
            self._writer.send(b"\0")

    def run(self) -> None:
        """Run what waits."""
        with contextlib.suppress(OSError):  # empty
            while self._reader.recv(4096):
                pass
        while self._waiting:
            self._waiting.popleft()()
