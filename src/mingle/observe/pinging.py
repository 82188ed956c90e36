"""Ping other hosts and answer their pings over each path: a pure machine.

The same machine runs on every host (``mingle-discover ping``, ``doctor --serve`` and ``--check``). It finds the others
by multicast and by the addresses it was given, and then tries all ways to each: the group, a group that no switch
filters, unicast to the shared port, and TCP. Its driver is :mod:`mingle.observe.pinger`; :mod:`mingle.observe.pathways`
judges its figures.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mingle.observe.figures import Peer
from mingle.protocol.machine import Dial, Hangup, NewId, Write
from mingle.wire import echo
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Rejected
from mingle.wire.echo import Gone, Message, Ping, Pong, Way
from mingle.wire.frames import ProcessInfo

WAIT_SECONDS = 1.0
"""How long an answer may take before it counts as lost."""
GRACE_SECONDS = 0.25
"""How old an unanswered PING must be to count as lost when its peer stops."""
MAX_PEERS = 256
"""The greatest number of peers; beyond it, drop one that has left, that never answered, or that is silent for
longest."""
MAX_ACCEPTED = 256
"""Connections of others at once; bounded against somebody who opens them for fun."""
ANSWERS_PER_SECOND = 40
"""To one address, whatever it asks."""
MAX_ADDRESSES = 1024


@dataclass(frozen=True, slots=True)
class Cast:
    """Send to a group on every interface."""

    message: Message
    link: bool = False
    """To :data:`mingle.wire.echo.LINK_GROUP`, not to the group of the pings."""


@dataclass(frozen=True, slots=True)
class Post:
    """Send by unicast."""

    address: str
    port: int
    message: Message


@dataclass(frozen=True, slots=True)
class Reply:
    """Send to where something came from; ``handle`` is the driver's own."""

    handle: object
    message: Message


Effect: TypeAlias = Cast | Post | Reply | Dial | Write | Hangup


@dataclass(frozen=True, slots=True)
class _Dialled:
    peer: Peer
    number: int


