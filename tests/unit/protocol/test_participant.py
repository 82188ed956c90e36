"""A member's part in the commit of its session: what it answers, what it proves, and when it is bound."""

from __future__ import annotations

import pytest
from msgspec import structs

from mingle.protocol.effects import Dial, Hangup, ProveStore
from mingle.protocol.events import Disconnected, StoreProved, StoreUnreachable
from mingle.protocol.links.prover import REFUSED_SECONDS, Prover
from mingle.protocol.links.race import FAILURE_SECONDS
from mingle.protocol.participant import (
    STORE_RETRY_SECONDS,
    AwaitingConfirm,
    AwaitingGo,
    AwaitingSeal,
    Decided,
    Participant,
    ProvingStore,
    TryingPaths,
)
from mingle.wire import frames
from tests.support.proved_session import ProvedSession
from tests.support.scripted_host import ADDRESS, IDENTITY, OTHER, SESSION, sealed

SECOND = "10.0.0.7"
LINK_LOCAL = "fe80::1"
TARGET = frames.Target(member=b"T" * 16, address="10.0.0.3", port=4003)
VOID = frames.Void(session=SESSION, epoch=1, reason="test")
GO = frames.Go(session=SESSION, epoch=1)
UNREACHABLE = StoreUnreachable(SESSION, 1, "refused")


def asks(epoch: int = 1, *targets: frames.Target, network: str | None = None) -> frames.Confirm:
    return frames.Confirm(session=SESSION, epoch=epoch, network=network, targets=targets, seconds=6.0)


class Member:
    """A member with a seat in a session whose host has proved itself."""

    def __init__(self, *addresses: str, epoch: int = 0, acknowledged: frames.Sealed | None = None) -> None:
        self.proved = ProvedSession(*addresses)
        self.session = self.proved.session
        self.session.acknowledged = acknowledged
        self.proving = Prover(IDENTITY, self.proved.context, port=lambda: 5000)
        self.part = Participant(self.session, epoch, self.proved.effects, self.proving)

    def hear(self, *said: frames.AnyFrame, now: float = 1.0) -> type:
        """Hear these frames of the host; return the state to which they lead."""
        for frame in said:
            self.part.said(frame, now)
        return self.state()

    def state(self) -> type:
        return type(self.part.state)

    def confirm(self) -> frames.Confirmed:
        """Send CONFIRMED, and return it."""
        assert self.part.can_confirm
        self.part.confirm()
        (confirmed,) = self.proved.said()
        assert isinstance(confirmed, frames.Confirmed)
        return confirmed

    def reach(self, state: type) -> None:
        """Go on to this state."""
        if state is not AwaitingConfirm:
            self.hear(asks())
        if state not in (AwaitingConfirm, TryingPaths):
            self.confirm()
        if state in (ProvingStore, AwaitingGo, Decided):
            self.hear(sealed())
        if state in (AwaitingGo, Decided):
            self.prove_store()
        if state is Decided:
            self.hear(GO)
        assert self.state() is state
        self.proved.effects.clear()

    def prove_store(self) -> None:
        assert self.part.store_proved(StoreProved(SESSION, 1))

    def stores(self) -> list[ProveStore]:
        """The stores that are to be proved now."""
        stores = [each for each in self.proved.effects if isinstance(each, ProveStore)]
        self.proved.effects.clear()
        return stores

    def dialed(self) -> list[str]:
        return [each.address for each in self.proved.dials()]

    def dial(self) -> Dial:
        (dial,) = self.proved.dials()
        return dial


STATES = [AwaitingConfirm, TryingPaths, AwaitingSeal, ProvingStore, AwaitingGo, Decided]


@pytest.mark.parametrize("state", STATES)
def test_member_is_bound_from_confirmed_to_go(state: type) -> None:
    member = Member()
    member.reach(state)
    assert member.part.is_bound is (state in (AwaitingSeal, ProvingStore, AwaitingGo))


@pytest.mark.parametrize("state", STATES)
def test_void_releases_the_member_until_go(state: type) -> None:
    member = Member()
    member.reach(state)
    assert member.hear(VOID, VOID) is (Decided if state is Decided else AwaitingConfirm)
    assert member.part.epoch == (0 if state is AwaitingConfirm else 1)


@pytest.mark.parametrize("state", STATES)
def test_member_is_asked_again_in_each_state_before_go(state: type) -> None:
    member = Member()
    member.reach(state)
    assert member.hear(asks(2)) is (Decided if state is Decided else TryingPaths)
    assert member.part.epoch == (1 if state is Decided else 2)


