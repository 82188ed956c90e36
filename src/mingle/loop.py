"""The loop: the only place where a machine, sockets and the clock meet.

One selector serves datagrams, control connections and the calls of other threads. Nothing in it blocks, and it waits
on sockets with deadlines, so it can be interrupted at any moment. :class:`~mingle.discovery.Discovery` (a rank) and
:class:`~mingle.observer.Observer` (a command that is no rank) are what drives it.
"""

from __future__ import annotations

import contextlib
import logging
import random
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from mingle import connections, datagrams, forksafe, interfaces
from mingle.authentication import JobKey
from mingle.connections import Connections
from mingle.datagrams import Datagram, Offer
from mingle.errors import InterfaceError
from mingle.groups import LOBBY, Group, job_group
from mingle.machine import Address, Answer, Dial, Effect, Hangup, Multicast, NetworkFacts, Notice, Source, Write
from mingle.peers import PeerSchedule, Resolver
from mingle.settings import Network
from mingle.transport import Received, Transport

logger = logging.getLogger("mingle")

RESCAN_SECONDS = 2.0
"""How often the interfaces are looked at: a NIC may come or go."""
REFRESH_SECONDS = 30.0
"""How often memberships are renewed: a switch that snoops without a querier forgets them after minutes."""
RESOLVED_SECONDS = 0.1
"""How often newly resolved peers are looked for."""
LONGEST_WAIT_SECONDS = 60.0
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

    def connected(self, conn: int, local_address: str, interface: str, now: float, /) -> None:
        """A connection that was dialled stands."""

    def received(self, conn: int, untrusted: bytes, now: float, /) -> None:
        """Bytes came in on a connection."""


