"""When a host opens its store before all are in, and whom it tells: pure.

Between the last rank's coming and GO every rank has to reach the store. Those that wait for the last one have time for
that: once nobody has come for a moment, the store is opened where the members so far would have it, and they connect.
That binds nobody. SEALED alone says where the store is, and what is acknowledged was read there after SEALED.
"""

from __future__ import annotations

from collections.abc import Iterable

AHEAD_SECONDS = 0.25
"""How long nobody must have come: where ranks come one after another each of them may change the place."""


class StoreAhead:
    """Decides when, and remembers who was told.

    Args:
        wanted: whether this is done at all.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.due: float | None = None
        """When to ask :meth:`is_due`."""
        self.address = ""
        """Where the store was asked for last."""
        self._wanted = wanted
        self._told: set[tuple[int, str, int]] = set()
        """Who of those that are here was told what, last."""

    def came(self, now: float) -> None:
        """Somebody has come: wait for a quiet moment."""
        if self._wanted:
            self.due = now + AHEAD_SECONDS

    def reopened(self, now: float) -> None:
        """A seal was called off: the connections that were made for it are used up."""
        self._told.clear()
        self.came(now)

    def is_due(self, now: float) -> bool:
        """Tells whether to open the store now; once after somebody came."""
        if self.due is None or now < self.due:
            return False
        self.due = None
        return True

    def to_tell(self, conns: Iterable[int], port: int) -> list[int]:
        """Returns those that have not been told yet that the store listens at this port; now they are."""
        before, self._told = self._told, {(conn, self.address, port) for conn in conns}
        return sorted(conn for conn, _, _ in self._told - before)
