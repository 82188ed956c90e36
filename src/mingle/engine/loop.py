"""The loop: the only place where a machine, sockets and the clock meet.

One selector serves datagrams, control connections and the calls of other threads. Nothing in it blocks, and it waits on
sockets with deadlines, so it can be interrupted at any moment. ``Discovery``, ``Observer`` and ``AgentLoop`` drive it.
"""

from __future__ import annotations

import contextlib
import logging
import random
import selectors
import signal
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from mingle import forksafe
from mingle.config.settings import Network
from mingle.engine import progress
from mingle.engine.network_facts import Seen, network_facts
from mingle.errors import MingleError
from mingle.network import connections, inspection, interfaces
from mingle.network.connections import Connections
from mingle.network.interfaces import Family, Interface, InterfaceMonitor, Kind
from mingle.network.local_relay import LocalRelay
from mingle.network.peers import Peers
from mingle.network.transport import Received, Transport
from mingle.protocol import claims
from mingle.protocol.machine import (
    Address,
    Answer,
    Dial,
    Effect,
    Hangup,
    Multicast,
    NetworkFacts,
    Notice,
    Reset,
    Source,
    Write,
)
from mingle.wire import datagrams, echo
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Datagram, Offer, Seek
from mingle.wire.groups import LOBBY, Group, job_group

logger = logging.getLogger("mingle")

QUICK_SECONDS = 0.2
"""Who finds the others sooner will report nothing: what is counted for a report only is counted from here on."""
REFRESH_SECONDS = 30.0
"""How often memberships are renewed, also while the job runs: a switch that snoops without a querier forgets them."""
LONGEST_WAIT_SECONDS = 60.0
FAULTS_TOLD = 16
"""Places in the code for which a failure on input is logged, once each."""
UNICAST_QUESTION_BYTES = datagrams.MAX_BYTES
"""A unicast question is padded to this, so that no answer is longer; one that is shorter than its answer gets none."""


class Machine(Protocol):
    """What every machine offers the loop; what differs between them is in the loop's hooks."""

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""

    def handle_timer(self, now: float, /) -> None:
        """Does what the clock demands."""

    def calling(self) -> Datagram | None:
        """What to say to unicast peers now."""

    def heard(self, message: Datagram, source: Source, now: float, /) -> None:
        """A valid datagram came in."""

    def owns(self, conn: int, /) -> bool:
        """Tells whether a connection is this machine's."""

    def connected(self, conn: int, local_address: str, interface: str, now: float, /, *, weak: bool = False) -> None:
        """A connection that was dialled stands; ``weak``: it says nothing about the network of the other end."""

    def received(self, conn: int, untrusted: bytes, now: float, /) -> None:
        """Bytes came in on a connection."""


