"""The driver: where a machine, sockets and the clock meet.

One selector serves datagrams, control connections and the calls of other threads. Nothing in it blocks for long, and it
waits on sockets with deadlines. A `Party` runs its turns in a thread, for the machine of a rank or an agent; an
`Observer` or a `Pinger` runs them in the thread of its command.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from mingle import forksafe
from mingle.config import placement
from mingle.config.settings import Network
from mingle.engine import progress
from mingle.engine.control_port import ControlPort
from mingle.engine.evidence import Evidence
from mingle.engine.reception import Rejections
from mingle.engine.udp_endpoint import UdpEndpoint
from mingle.errors import MingleError, refused, suppressed
from mingle.network import connections, folders
from mingle.network.connections import Connections
from mingle.network.folder import FolderStorage, Report
from mingle.network.folders import Folders
from mingle.network.interface_monitor import InterfaceMonitor
from mingle.protocol.effects import Answer, Dial, Effect, Hangup, Multicast, Notice, Reset, Write
from mingle.protocol.events import (
    Accepted,
    AddressesChanged,
    BytesReceived,
    Connected,
    Disconnected,
    Event,
    FoldersListed,
    TimerDue,
)
from mingle.protocol.machine import Machine
from mingle.records import logger
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Group

LONGEST_WAIT_SECONDS = 60.0


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
        self.rejections = Rejections(say)
        """What was dropped of what came in."""
        self._job = job
        self._key = key
        self._perform_more, self._scanned, self._say = perform, scanned, say
        self._settled, self._scanning, self._warned = False, True, False
        self._dialed: dict[int, tuple[Dial, str]] = {}
        """The connections that are being made, each with the address of ours that was bound."""
        storages = {} if storages is None else storages
        try:
            self._open(groups, storages, stack)
        except BaseException as error:
            folders.close(storages)  # `Folders` may never have taken them over
            if isinstance(error, OSError):
                raise refused("the sockets for the discovery can't be opened", error) from error
            raise

    def _open(
        self, groups: Sequence[Group], storages: Mapping[str, FolderStorage], stack: contextlib.ExitStack
    ) -> None:
        network, now = self.network, self.clock()
        self.interfaces = InterfaceMonitor(network.interfaces, network.interfaces_from, network.family, now, stack)
        self._selector = forksafe.register(selectors.DefaultSelector())
        stack.callback(self._selector.close)
        self._calls = _Calls(self._selector, stack)
        if self.interfaces.netlink is not None:
            self._selector.register(self.interfaces.netlink, selectors.EVENT_READ, self._read_netlink)
        self.udp = UdpEndpoint(
            network,
            self._job,
            self._key,
            interfaces=self.interfaces,
            selector=self._selector,
            stack=stack,
            groups=groups,
            clock=self.clock,
            rng=self.rng,
            rejections=self.rejections,
        )
        self.connections = Connections(self._selector, self.new_id)
        stack.callback(self.connections.close)
        self.control_port = ControlPort(network, self.interfaces, self.connections)
        node = placement.this_node() if storages else ""
        self.folders = Folders(storages, node=node, call=self.call, found=self._found)
        stack.callback(self.folders.close)
        self.evidence = Evidence(
            network,
            interfaces=self.interfaces,
            udp=self.udp,
            folders=self.folders,
            rejections=self.rejections,
            now=now,
        )

    def drive(self, machine: Machine, *, verifies: bool = False) -> None:
        """Serve a machine from now on.

        Args:
            machine: the machine.
            verifies: whether, with a secret, a datagram without its signature is only `HeardUnverified`.
        """
        self.machine = self.udp.machine = machine
        self.udp.reception.verifies = verifies

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
                self._calls.run()
            else:
                self._serve_input(key.data, mask)
            self.carry_out()
        now = self.clock()
        if ready and due is not None and now >= due:
            due = self.machine.next_timer()  # the input may have settled it
        if due is not None and now >= due:
            self.machine.handle(TimerDue(), now)
        if not self._settled and self.udp.transport is not None:
            self.udp.ask_peers(now)
            self.evidence.look(now)
        if self._scanning and now >= self.interfaces.scan_due:
            self._rescan(now)
        self.udp.handle_timer(now)
        self.carry_out()

    def _wait(self, due: float | None, until: float | None) -> float:
        now = self.clock()
        times = [due, until, now + LONGEST_WAIT_SECONDS, self.udp.next_timer()]
        if self.connections.starved:
            times.append(now + connections.STARVED_SECONDS)
        if not self._settled and self.udp.transport is not None:
            times.append(self.udp.peers.next_timer(now))
        if self._scanning:
            times.append(self.interfaces.scan_due)
        return max(0.0, min(time for time in times if time is not None) - now)

    def settle(self, *, scanning: bool) -> None:
        """Stop looking for others: ask no peers any more.

        Args:
            scanning: whether to go on scanning the interfaces.
        """
        self._settled, self._scanning = True, scanning
        self.udp.peers.stop()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the thread that runs the turns; callable from any thread."""
        self._calls.put(function)

    @property
    def wakeup_fd(self) -> int:
        """A descriptor that ends a wait when a byte is written to it: for `signal.set_wakeup_fd`."""
        return self._calls.wakeup_fd

    # --- failures --------------------------------------------------------------------------------------------------

    def _serve_input(self, serve: Callable[[int], Iterable[connections.SocketEvent]], mask: int) -> None:
        """Serve a socket that the selector found ready. No input from outside ends the loop."""
        try:
            events = serve(mask)
        except Exception as error:
            self.rejections.fault(error, "what came in on a socket")
        else:
            for event in events:
                self._tcp_event(event)

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

    def relisten(self, now: float, *, locally: bool) -> None:
        """Open the control port on new addresses, and have the machine announce all of them.

        Addresses that it announces already are passed on as well: a sealed host can have been told others meanwhile.

        Args:
            now: the current time.
            locally: whether to listen on new link-local addresses as well, which are not announced.
        """
        addresses = self.control_port.listen_also(locally=locally)
        if addresses:
            self.machine.handle(AddressesChanged(addresses), now)

    def _rescan(self, now: float) -> None:
        changed = self.interfaces.rescan(now)
        self.udp.rescanned(changed=changed)
        if changed:
            self.udp.peers.restart(now)
        if not self.interfaces.lost():  # else the addresses may come back
            for event in self.connections.drop_strays(self.interfaces.addresses()):
                self._tcp_event(event)
        if self._scanned is not None:
            self._scanned(now, changed)

    def _read_netlink(self, _mask: int) -> Iterable[connections.SocketEvent]:
        self.interfaces.drain_netlink()
        return ()

    # --- shared folders --------------------------------------------------------------------------------------------

    def _found(self, folder: str, report: Report) -> None:
        """Tell the machine what a turn in a shared folder has shown."""
        for found in report.found:
            try:
                event = self.udp.reception.admit_found(
                    found.data, folder, same_node=self.folders.is_ours(found), seeks=self.folders.watching
                )
                if event is not None:
                    self.tell(event)
            except Exception as error:  # another process has written it
                self.rejections.fault(error, f"an object in {folder}")
        if self.folders.looked:
            self.tell(FoldersListed(self.folders.lower))
        self.carry_out()

    # --- connections -----------------------------------------------------------------------------------------------

    def _tcp_event(self, event: connections.SocketEvent) -> None:
        try:
            self._handle_tcp_event(event)
        except Exception as error:
            self.rejections.fault(error, "what came in on a connection")
            self._give_up(event.conn)

    def _handle_tcp_event(self, event: connections.SocketEvent) -> None:
        machine, now = self.machine, self.clock()
        if isinstance(event, connections.SocketAccepted):
            self.evidence.reached(event.address)
            machine.handle(Accepted(event.conn, event.address, self.interfaces.name(event.index)), now)
        elif event.conn not in machine.links:
            return
        elif isinstance(event, connections.SocketConnected):
            self._connected(event, now)
        elif isinstance(event, connections.SocketData):
            machine.handle(BytesReceived(event.conn, event.data), now)
        else:
            self._undo_dial(event.conn)
            machine.handle(Disconnected(event.conn, event.reason), now)

    def _give_up(self, conn: int) -> None:
        """Close a connection whose input could not be handled, and tell the machine."""
        self._dialed.pop(conn, None)
        self.connections.hang_up(conn)
        try:
            if conn in self.machine.links:
                self.tell(Disconnected(conn, "what came in on it could not be handled"))
        except Exception as error:
            self.rejections.fault(error, "the end of a connection")

    def _warn_of_detour(self, address: str) -> None:
        """Say once if connections work, and torch's leave by another interface than the one that was named."""
        if (detour := self.interfaces.detour(address)) is not None:
            self._warned = True
            one_line = detour.remedy.replace("\n", " ")
            text = f"{detour}: torch binds no address, so its connections leave there; fix: {one_line}"
            self._say(logging.WARNING, text, None)

    def _undo_dial(self, conn: int) -> None:
        """Note of a connection that was not made whether the kernel has led it astray."""
        dialed, source = self._dialed.pop(conn, (None, ""))
        if dialed is not None and (detour := self.interfaces.astray(dialed.address, source)) is not None:
            self.evidence.led_astray(detour)

    def _connected(self, event: connections.SocketConnected, now: float) -> None:
        dialed, _ = self._dialed.pop(event.conn)
        if event.local_address not in self.interfaces.addresses():
            self._rescan(now)  # the interface is newer than the last scan
            if event.conn not in self.machine.links:
                return
        owner = self.interfaces.owner(event.local_address, dialed.interface)
        if self.network.interfaces and not self._warned:
            self._warn_of_detour(dialed.address)
        if not (dialed.as_torch or self.interfaces.in_use(owner)):
            self.connections.hang_up(event.conn)
            reason = f"is reached through {owner}, and other interfaces were named"
            self.machine.handle(Disconnected(event.conn, reason), now)
            return
        self.evidence.reached(dialed.address)
        weak = self.interfaces.reached_weakly(event.local_address, dialed.address)
        self.control_port.listen_at_source(event.local_address, self.interfaces.index(owner))
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
            case Multicast(message, browse, turn, padded, to_peers):
                self.udp.multicast(message, browse=browse, turn=turn, padded=padded)
                if to_peers:
                    self.udp.tell_peers(message)
            case Answer(source, message):
                try:
                    self.udp.answer(source, message)
                except Exception as error:  # the asker chose the address
                    self.rejections.fault(error, f"a question from {source.address}")
            case Dial(conn, address, port, interface):
                try:
                    bound = "" if effect.as_torch else self.interfaces.source_for(address)
                    self._dialed[conn] = effect, bound
                    events = self.connections.dial(conn, address, port, self.interfaces.index(interface), bound)
                except Exception as error:  # another host chose the address
                    self.rejections.fault(error, f"the address {address}")
                    events = [connections.SocketEnded(conn, f"can't be dialed: {error}")]
            case Write(conn, data):
                events = self.connections.write(conn, data)
            case Hangup(conn) | Reset(conn):
                self._undo_dial(conn)
                (self.connections.reset if isinstance(effect, Reset) else self.connections.hang_up)(conn)
            case Notice(text, warns):
                self._say(logging.WARNING if warns else logging.INFO, text, None)
            case _:
                self._perform_more(effect)
        for event in events:
            self._tcp_event(event)


class _Calls:
    """Functions that wait to be run in one thread. The selector has no data for their socket.

    Args:
        selector: of that thread.
        stack: closes the sockets.
    """

    def __init__(self, selector: selectors.BaseSelector, stack: contextlib.ExitStack) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            stack.callback(end.close)
            forksafe.register(end).setblocking(False)
        selector.register(self._reader, selectors.EVENT_READ)

    @property
    def wakeup_fd(self) -> int:
        """A descriptor that ends a wait when a byte is written to it: for `signal.set_wakeup_fd`."""
        return self._writer.fileno()

    def put(self, function: Callable[[], None]) -> None:
        """Have a function run; callable from any thread."""
        self._waiting.append(function)
        with suppressed(OSError):  # full: it will wake up anyway; closed: there is no thread to wake
            self._writer.send(b"\0")

    def run(self) -> None:
        """Run what waits."""
        with contextlib.suppress(OSError):  # empty
            while self._reader.recv(4096):
                pass
        while self._waiting:
            self._waiting.popleft()()
