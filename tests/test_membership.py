"""A rank's part in its session, from JOIN to GO. With a host at the other end it runs in test_joining."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mingle.protocol.connection_race import DialTarget
from mingle.protocol.machine import Diagnostics, Effect, Identity, ProveStore, ReachStore
from mingle.protocol.membership import DOUBT_SECONDS, RETURN_SECONDS, STORE_RETRY_SECONDS, Membership, Step
from mingle.protocol.sessions import Sessions
from mingle.wire import frames
from mingle.wire.datagrams import Offer
from mingle.wire.frames import ProcessInfo

SESSION = b"S" * 16
ADDRESS = "10.0.0.1"
IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h", pid=1)
)


class Joined:
    """A member whose host has no ear: what it does is seen in its state."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        sessions = Sessions(IDENTITY, None, itertools.count(1).__next__, self.effects)
        self.membership = Membership(IDENTITY, sessions, self.effects, Diagnostics())
        offer = Offer(job="job", session=SESSION, host=SESSION, addresses=(ADDRESS,), port=4000, world_size=2)
        session = sessions.remember(offer, [DialTarget(ADDRESS, "eth0")], keep=None)
        assert session is not None
        self.session = session
        sessions.race(session, 0.0)
        assert session.race is not None
        session.race.paths[ADDRESS] = frames.Path(host_address=ADDRESS, local_address="10.0.0.2", interface="eth0")
        self.membership.join(session)
        self.hear(frames.Joined(session=SESSION))

    def hear(self, *said: frames.AnyFrame) -> None:
        for frame in said:
            self.membership.received(frame, 1.0)

    def seal(self, epoch: int = 1) -> None:
        self.hear(frames.Confirm(session=SESSION, epoch=epoch))
        self.membership.confirm()
        self.hear(sealed(epoch))

    def stores(self) -> list[ProveStore]:
        return [effect for effect in self.effects if isinstance(effect, ProveStore)]


def sealed(epoch: int = 1, **other: Any) -> frames.Sealed:
    told: dict[str, Any] = {
        "place": frames.Place(rank=1, world_size=2, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2),
        "store_address": ADDRESS,
        "store_port": 5000,
        "store_token": "token",
        "roster_digest": b"d" * 32,
    }
    return frames.Sealed(session=SESSION, epoch=epoch, **{**told, **other})


def test_step_by_step() -> None:
    joined = Joined()
    membership = joined.membership
    assert (membership.step, membership.seated, membership.has_confirmed) == (Step.SEATED, True, False)
    joined.seal()
    assert (membership.step, membership.has_confirmed) == (Step.PROVING_STORE, True)
    membership.store_proved(1)
    assert membership.step is Step.ACKED
    joined.hear(frames.Go(session=SESSION, epoch=1))
    assert membership.step is Step.FORMED
    assert membership.outcome is not None
    assert (membership.outcome.interface, membership.outcome.address) == ("eth0", "10.0.0.2")


def test_a_store_that_stands_ahead_is_reached_while_there_is_time_and_nothing_follows() -> None:
    joined = Joined()
    store = frames.Store(session=SESSION, address=ADDRESS, port=5000)
    joined.hear(store)
    assert ReachStore(ADDRESS, 5000) in joined.effects
    assert joined.membership.step is Step.SEATED
    joined.seal()
    assert [(each.address, each.port) for each in joined.stores()] == [(ADDRESS, 5000)]
    joined.effects.clear()
    joined.hear(store)
    assert not joined.effects
    assert joined.membership.step is Step.PROVING_STORE


def test_a_link_local_store_ahead_is_reached_by_our_own_interface() -> None:
    joined = Joined()
    address = "fe80::1"
    assert joined.session.race is not None
    joined.session.race.paths[address] = frames.Path(host_address=address, local_address="fe80::2", interface="eth0")
    joined.hear(frames.Store(session=SESSION, address=address, port=5000))
    assert joined.effects[-1] == ReachStore("fe80::1%eth0", 5000)


def test_an_old_epoch_does_not_come_again() -> None:
    joined = Joined()
    joined.hear(frames.Confirm(session=SESSION, epoch=3), frames.Confirm(session=SESSION, epoch=2))
    assert joined.membership.epoch == 3
    joined.membership.confirm()
    joined.hear(sealed(2))
    assert joined.membership.step is Step.CONFIRMED


def test_nothing_is_confirmed_while_an_address_is_still_tried() -> None:
    joined = Joined()
    assert not joined.membership.can_confirm
    joined.hear(frames.Confirm(session=SESSION, epoch=1))
    assert not joined.membership.can_confirm
    assert joined.session.race is not None
    joined.session.race.stop_trying()
    assert joined.membership.can_confirm


