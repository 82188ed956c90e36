"""The callers of a host's control port: their conversations, deadlines and answers.

Frames to a caller gather in its conversation and are written by :meth:`Callers.flush`, so several frames go out in one
piece. Answers to questions are encoded once per change for all callers, and a caller gets each answer only when it has
taken the last one: a question is a few bytes and the roster of a large job is many thousands, so a caller that asks
repeatedly, or does not read, would otherwise occupy the host and fill its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from mingle.protocol.effects import Effect, Hangup, Reset, Write
from mingle.protocol.handshake import HostConversation
from mingle.protocol.sources import Sources
from mingle.wire import frames
from mingle.wire.frames import body_of

Question: TypeAlias = Literal["status", "roster", "greeting"]

PROOF_SECONDS = 2.0
"""The least time that a caller has to prove itself, and after that, if it called to join, to send JOIN."""
PROOF_SECONDS_PER_RANK = 0.005
"""The time for each rank of the job, if that is more: a frame waits here while other callers are served."""
# Callers that have not proved themselves, beside one for each rank that has no seat; bounded against a flood of
# connections that never speak.
MAX_UNPROVED = 2048
# Callers that have, and do not join, beside one for each rank: without a secret any process can prove itself. Another
# run of the job waits for the end of this one on so many connections, and must not take it for dead.
MAX_OBSERVERS = 2048
MAX_WHEN_SEALED = 64
"""The limit for each of these two kinds once the session is sealed and awaits no more ranks."""
STRANGERS_SHARE = 8
"""Each kind gets at most this fraction (one in N) of the process's free descriptors."""
RANKS_SHARE = 4
"""The additional places for awaited ranks get this fraction. The process keeps a quarter for itself."""
ROOM_SECONDS = 0.1
"""How long a measurement of the free descriptors stays valid."""


class Caller(Struct, frozen=True):
    """A caller: its conversation and its address."""

    conversation: HostConversation
    address: str
    """The caller's address, as seen here."""

    @property
    def hello(self) -> frames.Hello:
        """The caller's HELLO; read it only once it has arrived."""
        assert self.conversation.hello is not None
        return self.conversation.hello

    @property
    def asks_only(self) -> bool:
        """Whether the caller only asks for the state of the session."""
        return self.conversation.claimed == "probe"

    def as_seen(self, who: frames.ProcessInfo) -> frames.ProcessInfo:
        """Return a caller's description of itself, with the address that is seen here."""
        return msgspec.structs.replace(who, address=self.address)


