"""The callers of a process's control port: their limits, deadlines and answers.

A host answers all callers, a member those of the mesh alone. Answers to questions are encoded once per change for all
callers, and a caller gets each answer only when it has taken the last one: a question is a few bytes and the roster of
a large job is many thousands, so a caller that asks repeatedly, or does not read, would otherwise occupy the process
and fill its memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, TypeAlias

import msgspec

from mingle.protocol.events import BytesReceived, ConnectionEvent, Disconnected
from mingle.protocol.links.handshake import PROOF_SECONDS_PER_RANK, HandshakeFailed, HostConversation
from mingle.protocol.links.link import Link
from mingle.protocol.links.sources import Sources
from mingle.protocol.machine import Context
from mingle.wire import frames
from mingle.wire.datagrams import Rejected
from mingle.wire.frame_codec import body_of

Question: TypeAlias = Literal["status", "roster", "greeting"]

PROOF_SECONDS = 2.0
"""The least time that a caller has to prove itself, and after that, if it called to join, to send JOIN."""
# Callers that have not proved themselves, beside one for each rank that has no seat: bounded against a flood of
# connections that never speak. As many that have, and do not join, beside one for each rank: without a secret any
# process can prove itself. Another run of the job waits for the end of this one on so many connections, and must not
# take it for dead.
MAX_STRANGERS = 2048
MAX_WHEN_SEALED = 64
"""The limit for each of these two kinds once the session is sealed and awaits no more ranks."""
STRANGERS_SHARE = 8
"""Each kind gets at most this fraction (one in N) of the process's free descriptors."""
RANKS_SHARE = 4
"""The additional places for awaited ranks get this fraction. The process keeps a quarter for itself."""
GREETING_SECONDS = 30.0
"""How long a caller of the mesh can stay: its greeting is long, and can be lost again and again."""
ROOM_SECONDS = 0.1
"""How long a measurement of the free descriptors stays valid."""


class Caller(Link, kw_only=True):
    """A caller: its connection and its address."""

    conversation: HostConversation
    address: str
    """The caller's address, as seen here."""
    interface: str = ""
    """The interface of a link-local address."""

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


