"""A member's place in a job that has formed: the way back to its host, the roster, and the good-bye."""

from __future__ import annotations

from typing import Any

import pytest

from mingle.protocol.machine import Formation
from mingle.protocol.membership import (
    ANSWER_SECONDS,
    READY_HEARD_SECONDS,
    RETURN_SECONDS,
    Attached,
    Detached,
    Membership,
    Reconnecting,
    Rejoining,
    RosterAnswer,
)
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from tests.support.proved_session import ProvedSession
from tests.support.scripted_host import ADDRESS, IDENTITY, SESSION, sealed

READY = frames.Ready(session=SESSION)
LEAVE = frames.Leave(session=SESSION, reason="done")
ASK = frames.Ask(what="roster")
TOKEN = b"k" * 16
SEATS = tuple(
    frames.Seat(rank=rank, local_rank=rank, node_rank=0, hostname="host1", address=ADDRESS, pid=rank)
    for rank in range(2)
)


class Member:
    """A member that has heard GO; it is connected to its host."""

    def __init__(self) -> None:
        self.proved = ProvedSession()
        self.session = self.proved.session
        self.called: list[float] = []
        seal = sealed()
        outcome = Formation(
            session=SESSION,
            place=seal.place,
            store_address=ADDRESS,
            store_port=seal.store_port,
            interface="eth0",
            address="10.0.0.2",
            roster_digest=seal.roster_digest,
        )
        self.membership = Membership(IDENTITY, outcome, self.session, RosterAnswer(2), self._call)

    def _call(self, session: KnownSession, now: float) -> None:
        assert session is self.session
        self.called.append(now)

    def state(self) -> type:
        return type(self.membership.state)

    def said(self) -> list[Any]:
        return self.proved.said()

    def lose(self, now: float, reason: str = "reset") -> type:
        """Lose the connection; return the state to which that leads."""
        self.session.give_up(now)
        self.membership.lost(self.session, reason, now)
        return self.state()

    def return_to_host(self, now: float) -> None:
        """Reach the host again, and say JOIN."""
        self.proved.connect(now)
        self.membership.rejoining(self.session, now)

    def come_back(self, now: float) -> list[Any]:
        """Get the seat again; return what the host hears then."""
        self.return_to_host(now)
        self.membership.said(frames.Joined(session=SESSION, token=TOKEN), now)
        assert self.state() is Attached
        return self.said()

    def due(self) -> float:
        due = self.membership.next_timer()
        assert due is not None
        return due

    def is_lost(self) -> bool:
        return self.membership.host_lost_error is not None


# --- the way back ----------------------------------------------------------------------------------------------------


def test_member_without_a_loss_has_nothing_to_do() -> None:
    member = Member()
    assert member.membership.connected
    assert member.membership.next_timer() is None
    assert not member.is_lost()


def test_host_is_called_at_once_and_then_until_it_is_given_up() -> None:
    member = Member()
    assert member.lose(5.0) is Reconnecting
    assert member.membership.returns_to is member.session
    assert member.called == [5.0]
    assert member.due() == member.session.retry_at
    member.membership.handle_timer(member.due() - 0.01)
    assert member.called == [5.0]
    member.membership.handle_timer(member.due())
    assert member.called == [5.0, member.session.retry_at]
    assert not member.is_lost()
    member.membership.handle_timer(5.0 + RETURN_SECONDS)
    assert len(member.called) == 2
    assert member.state() is Detached
    assert "reset" in str(member.membership.host_lost_error)
    assert member.membership.next_timer() is None


def test_host_is_not_called_again_while_a_call_is_under_way() -> None:
    member = Member()
    member.lose(5.0)
    member.proved.connect(5.0)
    assert member.membership.next_timer() is None
    member.membership.handle_timer(5.0 + 2 * RETURN_SECONDS)
    assert (member.called, member.state()) == ([5.0], Reconnecting)


def test_loss_is_forgotten_with_the_seat_that_the_host_gives_again() -> None:
    member = Member()
    member.lose(5.0)
    member.return_to_host(6.0)
    assert member.state() is Rejoining
    assert member.membership.connected
    member.membership.said(frames.Joined(session=SESSION, token=TOKEN), 6.0)
    assert (member.state(), member.membership.loss, member.session.token) == (Attached, "", TOKEN)
    assert member.said() == []


