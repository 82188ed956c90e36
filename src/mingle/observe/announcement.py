"""Announce a job without being a rank: a pure machine that answers for an address that a person gave.

It is for a job whose rank 0 is at a known address, or does not use mingle. The machine speaks as a host does and proves
its session, so that `mingle-discover find` and `list` see it. Its OFFERs have the kind ``announcement``: ranks report
them and never join.
"""

from __future__ import annotations

import random

from msgspec import Struct, structs

from mingle.protocol.handshake import HandshakeFailed, HostConversation
from mingle.protocol.machine import Answer, Effect, Hangup, Multicast, Notice, Source, Write, note_name
from mingle.protocol.pacing import BURST_SECONDS, Announcer, BrowseGroup
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, List, Offer, Rejected, Seek, asker_name

PROOF_SECONDS = 2.0
"""The time in which a caller must prove itself."""
# The most callers at a time; bounded against a flood of connections. The oldest is dropped: it has had its answer.
MAX_CALLERS = 256


class _Inquiry(Struct):
    conversation: HostConversation
    deadline: float


class Announcement:
    """Speaks for a job until :meth:`close`.

    Args:
        offer: what it says on the network.
        who: this process.
        master_addr: the announced address or host name; empty: the address at which an asker reached this process.
        master_port: the announced port.
        key: of the job's secret; None: it has none.
        rng: for the jitter of the answers.
        now: the present, in seconds of a monotonic clock.
    """

    def __init__(
        self,
        offer: Offer,
        *,
        who: frames.ProcessInfo,
        master_addr: str,
        master_port: int,
        key: JobKey | None,
        rng: random.Random,
        now: float,
    ) -> None:
        self.offer = offer
        self._who = who
        self._master = (master_addr, master_port)
        self._key = key
        self._started = now
        self._announcer = Announcer(now)
        self._browse = BrowseGroup(now, now, rng)
        self._callers: dict[int, _Inquiry] = {}
        self._effects: list[Effect] = []
        self._noted: dict[str, None] = {}

    # --- what the driver reads -------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Hand out what the driver must do."""
        for conn in self._callers:
            self._flush(conn)
        done, self._effects[:] = list(self._effects), []
        return done

    def calling(self) -> Datagram | None:
        """Return what to send to unicast peers now."""
        return self.offer

    def next_timer(self) -> float | None:
        """Return when to call :meth:`handle_timer`; None: when a question arrives."""
        times = [self._announcer.next_timer(), self._browse.answer_timer()]
        times += [caller.deadline for caller in self._callers.values() if not caller.conversation.proved]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Hang up on callers that did not prove themselves, and send what is due."""
        for conn, caller in list(self._callers.items()):
            if not caller.conversation.proved and now >= caller.deadline:
                self._drop(conn)
        if self._announcer.should_speak(now):
            self._effects.append(Multicast(self.offer))
        if now >= self._started + BURST_SECONDS[-1]:
            # No process waits for a change of the announcement: after the first burst it only answers.
            self._announcer.sealed = True
        if self._browse.should_answer(now):
            self._effects.append(Multicast(self.offer, browse=True))

    def readdress(self, addresses: tuple[str, ...], _now: float) -> None:
        """Announce these addresses, unless they are announced already."""
        if addresses != self.offer.addresses:
            self.offer = structs.replace(self.offer, addresses=addresses)
            self._announcer.asked()

    def close(self, reason: str) -> None:
        """Send good-byes, and hang up."""
        for conn, caller in list(self._callers.items()):
            if caller.conversation.proved:
                caller.conversation.send(frames.Closed(session=self.offer.session, reason=reason))
            self._drop(conn)
        self._effects.append(Multicast(Bye(job=self.offer.job, session=self.offer.session)))

    # --- datagrams -------------------------------------------------------------------------------------------------

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        """Process a valid datagram. Its signature was not checked: an answer to it reveals nothing."""
        if isinstance(message, List):
            if not source.multicast:
                if self._browse.may_answer_by_unicast(now):
                    self._effects.append(Answer(source, self.offer))
            elif message.member != self.offer.host:
                self._browse.asked(now)
        elif message.job != self.offer.job:
            return
        elif isinstance(message, Seek):
            if message.kind != "announcement":
                self._warn_once(
                    f"{asker_name(message, source.address)}, looks for job {message.job!r}; ranks report an "
                    "announcement and wait for a rank 0 that they can join"
                )
            if source.multicast:
                self._announcer.asked()
            else:
                self._effects.append(Answer(source, self.offer))
        elif isinstance(message, Offer) and message.session != self.offer.session:
            what = "announced" if message.kind == "announcement" else "hosted"
            self._warn_once(
                f"job {message.job!r} is also {what} by host {message.hostname or 'unknown'} "
                f"({message.addresses[0]}), pid {message.pid}: `mingle-discover find` finds two hosts and uses neither"
            )

    def _warn_once(self, text: str) -> None:
        count = len(self._noted)
        note_name(self._noted, text)
        if len(self._noted) > count:
            self._effects.append(Notice(text))

    # --- connections -----------------------------------------------------------------------------------------------

    def accepted(self, conn: int, _address: str, now: float) -> None:
        """Process a connection to the control port."""
        if len(self._callers) >= MAX_CALLERS:
            self._drop(next(iter(self._callers)))
        offer = self.offer
        conversation = HostConversation(
            job=offer.job, attempt="", session=offer.session, addresses=offer.addresses, port=offer.port, key=self._key
        )
        self._callers[conn] = _Inquiry(conversation, now + PROOF_SECONDS)

    def owns(self, conn: int) -> bool:
        """Return whether a connection is this machine's."""
        return conn in self._callers

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """Process an outgoing connection: the machine makes none."""

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Process bytes from a connection."""
        conversation = self._callers[conn].conversation
        was_proved = conversation.proved
        try:
            received = conversation.receive_data(untrusted)
        except (Rejected, HandshakeFailed):
            # The conversation has said to the caller what it must know.
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
        """Process the end of a connection."""
        del self._callers[conn]

    def _running(self, now: float) -> frames.Running:
        address, port = self._master
        return frames.Running(
            state="running",
            world_size=self.offer.world_size,
            seconds=max(0.0, now - self._started),
            host=self._who,
            store_address=address,
            store_port=port,
        )

    def _flush(self, conn: int) -> None:
        data = self._callers[conn].conversation.data_to_send()
        if data:
            self._effects.append(Write(conn, data))

    def _drop(self, conn: int) -> None:
        """Send what is left to send, and hang up."""
        self._flush(conn)
        del self._callers[conn]
        self._effects.append(Hangup(conn))
