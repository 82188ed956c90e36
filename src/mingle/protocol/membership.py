"""A rank's part in the session it has joined, from JOIN to GO and READY: pure.

The steps, and what leads back::

    SEEKING ──proved and JOIN sent──▶ JOINING ──JOINED──▶ SEATED ──CONFIRM──▶ CONFIRMED ──SEALED──▶ PROVING STORE
       ▲                                 │                  │  ▲                  │                      │
       └────────── connection lost ──────┴──────────────────┴──┼───── VOID ───────┴──────────────────────┤
                                                               └────── VOID ── ACKED ◀─── store proved ──┘
                                                                                 │
                                                                                 └──GO──▶ FORMED

After CONFIRMED a member leaves only on VOID, EOF or its own deadline: silence is no reason. If its connection broke
there, it tries the same session first, since the host may already have decided GO.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from msgspec import Struct, field

from mingle.protocol.machine import Diagnostics, Effect, Formation, Identity, ProveStore, ReachStore, note, scoped
from mingle.protocol.sessions import Session, Sessions
from mingle.wire import frames

DOUBT_SECONDS = 2.0
"""How long a host that has not confirmed may be silent when another one offers itself."""
RETURN_SECONDS = 5.0
"""How long a member that lost its connection after CONFIRMED tries the same session first."""
STORE_RETRY_SECONDS = 0.5
MAX_PATHS = 64


class Step(enum.Enum):
    """How far a rank has come."""

    SEEKING = "seeking"
    JOINING = "joining"
    SEATED = "seated"
    CONFIRMED = "confirmed"
    PROVING_STORE = "proving the store"
    ACKED = "acknowledged"
    FORMED = "formed"


_AFTER_CONFIRMED = (Step.CONFIRMED, Step.PROVING_STORE, Step.ACKED)


class Membership(Struct):
    """What a member and its host have agreed on so far."""

    identity: Identity
    sessions: Sessions
    effects: list[Effect]
    diagnostics: Diagnostics
    step: Step = Step.SEEKING
    current: Session | None = None
    """The session whose host we are connected to, if any."""
    return_to: Session | None = None
    """The session to come back to before any other: it may have decided GO with us in it."""
    return_until: float = 0.0
    doubt_until: float | None = None
    """By when our host must have said something, since another one offers itself."""
    epoch: int = 0
    sealed: frames.Sealed | None = None
    outcome: Formation | None = None
    status: frames.Status | None = None
    roster: list[frames.Seat] = field(default_factory=list)
    loss: str = ""
    """Who our host was and what became of it, when the connection has ended after GO and before READY."""
    close_reason: str = ""
    """Why our host has ended its session after GO, if it has said so."""
    application: Callable[[frames.Join], frames.Join] = lambda join: join
    """Completes what the host is told of us."""
    _confirm_due: bool = False
    _store_retry_at: float | None = None
    _store_failed: bool = False
    _ready: bool = False

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def seated(self) -> bool:
        """Whether we have a seat."""
        return self.current is not None and self.step is not Step.JOINING

    @property
    def has_confirmed(self) -> bool:
        """Whether our host may decide GO with us in it, or has."""
        return self.step in _AFTER_CONFIRMED or self.step is Step.FORMED

    @property
    def host_lost(self) -> bool:
        """Whether our host is gone for good after GO and before READY: nobody answers at its store any more."""
        return bool(self.loss) and not self._ready and self.current is None and self.return_to is None

    def _path(self, address: str) -> frames.Path | None:
        assert self.current is not None
        race = self.current.race
        return None if race is None else race.paths.get(address)

    def _paths(self) -> tuple[frames.Path, ...]:
        assert self.current is not None
        race = self.current.race
        return () if race is None else tuple(race.paths.values())[:MAX_PATHS]

    # --- coming and going ------------------------------------------------------------------------------------------

    def send(self, frame: frames.AnyFrame) -> None:
        """Says something to our host."""
        assert self.current is not None
        self.current.send(frame)

    def join(self, session: Session) -> None:
        """Asks the host of a session that has proved itself for a seat."""
        self.current = session
        if self.outcome is None:
            self.step = Step.JOINING
        self.send(self.application(self.identity.join(self.identity.who, self._paths())))

    def doubt(self, now: float) -> None:
        """Another host takes members: is ours still alive? It may be stopped, or its machine gone without a word."""
        if self.doubt_until is None and self.step in (Step.JOINING, Step.SEATED):
            self.doubt_until = now + DOUBT_SECONDS
            self.send(frames.Ping())

    def doubted(self, now: float) -> Session | None:
        """The session to leave now, since its host said nothing for too long."""
        if self.doubt_until is None or now < self.doubt_until:
            return None
        self.doubt_until = None
        return self.current if self.step in (Step.JOINING, Step.SEATED) else None

    def refused(self, session: Session) -> None:
        """Its host does not take us."""
        session.hang_up()
        session.confirmed = False
        if session is self.return_to:
            self.return_to = None
        if session is self.current:
            self.current = None
        if self.outcome is None:
            self.step, self.doubt_until = Step.SEEKING, None

    def lost(self, session: Session, reason: str, now: float) -> bool:
        """The connection to our host is gone; tells whether to try the same session first."""
        if self.outcome is not None:
            # The host counts us as lost unless we come back and say READY; if it has said CLOSED, nobody counts.
            returning = not self._ready and not self.close_reason
            self.loss = f"{session.host_name}: {self.close_reason or reason}"
            self.current = self.doubt_until = None
        else:
            returning = self.step in _AFTER_CONFIRMED
            self.let_go(keep_sealed=self.step is Step.ACKED)
        if returning:
            self.return_to, self.return_until = session, now + RETURN_SECONDS
        return returning

    def move_on(self, now: float) -> None:
        """We go to another host: ours is told, and not tried again soon."""
        if self.current is not None:
            self.send(frames.Leave(session=self.current.name, reason="it went to another host"))
            self.current.hang_up()
            self.current.retry_at = now + RETURN_SECONDS
            self.let_go()

    def let_go(self, *, keep_sealed: bool = False) -> None:
        """We have no host any more. ``keep_sealed``: if it comes back, only GO is lacking."""
        self.current, self.step = None, Step.SEEKING
        self.doubt_until = self._store_retry_at = None
        self._confirm_due = False
        if not keep_sealed:
            self.sealed = None

    # --- frames of our host ----------------------------------------------------------------------------------------

    def received(self, frame: frames.AnyFrame, now: float) -> None:
        """Our host said something."""
        if isinstance(frame, frames.Joined):
            self._joined(frame)
        elif isinstance(frame, frames.Store):
            self._reach_store(frame)
        elif isinstance(frame, frames.Confirm):
            if frame.epoch >= self.epoch and self.outcome is None:
                self._confirm(frame, now)
        elif isinstance(frame, frames.Sealed):
            if frame.epoch == self.epoch and self.step is Step.CONFIRMED:
                self.step, self.sealed = Step.PROVING_STORE, frame
                self._prove_store(frame)
        elif isinstance(frame, frames.Go):
            if self.sealed is not None and frame.epoch == self.sealed.epoch and self.step is Step.ACKED:
                self._go(self.sealed)
        elif isinstance(frame, frames.Void):
            if frame.epoch == self.epoch and self.outcome is None:
                self.step, self.sealed = Step.SEATED, None
                self._confirm_due, self._store_retry_at = False, None
        elif isinstance(frame, frames.Ping):
            self.send(frames.Pong(number=frame.number))
        elif isinstance(frame, frames.Status):
            self.status = frame
        elif isinstance(frame, frames.Roster) and len(self.roster) < self.identity.world_size:
            self.roster += frame.seats

    def _joined(self, frame: frames.Joined) -> None:
        assert self.current is not None
        self.return_to = None
        if self.outcome is not None:
            self.loss = ""
            if self._ready:
                self.send(frames.Ready(session=self.current.name))
            return
        self.epoch = frame.epoch
        # Kept from before the connection broke, if the store had been proved: only GO is lacking.
        acked = self.sealed
        if acked is not None and (acked.session, acked.epoch) == (self.current.name, frame.epoch):
            self.step = Step.ACKED
        else:
            self.step, self.sealed = Step.SEATED, None

    def _confirm(self, frame: frames.Confirm, now: float) -> None:
        self.epoch, self.step, self._confirm_due = frame.epoch, Step.SEATED, True
        self.sealed = self._store_retry_at = None
        if self.current is not None and self.current.race is not None:
            if self._store_failed:
                # A way that was proved once, and over which the store was not reached, may be broken by now.
                self.current.race.prove_again(now)
            else:
                self.current.race.try_again(now)
        self._store_failed = False

    @property
    def can_confirm(self) -> bool:
        """Whether the host waits for CONFIRMED and every way to it has been tried: the seal chooses among them."""
        if not self._confirm_due or self.current is None:
            return False
        return self.current.race is not None and not self.current.race.pending

    def confirm(self) -> None:
        """Says that we are in, for this epoch."""
        assert self.current is not None
        self._confirm_due, self.step = False, Step.CONFIRMED
        self.current.confirmed = True
        self.send(frames.Confirmed(session=self.current.name, epoch=self.epoch, paths=self._paths()))

    # --- the store -------------------------------------------------------------------------------------------------

    def _reach_store(self, store: frames.Store) -> None:
        if self.step is Step.SEATED:
            self.effects.append(ReachStore(self._scoped(store.address), store.port))

    def _prove_store(self, sealed: frames.Sealed) -> None:
        self._store_retry_at = None
        address = self._scoped(sealed.store_address)
        self.effects.append(ProveStore(sealed.epoch, address, sealed.store_port, sealed.session, sealed.store_token))

    def _scoped(self, address: str) -> str:
        path = self._path(address)
        return address if path is None else scoped(address, path.interface)

    def store_proved(self, epoch: int) -> None:
        """The store was reached and holds the session's token."""
        if self.step is Step.PROVING_STORE and self.sealed is not None and self.sealed.epoch == epoch:
            self.step = Step.ACKED
            self.send(frames.Ack(session=self.sealed.session, epoch=epoch))

    def store_unreachable(self, epoch: int, reason: str, now: float) -> None:
        """The store was not reached; it is tried again until the host voids the epoch."""
        if self.step is Step.PROVING_STORE and self.sealed is not None and self.sealed.epoch == epoch:
            note(self.diagnostics.store_failures, f"{self.sealed.store_address}:{self.sealed.store_port}", reason)
            self._store_retry_at, self._store_failed = now + STORE_RETRY_SECONDS, True

    def timers(self) -> list[float | None]:
        """When :meth:`doubted` or :meth:`handle_timer` has something to do."""
        return [self._store_retry_at, self.doubt_until]

    def handle_timer(self, now: float) -> None:
        """Tries the store again when that is due."""
        if self._store_retry_at is not None and now >= self._store_retry_at:
            assert self.sealed is not None
            self._prove_store(self.sealed)

    # --- from GO on ------------------------------------------------------------------------------------------------

    def _go(self, sealed: frames.Sealed) -> None:
        assert self.current is not None
        # The member may have come back over another way than the one that was sealed.
        path = self._path(sealed.store_address) or self._paths()[0]
        self.step = Step.FORMED
        self.sessions.keep_only(self.current)
        self.outcome = Formation(
            session=sealed.session,
            place=sealed.place,
            store_address=scoped(sealed.store_address, path.interface),
            store_port=sealed.store_port,
            interface=path.interface,
            address=path.local_address,
            roster_digest=sealed.roster_digest,
        )

    def ready(self) -> None:
        """Tells the host that the process group stands."""
        self._ready = True
        if self.current is not None and self.outcome is not None:
            self.send(frames.Ready(session=self.current.name))

    def leave(self, reason: str) -> None:
        """Says good-bye.

        One that has heard GO says READY first. Without it the host takes LEAVE for what it is from a member that
        gave up before it heard GO: a loss, whether or not GO has been decided meanwhile.
        """
        if self.outcome is not None and not self._ready:
            self.ready()
        if self.current is not None:
            self.send(frames.Leave(session=self.current.name, reason=reason[:2048]))
