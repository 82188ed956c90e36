"""A member's part in the two-phase commit of its session, from its seat to GO. Pure.

The host is the coordinator (:mod:`mingle.protocol.session.registrar`), each member is a participant. SEALED asks it to
prepare, ACK is its vote, GO is commit, and VOID is abort (Gray, "Notes on Data Base Operating Systems", 1978). After
its ACK a participant is bound to the session: the host may have decided GO, and only VOID, a refusal or the end of the
session releases it, or that the host was not reached again for a while (`membership.RETURN_SECONDS`). It is treated so
from CONFIRMED on, although there is no GO without its ACK: if connections break for a moment, the members that all wait
for GO must not scatter to other sessions.

The host numbers its attempts: an *epoch* begins with CONFIRM and ends with GO, VOID or the next CONFIRM.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from msgspec import Struct, structs

from mingle.protocol.effects import Effect, ProveStore
from mingle.protocol.events import StoreProved, StoreUnreachable
from mingle.protocol.links.prover import Prover
from mingle.protocol.sessions import KnownSession
from mingle.protocol.states import Transitions, transition
from mingle.wire import frames

STORE_RETRY_SECONDS = 0.5
"""The time after which a store that was not reached is tried again, until the host voids the epoch."""


class AwaitingConfirm(Struct, frozen=True):
    """The member has a seat, and the host waits for other members."""

    stage: ClassVar[str] = "seated"
    epoch: int


class TryingPaths(Struct, frozen=True):
    """CONFIRM has come: each address of the host is tried, since the seal chooses among those that are proved."""

    stage: ClassVar[str] = "seated"
    epoch: int
    unproved: frames.Confirm | None = None
    """CONFIRM, while its targets wait for the path on their network, which gives link-local addresses their scope."""


class AwaitingSeal(Struct, frozen=True):
    """The member has sent CONFIRMED."""

    stage: ClassVar[str] = "confirmed"
    epoch: int


class _WithSeal(Struct, frozen=True):
    """A state after SEALED."""

    sealed: frames.Sealed

    @property
    def epoch(self) -> int:
        """The epoch of the seal."""
        return self.sealed.epoch


class ProvingStore(_WithSeal, frozen=True):
    """SEALED has come: the store that it names must be reached, and must hold the session's token."""

    stage: ClassVar[str] = "proving the store"
    failed: bool = False
    """Whether an attempt has failed."""
    retry_at: float | None = None
    """When to try again; None while an attempt is under way."""


class AwaitingGo(_WithSeal, frozen=True):
    """The member has sent ACK. If its connection breaks now, GO alone is lacking, and it can begin here again."""

    stage: ClassVar[str] = "acknowledged"


class Decided(_WithSeal, frozen=True):
    """GO has come."""

    stage: ClassVar[str] = "formed"


State: TypeAlias = AwaitingConfirm | TryingPaths | AwaitingSeal | ProvingStore | AwaitingGo | Decided

CONFIRM, VOID = "CONFIRM", "VOID"
TRANSITIONS: Transitions = {
    AwaitingConfirm: {CONFIRM: TryingPaths},
    TryingPaths: {"every path is tried: CONFIRMED": AwaitingSeal, CONFIRM: TryingPaths, VOID: AwaitingConfirm},
    AwaitingSeal: {"SEALED": ProvingStore, CONFIRM: TryingPaths, VOID: AwaitingConfirm},
    ProvingStore: {
        "the store is proved: ACK": AwaitingGo,
        "the store is not reached": ProvingStore,
        "the store is tried again": ProvingStore,
        CONFIRM: TryingPaths,
        VOID: AwaitingConfirm,
    },
    AwaitingGo: {"GO": Decided, CONFIRM: TryingPaths, VOID: AwaitingConfirm},
    Decided: {},
}