class Loop:
    """The sockets and the clock of one process. A subclass makes the machine and runs the turns.

    Args:
        network: how to discover.
        job: the job whose group is listened to beside the lobby; None: only the lobby is.
        key: signs what is sent.
        stack: what is to be closed at the end goes there, also if this constructor fails.
        groups: the multicast groups to join in place of the job's and the lobby.

    Raises:
        InterfaceError: no interface can be used.
    """

    _machine: Machine
    clock: Callable[[], float] = staticmethod(time.monotonic)  # agents count the time of a suspend as well

    def __init__(
        self,
        network: Network,
        job: str | None,
        key: JobKey | None,
        stack: contextlib.ExitStack,
        *,
        groups: Sequence[Group] = (),
    ) -> None:
        self.network = network
        self.failure: MingleError | None = None
        """The error that ended the loop's thread, with the unforeseen exception as its ``__cause__``; else None."""
        self._job = job
        self.new_id = connections.counter()
        self.rng = random.Random()
        self._key = key
        self._group: Group | None = None if job is None else job_group(job)
        self._rejected: Counter[str] = Counter()
        self._multicasts_on: set[str] = set()
        self._rp_drops: int | None = None
        self._faults: set[tuple[str, int]] = set()
        self._dialled: dict[int, Dial] = {}
        self._calls: deque[tuple[Callable[[], None], Callable[[MingleError], object] | None]] = deque()
        now = self.clock()
        self._nics = InterfaceMonitor(network.interfaces, network.family, now, stack)
        self._selector = forksafe.register(selectors.DefaultSelector())
        stack.callback(self._selector.close)
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            stack.callback(end.close)
            forksafe.register(end).setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._run_calls)
        if self._nics.netlink is not None:
            self._selector.register(self._nics.netlink, selectors.EVENT_READ, self._drain_netlink)
        groups = groups or ((LOBBY,) if self._group is None else (self._group, LOBBY))
        self._relay = LocalRelay(network.port, self._rejected)
        stack.callback(self._relay.close)
        if self._relay.socket is not None:
            self._selector.register(self._relay.socket, selectors.EVENT_READ, self._read_relay)
        self._transport: Transport | None = Transport(
            self._nics.usable, groups=groups, port=network.port, ttl=network.ttl, family=network.family
        )
        stack.callback(self._close_transport)
        self._watch_sockets(self._transport.sockets())
        self._connections = Connections(self._selector, self.new_id)
        stack.callback(self._connections.close)
        self._peers = Peers(network.peers, network.port, network.family, self.rng)
        stack.callback(self._peers.stop)
        self._slow_from, self._refresh_due = now + QUICK_SECONDS, now + REFRESH_SECONDS

    # --- hooks -----------------------------------------------------------------------------------------------------

    def _decode(self, untrusted: bytes) -> Datagram | None:
        """Returns the message in a datagram, or None when it is rejected (and counted)."""
        raise NotImplementedError

    def _accepted(self, conn: int, address: str, now: float) -> None:
        """Somebody has connected to the control port; who has none hangs up."""
        self._connections.hang_up(conn)

    def _ended(self, conn: int, reason: str, now: float) -> None:
        """A connection of the machine has ended, or could not be made."""
        raise NotImplementedError

    def _perform_more(self, effect: Effect) -> None:
        """Carries out an effect that has nothing to do with sockets."""
        raise NotImplementedError

    def _interfaces_looked_at(self, now: float, *, changed: bool) -> None:
        """The interfaces were looked at; also an unchanged one may be ready only now."""

    def _seeks(self) -> bool:
        """Whether anybody is still looked for; if not, there is no house to keep."""
        return self._transport is not None

    def _more_timers(self) -> Iterable[float | None]:
        """When something else is to be done."""
        return ()

    def _house_keeping(self, now: float) -> None:
        """What is done beside the protocol."""
        self._ask_peers(now)
        if self._rp_drops is None and now >= self._slow_from:
            self._rp_drops = inspection.reverse_path_drops()
        if now >= self._nics.scan_due:
            self._rescan(now)

    # --- running ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One round: wait, serve what is ready, then what is due.

        What has come in is served before the timers: after a pause (SIGSTOP, a laptop's lid) the answers lie in the
        sockets, and a deadline that passed meanwhile must not be judged without them.
        """
        due = self._machine.next_timer()
        wait = self._wait(due)
        if self._connections.starved:
            wait = min(wait, connections.STARVED_SECONDS)
        ready = self._selector.select(wait)
        if self._connections.starved:
            self._connections.listen_again()
        for key, mask in ready:
            self._serve_input(key.data, mask)
            self._carry_out()
        now = self.clock()
        if ready and due is not None and now >= due:
            due = self._machine.next_timer()  # what has come in may have settled it
        if due is not None and now >= due:
            self._machine.handle_timer(now)
        if self._seeks():
            self._house_keeping(now)
        if self._transport is not None and now >= self._refresh_due:
            self._refresh_due = now + REFRESH_SECONDS
            change = self._transport.refresh()
            self._apply(change.added, change.removed)
        self._carry_out()

    def _serve_input(self, serve: Callable[[int], Iterable[connections.Event]], mask: int) -> None:
        """Serve the sockets that the selector found ready. No input from outside ends the loop."""
        if serve == self._run_calls:
            serve(mask)  # what our own threads want done is no input
            return
        try:
            events = serve(mask)
        except Exception as error:
            self._note_fault(error, "what came in on a socket")
        else:
            for event in events:
                self._tcp_event(event)

    def _note_fault(self, error: Exception, what: str) -> None:
        """Count input that was dropped because its handler raised; log it once for each place in the code.

        Raises:
            Exception: the error itself, if a signal handler of the application raised it for the caller.
        """
        if _comes_from_a_signal_handler(error):
            raise error
        self._rejected["fault"] += 1
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        place = (frame.f_code.co_filename, line)
        if place in self._faults or len(self._faults) >= FAULTS_TOLD:
            return
        self._faults.add(place)
        told = MingleError.explain(
            f"{what} could not be handled and was dropped ({type(error).__name__}: {error}); "
            "the discovery goes on, and further failures at the same place are only counted",
            cause="a defect in mingle, which somebody on the network or on this machine may have provoked",
            remedy="report the traceback.",
        )
        self._complain(str(told), error)

    def _complain(self, text: str, error: BaseException) -> None:
        """Report a failure with its traceback, also where the application has not configured logging."""
        progress.say(logging.ERROR, text, error=error)

    def _wait(self, due: float | None) -> float:
        now = self.clock()
        times = [due, now + LONGEST_WAIT_SECONDS, *self._more_timers()]
        times += [self._nics.scan_due, self._peers.next_timer(now)] if self._seeks() else []
        times += [self._refresh_due] if self._transport is not None else []
        return max(0.0, min(time for time in times if time is not None) - now)

    def call(self, function: Callable[[], None], failed: Callable[[MingleError], object] | None = None) -> None:
        """Have the loop run a function; callable from any thread.

        Args:
            function: what to run.
            failed: called instead of the function, in any thread, if the loop's thread has failed.
        """
        self._calls.append((function, failed))
        if self.failure is not None:
            self._fail_calls()
        with contextlib.suppress(OSError):  # full: it will wake up anyhow; closed: nobody is left to wake
            self._wake_writer.send(b"\0")

    def _run_calls(self, _mask: int) -> list[connections.Event]:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        while self._calls:
            self._calls.popleft()[0]()
        return []

    # --- what ends it ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Wrap an unforeseen exception in a MingleError; return an exception of a signal handler unchanged."""
        try:
            yield
        except MingleError:
            raise
        except Exception as error:
            if _comes_from_a_signal_handler(error):
                raise
            logger.info("the traceback of what ended the loop", exc_info=error)
            raise self._failure_of(error) from error

    def _failure_of(self, error: BaseException) -> MingleError:
        """Return the error for the callers that wait for this loop."""
        if isinstance(error, MingleError):
            return error
        whose = "the loop" if self._job is None else f"job {self._job!r}: its loop"
        failure = MingleError.explain(
            f"{whose} was ended by an unforeseen {type(error).__name__}: {error}",
            cause="the system refused what it needs" if isinstance(error, OSError) else "a defect in mingle",
            remedy="start it again, and report the traceback: that of `__cause__` (`mingle-discover -v` shows it).",
        )
        failure.__cause__ = error
        return failure

    def _die(self, error: BaseException, *endings: Callable[[], object]) -> None:
        """End the loop's thread: run all endings, even if some fail, and fail the waiting calls. Raises nothing.

        Args:
            error: the exception that ended the thread.
            endings: the functions that shut down the store and the sockets, in their order.
        """
        self.failure = failure = self._failure_of(error)
        told: Callable[[], object] = partial(self._complain, str(failure), error)
        for ending in (*endings, self._fail_calls, told):
            try:
                ending()
            except Exception as problem:
                logger.debug("shutting the loop failed in part: %r", problem)

    def _part(self, farewell: Callable[[], None]) -> None:
        """Send the good-byes. A failure here does not replace the exception that ended the loop."""
        try:
            farewell()
            self._carry_out()
        except Exception as error:
            if _comes_from_a_signal_handler(error):
                raise
            logger.debug("the good-bye failed: %r", error)

    def _fail_calls(self) -> None:
        """Fail the calls that the ended loop will not run; only one thread takes each call out."""
        assert self.failure is not None
        with contextlib.suppress(IndexError):
            while True:
                _, failed = self._calls.popleft()
                if failed is not None:
                    failed(self.failure.copied())

    def _ask_peers(self, now: float) -> None:
        if self._transport is None:
            return
        message = self._machine.calling()
        for address in self._peers.turn(silent=message is None, now=now):
            assert message is not None
            if isinstance(message, datagrams.Seek | datagrams.List):
                data = datagrams.padded(message, UNICAST_QUESTION_BYTES, self._key)
            else:
                data = datagrams.encode(message, self._key)
            self._transport.unicast(data, address)

    # --- interfaces ------------------------------------------------------------------------------------------------

    @property
    def listening_addresses(self) -> tuple[Address, ...]:
        """The addresses to listen on, best first."""
        return listening_addresses(self._nics.usable, self.network.family)

    def _rescan(self, now: float) -> None:
        """Looks whether an interface has come or gone."""
        if self._transport is None:
            return
        if changed := self._nics.rescan(now):
            change = self._transport.update(self._nics.usable)
            self._apply(change.added, change.removed)
            self._peers.restart(now)
            for event in self._connections.drop_strays(self._nics.addresses()):
                self._tcp_event(event)
        self._interfaces_looked_at(now, changed=changed)

    def _drain_netlink(self, _mask: int) -> list[connections.Event]:
        self._nics.drain_netlink()
        return []

    def _apply(self, added: Iterable[socket.socket], removed: Sequence[socket.socket]) -> None:
        # The removed ones are closed, so the kernel has forgotten them; the selector's own table has not.
        for key in list(self._selector.get_map().values()):
            if any(key.fileobj is sock for sock in removed):
                self._selector.unregister(key.fileobj)
        self._watch_sockets(added)

    def _watch_sockets(self, sockets: Iterable[socket.socket]) -> None:
        for sock in sockets:
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read_datagrams, sock))

    def _close_transport(self) -> None:
        if self._transport is None:
            return
        for sock in self._transport.sockets():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
        self._transport.close()
        self._transport = None
        if self._relay.socket is not None:
            self._selector.unregister(self._relay.socket)
            self._relay.close()

    # --- what comes in ---------------------------------------------------------------------------------------------

    def _read_datagrams(self, sock: socket.socket, _mask: int) -> list[connections.Event]:
        if self._transport is not None:
            for received in self._transport.receive(sock):
                self._take(received, handed=False)
        return []

    def _read_relay(self, _mask: int) -> list[connections.Event]:
        for received in self._relay.receive():
            self._take(received, handed=True)
        return []

    def _take(self, received: Received, *, handed: bool) -> None:
        """Pass a datagram to the machine, and to the other processes of this machine if it concerns them as well."""
        try:
            message = self._datagram(received)
            # This process answers a question for its own job; other processes can answer any other datagram.
            if not handed and received.shared and not (isinstance(message, Seek) and self._hosts(message.job)):
                self._relay.relay(received, self.clock())
        except Exception as error:
            self._note_fault(error, f"a datagram from {received.source[0]}")

    def _hosts(self, job: str) -> bool:
        """Whether this process hosts a job that is forming."""
        offer = self._machine.calling()
        return isinstance(offer, Offer) and offer.job == job

    def _note_multicast(self, received: Received) -> None:
        """Notes where multicasts arrive. Our own come back, too, unless this host's own firewall drops them."""
        if received.multicast:
            self._multicasts_on.add(received.interface)

    def _datagram(self, received: Received) -> Datagram | None:
        self._note_multicast(received)
        now = self.clock()
        # A ping is for another process of this machine, to which it is handed on.
        if echo.is_one(received.data):
            return None
        message = self._decode(received.data)
        verified = isinstance(message, Offer) and self._verified(received.data, message)
        if isinstance(message, Offer):
            message = self._admitted(message, received, verified=verified)
        if message is not None:
            source = Source(
                interface=received.interface,
                multicast=received.multicast,
                signed=datagrams.is_signed(received.data),
                verified=verified,
                address=connections.bare_address(received.source[0]),
                reply_to=received,
            )
            self._machine.heard(message, source, now)
        return message

    def _admitted(self, offer: Offer, received: Received, *, verified: bool) -> Offer | None:
        """Return the usable part of an OFFER; count it and return None if nothing is usable."""
        address = connections.bare_address(received.source[0])
        if not (received.multicast or received.local or verified):
            # A host answers by unicast only if it was asked as a peer, or is on one of our networks.
            networks = [each.network for nic in self._nics.found for each in nic.addresses]
            known = self._peers.knows(address) or claims.is_on_link(address, networks)
            if not known and not interfaces.is_on_link(address):
                self._rejected["unsolicited"] += 1
                return None
        on_loopback = any(each.name == received.interface and each.loopback for each in self._nics.found)
        admitted = claims.without_traps(offer, on_loopback=on_loopback)
        if admitted is None:
            self._rejected["addresses"] += 1
        return admitted

    def _verified(self, untrusted: bytes, offer: Offer) -> bool:
        """Return whether our secret signed an OFFER that `_decode` accepted."""
        return self._key is not None

    def _tcp_event(self, event: connections.Event) -> None:
        try:
            self._handle_tcp_event(event)
        except Exception as error:
            self._note_fault(error, "what came in on a connection")
            self._give_up(event.conn)

    def _handle_tcp_event(self, event: connections.Event) -> None:
        machine, now = self._machine, self.clock()
        if isinstance(event, connections.Accepted):
            self._accepted(event.conn, event.address, now)
        elif not machine.owns(event.conn):
            return
        elif isinstance(event, connections.Connected):
            self._connected(event, now)
        elif isinstance(event, connections.Data):
            machine.received(event.conn, event.data, now)
        else:
            self._dialled.pop(event.conn, None)
            self._ended(event.conn, event.reason, now)

    def _give_up(self, conn: int) -> None:
        """Close a connection whose input could not be handled, and tell the machine."""
        self._dialled.pop(conn, None)
        self._connections.hang_up(conn)
        try:
            if self._machine.owns(conn):
                self._ended(conn, "what came in on it could not be handled", self.clock())
        except Exception as error:
            self._note_fault(error, "the end of a connection")

    def _connected(self, event: connections.Connected, now: float) -> None:
        dialled = self._dialled.pop(event.conn)
        if event.local_address not in self._nics.addresses():
            self._rescan(now)  # an interface that has come since we looked
            if not self._machine.owns(event.conn):
                return
        owner = self._nics.owner(event.local_address, dialled.interface)
        if not self._nics.in_use(owner):
            self._connections.hang_up(event.conn)
            self._ended(event.conn, f"is reached through {owner}, and other interfaces were named", now)
            return
        weak = interfaces.reached_weakly(self._nics.found, event.local_address, dialled.address)
        self._machine.connected(event.conn, event.local_address, owner, now, weak=weak)

    # --- what goes out ---------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while effects := self._machine.effects():
            for effect in effects:
                self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        events: list[connections.Event] = []
        match effect:
            case Multicast(message, lobby):
                self._multicast(message, LOBBY if lobby else self._group)
            case Answer(source, message):
                try:
                    self._answer(source, message)
                except Exception as error:  # where it goes to was named by somebody else
                    self._note_fault(error, f"a question from {source.address}")
            case Dial(conn, address, port, interface):
                self._dialled[conn] = effect
                try:
                    events = self._connections.dial(conn, address, port, self._nics.index(interface))
                except Exception as error:  # the address, too
                    self._note_fault(error, f"the address {address}")
                    events = [connections.Closed(conn, f"can't be dialled: {error}")]
            case Write(conn, data):
                events = self._connections.write(conn, data)
            case Hangup(conn) | Reset(conn):
                self._dialled.pop(conn, None)
                (self._connections.reset if isinstance(effect, Reset) else self._connections.hang_up)(conn)
            case Notice(text, warning):
                self._say(logging.WARNING if warning else logging.INFO, text)
            case _:
                self._perform_more(effect)
        for event in events:
            self._tcp_event(event)

    def _answer(self, source: Source, message: Datagram) -> None:
        """Answers by unicast with no more bytes than were asked with: a forged source gains nothing by asking us."""
        if self._transport is None or not isinstance(source.reply_to, Received):
            return
        data = datagrams.encode(datagrams.with_first(message, {source.reply_to.destination}), self._key)
        if len(data) > len(source.reply_to.data):
            self._rejected["unpadded"] += 1
            return
        self._transport.reply(source.reply_to, data)

    def _say(self, level: int, text: str) -> None:
        """Says something to people."""
        logger.log(level, "%s", text)

    def _multicast(self, message: Datagram, group: Group | None) -> None:
        if self._transport is None or group is None:
            return
        for interface in self._transport.interfaces:
            toward = datagrams.with_first(message, {str(each.ip) for each in interface.addresses})
            self._transport.multicast(interface.name, datagrams.encode(toward, self._key), group)

    # --- what a report says ----------------------------------------------------------------------------------------

    @property
    def seen(self) -> Seen:
        """What the sockets have shown."""
        return Seen(
            network=self.network,
            group=self._group or LOBBY,
            found=self._nics.found,
            usable=self._nics.usable,
            transport=self._transport,
            unresolved=self._peers.failures,
            rejected=self._rejected,
            multicasts_on=frozenset(self._multicasts_on),
            rp_drops_before=self._rp_drops,
        )

    def facts(self, *, diagnosed: bool = False) -> NetworkFacts:
        """What a report says of the network.

        Args:
            diagnosed: whether to look for what is wrong with this machine, too; it takes a moment.
        """
        return network_facts(self.seen, diagnosed=diagnosed)


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


def _comes_from_a_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an exception; Python runs handlers between any two lines."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {code for code in map(_code, handlers) if code is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code(handler: object) -> object:
    """Return the code object that runs when a handler (a function, a method or a callable object) is called."""
    while (inner := getattr(handler, "func", None)) is not None:  # functools.partial
        handler = inner
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = handler.__call__
    return getattr(handler, "__code__", None)
