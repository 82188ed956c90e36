"""Proving that an agent is dead: the address of its control port refuses. Pure.

Nobody who is cut off would refuse: a refusal is a packet of that very machine, on which nobody listens at that port any
more (RFC 9293, section 3.10.7.1). The control port is held for as long as the agent lives, whatever it hosts or joins.
Silence, and a connection that stands, prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mingle.rules.machine import Dial, Effect, Hangup, NewId
from mingle.wire.frames import Node

REFUSED = "ECONNREFUSED"
"""What the reason of a refused connection says (:mod:`mingle.network.connections`)."""
ASK_SECONDS = 2.0
"""How often an agent that is missed is tried."""
ANSWER_SECONDS = 1.0
"""How long one try may take."""


@dataclass(slots=True)
class _Inquiry:
    node: Node
    again_at: float
    conn: int | None = None
    deadline: float = 0.0


@dataclass(slots=True)
class Obituaries:
    """Tries those that are missed. ``dead`` gathers who is proved dead, by member id, and since when."""

    new_id: NewId
    effects: list[Effect]
    own_addresses: frozenset[str]
    machine: bytes
    """Our own mark: an address of ours in a view of another machine is that machine's, and says nothing here."""
    dead: dict[bytes, float] = field(default_factory=dict)
    _inquiries: dict[bytes, _Inquiry] = field(default_factory=dict)

    def inquire(self, missed: Iterable[Node], now: float) -> None:
        """These are missed, and nobody else."""
        wanted = {node.member: node for node in missed if self._can_be_asked(node)}
        for member in [each for each in self._inquiries if each not in wanted]:
            self._stop(self._inquiries.pop(member))
        for member, node in wanted.items():
            if member not in self._inquiries:
                self._inquiries[member] = _Inquiry(node, again_at=now)
        self.handle_timer(now)

    def _can_be_asked(self, node: Node) -> bool:
        asked = node.port > 0 and node.member not in self.dead
        return asked and (node.address not in self.own_addresses or node.machine == self.machine)

    def _stop(self, inquiry: _Inquiry) -> None:
        if inquiry.conn is not None:
            self.effects.append(Hangup(inquiry.conn))
            inquiry.conn = None

    def _at(self, conn: int) -> _Inquiry | None:
        return next((each for each in self._inquiries.values() if each.conn == conn), None)

    def owns(self, conn: int) -> bool:
        """Tells whether a connection was dialled here."""
        return self._at(conn) is not None

    def connected(self, conn: int) -> None:
        """It lives, or somebody does at its port."""
        inquiry = self._at(conn)
        if inquiry is not None:
            self._stop(inquiry)

    def closed(self, conn: int, reason: str, now: float) -> None:
        """It refused, or could not be reached."""
        inquiry = self._at(conn)
        if inquiry is None:
            return
        inquiry.conn = None
        if REFUSED in reason:
            self.dead[inquiry.node.member] = now
            del self._inquiries[inquiry.node.member]

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [each.again_at if each.conn is None else each.deadline for each in self._inquiries.values()]
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        """Gives up what took too long and tries those that are due."""
        for inquiry in self._inquiries.values():
            if inquiry.conn is not None and now >= inquiry.deadline:
                self._stop(inquiry)
            if inquiry.conn is None and now >= inquiry.again_at:
                inquiry.conn, inquiry.deadline = self.new_id(), now + ANSWER_SECONDS
                inquiry.again_at = now + ASK_SECONDS
                self.effects.append(Dial(inquiry.conn, inquiry.node.address, inquiry.node.port, ""))

    def abandon(self) -> None:
        """Hangs up everywhere."""
        for inquiry in self._inquiries.values():
            self._stop(inquiry)
        self._inquiries.clear()
