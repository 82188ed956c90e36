"""What is said to a group by IPv4 and by IPv6 reaches a host with both twice: the second one is told from the first.

To decode a datagram and let the machine hear it is most of what it costs, and in a large job all hear all.
"""

from __future__ import annotations

from mingle.network.transport import Received
from mingle.network.udp import Version

TOGETHER_SECONDS = 0.02
"""They are sent one right after the other; nobody says the same again as soon as this of his own will
(:data:`mingle.protocol.pacing.SEEK_INTERVAL_SECONDS`, less its jitter)."""
REMEMBERED = 64


class Twins:
    """The multicasts of the last moment."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, bytes], tuple[float, Version]] = {}

    def is_second(self, received: Received, now: float) -> bool:
        """Tells whether the same has just come on this interface by the other version of IP."""
        if not received.multicast:
            return False
        at, version = self._heard.get((received.interface, received.data), (now, received.family))
        return version != received.family and now - at < TOGETHER_SECONDS

    def note(self, received: Received, now: float) -> None:
        """Remembers a valid datagram."""
        if received.multicast:
            if len(self._heard) >= REMEMBERED:
                self._heard.clear()
            self._heard[received.interface, received.data] = now, received.family
