"""Accepted connections by the address they came from, of which a flood gives up its own first."""

from __future__ import annotations


class Sources:
    """Connections by their source address, in order of arrival."""

    def __init__(self) -> None:
        self._source_of: dict[int, str] = {}
        self._held: dict[str, dict[int, None]] = {}
        self._by_number: dict[int, dict[str, None]] = {}
        """Addresses by how many connections they hold, so that a flood from thousands of them costs no search: the
        numbers that differ are few (of 2,048 connections at most 63)."""

    def __len__(self) -> int:
        return len(self._source_of)

    def make_room(self, source: str, places: int) -> list[int]:
        """Forget the connections that must go before one of this address comes, and return them.

        Each is the oldest one of the address that holds the most, the coming one counted: of N addresses each keeps
        its share of the places, ``places // N``, however many connections the others open and how fast. Of addresses
        that hold the same number it is the one that has held so many for longest.

        Args:
            source: the address of the coming connection.
            places: how many connections can stay, the coming one included, which always can.
        """
        gone = []
        while self._source_of and len(self) >= places:
            heaviest = self._by_number[max(self._by_number)]
            address = source if source in heaviest else next(iter(heaviest))
            gone.append(next(iter(self._held[address])))
            self.discard(gone[-1])
        return gone

    def add(self, conn: int, source: str) -> None:
        """Take note of a connection."""
        self._source_of[conn] = source
        held = self._held.setdefault(source, {})
        held[conn] = None
        self._renumber(source, len(held) - 1, len(held))

    def discard(self, conn: int) -> bool:
        """Forget a connection; return whether it was known."""
        source = self._source_of.pop(conn, None)
        if source is None:
            return False
        held = self._held[source]
        del held[conn]
        if not held:
            del self._held[source]
        self._renumber(source, len(held) + 1, len(held))
        return True

    def _renumber(self, source: str, before: int, now: int) -> None:
        if before:
            alike = self._by_number[before]
            del alike[source]
            if not alike:
                del self._by_number[before]
        if now:
            self._by_number.setdefault(now, {})[source] = None
