"""Other hosts of the same job, as one host sees them: pure.

Two kinds. A *rival* takes members too: with given ranks that is a second rank 0, and if it stays both say so. A
*blocker* is sealed: the job runs already under this id, and we neither form a second one nor fail at once, since it
may be about to end. Both are proved over TCP, and both are gone as soon as their connection is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from mingle.protocol.claims import DialBudget
from mingle.protocol.connection_race import (
    ADDRESS_SECONDS,
    SILENT_SECONDS,
    ClaimBudget,
    ConnectionRace,
    DialTarget,
    Verdict,
    merged,
)
from mingle.protocol.handshake import Call, HandshakeFailed
from mingle.protocol.machine import Effect, Hangup, NewId
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Offer, Rejected

RIVAL_SECONDS = 2.0
"""How long each of two rank 0s waits for the other to go."""
RUNNING_NOTICE_SECONDS = 2.0
RUNNING_PATIENCE_SECONDS = 30.0
RETRY_SECONDS = 0.5
# Sessions looked into at a time, of all and by the address that their datagrams came from; bounded against somebody who
# invents them, and who shall not leave the others without a place.
MAX_SESSIONS = 16
MAX_SESSIONS_BY_SENDER = 4


class _Other(Struct):
    offer: Offer
    targets: Sequence[DialTarget]
    sender: str = ""
    """The address of whoever spoke of it first; empty: a connection that has proved itself."""
    race: ConnectionRace | None = None
    since: float | None = None
    """Since when it is known to live (or, sealed and silent, suspected to)."""
    running: frames.Running | None = None
    """What it said of itself when it proved itself."""
    retry_at: float = 0.0
    told: bool = False
    counted_dead: bool = False
    """Silent for too long once: from now on it counts only when it speaks."""

    @property
    def is_sealed(self) -> bool:
        """Whether it takes no members: by its own proved word, or, before it has spoken, by its datagram's."""
        return self.running.state != "open" if self.running is not None else self.offer.state == "sealed"

    @property
    def blocks(self) -> bool:
        """Whether it lives and is sealed."""
        return self.since is not None and self.is_sealed

    @property
    def may_run(self) -> bool:
        """Whether it is said to be sealed, and just being asked."""
        racing = self.race is not None and self.race.verdict is Verdict.RACING
        return racing and self.is_sealed and not self.counted_dead

    @property
    def is_proved(self) -> bool:
        """Whether it has proved itself, and is still on the line."""
        return self.race is not None and self.race.verdict is Verdict.PROVED

    @property
    def is_mute(self) -> bool:
        """Whether it has proved itself and not said yet in what state it is."""
        return self.is_proved and self.since is not None and self.running is None

    @property
    def waits(self) -> bool:
        """Whether it is to be asked for the first time, and waits for its dial budget."""
        return self.race is not None and self.since is None and not self.race.dialing

    @property
    def is_claimed(self) -> bool:
        """Whether it may hold a job that runs, and nothing but a datagram says so."""
        return self.may_run or (self.since is not None and not self.is_proved)


class _Caller(Struct, frozen=True):
    member: bytes
    who: frames.ProcessInfo
    since: float


