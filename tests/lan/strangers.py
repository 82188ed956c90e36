"""Peers that keep the handshake and then say anything: every frame there is, in any order, with any content."""

from __future__ import annotations

import random
from collections.abc import Callable

from mingle.protocol.links.handshake import Call, HandshakeFailed, HostConversation, MemberConversation
from mingle.wire import frames
from mingle.wire.authentication import new_nonce
from mingle.wire.datagrams import Offer, Rejected
from tests.lan.network import Machine, Network
from tests.lan.process import Process
from tests.lan.tcp import Connection, End

FRAMES_EACH = 12


def any_frame(rng: random.Random, session: bytes, job: str, member: bytes) -> frames.AnyFrame:
    """Return some frame, valid in itself."""
    name = session if rng.random() < 0.9 else rng.randbytes(16)
    epoch = rng.choice((0, 1, 1, 2, 3, 2**31 - 1))
    rank = rng.choice((None, 0, 1, 2, 3, 999_999))
    number = rank or 0
    text = rng.choice(("", "x", "\U0001f600" * 2048))
    address = rng.choice(("10.0.0.1", "10.0.0.7", "::", "fe80::1", "255.255.255.255"))
    who = frames.ProcessInfo(hostname=text[:64], pid=rng.getrandbits(32), address=address, rank=rank)
    offer = Offer(
        job=rng.choice((job, job, "another")),
        session=name,
        host=rng.choice((member, bytes(16), rng.randbytes(16))),
        addresses=(address,),
        port=rng.choice((1, 4000, 4001)),
        world_size=4,
        joined=number,
        state=rng.choice(("open", "sealed")),
        assigned=rng.random() < 0.7,
    )
    path = frames.Path(host_address=address, local_address=rng.choice((address, "::1")), interface=text[:64])
    paths = (path,) * rng.choice((0, 1, 64))
    makers: list[Callable[[], frames.AnyFrame]] = [
        lambda: Call(job=job, member=member, session=name, purpose="join", who=who).hello(None),
        lambda: frames.Welcome(session=name, nonce=new_nonce(), addresses=(address,), port=1),
        lambda: frames.Prove(proof=b"?" * rng.choice((0, 32))),
        lambda: frames.Join(
            world_size=4, rank=rank, node=text[:256], local_rank=number, node_rank=number, who=who, paths=paths
        ),
        lambda: frames.Join(world_size=4, rank=rng.randrange(4), node="n", who=who, paths=paths),
        lambda: frames.Joined(session=name, epoch=epoch),
        lambda: frames.Refused(reason=rng.choice(("running", "full", "session", "secret")), who=who),
        lambda: frames.Refused(reason=rng.choice(("rank taken", "kind", "world size")), detail=text),
        lambda: frames.Confirm(session=name, epoch=epoch),
        lambda: frames.Confirmed(session=name, epoch=epoch, paths=paths),
        lambda: frames.Sealed(
            session=name,
            epoch=epoch,
            place=frames.Place(
                rank=number, world_size=4, local_rank=number, local_world_size=7, node_rank=number, num_nodes=4
            ),
            store_address=address,
            store_port=1,
            store_token="?",
            roster_digest=b"",
        ),
        lambda: frames.Ack(session=name, epoch=epoch),
        lambda: frames.Go(session=name, epoch=epoch),
        lambda: frames.Void(session=name, epoch=epoch, reason=text),
        lambda: frames.Ready(session=name),
        lambda: frames.Leave(session=name, reason=text),
        lambda: frames.Closed(
            session=name,
            reason=text,
            conflict=rng.random() < 0.1,
            regather=rng.random() < 0.5,
            remedy=f"{text}: `x; y`",
        ),
        lambda: frames.Ask(what=rng.choice(("status", "roster"))),
        lambda: frames.Closed(session=name, offer=offer),
        lambda: frames.HostSeen(offer=offer),
        lambda: frames.Unreachable(session=name),
        lambda: frames.Members(generation=epoch, quorum=rng.random() < 0.5, present=(who,)),
        lambda: frames.Status(joined=number, world_size=4, missing=(number,), left=(text,), seated=member[:5]),
        lambda: frames.Roster(first=number, total=4, seats=()),
        lambda: frames.Ping(number=number),
        lambda: frames.Pong(number=number, proving=rng.random() < 0.5),
        lambda: frames.Running(
            state=rng.choice(("open", "sealed", "running")),
            world_size=4,
            host=who,
            roster=text,
            seconds=1e300,
            surplus=rng.random() < 0.5,
        ),
    ]
    return rng.choice(makers)()


