"""The sessions of a job that a process has heard of: one table, one connection race for each, one bound. Pure.

A datagram can name any session, so the table is bounded, and until its host has proved it over TCP, a session decides
nothing: it is dialed, and can be waited for, for a limited time. A rank that looks for its host, a host that looks out
for others, an election, and an observer keep such a table; what each of them does with a session that proves itself,
speaks, or is lost is its :class:`SessionPolicy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from mingle.protocol.events import BytesReceived, Connected, ConnectionEvent, Disconnected
from mingle.protocol.links.handshake import Call, HandshakeFailed
from mingle.protocol.links.race import ADDRESS_SECONDS, Attempt, ConnectionRace, DialTarget, RaceState
from mingle.protocol.machine import Context, scoped
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Offer, Rejected

RETRY_SECONDS = 0.25
"""The time after which a session that could not be reached can be tried again."""
# The number of sessions in a table, of all senders and of one. A sender that invents sessions must not leave those of
# others without a place.
REMEMBERED_SESSIONS = 32
REMEMBERED_BY_SENDER = 8
MAX_PATHS = 64


class KnownSession(Struct, eq=False):
    """A session that this process has heard of."""

    offer: Offer
    """The last OFFER of the session."""
    targets: Sequence[DialTarget]
    sender: str = ""
    """The address of the first datagram that named the session; empty if a proved connection named it."""
    race: ConnectionRace | None = None
    retry_at: float = 0.0
    report_at: float = 0.0
    """The time from which to report it again to the host of another session, or to call it again as another host."""
    token: bytes = b""
    """The token of the last seat of this process there."""
    confirmed: bool = False
    """Whether this process has confirmed there, and was not refused since: a full session can keep its seat."""
    acknowledged: frames.Sealed | None = None
    """The seal that this process has acknowledged there: if it comes back in that epoch, it lacks GO alone."""
    turned_away: bool = False
    """Whether it has refused this process since it runs: a free seat there is for others, until it is open again."""
    called_in_vain: bool = False
    """Whether no connection to its host could be made in the last race: a firewall can drop every call to it."""
    unreached: int = 0
    """How many races in a row were lost because nothing answered at the address of its host."""
    paths_stale: bool = False
    """Whether paths to its host that were proved can be broken by now, or better ones open: the store was not reached,
    the interfaces have changed, or the connection to a host broke."""
    said_open: bool = False
    """Whether its host has just said that it takes members: no datagram outweighs that, so the next race is to join."""
    running: frames.Running | None = None
    """What the host has said of the session, if this process only asked."""
    said_at: float = 0.0
    """When the host said that."""
    ran: frames.Running | None = None
    """What the host said when it ran, until it says otherwise or is gone: also while this process asks it anew."""
    alive_since: float | None = None
    """Since when the session is known, or suspected, to live without this process."""
    presumed_dead: bool = False
    """Whether it was silent for too long once, or was found in a shared folder: it counts as alive only when it
    speaks."""
    notified: bool = False
    """Whether people were told that the job runs there."""

    @property
    def name(self) -> bytes:
        """The id that its host has given it."""
        return self.offer.session

    @property
    def host_name(self) -> str:
        """The name of its host, for reports."""
        return self.offer.host_name

    @property
    def has_room(self) -> bool:
        """Whether it is said to have a free seat for this process."""
        return self.offer.takes_members and (self.offer.state == "open" or not self.turned_away)

    @property
    def is_proved(self) -> bool:
        """Whether its host has proved it, and is still connected."""
        return self.race is not None and self.race.state is RaceState.PROVED

    @property
    def heard_at(self) -> float:
        """When its host was heard last on the connection that has proved it."""
        winner = None if self.race is None else self.race.winner
        return float("-inf") if winner is None else winner.heard_at

    @property
    def is_asked(self) -> bool:
        """Whether it is said to be sealed, and is just being asked whether it lives."""
        race = self.race
        asked = race is not None and race.state is RaceState.RACING and self.is_in_the_way_of(race.call)
        return asked and not self.presumed_dead

    def is_in_the_way_of(self, call: Call) -> bool:
        """Return whether a process that makes this call to its host must wait for the answer."""
        return call.purpose == "probe" or (call.purpose == "conflict" and self.offer.state == "sealed")

    @property
    def mute_since(self) -> float | None:
        """Since when its host, which has proved it, owes a word: in what state it is, or that it runs once sealed."""
        if self.alive_since is None or not self.is_proved:
            return None
        if self.running is None:
            return self.alive_since
        return self.said_at if self.running.state == "sealed" else None

    @property
    def paths(self) -> tuple[frames.Path, ...]:
        """The paths to its host that have been proved."""
        return () if self.race is None else tuple(self.race.paths.values())[:MAX_PATHS]

    def path_to(self, address: str) -> frames.Path | None:
        """Return the path that was proved to one of its host's addresses."""
        return None if self.race is None else self.race.paths.get(address)

    def scoped(self, address: str) -> str:
        """Return one of its host's addresses as this process has to dial it."""
        path = self.path_to(address)
        return address if path is None else scoped(address, path.interface)

    def races_to(self, purpose: frames.Purpose) -> bool:
        """Return whether a race for this purpose is under way."""
        return self.race is not None and self.race.call.purpose == purpose and self.race.state is RaceState.RACING

    def lost(self, race: ConnectionRace) -> str:
        """Return how its host can't be reached, once two races have shown it: one can hit a host that just ends."""
        # The OFFER in a folder outlives its host.
        counts = bool(race.unreached) and race.call.purpose != "probe" and not self.presumed_dead
        self.unreached = self.unreached + 1 if counts else 0
        return race.unreached if self.unreached > 1 else ""

    def send(self, frame: frames.AnyFrame) -> None:
        """Send a frame to its host, if it is connected."""
        if self.race is not None and self.race.winner is not None:
            self.race.winner.send(frame)

    def hang_up(self) -> None:
        """End its race or its connection."""
        if self.race is not None:
            self.race.abandon()
            self.race = None

    def retry_later(self, now: float) -> None:
        """Start no other race for it at once."""
        self.retry_at = max(self.retry_at, now + RETRY_SECONDS)

    def give_up(self, now: float) -> None:
        """Hang up, and start no other race for it at once."""
        self.hang_up()
        self.retry_later(now)

    def forget_life(self) -> None:
        """Forget that it lives, so that this process no longer waits for its end."""
        self.ask_anew()
        self.ran = None

    def ask_anew(self) -> None:
        """Ask its host for a seat, although it ran: the answer shows whether it still does."""
        self.alive_since = self.running = None
        self.notified = False