class Called(Protocol):
    """The process that is called."""

    def conversation(self) -> HostConversation:
        """Begin this side of a conversation."""

    def caller_proved(self, caller: Caller, now: float) -> None:
        """Handle a caller that has just proved itself."""

    def caller_said(self, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of a caller that has proved itself."""

    def caller_lost(self, caller: Caller, reason: str, now: float) -> None:
        """Handle the end of a connection that this process has not ended by :meth:`Callers.hang_up`."""


class Callers:
    """The callers of one process, by connection.

    Args:
        called: the process.
        context: has the connections and limits them.
        expected: how many ranks the job has.
        most: how many callers without a seat there can be, of those that have proved themselves and of the others.
        patience: the least time that a caller has to prove itself, in seconds.
    """

    def __init__(
        self,
        called: Called,
        context: Context,
        *,
        expected: int = 0,
        most: int = MAX_STRANGERS,
        patience: float = PROOF_SECONDS,
    ) -> None:
        self._called = called
        self._links = context.links
        self._most = most
        self._patience = max(patience, PROOF_SECONDS_PER_RANK * expected)
        self._callers: dict[int, Caller] = {}
        self._expected = self._awaited = expected
        self._sealed = False
        self._free_files = context.free_files
        self._unsent = context.unsent
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
        self._due: dict[int, float] = {}
        """By when a caller has to prove itself, or to ask for what it has called for."""
        self._in_order: list[tuple[float, int]] = []
        """The same as a heap, with what does not hold any more."""

    def __contains__(self, conn: object) -> bool:
        return conn in self._callers

    def __getitem__(self, conn: int) -> Caller:
        return self._callers[conn]

    def connections(self) -> list[int]:
        """Return the connections of all callers."""
        return list(self._callers)

    def accepted(self, conn: int, address: str, now: float, *, interface: str = "") -> None:
        """Handle a new connection; in a flood one that has proved nothing is dropped for it, of the flood's own."""
        if now >= self._measure_at:
            self._room = self._free_files() + len(self._unproved) + len(self._observers)
            self._measure_at = now + ROOM_SECONDS
        self._make_room(self._unproved, address)
        caller = Caller(
            conn=conn,
            conversation=self._called.conversation(),
            handler=self._handle,
            established=True,
            address=address,
            interface=interface,
        )
        self._callers[conn] = caller
        self._links.add(caller)
        self._unproved.add(conn, address)
        self._expect_by(conn, now + self._patience)

    def expect(self, ranks: int, *, sealed: bool) -> None:
        """Take note of the number of ranks without a seat, and of whether the session takes members."""
        self._awaited, self._sealed = ranks, sealed

    def _make_room(self, queue: Sources, address: str) -> None:
        ranks = self._expected
        if queue is self._unproved:
            ranks = 0 if self._sealed else self._awaited
        strangers = min(MAX_WHEN_SEALED if self._sealed else self._most, self._room // STRANGERS_SHARE)
        for conn in queue.make_room(address, strangers + min(ranks, self._room // RANKS_SHARE)):
            # An orderly close would wait, with the descriptor, until the caller has read what was sent to it. Elsewhere
            # it is better: a reset that comes early looks to the caller like a failed connect(2).
            if self._unsent(conn):
                self.reset(conn)
            else:
                self.hang_up(conn)

    def _handle(self, caller: Caller, event: ConnectionEvent, now: float) -> None:
        if isinstance(event, Disconnected):
            self._forget(caller)
            self._called.caller_lost(caller, event.reason, now)
        elif isinstance(event, BytesReceived):
            self._received(caller, event.untrusted, now)

    def _received(self, caller: Caller, untrusted: bytes, now: float) -> None:
        try:
            received = caller.receive(untrusted)
        except (Rejected, HandshakeFailed) as failure:
            self.hang_up(caller.conn)
            self._called.caller_lost(caller, str(failure), now)
            return
        if caller.conversation.proved and self._unproved.discard(caller.conn):
            self._proved(caller, now)
        for frame in received:
            if caller.conn not in self._callers:
                break
            if isinstance(frame, frames.Pong):
                caller.pong(frame.number)
            elif isinstance(frame, frames.Join) and caller.hello.purpose == "join":
                self._expect_nothing(caller.conn)  # the registrar gives it a seat or hangs up
            self._called.caller_said(caller, frame, now)

    def _proved(self, caller: Caller, now: float) -> None:
        self._make_room(self._observers, caller.address)
        self._observers.add(caller.conn, caller.address)
        self._due.pop(caller.conn)
        if caller.hello.purpose == "join":
            self._expect_by(caller.conn, now + self._patience)
        elif caller.hello.purpose == "mesh":
            self._expect_by(caller.conn, now + GREETING_SECONDS)
        self._called.caller_proved(caller, now)

    def _expect_by(self, conn: int, due: float) -> None:
        self._due[conn] = due
        heapq.heappush(self._in_order, (due, conn))

    def _expect_nothing(self, conn: int) -> None:
        self._unproved.discard(conn)
        self._observers.discard(conn)
        self._due.pop(conn, None)

    def send(self, conn: int, frame: frames.AnyFrame) -> None:
        """Send a frame to a caller, if it is still connected."""
        if conn in self._callers:
            self._callers[conn].send(frame)

    def ping(self, conn: int, now: float) -> None:
        """Ask a caller whether it lives."""
        self._callers[conn].ping(now)

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
        caller = self._callers[conn]
        if not caller.conversation.has_data_to_send and self._unsent(conn) == 0:
            outstanding.clear()
        if what in outstanding:
            return
        outstanding.add(what)
        known = self._encoded.get(what)
        if known is None or known[0] != version:
            known = self._encoded[what] = version, [body_of(frame) for frame in build()]
        for body in known[1]:
            caller.send_body(body)

    def _forget(self, caller: Caller) -> None:
        self._expect_nothing(caller.conn)
        del self._callers[caller.conn]
        self._outstanding.pop(caller.conn, None)

    def hang_up(self, conn: int) -> None:
        """Write what is still to be sent to a caller and close its connection."""
        if (caller := self._callers.get(conn)) is not None:
            self._forget(caller)
            self._links.hang_up(caller)

    def hang_up_all(self) -> None:
        """Hang up on all callers."""
        for conn in self.connections():
            self.hang_up(conn)

    def reset(self, conn: int) -> None:
        """End a caller's connection by a TCP reset."""
        if (caller := self._callers.get(conn)) is not None:
            self._forget(caller)
            self._links.reset(caller)

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        while self._in_order and self._due.get(self._in_order[0][1]) != self._in_order[0][0]:
            heapq.heappop(self._in_order)
        return self._in_order[0][0] if self._in_order else None

    def handle_timer(self, now: float) -> None:
        """Hang up on callers that took too long to prove themselves, or to ask for what they have called for."""
        while (due := self.next_timer()) is not None and now >= due:
            self.hang_up(self._in_order[0][1])
