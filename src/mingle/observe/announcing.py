"""Playing a host without being a rank: a pure machine that answers for an address somebody gave by hand.

For a job whose rank 0 is reached at a known place, or is not mingle's at all. It speaks as a host does and
proves its session as one, so `mingle-discover find` and `list` see it; its OFFERs have the kind
``announcement``, which real ranks report and never join.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mingle.protocol.handshake import HandshakeFailed, HostConversation
from mingle.protocol.lobby import BrowseGroup
from mingle.protocol.machine import Answer, Effect, Hangup, Multicast, Notice, Source, Write, note_name
from mingle.protocol.pacing import BURST_SECONDS, Announcer
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, List, Offer, Rejected, Seek

PROOF_SECONDS = 2.0
"""How long a caller may take until it has proved itself."""
# Callers at a time; bounded against a flood of connections. The oldest goes: it has had its answer.
MAX_CALLERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """What is announced."""

    job: str
    master_addr: str
    """An address or a host name; empty: the address at which the asker reached the announcer."""
    master_port: int
    world_size: int | None
    """None: not told."""


@dataclass(slots=True)
class _Caller:
    conversation: HostConversation
    deadline: float


class Announcement:
    """The machine of an announcer. It speaks until :meth:`close`.

    Args:
        announced: what it says.
        session: sixteen random bytes, the session's name.
        member: sixteen random bytes, its own.
        who: this process.
        addresses: where its control port listens, best first; at most ``datagrams.MAX_ADDRESSES``.
        port: the control port.
        key: of the job's secret; None: there is none.
        rng: for the jitter of the answers.
        now: the present, in seconds of a monotonic clock.
    """

    def __init__(
        self,
        announced: Announced,
        *,
        session: bytes,
        member: bytes,
        who: frames.ProcessInfo,
        addresses: Sequence[str],
        port: int,
        key: JobKey | None,
        rng: random.Random,
        now: float,
    ) -> None:
        self.announced = announced
        self.session = session
        self._member = member
        self._who = who
        self._addresses = tuple(addresses)
        self._port = port
        self._key = key
        self._started = now
        self._announcer = Announcer(now)
        self._lobby = BrowseGroup(now, now, rng)
        self._callers: dict[int, _Caller] = {}
        self._effects: list[Effect] = []
        self._known: dict[str, None] = {}

    def offer(self) -> Offer:
        """What it says of itself on the network."""
        return Offer(
            job=self.announced.job,
            session=self.session,
            host=self._member,
            addresses=self._addresses,
            port=self._port,
            world_size=self.announced.world_size or 1,
            state="sealed",
            kind="announcement",
            hostname=self._who.hostname,
            pid=self._who.pid,
        )

    # --- what the driver reads ------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        for conn, caller in self._callers.items():
            data = caller.conversation.data_to_send()
            if data:
                self._effects.append(Write(conn, data))
        done, self._effects[:] = list(self._effects), []
        return done

    def calling(self) -> Datagram | None:
        """What to tell unicast peers now."""
        return self.offer()

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do; None: when somebody asks."""
        times = [self._announcer.next_timer(), self._lobby.answer_timer()]
        times += [caller.deadline for caller in self._callers.values() if not caller.conversation.proved]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        for conn, caller in list(self._callers.items()):
            if not caller.conversation.proved and now >= caller.deadline:
                self._drop(conn)
        if self._announcer.should_speak(now):
            self._effects.append(Multicast(self.offer()))
        if now >= self._started + BURST_SECONDS[-1]:
            # Nobody waits for it to change: after its first burst it speaks only when asked.
            self._announcer.sealed = True
        if self._lobby.should_answer(now):
            self._effects.append(Multicast(self.offer(), lobby=True))

    def close(self, reason: str) -> None:
        """Says good-bye to everybody and hangs up."""
        farewell = frames.Closed(session=self.session, reason=reason)
        for conn, caller in list(self._callers.items()):
            if caller.conversation.proved:
                caller.conversation.send(farewell)
            self._drop(conn)
        self._effects.append(Multicast(Bye(job=self.announced.job, session=self.session)))

    # --- datagrams ------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """A valid datagram came in. Its signature was not checked: an answer to it gives nothing away."""
        if isinstance(message, List):
            if not source.multicast:
                if self._lobby.may_answer_by_unicast(now):
                    self._effects.append(Answer(source, self.offer()))
            elif message.member != self._member:
                self._lobby.asked(now)
        elif message.job != self.announced.job:
            return
        elif isinstance(message, Seek):
            if message.kind != "announcement":
                rank = "a process without a rank" if message.rank is None else f"rank {message.rank}"
                self._tell_once(
                    f"{rank} on host {message.hostname} ({source.address}), pid {message.pid}, looks for job "
                    f"{message.job!r}; ranks report an announcement and wait for a rank 0 that they can join"
                )
            if source.multicast:
                self._announcer.asked()
            else:
                self._effects.append(Answer(source, self.offer()))
        elif isinstance(message, Offer) and message.session != self.session:
            what = "announced" if message.kind == "announcement" else "hosted"
            self._tell_once(
                f"job {message.job!r} is also {what} by host {message.hostname or 'unknown'} "
                f"({message.addresses[0]}), pid {message.pid}: who looks for it finds two, and takes neither"
            )

    def _tell_once(self, text: str) -> None:
        count = len(self._known)
        note_name(self._known, text)
        if len(self._known) > count:
            self._effects.append(Notice(text))

    # --- connections ----------------------------------------------------------------------------------------

    def accepted(self, conn: int, _address: str, now: float) -> None:
        """Somebody has connected to the control port."""
        if len(self._callers) >= MAX_CALLERS:
            self._drop(next(iter(self._callers)))
        conversation = HostConversation(
            job=self.announced.job,
            attempt="",
            session=self.session,
            addresses=self._addresses,
            port=self._port,
            key=self._key,
        )
        self._callers[conn] = _Caller(conversation, now + PROOF_SECONDS)

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return conn in self._callers

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """It dials nobody."""

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection."""
        conversation = self._callers[conn].conversation
        was_proved = conversation.proved
        try:
            received = conversation.receive_data(untrusted)
        except (Rejected, HandshakeFailed):
            # What is to be said to such a caller, the conversation has said.
            self._drop(conn)
            return
        hello = conversation.hello
        if conversation.proved and not was_proved and hello is not None and hello.purpose != "join":
            conversation.send(self._running(now))
        for frame in received:
            if isinstance(frame, frames.Join):
                detail = "it is announced by mingle-discover, which is no rank"
                conversation.send(frames.Refused(reason="kind", detail=detail, who=self._who))
                self._drop(conn)
                return
            if isinstance(frame, frames.Ping):
                conversation.send(frames.Pong(number=frame.number))

    def disconnected(self, conn: int, _reason: str, _now: float) -> None:
        """A connection ended."""
        del self._callers[conn]

    def _running(self, now: float) -> frames.Running:
        return frames.Running(
            state="running",
            world_size=self.announced.world_size or 1,
            seconds=max(0.0, now - self._started),
            host=self._who,
            store_address=self.announced.master_addr,
            store_port=self.announced.master_port,
        )

    def _drop(self, conn: int) -> None:
        """Says what is still to be said and hangs up."""
        data = self._callers.pop(conn).conversation.data_to_send()
        if data:
            self._effects.append(Write(conn, data))
        self._effects.append(Hangup(conn))
