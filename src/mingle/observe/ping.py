"""Ping other hosts and answer their pings over each path.

The same pure machine, `PingMachine`, runs on every host (``mingle-discover ping``, ``doctor --serve`` and ``--check``).
It finds the others by multicast and by the addresses it was given, and then tries each path to each of them: the group,
a group that no switch filters, unicast to the shared port, and TCP. :mod:`mingle.observe.pinger` gives it
sockets and a clock, and :mod:`mingle.observe.path_checks` judges its figures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct, field

from mingle.protocol.effects import Dial, Hangup, Write
from mingle.protocol.events import Accepted, BytesReceived, Connected, Disconnected, Event, TimerDue
from mingle.protocol.machine import NewId
from mingle.wire import echo
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Rejected
from mingle.wire.echo import WAYS, EchoEnd, EchoMessage, EchoReply, EchoRequest, Way
from mingle.wire.frames import ProcessInfo

if TYPE_CHECKING:
    pass

WAIT_SECONDS = 1.0
"""The time after which a missing answer counts as lost."""
GRACE_SECONDS = 0.25
"""How old an unanswered PING must be to count as lost when its peer stops."""
MAX_PEERS = 256
"""The most peers; beyond it, drop one that has left, that never answered, or that is silent for longest."""
MAX_ACCEPTED = 256
"""The most connections of others at once; bounded against a flood of them."""
ANSWERS_PER_SECOND = 40
"""The most answers to one address, whatever it asks."""
MAX_ADDRESSES = 1024


class Figures(Struct):
    """The figures of one path to one peer."""

    sent: int = 0
    """PINGs whose answer has come, or is overdue."""
    received: int = 0
    """Answers."""
    total: float = 0.0
    """The sum of the round trips, in seconds."""
    shortest: float = math.inf
    """The shortest round trip, in seconds; infinite before the first."""
    longest: float = 0.0
    arrived: int = 0
    """The peer's own PINGs that arrived here on this path."""
    reason: str = ""
    """Why the last one failed, if the system said so."""
    pending: dict[int, float] = field(default_factory=dict)
    """The time at which each unanswered PING was sent."""

    @property
    def round_trips(self) -> tuple[float, float, float] | None:
        """The shortest, the mean and the longest round trip, in seconds; None before the first."""
        return (self.shortest, self.total / self.received, self.longest) if self.received else None

    @property
    def loss(self) -> float:
        """The share that was lost, 0 to 1."""
        return 0.0 if not self.sent else 1 - self.received / self.sent

    def answered(self, number: int, now: float) -> None:
        """Count an answer; a second one to the same PING counts for nothing."""
        sent_at = self.pending.pop(number, None)
        if sent_at is not None:
            self.sent += 1
            self.received += 1
            round_trip = now - sent_at
            self.total += round_trip
            self.shortest, self.longest = min(self.shortest, round_trip), max(self.longest, round_trip)

    def failed(self, number: int, reason: str) -> None:
        """Count a PING to which no answer can come."""
        if self.pending.pop(number, None) is not None:
            self.sent += 1
            self.reason = reason

    def expire(self, before: float) -> None:
        """Count as lost the PINGs that were sent before this time."""
        late = [number for number, at in self.pending.items() if at <= before]
        for number in late:
            del self.pending[number]
        self.sent += len(late)


class PingPeer(Struct):
    """Another process that pings."""

    pinger: bytes
    hostname: str
    pid: int
    address: str
    interface: str
    port: int
    figures: dict[Way, Figures] = field(default_factory=lambda: {way: Figures() for way in WAYS})
    gone: bool = False
    heard_at: float = 0.0

    @property
    def answers(self) -> bool:
        """Whether the peer has ever answered."""
        return any(figures.received for figures in self.figures.values())

    def __str__(self) -> str:
        return f"{self.hostname or 'unknown'} ({self.address})"


# --- events and effects of its own ---------------------------------------------------------------------------------


