"""A host alone: a test plays its callers, and the other hosts that it calls."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

from mingle.protocol.effects import Effect, Write
from mingle.protocol.events import Accepted, Address, BytesReceived, Connected, StoreOpened, TimerDue
from mingle.protocol.links.handshake import Call, Conversation, HostConversation, MemberConversation
from mingle.protocol.machine import Context, Endpoints, Identity
from mingle.protocol.node import Node
from mingle.protocol.session.phases import Committed, State
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Offer
from mingle.wire.frames import Path, ProcessInfo

SESSION, OWN = b"S" * 16, b"H" * 16


class Alone:
    """A host and what its callers make of what it says."""

    def __init__(
        self,
        size: int = 2,
        *,
        key: JobKey | None = None,
        addresses: int = 2,
        advertised: tuple[str, ...] = (),
        attempt: str = "",
        rank: int | None = 0,
    ) -> None:
        identity = Identity(
            job="job",
            attempt=attempt,
            member=OWN,
            rank=rank,
            world_size=size,
            node="n0",
            who=ProcessInfo(hostname="h0", pid=1),
            node_rank=0,
        )
        self.key = key
        self.unsent: Counter[int] = Counter()
        own = tuple(Address(f"10.{each}.0.1", f"eth{each}", 24) for each in range(addresses))
        self.node = Node(
            identity,
            Endpoints(addresses=own, advertised=advertised, port=4000),
            Context(
                key=key,
                new_id=itertools.count(1000).__next__,
                rng=random.Random(1),
                timeout=60.0,
                unsent=self.unsent.__getitem__,
            ),
            0.0,
            new_session=lambda: SESSION,
        )
        while self.node.host is None:  # without a rank it is elected
            self.node.handle(TimerDue(), self.node.next_timer() or 0.0)
        self.host = self.node.host
        self.callers: dict[int, MemberConversation] = {}
        self.others: dict[int, HostConversation] = {}
        """The hosts that it has called, by their connections."""
        self.said: dict[int, list[Any]] = {}

    def phase(self) -> type[State]:
        return type(self.host.registrar.state)

    def done(self) -> list[Effect]:
        """Take the effects; what was written arrives at the other side."""
        done = self.node.effects()
        for effect in done:
            if isinstance(effect, Write):
                other: Conversation = self.callers.get(effect.conn) or self.others[effect.conn]
                self.said[effect.conn] += other.receive_data(effect.data)
        return done

    def say(self, conn: int, *said: frames.AnyFrame, now: float = 1.0) -> list[Effect]:
        for frame in said:
            self.callers[conn].send(frame)
        self.node.handle(BytesReceived(conn, self.callers[conn].data_to_send()), now)
        return self.done()

    def prove_other(self, conn: int, offer: Offer, *, now: float) -> list[Effect]:
        """Another host, which was called, proves the session that it has offered."""
        host = self.others[conn] = HostConversation(
            job="job", attempt="", session=offer.session, addresses=offer.addresses, port=offer.port, key=self.key
        )
        self.said[conn] = []
        self.node.handle(Connected(conn, "10.0.0.1", "eth0"), now)
        done = self.done()
        self.node.handle(BytesReceived(conn, host.data_to_send()), now)
        return done + self.done()

    def answer(self, conn: int, *said: frames.AnyFrame, now: float) -> list[Effect]:
        """Another host says something on the connection on which it was called."""
        for frame in said:
            self.others[conn].send(frame)
        self.node.handle(BytesReceived(conn, self.others[conn].data_to_send()), now)
        return self.done()

    def call(
        self,
        conn: int,
        *,
        purpose: Any = "join",
        member: bytes = b"",
        key: JobKey | None = None,
        rank: int | None = None,
        now: float = 1.0,
    ) -> None:
        """Connect and prove itself."""
        call = Call(
            job="job",
            attempt=self.host.identity.attempt,
            member=member or conn.to_bytes(16, "big"),
            session=SESSION,
            purpose=purpose,
            who=ProcessInfo(hostname=f"h{conn}", pid=conn, rank=rank),
        )
        self.callers[conn], self.said[conn] = MemberConversation(call, ("10.0.0.1", 4000), key or self.key), []
        self.node.handle(Accepted(conn, f"10.0.0.{conn + 1}", f"eth{conn}"), now)
        self.say(conn, now=now)
        if self.callers[conn].welcome is not None:
            self.say(conn, now=now)

    def join(self, conn: int, rank: int | None, *, now: float = 1.0, member: bytes = b"", order: bytes = b"") -> None:
        self.call(conn, member=member, now=now)
        paths = (Path(host_address="10.0.0.1", local_address=f"10.0.0.{conn + 1}", interface="eth0"),)
        size = self.host.identity.world_size
        self.say(conn, frames.Join(world_size=size, rank=rank, node=f"n{rank}", paths=paths, order=order), now=now)

    def confirm(self, conn: int, paths: tuple[Path, ...] | None = None) -> list[Effect]:
        way = (Path(host_address="10.0.0.1", local_address=f"10.0.0.{conn + 1}", interface="eth0"),)
        epoch = self.host.registrar.state.epoch
        return self.say(conn, frames.Confirmed(session=SESSION, epoch=epoch, paths=way if paths is None else paths))

    def running(self, now: float) -> frames.Running:
        """What a caller that only asks is told."""
        conn = len(self.callers) + 100
        self.call(conn, purpose="probe", now=now)
        (running,) = [frame for frame in self.said[conn] if isinstance(frame, frames.Running)]
        return running

    def come_to(self, phase: type[State]) -> None:
        """A job of two that has come so far."""
        for step in (
            lambda: self.join(1, 1),
            lambda: self.confirm(1),
            lambda: self.node.handle(StoreOpened(1, 5000, "token"), 2.0),
            lambda: self.say(1, frames.Ack(session=SESSION, epoch=1), now=3.0),
        ):
            if self.phase() is not phase:
                step()

    def form(self) -> None:
        """A job of two that runs."""
        self.come_to(Committed)
