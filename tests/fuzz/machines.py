"""The whole machines under fuzz: datagrams, streams and the clock reach a host, a rank, an elector and an agent."""

from __future__ import annotations

import functools
import itertools
import random

from mingle.elastic.agent import Agent
from mingle.elastic.quorum import Nodes, Policy
from mingle.protocol.effects import CloseStore, Dial, Hangup, Inspect, OpenStore, ProveStore, Reset, Write
from mingle.protocol.events import (
    Accepted,
    Address,
    BytesReceived,
    Connected,
    Disconnected,
    Heard,
    Inspected,
    Source,
    StoreOpened,
    StoreProved,
    StoreUnreachable,
    TimerDue,
)
from mingle.protocol.machine import Context, Endpoints, Identity
from mingle.protocol.node import Node
from mingle.wire import datagrams
from mingle.wire.frames import ProcessInfo
from tests.golden.examples import ADDRESSES, HOST, JOB, PORT, SESSION
from tests.support.recording import Recording

from . import mutation
from .peers import WORLD_SIZE, HostPeer, MemberPeer, Peer
from .targets import DATAGRAMS

OWN = (Address("192.0.2.10", "eth0", 24), Address("2001:db8::a", "eth0", 64))
TIMEOUT_SECONDS = 120.0
CONNECTIONS = 64
POLICY = Policy(nodes=Nodes(minimum=1, maximum=WORLD_SIZE), last_call=1.0)


class Theatre:
    """One machine and everybody else, who is not to be trusted.

    Args:
        kind: ``host``, ``rank``, ``elector`` or ``agent``.
        rng: decides everything.
    """

    def __init__(self, kind: str, rng: random.Random) -> None:
        self._kind, self._rng = kind, rng
        self._plays = 0
        self._begin()

    def _begin(self) -> None:
        rng, self._plays = self._rng, self._plays + 1
        self._now = 1000.0
        self._ids = itertools.count(1).__next__
        self._open: dict[int, Peer] = {}
        self._honest = rng.choice((0.5, 0.9, 0.99, 1.0))
        rank = {"host": 0, "rank": 1}.get(self._kind)
        identity = Identity(
            job=JOB,
            attempt="1",
            member=HOST if self._kind == "host" else rng.randbytes(16),
            rank=rank,
            world_size=WORLD_SIZE,
            node="node",
            who=ProcessInfo(hostname="node-0", pid=1, address=ADDRESSES[0], rank=rank),
            kind="agents" if self._kind == "agent" else "ranks",
            minimum=POLICY.nodes.minimum if self._kind == "agent" else None,
        )
        seed, ids = rng.getrandbits(32), self._ids
        endpoints = Endpoints(addresses=OWN, port=PORT)

        def build(recording: Recording, now: float) -> Node:
            new_id = functools.partial(recording.draw, ids)
            context = Context(key=None, new_id=new_id, rng=random.Random(seed), timeout=TIMEOUT_SECONDS)
            if self._kind == "rank":
                return Node(identity, None, context, now)
            if self._kind == "host":
                return Node(identity, endpoints, context, now, new_session=lambda: SESSION)
            new_session = functools.partial(recording.draw, functools.partial(rng.randbytes, 16))
            if self._kind == "agent":
                return Agent(
                    identity,
                    endpoints,
                    context,
                    now,
                    policy=POLICY,
                    wall_clock=lambda: 1_700_000_000.0,
                    new_session=new_session,
                )
            return Node(identity, endpoints, context, now, new_session=new_session)

        self.recording = Recording(build)
        self.machine: Node = self.recording.begin(self._now)
        self._carry_out()

    def step(self) -> None:
        """Have one thing happen; if the machine breaks, print all that it was told."""
        try:
            self._step()
        except BaseException:
            print(self.recording)
            raise

    def _step(self) -> None:
        rng, machine = self._rng, self.machine
        if (machine.finished and rng.random() < 0.02) or rng.random() < 0.001:
            self._begin()
            return
        self._now += rng.choice((0.0, 0.001, 0.001, 0.01, 0.3))
        due = machine.next_timer()
        if due is not None and due <= self._now:
            machine.handle(TimerDue(), self._now)
        if isinstance(machine, Agent) and machine.finished and rng.random() < 0.1:
            machine.next_round((-1, -1), self._now)
        elif rng.random() < 0.3:
            self._hear(mutation.datagram(rng.choice(DATAGRAMS), rng))
        else:
            self._connection()
        self._carry_out()
        assert len(self._open) <= CONNECTIONS

    def _hear(self, untrusted: bytes) -> None:
        source = Source(interface="eth0", multicast=self._rng.random() < 0.8, address="192.0.2.66")
        try:
            message = datagrams.decode(untrusted)
        except datagrams.Rejected:
            return
        self.machine.handle(Heard(message, source), self._now)

    def _connection(self) -> None:
        rng, machine = self._rng, self.machine
        session = self._session()
        if session is not None and len(self._open) < CONNECTIONS and rng.random() < 0.1:
            conn = self._ids()
            machine.handle(Accepted(conn, "192.0.2.66"), self._now)
            rank = 1 if self._kind == "host" and rng.random() < 0.9 else None
            self._open[conn] = MemberPeer(session, rank, rng, self._honest, agent=self._kind == "agent")
        if not self._open:
            return
        conn = rng.choice(list(self._open))
        if conn not in machine.links:
            del self._open[conn]
        elif rng.random() < 0.02:
            self._close(conn)
        else:
            untrusted = self._open[conn].says()
            half = rng.randrange(len(untrusted) + 1)
            for piece in (untrusted[:half], untrusted[half:]):
                if piece and conn in machine.links:
                    machine.handle(BytesReceived(conn, piece), self._now)
                    self._carry_out()

    def _session(self) -> bytes | None:
        """The session that can be joined here."""
        return None if self.machine.host is None else self.machine.host.session

    def _close(self, conn: int) -> None:
        self._open.pop(conn, None)
        if conn not in self.machine.links:
            return
        self.machine.handle(Disconnected(conn, "reset"), self._now)

    def _carry_out(self) -> None:
        while effects := self.machine.effects():
            for effect in effects:
                self._perform(effect)

    def _perform(self, effect: object) -> None:
        rng, machine = self._rng, self.machine
        match effect:
            case Dial(conn) if conn not in machine.links:
                self._open.pop(conn, None)  # given up before it was dialed
            case Dial(conn):
                if len(self._open) < CONNECTIONS and rng.random() < 0.8:
                    self._open[conn] = HostPeer(rng, self._honest)
                    machine.handle(Connected(conn, "192.0.2.13", "eth0"), self._now)
                else:
                    self._close(conn)
            case Write(conn, data):
                if conn in self._open:
                    self._open[conn].heard(data)
            case Hangup(conn) | Reset(conn):
                self._open.pop(conn, None)
            case OpenStore(epoch):
                assert machine.host is not None
                machine.handle(StoreOpened(epoch, 4567, "token"), self._now)
            case ProveStore(epoch=epoch, session=session):
                assert self._kind != "host"
                if rng.random() < 0.8:
                    machine.handle(StoreProved(session, epoch), self._now)
                else:
                    machine.handle(StoreUnreachable(session, epoch, "refused"), self._now)
            case Inspect(number=number):
                machine.handle(Inspected(number, None), self._now)
            case CloseStore():
                assert machine.finished or isinstance(machine, Agent), "only agents outlive their session"


KINDS = ("host", "rank", "elector", "agent")
