"""Connections: bytes arrive in order or not at all; a cut one is noticed after ten seconds, by both ends."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mingle.network.connections import CLOSED_BY_PEER, USER_TIMEOUT_MILLISECONDS
from tests.lan.network import Barrier, Machine, Network, Route

if TYPE_CHECKING:
    from tests.lan.process import Endpoint

DEAD_SECONDS = USER_TIMEOUT_MILLISECONDS / 1000
"""How long a way may be dead until the kernel's keepalive ends the connection."""
RESET = "Connection reset by peer (ECONNRESET)"
KEEPALIVE_SECONDS = (1.0, 6.0)
"""How soon an end that says nothing learns by a probe of the kernel's that the way answers with resets."""
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
    blocked: bool = False
    """Whether nothing reaches it at present."""


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

    def peer(self, end: End) -> End:
        """Return the other end."""
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def local_address(self, end: End) -> str:
        """Return the address of an end."""
        return (self.route.near if end is self.ends[0] else self.route.far).address

    def _delay(self) -> float:
        segment = self.route.near.segment
        if segment is None or self.route.near is self.route.far:
            return 0.0001
        return self.world.rng.uniform(*segment.tcp_delay)

    @property
    def _again(self) -> tuple[float, float]:
        segment = self.route.near.segment
        return (0.01, 0.4) if segment is None else segment.tcp_again

    def write(self, end: End, data: bytes) -> None:
        """Send bytes to the other end."""
        if self._barrier(end) == "reset":
            self.world.after(self._delay(), functools.partial(self._reset, end))
        self.world.counts["bytes"] += len(data)
        if len(data) > 1 and self.world.rng.random() < CHOPPED:
            cut = self.world.rng.randrange(1, len(data))
            self._put(self.peer(end), data[:cut])
            self._put(self.peer(end), data[cut:])
        else:
            self._put(self.peer(end), data)

    def _ways(self, end: End) -> tuple[Machine, Machine]:
        return end.owner.machine, self.peer(end).owner.machine

    def _barrier(self, end: End) -> Barrier | None:
        """What a firewall does with what this end sends."""
        sender, receiver = self._ways(end)
        return None if sender is receiver else self.route.barrier(sender, receiver)

    def _reset(self, end: End) -> None:
        """A firewall answers for the other end."""
        if not end.closed and self._barrier(end) == "reset":
            self._end(end, RESET)
            later = self.world.rng.uniform(*KEEPALIVE_SECONDS)
            self.world.after(later, functools.partial(self._probe, self.peer(end)))

    def _probe(self, end: End) -> None:
        """The other end is no more, and this one was not told: the kernel's keepalive asks until it is."""
        if end.closed:
            return
        if self.route.alive:
            self._end(end, RESET)
        else:
            self.world.after(self.world.rng.uniform(*KEEPALIVE_SECONDS), functools.partial(self._probe, end))

    def cut_off(self) -> None:
        """Reset both ends, as a middlebox does that has forgotten the connection."""
        for end in self.ends:
            if not end.closed:
                self._end(end, RESET)

    def hang_up(self, end: End, reason: str = CLOSED_BY_PEER) -> None:
        """Close from one end; what was written before still arrives, then the end does."""
        if end.closed:
            return
        end.closed = True
        end.incoming.clear()
        self._put(self.peer(end), reason)

    def _put(self, end: End, item: bytes | str) -> None:
        if end.closed:
            self._forget_if_over()
            return
        end.latest = max(end.latest, self.world.now + self._delay())
        end.incoming.append((end.latest, item))
        self.world.at(end.latest, functools.partial(self._pump, end))

    def _pump(self, end: End) -> None:
        receiver, sender = self._ways(end)
        passes = self.route.passes(sender, receiver)
        while end.incoming and not end.closed and passes and end.incoming[0][0] <= self.world.now:
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
        for end in self.ends:
            if not end.closed and self._barrier(end) == "reset":
                self.world.after(self.world.rng.uniform(*KEEPALIVE_SECONDS), functools.partial(self._reset, end))
        for end in self.ends:
            receiver, sender = self._ways(end)
            passes = self.route.passes(sender, receiver)
            if passes and end.blocked:
                # What was lost is sent again, after some time.
                end.latest = max(end.latest, self.world.now + self.world.rng.uniform(*self._again))
                end.incoming = deque((end.latest, item) for _, item in end.incoming)
                self.world.at(end.latest, functools.partial(self._pump, end))
            end.blocked = not passes
        if self.route.alive:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = self.world.now
            self.world.after(DEAD_SECONDS, functools.partial(self._give_up, self.world.now))

    @property
    def is_dead(self) -> bool:
        """Whether nothing passes any more, which its ends are not told for `DEAD_SECONDS`."""
        return self._dead_since is not None

    def _give_up(self, since: float) -> None:
        if self._dead_since == since:
            for end in self.ends:
                if not end.closed:
                    self.network.timed_out_at = self.world.now
                    self._end(end, "Connection timed out")
            self.network.connections.discard(self)
