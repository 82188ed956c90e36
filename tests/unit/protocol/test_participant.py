"""A member's part in the commit of its session: what it answers, what it proves, and what the host can take back."""

from __future__ import annotations

from typing import TypeVar

import pytest

from mingle.protocol.effects import Dial, Effect, Hangup, ProveStore
from mingle.protocol.events import Disconnected, Heard, StoreProved, StoreUnreachable, TimerDue
from mingle.protocol.links.race import FAILURE_SECONDS
from mingle.protocol.member import Attached
from mingle.protocol.participant import AwaitingConfirm, AwaitingGo, AwaitingSeal, ProvingStore, TryingPaths
from mingle.wire import frames
from tests.support.scripted_host import ADDRESS, HERE, OTHER, SECOND, SESSION, Member, offer, sealed

LINK_LOCAL = "fe80::1"
TARGET = frames.Target(member=b"T" * 16, address="fe80::3", port=4003)
VOID = frames.Void(session=SESSION, epoch=1, reason="test")
STATES = [AwaitingConfirm, TryingPaths, AwaitingSeal, ProvingStore, AwaitingGo, Attached]
E = TypeVar("E", bound=Effect)


def asks(epoch: int = 1, *targets: frames.Target, network: str | None = None) -> frames.Confirm:
    return frames.Confirm(session=SESSION, epoch=epoch, network=network, targets=targets, seconds=6.0)


class Recorded(Member):
    """A member whose effects are kept."""

    def __init__(self, state: type) -> None:
        self._effects: list[Effect] = []
        super().__init__(state)
        self._effects.clear()

    def done(self) -> list[Effect]:
        done = super().done()
        self._effects += done
        return done

    def says(self, *said: frames.AnyFrame, now: float = 2.0) -> None:
        """Let the host say this, each frame by itself."""
        for frame in said:
            super().says(frame, now=now)

    def take(self, kind: type[E]) -> list[E]:
        """Return the effects of one kind since the last time."""
        self.done()
        taken = [each for each in self._effects if isinstance(each, kind)]
        self._effects.clear()
        return taken

    def epoch(self) -> int | None:
        return None if self.joiner.part is None else self.joiner.part.epoch


def trying(address: str) -> tuple[Recorded, int]:
    """A member with a seat that tries a second address of its host, and that connection."""
    member = Recorded(AwaitingConfirm)
    member.node.handle(Heard(offer(addresses=(ADDRESS, address)), HERE), 0.0)
    member.node.handle(TimerDue(), 0.1)
    (conn,) = member.dialed()
    return member, conn


# --- epochs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_void_releases_the_member_until_go(state: type) -> None:
    member = Recorded(state)
    member.says(VOID, VOID)
    assert member.step() is (Attached if state is Attached else AwaitingConfirm)


@pytest.mark.parametrize("state", STATES)
def test_member_is_asked_again_in_each_state_before_go(state: type) -> None:
    member = Recorded(state)
    member.says(asks(2))
    assert member.epoch() == (None if state is Attached else 2)


def test_old_epoch_does_not_come_again() -> None:
    member = Recorded(AwaitingConfirm)
    member.says(asks(3), asks(2), sealed(2), VOID)
    assert (member.step(), member.epoch()) == (AwaitingSeal, 3)


@pytest.mark.parametrize("state", [AwaitingConfirm, TryingPaths, ProvingStore, AwaitingGo])
def test_seal_counts_for_a_member_that_has_just_confirmed(state: type) -> None:
    member = Recorded(state)
    member.says(sealed())
    assert (member.step(), member.take(ProveStore)) == (state, [])


@pytest.mark.parametrize(
    ("state", "epoch", "leads_to"),
    [(ProvingStore, 1, ProvingStore), (AwaitingGo, 2, AwaitingGo), (AwaitingGo, 1, Attached)],
)
def test_go_is_only_taken_after_the_ack_and_of_its_epoch(state: type, epoch: int, leads_to: type) -> None:
    member = Recorded(state)
    member.says(frames.Go(session=SESSION, epoch=epoch))
    assert member.step() is leads_to


@pytest.mark.parametrize(
    ("said", "epoch", "state"),
    [
        pytest.param([], 1, AwaitingGo, id="GO alone is lacking"),
        pytest.param([], 2, AwaitingConfirm, id="another epoch"),
        pytest.param([VOID], 1, AwaitingConfirm, id="void"),
        pytest.param([asks(1)], 1, AwaitingConfirm, id="asked again"),
    ],
)
def test_member_that_comes_back_has_acknowledged_until_the_host_takes_it_back(
    said: list[frames.AnyFrame], epoch: int, state: type
) -> None:
    member = Recorded(AwaitingGo)
    member.says(*said)
    member.lose(5.0)
    member.node.handle(Heard(offer(), HERE), 6.0)
    member.come_back(6.0, frames.Joined(session=SESSION, epoch=epoch))
    assert member.step() is state