def test_joined_without_join_changes_nothing() -> None:
    member = Member()
    member.membership.said(frames.Joined(session=SESSION, token=TOKEN), 1.0)
    assert (member.state(), member.session.token) == (Attached, b"")


@pytest.mark.parametrize("again", [False, True], ids=["connected", "on the way back"])
def test_refused_member_has_no_host(again: bool) -> None:
    member = Member()
    if again:
        member.lose(5.0)
        member.return_to_host(6.0)
    member.membership.refused()
    assert member.membership.host_gone
    assert member.is_lost() is again


@pytest.mark.parametrize(
    ("refused", "after", "state"),
    [
        (True, RETURN_SECONDS, Detached),
        (True, RETURN_SECONDS - 0.1, Reconnecting),
        (False, RETURN_SECONDS, Reconnecting),
    ],
)
def test_host_that_refuses_is_given_up_when_its_time_is_over(refused: bool, after: float, state: type) -> None:
    member = Member()
    member.lose(5.0)
    member.membership.unreached(ProvedSession().session, 5.0 + after, refused=refused)
    assert member.state() is Reconnecting, "it was another session"
    member.membership.unreached(member.session, 5.0 + after, refused=refused)
    assert member.state() is state


def test_host_that_is_not_reached_says_nothing_of_a_member_that_is_connected() -> None:
    member = Member()
    member.membership.unreached(member.session, 99.0, refused=True)
    assert member.state() is Attached


@pytest.mark.parametrize(("reason", "told"), [("it has done its work", "it has done its work"), ("", "no reason")])
def test_host_that_has_said_good_bye_is_given_up_at_once(reason: str, told: str) -> None:
    member = Member()
    member.membership.said(frames.Closed(session=SESSION, reason=reason), 4.0)
    assert member.lose(5.0) is Detached
    assert member.called == []
    assert told in member.membership.loss
    assert "reset" not in member.membership.loss
    assert member.is_lost()


# --- READY -----------------------------------------------------------------------------------------------------------


def test_loss_after_ready_is_no_error() -> None:
    member = Member()
    member.membership.ready(1.0)
    assert member.said() == [READY]
    assert member.lose(1.0 + READY_HEARD_SECONDS) is Detached
    assert member.called == []
    assert not member.is_lost()


def test_member_comes_back_until_its_ready_was_certainly_heard() -> None:
    member = Member()
    member.membership.ready(1.0)
    lost_at = 1.0
    for _ in range(2):
        lost_at += READY_HEARD_SECONDS - 0.1
        assert member.lose(lost_at) is Reconnecting
        assert member.come_back(lost_at) == [READY]
    assert member.lose(lost_at + READY_HEARD_SECONDS) is Detached


def test_loss_at_any_time_before_ready_calls_the_host() -> None:
    assert Member().lose(1e6) is Reconnecting


def test_ready_of_a_member_that_is_on_its_way_is_said_when_it_is_back() -> None:
    member = Member()
    member.lose(5.0)
    member.membership.ready(6.0)
    assert member.come_back(7.0) == [READY]


def test_ready_of_a_member_that_has_asked_for_its_seat_is_said_at_once_and_with_the_seat() -> None:
    member = Member()
    member.lose(5.0)
    member.return_to_host(6.0)
    member.membership.ready(6.0)
    assert member.said() == [READY]
    member.membership.said(frames.Joined(session=SESSION), 6.1)
    assert member.said() == [READY]


# --- the roster ------------------------------------------------------------------------------------------------------


def part(first: int, seats: tuple[frames.Seat, ...]) -> frames.Roster:
    return frames.Roster(first=first, total=2, seats=seats)


def test_leftover_of_an_earlier_answer_stays_out_of_the_roster() -> None:
    answer = RosterAnswer(2)
    answer.ask(None)
    answer.said(part(0, SEATS[:1]))
    answer.ask(None)
    assert answer.seats == []
    for each in (part(1, SEATS[1:]), part(0, SEATS[:1])):
        answer.said(each)
        assert answer.wanted
    for each in (part(1, SEATS[1:]), part(0, SEATS[:1]), part(2, SEATS[1:])):
        answer.said(each)
        assert not answer.wanted
    assert tuple(answer.seats) == SEATS


