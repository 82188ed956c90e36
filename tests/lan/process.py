"""A process: drives one machine of mingle, and can be killed, stopped and continued."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from mingle.errors import MingleError
from mingle.protocol import effects
from mingle.protocol.effects import Effect
from mingle.protocol.events import (
    Accepted,
    Address,
    AddressesChanged,
    BytesReceived,
    Connected,
    Disconnected,
    Heard,
    HeardUnverified,
    Inspected,
    InterfacesChanged,
    Source,
    StoreOpened,
    StoreProved,
    StoreUnreachable,
    TimerDue,
)
from mingle.protocol.explain.deadline import timeout
from mingle.protocol.explain.observations import NetworkFacts
from mingle.protocol.host import Host
from mingle.protocol.links.claims import without_traps
from mingle.protocol.machine import Formation, Identity
from mingle.protocol.member import Joiner
from mingle.protocol.node import Node
from mingle.protocol.session.phases import Open, Placed, State
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import MAX_BYTES, Datagram, List, Offer, Rejected, Seek, encode
from mingle.wire.frames import Blocked
from tests.lan.network import Machine, Network, Nic, Packet
from tests.lan.processor import START_SECONDS, Processor
from tests.lan.tcp import RESET, Connection, End
from tests.support.recording import Recording

LATE_SECONDS = 0.001
"""Timers are late by up to this: a real selector counts in milliseconds."""
ROUNDS = 4
PEER_SECONDS = 0.5
"""How often those are asked who are known by name."""
STORE_SECONDS = (0.001, 0.02)
STORE_SILENT_SECONDS = 2.0


class Endpoint(Protocol):
    """What has connections."""

    machine: Machine

    def tcp_accepted(self, conn: int, end: tuple[Connection, End], address: str) -> None:
        """Somebody connected."""

    def tcp_received(self, conn: int, data: bytes) -> None:
        """Bytes came in."""

    def tcp_closed(self, conn: int, reason: str) -> None:
        """A connection ended."""


class Mute:
    """A server of somebody else's: accepts, and never speaks (or says the same to everybody)."""

    def __init__(self, machine: Machine, port: int, greeting: bytes = b"") -> None:
        self.machine = machine
        self.greeting = greeting
        self.accepted = 0
        machine.listeners[port] = self

    def tcp_accepted(self, conn: int, end: tuple[Connection, End], address: str) -> None:
        """Greets, if it greets at all."""
        self.accepted += 1
        if self.greeting:
            end[0].write(end[1], self.greeting)

    def tcp_received(self, conn: int, data: bytes) -> None:
        """Read and say nothing."""

    def tcp_closed(self, conn: int, reason: str) -> None:
        """Does not care."""