# --- CONFIRM ----------------------------------------------------------------------------------------------------------


def test_nothing_is_confirmed_while_an_address_is_still_tried() -> None:
    member, conn = trying(SECOND)
    member.says(asks(), now=0.2)
    assert member.heard() == []
    member.answer(conn, 0.5, addresses=(ADDRESS, SECOND))
    (confirmed,) = member.heard()
    assert [path.host_address for path in confirmed.paths] == [ADDRESS, SECOND]


def test_nothing_is_confirmed_while_a_target_is_dialed_and_then_its_failure() -> None:
    member = Recorded(AwaitingConfirm)
    member.says(asks(1, TARGET), now=1.0)
    assert member.heard() == []
    for now in (1.0 + tick / 10 for tick in range(12)):
        member.fail(now)
        member.node.handle(TimerDue(), now)
    assert member.heard()[-1].failures == (frames.Failure(member=TARGET.member, how="refused"),)


@pytest.mark.parametrize("proved", [True, False])
def test_targets_wait_for_the_path_on_their_network_which_gives_them_their_scope(proved: bool) -> None:
    member, conn = trying(LINK_LOCAL)
    member.take(Dial)
    member.says(asks(1, TARGET, network=LINK_LOCAL), now=0.2)
    assert member.take(Dial) == []
    if proved:
        member.answer(conn, 0.5, addresses=(ADDRESS, LINK_LOCAL))
    else:
        member.node.handle(Disconnected(conn, "ECONNREFUSED"), 0.5)
    (dial,) = member.take(Dial)
    assert dial == Dial(dial.conn, TARGET.address, TARGET.port, "eth0" if proved else "", as_torch=True)
    assert member.heard() == []


@pytest.mark.parametrize("said", [VOID, asks(2)], ids=["void", "asked again"])
def test_targets_of_an_epoch_that_is_over_are_hung_up_on(said: frames.AnyFrame) -> None:
    member = Recorded(AwaitingConfirm)
    member.says(asks(1, TARGET))
    (dial,) = member.take(Dial)
    member.says(said)
    assert member.take(Hangup) == [Hangup(dial.conn)]


def with_failed_path() -> Recorded:
    """A member with a seat that has failed to prove its second path at 0.9 s."""
    member, conn = trying(SECOND)
    member.node.handle(Disconnected(conn, "no proof"), 0.9)
    return member


@pytest.mark.parametrize(
    ("asked", "now", "again"),
    [
        pytest.param([asks(1)], 1.0, False, id="it has just failed"),
        pytest.param([asks(1)], 0.9 + FAILURE_SECONDS, True, id="it failed a while ago"),
        pytest.param([asks(1), asks(2)], 1.0, True, id="the members share no network"),
        pytest.param([asks(1), asks(2, network=ADDRESS)], 1.0, False, id="the host asks again for the mesh alone"),
    ],
)
def test_path_that_failed_is_tried_again_where_that_can_help(
    asked: list[frames.Confirm], now: float, again: bool
) -> None:
    member = with_failed_path()
    member.says(*asked, now=now)
    assert len(member.dialed()) == again
    assert len(member.heard()) == len(asked) - again, "it has confirmed at once, unless it tries a path"


def test_store_that_was_not_reached_puts_the_paths_in_doubt_once() -> None:
    member = with_failed_path()
    member.says(asks(1), sealed(1), now=1.0)
    member.node.handle(StoreUnreachable(SESSION, 1, "refused"), 1.0)
    member.says(VOID, asks(2), now=1.1)
    (conn,) = member.dialed()
    member.node.handle(Disconnected(conn, "no proof"), 1.2)
    member.says(frames.Void(session=SESSION, epoch=2, reason="test"), asks(3), now=1.3)
    assert member.dialed() == []


# --- the store --------------------------------------------------------------------------------------------------------


def test_link_local_store_is_reached_by_our_interface() -> None:
    member, conn = trying(LINK_LOCAL)
    member.answer(conn, 0.5, addresses=(ADDRESS, LINK_LOCAL))
    member.says(asks(), sealed(store_address=LINK_LOCAL))
    assert [(each.address, each.port) for each in member.take(ProveStore)] == [(f"{LINK_LOCAL}%eth0", 5000)]


def test_member_tells_its_host_whether_it_tries_to_reach_the_store_for_the_first_time() -> None:
    member = Recorded(ProvingStore)
    for proving in (True, False):
        member.says(frames.Ping(number=1))
        assert member.heard() == [frames.Pong(number=1, proving=proving)]
        member.node.handle(StoreUnreachable(SESSION, 1, "refused"), 1.0)


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
    member = Recorded(state)
    member.node.handle(StoreUnreachable(session, epoch, "refused"), 1.0)
    assert len(member.joiner.diagnostics.store_failures) == counts
    member.node.handle(StoreProved(session, epoch), 2.0)
    assert member.heard() == [frames.Ack(session=SESSION, epoch=1)] * counts
