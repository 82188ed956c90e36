"""The loop of those who are no rank: it drives a finder or an announcement, without torch.

One thread, which waits on sockets with deadlines and can therefore be interrupted at any moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import msgspec

from mingle import connections, datagrams, forksafe, interfaces
from mingle.authentication import JobKey
from mingle.connections import Connections
from mingle.datagrams import Datagram, Offer
from mingle.errors import InterfaceError
from mingle.frames import Who
from mingle.groups import LOBBY, Group, job_group
from mingle.machine import Answer, Dial, Effect, Hangup, Multicast, NetworkFacts, Notice, Source, Write
from mingle.peers import PeerSchedule, Resolver
from mingle.settings import Network
from mingle.transport import Received, Transport

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("mingle")

RESCAN_SECONDS = 2.0
"""How often the interfaces are looked at: a NIC may come or go."""
REFRESH_SECONDS = 30.0
"""How often memberships are renewed: a switch that snoops without a querier forgets them after minutes."""
RESOLVED_SECONDS = 0.1
"""How often newly resolved peers are looked for."""
UNICAST_QUESTION_BYTES = 1000
"""A unicast question is padded to this: no answer to it is longer."""


class Machine(Protocol):
    """What the loop needs of a machine.

    There are two: :class:`mingle.finding.Finder` and :class:`mingle.announcing.Announcement`.
    """

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

    def accepted(self, conn: int, address: str, now: float, /) -> None:
        """Somebody has connected."""

    def connected(self, conn: int, local_address: str, interface: str, now: float, /) -> None:
        """A connection that was dialled stands."""

    def received(self, conn: int, untrusted: bytes, now: float, /) -> None:
        """Bytes came in on a connection."""

    def closed(self, conn: int, reason: str, now: float, /) -> None:
        """A connection ended."""

    def close(self, reason: str, /) -> None:
        """Ends everything."""


class Observer:
    """The sockets and the clock of one command. Use it in a ``with`` statement.

    Args:
        network: how to discover.
        job: the job whose group is listened to beside the lobby; None: only the lobby is.
        key: signs what is sent.

    Raises:
        InterfaceError: no interface can be used.
    """

    def __init__(self, network: Network, job: str | None = None, key: JobKey | None = None) -> None:
        self.network = network
        self.new_id = connections.counter()
        self.rng = random.Random()
        self._key = key
        self._group: Group | None = None if job is None else job_group(job)
        self._rejected: Counter[str] = Counter()
        self._dialled: dict[int, str] = {}
        self._machine: Machine
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack) -> None:
        network = self.network
        self._found = interfaces.scan()
        self._usable = interfaces.choose(self._found, named=network.interfaces, family=network.family).usable
        self._selector = forksafe.register(selectors.DefaultSelector())
        stack.callback(self._selector.close)
        groups = (LOBBY,) if self._group is None else (self._group, LOBBY)
        self._transport = stack.enter_context(
            Transport(self._usable, groups=groups, port=network.port, ttl=network.ttl, family=network.family)
        )
        self._watch(self._transport.sockets())
        self._connections = Connections(self._selector, self.new_id)
        stack.callback(self._connections.close)
        self._peers = PeerSchedule(self.rng)
        self._resolver = Resolver(network.peers, network.port, network.family, exclude=frozenset())
        stack.callback(self._resolver.stop)
        now = time.monotonic()
        self._rescan_due = now + RESCAN_SECONDS
        self._refresh_due = now + REFRESH_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def listen(self) -> tuple[tuple[str, ...], int]:
        """Opens a control port on every own address; returns what to announce and the port.

        Raises:
            InterfaceError: none can be bound.
        """
        own = own_addresses(self._usable, self.network.family)
        self._connections.listen(own)
        advertised = () if self.network.advertise is None else (self.network.advertise,)
        announced = (*advertised, *(address for address, _ in own))[: datagrams.MAX_ADDRESSES]
        return announced, self._connections.port

    def _watch(self, sockets: Iterable[socket.socket]) -> None:
        for sock in sockets:
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read_datagrams, sock))

    # --- running --------------------------------------------------------------------------------------------

    def run(self, machine: Machine, *, until: float | None, done: Callable[[], bool] = lambda: False) -> None:
        """Drives a machine until it is done or the time has come, and closes it in any case.

        Args:
            machine: what to drive.
            until: a time of ``time.monotonic()``; None: for ever.
            done: is asked after each turn.
        """
        self._machine = machine
        logger.info(
            "listening on %s, UDP port %d", ", ".join(each.name for each in self._usable), self.network.port
        )
        reason = "interrupted"
        try:
            self._carry_out()
            while not done() and (until is None or time.monotonic() < until):
                self._turn(until)
            reason = "done"
        finally:
            machine.close(reason)
            self._carry_out()

    def _turn(self, until: float | None) -> None:
        """One round: wait, serve what is ready, then what is due."""
        for key, mask in self._selector.select(self._wait(until)):
            for event in key.data(mask):
                self._tcp_event(event)
            self._carry_out()
        now = time.monotonic()
        due = self._machine.next_timer()
        if due is not None and now >= due:
            self._machine.handle_timer(now)
        self._ask_peers(now)
        if now >= self._rescan_due:
            self._rescan_due = now + RESCAN_SECONDS
            self._rescan()
        if now >= self._refresh_due:
            self._refresh_due = now + REFRESH_SECONDS
            change = self._transport.refresh()
            self._apply(change.added, change.removed)
        self._carry_out()

    def _wait(self, until: float | None) -> float:
        now = time.monotonic()
        times = [until, self._machine.next_timer(), self._rescan_due, self._refresh_due]
        if self.network.peers:
            times += [self._peers.next_timer(), now + RESOLVED_SECONDS]
        return max(0.0, min(time for time in times if time is not None) - now)

    def _ask_peers(self, now: float) -> None:
        if not self.network.peers:
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

    def _rescan(self) -> None:
        """Looks whether an interface has come or gone; named ones are waited for."""
        found = interfaces.scan()
        if found == self._found:
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
        self._watch(added)

    # --- what comes in --------------------------------------------------------------------------------------

    def _read_datagrams(self, sock: socket.socket, _mask: int) -> list[connections.Event]:
        for received in self._transport.receive(sock):
            self._datagram(received)
        return []

    def _datagram(self, received: Received) -> None:
        try:
            # Without the key on purpose: a signature decides nothing here, and who lacks one shall be named.
            message = datagrams.decode(received.data)
        except datagrams.Rejected as rejected:
            self._rejected[rejected.reason] += 1
            return
        source = Source(
            interface=received.interface,
            multicast=received.multicast,
            signed=datagrams.is_signed(received.data),
            address=connections.bare_address(received.source[0]),
            reply_to=received,
        )
        self._machine.heard(message, source, time.monotonic())

    def _tcp_event(self, event: connections.Event) -> None:
        machine, now = self._machine, time.monotonic()
        if isinstance(event, connections.Accepted):
            machine.accepted(event.conn, event.address, now)
        elif not machine.owns(event.conn):
            return
        elif isinstance(event, connections.Connected):
            machine.connected(event.conn, event.local_address, self._owner(event), now)
        elif isinstance(event, connections.Data):
            machine.received(event.conn, event.data, now)
        else:
            machine.closed(event.conn, event.reason, now)

    def _owner(self, event: connections.Connected) -> str:
        """Returns the interface that owns a connection's local address."""
        dialled = self._dialled.pop(event.conn, "")
        if event.local_address.startswith("fe80:"):
            return dialled
        owner = interfaces.owner(self._found, event.local_address)
        return dialled if owner is None else owner.name

    # --- what goes out --------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while effects := self._machine.effects():
            for effect in effects:
                self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        events: list[connections.Event] = []
        match effect:
            case Multicast(message, lobby):
                self._multicast(message, lobby=lobby)
            case Answer(source, message):
                if isinstance(source.reply_to, Received):
                    self._transport.reply(source.reply_to, datagrams.encode(message, self._key))
            case Dial(conn, address, port, interface):
                self._dialled[conn] = interface
                events = self._connections.dial(conn, address, port, self._index(interface))
            case Write(conn, data):
                events = self._connections.write(conn, data)
            case Hangup(conn):
                self._dialled.pop(conn, None)
                self._connections.hang_up(conn)
            case Notice(text, warning):
                logger.log(logging.WARNING if warning else logging.INFO, "%s", text)
            case _:
                raise AssertionError(f"a machine that is no rank opens no store: {effect}")
        for event in events:
            self._tcp_event(event)

    def _index(self, interface_name: str) -> int:
        return next((each.index for each in self._found if each.name == interface_name), 0)

    def _multicast(self, message: Datagram, *, lobby: bool) -> None:
        group = LOBBY if lobby else self._group
        assert group is not None
        for interface in self._transport.interfaces:
            toward = message
            if isinstance(message, Offer):
                own = {str(each.ip) for each in interface.addresses}
                first = sorted(message.addresses, key=lambda address: address not in own)
                toward = msgspec.structs.replace(message, addresses=tuple(first))
            self._transport.multicast(interface.name, datagrams.encode(toward, self._key), group)

    # --- what a report says ---------------------------------------------------------------------------------

    def facts(self) -> NetworkFacts:
        """What a report says of the network."""
        network, transport = self.network, self._transport
        families = {network.family} if network.family != "auto" else {"4", "6"}
        group = self._group or LOBBY
        groups = [group.ipv4] if "4" in families else []
        if "6" in families and any(each.of_family("6") for each in self._usable):
            groups.append(group.ipv6(network.ttl))
        failures = [f"{what}: {why}" for what, why in transport.failures.items()]
        failures += [f"{host} did not resolve: {why}" for host, why in self._resolver.failures.items()]
        return NetworkFacts(
            interfaces=[str(each) for each in self._usable],
            groups=groups,
            port=network.port,
            peers=[str(peer) for peer in network.peers],
            sent=transport.sent,
            received=transport.received,
            rejected=self._rejected,
            send_errors=transport.send_errors,
            failures=failures,
        )


def own_addresses(usable: Iterable[interfaces.Interface], family: interfaces.Family) -> list[tuple[str, int]]:
    """Returns every address to listen on, best first, each with its interface's index.

    A link-local one counts only where an interface has no other.
    """
    found = []
    for interface in usable:
        every = interface.of_family(family)
        routable = [each for each in every if not each.is_link_local]
        found += [(str(each.ip), interface.index) for each in routable or every[:1]]
    return found[: datagrams.MAX_ADDRESSES]


def this_process() -> Who:
    """Returns how this process is named to others."""
    return Who(hostname=datagrams.clip(socket.gethostname()), pid=os.getpid())


def new_name() -> bytes:
    """Returns sixteen random bytes, for a session or a member."""
    return secrets.token_bytes(16)