S = TypeVar("S", bound=KnownSession)


class SessionPolicy(Generic[S]):
    """What the owner of a table does with its sessions."""

    def on_proved(self, session: S, now: float) -> None:
        """Handle a session whose host has just proved it."""

    def on_frame(self, session: S, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame that came from the host after its proof."""

    def on_unreached(self, session: S, race: ConnectionRace, now: float) -> None:
        """Handle a race that was lost on every address."""

    def on_lost(self, session: S, race: ConnectionRace, reason: str, now: float) -> None:
        """Handle the end of the connection to a host that has proved its session."""

    def on_freed(self, now: float) -> None:
        """Handle that this process no longer waits for the end of a session."""

    def keeps(self, session: S) -> bool:
        """Return whether a session without a race must not make room for another one."""
        return False


class SessionTable(Generic[S]):
    """Sessions by name, and the races by connection.

    Args:
        policy: what follows from the events.
        context: what races need.
        patience: the time that each address has in a race, in seconds.
        most: the number of sessions in the table.
        most_by_sender: the number of those that the datagrams of one address have named first.
    """

    def __init__(
        self,
        policy: SessionPolicy[S],
        context: Context,
        *,
        patience: float = ADDRESS_SECONDS,
        most: int = REMEMBERED_SESSIONS,
        most_by_sender: int = REMEMBERED_BY_SENDER,
    ) -> None:
        self.policy = policy
        self._context = context
        self._patience = patience
        self._most = most
        self._most_by_sender = most_by_sender
        self._known: dict[bytes, S] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._known.values()))

    def get(self, name: bytes) -> S | None:
        """Return the session of this name, if it was heard of."""
        return self._known.get(name)

    def add(self, session: S) -> bool:
        """Remember a session that was not known; return False if there is no room."""
        of_sender = [each for each in self._known.values() if session.sender and each.sender == session.sender]
        crowded = of_sender if len(of_sender) >= self._most_by_sender else list(self._known.values())
        if crowded is of_sender or len(crowded) >= self._most:
            # A flood of forged sessions waits for its dial budget; none of them is in the way of one that is dialed.
            loose = [each for each in crowded if not self.policy.keeps(each)]
            idle = [each for each in loose if each.race is None]
            idle += [each for each in loose if each.race is not None and not each.race.dialing]
            if not idle:
                return False
            self.remove(idle[0])
        self._known[session.name] = session
        return True

    def heard(self, session: S) -> None:
        """Take note that a session was heard of again: the one that was silent for longest makes room first."""
        self._known[session.name] = self._known.pop(session.name)

    def remove(self, session: S) -> None:
        """Hang up on a session and forget it."""
        session.hang_up()
        del self._known[session.name]

    def race(self, session: S, call: Call, now: float, *, key: JobKey | None = None) -> None:
        """Start a race for a session, on all addresses that it is known by, in place of the one before."""
        session.hang_up()
        session.race = ConnectionRace(
            call,
            session.targets,
            key=key or self._context.key,
            context=self._context,
            handler=self._handle,
            now=now,
            patience=self._patience,
        )

    # --- connections -----------------------------------------------------------------------------------------------

    def _handle(self, attempt: Attempt, event: ConnectionEvent, now: float) -> None:
        """Handle what has happened on a connection of a race."""
        match event:
            case Connected():
                attempt.race.connected(attempt, event)
            case BytesReceived(_, untrusted):
                self._received(attempt, untrusted, now)
            case Disconnected(_, reason):
                self._disconnected(attempt, reason, now)

    def _received(self, attempt: Attempt, untrusted: bytes, now: float) -> None:
        race = attempt.race
        session, was_proved = self._known[race.call.session], race.winner is not None
        try:
            received = race.received(attempt, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            self._disconnected(attempt, str(failure), now)
            return
        if race.winner is None:
            self._settle(session, now)
        elif not was_proved:
            session.called_in_vain, session.unreached = False, 0
            self.policy.on_proved(session, now)
        for frame in received:
            if session.race is not race:
                break
            self.policy.on_frame(session, frame, now)

    def _disconnected(self, attempt: Attempt, reason: str, now: float) -> None:
        race = attempt.race
        session, was_winner = self._known[race.call.session], attempt is race.winner
        race.disconnected(attempt, reason, now)
        if was_winner:
            session.give_up(now)
            self.policy.on_lost(session, race, reason, now)
        else:
            self._settle(session, now)

    def _settle(self, session: S, now: float) -> None:
        """Check whether a race was lost on every address."""
        race = session.race
        if race is not None and race.state in (RaceState.DEAD, RaceState.SILENT):
            session.race = None
            session.called_in_vain = not race.was_connected
            session.retry_later(now)
            self.policy.on_unreached(session, race, now)

    def hang_up(self, *, but: S | None = None) -> None:
        """End all races; the session ``but`` keeps the connection on which it was proved."""
        for session in self._known.values():
            if session is not but:
                session.hang_up()
            elif session.race is not None:
                session.race.stop_trying()

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        times = [each.race.next_timer() for each in self._known.values() if each.race is not None]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Continue the races."""
        for session in self:
            if session.race is not None:
                session.race.handle_timer(now)
                self._settle(session, now)
