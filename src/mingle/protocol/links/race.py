"""The connection race: the path to a session is the first address that *proves* it. No sockets.

A datagram names a session and some addresses. They are dialed side by side, as Happy Eyeballs (RFC 8305) does: each
address has a short time, and the next one starts soon after. A connection wins when the session is proved on it, not
when it is accepted: 172.17.0.1 is also this machine's own docker0, and an old port can belong to another process.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from msgspec import Struct

from mingle.protocol.events import Connected, ConnectionEvent
from mingle.protocol.links.handshake import PROOF_SECONDS_PER_RANK, Call, HandshakeFailed, MemberConversation
from mingle.protocol.links.link import Link
from mingle.protocol.machine import Context
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import MAX_ADDRESSES, Offer, Rejected
from mingle.wire.frames import AnyFrame, Path

STAGGER_SECONDS = 0.05
"""The delay between the start of one address and the next."""
ADDRESS_SECONDS = 1.0
"""The least time that one address has for connection and proof together."""
FAILURE_SECONDS = 5.0
"""The least age of a failure after which the address is tried again when the paths are counted."""
MAX_TARGETS = 2 * MAX_ADDRESSES
"""The number of addresses to try for one session: those that its host named last, and those that others claim."""


def address_seconds(world_size: int) -> float:
    """Return the time that one address has when so many ranks call at once."""
    return max(ADDRESS_SECONDS, PROOF_SECONDS_PER_RANK * world_size)


class DialTarget(Struct, frozen=True):
    """An address to dial, the interface on which it was heard, and the control port that was named with it."""

    address: str
    interface: str
    port: int
    sender: str = ""
    """The address whose datagram named the target; empty if a proved connection named it."""

    @property
    def place(self) -> tuple[str, int]:
        """The address and port, regardless of which sender named them."""
        return self.address, self.port

    @property
    def is_first_hand(self) -> bool:
        """Whether its own datagram named it."""
        return self.sender == self.address


def named(offer: Offer, interface: str, sender: str = "") -> list[DialTarget]:
    """Return the targets that an OFFER names, as heard on an interface from an address."""
    return [DialTarget(address, interface, offer.port, sender) for address in offer.addresses]


def merged(new: Sequence[DialTarget], known: Sequence[DialTarget]) -> list[DialTarget]:
    """Return where to look for a session: the targets that were named last, then the earlier ones.

    An OFFER can be forged with the id of a real session. So what the host of the session said is not forgotten for
    what others say later, and a target that the host has named itself stays named by the host.
    """
    places = {each.place for each in new}
    own = {each.place: each for each in known if each.is_first_hand}
    return [
        *(own.get(each.place, each) for each in new),
        *(each for each in known if each.place not in places),
    ][:MAX_TARGETS]


class Attempt(Link, kw_only=True):
    """A connection to one address of the session."""

    race: ConnectionRace
    target: DialTarget
    conversation: MemberConversation
    deadline: float
    local_address: str = ""
    interface: str = ""
    weak: bool = False


class RaceState(enum.Enum):
    """The state of a race."""

    RACING = "racing"
    PROVED = "proved"
    DEAD = "dead"
    """Every address refused, hung up, or answered as another session."""
    SILENT = "silent"
    """No address proved the session, and at least one did not answer at all."""


class ConnectionRace:
    """The race for one session.

    After a win, a race to join still tries the other addresses, because the seal counts paths. Any other race ends.

    Args:
        call: the caller, the session and the purpose.
        targets: where to dial.
        key: of the job's secret, if there is one.
        context: has the connections, numbers them and limits them.
        handler: handles what happens on a connection; it calls `connected`, `received` and `disconnected`.
        now: the time.
        patience: the time that each address has, in seconds.
    """

    def __init__(
        self,
        call: Call,
        targets: Sequence[DialTarget],
        *,
        key: JobKey | None,
        context: Context,
        handler: Callable[[Attempt, ConnectionEvent, float], None],
        now: float,
        patience: float = ADDRESS_SECONDS,
    ) -> None:
        self.call = call
        self.winner: Attempt | None = None
        """The connection on which the session was proved."""
        self.paths: dict[str, Path] = {}
        self.failures: dict[str, str] = {}
        self._key = key
        self._context = context
        self._links = context.links
        self._handler = handler
        self._patience = patience
        self._all_paths = call.purpose == "join"
        self._waiting = list(targets)
        self._targets = {target.place: target for target in targets}
        self._attempts: list[Attempt] = []
        self._next_start = now
        self._was_silent = False
        self._answered: set[str] = set()
        """The addresses at which something answered that is not the session, or hung up."""
        self.was_connected = False
        """Whether a connection was made, as it is to a host that is only slow; a firewall drops the call."""
        self.may_live = False
        """Whether an attempt failed as it can while the process there runs: no route led there, or the connection was
        made and ended before the proof."""
        self._failed_at: dict[tuple[str, int], float] = {}
        self.handle_timer(now)

    @property
    def state(self) -> RaceState:
        """The state of the race."""
        if self.winner is not None:
            return RaceState.PROVED
        if self._waiting or self._attempts:
            return RaceState.RACING
        return RaceState.SILENT if self._was_silent else RaceState.DEAD

    @property
    def address(self) -> str | None:
        """The host's address on the winner's connection."""
        return None if self.winner is None else self.winner.target.address

    @property
    def failure_text(self) -> str:
        """Each address that failed, with the reason, for reports."""
        return "; ".join(f"{address} {reason}" for address, reason in self.failures.items())

    @property
    def unreached(self) -> str:
        """How the connection to the address that was named first failed; empty if something answered there.

        A link-local address counts only if there is no other one.
        """
        failed = [target.address for target in self._targets.values() if target.address in self.failures]
        first = min(failed, key=lambda address: address.lower().startswith("fe80:"), default="")
        if first in self._answered or not first:
            return ""
        detour = self._context.astray(first)
        return f"{first} {self.failures[first] if detour is None else detour.brief}"

    @property
    def pending(self) -> bool:
        """Whether an address is still being tried."""
        return bool(self._waiting or any(each is not self.winner for each in self._attempts))

    @property
    def dialing(self) -> bool:
        """Whether a connection of this race is open or being made; otherwise the race waits for its dial budget."""
        return bool(self._attempts)

    def add(self, targets: Sequence[DialTarget]) -> None:
        """Add addresses of the same session; they are tried from the next timer on."""
        if self.winner is not None and not self._all_paths:
            return
        for target in targets:
            known = self._targets.get(target.place)
            if known is not None and known in self._waiting and target.is_first_hand:
                # Another sender named it before; the budget of that sender must not delay the host itself.
                self._waiting[self._waiting.index(known)] = self._targets[target.place] = target
            # A sender that invents addresses for a real session must not make the race endless.
            elif known is None and len(self._targets) < MAX_TARGETS:
                self._targets[target.place] = target
                self._waiting.append(target)

    def prove_again(self, now: float) -> None:
        """Forget every path but the winner's and try all addresses once more; call it only on a race that was won."""
        self.paths = {address: path for address, path in self.paths.items() if address == self.address}
        # A weak path can be a better one by now, so it is proved beside the connection that stands.
        weak = any(path.weak for path in self.paths.values())
        under_way = {each.target.place for each in self._attempts if each is not self.winner or not weak}
        self._waiting = [each for place, each in self._targets.items() if place not in under_way]
        self._failed_at.clear()
        self._next_start = now
        self.handle_timer(now)

    def try_again(self, now: float) -> None:
        """Try the addresses once more that failed a while ago: the path can be open by now, and it counts."""
        late = [place for place, at in self._failed_at.items() if now - at >= FAILURE_SECONDS]
        for place in late:
            del self._failed_at[place]
            self._waiting.append(self._targets[place])
        if late:
            self.handle_timer(now)

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        times = [each.deadline for each in self._attempts if each is not self.winner]
        if self._waiting:
            times.append(self._next_start)
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        """Give up what took too long, and start what is due."""
        for attempt in list(self._attempts):
            if attempt is not self.winner and now >= attempt.deadline:
                self._was_silent = True
                missing = "proof" if attempt.established else "answer"
                self._give_up(attempt, f"no {missing} within {self._patience:.0f} s", now)
        while self._waiting and now >= self._next_start:
            waits = []
            for target in self._waiting:
                waits.append(self._context.dials.take(target.address, target.sender, now))
                if waits[-1] == 0:
                    self._waiting.remove(target)
                    self._start(target, now)
                    self._next_start = now + (STAGGER_SECONDS if self.winner is None else 0)
                    break
            else:
                self._next_start = now + min(waits)

    def _start(self, target: DialTarget, now: float) -> None:
        attempt = Attempt(
            conn=self._context.new_id(),
            conversation=MemberConversation(self.call, target.place, self._key),
            handler=self._handler,
            race=self,
            target=target,
            deadline=now + self._patience,
        )
        self._attempts.append(attempt)
        self._links.dial(attempt, target.address, target.port, target.interface)

    def connected(self, attempt: Attempt, event: Connected) -> None:
        """Handle an established connection."""
        self.was_connected = True
        attempt.local_address, attempt.interface, attempt.weak = event.local_address, event.interface, event.weak

    def received(self, attempt: Attempt, untrusted: bytes, now: float) -> list[AnyFrame]:
        """Handle bytes; return the winner's frames that follow the proof.

        Raises:
            Rejected, HandshakeFailed: on the winner's connection only; any other is given up here.
        """
        if attempt is self.winner:
            return attempt.receive(untrusted)
        try:
            received = attempt.receive(untrusted)
        except (Rejected, HandshakeFailed) as failure:
            self._answered.add(attempt.target.address)
            self._give_up(attempt, str(failure), now)
            self._hurry(now)
            return []
        if attempt.conversation.welcome is None:
            return []
        address = attempt.target.address
        self._context.dials.give_back(address, attempt.target.sender)
        self.paths[address] = Path(
            host_address=address,
            local_address=attempt.local_address,
            interface=attempt.interface[:64],
            weak=attempt.weak,
        )
        if self.winner is not None:
            self._hang_up(attempt)
            return []
        self.winner = attempt
        if self._all_paths:
            self._next_start = now
            self.handle_timer(now)
        else:
            self.stop_trying()
        return received

    def disconnected(self, attempt: Attempt, reason: str, now: float) -> None:
        """Handle a connection that ended or could not be made."""
        if "ECONNREFUSED" not in reason:
            self.may_live = True
        if attempt.established:
            self._answered.add(attempt.target.address)
        self._give_up(attempt, reason, now)
        if attempt is self.winner:
            self.winner = None
        self._hurry(now)

    def stop_trying(self) -> None:
        """Give up every address but the winner's."""
        self._waiting.clear()
        for attempt in [each for each in self._attempts if each is not self.winner]:
            self.failures[attempt.target.address] = "not needed any more"
            self._hang_up(attempt)

    def abandon(self) -> None:
        """Hang up on every address."""
        for attempt in list(self._attempts):
            self._hang_up(attempt)
        self._waiting.clear()
        self.winner = None

    def _give_up(self, attempt: Attempt, reason: str, now: float) -> None:
        self.failures[attempt.target.address], self._failed_at[attempt.target.place] = reason, now
        self._hang_up(attempt)

    def _hang_up(self, attempt: Attempt) -> None:
        self._attempts.remove(attempt)
        self._links.hang_up(attempt)

    def _hurry(self, now: float) -> None:
        """Handle the failure of one address: try the next one now, if the dial budget allows it."""
        self._next_start = min(self._next_start, now)
        self.handle_timer(now)