class ConflictingHosts(Struct):
    """Keeps count of them."""

    call: Callable[[bytes, frames.Purpose], Call]
    key: JobKey | None
    new_id: NewId
    effects: list[Effect]
    address_seconds: float = ADDRESS_SECONDS
    """How long one address of another host may take, in seconds."""
    competes: bool = False
    """This host was given no rank: another one like it that takes members is no conflict
    (:mod:`mingle.protocol.election`)."""
    longest_wait: float = RUNNING_PATIENCE_SECONDS
    """How long at most another run of the job is waited for."""
    dials: DialBudget = field(default_factory=DialBudget)
    _suspicion: ClaimBudget = field(default_factory=ClaimBudget)
    _others: dict[bytes, _Other] = field(default_factory=dict)
    _callers: dict[int, _Caller] = field(default_factory=dict)
    _conceded: list[frames.ProcessInfo] = field(default_factory=list)
    """Rivals that have ended because of the conflict with us."""

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[frames.Running]:
        """Proved blockers."""
        return [each.running for each in self._others.values() if each.running is not None and each.blocks]

    def proved(self) -> list[tuple[Offer, frames.Running]]:
        """Return the other sessions that have reported their state, each with its last OFFER."""
        others = self._others.values()
        return [(each.offer, each.running) for each in others if each.running is not None and each.is_proved]

    @property
    def any_alive(self) -> bool:
        """Whether another host lives, or may hold a job that runs: then nothing is decided here."""
        if self._callers or any(each.since is not None and each.is_proved for each in self._others.values()):
            return True
        return not self._suspicion.spent and any(each.is_claimed for each in self._others.values())

    def _weigh(self, now: float) -> None:
        """Takes note of how long others have held us up that are only claimed to be there."""
        self._suspicion.note(now, pending=any(each.is_claimed for each in self._others.values()))

    def lasting(self, now: float) -> list[frames.ProcessInfo]:
        """The rivals that have been alive for long enough to be an error."""
        dialled = {
            other.offer.host: other.running.host
            for other in self._others.values()
            if other.running is not None
            and other.since is not None
            and not other.blocks
            and now >= other.since + RIVAL_SECONDS
        }
        called = {each.member: each.who for each in self._callers.values() if now >= each.since + RIVAL_SECONDS}
        return list(dict.fromkeys([*self._conceded, *{**called, **dialled}.values()]))

    def blockers(self, now: float) -> list[tuple[frames.Running, float, bool]]:
        """Proved blockers: what they say, for how long we have waited, whether that needs no saying (now)."""
        found = []
        for other in self._others.values():
            if other.running is None or other.since is None or not other.blocks:
                continue
            waited = now - other.since
            quiet = other.told or waited < RUNNING_NOTICE_SECONDS
            other.told = other.told or not quiet
            found.append((other.running, waited, quiet))
        return found

    def patience(self, timeout: float) -> float:
        """How long a blocker is waited for, in seconds."""
        return min(self.longest_wait, timeout)

    def verdict_timer(self, timeout: float) -> float | None:
        """When :meth:`lasting` or :meth:`blockers` may change."""
        times = [each.since + RIVAL_SECONDS for each in self._callers.values()]
        for other in self._others.values():
            if other.since is not None and other.running is not None:
                if other.blocks:
                    notice = [] if other.told else [other.since + RUNNING_NOTICE_SECONDS]
                    times += [*notice, other.since + self.patience(timeout)]
                else:
                    times.append(other.since + RIVAL_SECONDS)
        return min(times, default=None)

    # --- what happens ----------------------------------------------------------------------------------------------

    def heard(self, offer: Offer, targets: Sequence[DialTarget], now: float, *, sender: str = "") -> None:
        """Another session of this job was named in a datagram: look whether it lives."""
        other = self._others.get(offer.session)
        if other is None:
            if not self._has_room(sender):
                return
            other = self._others[offer.session] = _Other(offer, targets, sender)
        other.offer, other.targets = offer, merged(targets, other.targets)
        if now < other.retry_at:
            return
        if other.running is not None and other.is_sealed != (offer.state == "sealed"):
            # The datagram says that it has changed: ask again.
            if other.race is not None:
                other.race.abandon()
                other.race = None
            other.retry_at = now + RETRY_SECONDS
        if other.race is None:
            self._prove(other, now)
        self._weigh(now)

    def _has_room(self, sender: str) -> bool:
        """Whether another session may be looked into; one that is over is forgotten for it."""
        of_sender = [name for name, each in self._others.items() if sender and each.sender == sender]
        crowded = of_sender if len(of_sender) >= MAX_SESSIONS_BY_SENDER else list(self._others)
        if crowded is of_sender or len(crowded) >= MAX_SESSIONS:
            idle = [name for name in crowded if self._others[name].race is None]
            idle += [name for name in crowded if self._others[name].waits]
            if not idle:
                return False
            del self._others[idle[0]]
        return True

    def _prove(self, other: _Other, now: float) -> None:
        purpose: frames.Purpose = "probe" if other.offer.state == "sealed" else "rival"
        other.race = ConnectionRace(
            self.call(other.offer.session, purpose),
            other.targets,
            other.offer.port,
            key=self.key,
            new_id=self.new_id,
            effects=self.effects,
            now=now,
            patience=self.address_seconds,
            dials=self.dials,
        )

    def caller(self, conn: int, member: bytes, who: frames.ProcessInfo, now: float) -> None:
        """Another host has proved itself on a connection of its own making."""
        self._callers[conn] = _Caller(member, who, now)

    def caller_gone(self, conn: int) -> None:
        """That connection ended."""
        self._callers.pop(conn, None)

    def owns(self, conn: int) -> bool:
        """Tells whether a connection was dialled here."""
        return any(each.race is not None and each.race.owns(conn) for each in self._others.values())

    def _owner(self, conn: int) -> _Other:
        return next(each for each in self._others.values() if each.race is not None and each.race.owns(conn))

    def connected(self, conn: int, local_address: str, interface: str) -> None:
        """A connection stands."""
        race = self._owner(conn).race
        assert race is not None
        race.connected(conn, local_address, interface)

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        """Bytes came in."""
        other = self._owner(conn)
        race = other.race
        assert race is not None
        try:
            received = race.received(conn, untrusted, now)
        except (Rejected, HandshakeFailed) as failure:
            self.effects.append(Hangup(conn))
            self.disconnected(conn, str(failure), now)
            return
        asked = race.winner is not None and race.purpose == "probe"
        if asked and other.since is None and not other.counted_dead:
            # It lives; in what state, it is about to say.
            other.since = now
        for frame in received:
            if isinstance(frame, frames.Running) and frame.state == "open" and self.competes and other.offer.assigned:
                # It was said to be sealed. Its next OFFER shows who makes way.
                race.abandon()
                self._forget(other, now)
                return
            if isinstance(frame, frames.Running):
                changed = other.running is None or (other.running.state == "open") != (frame.state == "open")
                other.running, other.counted_dead = frame, False
                if other.since is None or changed:
                    other.since, other.told = now, False
            elif isinstance(frame, frames.Closed) and frame.conflict:
                self._concede(other, now)
        race.flush()
        self._settle(other, now)
        self._weigh(now)

    def _concede(self, other: _Other, now: float) -> None:
        """A rival fails because of us: its two seconds were over a moment before ours, and both shall fail."""
        lasted = other.since is not None and now >= other.since + RIVAL_SECONDS / 2
        if other.running is not None and lasted and not other.blocks:
            self._conceded.append(other.running.host)

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        """A connection ended."""
        other = self._owner(conn)
        assert other.race is not None
        was_winner = other.race.winner == conn
        other.race.disconnected(conn, reason, now)
        if was_winner:
            other.race.abandon()
            self._forget(other, now)
        else:
            self._settle(other, now)
        self._weigh(now)

    def _settle(self, other: _Other, now: float) -> None:
        if other.race is None or other.race.verdict not in (Verdict.DEAD, Verdict.SILENT):
            return
        silent = other.race.verdict is Verdict.SILENT and other.race.purpose == "probe"
        other.race = None
        if silent and not other.counted_dead:
            if other.since is None:
                other.since = now
            if now - other.since < SILENT_SECONDS:
                self._prove(other, now)
                return
            other.counted_dead = True
        self._forget(other, now)

    @staticmethod
    def _forget(other: _Other, now: float) -> None:
        other.race = other.since = other.running = None
        other.told = False
        other.retry_at = now + RETRY_SECONDS

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` has something to do."""
        times = [self._suspicion.next_timer()]
        times += [each.race.next_timer() for each in self._others.values() if each.race is not None]
        times += [
            each.since + SILENT_SECONDS for each in self._others.values() if each.since is not None and each.is_mute
        ]
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Lets the races go on."""
        for other in list(self._others.values()):
            if other.race is not None:
                other.race.handle_timer(now)
                self._settle(other, now)
            if other.race is not None and other.since is not None and other.is_mute:
                self._hang_up_on_mute(other, other.since, now)
        self._weigh(now)

    def _hang_up_on_mute(self, other: _Other, since: float, now: float) -> None:
        assert other.race is not None
        if now >= since + SILENT_SECONDS:
            other.race.abandon()
            other.counted_dead = True
            self._forget(other, now)

    def abandon(self) -> None:
        """Hangs up everywhere."""
        for other in self._others.values():
            if other.race is not None:
                other.race.abandon()
        self._others.clear()
        self._callers.clear()