class Participant:
    """A member's part in the commit of one session.

    Args:
        session: whose host has given this member a seat.
        epoch: the host's present epoch, as JOINED says.
        effects: the list to which the participant adds what is to be done with stores.
        prover: opens connections to the targets that CONFIRM names.
    """

    def __init__(self, session: KnownSession, epoch: int, effects: list[Effect], prover: Prover) -> None:
        self.session = session
        self.state: State = AwaitingConfirm(epoch)
        if session.acknowledged is not None and session.acknowledged.epoch == epoch:
            self.state = AwaitingGo(session.acknowledged)
        self.asked_to_lead = False
        """Whether the host has sent LEAD: this process must host the job in its place."""
        self._effects = effects
        self._prover = prover

    def _change(self, why: str, state: State) -> None:
        self.state = transition(TRANSITIONS, self.state, why, state)

    @property
    def epoch(self) -> int:
        """The epoch, as far as the host has told."""
        return self.state.epoch

    @property
    def is_bound(self) -> bool:
        """Whether the member has sent CONFIRMED, and stays with this session until its end or VOID."""
        return isinstance(self.state, AwaitingSeal | ProvingStore | AwaitingGo)

    @property
    def can_confirm(self) -> bool:
        """Whether the host waits for CONFIRMED, and every path to it, and every target, has been tried."""
        race = self.session.race
        tried = race is not None and not race.pending and not self._prover.under_way
        return isinstance(self.state, TryingPaths) and self.state.unproved is None and tried

    # --- what the host says ----------------------------------------------------------------------------------------

    def said(self, frame: frames.AnyFrame, now: float) -> None:
        """Handle a frame of the host; one that does not belong to the state is late, and is ignored."""
        state = self.state
        match frame:
            case frames.Confirm() if frame.epoch >= self.epoch and not isinstance(state, Decided):
                self._asked_to_confirm(frame, now)
            case frames.Lead() if isinstance(state, AwaitingSeal) and frame.epoch == state.epoch:
                self.asked_to_lead = True
            case frames.Sealed() if isinstance(state, AwaitingSeal) and frame.epoch == state.epoch:
                self._change("SEALED", ProvingStore(frame))
                self._prove_store(frame)
            case frames.Go() if isinstance(state, AwaitingGo) and frame.epoch == state.epoch:
                self._change("GO", Decided(state.sealed))
            case frames.Void() if frame.epoch == self.epoch and not isinstance(state, AwaitingConfirm | Decided):
                self.end()
                self._change(VOID, AwaitingConfirm(frame.epoch))
                self.session.acknowledged = None

    def _asked_to_confirm(self, confirm: frames.Confirm, now: float) -> None:
        session = self.session
        # A host that asks again after CONFIRMED has found no path that is common to all, unless it names a network.
        prove_again = session.paths_stale or (isinstance(self.state, AwaitingSeal) and confirm.network is None)
        self._change(CONFIRM, TryingPaths(confirm.epoch, confirm if confirm.targets or confirm.suspects else None))
        self.end()
        session.paths_stale, session.acknowledged = False, None
        assert session.race is not None  # CONFIRM has come on its connection
        if prove_again:
            session.race.prove_again(now)
        else:
            session.race.try_again(now)
        self.prove_mesh(now)

    def prove_mesh(self, now: float) -> None:
        """Dial the targets of CONFIRM, once the path on their network is known, or will not be known."""
        state, session = self.state, self.session
        if not isinstance(state, TryingPaths) or state.unproved is None:
            return
        confirm = state.unproved
        path = None if confirm.network is None else session.path_to(confirm.network)
        if path is None and confirm.network is not None and session.race is not None and session.race.pending:
            return
        self.state = TryingPaths(state.epoch)
        self._prover.begin(
            session.name,
            confirm.epoch,
            path,
            targets=confirm.targets,
            suspects=confirm.suspects,
            seconds=confirm.seconds,
            now=now,
        )

    def confirm(self) -> None:
        """Send CONFIRMED, which reports the paths that were proved. Call it only if `can_confirm`."""
        self._change("every path is tried: CONFIRMED", AwaitingSeal(self.epoch))
        self.session.confirmed = True
        confirmed = frames.Confirmed(session=self.session.name, epoch=self.epoch, paths=self.session.paths)
        if (result := self._prover.take_result()) is not None:
            confirmed = structs.replace(confirmed, failures=result.failures, blocked=result.blocked)
        self.session.send(confirmed)

    def end(self) -> None:
        """Hang up on the targets: their epoch is over."""
        self._prover.stop()

    # --- the store -------------------------------------------------------------------------------------------------

    @property
    def is_proving(self) -> bool:
        """Whether the first attempt to reach the store is still under way."""
        return isinstance(self.state, ProvingStore) and not self.state.failed

    def _prove_store(self, sealed: frames.Sealed) -> None:
        address = self.session.scoped(sealed.store_address)
        self._effects.append(ProveStore(sealed.epoch, address, sealed.store_port, sealed.session, sealed.store_token))

    def _seal_of(self, event: StoreProved | StoreUnreachable) -> frames.Sealed | None:
        """Return the seal whose store is to be proved, if the event is about that one."""
        sealed = self.state.sealed if isinstance(self.state, ProvingStore) else None
        return None if sealed is None or (sealed.session, sealed.epoch) != (event.session, event.epoch) else sealed

    def store_proved(self, event: StoreProved) -> bool:
        """Vote with ACK if the store of the seal was reached and holds the session's token; return whether it did."""
        if (sealed := self._seal_of(event)) is None:
            return False
        self._change("the store is proved: ACK", AwaitingGo(sealed))
        self.session.acknowledged = sealed
        self.session.send(frames.Ack(session=sealed.session, epoch=sealed.epoch))
        return True

    def store_unreachable(self, event: StoreUnreachable, now: float) -> frames.Sealed | None:
        """Try again soon; return the seal if its store was not reached.

        What keeps the store out of reach can have broken other paths to the host as well.
        """
        if (sealed := self._seal_of(event)) is not None:
            retry_at = now + STORE_RETRY_SECONDS
            self._change("the store is not reached", ProvingStore(sealed, failed=True, retry_at=retry_at))
            self.session.paths_stale = True
        return sealed

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`."""
        if isinstance(self.state, TryingPaths):
            return self._prover.next_timer()
        return self.state.retry_at if isinstance(self.state, ProvingStore) else None

    def handle_timer(self, now: float) -> None:
        """Dial the targets again, or try to reach the store again, if that is due."""
        self._prover.handle_timer(now)
        state = self.state
        if isinstance(state, ProvingStore) and state.retry_at is not None and now >= state.retry_at:
            self._change("the store is tried again", ProvingStore(state.sealed, failed=True))
            self._prove_store(state.sealed)