class Pinging:
    """Pings, answers, and keeps the figures.

    Args:
        job: the job that is pinged about; empty: none.
        pinger: sixteen random bytes by which our own messages are known.
        who: this process.
        port: where our TCP port listens.
        shared_port: the UDP port of the discovery.
        interval: seconds between two rounds.
        count: how many rounds; None: no end.
        new_id: numbers connections.
        now: the present, in seconds of a monotonic clock.
        own: addresses of this host.
        key: signs what is said; only who has it, too, is believed.
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
        self.peers: dict[bytes, Peer] = {}
        self.echoed: set[str] = set()
        """Interfaces on which our own multicasts came back: they pass this host's own rules."""
        self.cast = 0
        """Rounds of multicasts."""
        self.strangers: dict[str, str] = {}
        """Addresses of pingers whose secret is not ours, with what is known of them."""
        self.other_jobs: dict[str, str] = {}
        """Jobs that others ping about, with an address."""
        self.asked: dict[tuple[str, int], bool] = {}
        """The hosts that were given, and whether an answer came from there."""
        self._job = job
        self._key = key
        self._own = frozenset(own)
        self._pinger = pinger
        self._who = who
        self._port = port
        self._shared_port = shared_port
        self._interval = interval
        self._count = count
        self._new_id = new_id
        self._due = now
        self._until: float | None = None
        self._effects: list[Effect] = []
        self._dialled: dict[int, _Dialled] = {}
        self._accepted: dict[int, tuple[str, float]] = {}
        self._buffers: dict[int, bytes] = {}
        self._answers: dict[str, tuple[float, int]] = {}

    # --- what the driver reads ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether all rounds are over and their answers in."""
        return self._until is not None and not any(
            row.pending for peer in self.peers.values() for row in peer.rows.values()
        )

    def effects(self) -> list[Effect]:
        """Hands out what is to be done."""
        done, self._effects[:] = list(self._effects), []
        return done

    def owns(self, conn: int) -> bool:
        """Tells whether a connection is this machine's."""
        return conn in self._dialled or conn in self._accepted

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [self._due] if self._until is None else [self._until]
        times += [
            at + WAIT_SECONDS
            for peer in self.peers.values()
            for row in peer.rows.values()
            for at in row.pending.values()
        ]
        times += [until for _, until in self._accepted.values()]
        return min(times)

    def learn(self, addresses: Sequence[tuple[str, int]]) -> None:
        """More hosts to ping by unicast."""
        for each in addresses:
            if each in self.asked or len(self.asked) < MAX_ADDRESSES:
                self.asked.setdefault(each, False)

    # --- time -----------------------------------------------------------------------------------------------

    def handle_timer(self, now: float) -> None:
        """Does what the clock demands."""
        for peer in self.peers.values():
            for row in peer.rows.values():
                row.expire(now - WAIT_SECONDS)
        for conn, dialled in list(self._dialled.items()):
            if dialled.number not in dialled.peer.rows["tcp"].pending:
                self._hang_up(conn)
        for conn, (_, until) in list(self._accepted.items()):
            if now >= until:
                self._hang_up(conn)
        if self._until is None and now >= self._due:
            if self._count is not None and self.cast >= self._count:
                self._until = now
            else:
                self._round(now)
                self._due = now + self._interval
        elif self._until is not None and now >= self._until:
            self._until = now + WAIT_SECONDS

    def _round(self, now: float) -> None:
        self.cast += 1
        number = self.cast
        present = [peer for peer in self.peers.values() if not peer.gone]
        for peer in present:
            for way, row in peer.rows.items():
                # A unicast datagram to our own host's shared port would reach whoever opened it last: us, maybe.
                if way != "unicast" or peer.address not in self._own:
                    row.pending[number] = now
        self._effects.append(Cast(self._ping(number, "multicast")))
        self._effects.append(Cast(self._ping(number, "link"), link=True))
        known = {peer.address for peer in self.peers.values()}
        targets = [(peer.address, self._port_of(peer.address)) for peer in present]
        targets = [target for target in targets if target[0] not in self._own]
        targets += [target for target in self.asked if target[0] not in known]
        self._effects += [Post(address, port, self._ping(number, "unicast")) for address, port in targets]
        for peer in present:
            if peer.port == 0:
                peer.rows["tcp"].failed(number, "it listens nowhere")
                continue
            conn = self._new_id()
            self._dialled[conn] = _Dialled(peer, number)
            self._effects.append(Dial(conn, peer.address.partition("%")[0], peer.port, peer.interface))

    def _port_of(self, address: str) -> int:
        return next((port for known, port in self.asked if known == address), self._shared_port)

    def close(self, _reason: str = "") -> None:
        """Says good-bye by every way, and hangs up."""
        gone = Gone(job=self._job, pinger=self._pinger, hostname=self._who.hostname, pid=self._who.pid)
        self._effects.append(Cast(gone))
        self._effects += [
            Post(peer.address, self._port_of(peer.address), gone) for peer in self.peers.values() if not peer.gone
        ]
        for conn in [*self._dialled, *self._accepted]:
            self._hang_up(conn)

    # --- datagrams ------------------------------------------------------------------------------------------

    def _ping(self, number: int, way: Way) -> Ping:
        return Ping(
            job=self._job,
            pinger=self._pinger,
            hostname=self._who.hostname,
            pid=self._who.pid,
            port=self._port,
            number=number,
            way=way,
        )

    def heard(
        self, message: Message, address: str, interface: str, now: float, *, trusted: bool, size: int, handle: object
    ) -> None:
        """A message came in by UDP.

        Args:
            message: what it says.
            address: of its sender, as it can be sent to.
            interface: where it came in.
            now: the present.
            trusted: whether it has our secret, or, like us, none.
            size: its length in bytes; no answer to it is longer.
            handle: what :class:`Reply` takes.
        """
        if message.pinger == self._pinger:
            if isinstance(message, Ping) and message.way == "multicast":
                self.echoed.add(interface)
            return
        peer = self._known(message, address, interface, now, trusted=trusted)
        if peer is None:
            return
        if isinstance(message, Gone):
            self._leave(peer, now)
        elif isinstance(message, Pong):
            if message.asker == self._pinger and message.way != "tcp":
                peer.rows[message.way].answered(message.number, now)
        elif message.way != "tcp":
            peer.rows[message.way].arrived += 1
            if self._may_answer(address, now) and size >= echo.PING_BYTES:
                self._effects.append(Reply(handle, self._pong(message)))

    def _known(self, message: Message, address: str, interface: str, now: float, *, trusted: bool) -> Peer | None:
        """Returns who sent a message, or None for somebody whom we have nothing to do with."""
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
            if isinstance(message, Gone):
                return None
            if len(self.peers) >= MAX_PEERS:
                self._forget_one()
            peer = Peer(message.pinger, message.hostname, message.pid, address, interface, message.port)
            self.peers[message.pinger] = peer
        elif peer.address.startswith("fe80:") and not address.startswith("fe80:"):
            # What people know it by; a link-local address means something on one interface only.
            peer.address, peer.interface = address, interface
        peer.heard_at = now
        return peer

    def _forget_one(self) -> None:
        del self.peers[min(self.peers.values(), key=lambda peer: (not peer.gone, peer.answers, peer.heard_at)).pinger]

    @staticmethod
    def _leave(peer: Peer, now: float) -> None:
        peer.gone = True
        for row in peer.rows.values():
            # What was sent just now may have come too late; what was sent before that is lost.
            row.expire(now - GRACE_SECONDS)
            row.pending.clear()

    def _may_answer(self, address: str, now: float) -> bool:
        since, count = self._answers.get(address, (now, 0))
        if now - since >= 1:
            since, count = now, 0
        if address not in self._answers and len(self._answers) >= MAX_ADDRESSES:
            self._answers.clear()
        self._answers[address] = (since, count + 1)
        return count < ANSWERS_PER_SECOND

    def _pong(self, ping: Ping) -> Pong:
        return Pong(
            job=self._job,
            pinger=self._pinger,
            hostname=self._who.hostname,
            pid=self._who.pid,
            port=self._port,
            asker=ping.pinger,
            number=ping.number,
            way=ping.way,
        )

    # --- connections ----------------------------------------------------------------------------------------

    def accepted(self, conn: int, address: str, now: float) -> None:
        """Somebody has connected."""
        if len(self._accepted) >= MAX_ACCEPTED:
            self._effects.append(Hangup(conn))
        else:
            self._accepted[conn] = (address, now + WAIT_SECONDS)
            self._buffers[conn] = b""

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        """A connection that was dialled stands."""
        self._buffers[conn] = b""
        self._say(conn, self._ping(self._dialled[conn].number, "tcp"))

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in on a connection; one message is all that is said on it."""
        self._buffers[conn] += untrusted
        try:
            data = echo.unframed(self._buffers[conn])
            if data is None:
                return
            self._message(conn, echo.decode(data), now, trusted=echo.is_trusted(data, self._key))
        except Rejected as rejected:
            self._fail(conn, f"something else answers there: {rejected}")
        self._hang_up(conn)

    def _message(self, conn: int, message: Message, now: float, *, trusted: bool) -> None:
        dialled = self._dialled.get(conn)
        if dialled is not None:
            if trusted and isinstance(message, Pong) and message.asker == self._pinger:
                dialled.peer.rows["tcp"].answered(message.number, now)
            return
        if isinstance(message, Ping):
            peer = self._known(message, self._accepted[conn][0], "", now, trusted=trusted)
            if peer is not None:
                peer.rows["tcp"].arrived += 1
                self._say(conn, self._pong(message))

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or could not be made."""
        self._fail(conn, reason)
        self._forget(conn)

    def _say(self, conn: int, message: Message) -> None:
        self._effects.append(Write(conn, echo.framed(echo.encode(message, self._key))))

    def _fail(self, conn: int, reason: str) -> None:
        dialled = self._dialled.get(conn)
        if dialled is not None:
            dialled.peer.rows["tcp"].failed(dialled.number, reason)

    def _hang_up(self, conn: int) -> None:
        self._forget(conn)
        self._effects.append(Hangup(conn))

    def _forget(self, conn: int) -> None:
        self._dialled.pop(conn, None)
        self._accepted.pop(conn, None)
        self._buffers.pop(conn, None)