class Callers:
    """The callers of one host, by connection.

    Args:
        converse: begins the host's side of a conversation.
        effects: the list to which the host's effects are added.
        gone: called for each connection that ended, on either side.
        expected: how many ranks the job has.
        free_files: returns how many more connections the process can hold.
        unsent: returns how many bytes a connection has not taken yet.
    """

    def __init__(
        self,
        converse: Callable[[], HostConversation],
        effects: list[Effect],
        *,
        gone: Callable[[int], None],
        expected: int = 0,
        free_files: Callable[[], int],
        unsent: Callable[[int], int],
    ) -> None:
        self._converse = converse
        self._effects = effects
        self._gone = gone
        self._patience = max(PROOF_SECONDS, PROOF_SECONDS_PER_RANK * expected)
        self._callers: dict[int, Caller] = {}
        self._expected = self._awaited = expected
        self._sealed = False
        self._free_files = free_files
        self._unsent = unsent
        self._encoded: dict[Question, tuple[object, list[bytes]]] = {}
        """The last answer to each question, with the version of what it says."""
        self._outstanding: dict[int, set[Question]] = {}
        """For each connection, the answers given since its buffer was last empty."""
        self._room = 0
        """The measured number of free descriptors, plus those held by callers without a seat."""
        self._measure_at = float("-inf")
        self._unproved = Sources()
        self._observers = Sources()
        """Those that have proved themselves and have no seat, nor have asked for one."""
        self._deadlines: dict[int, float] = {}
        """By when a caller has to prove itself, or to ask for a seat; the earliest first."""
        self._to_write: set[int] = set()
        """Callers whose conversations may have bytes to write."""

    def __contains__(self, conn: object) -> bool:
        return conn in self._callers

    def __getitem__(self, conn: int) -> Caller:
        return self._callers[conn]

    def connections(self) -> list[int]:
        """Return the connections of all callers."""
        return list(self._callers)

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Handle a new connection; in a flood one that has proved nothing is dropped for it, of the flood's own."""
        if now >= self._measure_at:
            self._room = self._free_files() + len(self._unproved) + len(self._observers)
            self._measure_at = now + ROOM_SECONDS
        self._make_room(self._unproved, address)
        self._callers[conn] = Caller(self._converse(), address)
        self._unproved.add(conn, address)
        self._deadlines[conn] = now + self._patience
        self._to_write.add(conn)

    def expect(self, ranks: int, *, sealed: bool) -> None:
        """Take note of the number of ranks without a seat, and of whether the session takes members."""
        self._awaited, self._sealed = ranks, sealed

    def _make_room(self, queue: Sources, address: str) -> None:
        most, ranks = (
            (MAX_UNPROVED, 0 if self._sealed else self._awaited)
            if queue is self._unproved
            else (MAX_OBSERVERS, self._expected)
        )
        strangers = min(MAX_WHEN_SEALED if self._sealed else most, self._room // STRANGERS_SHARE)
        for conn in queue.make_room(address, strangers + min(ranks, self._room // RANKS_SHARE)):
            # An orderly close would wait, with the descriptor, until the caller has read what was sent to it. Elsewhere
            # it is better: a reset that comes early looks to the caller like a failed connect(2).
            self._effects.append(Reset(conn) if self._unsent(conn) else Hangup(conn))
            self.forget(conn)

    def received(self, conn: int, untrusted: bytes, now: float) -> list[frames.AnyFrame]:
        """Take a caller's bytes and return the frames in them that came after its proof.

        Raises:
            Rejected, HandshakeFailed: hang up on the caller; see
                :meth:`mingle.protocol.handshake.HostConversation.receive_data`.
        """
        caller = self._callers[conn]
        self._to_write.add(conn)
        received = caller.conversation.receive_data(untrusted)
        if caller.conversation.proved and self._unproved.discard(conn):
            del self._deadlines[conn]
            self._make_room(self._observers, caller.address)
            self._observers.add(conn, caller.address)
            if caller.hello.purpose == "join":
                self._deadlines[conn] = now + self._patience
        if any(isinstance(frame, frames.Join) for frame in received) and caller.hello.purpose == "join":
            # The registrar gives it a seat or hangs up.
            self._expect_nothing(conn)
        return received

    def _expect_nothing(self, conn: int) -> None:
        self._unproved.discard(conn)
        self._observers.discard(conn)
        self._deadlines.pop(conn, None)

    def send(self, conn: int, frame: frames.AnyFrame) -> None:
        """Send a frame to a caller, if it is still connected."""
        if conn in self._callers:
            self._callers[conn].conversation.send(frame)
            self._to_write.add(conn)

    def answer(
        self, conn: int, what: Question, version: object, build: Callable[[], Iterable[frames.AnyFrame]]
    ) -> None:
        """Answer a caller's question, unless the answer to the same one is still on its way to that caller.

        Args:
            conn: the caller's connection.
            what: the question.
            version: changes whenever the answer changes.
            build: makes the frames of the answer.
        """
        outstanding = self._outstanding.setdefault(conn, set())
        conversation = self._callers[conn].conversation
        if not conversation.has_data_to_send and self._unsent(conn) == 0:
            outstanding.clear()
        if what in outstanding:
            return
        outstanding.add(what)
        known = self._encoded.get(what)
        if known is None or known[0] != version:
            known = self._encoded[what] = version, [body_of(frame) for frame in build()]
        for body in known[1]:
            conversation.send_body(body)
        self._to_write.add(conn)

    def forget(self, conn: int) -> None:
        """Forget a connection that ended."""
        self._expect_nothing(conn)
        self._to_write.discard(conn)
        self._callers.pop(conn, None)
        self._outstanding.pop(conn, None)
        self._gone(conn)

    def hang_up(self, conn: int) -> None:
        """Write what is still to be sent to a caller and close its connection."""
        if conn in self._callers:
            self._write(conn)
            self.forget(conn)
            self._effects.append(Hangup(conn))

    def flush(self) -> None:
        """Write all gathered frames."""
        for conn in sorted(self._to_write):
            self._write(conn)
        self._to_write.clear()

    def _write(self, conn: int) -> None:
        data = self._callers[conn].conversation.data_to_send()
        if data:
            self._effects.append(Write(conn, data))

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        return next(iter(self._deadlines.values()), None)

    def handle_timer(self, now: float) -> None:
        """Hang up on callers that took too long to prove themselves, or to send JOIN."""
        for conn, deadline in list(self._deadlines.items()):
            if now < deadline:
                break
            self.hang_up(conn)
