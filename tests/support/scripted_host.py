"""A member alone with a host that says what the test tells it to say."""

from __future__ import annotations

import itertools
import random
from typing import Any

from msgspec.structs import replace

from mingle.protocol.effects import Dial, Effect, Write
from mingle.protocol.events import Address, BytesReceived, Connected, Disconnected, Heard, Source, StoreProved, TimerDue
from mingle.protocol.links.handshake import HostConversation
from mingle.protocol.machine import Context, Endpoints, Identity
from mingle.protocol.member import Joiner
from mingle.protocol.membership import Membership
from mingle.protocol.node import Node
from mingle.protocol.participant import TryingPaths
from mingle.wire import frames
from mingle.wire.datagrams import Offer, State
from mingle.wire.frames import ProcessInfo

SESSION, OTHER = b"S" * 16, b"T" * 16
ADDRESS, SECOND = "10.0.0.1", "10.0.0.7"
HERE = Source(interface="eth0", address=ADDRESS)
IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h1", pid=11)
)


ENDPOINTS = Endpoints(addresses=(Address("10.0.0.2", "eth0", 24),), port=4002)
"""Where the member can be called, as every one that was given no rank."""


def offer(session: bytes = SESSION, *, state: State = "open", port: int = 4000, **more: Any) -> Offer:
    plain = Offer(job="job", session=session, host=session, addresses=(ADDRESS,), port=port, world_size=2, state=state)
    return replace(plain, **more)


class Alone:
    """A node that looks for a host, and a host that says what it is told to say."""

    def __init__(self, timeout: float = 60.0, *, rank: int | None = 1) -> None:
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=timeout)
        self.node = Node(replace(IDENTITY, rank=rank), ENDPOINTS if rank is None else None, context, 0.0)
        self.hosts: dict[int, HostConversation] = {}
        self.said: list[Any] = []

    @property
    def joiner(self) -> Joiner:
        return self.node.joiner

    def done(self) -> list[Effect]:
        """Take the effects; what was written arrives at the host."""
        done = self.node.effects()
        for effect in done:
            if isinstance(effect, Write):
                self.said += self.hosts[effect.conn].receive_data(effect.data)
        return done

    def step(self) -> type:
        """The type of the state, of the member or of its part in the commit."""
        part = self.joiner.part
        return type(self.joiner.state if part is None else part.state)

    def blocked(self) -> bool:
        return self.joiner.sightings.may_run()

    def membership(self) -> Membership:
        assert self.joiner.membership is not None
        return self.joiner.membership

    def dialed(self) -> list[int]:
        return [effect.conn for effect in self.done() if isinstance(effect, Dial)]

    def answer(
        self,
        conn: int,
        now: float,
        *said: frames.AnyFrame,
        session: bytes = SESSION,
        addresses: tuple[str, ...] = (ADDRESS,),
        port: int = 4000,
    ) -> None:
        """The host at the other end of a dialed connection proves itself and says something."""
        self.hosts[conn] = HostConversation(job="job", attempt="", session=session, addresses=addresses, port=port)
        self.node.handle(Connected(conn, "10.0.0.2", "eth0"), now)
        self.done()
        self.hear(conn, now, *said)

    def hear(self, conn: int, now: float, *said: frames.AnyFrame) -> None:
        for frame in said:
            self.hosts[conn].send(frame)
        self.node.handle(BytesReceived(conn, self.hosts[conn].data_to_send()), now)
        self.done()

    def join(self, now: float = 1.0) -> int:
        self.node.handle(Heard(offer(), HERE), now)
        (conn,) = self.dialed()
        self.answer(conn, now)
        self.hear(conn, now, frames.Joined(session=SESSION))
        return conn

    def seal(self, now: float = 2.0, *, epoch: int = 1) -> int:
        conn = self.join(now)
        self.hear(conn, now, frames.Confirm(session=SESSION, epoch=epoch))
        self.hear(conn, now, sealed(epoch))
        return conn


class Member(Alone):
    """A member that has come to this state with its host, at 0.0; it is still connected on ``conn``."""

    def __init__(self, state: type, *, rank: int | None = 1, timeout: float = 60.0) -> None:
        super().__init__(timeout, rank=rank)
        self._dialed: list[int] = []
        self.conn = self.join(0.0)
        if state is TryingPaths:
            self.node.handle(Heard(offer(addresses=(ADDRESS, SECOND)), HERE), 0.0)
            self.node.handle(TimerDue(), 0.1)
        steps = [frames.Confirm(session=SESSION, epoch=1), sealed(), None, frames.Go(session=SESSION, epoch=1)]
        while self.step() is not state:
            if (said := steps.pop(0)) is not None:
                self.says(said, now=0.0)
            else:
                self.node.handle(StoreProved(SESSION, 1), 0.0)
        self.heard()

    def done(self) -> list[Effect]:
        done = super().done()
        self._dialed += [effect.conn for effect in done if isinstance(effect, Dial)]
        return done

    def dialed(self) -> list[int]:
        """Return the connections that were begun since the last time."""
        self.done()
        dialed, self._dialed = self._dialed, []
        return dialed

    def heard(self) -> list[Any]:
        """Return what the host has heard since the last time."""
        self.done()
        said, self.said = self.said, []
        return said

    def says(self, *said: frames.AnyFrame, now: float = 2.0) -> None:
        """Let the host say this."""
        self.hear(self.conn, now, *said)

    def lose(self, now: float, reason: str = "reset") -> type:
        """Lose the connection; return the state to which that leads."""
        self.node.handle(Disconnected(self.conn, reason), now)
        return self.step()

    def fail(self, now: float, reason: str = "Connection refused (ECONNREFUSED)") -> None:
        """Let each call that is under way fail."""
        for conn in self.dialed():
            self.node.handle(Disconnected(conn, reason), now)

    def come_back(self, now: float, *said: frames.AnyFrame) -> None:
        """Let the host answer the call that is under way or due, and hear JOIN; then it says this."""
        calls = self.dialed()
        if not calls:
            self.node.handle(TimerDue(), now)
            calls = self.dialed()
        (self.conn,) = calls
        self.answer(self.conn, now, *said)

    def meet(self, now: float, *said: frames.AnyFrame) -> None:
        """Let another host offer itself, prove its session, give a seat and say this."""
        self.node.handle(Heard(offer(OTHER, port=4001), HERE), now)
        (self.conn,) = self.dialed()
        self.answer(self.conn, now, frames.Joined(session=OTHER), *said, session=OTHER, port=4001)


def sealed(epoch: int = 1, store_address: str = ADDRESS) -> frames.Sealed:
    return frames.Sealed(
        session=SESSION,
        epoch=epoch,
        place=frames.Place(rank=1, world_size=2, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2),
        store_address=store_address,
        store_port=5000,
        store_token="token",
        roster_digest=b"d" * 32,
    )


def running(state: Any = "running") -> frames.Running:
    return frames.Running(state=state, world_size=2, seconds=5.0, host=ProcessInfo(hostname="h0", pid=1, rank=0))