class EchoHeard(Struct, frozen=True, kw_only=True):
    """A ping, an answer or a good-bye came by UDP."""

    message: EchoMessage
    address: str
    """The address of its sender, as it can be sent to."""
    interface: str
    """Where it came in."""
    trusted: bool
    """Whether it has our secret, or, like us, none."""
    size: int
    """Its length in bytes; no answer to it is longer."""
    handle: object
    """For :class:`Reply`."""


class Cast(Struct, frozen=True):
    """Send to a group on every interface."""

    message: EchoMessage
    link: bool = False
    """To :data:`mingle.wire.echo.LINK_GROUP`, not to the group of the pings."""


class Post(Struct, frozen=True):
    """Send by unicast."""

    address: str
    port: int
    message: EchoMessage


class Reply(Struct, frozen=True):
    """Send to the source of a datagram; ``handle`` is the driver's own."""

    handle: object
    message: EchoMessage


Effect: TypeAlias = Cast | Post | Reply | Dial | Write | Hangup


class _Exchange(Struct):
    """A connection that carries one PING and its PONG."""

    peer: PingPeer | None = None
    """The peer that was dialed; None: the other side connected."""
    number: int = 0
    """The PING to send."""
    address: str = ""
    """The address of the other side that connected."""
    until: float = math.inf
    received: bytes = b""


