"""A process's other side of a ping, in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from mingle.config.settings import Network
from mingle.observe.pinger import Pinger


@contextlib.contextmanager
def answering(network: Network, job: str = "") -> Iterator[Pinger]:
    """A `doctor --serve`, or somebody else's ping, until the block ends."""
    over = threading.Event()

    class _UntilOver(Exception):
        pass

    def look() -> None:
        if over.is_set():
            raise _UntilOver

    def serve() -> None:
        with contextlib.suppress(_UntilOver):
            pinger.run(until=time.monotonic() + 150, each=look)

    with Pinger(network, job, interval=0.1) as pinger:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield pinger
        finally:
            over.set()
            thread.join()