def test_a_void_epoch_leaves_the_seat() -> None:
    joined = Joined()
    joined.seal()
    joined.hear(frames.Void(session=SESSION, epoch=1, reason="test"))
    assert joined.membership.step is Step.SEATED
    joined.membership.store_proved(1)
    assert joined.membership.step is Step.SEATED


def test_the_store_is_tried_again() -> None:
    joined = Joined()
    joined.seal()
    joined.membership.store_unreachable(1, "refused", 2.0)
    joined.membership.handle_timer(1.9 + STORE_RETRY_SECONDS)
    assert len(joined.stores()) == 1
    joined.membership.handle_timer(2.0 + STORE_RETRY_SECONDS)
    assert len(joined.stores()) == 2


@pytest.mark.parametrize(("address", "dialled"), [("fe80::1", "fe80::1%eth1"), (ADDRESS, ADDRESS)])
def test_a_link_local_store_is_reached_by_our_interface(address: str, dialled: str) -> None:
    joined = Joined()
    assert joined.session.race is not None
    joined.session.race.paths["fe80::1"] = frames.Path(
        host_address="fe80::1", local_address="fe80::2", interface="eth1"
    )
    joined.hear(frames.Confirm(session=SESSION, epoch=1))
    joined.membership.confirm()
    joined.hear(sealed(store_address=address))
    assert [store.address for store in joined.stores()] == [dialled]


@pytest.mark.parametrize("step", Step)
def test_after_a_loss_it_comes_back_once_it_has_confirmed(step: Step) -> None:
    joined = Joined()
    membership = joined.membership
    membership.step = step
    returning = step in (Step.CONFIRMED, Step.PROVING_STORE, Step.ACKED)
    assert membership.lost(joined.session, "reset", 5.0) is returning
    assert membership.current is None
    assert (membership.return_to is joined.session) is returning
    assert (membership.return_until == 5.0 + RETURN_SECONDS) is returning


def test_only_an_acknowledged_seal_outlasts_a_loss() -> None:
    for acked in (False, True):
        joined = Joined()
        joined.seal()
        if acked:
            joined.membership.store_proved(1)
        joined.membership.lost(joined.session, "reset", 5.0)
        joined.membership.join(joined.session)
        joined.hear(frames.Joined(session=SESSION, epoch=1))
        assert joined.membership.step is (Step.ACKED if acked else Step.SEATED)


def formed() -> Joined:
    joined = Joined()
    joined.seal()
    joined.membership.store_proved(1)
    joined.hear(frames.Go(session=SESSION, epoch=1))
    assert joined.membership.step is Step.FORMED
    return joined


def test_a_host_that_is_lost_after_go_is_given_up_when_it_cannot_be_returned_to() -> None:
    membership = (joined := formed()).membership
    assert not membership.host_lost
    assert membership.lost(joined.session, "reset", 5.0)
    assert not membership.host_lost, "it is tried again first"
    membership.return_to = None
    assert membership.host_lost
    assert "reset" in membership.loss


def test_a_host_that_came_back_is_not_given_up() -> None:
    membership = (joined := formed()).membership
    for _ in range(2):
        assert membership.lost(joined.session, "reset", 5.0)
        membership.join(joined.session)
        joined.hear(frames.Joined(session=SESSION, epoch=1))
        assert not membership.host_lost


def test_a_host_that_has_said_good_bye_is_given_up_at_once() -> None:
    membership = (joined := formed()).membership
    membership.close_reason = "it has done its work"
    assert not membership.lost(joined.session, "closed", 5.0)
    assert membership.host_lost
    assert "it has done its work" in membership.loss


def test_who_has_its_process_group_misses_no_host() -> None:
    membership = (joined := formed()).membership
    membership.ready()
    assert not membership.lost(joined.session, "reset", 5.0)
    assert not membership.host_lost


def test_a_host_is_doubted_until_it_speaks_and_never_after_confirmed() -> None:
    joined = Joined()
    membership = joined.membership
    membership.doubt(3.0)
    membership.doubt(4.0)
    assert membership.doubted(2.9 + DOUBT_SECONDS) is None
    assert membership.doubted(3.0 + DOUBT_SECONDS) is joined.session
    membership.step = Step.CONFIRMED
    membership.doubt(6.0)
    assert membership.doubt_until is None


def test_who_is_refused_has_no_host() -> None:
    joined = Joined()
    joined.session.confirmed = True
    joined.membership.refused(joined.session)
    assert joined.membership.current is None
    assert joined.membership.step is Step.SEEKING
    assert not joined.session.confirmed
