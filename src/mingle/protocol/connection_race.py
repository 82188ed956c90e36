"""Finding a way to a session and proving that it is the right one, without sockets.

A datagram named a session and some addresses. They are raced side by side (in the manner of RFC 8305): each gets a
short time, the next one starts soon after, and what wins is not the first that accepts but the first that *proves*
the session: 172.17.0.1 is also this machine's own docker0, and an old port is somebody else's by now.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msgspec import Struct

from mingle.protocol.claims import DialBudget
from mingle.protocol.handshake import Call, HandshakeFailed, MemberConversation
from mingle.protocol.machine import Dial, Effect, Hangup, NewId, Write
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import MAX_ADDRESSES, Offer, Rejected
from mingle.wire.frames import AnyFrame, Path

STAGGER_SECONDS = 0.05
"""How long after one address the next is tried."""
ADDRESS_SECONDS = 1.0
"""How long one address may take, connection and proof together …"""
ADDRESS_SECONDS_PER_RANK = 0.005
"""… or so long for each rank of the job, if that is more: a host proves itself to all of them, one after another, and
whoever hangs up and calls again makes it begin anew."""
SILENT_SECONDS = 10.0
"""How long sealed sessions that do not answer are still taken for alive, one of them or all together."""
CLAIM_PAUSE_SECONDS = 1.0
"""How long nobody must have claimed a session for the next claim to be a new one."""
FAILURE_SECONDS = 5.0
"""How old a failure must be for the address to be tried again when the ways are counted."""
MAX_ENDPOINTS = 2 * MAX_ADDRESSES
"""How many are tried for one session: what its host named last, and what somebody else claims of it."""


def address_seconds(world_size: int) -> float:
    """Returns how long one address may take when so many ranks call at once."""
    return max(ADDRESS_SECONDS, ADDRESS_SECONDS_PER_RANK * world_size)


class DialTarget(Struct, frozen=True):
    """An address, the interface on which it was heard, and the control port that was named with it."""

    address: str
    interface: str
    port: int = 0
    """0: the one that the race was begun with."""
    sender: str = ""
    """The address whose datagram named the endpoint; empty if a proved connection named it."""

    @property
    def is_first_hand(self) -> bool:
        """Whether it was named by a datagram of its own."""
        return self.sender == self.address


def named(offer: Offer, interface: str, sender: str = "") -> list[DialTarget]:
    """Return the endpoints that an OFFER names, as heard on an interface from an address."""
    return [DialTarget(address, interface, offer.port, sender) for address in offer.addresses]


def merged(new: Sequence[DialTarget], known: Sequence[DialTarget]) -> list[DialTarget]:
    """Returns where to look for a session: what was named last, then what was named before.

    An OFFER can be forged, with the id of a session that is there. What its host said is therefore not forgotten for
    what somebody says after it, and a place that it has named itself stays named by it.
    """
    places = {(each.address, each.port) for each in new}
    own = {(each.address, each.port): each for each in known if each.is_first_hand}
    return [
        *(own.get((each.address, each.port), each) for each in new),
        *(each for each in known if (each.address, each.port) not in places),
    ][:MAX_ENDPOINTS]


class _Attempt(Struct):
    endpoint: DialTarget
    conversation: MemberConversation
    deadline: float
    local_address: str = ""
    interface: str = ""
    weak: bool = False


class ClaimBudget(Struct):
    """For how long sessions that are only claimed to be there may hold up those who have proved theirs.

    A datagram can't be believed and may be true, so each such session is looked into; but somebody who invents them
    one after the other would hold everybody up for ever. So claims that follow each other count as one.
    """

    spent: bool = False
    """They have held us up for long enough: only what is proved counts now, until they have ceased for a while."""
    _since: float | None = None
    _seen: float = 0.0
    _pending: bool = False

    def note(self, now: float, *, pending: bool) -> None:
        """Takes note of whether a claim is being looked into."""
        if self._pending:
            self._seen = now
        elif now > self._seen + CLAIM_PAUSE_SECONDS:
            self._since = None
        if pending:
            self._seen = now
            self._since = now if self._since is None else self._since
        self._pending = pending
        self.spent = self._since is not None and now >= self._since + SILENT_SECONDS

    def next_timer(self) -> float | None:
        """When :attr:`spent` changes if nothing happens until then."""
        return self._since + SILENT_SECONDS if self._pending and self._since is not None and not self.spent else None


class Verdict(enum.Enum):
    """What came of it."""

    RACING = "racing"
    PROVED = "proved"
    DEAD = "dead"
    """Every address refused, hung up, or answered as somebody else."""
    SILENT = "silent"
    """No address proved the session, and at least one did not answer at all."""


class ConnectionRace:
    """One session's race. After a win, the race still tries the other addresses, because the seal counts paths.

    ``patience`` is the time that each address can take, in seconds; ``dials`` limits the connections.
    """

    def __init__(
        self,
        call: Call,
        targets: Sequence[DialTarget],
        port: int,
        *,
        key: JobKey | None,
        new_id: NewId,
        effects: list[Effect],
        now: float,
        patience: float = ADDRESS_SECONDS,
        all_ways: bool = False,
        dials: DialBudget | None = None,
    ) -> None:
        self.purpose = call.purpose
        self.winner: int | None = None
        self.conversation: MemberConversation | None = None
        self.paths: dict[str, Path] = {}
        self.failures: dict[str, str] = {}
        self._call = call
        self._port = port
        self._key = key
        self._new_id = new_id
        self._effects = effects
        self._patience = patience
        self._all_ways = all_ways
        self._dials = DialBudget() if dials is None else dials
        self._waiting = list(targets)
        self._endpoints = {self._place(endpoint): endpoint for endpoint in targets}
        self._attempts: dict[int, _Attempt] = {}
        self._next_start = now
        self._was_silent = False
        self._failed_at: dict[tuple[str, int], float] = {}
        self.handle_timer(now)

    @property
    def verdict(self) -> Verdict:
        """How the race stands."""
        if self.winner is not None:
            return Verdict.PROVED
        if self._waiting or self._attempts:
            return Verdict.RACING
        return Verdict.SILENT if self._was_silent else Verdict.DEAD

    @property
    def address(self) -> str | None:
        """The host's address on the winner's connection."""
        return None if self.winner is None else self._attempts[self.winner].endpoint.address

    @property
    def pending(self) -> bool:
        """Whether an address is still being tried."""
        return bool(self._waiting or any(conn != self.winner for conn in self._attempts))

    @property
    def dialing(self) -> bool:
        """Whether a connection of this race is open or being made; otherwise the race waits for its dial budget."""
        return bool(self._attempts)

    def owns(self, conn: int) -> bool:
        """Tells whether a connection belongs to this race."""
        return conn in self._attempts

    def add(self, targets: Sequence[DialTarget]) -> None:
        """Takes in further addresses of the same session; they are tried from the next timer on."""
        if self.winner is not None and not self._all_ways:
            return
        for endpoint in targets:
            known = self._endpoints.get(self._place(endpoint))
            if known is not None and known in self._waiting and endpoint.is_first_hand:
                # Somebody else named it before; what that one may still cause does not hold up the host itself.
                self._waiting[self._waiting.index(known)] = self._endpoints[self._place(endpoint)] = endpoint
            # Whoever invents addresses for a session that is there does not make the race endless.
            elif known is None and len(self._endpoints) < MAX_ENDPOINTS:
                self._endpoints[self._place(endpoint)] = endpoint
                self._waiting.append(endpoint)

    def _place(self, endpoint: DialTarget) -> tuple[str, int]:
        return endpoint.address, endpoint.port or self._port

    def prove_again(self, now: float) -> None:
        """Forgets every way but the winner's and tries all addresses once more."""
        if self.winner is None:
            return
        self.paths = {address: path for address, path in self.paths.items() if address == self.address}
        # A weak way may be a better one by now, so it is proved beside the connection that stands.
        weak = any(path.weak for path in self.paths.values())
        under_way = {
            self._place(attempt.endpoint) for conn, attempt in self._attempts.items() if conn != self.winner or not weak
        }
        self._waiting = [each for place, each in self._endpoints.items() if place not in under_way]
        self._failed_at.clear()
        self._next_start = now
        self.handle_timer(now)

    def try_again(self, now: float) -> None:
        """Tries the addresses once more that failed a while ago: the way may be open by now, and it counts."""
        late = [place for place, at in self._failed_at.items() if now - at >= FAILURE_SECONDS]
        for place in late:
            del self._failed_at[place]
            self._waiting.append(self._endpoints[place])
        if late:
            self.handle_timer(now)

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [attempt.deadline for conn, attempt in self._attempts.items() if conn != self.winner]
        if self._waiting:
            times.append(self._next_start)
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        """Gives up what took too long and starts what is due."""
        for conn, attempt in list(self._attempts.items()):
            if conn != self.winner and now >= attempt.deadline:
                self._was_silent = True
                self._give_up(conn, f"no proof within {self._patience:.0f} s", now)
        while self._waiting and now >= self._next_start:
            waits = []
            for endpoint in self._waiting:
                waits.append(self._dials.take(endpoint.address, endpoint.sender, now))
                if waits[-1] == 0:
                    self._waiting.remove(endpoint)
                    self._start(endpoint, now)
                    self._next_start = now + (STAGGER_SECONDS if self.winner is None else 0)
                    break
            else:
                self._next_start = now + min(waits)

    def _start(self, endpoint: DialTarget, now: float) -> None:
        conn = self._new_id()
        port = endpoint.port or self._port
        conversation = MemberConversation(self._call, (endpoint.address, port), self._key)
        self._attempts[conn] = _Attempt(endpoint, conversation, now + self._patience)
        self._effects.append(Dial(conn, endpoint.address, port, endpoint.interface))

    def connected(self, conn: int, local_address: str, interface: str, *, weak: bool = False) -> None:
        """A connection stands; ``interface`` owns its local address."""
        attempt = self._attempts[conn]
        attempt.local_address, attempt.interface, attempt.weak = local_address, interface, weak
        self._effects.append(Write(conn, attempt.conversation.data_to_send()))

    def received(self, conn: int, untrusted: bytes, now: float) -> list[AnyFrame]:
        """Takes bytes; returns the winner's frames that follow the proof.

        Raises:
            Rejected, HandshakeFailed: on the winner's connection only; any other is given up here.
        """
        attempt = self._attempts[conn]
        if conn == self.winner:
            return attempt.conversation.receive_data(untrusted)
        try:
            received = attempt.conversation.receive_data(untrusted)
        except (Rejected, HandshakeFailed) as failure:
            self._give_up(conn, str(failure), now)
            self._hurry(now)
            return []
        if attempt.conversation.welcome is None:
            return []
        address = attempt.endpoint.address
        self._dials.give_back(address, attempt.endpoint.sender)
        self.paths[address] = Path(
            host_address=address,
            local_address=attempt.local_address,
            interface=attempt.interface[:64],
            weak=attempt.weak,
        )
        if self.winner is not None:
            del self._attempts[conn]
            self._effects.append(Hangup(conn))
            return []
        self.winner, self.conversation = conn, attempt.conversation
        if self._all_ways:
            self._next_start = now
            self.handle_timer(now)
        else:
            self.stop_trying()
        return received

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended, or never came to be."""
        attempt = self._attempts.pop(conn)
        self._fail(attempt.endpoint, reason, now)
        if conn == self.winner:
            self.winner = self.conversation = None
        self._hurry(now)

    def flush(self) -> None:
        """Writes what the conversation wants to say."""
        if self.winner is not None and self.conversation is not None:
            data = self.conversation.data_to_send()
            if data:
                self._effects.append(Write(self.winner, data))

    def stop_trying(self) -> None:
        """Gives up every address but the winner's."""
        self._waiting.clear()
        for conn in [each for each in self._attempts if each != self.winner]:
            self.failures[self._attempts.pop(conn).endpoint.address] = "not needed any more"
            self._effects.append(Hangup(conn))

    def abandon(self) -> None:
        """Hangs up everywhere."""
        self.flush()
        self._effects += [Hangup(conn) for conn in self._attempts]
        self._attempts.clear()
        self._waiting.clear()
        self.winner = self.conversation = None

    def _fail(self, endpoint: DialTarget, reason: str, now: float) -> None:
        self.failures[endpoint.address], self._failed_at[self._place(endpoint)] = reason, now

    def _give_up(self, conn: int, reason: str, now: float) -> None:
        self._fail(self._attempts.pop(conn).endpoint, reason, now)
        self._effects.append(Hangup(conn))

    def _hurry(self, now: float) -> None:
        """Handle the failure of one address: try the next one now, if the dial budget allows it."""
        self._next_start = min(self._next_start, now)
        self.handle_timer(now)
