"""Those who called the control port: their conversations, their time to prove themselves, and hanging up on them.

What is said to a caller gathers in its conversation and is written when :meth:`Callers.flush` is called, so several
frames go out in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from mingle.rules.control import HostConversation
from mingle.rules.machine import Effect, Hangup, Write
from mingle.wire import frames

PROOF_SECONDS = 2.0
"""How long a caller may take until it has proved itself."""
# Callers that have not proved themselves; bounded against a flood of connections that never speak.
MAX_UNPROVED = 2048
# Of these from one address: whoever floods us from one machine pushes out nobody but itself.
MAX_UNPROVED_PER_SOURCE = 1024


@dataclass(frozen=True, slots=True)
class Caller:
    """One of them."""

    conversation: HostConversation
    address: str
    """Where it called from, as seen here."""

    @property
    def hello(self) -> frames.Hello:
        """What it said first; of meaning once it has."""
        assert self.conversation.hello is not None
        return self.conversation.hello

    @property
    def asks_only(self) -> bool:
        """Whether it has said that it wants to know how the session stands, and no more."""
        return self.conversation.hello is not None and self.hello.purpose == "probe"

    def as_seen(self, who: frames.Who) -> frames.Who:
        """Returns what it says of itself, with the address that is seen here."""
        return msgspec.structs.replace(who, address=self.address)


class Callers:
    """The callers of one host, by connection.

    ``converse`` begins the host's side of a conversation; ``gone`` is told of each connection that ended, on whichever
    side, so that nobody counts on it any more.
    """

    def __init__(
        self, converse: Callable[[], HostConversation], effects: list[Effect], *, gone: Callable[[int], None]
    ) -> None:
        self._converse = converse
        self._effects = effects
        self._gone = gone
        self._callers: dict[int, Caller] = {}
        self._unproved: dict[int, float] = {}
        """Those that have not proved themselves, the oldest first, each with its deadline."""
        self._by_source: dict[str, dict[int, None]] = {}
        """The same by the address that they called from, the oldest first."""
        self._to_write: set[int] = set()
        """Those whose conversations may have something to say."""

    def __contains__(self, conn: object) -> bool:
        return conn in self._callers

    def __getitem__(self, conn: int) -> Caller:
        return self._callers[conn]

    def connections(self) -> list[int]:
        """The connections of all that are on the line."""
        return list(self._callers)

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Somebody has connected; in a flood the oldest of those that have proved nothing has to go."""
        alike = self._by_source.get(address, {})
        if len(alike) >= MAX_UNPROVED_PER_SOURCE:
            self.hang_up(next(iter(alike)))
        elif len(self._unproved) >= MAX_UNPROVED:
            self.hang_up(next(iter(self._unproved)))
        self._callers[conn] = Caller(self._converse(), address)
        self._unproved[conn] = now + PROOF_SECONDS
        self._by_source.setdefault(address, {})[conn] = None
        self._to_write.add(conn)

    def received(self, conn: int, untrusted: bytes) -> list[frames.AnyFrame]:
        """Takes a caller's bytes and returns the frames in them that came after its proof.

        Raises:
            Rejected, HandshakeFailed: the caller is to be hung up on; see
                :meth:`mingle.rules.control.HostConversation.receive_data`.
        """
        conversation = self._callers[conn].conversation
        self._to_write.add(conn)
        received = conversation.receive_data(untrusted)
        if conversation.proved:
            self._expects_no_proof(conn)
        return received

    def _expects_no_proof(self, conn: int) -> None:
        """It has proved itself, or is gone."""
        if self._unproved.pop(conn, None) is None:
            return
        address = self._callers[conn].address
        alike = self._by_source[address]
        del alike[conn]
        if not alike:
            del self._by_source[address]

    def tell(self, conn: int, frame: frames.AnyFrame) -> None:
        """Says something to a caller, if it is still on the line."""
        if conn in self._callers:
            self._callers[conn].conversation.send(frame)
            self._to_write.add(conn)

    def forget(self, conn: int) -> None:
        """That connection ended."""
        self._expects_no_proof(conn)
        self._to_write.discard(conn)
        self._callers.pop(conn, None)
        self._gone(conn)

    def hang_up(self, conn: int) -> None:
        """Says what is still to be said to a caller and ends its connection."""
        if conn in self._callers:
            self._write(conn)
            self.forget(conn)
            self._effects.append(Hangup(conn))

    def flush(self) -> None:
        """Writes what is to be said."""
        for conn in sorted(self._to_write):
            self._write(conn)
        self._to_write.clear()

    def _write(self, conn: int) -> None:
        data = self._callers[conn].conversation.data_to_send()
        if data:
            self._effects.append(Write(conn, data))

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        return next(iter(self._unproved.values()), None)

    def handle_timer(self, now: float) -> None:
        """Hangs up on those that took too long to prove themselves."""
        for conn, deadline in list(self._unproved.items()):
            if now < deadline:
                break
            self.hang_up(conn)
