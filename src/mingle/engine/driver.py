"""The driver: the only place where a machine, sockets and the clock meet.

One selector serves datagrams, control connections and the calls of other threads. Nothing in it blocks, and it waits on
sockets with deadlines. A `Loop` runs its turns in a thread, for the machine of a rank or an agent; an `Observer` or a
`Pinger` runs them in the thread of its command.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import selectors
import socket
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mingle import forksafe
from mingle.config import placement
from mingle.config.settings import Family, Network
from mingle.engine import progress
from mingle.engine.reception import Reception
from mingle.errors import MingleError, refused, suppressed
from mingle.network import connections
from mingle.network.connections import Connections
from mingle.network.folder import FolderStorage, Report
from mingle.network.folders import Folders
from mingle.network.interfaces import Interface, InterfaceMonitor, Kind, reached_weakly, reverse_path_drops
from mingle.network.local_relay import LocalRelay
from mingle.network.peers import Peers
from mingle.network.transport import Received, Transport
from mingle.protocol.effects import Answer, Dial, Effect, Hangup, Multicast, Notice, Reset, Write
from mingle.protocol.events import (
    Accepted,
    Address,
    AddressesChanged,
    BytesReceived,
    Connected,
    Disconnected,
    Event,
    FoldersListed,
    Heard,
    Source,
    TimerDue,
)
from mingle.protocol.machine import Endpoints, Machine
from mingle.protocol.observations import NetworkFacts
from mingle.records import logger
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import BROWSE_GROUP, Datagram, Group, List, Offer, Seek, job_group

if TYPE_CHECKING:
    from mingle.diagnostics import Finding
    from mingle.diagnostics.diagnosis import Facts

QUICK_SECONDS = 0.2
"""Counters that only a report shows are read after this time: a rank that finds the others sooner reports nothing."""
REFRESH_SECONDS = 30.0
"""How often memberships are renewed, also while the job runs: a switch that snoops without a querier forgets them."""
LONGEST_WAIT_SECONDS = 60.0
LOGGED_FAULTS = 16
"""The number of places in the code whose failures on input are logged, once each."""
UNICAST_QUESTION_BYTES = datagrams.MAX_BYTES
"""The size to which a unicast question is padded. A question that is shorter than its answer gets none."""


def no_effect(effect: Effect) -> None:
    """Refuse an effect that no machine of this driver has."""
    raise AssertionError(f"this machine opens no store, and joins no session: {effect}")


def say(level: int, text: str, error: BaseException | None = None) -> None:
    """Log a notice; show a failure also where the application has not configured logging."""
    if error is None:
        logger.log(level, "%s", text)
    else:
        progress.say(level, text, error=error)


def explained(error: BaseException, what: str) -> MingleError:
    """Return the error for those who wait for a loop that an exception has ended.

    Args:
        error: the exception; one of ours explains itself.
        what: the loop.
    """
    if isinstance(error, MingleError):
        return error
    failure = MingleError.explain(
        f"{what} was ended by an unforeseen {type(error).__name__}: {error}",
        cause="the system refused what it needs" if isinstance(error, OSError) else "a defect in mingle",
        remedy="start it again, and report the traceback: that of `__cause__` (`mingle-discover -v` shows it).",
    )
    failure.__cause__ = error
    return failure


class Driver:
    """The sockets and the clock of one process, for one machine at a time: call `drive` before the first turn.

    Args:
        network: how to discover.
        job: the job whose group to join beside the browse group; None: only the browse group.
        key: signs what is sent.
        stack: closes what is opened here, also if this constructor fails.
        groups: the multicast groups to join in place of the job's and the browse group.
        storages: the shared folders, by their names, opened in a thread of the application; closed with `stack`.
        clock: the time; agents also count the time of a suspend.
        perform: carries out the other effects: those that concern a store, and `Inspect`.
        scanned: called after each scan of the interfaces, with the time and whether those in use have changed.
        say: shows a notice or a failure to people.

    Raises:
        InterfaceError: no interface can be used.
        MingleError: no file descriptor is free.
    """

    machine: Machine

    def __init__(
        self,
        network: Network,
        job: str | None,
        key: JobKey | None,
        stack: contextlib.ExitStack,
        *,
        groups: Sequence[Group] = (),
        storages: Mapping[str, FolderStorage] | None = None,
        clock: Callable[[], float] = time.monotonic,
        perform: Callable[[Effect], None] = no_effect,
        scanned: Callable[[float, bool], None] | None = None,
        say: Callable[[int, str, BaseException | None], None] = say,
    ) -> None:
        self.network = network
        self.clock = clock
        self.new_id = itertools.count(1).__next__
        self.rng = random.Random()
        self.rejected: Counter[str] = Counter()
        """Datagrams that were dropped, by reason."""
        self.multicasts_on: set[str] = set()
        """The interfaces on which multicasts arrive."""
        self.on_datagram: Callable[[Received, float], Datagram | None] = self._datagram
        """Processes a datagram, and returns the message in it, if any. The pinger has datagrams of its own."""
        self.ask_peers: Callable[[float], None] = self._ask_peers
        """Asks the unicast peers whose turn it is. The pinger replaces it as well."""
        self._job = job
        self._key = key
        self._group: Group | None = None if job is None else job_group(job)
        self._perform_more, self._scanned, self._say = perform, scanned, say
        self._settled, self._scanning = False, True
        self._rp_drops: int | None = None
        self._faults: set[tuple[str, int]] = set()
        self._errors_said: Counter[str] = Counter()
        self._dialed: dict[int, Dial] = {}
        self._calls: deque[Callable[[], None]] = deque()
        try:
            self._open(groups, {} if storages is None else storages, stack)
        except OSError as error:
            raise refused("the sockets for the discovery can't be opened", error) from error

    def _open(
        self, groups: Sequence[Group], storages: Mapping[str, FolderStorage], stack: contextlib.ExitStack
    ) -> None:
        network, now = self.network, self.clock()
        self.interfaces = InterfaceMonitor(network.interfaces, network.interfaces_from, network.family, now, stack)
        self._selector = forksafe.register(selectors.DefaultSelector())
        stack.callback(self._selector.close)
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            stack.callback(end.close)
            forksafe.register(end).setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        if self.interfaces.netlink is not None:
            self._selector.register(self.interfaces.netlink, selectors.EVENT_READ, self._read_netlink)
        self._relay = LocalRelay(network.port, self.rejected)
        stack.callback(self._relay.close)
        if self._relay.socket is not None:
            self._selector.register(self._relay.socket, selectors.EVENT_READ, self._read_relay)
        groups = groups or ((BROWSE_GROUP,) if self._group is None else (self._group, BROWSE_GROUP))
        self.transport: Transport | None = Transport(
            self.interfaces.usable, groups=groups, port=network.port, ttl=network.ttl, family=network.family
        )
        """The UDP sockets; None once they are closed."""
        stack.callback(self.close_transport)
        self._watch_sockets(self.transport.sockets())
        self.connections = Connections(self._selector, self.new_id)
        stack.callback(self.connections.close)
        self.peers = Peers(network.peers, network.port, network.family, self.rng)
        stack.callback(self.peers.stop)
        node = placement.this_node() if storages else ""
        self.folders = Folders(storages, node=node, call=self.call, found=self._found)
        stack.callback(self.folders.close)
        self._reception = Reception(self._key, network.secret, self.peers, self.interfaces, self.rejected)
        self._slow_from, self._refresh_due = now + QUICK_SECONDS, now + REFRESH_SECONDS

    def drive(self, machine: Machine, *, verifies: bool = False) -> None:
        """Serve a machine from now on.

        Args:
            machine: the machine.
            verifies: whether, with a secret, a datagram without its signature is only `HeardUnverified`.
        """
        self.machine, self._reception.verifies = machine, verifies

    def tell(self, event: Event) -> None:
        """Have the machine process an event that happens now."""
        self.machine.handle(event, self.clock())

    # --- turns -----------------------------------------------------------------------------------------------------

    def turn(self, until: float | None = None) -> None:
        """Wait for input or a timer, at most until a time; serve the input, then the timers.

        The input comes first: after a pause (SIGSTOP, a suspend) the answers lie in the sockets, and a deadline that
        passed meanwhile must not be judged without them.
        """
        due = self.machine.next_timer()
        ready = self._selector.select(self._wait(due, until))
        if self.connections.starved:
            self.connections.listen_again()
        for key, mask in ready:
            if key.data is None:
                self._run_calls()
            else:
                self._serve_input(key.data, mask)
            self.carry_out()
        now = self.clock()
        if ready and due is not None and now >= due:
            due = self.machine.next_timer()  # the input may have settled it
        if due is not None and now >= due:
            self.machine.handle(TimerDue(), now)
        if not self._settled and self.transport is not None:
            self._look_for_others(now)
        if self._scanning and now >= self.interfaces.scan_due:
            self._rescan(now)
        if self.transport is not None and now >= self._refresh_due:
            self._refresh_due = now + REFRESH_SECONDS
            change = self.transport.refresh()
            self._change_sockets(change.added, change.removed)
        self.carry_out()

    def _wait(self, due: float | None, until: float | None) -> float:
        now = self.clock()
        times = [due, until, now + LONGEST_WAIT_SECONDS]
        if self.connections.starved:
            times.append(now + connections.STARVED_SECONDS)
        if self.transport is not None:
            times.append(self._refresh_due)
            times += [] if self._settled else [self.peers.next_timer(now)]
        if self._scanning:
            times.append(self.interfaces.scan_due)
        return max(0.0, min(time for time in times if time is not None) - now)

    def settle(self, *, scanning: bool) -> None:
        """Stop looking for others: ask no peers any more.

        Args:
            scanning: whether to go on scanning the interfaces.
        """
        self._settled, self._scanning = True, scanning
        self.peers.stop()

    def _look_for_others(self, now: float) -> None:
        self.ask_peers(now)
        if self._rp_drops is None and now >= self._slow_from:
            self._rp_drops = reverse_path_drops()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the thread that runs the turns; callable from any thread."""
        self._calls.append(function)
        with suppressed(OSError):  # full: it will wake up anyway; closed: there is no thread to wake
            self._wake_writer.send(b"\0")

    @property
    def wakeup_fd(self) -> int:
        """A descriptor that ends a wait when a byte is written to it: for `signal.set_wakeup_fd`."""
        return self._wake_writer.fileno()

    def _run_calls(self) -> None:
        with contextlib.suppress(OSError):  # empty
            while self._wake_reader.recv(4096):
                pass
        while self._calls:
            self._calls.popleft()()

    # --- failures --------------------------------------------------------------------------------------------------

    def _serve_input(self, serve: Callable[[int], Iterable[connections.SocketEvent]], mask: int) -> None:
        """Serve a socket that the selector found ready. No input from outside ends the loop."""
        try:
            events = serve(mask)
        except Exception as error:
            self.note_fault(error, "what came in on a socket")
        else:
            for event in events:
                self._tcp_event(event)

    def note_fault(self, error: Exception, what: str) -> None:
        """Count input that was dropped because its handler raised; log it once for each place in the code."""
        self.rejected["fault"] += 1
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        place = (frame.f_code.co_filename, line)
        if place in self._faults or len(self._faults) >= LOGGED_FAULTS:
            return
        self._faults.add(place)
        explained = MingleError.explain(
            f"{what} could not be handled and was dropped ({type(error).__name__}: {error}); "
            "the discovery goes on, and further failures at the same place are only counted",
            cause="a defect in mingle, which a process on the network or on this machine can have provoked",
            remedy="report the traceback.",
        )
        self._say(logging.ERROR, str(explained), error)

    @contextlib.contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Wrap an unforeseen exception in a MingleError."""
        try:
            yield
        except MingleError:
            raise
        except Exception as error:
            logger.info("the traceback of what ended the loop", exc_info=error)
            raise explained(error, "the loop" if self._job is None else f"job {self._job!r}: its loop") from error

    def part(self, farewell: Callable[[], None]) -> None:
        """Send the good-byes. A failure here does not replace the exception that ended the loop."""
        try:
            farewell()
            self.carry_out()
        except Exception as error:
            logger.debug("the good-bye failed: %r", error)

    # --- interfaces ------------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses to listen on, best first."""
        return listening_addresses(self.interfaces.usable, self.network.family)

    def listen(self) -> Endpoints:
        """Open the control port, and return where it listens.

        Raises:
            InterfaceError: no address can be bound.
        """
        network = self.network
        return Endpoints(
            addresses=self._bound(self.connections.listen),
            port=self.connections.port,
            advertised=(network.advertise,) if network.advertise else (),
            named=bool(network.interfaces),
        )

    def listen_locally(self) -> None:
        """Open the control port on the link-local addresses as well, beside those that are announced."""
        local = [
            (str(each.ip), interface.index)
            for interface in self.interfaces.usable
            for each in interface.of_family(self.network.family)
            if each.is_link_local
        ]
        self.connections.listen_also(local)

    def relisten(self, now: float) -> None:
        """Open the control port on new addresses, and have the machine announce all of them.

        Addresses that it announces already are passed on as well: a sealed host can have been told others meanwhile.
        """
        addresses = self._bound(self.connections.listen_also)
        if addresses:
            self.machine.handle(AddressesChanged(addresses), now)

    def _bound(self, listen: Callable[[Sequence[tuple[str, int]]], frozenset[tuple[str, int]]]) -> tuple[Address, ...]:
        wanted = self.addresses
        bound = listen([(each.address, each.index) for each in wanted])
        return tuple(each for each in wanted if (each.address, each.index) in bound)

    def _rescan(self, now: float) -> None:
        changed = self.interfaces.rescan(now)
        # The end of IPv6's duplicate check changes no address.
        if self.transport is not None and (changed or self.transport.failures):
            change = self.transport.update(self.interfaces.usable)
            self._change_sockets(change.added, change.removed)
        if changed:
            self.peers.restart(now)
            for event in self.connections.drop_strays(self.interfaces.addresses()):
                self._tcp_event(event)
        if self._scanned is not None:
            self._scanned(now, changed)

    def _read_netlink(self, _mask: int) -> Iterable[connections.SocketEvent]:
        self.interfaces.drain_netlink()
        return ()

    def _change_sockets(self, added: Iterable[socket.socket], removed: Sequence[socket.socket]) -> None:
        # The removed ones are closed, so the kernel has forgotten them; the selector's own table has not.
        for key in list(self._selector.get_map().values()):
            if any(key.fileobj is sock for sock in removed):
                self._selector.unregister(key.fileobj)
        self._watch_sockets(added)

    def _watch_sockets(self, sockets: Iterable[socket.socket]) -> None:
        for sock in sockets:
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read_datagrams, sock))

    def close_transport(self) -> None:
        """Close the UDP sockets and leave the local relay. A second call does nothing."""
        if self.transport is None:
            return
        for sock in self.transport.sockets():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
        self.transport.close()
        self.transport = None
        if self._relay.socket is not None:
            self._selector.unregister(self._relay.socket)
            self._relay.close()

    # --- datagrams -------------------------------------------------------------------------------------------------

    def _read_datagrams(self, sock: socket.socket, _mask: int) -> Iterable[connections.SocketEvent]:
        if self.transport is not None:
            for received in self.transport.receive(sock):
                self._take(received, relayed=False)
        return ()

    def _read_relay(self, _mask: int) -> Iterable[connections.SocketEvent]:
        for received in self._relay.receive():
            self._take(received, relayed=True)
        return ()

    def _take(self, received: Received, *, relayed: bool) -> None:
        """Process a datagram, and relay it to the other processes of this machine if it concerns them as well."""
        if received.broadcast:  # no rank sends one, and every process of every machine here would answer it
            self.rejected["broadcast"] += 1
            return
        if received.multicast:  # our own come back, too, unless this host's firewall drops them
            self.multicasts_on.add(received.interface)
        try:
            message = self.on_datagram(received, self.clock())
            # This process answers a question for its own job; other processes can answer any other datagram.
            if not relayed and received.shared and not (isinstance(message, Seek) and self._hosts(message.job)):
                self._relay.relay(received, self.clock())
        except Exception as error:
            self.note_fault(error, f"a datagram from {received.source[0]}")

    def _hosts(self, job: str) -> bool:
        """Return whether this process hosts a job that is forming."""
        offer = self.machine.calling()
        return isinstance(offer, Offer) and offer.job == job

    def _datagram(self, received: Received, now: float) -> Datagram | None:
        event = self._reception.admit(received)
        if event is not None:
            self.machine.handle(event, now)
        return event.message if isinstance(event, Heard) else None

    def _ask_peers(self, now: float) -> None:
        if not self.network.peers:
            return
        message = self.machine.calling()
        for address in self.peers.turn(silent=message is None, now=now):
            assert message is not None
            if self.transport is not None:
                self.transport.unicast(self._encoded(message, padded=True), address)

    # --- shared folders --------------------------------------------------------------------------------------------

    def _found(self, folder: str, report: Report) -> None:
        """Tell the machine what a turn in a shared folder has shown."""
        for found in report.found:
            try:
                event = self._reception.admit_found(
                    found.data, folder, same_node=self.folders.is_ours(found), seeks=self.folders.watching
                )
                if event is not None:
                    self.tell(event)
            except Exception as error:  # another process has written it
                self.note_fault(error, f"an object in {folder}")
        if self.folders.looked:
            self.tell(FoldersListed(self.folders.lower))
        self.carry_out()

    # --- connections -----------------------------------------------------------------------------------------------

    def _tcp_event(self, event: connections.SocketEvent) -> None:
        try:
            self._handle_tcp_event(event)
        except Exception as error:
            self.note_fault(error, "what came in on a connection")
            self._give_up(event.conn)

    def _handle_tcp_event(self, event: connections.SocketEvent) -> None:
        machine, now = self.machine, self.clock()
        if isinstance(event, connections.SocketAccepted):
            machine.handle(Accepted(event.conn, event.address), now)
        elif not machine.owns(event.conn):
            return
        elif isinstance(event, connections.SocketConnected):
            self._connected(event, now)
        elif isinstance(event, connections.SocketData):
            machine.handle(BytesReceived(event.conn, event.data), now)
        else:
            self._dialed.pop(event.conn, None)
            machine.handle(Disconnected(event.conn, event.reason), now)

    def _give_up(self, conn: int) -> None:
        """Close a connection whose input could not be handled, and tell the machine."""
        self._dialed.pop(conn, None)
        self.connections.hang_up(conn)
        try:
            if self.machine.owns(conn):
                self.tell(Disconnected(conn, "what came in on it could not be handled"))
        except Exception as error:
            self.note_fault(error, "the end of a connection")

    def _connected(self, event: connections.SocketConnected, now: float) -> None:
        dialed = self._dialed.pop(event.conn)
        if event.local_address not in self.interfaces.addresses():
            self._rescan(now)  # the interface is newer than the last scan
            if not self.machine.owns(event.conn):
                return
        owner = self.interfaces.owner(event.local_address, dialed.interface)
        if not self.interfaces.in_use(owner):
            self.connections.hang_up(event.conn)
            reason = f"is reached through {owner}, and other interfaces were named"
            self.machine.handle(Disconnected(event.conn, reason), now)
            return
        weak = reached_weakly(self.interfaces.found, event.local_address, dialed.address)
        self.machine.handle(Connected(event.conn, event.local_address, owner, weak), now)

    # --- effects ---------------------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Carry out what the machine wants done."""
        while effects := self.machine.effects():
            for effect in effects:
                self._perform(effect)
        if self.folders.open:
            self.folders.show(self.machine.showing(), partial(datagrams.encode, key=self._key))

    def _perform(self, effect: Effect) -> None:
        events: list[connections.SocketEvent] = []
        match effect:
            case Multicast(message, browse, turn, padded):
                self._multicast(message, BROWSE_GROUP if browse else self._group, turn, padded=padded)
            case Answer(source, message):
                try:
                    self._answer(source, message)
                except Exception as error:  # the asker chose the address
                    self.note_fault(error, f"a question from {source.address}")
            case Dial(conn, address, port, interface):
                self._dialed[conn] = effect
                try:
                    events = self.connections.dial(conn, address, port, self.interfaces.index(interface))
                except Exception as error:  # another host chose the address
                    self.note_fault(error, f"the address {address}")
                    events = [connections.SocketEnded(conn, f"can't be dialed: {error}")]
            case Write(conn, data):
                events = self.connections.write(conn, data)
            case Hangup(conn) | Reset(conn):
                self._dialed.pop(conn, None)
                (self.connections.reset if isinstance(effect, Reset) else self.connections.hang_up)(conn)
            case Notice(text, warns):
                self._say(logging.WARNING if warns else logging.INFO, text, None)
            case _:
                self._perform_more(effect)
        for event in events:
            self._tcp_event(event)

    def _answer(self, source: Source, message: Datagram) -> None:
        """Answer by unicast with no more bytes than the question has: a forged source gains nothing by asking us."""
        if self.transport is None or not isinstance(source.reply_to, Received):
            return
        data = datagrams.encode(datagrams.with_first(message, {source.reply_to.destination}), self._key)
        if len(data) > len(source.reply_to.data):
            self.rejected["unpadded"] += 1
            return
        self.transport.reply(source.reply_to, data)

    def _multicast(self, message: Datagram, group: Group | None, turn: int | None, *, padded: bool) -> None:
        if self.transport is None or group is None:
            return
        for interface in self.transport.interfaces:
            toward = datagrams.with_first(message, (str(each.ip) for each in interface.addresses))
            self.transport.multicast(interface.name, self._encoded(toward, padded=padded), group, turn)

    def _encoded(self, message: Datagram, *, padded: bool) -> bytes:
        """Return the bytes of a message, as long as the longest answer if it is a question that is to be padded."""
        if padded and isinstance(message, Seek | List):
            return datagrams.padded(message, UNICAST_QUESTION_BYTES, self._key)
        return datagrams.encode(message, self._key)

    # --- what a report says ----------------------------------------------------------------------------------------

    def inspect(self, environ: Mapping[str, str] | None = None, **observed: Any) -> Facts:
        """Return the facts by which this machine can be judged; see `inspection.collect_facts` for the arguments."""
        from mingle.network import inspection  # only doctor, ping and a rank that waits or has failed need it

        return inspection.collect_facts(self.network.port, environ=environ, **self.observed() | observed)

    def observed(self) -> dict[str, Any]:
        """Return what the sockets have shown, as arguments of `inspection.collect_facts`."""
        network, transport = self.network, self.transport
        ipv4 = any(each.of_family("4") for each in self.interfaces.usable) and network.family != "6"
        return {
            "group": (self._group or BROWSE_GROUP).ipv4 if ipv4 else "",
            "used": self.interfaces.usable,
            "found": self.interfaces.found,
            "named_by": network.interfaces_from if network.interfaces else "",
            "multicasts_on": frozenset(self.multicasts_on) if transport and transport.sent else None,
            "failures": dict(transport.failures) if transport else {},
            "relay_failure": self._relay.failure,
            "send_errors": dict(transport.send_errors) if transport else {},
            "unicasts_sent": transport.unicasts_sent if transport else 0,
            "unresolved": self.peers.failures,
            "folders": {folder: (each.what, each.fix) for folder, each in self.folders.problems.items()},
            "rp_drops_before": self._rp_drops,
        }

    def observed_since(self) -> dict[str, Any]:
        """Return the same for the progress line: only the errors since the last call, and nothing that takes long."""
        errors = Counter() if self.transport is None else self.transport.send_errors
        recent, self._errors_said = errors - self._errors_said, Counter(errors)
        return self.observed() | {"brief": True, "send_errors": dict(recent)}

    def diagnose(self, observed: Mapping[str, Any]) -> Sequence[Finding]:
        """Return what is wrong with this machine. This takes a moment, and any thread can do it.

        Args:
            observed: what the sockets have shown.
        """
        with contextlib.suppress(OSError, ImportError):  # EMFILE: without a descriptor no module can be loaded
            from mingle.diagnostics import diagnosis
            from mingle.network import inspection

            return diagnosis.troubles(inspection.collect_facts(self.network.port, **observed))
        return ()

    def facts(self, findings: Sequence[Finding] = ()) -> NetworkFacts:
        """Return what a report says of the network.

        Args:
            findings: of `diagnose`.
        """
        network, transport, group = self.network, self.transport, self._group or BROWSE_GROUP
        groups = [] if network.family == "6" else [group.ipv4]
        if network.family != "4" and any(each.of_family("6") for each in self.interfaces.usable):
            groups.append(group.ipv6(network.ttl))
        failures = [f"{what}: {why}" for what, why in transport.failures.items()] if transport else []
        failures += [f"local relay: {self._relay.failure}"] if self._relay.failure else []
        failures += [f"{host} did not resolve: {why}" for host, why in self.peers.failures.items()]
        failures += [f"{folder} {problem.what}" for folder, problem in self.folders.problems.items()]
        return NetworkFacts(
            interfaces=[str(each) for each in self.interfaces.usable],
            groups=groups,
            port=network.port,
            peers=[*(str(peer) for peer in network.peers), *network.folders],
            sent=transport.sent if transport else 0,
            received=transport.received if transport else 0,
            rejected=self.rejected,
            send_errors=transport.send_errors if transport else Counter(),
            failures=failures,
            findings=findings,
        )


def listening_addresses(usable: Iterable[Interface], family: Family) -> tuple[Address, ...]:
    """Return the addresses to listen on, best first: a link-local one only if its interface has no other address."""
    found: list[Address] = []
    for interface in usable:
        addresses = interface.of_family(family)
        routable = [each for each in addresses if not each.is_link_local]
        found += [
            Address(
                str(each.ip),
                interface.name,
                each.network.prefixlen,
                interface.index,
                last_resort=interface.kind in (Kind.VPN, Kind.VIRTUAL),
            )
            for each in routable or addresses[:1]
        ]
    return tuple(found[: datagrams.MAX_ADDRESSES])