class Loop:
    """The sockets and the clock of one process. A subclass makes the machine and runs the turns.

    Args:
        network: how to discover.
        job: the job whose group is listened to beside the lobby; None: only the lobby is.
        key: signs what is sent.
        stack: what is to be closed at the end goes there, also if this constructor fails.

    Raises:
        InterfaceError: no interface can be used.
    """

    _machine: Machine

    def __init__(self, network: Network, job: str | None, key: JobKey | None, stack: contextlib.ExitStack) -> None:
        self.network = network
        self.new_id = connections.counter()
        self.rng = random.Random()
        self._key = key
        self._group: Group | None = None if job is None else job_group(job)
        self._rejected: Counter[str] = Counter()
        self._dialled: dict[int, str] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._found = interfaces.scan()
        self._usable = interfaces.choose(self._found, named=network.interfaces, family=network.family).usable
        self._selector = forksafe.register(selectors.DefaultSelector())
        stack.callback(self._selector.close)
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            forksafe.register(end).setblocking(False)
            stack.callback(end.close)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._run_calls)
        groups = (LOBBY,) if self._group is None else (self._group, LOBBY)
        self._transport: Transport | None = Transport(
            self._usable, groups=groups, port=network.port, ttl=network.ttl, family=network.family
        )
        stack.callback(self._close_transport)
        self._watch_sockets(self._transport.sockets())
        self._connections = Connections(self._selector, self.new_id)
        stack.callback(self._connections.close)
        self._peers = PeerSchedule(self.rng)
        self._resolver = Resolver(network.peers, network.port, network.family, exclude=frozenset())
        stack.callback(self._resolver.stop)
        now = time.monotonic()
        self._rescan_due = now + RESCAN_SECONDS
        self._refresh_due = now + REFRESH_SECONDS

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

    def _seeks(self) -> bool:
        """Whether anybody is still looked for; if not, there is no house to keep."""
        return self._transport is not None

    def _more_timers(self) -> Iterable[float | None]:
        """When something else is to be done."""
        return ()

    def _house_keeping(self, now: float) -> None:
        """What is done beside the protocol."""
        self._ask_peers(now)
        if now >= self._rescan_due:
            self._rescan_due = now + RESCAN_SECONDS
            self._rescan()
        if now >= self._refresh_due and self._transport is not None:
            self._refresh_due = now + REFRESH_SECONDS
            change = self._transport.refresh()
            self._apply(change.added, change.removed)

    # --- running ---------------------------------------------------------------------------------------------------

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
        if self._seeks():
            self._house_keeping(now)
        self._carry_out()

    def _wait(self) -> float:
        now = time.monotonic()
        times = [self._machine.next_timer(), now + LONGEST_WAIT_SECONDS, *self._more_timers()]
        if self._seeks():
            times += [self._rescan_due, self._refresh_due]
            if self.network.peers:
                times += [self._peers.next_timer(), now + RESOLVED_SECONDS]
        return max(0.0, min(time for time in times if time is not None) - now)

    def call(self, function: Callable[[], None]) -> None:
        """Has a function run by the loop, from any thread."""
        self._calls.append(function)
        with contextlib.suppress(OSError):  # full: it will wake up anyhow; closed: nobody is left to wake
            self._wake_writer.send(b"\0")

    def _run_calls(self, _mask: int) -> list[connections.Event]:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        while self._calls:
            self._calls.popleft()()
        return []

    def _ask_peers(self, now: float) -> None:
        if not self.network.peers or self._transport is None:
            return
        self._peers.learn(self._resolver.take(), now)
        message = self._machine.calling()
        if message is None:
            return
        for address in self._peers.turn(now):
            if isinstance(message, datagrams.Seek | datagrams.List):
                data = datagrams.padded(message, UNICAST_QUESTION_BYTES, self._key)
            else:
                data = datagrams.encode(message, self._key)
            self._transport.unicast(data, address)

    # --- interfaces ------------------------------------------------------------------------------------------------

    def _rescan(self) -> None:
        """Looks whether an interface has come or gone; named ones are waited for."""
        try:
            found = interfaces.scan()
        except OSError as error:
            # Out of descriptors, for example: what was there stays, and it is looked again.
            logger.debug("the interfaces can't be looked at: %s", error)
            return
        if found == self._found or self._transport is None:
            return
        self._found = found
        try:
            choice = interfaces.choose(found, named=self.network.interfaces, family=self.network.family)
        except InterfaceError as error:
            logger.debug("%s", error.observation)
            return
        self._usable = choice.usable
        change = self._transport.update(self._usable)
        self._apply(change.added, change.removed)

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

    def _index(self, interface_name: str) -> int:
        """Returns an interface's index; where none is named and only one can be meant, that one's."""
        if not interface_name and len(self._usable) == 1:
            return self._usable[0].index
        return next((each.index for each in self._found if each.name == interface_name), 0)

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
        message = self._decode(received.data)
        if message is not None:
            self._machine.heard(message, source, time.monotonic())

    def _tcp_event(self, event: connections.Event) -> None:
        machine, now = self._machine, time.monotonic()
        if isinstance(event, connections.Accepted):
            self._accepted(event.conn, event.address, now)
        elif not machine.owns(event.conn):
            return
        elif isinstance(event, connections.Connected):
            machine.connected(event.conn, event.local_address, self._owner(event), now)
        elif isinstance(event, connections.Data):
            machine.received(event.conn, event.data, now)
        else:
            self._ended(event.conn, event.reason, now)

    def _owner(self, event: connections.Connected) -> str:
        """Returns the interface that owns a connection's local address."""
        dialled = self._dialled.pop(event.conn, "")
        if event.local_address.startswith("fe80:"):
            return dialled
        owner = interfaces.owner(self._found, event.local_address)
        return dialled if owner is None else owner.name

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
                self._answer(source, message)
            case Dial(conn, address, port, interface):
                self._dialled[conn] = interface
                events = self._connections.dial(conn, address, port, self._index(interface))
            case Write(conn, data):
                events = self._connections.write(conn, data)
            case Hangup(conn):
                self._dialled.pop(conn, None)
                self._connections.hang_up(conn)
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
        data = datagrams.encode(message, self._key)
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
            toward = message
            if isinstance(message, Offer):
                # Who hears it there can most likely reach the address of that very interface.
                own = {str(each.ip) for each in interface.addresses}
                first = sorted(message.addresses, key=lambda address: address not in own)
                toward = msgspec.structs.replace(message, addresses=tuple(first))
            self._transport.multicast(interface.name, datagrams.encode(toward, self._key), group)

    # --- what a report says ----------------------------------------------------------------------------------------

    def facts(self) -> NetworkFacts:
        """What a report says of the network."""
        network, transport = self.network, self._transport
        families = {network.family} if network.family != "auto" else {"4", "6"}
        group = self._group or LOBBY
        groups = [group.ipv4] if "4" in families else []
        if "6" in families and any(each.of_family("6") for each in self._usable):
            groups.append(group.ipv6(network.ttl))
        failures = [f"{what}: {why}" for what, why in transport.failures.items()] if transport else []
        failures += [f"{host} did not resolve: {why}" for host, why in self._resolver.failures.items()]
        return NetworkFacts(
            interfaces=[str(each) for each in self._usable],
            groups=groups,
            port=network.port,
            peers=[str(peer) for peer in network.peers],
            sent=transport.sent if transport else 0,
            received=transport.received if transport else 0,
            rejected=self._rejected,
            send_errors=transport.send_errors if transport else Counter(),
            failures=failures,
        )


def own_addresses(usable: Iterable[interfaces.Interface], family: interfaces.Family) -> tuple[Address, ...]:
    """Returns every address to listen on, best first. A link-local one counts only where an interface has no other."""
    found: list[Address] = []
    for interface in usable:
        every = interface.of_family(family)
        routable = [each for each in every if not each.is_link_local]
        found += [
            Address(str(each.ip), interface.name, each.network.prefixlen, interface.index)
            for each in routable or every[:1]
        ]
    return tuple(found[: datagrams.MAX_ADDRESSES])