def test_old_epoch_does_not_come_again() -> None:
    member = Member()
    assert member.hear(asks(3), asks(2)) is TryingPaths
    assert member.part.epoch == 3
    member.confirm()
    assert member.hear(sealed(2), VOID) is AwaitingSeal


# --- CONFIRM ----------------------------------------------------------------------------------------------------------


def test_nothing_is_confirmed_while_an_address_is_still_tried() -> None:
    member = Member(ADDRESS, SECOND)
    assert not member.part.can_confirm
    member.hear(asks())
    assert not member.part.can_confirm
    member.proved.prove(member.dial(), 1.5)
    assert [path.host_address for path in member.confirm().paths] == [ADDRESS, SECOND]
    assert member.session.confirmed
    assert not member.part.can_confirm


def test_nothing_is_confirmed_while_a_target_is_dialed_and_then_its_failure() -> None:
    member = Member()
    member.hear(asks(1, TARGET))
    now = 1.0
    while now < 1.0 + REFUSED_SECONDS:
        assert not member.part.can_confirm
        member.proved.links.handle(Disconnected(member.dial().conn, "ECONNREFUSED"), now)
        due = member.part.next_timer()
        assert due is not None
        member.part.handle_timer(now := due)
    assert member.confirm().failures == (frames.Failure(member=TARGET.member, how="refused"),)


def test_targets_wait_for_the_path_on_their_network_which_gives_them_their_scope() -> None:
    member = Member(ADDRESS, LINK_LOCAL)
    target = structs.replace(TARGET, address="fe80::3")
    member.hear(asks(1, target, network=LINK_LOCAL))
    to_host = member.dial()
    assert to_host.address == LINK_LOCAL
    member.proved.prove(to_host, 1.5)
    assert not member.part.can_confirm
    member.part.prove_mesh(1.5)
    assert member.dial() == Dial(to_host.conn + 1, "fe80::3", TARGET.port, "eth0", as_torch=True)
    assert not member.part.can_confirm
    member.part.prove_mesh(1.6)
    assert member.dialed() == []


def test_targets_are_dialed_all_the_same_if_the_path_on_their_network_can_not_be_proved() -> None:
    member = Member(ADDRESS, SECOND)
    member.hear(asks(1, TARGET, network=SECOND))
    member.proved.links.handle(Disconnected(member.dial().conn, "ECONNREFUSED"), 1.5)
    member.part.prove_mesh(1.5)
    assert member.dialed() == [TARGET.address]


@pytest.mark.parametrize("said", [VOID, asks(2)])
def test_targets_of_an_epoch_that_is_over_are_hung_up_on(said: frames.AnyFrame) -> None:
    member = Member()
    member.hear(asks(1, TARGET))
    dial = member.dial()
    member.hear(said)
    assert Hangup(dial.conn) in member.proved.effects
    assert dial.conn not in member.proved.links
    assert not member.proving.under_way


def test_targets_are_dialed_again_when_that_is_due() -> None:
    member = Member()
    member.hear(asks(1, TARGET))
    member.proved.dials()
    due = member.part.next_timer()
    assert due == member.proving.next_timer()
    assert due is not None
    member.part.handle_timer(due)
    assert member.dialed() == [TARGET.address]


# --- paths that failed ------------------------------------------------------------------------------------------------


def with_failed_path(state: type) -> Member:
    """A member in this state that has failed to prove its second path at 0.9 s."""
    member = Member(ADDRESS, SECOND)
    member.proved.links.handle(Disconnected(member.dial().conn, "no proof"), 0.9)
    member.reach(state)
    return member


@pytest.mark.parametrize("state", [AwaitingConfirm, TryingPaths])
def test_path_that_has_just_failed_is_not_tried_at_once(state: type) -> None:
    member = with_failed_path(state)
    member.hear(asks(1), now=1.0)
    assert member.dialed() == []


def test_path_that_failed_a_while_ago_is_tried_again() -> None:
    member = with_failed_path(AwaitingConfirm)
    member.hear(asks(1), now=0.9 + FAILURE_SECONDS)
    assert member.dialed() == [SECOND]


@pytest.mark.parametrize(("network", "again"), [(None, [SECOND]), (ADDRESS, [])])
def test_paths_are_proved_again_when_the_members_share_none(network: str | None, again: list[str]) -> None:
    """A host that names a network asks again for the mesh alone."""
    member = with_failed_path(AwaitingSeal)
    member.hear(asks(2, network=network), now=1.0)
    assert member.dialed() == again


