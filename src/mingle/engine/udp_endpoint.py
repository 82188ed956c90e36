"""The datagrams of one process: by multicast, by unicast from peers, and from other processes of this machine.

What comes in passes the `Reception`, and what is shared goes on to the other processes of this machine. What goes out
is encoded and signed here.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from mingle.config.settings import Network
from mingle.engine.reception import Reception, Rejections
from mingle.network.interface_monitor import InterfaceMonitor
from mingle.network.local_relay import LocalRelay
from mingle.network.peers import Peers
from mingle.network.transport import Change, Received, Transport
from mingle.protocol.events import Heard, Source
from mingle.protocol.machine import Machine
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import BROWSE_GROUP, Datagram, Failed, Group, List, Offer, Seek, job_group

REFRESH_SECONDS = 30.0
"""How often memberships are renewed, also while the job runs: a switch that snoops without a querier forgets them."""
FAILED_PAUSES_SECONDS = (0.0, 0.1, 0.3)
"""The times between the datagrams of a process that ends with an error; meanwhile names of peers are looked up."""
UNICAST_QUESTION_BYTES = datagrams.MAX_BYTES
"""The size to which a unicast question is padded. A question that is shorter than its answer gets none."""


class UdpEndpoint:
    """The UDP sockets of one process, with the local relay and the unicast peers.

    Args:
        network: how to discover.
        job: the job whose group to join beside the browse group; None: only the browse group.
        key: signs what is sent.
        interfaces: of this machine.
        selector: waits for the sockets.
        stack: closes them.
        groups: the multicast groups to join in place of the job's and the browse group.
        clock: the time.
        rng: spreads the questions to peers.
        rejections: counts the datagrams that are dropped.
    """

    machine: Machine
    """Hears the datagrams."""

    def __init__(
        self,
        network: Network,
        job: str | None,
        key: JobKey | None,
        *,
        interfaces: InterfaceMonitor,
        selector: selectors.BaseSelector,
        stack: contextlib.ExitStack,
        groups: Sequence[Group],
        clock: Callable[[], float],
        rng: random.Random,
        rejections: Rejections,
    ) -> None:
        self.group: Group | None = None if job is None else job_group(job)
        """The job's group."""
        self.multicasts_on: set[str] = set()
        """The interfaces on which multicasts arrive."""
        self.multicast_heard = False
        """Whether a multicast of another machine has arrived."""
        self.peers_answer = False
        """Whether another machine has sent by unicast, and peers are named; or a connection with such a peer stands."""
        self.on_datagram: Callable[[Received, float], Datagram | None] = self._admit
        """Processes a datagram, and returns the message in it, if any. The pinger has datagrams of its own."""
        self.ask_peers: Callable[[float], None] = self._ask_peers
        """Asks the unicast peers whose turn it is. The pinger replaces it as well."""
        self._key = key
        self._interfaces = interfaces
        self._selector = selector
        self._rejections = rejections
        self._clock = clock
        self._refresh_due = clock() + REFRESH_SECONDS
        self.relay = LocalRelay(network.port, rejections.counts)
        """Passes datagrams on to the other processes of this machine that share the port."""
        stack.callback(self.relay.close)
        if self.relay.socket is not None:
            selector.register(self.relay.socket, selectors.EVENT_READ, self._read_relay)
        groups = groups or ((BROWSE_GROUP,) if self.group is None else (self.group, BROWSE_GROUP))
        self.transport: Transport | None = Transport(
            interfaces.usable, groups=groups, port=network.port, ttl=network.ttl, family=network.family
        )
        """The UDP sockets; None once they are closed."""
        stack.callback(self.close)
        self._watch(self.transport.sockets())
        self.peers = Peers(network.peers, network.port, network.family, rng)
        """The hosts that are asked by unicast."""
        stack.callback(self.peers.stop)
        self.reception = Reception(
            key, network.secret, self.peers, interfaces, rejections.counts, routed=network.ttl > 1
        )
        """Decides which datagrams the machine hears."""

    def close(self) -> None:
        """Close the UDP sockets and leave the local relay. A second call does nothing."""
        if self.transport is None:
            return
        for sock in self.transport.sockets():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
        self.transport.close()
        self.transport = None
        if self.relay.socket is not None:
            self._selector.unregister(self.relay.socket)
            self.relay.close()

    # --- sockets ---------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        return None if self.transport is None else self._refresh_due

    def handle_timer(self, now: float) -> None:
        """Renew the memberships, if that is due."""
        if self.transport is not None and now >= self._refresh_due:
            self._refresh_due = now + REFRESH_SECONDS
            self._change(self.transport.refresh())

    def rescanned(self, *, changed: bool) -> None:
        """Use the interfaces that a scan has found; what has failed on one is tried again."""
        # The end of IPv6's duplicate check changes no address.
        if self.transport is not None and (changed or self.transport.failures):
            self._change(self.transport.update(self._interfaces.usable))

    def _change(self, change: Change) -> None:
        # The removed ones are closed, so the kernel has forgotten them; the selector's own table has not.
        for key in list(self._selector.get_map().values()):
            if any(key.fileobj is sock for sock in change.removed):
                self._selector.unregister(key.fileobj)
        self._watch(change.added)

    def _watch(self, sockets: Iterable[socket.socket]) -> None:
        for sock in sockets:
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read_datagrams, sock))

    # --- what comes in ---------------------------------------------------------------------------------------------

    def _read_datagrams(self, sock: socket.socket, _mask: int) -> tuple[()]:
        if self.transport is not None:
            for received in self.transport.receive(sock):
                self._take(received)
        return ()

    def _read_relay(self, _mask: int) -> tuple[()]:
        for received in self.relay.receive():
            self._take(received)
        return ()

    def _take(self, received: Received) -> None:
        """Process a datagram, and relay it to the other processes of this machine if it concerns them as well."""
        if received.broadcast:  # no rank sends one, and every process of every machine here would answer it
            self._rejections.counts["broadcast"] += 1
            return
        if received.multicast:  # our own come back, too, unless this host's firewall drops them
            self.multicasts_on.add(received.interface)
        try:
            message = self.on_datagram(received, self._clock())
            if message is not None and received.multicast and received.family == "4" and not received.local:
                self._interfaces.note_heard(received.source[0], received.interface)
            if message is not None and self.peers.any and not (received.multicast or received.local):
                self.peers_answer = True
            # This process answers a question for its own job; other processes can answer any other datagram.
            if received.shared and not (isinstance(message, Seek) and self._hosts(message.job)):
                self.relay.relay(received, self._clock())
        except Exception as error:
            self._rejections.fault(error, f"a datagram from {received.source[0]}")

    def _hosts(self, job: str) -> bool:
        """Return whether this process hosts a job that is forming."""
        offer = self.machine.calling()
        return isinstance(offer, Offer) and offer.job == job

    def _admit(self, received: Received, now: float) -> Datagram | None:
        event = self.reception.admit(received)
        if event is not None:
            self.machine.handle(event, now)
        if not isinstance(event, Heard):
            return None
        self.peers.heard(event.source.address)
        self.multicast_heard |= received.multicast and not received.local
        return event.message

    def reached(self, address: str) -> None:
        """Take note that a TCP connection with an address stands: a rank that has joined may say nothing by UDP."""
        if self.peers.knows(address) and address not in self._interfaces.addresses():
            self.peers.heard(address)
            self.peers_answer = True

    # --- what goes out ---------------------------------------------------------------------------------------------

    def multicast(self, message: Datagram, *, browse: bool, turn: int | None, padded: bool) -> None:
        """Send a datagram to the job's group on every interface, or to the browse group."""
        group = BROWSE_GROUP if browse else self.group
        if self.transport is None or group is None:
            return
        for interface in self.transport.interfaces:
            toward = datagrams.with_first(message, (str(each.ip) for each in interface.addresses))
            self.transport.multicast(interface.name, self._encoded(toward, padded=padded), group, turn)

    def answer(self, source: Source, message: Datagram) -> None:
        """Answer by unicast with no more bytes than the question has: a forged source gains nothing by asking us."""
        if self.transport is None or not isinstance(source.reply_to, Received):
            return
        data = datagrams.encode(datagrams.with_first(message, {source.reply_to.destination}), self._key)
        if len(data) > len(source.reply_to.data):
            self._rejections.counts["unpadded"] += 1
            return
        self.transport.reply(source.reply_to, data)

    def _ask_peers(self, now: float) -> None:
        if not self.peers.any:
            return
        message = self.machine.calling()
        addresses = self.peers.turn(silent=message is None, now=now)
        if message is not None:
            self._unicast(message, addresses)

    def tell_peers(self, message: Datagram) -> None:
        """Send a datagram to the unicast peers, whenever they are asked next."""
        self._unicast(message, self.peers.some())

    def _unicast(self, message: Datagram, addresses: Collection[tuple[str, int]]) -> None:
        if self.transport is not None and addresses:
            data = self._encoded(message, padded=True)
            for address in addresses:
                self.transport.unicast(data, address)

    def say_failed(self, message: Failed) -> None:
        """Say a few times that this process has failed, before its sockets close: single packets get lost."""
        for pause in FAILED_PAUSES_SECONDS:
            time.sleep(pause)
            self.multicast(message, browse=False, turn=None, padded=False)
            self.tell_peers(message)

    def _encoded(self, message: Datagram, *, padded: bool) -> bytes:
        """Return the bytes of a message, as long as the longest answer if it is a question that is to be padded."""
        if padded and isinstance(message, Seek | List):
            return datagrams.padded(message, UNICAST_QUESTION_BYTES, self._key)
        return datagrams.encode(message, self._key)
