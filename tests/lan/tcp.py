"""Connections: bytes arrive in order or not at all; a cut one is noticed after ten seconds, by both ends."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mingle.network.connections import USER_TIMEOUT_MILLISECONDS
from tests.lan.network import Network, Route

if TYPE_CHECKING:
    from tests.lan.process import Endpoint

DEAD_SECONDS = USER_TIMEOUT_MILLISECONDS / 1000
"""How long a way may be dead until the kernel's keepalive ends the connection."""
CHOPPED = 0.1
"""How often what was written at once arrives in two parts."""


@dataclass(eq=False, slots=True)
class End:
    """One end of a connection: what is on its way to it."""

    owner: Endpoint
    conn: int
    incoming: deque[tuple[float, bytes | str]] = field(default_factory=deque)
    """Bytes, or the reason of the end, each with the time before which it can't arrive."""
    latest: float = 0.0
    closed: bool = False


class Connection:
    """Two ends and the way between them."""

    def __init__(self, network: Network, route: Route, caller: End, called: End) -> None:
        self.network = network
        self.world = network.world
        self.route = route
        self.ends = (caller, called)
        self.number = self.world.new_id()
        self._dead_since: float | None = None
        self.world.counts["connections"] += 1
        network.connections.add(self)

    def _peer(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def _delay(self) -> float:
        segment = self.route.near.segment
        if segment is None or self.route.near is self.route.far:
            return 0.0001
        return self.world.rng.uniform(*segment.tcp_delay)

    def write(self, end: End, data: bytes) -> None:
        """Sends bytes to the other end."""
        self.world.counts["bytes"] += len(data)
        if len(data) > 1 and self.world.rng.random() < CHOPPED:
            cut = self.world.rng.randrange(1, len(data))
            self._put(self._peer(end), data[:cut])
            self._put(self._peer(end), data[cut:])
        else:
            self._put(self._peer(end), data)

    def hang_up(self, end: End, reason: str = "the other side closed the connection") -> None:
        """Closes from one end; what was written before still arrives, then the end does."""
        if end.closed:
            return
        end.closed = True
        end.incoming.clear()
        self._put(self._peer(end), reason)

    def _put(self, end: End, item: bytes | str) -> None:
        if end.closed:
            self._forget_if_over()
            return
        end.latest = max(end.latest, self.world.now + self._delay())
        end.incoming.append((end.latest, item))
        self.world.at(end.latest, functools.partial(self._pump, end))

    def _pump(self, end: End) -> None:
        while end.incoming and not end.closed and self.route.alive and end.incoming[0][0] <= self.world.now:
            _, item = end.incoming.popleft()
            if isinstance(item, str):
                self._end(end, item)
            else:
                end.owner.tcp_received(end.conn, item)

    def _end(self, end: End, reason: str) -> None:
        end.closed = True
        end.incoming.clear()
        end.owner.tcp_closed(end.conn, reason)
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if all(end.closed for end in self.ends):
            self.network.connections.discard(self)

    def way_changed(self) -> None:
        """The way may have died, or live again."""
        if self.route.alive:
            if self._dead_since is not None:
                self._dead_since = None
                for end in self.ends:
                    # What was lost is sent again, after some time.
                    end.latest = max(end.latest, self.world.now + self.world.rng.uniform(0.01, 0.4))
                    end.incoming = deque((end.latest, item) for _, item in end.incoming)
                    self.world.at(end.latest, functools.partial(self._pump, end))
        elif self._dead_since is None:
            self._dead_since = self.world.now
            self.world.after(DEAD_SECONDS, functools.partial(self._give_up, self.world.now))

    def _give_up(self, since: float) -> None:
        if self._dead_since == since:
            for end in self.ends:
                if not end.closed:
                    self._end(end, "Connection timed out")
            self.network.connections.discard(self)
