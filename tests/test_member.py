"""Single steps of a member, redirects, and the sessions that it races for. tests/test_joining.py has a host."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from mingle.protocol.connection_race import ADDRESS_SECONDS, DialTarget
from mingle.protocol.election import REDIRECT_SECONDS, Candidate
from mingle.protocol.machine import (
    Context,
    Dial,
    Hangup,
    ProveStore,
    ReachStore,
)
from mingle.protocol.member import (
    HOST_SEEN_SECONDS,
    RETURN_SECONDS,
    STORE_RETRY_SECONDS,
    SUSPECT_SECONDS,
    Step,
)
from mingle.protocol.sessions import RETRY_SECONDS, KnownSession
from mingle.wire import frames
from tests.test_joining import ADDRESS, HERE, IDENTITY, OTHER, SESSION, Alone, offer, running, sealed


class Joined:
    """A member whose host has no ear: what it does is seen in its state."""

    def __init__(self, rank: int | None = 1) -> None:
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.joiner = Candidate(msgspec.structs.replace(IDENTITY, rank=rank), context, 0.0)
        self.session = self.known(SESSION)
        self.joiner._prove(self.session, 0.0)
        assert self.session.race is not None
        self.session.race.paths[ADDRESS] = frames.Path(host_address=ADDRESS, local_address="10.0.0.2", interface="eth0")
        self.joiner._join(self.session, 0.0)
        self.hear(frames.Joined(session=SESSION))

    def known(self, name: bytes) -> KnownSession:
        session = KnownSession(offer(name), [DialTarget(ADDRESS, "eth0", 4000)])
        assert self.joiner._table.add(session)
        return session

    def hear(self, *said: frames.AnyFrame) -> None:
        for frame in said:
            self.joiner.on_frame(self.session, frame, 1.0)

    def confirm(self) -> None:
        assert self.session.race is not None
        self.session.race.stop_trying()
        self.joiner._confirm_if_due(1.0)

    def seal(self, epoch: int = 1) -> None:
        self.hear(frames.Confirm(session=SESSION, epoch=epoch))
        self.confirm()
        self.hear(sealed(epoch))

    def lose(self, reason: str, now: float) -> bool:
        """The connection ends; tells whether the same session is tried first."""
        self.session.hang_up()
        self.session.retry_later(now)
        self.joiner._lost(self.session, reason, now)
        return self.joiner._return_to is not None

    def stores(self) -> list[ProveStore]:
        return [effect for effect in self.joiner._effects if isinstance(effect, ProveStore)]


def test_step_by_step() -> None:
    joined = Joined()
    joiner = joined.joiner
    assert (joiner.step, joiner.seated, joiner.has_confirmed) == (Step.SEATED, True, False)
    joined.seal()
    assert (joiner.step, joiner.has_confirmed) == (Step.PROVING_STORE, True)
    joiner.store_proved(SESSION, 1, 3.0)
    assert joiner.step is Step.ACKED
    joined.hear(frames.Go(session=SESSION, epoch=1))
    assert joiner.step is Step.FORMED
    assert joiner.outcome is not None
    assert (joiner.outcome.interface, joiner.outcome.address) == ("eth0", "10.0.0.2")


def test_a_store_that_stands_ahead_is_reached_while_there_is_time_and_nothing_follows() -> None:
    joined = Joined()
    store = frames.Store(session=SESSION, address=ADDRESS, port=5000)
    joined.hear(store)
    assert ReachStore(ADDRESS, 5000) in joined.joiner._effects
    assert joined.joiner.step is Step.SEATED
    joined.seal()
    assert [(each.address, each.port) for each in joined.stores()] == [(ADDRESS, 5000)]
    joined.joiner._effects.clear()
    joined.hear(store)
    assert not joined.joiner._effects
    assert joined.joiner.step is Step.PROVING_STORE


def test_a_link_local_store_ahead_is_reached_by_our_own_interface() -> None:
    joined = Joined()
    address = "fe80::1"
    assert joined.session.race is not None
    joined.session.race.paths[address] = frames.Path(host_address=address, local_address="fe80::2", interface="eth0")
    joined.hear(frames.Store(session=SESSION, address=address, port=5000))
    assert joined.joiner._effects[-1] == ReachStore("fe80::1%eth0", 5000)


def test_an_old_epoch_does_not_come_again() -> None:
    joined = Joined()
    joined.hear(frames.Confirm(session=SESSION, epoch=3), frames.Confirm(session=SESSION, epoch=2))
    assert joined.joiner.epoch == 3
    joined.confirm()
    joined.hear(sealed(2))
    assert joined.joiner.step is Step.CONFIRMED


def test_nothing_is_confirmed_while_an_address_is_still_tried() -> None:
    joined = Joined()
    assert not joined.joiner.can_confirm
    joined.hear(frames.Confirm(session=SESSION, epoch=1))
    assert not joined.joiner.can_confirm
    assert joined.session.race is not None
    joined.session.race.stop_trying()
    assert joined.joiner.can_confirm


def test_a_void_epoch_leaves_the_seat() -> None:
    joined = Joined()
    joined.seal()
    joined.hear(frames.Void(session=SESSION, epoch=1, reason="test"))
    assert joined.joiner.step is Step.SEATED
    joined.joiner.store_proved(SESSION, 1, 3.0)
    assert joined.joiner.step is Step.SEATED


def test_the_store_is_tried_again() -> None:
    joined = Joined()
    joined.seal()
    joined.joiner.store_unreachable(SESSION, 1, "refused", 2.0)
    joined.joiner._gather(1.9 + STORE_RETRY_SECONDS)
    assert len(joined.stores()) == 1
    joined.joiner._gather(2.0 + STORE_RETRY_SECONDS)
    assert len(joined.stores()) == 2


@pytest.mark.parametrize(("address", "dialed"), [("fe80::1", "fe80::1%eth1"), (ADDRESS, ADDRESS)])
def test_a_link_local_store_is_reached_by_our_interface(address: str, dialed: str) -> None:
    joined = Joined()
    assert joined.session.race is not None
    joined.session.race.paths["fe80::1"] = frames.Path(
        host_address="fe80::1", local_address="fe80::2", interface="eth1"
    )
    joined.hear(frames.Confirm(session=SESSION, epoch=1))
    joined.confirm()
    joined.hear(sealed(store_address=address))
    assert [store.address for store in joined.stores()] == [dialed]


@pytest.mark.parametrize("step", Step)
def test_after_a_loss_it_comes_back_once_it_has_confirmed(step: Step) -> None:
    joined = Joined()
    joiner = joined.joiner
    joiner.step = step
    returning = step in (Step.CONFIRMED, Step.PROVING_STORE, Step.ACKED)
    assert joined.lose("reset", 5.0) is returning
    assert joiner.current is None
    assert (joiner._return_to is joined.session) is returning
    assert (joiner._return_until == 5.0 + RETURN_SECONDS) is returning


def test_only_an_acknowledged_seal_outlasts_a_loss() -> None:
    for acked in (False, True):
        joined = Joined()
        joined.seal()
        if acked:
            joined.joiner.store_proved(SESSION, 1, 3.0)
        joined.lose("reset", 5.0)
        joined.joiner._join(joined.session, 6.0)
        joined.hear(frames.Joined(session=SESSION, epoch=1))
        assert joined.joiner.step is (Step.ACKED if acked else Step.SEATED)


def formed() -> Joined:
    joined = Joined()
    joined.seal()
    joined.joiner.store_proved(SESSION, 1, 3.0)
    joined.hear(frames.Go(session=SESSION, epoch=1))
    assert joined.joiner.step is Step.FORMED
    return joined


def test_a_host_that_is_lost_after_go_is_given_up_when_it_cannot_be_returned_to() -> None:
    joiner = (joined := formed()).joiner
    assert not joiner.host_lost
    assert joined.lose("reset", 5.0)
    assert not joiner.host_lost, "it is tried again first"
    joiner._return_to = None
    assert joiner.host_lost
    assert "reset" in joiner.loss


def test_a_host_that_came_back_is_not_given_up() -> None:
    joiner = (joined := formed()).joiner
    for _ in range(2):
        assert joined.lose("reset", 5.0)
        joiner._join(joined.session, 6.0)
        joined.hear(frames.Joined(session=SESSION, epoch=1))
        assert not joiner.host_lost


def test_what_is_left_of_an_earlier_answer_does_not_get_into_the_roster() -> None:
    joined = formed()
    world_size = joined.joiner.identity.world_size
    seats = tuple(
        frames.Seat(rank=rank, local_rank=rank, node_rank=0, hostname="host1", address=ADDRESS, pid=1)
        for rank in range(world_size)
    )
    parts = [frames.Roster(first=rank, total=world_size, seats=(seat,)) for rank, seat in enumerate(seats)]
    joined.joiner.ask_roster()
    joined.hear(*parts[:1])
    joined.joiner.ask_roster()
    joined.hear(*parts[1:], *parts)
    assert tuple(joined.joiner.roster) == seats


def test_a_host_that_has_said_good_bye_is_given_up_at_once() -> None:
    joiner = (joined := formed()).joiner
    joiner.close_reason = "it has done its work"
    assert not joined.lose("closed", 5.0)
    assert joiner.host_lost
    assert "it has done its work" in joiner.loss


def test_who_has_its_process_group_misses_no_host() -> None:
    joiner = (joined := formed()).joiner
    joiner.ready()
    assert not joined.lose("reset", 5.0)
    assert not joiner.host_lost


def test_who_is_refused_has_no_host() -> None:
    joined = Joined()
    joined.session.confirmed = True
    joined.hear(frames.Refused(reason="full"))
    assert joined.joiner.current is None
    assert joined.joiner.step is Step.SEEKING
    assert not joined.session.confirmed


@pytest.mark.parametrize("reason", ["running", "world size"])
def test_a_host_that_was_only_asked_cannot_refuse(reason: frames.RefusalReason) -> None:
    """Any process can prove a session without a secret: it must not end the vote of a member of another one."""
    joined = Joined()
    joined.seal()
    other = joined.known(OTHER)
    joined.joiner.on_frame(other, frames.Refused(reason=reason), 2.0)
    assert joined.joiner.failure is None
    assert joined.joiner.step is Step.PROVING_STORE
    joined.joiner.store_proved(SESSION, 1, 2.0)
    joined.hear(frames.Go(session=SESSION, epoch=1))
    assert joined.joiner.outcome is not None


@pytest.mark.parametrize(
    "said", [frames.Joined(session=SESSION), frames.Refused(reason="session")], ids=["joined", "refused"]
)
def test_a_host_that_answers_a_join_twice_does_no_harm(said: frames.AnyFrame) -> None:
    joined = Joined()
    joined.seal()
    joined.joiner.store_unreachable(SESSION, 1, "refused", 1.0)
    joined.hear(said)
    joined.joiner._gather(1.0 + STORE_RETRY_SECONDS)


# --- redirects, where ranks are assigned ---------------------------------------------------------------------------


def test_the_old_host_is_kept_until_the_new_one_is_reached() -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.hear(frames.Redirect(offer=new.offer))
    assert new.races_to("join")
    assert joined.joiner.current is joined.session
    joined.joiner.on_proved(new, 2.0)
    assert joined.joiner.current is new
    assert joined.session.retry_at == 2.0 + RETURN_SECONDS
    joined.joiner.handle_timer(1.0 + REDIRECT_SECONDS)
    assert joined.joiner.current is new


def test_a_redirect_to_a_session_that_is_just_asked_whether_it_lives_is_a_race_to_join() -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.joiner._table.race(new, IDENTITY.call(OTHER, "probe"), 1.0)
    joined.hear(frames.Redirect(offer=new.offer))
    assert new.races_to("join")


@pytest.mark.parametrize("step", [Step.CONFIRMED, Step.PROVING_STORE, Step.ACKED, Step.FORMED])
def test_a_member_that_has_confirmed_is_not_redirected(step: Step) -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.joiner.step = step
    joined.hear(frames.Redirect(offer=new.offer))
    assert new.race is None


def test_a_redirect_to_its_own_session_is_nonsense() -> None:
    joined = Joined(None)
    joined.hear(frames.Redirect(offer=offer()))
    assert joined.joiner.current is joined.session


@pytest.mark.parametrize("host", [b"S" * 16, b"A" * 16], ids=["the higher id", "the lower id"])
def test_of_two_that_step_down_for_each_other_the_lower_id_hosts_again(host: bytes) -> None:
    joined = Joined(None)
    joined.session.offer = msgspec.structs.replace(offer(), host=host)
    joined.hear(frames.Redirect(offer=msgspec.structs.replace(offer(OTHER), host=IDENTITY.member)))
    assert (joined.joiner.current is joined.session) is (host < IDENTITY.member)


def test_a_redirect_that_leads_nowhere_in_time_is_given_up() -> None:
    joined = Joined(None)
    new = joined.known(OTHER)
    joined.hear(frames.Redirect(offer=new.offer))
    joined.joiner._gather(0.9 + REDIRECT_SECONDS)
    assert new.race is not None
    joined.joiner._gather(1.0 + REDIRECT_SECONDS)
    assert new.race is None
    assert new.retry_at == 1.0 + REDIRECT_SECONDS + RETRY_SECONDS
    assert joined.joiner.current is joined.session


# --- for which sessions it races -----------------------------------------------------------------------------------


def test_sessions_are_raced_for_side_by_side_and_each_once() -> None:
    alone = Alone()
    for each in (offer(), offer(OTHER, port=4001), offer()):
        alone.joiner.heard(each, HERE, 1.0)
    assert len(alone.dialed()) == 2
    assert all(each.races_to("join") for each in alone.joiner._table)
    assert len(alone.joiner.diagnostics.hosts) == 2


@pytest.mark.parametrize("rank", [None, 1])
def test_a_member_without_a_rank_tells_its_host_of_others(rank: int | None) -> None:
    joined = Joined(rank)
    joined.joiner.heard(offer(OTHER), HERE, 2.0)
    other = joined.joiner._table.get(OTHER)
    assert other is not None
    assert other.race is None
    assert other.retry_at == (0.0 if rank is not None else 2.0 + HOST_SEEN_SECONDS)


def test_none_is_joined_while_the_job_runs_elsewhere_but_sealed_ones_are_asked() -> None:
    alone = Alone()
    alone.joiner.heard(offer(state="sealed"), HERE, 1.0)
    (conn,) = alone.dialed()
    alone.answer(conn, 1.0)
    alone.hear(conn, 1.0, running())
    alone.joiner.heard(offer(OTHER, port=4001), HERE, 1.1)
    assert alone.dialed() == []
    alone.joiner.heard(offer(b"U" * 16, state="sealed", port=4002), HERE, 1.1)
    assert len(alone.dialed()) == 1


def test_the_session_to_return_to_comes_first_and_has_its_time() -> None:
    joined = Joined()
    joined.seal()
    assert joined.lose("reset", 2.0)
    assert joined.session.races_to("join")
    joined.joiner.heard(offer(OTHER), HERE, 2.1)
    other = joined.joiner._table.get(OTHER)
    assert other is not None
    assert other.race is None
    joined.joiner.handle_timer(2.1 + ADDRESS_SECONDS)
    assert joined.joiner._return_to is joined.session
    for now in (2.0 + RETURN_SECONDS, 2.0 + RETURN_SECONDS + ADDRESS_SECONDS, 9.0):
        joined.joiner.handle_timer(now)
    assert joined.joiner._return_to is None


def test_a_race_that_was_lost_is_noted_and_run_again_later() -> None:
    alone = Alone()
    alone.joiner.heard(offer(), HERE, 1.0)
    alone.dialed()
    alone.joiner.handle_timer(1.0 + ADDRESS_SECONDS)
    assert any("not reached" in text for text in alone.joiner.diagnostics.hosts.values())
    alone.joiner.heard(offer(), HERE, 1.0 + ADDRESS_SECONDS + RETRY_SECONDS - 0.01)
    assert alone.dialed() == []
    alone.joiner.heard(offer(), HERE, 1.0 + ADDRESS_SECONDS + RETRY_SECONDS)
    assert len(alone.dialed()) == 1


@pytest.mark.parametrize(("address", "suspected"), [(ADDRESS, False), ("10.0.0.7", True)])
def test_a_host_that_no_longer_offers_the_address_in_use_is_asked_whether_it_lives(
    address: str, suspected: bool
) -> None:
    alone = Alone()
    alone.join()
    alone.joiner.heard(msgspec.structs.replace(offer(), addresses=(address,)), HERE, 2.0)
    alone.done()
    assert (alone.said[-1] == frames.Ping()) is suspected


def test_a_member_that_has_confirmed_goes_back_to_a_host_whose_address_has_gone() -> None:
    """The host has ended the old connection, and its FIN went nowhere: TCP would notice after ten seconds."""
    alone = Alone()
    conn = alone.join()
    alone.hear(conn, 2.0, frames.Confirm(session=SESSION, epoch=1))
    assert alone.step() is Step.CONFIRMED
    alone.joiner.heard(msgspec.structs.replace(offer(), addresses=("10.0.0.7",)), HERE, 3.0)
    alone.done()
    alone.joiner.handle_timer(3.0 + SUSPECT_SECONDS)
    done = alone.done()
    assert Hangup(conn) in done
    assert "10.0.0.7" in [effect.address for effect in done if isinstance(effect, Dial)]


def fail_a_second_path(alone: Alone, reason: str) -> None:
    """The host names another address, where it is not reached."""
    alone.joiner.heard(msgspec.structs.replace(offer(), addresses=(ADDRESS, "10.0.0.7")), HERE, 2.0)
    alone.joiner.handle_timer(2.1)
    (second,) = alone.dialed()
    alone.joiner.disconnected(second, reason, 2.2)


@pytest.mark.parametrize("confirmed", [False, True])
def test_when_the_own_interfaces_change_the_paths_are_proved_again(confirmed: bool) -> None:
    alone = Alone()
    conn = alone.join()
    fail_a_second_path(alone, "Network is unreachable")
    if confirmed:
        alone.hear(conn, 2.3, frames.Confirm(session=SESSION, epoch=1))
    alone.joiner.rewired(3.0)
    # A member that has confirmed has told its host what counts.
    assert len(alone.dialed()) == (0 if confirmed else 1)


def test_a_member_that_is_asked_again_proves_its_paths_again() -> None:
    """The members share no path: one that failed a moment ago can have failed since the host's process stood still."""
    alone = Alone()
    conn = alone.join()
    fail_a_second_path(alone, "no proof")
    alone.hear(conn, 2.3, frames.Confirm(session=SESSION, epoch=1))
    assert alone.step() is Step.CONFIRMED
    alone.hear(conn, 2.8, frames.Confirm(session=SESSION, epoch=2))
    assert alone.step() is Step.SEATED, "it confirms once each path was tried again"


def test_a_change_of_the_interfaces_that_ends_the_last_attempt_lets_the_member_confirm() -> None:
    alone = Alone()
    conn = alone.join()
    alone.joiner.heard(msgspec.structs.replace(offer(), addresses=(ADDRESS, "10.0.0.7")), HERE, 2.0)
    alone.joiner.handle_timer(2.1)
    assert len(alone.dialed()) == 1
    alone.hear(conn, 2.3, frames.Confirm(session=SESSION, epoch=1))
    assert alone.step() is Step.SEATED, "it still tries the other address"
    # The process was stopped meanwhile, and the time of that address is over.
    alone.joiner.rewired(2.1 + ADDRESS_SECONDS + 2.0)
    alone.done()
    assert isinstance(alone.said[-1], frames.Confirmed)
