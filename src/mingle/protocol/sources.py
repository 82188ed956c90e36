"""Accepted connections by the address they came from, of which a flood gives up its own first."""

from __future__ import annotations

import heapq


class Sources:
    """Connections by their source address, in order of arrival."""

    def __init__(self) -> None:
        self._source_of: dict[int, str] = {}
        self._held: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def too_many(self, source: str, most: int) -> list[int]:
        """Return which connections must go before one of this address comes.

        Each time it is the oldest one of the address that holds the most, the coming one counted: whoever has few
        addresses displaces its own connections, however fast it opens them, and not one that has just come to prove
        itself. Of addresses that hold the same number it is the one that has been here for longest.

        Args:
            source: the address of the coming connection.
            most: how many can stay, the coming one included, which always can.
        """
        excess = len(self) + 1 - max(1, most)
        if excess <= 0:
            return []
        heaviest = [
            (-len(held) - (address == source), order, list(reversed(held)))
            for order, (address, held) in enumerate(self._held.items())
        ]
        heapq.heapify(heaviest)
        gone: list[int] = []
        while len(gone) < excess:
            count, order, held = heapq.heappop(heaviest)
            gone.append(held.pop())
            if held:
                heapq.heappush(heaviest, (count + 1, order, held))
        return gone

    def add(self, conn: int, source: str) -> None:
        """Take note of a connection."""
        self._source_of[conn] = source
        self._held.setdefault(source, {})[conn] = None

    def discard(self, conn: int) -> bool:
        """Forget a connection; return whether it was known."""
        source = self._source_of.pop(conn, None)
        if source is None:
            return False
        held = self._held[source]
        del held[conn]
        if not held:
            del self._held[source]
        return True
