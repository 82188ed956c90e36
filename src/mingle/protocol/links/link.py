"""The control connections of one process, by their numbers. Pure.

Each connection is a :class:`Link`: its handshake, and the part of the machine to which it belongs. :class:`Links` knows
all of them, so an event of a connection finds its part without a search, and what the parts send is written in one
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from mingle.protocol.effects import Dial, Effect, Hangup, Reset, Write
from mingle.protocol.events import BytesReceived, Connected, ConnectionEvent, Disconnected
from mingle.protocol.links.handshake import HostConversation, MemberConversation
from mingle.wire.frames import AnyFrame, Ping

MAX_NUMBER = 2**30
"""The greatest number of a PING; a host that asks once a second begins again after 34 years."""


class Link(Struct, eq=False, kw_only=True):
    """One connection, dialed or accepted."""

    conn: int
    conversation: MemberConversation | HostConversation
    handler: Callable[[Any, ConnectionEvent, float], None]
    """Handles what happens on this link, which is its first argument."""
    established: bool = False
    """Whether the connection stands; a dialed one does not at first."""
    heard_at: float = float("-inf")
    """When something came in on it last."""
    answered_at: float = float("-inf")
    """When the last PING was sent that the other side has answered: its process ran at that moment or later."""
    asked: dict[int, float] = field(default_factory=dict)
    """When each PING was sent that is not answered, by its number; the oldest first."""
    last_answered: int = 0
    unwritten: set[int] = field(default_factory=set)
    """The connections of the process on which something is to be written."""

    def send(self, frame: AnyFrame) -> None:
        """Send a frame."""
        self.conversation.send(frame)
        self.unwritten.add(self.conn)

    def send_body(self, body: bytes) -> None:
        """Send a frame that was encoded once for several connections."""
        self.conversation.send_body(body)
        self.unwritten.add(self.conn)

    def ping(self, now: float) -> None:
        """Ask whether the other side lives; :attr:`answered_at` shows the answer.

        An answer counts for its own question, since one to an earlier question can come late, and the process can have
        been stopped or killed in between.
        """
        number = next(reversed(self.asked), self.last_answered) % MAX_NUMBER + 1
        self.asked[number] = now
        self.send(Ping(number=number))

    def pong(self, number: int) -> bool:
        """Take note of an answer; return whether it is one to a question of ours.

        Answers come in the order of the questions.
        """
        if number not in self.asked:
            return False
        while self.last_answered != number:
            self.last_answered = next(iter(self.asked))
            self.answered_at = self.asked.pop(self.last_answered)
        return True

    def receive(self, untrusted: bytes) -> list[AnyFrame]:
        """Return the frames that have come after the proof of the other side.

        Raises:
            Rejected, HandshakeFailed: hang up.
        """
        self.unwritten.add(self.conn)  # the handshake answers by itself
        return self.conversation.receive_data(untrusted)


class Links:
    """All connections of one process, and what its driver has to do.

    Attributes:
        effects: what is to be done, in order; every part of the process's machine adds to it.
    """

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self._links: dict[int, Link] = {}
        self._unwritten: set[int] = set()

    def __contains__(self, conn: object) -> bool:
        return conn in self._links

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: Link) -> None:
        """Take a link in: from now on its handler gets the events of its connection."""
        link.unwritten = self._unwritten
        self._links[link.conn] = link
        if link.established:
            self._unwritten.add(link.conn)

    def dial(self, link: Link, address: str, port: int, interface: str, *, as_torch: bool = False) -> None:
        """Take a link in and connect it; see :class:`~mingle.protocol.effects.Dial` for the arguments."""
        self.add(link)
        self.effects.append(Dial(link.conn, address, port, interface, as_torch=as_torch))

    def handle(self, event: ConnectionEvent, now: float) -> None:
        """Handle what has happened on a connection; one that was hung up on means nothing."""
        link = self._links.get(event.conn)
        if link is None:
            return
        if isinstance(event, Connected):
            link.established = True
            self._unwritten.add(link.conn)
        elif isinstance(event, BytesReceived):
            link.heard_at = now
        elif isinstance(event, Disconnected):
            self._forget(link)
        link.handler(link, event, now)

    def hang_up(self, link: Link) -> None:
        """Close a connection after what is still to be sent."""
        if link.conn in self._links:
            self._write(link)
            self._forget(link)
            self.effects.append(Hangup(link.conn))

    def reset(self, link: Link) -> None:
        """End a connection by a TCP reset, without what is still to be sent."""
        if link.conn in self._links:
            self._forget(link)
            self.effects.append(Reset(link.conn))

    def refuse(self, conn: int) -> None:
        """Close a connection that was accepted and is no link."""
        self.effects.append(Hangup(conn))

    def take_effects(self) -> list[Effect]:
        """Write what is to be sent; return what the driver has to do now, once."""
        self.flush()
        done, self.effects[:] = list(self.effects), []
        return done

    def flush(self) -> None:
        """Write what is to be sent, so that several frames go out in one piece."""
        for conn in sorted(self._unwritten):
            if (link := self._links.get(conn)) is not None:
                self._write(link)
        self._unwritten.clear()

    def _write(self, link: Link) -> None:
        if link.established and (data := link.conversation.data_to_send()):
            self.effects.append(Write(link.conn, data))

    def _forget(self, link: Link) -> None:
        del self._links[link.conn]
        self._unwritten.discard(link.conn)