class PingMachine:
    """Pings, answers, and keeps the figures.

    Args:
        job: the job that is pinged about; empty: none.
        pinger: sixteen random bytes by which our own messages are known.
        who: this process.
        port: where our TCP port listens.
        shared_port: the UDP port of the discovery.
        interval: seconds between two rounds.
        count: the number of rounds; None: no limit.
        new_id: numbers connections.
        now: the present, in seconds of a monotonic clock.
        own: addresses of this host.
        key: signs what is sent; messages without its signature are not believed.
    """

    def __init__(
        self,
        job: str,
        *,
        pinger: bytes,
        who: ProcessInfo,
        port: int,
        shared_port: int,
        interval: float,
        count: int | None,
        new_id: NewId,
        now: float,
        key: JobKey | None = None,
        own: Collection[str] = (),
    ) -> None:
        self.peers: dict[bytes, PingPeer] = {}
        self.rounds = 0
        self.strangers: dict[str, str] = {}
        """The addresses of pingers with another secret, each with what is known of the pinger."""
        self.other_jobs: dict[str, str] = {}
        """The jobs that others ping about, each with an address."""
        self.asked: dict[tuple[str, int], bool] = {}
        """The hosts that were given, and whether an answer came from there."""
        self._job = job
        self._key = key
        self.own = frozenset(own)
        """Addresses of this host."""
        self._pinger = pinger
        self._me: dict[str, Any] = {"job": job, "pinger": pinger, "hostname": who.hostname, "pid": who.pid}
        self._port = port
        self._shared_port = shared_port
        self._interval = interval
        self._count = count
        self._new_id = new_id
        self._due = now
        self._until: float | None = None
        """The end of the wait for the last answers, once all rounds are over."""
        self._effects: list[Effect] = []
        self._connections: dict[int, _Exchange] = {}
        self._answers: dict[str, tuple[float, int]] = {}

    # --- what the driver reads -------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether all rounds are over and their answers in."""
        return self._until is not None and not any(each.pending for each in self._all_figures())

    def _all_figures(self) -> list[Figures]:
        return [figures for peer in self.peers.values() for figures in peer.figures.values()]

    def effects(self) -> list[Effect]:
        """Hand out what the driver must do."""
        done, self._effects[:] = list(self._effects), []
        return done

    def calling(self) -> None:
        """Nothing: a round sends its own PINGs to unicast peers."""

    def showing(self) -> None:
        """Nothing: an observer leaves no sign in a shared folder."""

    @property
    def links(self) -> Container[int]:
        """The connections of this machine."""
        return self._connections

    def next_timer(self) -> float | None:
        """Return the time of the next `TimerDue`."""
        times = [self._due if self._until is None else self._until]
        times += [at + WAIT_SECONDS for each in self._all_figures() for at in each.pending.values()]
        times += [each.until for each in self._connections.values()]
        return min(times)

    def learn(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Add hosts to ping by unicast."""
        for each in addresses:
            if each in self.asked or len(self.asked) < MAX_ADDRESSES:
                self.asked.setdefault(each, False)

    def handle(self, event: Event | EchoHeard, now: float) -> None:
        """Process what has happened."""
        match event:
            case EchoHeard():
                self._heard(event, now)
            case Accepted(conn, address):
                self._accepted(conn, address, now)
            case Connected(conn):
                self._send(conn, self._ping(self._connections[conn].number, "tcp"))
            case BytesReceived(conn, untrusted):
                self._received(conn, untrusted, now)
            case Disconnected(conn, reason):
                self._fail(self._connections.pop(conn), reason)
            case TimerDue():
                self._handle_timer(now)

    # --- time ------------------------------------------------------------------------------------------------------

    def _handle_timer(self, now: float) -> None:
        """Count what is lost, hang up on what takes too long, and start the next round."""
        for figures in self._all_figures():
            figures.expire(now - WAIT_SECONDS)
        for conn, each in list(self._connections.items()):
            overdue = each.peer is not None and each.number not in each.peer.figures["tcp"].pending
            if overdue or now >= each.until:
                self._hang_up(conn)
        if self._until is None and now >= self._due:
            if self._count is not None and self.rounds >= self._count:
                self._until = now
            else:
                self._start_round(now)
                self._due = now + self._interval
        elif self._until is not None and now >= self._until:
            self._until = now + WAIT_SECONDS

    def _start_round(self, now: float) -> None:
        self.rounds += 1
        number = self.rounds
        present = [peer for peer in self.peers.values() if not peer.gone]
        for peer in present:
            for way, figures in peer.figures.items():
                # The kernel gives a unicast datagram to our own host's shared port to its last opener, maybe to us.
                if way != "unicast" or peer.address not in self.own:
                    figures.pending[number] = now
        self._effects.append(Cast(self._ping(number, "multicast")))
        self._effects.append(Cast(self._ping(number, "link"), link=True))
        known = {peer.address for peer in present}
        targets = [(peer.address, self._port_of(peer.address)) for peer in present if peer.address not in self.own]
        targets += [target for target in self.asked if target[0] not in known]
        self._effects += [Post(address, port, self._ping(number, "unicast")) for address, port in targets]
        for peer in present:
            if peer.port == 0:
                peer.figures["tcp"].failed(number, "it listens nowhere")
                continue
            conn = self._new_id()
            self._connections[conn] = _Exchange(peer, number)
            self._effects.append(Dial(conn, peer.address.partition("%")[0], peer.port, peer.interface))

    def _port_of(self, address: str) -> int:
        return next((port for known, port in self.asked if known == address), self._shared_port)

    def close(self, _reason: str = "") -> None:
        """Send good-byes on every path, and hang up."""
        gone = EchoEnd(**self._me)
        self._effects.append(Cast(gone))
        self._effects += [
            Post(peer.address, self._port_of(peer.address), gone) for peer in self.peers.values() if not peer.gone
        ]
        for conn in list(self._connections):
            self._hang_up(conn)

    # --- datagrams -------------------------------------------------------------------------------------------------

    def _ping(self, number: int, way: Way) -> EchoRequest:
        return EchoRequest(**self._me, port=self._port, number=number, way=way)

    def _pong(self, ping: EchoRequest) -> EchoReply:
        return EchoReply(**self._me, port=self._port, asker=ping.pinger, number=ping.number, way=ping.way)

    def _heard(self, event: EchoHeard, now: float) -> None:
        message = event.message
        if message.pinger == self._pinger:
            return
        peer = self._known(message, event.address, event.interface, now, trusted=event.trusted)
        if peer is None:
            return
        if isinstance(message, EchoEnd):
            self._leave(peer, now)
        elif isinstance(message, EchoReply):
            if message.asker == self._pinger and message.way != "tcp":
                peer.figures[message.way].answered(message.number, now)
        elif message.way != "tcp":
            peer.figures[message.way].arrived += 1
            if self._may_answer(event.address, now) and event.size >= echo.PING_BYTES:
                self._effects.append(Reply(event.handle, self._pong(message)))

    def _known(
        self, message: EchoMessage, address: str, interface: str, now: float, *, trusted: bool
    ) -> PingPeer | None:
        """Return the sender of a message, or None if its secret or its job is not ours."""
        if not trusted:
            if len(self.strangers) < MAX_PEERS:
                self.strangers[address] = f"{message.hostname or 'unknown'} ({address}), pid {message.pid}"
            return None
        if message.job != self._job:
            if len(self.other_jobs) < MAX_PEERS:
                self.other_jobs[message.job] = address
            return None
        for asked in self.asked:
            if asked[0] == address:
                self.asked[asked] = True
        peer = self.peers.get(message.pinger)
        if peer is None:
            if isinstance(message, EchoEnd):
                return None
            if len(self.peers) >= MAX_PEERS:
                worst = min(self.peers.values(), key=lambda each: (not each.gone, each.answers, each.heard_at))
                del self.peers[worst.pinger]
            peer = PingPeer(message.pinger, message.hostname, message.pid, address, interface, message.port)
            self.peers[message.pinger] = peer
        elif peer.address.startswith("fe80:") and not address.startswith("fe80:"):
            # People know the host by this address; a link-local one has a meaning on one interface only.
            peer.address, peer.interface = address, interface
        peer.heard_at = now
        return peer

    @staticmethod
    def _leave(peer: PingPeer, now: float) -> None:
        peer.gone = True
        for figures in peer.figures.values():
            # A PING that was sent just now can have come too late; an older one is lost.
            figures.expire(now - GRACE_SECONDS)
            figures.pending.clear()

    def _may_answer(self, address: str, now: float) -> bool:
        since, count = self._answers.get(address, (now, 0))
        if now - since >= 1:
            since, count = now, 0
        if address not in self._answers and len(self._answers) >= MAX_ADDRESSES:
            self._answers.clear()
        self._answers[address] = (since, count + 1)
        return count < ANSWERS_PER_SECOND

    # --- connections -----------------------------------------------------------------------------------------------

    def _accepted(self, conn: int, address: str, now: float) -> None:
        if sum(each.peer is None for each in self._connections.values()) >= MAX_ACCEPTED:
            self._effects.append(Hangup(conn))
        else:
            self._connections[conn] = _Exchange(address=address, until=now + WAIT_SECONDS)

    def _received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Process bytes from a connection, which carries one message in each direction."""
        connection = self._connections[conn]
        connection.received += untrusted
        try:
            data = echo.unframed(connection.received)
            if data is None:
                return
            self._message(conn, connection, echo.decode(data), now, trusted=echo.is_trusted(data, self._key))
        except Rejected as rejected:
            self._fail(connection, f"something else answers there: {rejected}")
        self._hang_up(conn)

    def _message(self, conn: int, connection: _Exchange, message: EchoMessage, now: float, *, trusted: bool) -> None:
        if connection.peer is not None:
            if trusted and isinstance(message, EchoReply) and message.asker == self._pinger:
                connection.peer.figures["tcp"].answered(message.number, now)
        elif isinstance(message, EchoRequest):
            peer = self._known(message, connection.address, "", now, trusted=trusted)
            if peer is not None:
                peer.figures["tcp"].arrived += 1
                self._send(conn, self._pong(message))

    def _send(self, conn: int, message: EchoMessage) -> None:
        self._effects.append(Write(conn, echo.framed(echo.encode(message, self._key))))

    @staticmethod
    def _fail(connection: _Exchange, reason: str) -> None:
        if connection.peer is not None:
            connection.peer.figures["tcp"].failed(connection.number, reason)

    def _hang_up(self, conn: int) -> None:
        del self._connections[conn]
        self._effects.append(Hangup(conn))