class Process:
    """One rank. It begins when ``start`` is called and runs on after its outcome until it is ended or killed."""

    settles = True
    """Whether it looks at its interfaces no more once it has an outcome."""

    def __init__(
        self,
        network: Network,
        machine: Machine,
        identity: Identity,
        build: Callable[[Recording, float], Node],
        *,
        key: JobKey | None = None,
        ready_after: float | None = 0.2,
        interfaces: tuple[str, ...] | None = None,
        processor: Processor | None = None,
    ) -> None:
        self.world = network.world
        self.network = network
        self.machine = machine
        self.identity = identity
        self.key = key
        self.ready_after = ready_after
        self.interfaces = interfaces
        self.processor = processor
        self.peers: list[Machine] = []
        self.core: Node | None = None
        self.alive = False
        self.stopped = False
        self.started_at = 0.0
        self.stopped_at = self.continued_at = float("-inf")
        """When it was stopped last, and when it last went on."""
        self.formed_at: float | None = None
        self.failed_at: float | None = None
        self.ended_at: float | None = None
        self.deadline = float("inf")
        self.notices: list[str] = []
        self.closed_stores: list[str] = []
        self.rejected: Counter[str] = Counter()
        self.sent = 0
        self.received = 0
        self.store_port: int | None = None
        self.store_token = ""
        self._store_session = b""
        self.recording = Recording(build, keeps=self.world.tracing)
        """What its machine was told, if the world is traced."""
        self._ends: dict[int, tuple[Connection, End]] = {}
        self._dialling: set[int] = set()
        self._inbox: list[Callable[[], None]] = []
        self._todo: deque[Effect] = deque()
        self._wake_at = float("inf")
        self.world.processes.append(self)

    # --- what tests read -------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The time by its own clock."""
        return self.world.now

    def when(self, due: float) -> float:
        """When a time of its own clock comes."""
        return due

    @property
    def name(self) -> str:
        """How a trace calls it."""
        rank = "?" if self.identity.rank is None else self.identity.rank
        return f"{self.identity.job}:{rank}@{self.machine.name}#{self.identity.who.pid}"

    @property
    def outcome(self) -> Formation | None:
        """Its place in the job that has formed."""
        return None if self.core is None else self.core.outcome

    @property
    def failure(self) -> MingleError | None:
        """Why it ended without one."""
        return None if self.core is None else self.core.failure

    @property
    def finished(self) -> bool:
        """Whether there is one or the other."""
        return self.core is not None and self.core.finished

    @property
    def host(self) -> Host:
        """Its machine, or the part of it, that hosts; there must be one."""
        host = None if self.core is None else self.core.host
        assert host is not None
        return host

    @property
    def joiner(self) -> Joiner:
        """The part of its machine that joins."""
        assert self.core is not None
        return self.core.joiner

    @property
    def hosts(self) -> bool:
        """Whether it has a session of its own now."""
        return self.core is not None and self.core.host is not None

    @property
    def phase(self) -> type[State]:
        """Where its session stands."""
        return type(self.host.registrar.state) if self.hosts else Open

    @property
    def holds_store(self) -> bool:
        """Whether it lives, and others can reach the store of its session."""
        state = self.host.registrar.state
        own = self.machine.nic(state.store_address) if isinstance(state, Placed) else None
        return self.alive and own is not None and not self.closed_stores

    @property
    def elapsed(self) -> float:
        """How long it took until the outcome or the failure, in seconds."""
        end = self.formed_at if self.formed_at is not None else self.failed_at
        assert end is not None
        return end - self.started_at

    # --- its life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin now, or as soon as its processor has done what that takes."""
        if self.processor is not None:
            self.processor.submit(self, self._start, START_SECONDS)
        else:
            self._start()

    def _start(self) -> None:
        self.alive = True
        self.started_at = self.world.now
        self.machine.processes.append(self)
        self.core = self.recording.begin(self.now)
        if self.core.endpoints is not None:
            self.machine.listeners[self.core.endpoints.port] = self
        self.deadline = self.core.deadline
        self.world.note(f"{self.name} starts")
        self._flush()
        if self.peers:
            self._ask_peers()

    def kill(self) -> None:
        """End at once, without a word: SIGKILL. The kernel closes what was open."""
        if not self.alive:
            return
        self.world.note(f"{self.name} is killed")
        self._vanish()
        for connection, end in list(self._ends.values()):
            connection.hang_up(end, self._killed())
        self._ends.clear()

    def _killed(self) -> str:
        """What the kernel says for a process that was killed: a reset where it had not read everything."""
        return RESET

    def _vanish(self) -> None:
        self.alive = self.stopped = False
        self.ended_at = self.world.now
        self.machine.processes.remove(self)
        self._inbox.clear()
        self._todo.clear()
        self._dialling.clear()
        for table in (self.machine.listeners, self.machine.stores):
            for port in [port for port, owner in table.items() if owner is self]:
                del table[port]

    def stop(self) -> None:
        """SIGSTOP: the kernel goes on accepting and acknowledging, the process does nothing."""
        if self.alive:
            self.world.note(f"{self.name} is stopped")
            if not self.stopped:
                self.stopped_at = self.world.now
            self.stopped = True

    def cont(self) -> None:
        """SIGCONT: what came in the meantime is there to be read."""
        if not (self.alive and self.stopped):
            return
        self.world.note(f"{self.name} goes on")
        self.stopped = False
        self.continued_at = self.world.now
        self.deadline = max(self.deadline, self.world.now)
        self._carry_out()
        waiting, self._inbox = self._inbox, []
        for event in waiting:
            self._event(event)
        if self.alive:
            self._wake()

    def rewired(self) -> None:
        """Its machine's interfaces have changed: what its driver does after a scan."""
        own = tuple(Address(nic.address, nic.name, nic.prefix_length) for nic in self._nics())
        core = self.core
        assert core is not None
        if core.finished and self.settles:
            return
        for conn, (connection, end) in list(self._ends.items()):
            if conn in self._ends and connection.local_address(end) not in [each.address for each in own]:
                connection.hang_up(end)
                self._ends.pop(conn)
                core.handle(Disconnected(conn, "its address has gone"), self.now)
                self._carry_out()
        core.handle(InterfacesChanged(), self.now)
        if own:
            core.handle(AddressesChanged(own), self.now)

    def scan(self) -> None:
        """Look at the interfaces."""
        self._event(self.rewired)

    def give_up(self) -> None:
        """Its time is up."""
        assert self.core is not None
        self.core.give_up(timeout(self.core.situation(), self.facts()))
        self._flush()

    def close(self) -> None:
        """The user closes the job: says good-bye and hangs up; the process has no part in it any more."""
        core = self.core
        if not self.alive or core is None:
            return
        core.close("closed by its user")
        self._carry_out()
        self._end()

    def _end(self) -> None:
        if not self.alive:
            return
        self.world.note(f"{self.name} ends: {self.failure and self.failure.observation.splitlines()[0]}")
        self._vanish()
        for connection, end in list(self._ends.values()):
            connection.hang_up(end)
        self._ends.clear()

    # --- events ----------------------------------------------------------------------------------------------------

    def _event(self, happen: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._inbox.append(happen)
        elif self.processor is not None:
            self.processor.submit(self, functools.partial(self._serve, happen))
        else:
            self._serve(happen)

    def _serve(self, happen: Callable[[], None]) -> None:
        if self.alive and self.stopped:
            self._inbox.append(happen)
            return
        if self.alive:
            happen()
        if self.alive:
            self._flush()

    def heard(self, packet: Packet, nic: Nic, sender: Process | None, via: Nic, multicast: bool) -> None:
        """A datagram has arrived."""
        if self.alive and (self.interfaces is None or nic.name in self.interfaces):
            self._event(functools.partial(self._heard, packet, nic, sender, via, multicast))

    def _heard(self, packet: Packet, nic: Nic, sender: Process | None, via: Nic, multicast: bool) -> None:
        assert self.core is not None
        message = packet.opened(self.key)
        source = Source(
            interface=nic.name,
            multicast=multicast,
            signed=packet.signed,
            address=via.address,
            reply_to=sender,
        )
        if isinstance(message, Rejected):
            self.rejected[message.reason] += 1
            unverified = packet.opened(None)
            if not isinstance(unverified, Rejected):
                self.core.handle(HeardUnverified(unverified), self.now)
            return
        self.received += 1
        safe = without_traps(message, on_loopback=False) if isinstance(message, Offer) else message
        if safe is not None:
            for watch in self.world.on_heard:
                watch(self, safe)
            self.core.handle(Heard(safe, source), self.now)

    def find(self, message: Datagram) -> None:
        """An object lies in a shared folder that this process has just listed."""

        def read() -> None:
            assert self.core is not None
            self.core.handle(
                Heard(message, Source(interface="", multicast=False, address="dir:/shared", folder=True)), self.now
            )

        self._event(read)

    def tcp_accepted(self, conn: int, end: tuple[Connection, End], address: str) -> None:
        """Somebody connected to the control port."""

        def accept() -> None:
            assert self.core is not None
            self._ends[conn] = end
            self.core.handle(Accepted(conn, address), self.now)

        self._event(accept)

    def tcp_received(self, conn: int, data: bytes) -> None:
        """Bytes came in."""

        def receive() -> None:
            if conn in self._ends:
                assert self.core is not None
                assert conn in self.core.links, "a connection that was not hung up has no owner"
                self.core.handle(BytesReceived(conn, data), self.now)

        self._event(receive)

    def tcp_closed(self, conn: int, reason: str) -> None:
        """A connection ended."""

        def close() -> None:
            if self._ends.pop(conn, None) is None and conn not in self._dialling:
                return
            self._dialling.discard(conn)
            core = self.core
            assert core is not None
            assert conn in core.links, "a connection that was not hung up has no owner"
            core.handle(Disconnected(conn, reason), self.now)

        self._event(close)

    def _connected(self, conn: int, end: tuple[Connection, End], nic: Nic) -> None:
        def connect() -> None:
            if conn not in self._dialling:
                end[0].hang_up(end[1])
                return
            self._dialling.discard(conn)
            self._ends[conn] = end
            assert self.core is not None
            self.core.handle(Connected(conn, local, nic.name), self.now)

        local = nic.address
        if self.alive:
            self._event(connect)
        else:
            end[0].hang_up(end[1], "Connection reset by peer")

    # --- the loop --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        core = self.core
        assert core is not None
        due = core.next_timer()
        now = self.world.now
        if core.expired(now):
            self.give_up()
            return
        # After a pause several things may be due, and each may be done in a round of its own.
        for _ in range(ROUNDS):
            if due is None or due > now:
                break
            core.handle(TimerDue(), now)
            due = core.next_timer()
        else:
            raise AssertionError(f"busy loop: {due} is not after {now}")
        self._flush()

    def facts(self) -> NetworkFacts:
        """What a report says of the network."""
        return NetworkFacts(
            interfaces=[nic.name for nic in self.machine.nics],
            groups=["239.192.0.1"],
            port=29499,
            sent=self.sent,
            received=self.received,
            rejected=self.rejected,
        )

    def _flush(self) -> None:
        """Carries out effects, sees whether it has ended, and sets the alarm."""
        core = self.core
        assert core is not None
        self._carry_out()
        if core.outcome is not None and self.formed_at is None:
            self.formed_at = self.world.now
            self.world.note(f"{self.name} has formed")
            if self.ready_after is not None and core.host is None:
                assert core.joiner.membership is not None
                ready = self.recording.membership(core.joiner.membership).ready
                self.world.after(self.ready_after, functools.partial(self._event, lambda: ready(self.now)))
        if core.failure is not None and self.failed_at is None and not self.stopped:
            self.failed_at = self.world.now
            core.close("failed")
            self._carry_out()
            self._end()
        for watch in list(self.world.watchers):
            watch(self)
        if self.alive:
            self._set_alarm()

    def _set_alarm(self) -> None:
        assert self.core is not None
        due = self.core.next_timer()
        if due is None or (due := self.when(due)) >= self._wake_at:
            return
        self._wake_at = max(due, self.world.now) + self.world.rng.uniform(0, LATE_SECONDS)
        self.world.at(self._wake_at, functools.partial(self._alarm, self._wake_at))

    def _alarm(self, set_for: float) -> None:
        if not self.alive or set_for != self._wake_at:
            return
        self._wake_at = float("inf")
        if self.processor is not None:
            self.processor.submit_timers(self, self._timers)
        else:
            self._timers()

    def _timers(self) -> None:
        if self.alive and not self.stopped:
            self._wake()

    # --- effects ---------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        assert self.core is not None
        self._todo += self.core.effects()
        while self._todo:
            if self.stopped:
                return
            self._do(self._todo.popleft())
            if not self._todo and self.alive:
                self._todo += self.core.effects()

    def _do(self, effect: Effect) -> None:
        match effect:
            case effects.Multicast(message, browse, _, padded, _):
                self._multicast(message, browse, padded=padded)
            case effects.Answer(source, message):
                self.sent += 1
                if isinstance(source.reply_to, Process):  # else its question was played again
                    self.network.unicast(self, source.reply_to, Packet(encode(message, self.key)))
            case effects.Dial(conn, address, port):
                self._dial(conn, address, port)
            case effects.Write(conn, data):
                if conn in self._ends:
                    self._write(conn, data)
            case effects.Hangup(conn):
                self._dialling.discard(conn)
                if conn in self._ends:
                    connection, end = self._ends.pop(conn)
                    connection.hang_up(end)
            case effects.Reset(conn):
                if conn in self._ends:
                    connection, end = self._ends.pop(conn)
                    connection.hang_up(end, RESET)
            case effects.OpenStore(epoch, address):
                self._open_store(epoch, address)
            case effects.ProveStore():
                self._prove_store(effect)
            case effects.CloseStore(reason):
                self.world.note(f"{self.name} closes its store: {reason}")
                self.closed_stores.append(reason)
                if self.store_port is not None:
                    self.machine.stores.pop(self.store_port, None)
            case effects.Inspect():
                self._inspect(effect)
            case effects.Notice(text):
                self.world.note(f"{self.name} says: {text}")
                self.notices.append(text)

    def _write(self, conn: int, data: bytes) -> None:
        connection, end = self._ends[conn]
        for watch in list(self.world.before_write):
            watch(self, connection.peer(end).owner, data)
        if self.stopped:
            self._todo.appendleft(effects.Write(conn, data))
        elif self.alive:
            connection.write(end, data)

    def _nics(self) -> list[Nic]:
        return [nic for nic in self.machine.nics if self.interfaces is None or nic.name in self.interfaces]

    def _multicast(self, message: Datagram, browse: bool, *, padded: bool) -> None:
        for watch in () if browse else self.world.on_multicast:
            watch(self, message)
        for nic in self._nics():
            sent = message
            if isinstance(message, Offer) and nic.address in message.addresses:
                rest = (address for address in message.addresses if address != nic.address)
                sent = msgspec.structs.replace(message, addresses=(nic.address, *rest))
            self.sent += 1
            if padded and isinstance(sent, Seek | List):
                packet = Packet(datagrams.padded(sent, MAX_BYTES, self.key))
            else:
                packet = Packet(encode(sent, self.key))
            self.network.multicast(self.identity.job, nic, packet, browse=browse, sender=self)

    def _ask_peers(self) -> None:
        assert self.core is not None
        if not self.alive:
            return
        message = None if self.stopped else self.core.calling()
        if message is not None:
            packet = Packet(encode(message, self.key))
            for process in [each for peer in self.peers for each in peer.processes]:
                self.sent += 1
                self.network.unicast(self, process, packet)
        self.world.after(PEER_SECONDS, self._ask_peers)

    def _dial(self, conn: int, address: str, port: int) -> None:
        self._dialling.add(conn)
        route = self.network.route(self.machine, address)
        delay = self.world.rng.uniform(0.0001, 0.001)
        if route is None or not route.near.up:
            self.world.after(delay, functools.partial(self.tcp_closed, conn, "Network is unreachable"))
            return
        delay = 2 * self._way_delay(route.near)
        self.world.after(delay, functools.partial(self._arrive, conn, address, port))

    def _way_delay(self, nic: Nic) -> float:
        bounds = (0.0001, 0.0002) if nic.segment is None else nic.segment.tcp_delay
        return self.world.rng.uniform(*bounds)

    def _arrive(self, conn: int, address: str, port: int) -> None:
        route = self.network.route(self.machine, address)
        if route is None:
            return
        far = route.far.machine
        if not route.alive:
            if far is not self.machine and route.barrier(self.machine, far) in ("reset", "icmp"):
                self.tcp_closed(conn, "Connection refused (ECONNREFUSED)")
            return
        if far is not self.machine and (address in far.filtered or not far.takes_calls or not route.opens):
            return
        listener = far.listeners.get(port)
        if listener is None:
            self.tcp_closed(conn, "Connection refused (ECONNREFUSED)")
            return
        near_end, far_end = End(self, conn), End(listener, self.world.new_id())
        connection = Connection(self.network, route, near_end, far_end)
        listener.tcp_accepted(far_end.conn, (connection, far_end), self.machine.nat or route.near.address)
        self._connected(conn, (connection, near_end), route.near)

    # --- the store -------------------------------------------------------------------------------------------------

    def _open_store(self, epoch: int, address: str) -> None:
        """Open the store of the present session, unless it stands, and tell its port."""
        assert self.core is not None
        host = self.core.host
        assert host is not None

        def opened() -> None:
            assert self.core is not None
            if host.closed or host is not self.core.host:
                return
            if self.store_port is None or host.session != self._store_session:
                self.store_port = 40_000 + self.world.new_id() % 20_000
                self.store_token = self.world.rng.randbytes(8).hex()
                self._store_session = host.session
            self.machine.stores[self.store_port] = self
            self.core.handle(StoreOpened(epoch, self.store_port, self.store_token), self.now)

        assert address in self.machine.addresses, "the store shall listen on an address that was never ours"
        self.world.after(self.world.rng.uniform(*self.machine.opening), functools.partial(self._event, opened))

    def _inspect(self, wanted: effects.Inspect) -> None:
        """Find out what the machine blocks: often nothing, and sometimes too late."""
        rng = self.world.rng
        blocked = Blocked(address=rng.choice(wanted.peers).address, chain="inet filter input", rule="tcp drop")
        found = Inspected(wanted.number, blocked if rng.random() < 0.5 else None)

        def inspected() -> None:
            assert self.core is not None
            self.core.handle(found, self.now)

        self.world.after(rng.choice((0.05, 0.05, 1.0, 5.0)), functools.partial(self._event, inspected))

    def _prove_store(self, wanted: effects.ProveStore) -> None:
        address, port = wanted.address, wanted.port

        def proved() -> None:
            assert self.core is not None
            self.core.handle(StoreProved(wanted.session, wanted.epoch), self.now)

        def unreachable(reason: str) -> None:
            assert self.core is not None
            self.core.handle(StoreUnreachable(wanted.session, wanted.epoch, reason), self.now)

        route = self.network.route(self.machine, address.partition("%")[0])
        delay = self.world.rng.uniform(*STORE_SECONDS)
        if self.machine.stores_shut:
            route = None
        store = None if route is None else route.far.machine.stores.get(port)
        if route is None or not route.opens or (store is not None and store.stopped):
            delay, happen = STORE_SILENT_SECONDS, functools.partial(unreachable, "no answer")
        elif store is None:
            happen = functools.partial(unreachable, "Connection refused")
        elif store.store_token != wanted.token:
            happen = functools.partial(unreachable, "another store answers")
        else:
            happen = functools.partial(proved)
        self.world.after(delay, functools.partial(self._event, happen))