@pytest.mark.parametrize("state", [Attached, Reconnecting, Rejoining])
def test_roster_is_asked_for_again_by_a_member_that_comes_back(state: type) -> None:
    member = Member()
    if state is not Attached:
        member.lose(5.0)
    if state is Rejoining:
        member.return_to_host(6.0)
    member.membership.ask_roster()
    assert member.said() == ([] if state is Reconnecting else [ASK])
    if state is Rejoining:
        member.membership.said(frames.Joined(session=SESSION), 6.0)
        assert member.said() == [ASK]
    else:
        if state is Attached:
            member.lose(5.0)
        assert member.come_back(6.0) == [ASK]
    member.membership.roster.said(part(0, SEATS))
    member.lose(7.0)
    assert member.come_back(8.0) == []


# --- the good-bye ----------------------------------------------------------------------------------------------------


def test_good_bye_of_a_member_that_is_not_ready_says_ready_unless_it_failed() -> None:
    """Without READY the host takes the good-bye for that of a member that never heard GO."""
    ready, unready, failed = Member(), Member(), Member()
    ready.membership.ready(1.0)
    ready.membership.leave("done", 2.0)
    unready.membership.leave("done", 2.0)
    failed.membership.leave("done", 2.0, failed=True)
    assert ready.said() == unready.said() == [READY, LEAVE]
    assert failed.said() == [LEAVE]


def test_long_reason_fits_into_the_good_bye() -> None:
    member = Member()
    member.membership.leave("x" * 5000, 1.0, failed=True)
    (leave,) = member.said()
    assert leave.reason == "x" * frames.MAX_TEXT_CHARACTERS


def test_host_that_does_not_answer_the_good_bye_in_time_is_noticed() -> None:
    member = Member()
    membership = member.membership
    assert not membership.unanswered(1e6)
    membership.leave("done", 1.0)
    assert membership.leaving
    assert member.due() == 1.0 + ANSWER_SECONDS
    membership.heard(1.5)
    assert member.due() == 1.5 + ANSWER_SECONDS
    assert not membership.unanswered(member.due() - 0.01)
    assert membership.unanswered(member.due())
    member.lose(9.0)
    assert not membership.unanswered(99.0)
    member.proved.connect(9.2)
    assert membership.next_timer() is None, "it is just being called"
    member.return_to_host(9.5)
    assert member.due() == 9.5 + ANSWER_SECONDS


def test_good_bye_is_said_again_to_a_host_that_has_not_answered() -> None:
    member = Member()
    member.membership.ready(1.0)
    member.membership.leave("done", 2.0)
    member.said()
    assert member.lose(2.0 + READY_HEARD_SECONDS) is Reconnecting, "READY was heard, but not the good-bye"
    assert member.come_back(20.0) == [READY, LEAVE]


def test_member_that_leaves_calls_a_host_for_as_long_as_it_is_left_to() -> None:
    member = Member()
    member.membership.leave("done", 2.0)
    member.lose(5.0)
    member.membership.handle_timer(5.0 + 2 * RETURN_SECONDS)
    assert member.called == [5.0, 5.0 + 2 * RETURN_SECONDS]
    assert member.membership.leaving
    member.membership.close("closed")
    assert not member.membership.leaving
    assert member.state() is Detached
    assert member.membership.next_timer() is None


def test_answer_to_the_good_bye_ends_it() -> None:
    member = Member()
    member.membership.leave("done", 2.0)
    member.said()
    member.membership.said(frames.Closed(session=SESSION, reason="it has left"), 3.0)
    assert not member.membership.leaving
    assert member.membership.next_timer() is None
    member.membership.close("closed")
    assert member.said() == []


@pytest.mark.parametrize("left", [False, True])
def test_last_good_bye_repeats_the_reason_that_was_given(left: bool) -> None:
    member = Member()
    member.membership.ready(1.0)
    if left:
        member.membership.leave("done", 2.0)
    member.said()
    member.membership.close("its process ends")
    (leave,) = member.said()
    assert leave.reason == ("done" if left else "its process ends")
    member.membership.close("again")
    assert member.state() is Detached
    assert member.said() == []


def test_host_that_has_refused_hears_no_good_bye() -> None:
    member = Member()
    member.membership.leave("done", 2.0)
    member.said()
    member.membership.refused()
    assert not member.membership.leaving
    assert member.membership.next_timer() is None