class Caller:
    """Calls a host, under a member id of its choice, and babbles."""

    def __init__(self, network: Network, machine: Machine, host: Process, member: bytes) -> None:
        self.machine = machine
        self._world = network.world
        self._rng = network.world.rng
        self._host = host
        core = host.host
        route = network.route(machine, core.endpoints.addresses[0].address)
        assert route is not None
        self._member = member
        self._call = self._hello()
        self._conversation = MemberConversation(self._call, (core.endpoints.addresses[0].address, core.endpoints.port))
        self._near = End(self, self._world.new_id())
        far = End(host, self._world.new_id())
        self._connection = Connection(network, route, self._near, far)
        host.tcp_accepted(far.conn, (self._connection, far), route.near.address)
        self._write()
        for _ in range(FRAMES_EACH):
            self._world.after(self._rng.uniform(0, 0.5), self._babble)

    def _hello(self) -> Call:
        core = self._host.host
        purpose = self._rng.choice(("join", "join", "probe", "conflict"))
        return Call(job=core.identity.job, member=self._member, session=core.session, purpose=purpose)

    def _write(self) -> None:
        data = self._conversation.data_to_send()
        if data and not self._near.closed:
            self._connection.write(self._near, data)

    def _babble(self) -> None:
        if self._conversation.welcome is not None or self._rng.random() < 0.05:
            session, job = self._call.session, self._call.job
            self._conversation.send(any_frame(self._rng, session, job, self._call.member))
            self._write()
        if self._rng.random() < 0.03:
            self._connection.hang_up(self._near)

    def tcp_accepted(self, conn: int, end: tuple[Connection, End], address: str) -> None:
        """Nobody calls it."""

    def tcp_received(self, conn: int, data: bytes) -> None:
        """Keep the handshake."""
        try:
            self._conversation.receive_data(data)
        except (HandshakeFailed, Rejected):
            self._connection.hang_up(self._near)
        self._write()

    def tcp_closed(self, conn: int, reason: str) -> None:
        """Does not care."""


class Impostor(Caller):
    """Calls a host under the id of a process that it has overheard, and plays its part on one connection."""

    def __init__(self, network: Network, machine: Machine, host: Process, victim: Process) -> None:
        self._victim = victim
        self._joined = False
        super().__init__(network, machine, host, victim.identity.member)

    def _hello(self) -> Call:
        return self._victim.identity.call(self._host.host.session, "join")

    def _babble(self) -> None:
        host, identity = self._host, self._victim.identity
        if self._conversation.welcome is None or not host.hosts:
            return
        session, epoch = self._call.session, host.host.registrar.state.epoch
        seat = host.host.registrar.seats.get(identity.member)
        paths = () if seat is None else seat.paths
        if not self._joined:
            self._joined = True
            self._conversation.send(
                identity.join(identity.who, paths, self._rng.choice((b"", self._rng.randbytes(16))))
            )
        self._conversation.send(
            self._rng.choice(
                (
                    frames.Confirmed(session=session, epoch=epoch, paths=paths),
                    frames.Ack(session=session, epoch=epoch),
                    frames.Pong(number=self._rng.randrange(9), proving=True),
                    frames.Ready(session=session),
                    frames.Unreachable(session=session),
                    frames.Leave(session=session, reason="forged"),
                )
            )
        )
        self._write()


class Babbler:
    """Hosts a session, so it says, and babbles to everybody who calls."""

    def __init__(self, network: Network, machine: Machine, port: int, job: str, session: bytes) -> None:
        self.machine = machine
        self._world = network.world
        self._rng = network.world.rng
        self._port = port
        self._job = job
        self._session = session
        self._callers: dict[int, tuple[HostConversation, Connection, End]] = {}
        machine.listeners[port] = self

    def tcp_accepted(self, conn: int, end: tuple[Connection, End], address: str) -> None:
        """Begin a conversation and plan what to say."""
        conversation = HostConversation(
            job=self._job,
            attempt="",
            session=self._session,
            addresses=(self.machine.nics[0].address,),
            port=self._port,
        )
        self._callers[conn] = (conversation, *end)
        for _ in range(FRAMES_EACH):
            self._world.after(self._rng.uniform(0, 0.5), lambda: self._babble(conn))

    def _babble(self, conn: int) -> None:
        conversation, connection, end = self._callers[conn]
        if conversation.proved or self._rng.random() < 0.05:
            conversation.send(any_frame(self._rng, self._session, self._job, self._session))
        data = conversation.data_to_send()
        if data and not end.closed:
            connection.write(end, data)
        if self._rng.random() < 0.03:
            connection.hang_up(end)

    def tcp_received(self, conn: int, data: bytes) -> None:
        """Keep the handshake."""
        conversation, connection, end = self._callers[conn]
        try:
            conversation.receive_data(data)
        except (HandshakeFailed, Rejected):
            connection.hang_up(end)
        out = conversation.data_to_send()
        if out and not end.closed:
            connection.write(end, out)

    def tcp_closed(self, conn: int, reason: str) -> None:
        """Does not care."""
