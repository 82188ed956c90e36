"""Answers to members' questions: built once per change for all members, and sent one at a time to each member.

A question is a few bytes and the roster of a large job is many thousands, so a caller that asks repeatedly, or does not
read, would otherwise occupy the host and fill its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from mingle.protocol.callers import Callers
from mingle.protocol.introduction import roster_parts
from mingle.protocol.registrar import Registrar
from mingle.wire.framing import body_of

Question: TypeAlias = Literal["status", "roster"]


class Answers:
    """The answers of one host.

    Args:
        seats: the seats to report; only members with a seat get answers.
        callers: who asks.
        unsent: returns how many bytes a connection has not taken yet.
    """

    def __init__(self, seats: Registrar, callers: Callers, unsent: Callable[[int], int]) -> None:
        self._seats = seats
        self._callers = callers
        self._unsent = unsent
        self._built: dict[Question, tuple[tuple[object, ...], list[bytes]]] = {}
        self._outstanding: dict[int, set[Question]] = {}
        """For each connection, the answers given since its buffer was last empty."""

    def asked(self, conn: int, what: Question) -> None:
        """Answer a question, unless the answer to the same one is still on its way to that caller."""
        if not self._seats.has_seat(conn):
            return
        outstanding = self._outstanding.setdefault(conn, set())
        if not self._callers[conn].conversation.has_data_to_send and self._unsent(conn) == 0:
            outstanding.clear()
        if what not in outstanding:
            outstanding.add(what)
            self._callers.answer(conn, self._bodies(what))

    def _bodies(self, what: Question) -> list[bytes]:
        version = self._seats.version() if what == "roster" else self._seats.status_version()
        known = self._built.get(what)
        if known is None or known[0] != version:
            frames = roster_parts(self._seats) if what == "roster" else [self._seats.status()]
            known = self._built[what] = version, [body_of(frame) for frame in frames]
        return known[1]

    def forget(self, conn: int) -> None:
        """Forget a connection that ended."""
        self._outstanding.pop(conn, None)
