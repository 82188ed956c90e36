"""The loop: the only place where machines, sockets and the clock meet.

One selector serves the datagrams, the control connections and the calls of other threads. Until the job has formed
it runs in the calling thread, which therefore waits on sockets with deadlines and can be interrupted at any moment;
afterwards it goes on in a daemon thread, to answer those who ask.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import msgspec

from mingle import connections, datagrams, forksafe, interfaces, store
from mingle.authentication import JobKey
from mingle.connections import Connections
from mingle.electing import Elector
from mingle.errors import InterfaceError, MingleError
from mingle.groups import LOBBY, job_group
from mingle.hosting import Address, Host
from mingle.joining import Joiner
from mingle.machine import (
    Answer,
    CloseStore,
    Dial,
    Effect,
    Formation,
    Hangup,
    Identity,
    Multicast,
    NetworkFacts,
    NewId,
    Notice,
    OpenStore,
    ProveStore,
    Source,
    Write,
)
from mingle.peers import PeerSchedule, Resolver
from mingle.progress import Progress
from mingle.settings import Settings
from mingle.transport import Received, Transport

logger = logging.getLogger("mingle")

Machine: TypeAlias = Host | Joiner | Elector

RESCAN_SECONDS = 2.0
"""How often the interfaces are looked at while waiting: a NIC may come or go."""
REFRESH_SECONDS = 30.0
"""How often memberships are renewed: a switch that snoops without a querier forgets them after minutes."""
LONGEST_WAIT_SECONDS = 60.0
LOOKED_AT_UNVERIFIED = 256
"""How many wrongly signed datagrams are parsed for the report; bounded against a flood of them."""
UNICAST_QUESTION_BYTES = 1000
"""A unicast question is padded to this: no answer to it is longer."""


class Discovery:
    """One rank's discovery, from its first datagram to the end of its session.

    Raises:
        InterfaceError: no interface can be used.
        ConfigurationError: the fixed port of the store is taken.
    """

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self.settings = settings
        self.identity = identity
        self.started = time.monotonic()
        self.store_server: store.StoreServer | None = None
        self.watch: Callable[[], float] | None = None
        """Called by the serving thread; returns the seconds until it wants to be called again."""
        self.on_store_lost: Callable[[str], None] | None = None
        self._rng = random.Random()
        self._key = JobKey(settings.secret, settings.job_id) if settings.secret is not None else None
        self._group = job_group(settings.job_id)
        self._rejected: Counter[str] = Counter()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._closed = False
        self._dialled: dict[int, str] = {}
        self._watch_due = self.started
        self._stage = ""
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()

    # --- opening and closing ---------------------------------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack) -> None:
        settings, now = self.settings, self.started
        self._found = interfaces.scan()
        self._usable = interfaces.choose(
            self._found, named=settings.interfaces, family=settings.family
        ).usable
        self._selector = forksafe.register(selectors.DefaultSelector())
        stack.callback(self._selector.close)
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            forksafe.register(end).setblocking(False)
            stack.callback(end.close)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._run_calls)
        self._transport: Transport | None = Transport(
            self._usable, groups=(self._group, LOBBY), port=settings.port, ttl=settings.ttl, family=settings.family
        )
        stack.callback(self._close_transport)
        self._watch_sockets(self._transport.sockets())
        new_id = connections.counter()
        self._connections = Connections(self._selector, new_id)
        stack.callback(self._connections.close)
        self._progress = Progress(
            settings.job_id, settings.world_size, settings.rank, off=settings.progress == "off", now=now
        )
        stack.callback(self._progress.close)
        self._peers = PeerSchedule(self._rng)
        self._resolver = Resolver(settings.peers, settings.port, settings.family, exclude=frozenset())
        stack.callback(self._resolver.stop)
        self._rescan_due = now + RESCAN_SECONDS
        self._refresh_due = now + REFRESH_SECONDS
        self._machine = self._make_machine(new_id, now)

    def _make_machine(self, new_id: NewId, now: float) -> Machine:
        settings = self.settings
        if self.identity.rank not in (0, None):
            return Joiner(
                self.identity,
                key=self._key,
                timeout=settings.discovery_timeout,
                new_id=new_id,
                rng=self._rng,
                now=now,
            )
        addresses = self._own_addresses()
        if settings.master_port is not None:
            store.check_port(settings.master_port, [each.address for each in addresses])
        self._connections.listen([(each.address, self._index(each.interface)) for each in addresses])
        advertised = (settings.advertise,) if settings.advertise else ()
        if self.identity.rank is None:
            return Elector(
                self.identity,
                addresses=addresses,
                port=self._connections.port,
                key=self._key,
                timeout=settings.discovery_timeout,
                new_id=new_id,
                rng=self._rng,
                now=now,
                advertised=advertised,
            )
        return Host(
            self.identity,
            secrets.token_bytes(16),
            addresses,
            self._connections.port,
            self._key,
            settings.discovery_timeout,
            new_id,
            self._rng,
            now,
            advertised=advertised,
        )

    def _own_addresses(self) -> tuple[Address, ...]:
        """Every address to listen on, best first; a link-local one only where an interface has no other."""
        addresses = []
        for interface in self._usable:
            every = interface.of_family(self.settings.family)
            global_ones = [each for each in every if not each.is_link_local]
            addresses += [
                Address(str(each.ip), interface.name, each.network.prefixlen) for each in global_ones or every[:1]
            ]
        return tuple(addresses[: datagrams.MAX_ADDRESSES])

    def _index(self, interface_name: str) -> int:
        """Returns an interface's index; where none is named and only one can be meant, that one's."""
        if not interface_name and len(self._usable) == 1:
            return self._usable[0].index
        return next((each.index for each in self._found if each.name == interface_name), 0)

    def _close_transport(self) -> None:
        if self._transport is None:
            return
        for sock in self._transport.sockets():
            self._unwatch(sock)
        self._transport.close()
        self._transport = None

    def _watch_sockets(self, sockets: Iterable[socket.socket]) -> None:
        for sock in sockets:
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read_datagrams, sock))

    def _unwatch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Formation:
        """Waits until the job has formed.

        Raises:
            MingleError: it has not, and why.
        """
        machine = self._machine
        try:
            self._carry_out()
            while not machine.finished:
                if machine.expired(time.monotonic()):
                    machine.give_up(self.facts())
                    break
                self._turn()
        except KeyboardInterrupt:
            self.close("interrupted")
            raise
        except BaseException:
            self.close("failed")
            raise
        self._progress.close()
        if machine.failure is not None:
            self.close(type(machine.failure).__name__)
            raise machine.failure
        assert machine.outcome is not None
        if isinstance(machine, Elector):
            self._carry_out()
            self._machine = machine.acting
        if isinstance(self._machine, Joiner):
            self._close_transport()
        self._resolver.stop()
        return machine.outcome

    def serve(self) -> None:
        """Goes on in a daemon thread."""
        name = "mingle-host" if isinstance(self._machine, Host) else "mingle-member"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._turn()
                now = time.monotonic()
                if self.watch is not None and now >= self._watch_due:
                    self._watch_due = now + self.watch()
        except Exception:
            # Nobody waits for this thread: without a word its death would be a riddle.
            logger.exception("job %s: the thread that serves the other ranks has failed", self.settings.job_id)

    def _turn(self) -> None:
        """One round: wait, serve what is ready, then what is due.

        What has come in is served before the timers: after a pause (SIGSTOP, a laptop's lid) the answers lie in the
        sockets, and a deadline that passed meanwhile must not be judged without them.
        """
        for key, mask in self._selector.select(self._wait()):
            for event in key.data(mask):
                self._tcp_event(event)
            self._carry_out()
        now = time.monotonic()
        due = self._machine.next_timer()
        if due is not None and now >= due:
            self._machine.handle_timer(now)
        if not self._machine.finished:
            self._house_keeping(now)
        self._carry_out()

    def _wait(self) -> float:
        now = time.monotonic()
        times = [self._machine.next_timer(), now + LONGEST_WAIT_SECONDS]
        if self._thread is not None:
            times.append(self._watch_due if self.watch is not None else None)
        else:
            times += [self._progress.next_timer(), self._peers.next_timer(), self._rescan_due]
            times.append(now + 0.1 if self.settings.peers else None)
        return max(0.0, min(time for time in times if time is not None) - now)

    def _house_keeping(self, now: float) -> None:
        """What is done beside the protocol while waiting."""
        if self._progress.wants_status(now):
            self._machine.ask_status()
        self._progress.tick(self._machine.snapshot(), now)
        self._ask_peers(now)
        if now >= self._rescan_due:
            self._rescan_due = now + RESCAN_SECONDS
            self._rescan()
        if now >= self._refresh_due and self._transport is not None:
            self._refresh_due = now + REFRESH_SECONDS
            change = self._transport.refresh()
            self._apply(change.added, change.removed)

    def _ask_peers(self, now: float) -> None:
        if not self.settings.peers or self._transport is None:
            return
        self._peers.learn(self._resolver.take(), now)
        message = self._machine.calling()
        if message is None:
            return
        for address in self._peers.turn(now):
            if isinstance(message, datagrams.Seek):
                data = datagrams.padded(message, UNICAST_QUESTION_BYTES, self._key)
            else:
                data = datagrams.encode(message, self._key)
            self._transport.unicast(data, address)

    def _rescan(self) -> None:
        """Looks whether an interface has come or gone; named ones are waited for."""
        found = interfaces.scan()
        if found == self._found or self._transport is None:
            return
        self._found = found
        try:
            self._usable = interfaces.choose(
                found, named=self.settings.interfaces, family=self.settings.family
            ).usable
        except InterfaceError as error:
            logger.debug("job %s: %s", self.settings.job_id, error.observation)
            return
        change = self._transport.update(self._usable)
        self._apply(change.added, change.removed)

    def _apply(self, added: Iterable[socket.socket], removed: Iterable[socket.socket]) -> None:
        for sock in removed:
            self._forget_closed(sock)
        self._watch_sockets(added)

    def _forget_closed(self, sock: socket.socket) -> None:
        # It is closed, so the kernel has forgotten it; only the selector's own table still holds it.
        for key in list(self._selector.get_map().values()):
            if key.fileobj is sock:
                self._unwatch(sock)

    # --- what comes in ---------------------------------------------------------------------------------------------

    def _read_datagrams(self, sock: socket.socket, _mask: int) -> list[connections.Event]:
        if self._transport is not None:
            for received in self._transport.receive(sock):
                self._datagram(received)
        return []

    def _datagram(self, received: Received) -> None:
        source = Source(
            interface=received.interface,
            multicast=received.multicast,
            signed=datagrams.is_signed(received.data),
            address=connections.bare_address(received.source[0]),
            reply_to=received,
        )
        try:
            message = datagrams.decode(received.data, self._key)
        except datagrams.Rejected as rejected:
            self._rejected[rejected.reason] += 1
            if rejected.reason in ("unsigned", "signature"):
                self._look_unverified(received.data, source)
            return
        self._machine.heard(message, source, time.monotonic())

    def _look_unverified(self, untrusted: bytes, source: Source) -> None:
        """Looks, for the report alone, whether a datagram with a wrong signature speaks of our job.

        A question to the lobby is answered whoever asks: the answer tells what everybody on the network hears anyway.
        """
        if self._rejected["unsigned"] + self._rejected["signature"] > LOOKED_AT_UNVERIFIED:
            return
        try:
            message = datagrams.decode(untrusted)
        except datagrams.Rejected:
            return
        if isinstance(message, datagrams.List):
            self._machine.heard(message, source, time.monotonic())
        else:
            self._machine.heard_unverified(message)

    def _tcp_event(self, event: connections.Event) -> None:
        machine, now = self._machine, time.monotonic()
        if isinstance(event, connections.Accepted):
            if isinstance(machine, Joiner):
                self._connections.hang_up(event.conn)
            else:
                machine.accepted(event.conn, event.address, now)
            return
        if not machine.owns(event.conn):
            return
        if isinstance(event, connections.Connected):
            machine.connected(event.conn, event.local_address, self._owner(event), now)
        elif isinstance(event, connections.Data):
            machine.received(event.conn, event.data, now)
        elif isinstance(machine, Host):
            machine.lost(event.conn, event.reason, now)
        else:
            machine.closed(event.conn, event.reason, now)

    def _owner(self, event: connections.Connected) -> str:
        """Returns the interface that owns a connection's local address."""
        if event.local_address.startswith("fe80:"):
            return self._dialled.pop(event.conn, "")
        owner = interfaces.owner(self._found, event.local_address)
        return self._dialled.pop(event.conn, "") if owner is None else owner.name

    def _run_calls(self, _mask: int) -> list[connections.Event]:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        while self._calls:
            self._calls.popleft()()
        return []

    def call(self, function: Callable[[], None]) -> None:
        """Has a function run by the loop, from any thread."""
        self._calls.append(function)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_writer.send(b"\0")

    # --- what goes out ---------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        stage = self._machine.stage()
        if stage != self._stage:
            self._stage = stage
            logger.debug("job %s: %s", self.settings.job_id, stage)
        while effects := self._machine.effects():
            for effect in effects:
                self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        events: list[connections.Event] = []
        match effect:
            case Multicast(message, lobby):
                self._multicast(message, lobby=lobby)
            case Answer(source, message):
                if self._transport is not None and isinstance(source.reply_to, Received):
                    self._transport.reply(source.reply_to, datagrams.encode(message, self._key))
            case Dial(conn, address, port, interface):
                self._dialled[conn] = interface
                events = self._connections.dial(conn, address, port, self._index(interface))
            case Write(conn, data):
                events = self._connections.write(conn, data)
            case Hangup(conn):
                self._dialled.pop(conn, None)
                self._connections.hang_up(conn)
            case OpenStore(epoch, address):
                self._in_thread("store", partial(self._open_store, epoch, address))
            case ProveStore():
                self._in_thread("store-proof", partial(self._prove_store, effect))
            case CloseStore(reason):
                self._close_store(reason)
            case Notice(text, warning):
                self._progress.say(logging.WARNING if warning else logging.INFO, text)
        for event in events:
            self._tcp_event(event)

    def _multicast(self, message: datagrams.Datagram, *, lobby: bool) -> None:
        if self._transport is None:
            return
        group = LOBBY if lobby else self._group
        data = datagrams.encode(message, self._key)
        for interface in self._transport.interfaces:
            if isinstance(message, datagrams.Offer):
                own = {str(each.ip) for each in interface.addresses}
                first = sorted(message.addresses, key=lambda address: address not in own)
                data = datagrams.encode(msgspec.structs.replace(message, addresses=tuple(first)), self._key)
            self._transport.multicast(interface.name, data, group)

    # --- the store -------------------------------------------------------------------------------------------------

    def _in_thread(self, what: str, work: Callable[[], Callable[[], None]]) -> None:
        """Runs what may block in a daemon thread that may be abandoned; its result is a call for the loop."""

        def run() -> None:
            self.call(work())

        threading.Thread(target=run, name=f"mingle-abandoned-{what}", daemon=True).start()

    def _open_store(self, epoch: int, address: str) -> Callable[[], None]:
        host = self._machine.host if isinstance(self._machine, Elector) else self._machine
        assert isinstance(host, Host)
        server = self.store_server
        try:
            if server is None or (server.address, server.session) != (address, host.session):
                server = store.open_server(address, self.settings.master_port, host.session)
        except MingleError as error:
            return partial(self._store_failed, host, error)
        except RuntimeError as error:  # every error of torch's C++ side is one
            failure = MingleError.explain(
                f"torch could not open its store at {address}: {error}",
                cause="torch's TCPStore refused the listening socket",
                remedy="set MINGLE_MASTER_PORT to a free port, or report this with the version of torch.",
            )
            return partial(self._store_failed, host, failure)
        return partial(self._store_opened, host, epoch, server)

    def _store_opened(self, host: Host, epoch: int, server: store.StoreServer) -> None:
        if self._closed or host.closed:
            server.release()
            return
        self.store_server = server
        assert not isinstance(self._machine, Joiner)
        self._machine.store_opened(epoch, server.port, server.token, time.monotonic())

    @staticmethod
    def _store_failed(host: Host, error: MingleError) -> None:
        host.store_failed(error, time.monotonic())

    def _prove_store(self, wanted: ProveStore) -> Callable[[], None]:
        joiner = self._machine
        assert not isinstance(joiner, Host)
        try:
            store.prove(wanted.address, wanted.port, wanted.session, wanted.token)
        except OSError as error:
            reason = str(error)
            return lambda: joiner.store_unreachable(wanted.epoch, reason, time.monotonic())
        return lambda: joiner.store_proved(wanted.epoch)

    def _close_store(self, reason: str) -> None:
        logger.error("%s; its store is closed, so that the other ranks fail now and not at torch's timeout", reason)
        if self.store_server is not None:
            self.store_server.abort()
        if self.on_store_lost is not None:
            self.on_store_lost(reason)

    # --- what others ask -------------------------------------------------------------------------------------------

    @property
    def machine(self) -> Host | Joiner:
        """The machine that this loop drives, once the job has formed."""
        assert not isinstance(self._machine, Elector)
        return self._machine

    def facts(self) -> NetworkFacts:
        """What a report says of the network."""
        transport = self._transport
        failures = [f"{what}: {why}" for what, why in transport.failures.items()] if transport else []
        failures += [f"{host} did not resolve: {why}" for host, why in self._resolver.failures.items()]
        families = {self.settings.family} if self.settings.family != "auto" else {"4", "6"}
        groups = [self._group.ipv4] if "4" in families else []
        if "6" in families and any(each.of_family("6") for each in self._usable):
            groups.append(self._group.ipv6(self.settings.ttl))
        return NetworkFacts(
            interfaces=[str(each) for each in self._usable],
            groups=groups,
            port=self.settings.port,
            peers=[str(peer) for peer in self.settings.peers],
            sent=transport.sent if transport else 0,
            received=transport.received if transport else 0,
            rejected=self._rejected,
            send_errors=transport.send_errors if transport else Counter(),
            failures=failures,
        )

    def close(self, reason: str) -> None:
        """Ends the session: says good-bye, stops the thread, closes every socket. A second call does nothing."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._stopping = True
            self.call(lambda: None)
            self._thread.join()
            self._thread = None
        if self._closed:
            return
        self._closed = True
        self._stopping = True
        if isinstance(self._machine, Host):
            self._machine.close(reason)
        else:
            self._machine.leave(reason)
        self._carry_out()
        self._stack.close()
        if self.store_server is not None:
            self.store_server.release()
            self.store_server = None
