"""What the tests of the transport share: take datagrams with a deadline, and find descriptors left open."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from mingle.network.transport import Received, Transport


def gather(transport: Transport, count: int, *, seconds: float = 30.0) -> list[Received]:
    """What the transport receives until it has `count` datagrams or the time is over."""
    found: list[Received] = []
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for opened in transport.sockets():
            selector.register(opened, selectors.EVENT_READ)
        while len(found) < count and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                found += transport.receive(key.fileobj)
    return found


def nothing_more(transport: Transport) -> bool:
    """Whether nothing waits; on `lo` and on veth pairs a datagram has arrived when its sending returns."""
    return not any(transport.receive(opened) for opened in transport.sockets())


@contextlib.contextmanager
def no_descriptor_leaks() -> Iterator[None]:
    def open_descriptors() -> set[str]:
        directory = Path("/proc/self/fd")
        # The descriptor that reads the directory is gone when it is asked for.
        return {f"{fd.name} {fd.readlink()}" for fd in directory.iterdir() if os.path.lexists(fd)}

    # Not left to the collector: what it would close counts as leaked.
    gc.collect()
    gc.disable()
    try:
        before = open_descriptors()
        yield
        assert open_descriptors() - before == set()
    finally:
        gc.enable()
