"""A member alone with a host that says what the test tells it to say."""

from __future__ import annotations

import itertools
import random
from typing import Any

from mingle.protocol.effects import Dial, Effect, Write
from mingle.protocol.events import BytesReceived, Connected, Heard, Source
from mingle.protocol.links.handshake import HostConversation
from mingle.protocol.machine import Context, Identity
from mingle.protocol.member import Joiner
from mingle.protocol.membership import Membership
from mingle.protocol.node import Node
from mingle.wire import frames
from mingle.wire.datagrams import Offer, State
from mingle.wire.frames import ProcessInfo

SESSION, OTHER = b"S" * 16, b"T" * 16
ADDRESS = "10.0.0.1"
HERE = Source(interface="eth0", address=ADDRESS)
IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h1", pid=11)
)


def offer(session: bytes = SESSION, *, state: State = "open", port: int = 4000) -> Offer:
    return Offer(job="job", session=session, host=session, addresses=(ADDRESS,), port=port, world_size=2, state=state)


class Alone:
    """A node that looks for a host, and a host that says what it is told to say."""

    def __init__(self, timeout: float = 60.0) -> None:
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=timeout)
        self.node = Node(IDENTITY, None, context, 0.0)
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