def test_paths_that_can_be_broken_are_proved_again_once() -> None:
    member = with_failed_path(AwaitingConfirm)
    member.session.paths_stale = True
    member.hear(asks(1), now=1.0)
    second = member.dial()
    assert second.address == SECOND
    member.proved.links.handle(Disconnected(second.conn, "no proof"), 1.1)
    member.hear(asks(2), now=1.2)
    assert member.dialed() == []


def test_store_that_was_not_reached_puts_the_paths_in_doubt() -> None:
    member = with_failed_path(ProvingStore)
    member.part.store_unreachable(UNREACHABLE, 1.0)
    member.hear(VOID, asks(2), now=1.1)
    assert member.dialed() == [SECOND]


# --- the store --------------------------------------------------------------------------------------------------------


def test_link_local_store_is_reached_by_our_interface() -> None:
    member = Member(LINK_LOCAL)
    member.hear(asks())
    member.confirm()
    member.hear(sealed(store_address=LINK_LOCAL))
    assert [(each.address, each.port) for each in member.stores()] == [(f"{LINK_LOCAL}%eth0", 5000)]


def test_store_that_is_not_reached_is_tried_again_once_after_a_moment() -> None:
    member = Member()
    member.reach(ProvingStore)
    assert member.part.next_timer() is None
    assert member.part.is_proving
    member.part.handle_timer(2.0)
    assert not member.stores()
    member.part.store_unreachable(UNREACHABLE, 3.0)
    due = member.part.next_timer()
    assert due == 3.0 + STORE_RETRY_SECONDS
    member.part.handle_timer(due - 0.1)
    assert not member.stores()
    member.part.handle_timer(due)
    assert len(member.stores()) == 1
    assert not member.part.is_proving
    assert member.part.next_timer() is None
    member.part.handle_timer(due)
    assert not member.stores()


def test_store_is_tried_again_by_a_member_that_had_targets() -> None:
    member = Member()
    member.hear(asks(1, TARGET))
    while not member.part.can_confirm:
        due = member.part.next_timer()
        assert due is not None
        member.part.handle_timer(due)
    member.confirm()
    member.hear(sealed())
    member.part.store_unreachable(UNREACHABLE, 99.0)
    assert member.part.next_timer() == 99.0 + STORE_RETRY_SECONDS


@pytest.mark.parametrize(
    ("state", "session", "epoch", "counts"),
    [
        (ProvingStore, SESSION, 1, True),
        (ProvingStore, SESSION, 2, False),
        (ProvingStore, OTHER, 1, False),
        (AwaitingGo, SESSION, 1, False),
    ],
)
def test_only_the_store_of_the_present_seal_is_acknowledged(
    state: type, session: bytes, epoch: int, counts: bool
) -> None:
    member = Member()
    member.reach(state)
    assert member.part.store_unreachable(StoreUnreachable(session, epoch, "refused"), 1.0) == (
        sealed() if counts else None
    )
    member = Member()
    member.reach(state)
    assert member.part.store_proved(StoreProved(session, epoch)) is counts


# --- SEALED and GO ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [AwaitingConfirm, TryingPaths, ProvingStore, AwaitingGo])
def test_seal_counts_for_a_member_that_has_just_confirmed(state: type) -> None:
    member = Member()
    member.reach(state)
    assert member.hear(sealed()) is state
    assert not member.stores()


@pytest.mark.parametrize(
    ("state", "epoch", "leads_to"),
    [(ProvingStore, 1, ProvingStore), (AwaitingGo, 2, AwaitingGo), (AwaitingGo, 1, Decided)],
)
def test_go_is_only_taken_after_the_ack_and_of_its_epoch(state: type, epoch: int, leads_to: type) -> None:
    member = Member()
    member.reach(state)
    assert member.hear(frames.Go(session=SESSION, epoch=epoch)) is leads_to


@pytest.mark.parametrize(("epoch", "state"), [(1, AwaitingGo), (2, AwaitingConfirm)])
def test_member_that_comes_back_in_the_epoch_of_its_ack_lacks_go_alone(epoch: int, state: type) -> None:
    assert Member(epoch=epoch, acknowledged=sealed(1)).state() is state


@pytest.mark.parametrize(("said", "kept"), [(None, True), (VOID, False), (asks(1), False)])
def test_acknowledged_seal_is_kept_until_the_host_takes_it_back(said: frames.AnyFrame | None, kept: bool) -> None:
    member = Member()
    member.reach(AwaitingGo)
    if said is not None:
        member.hear(said)
    assert member.session.acknowledged == (sealed() if kept else None)
