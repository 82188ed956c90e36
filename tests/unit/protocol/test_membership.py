"""A member's place in a job that has formed: the way back to its host, the roster, and the good-bye."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from mingle.protocol.events import Disconnected, TimerDue
from mingle.protocol.member import Attached, Away, Detached, Joining
from mingle.protocol.membership import ANSWER_SECONDS, READY_HEARD_SECONDS, RETURN_SECONDS, RosterAnswer
from mingle.protocol.sessions import RETRY_SECONDS
from mingle.wire import frames
from tests.support.scripted_host import ADDRESS, SESSION, Member

READY = frames.Ready(session=SESSION)
LEAVE = frames.Leave(session=SESSION, reason="done")
ASK = frames.Ask(what="roster")
TOKEN = b"k" * 16
JOINED = frames.Joined(session=SESSION, token=TOKEN)
CLOSED = frames.Closed(session=SESSION, reason="it has left")
REFUSED = frames.Refused(reason="running")
SEATS = tuple(
    frames.Seat(rank=rank, local_rank=rank, node_rank=0, hostname="host1", address=ADDRESS, pid=rank)
    for rank in range(2)
)


class Formed(Member):
    """A member that has heard GO, and its host, which says what the test says."""

    def __init__(self) -> None:
        super().__init__(Attached, timeout=1e9)

    def apply(self, now: float) -> None:
        """Let the host answer the call that is under way or due, and hear JOIN."""
        self.come_back(now)
        assert isinstance(self.heard()[-1], frames.Join)
        assert self.step() is Joining

    def rejoin(self, now: float) -> list[Any]:
        """Get the seat again; return what the host hears then."""
        self.apply(now)
        self.says(JOINED, now=now)
        assert self.step() is Attached
        return self.heard()

    def due(self) -> float:
        due = self.node.next_timer()
        assert due is not None
        return due

    def is_lost(self) -> bool:
        return self.membership().host_lost_error is not None


# --- the way back ----------------------------------------------------------------------------------------------------


def test_member_without_a_loss_has_nothing_to_do() -> None:
    member = Formed()
    assert member.membership().connected
    assert member.node.next_timer() is None
    assert not member.is_lost()


def test_host_is_called_at_once_and_then_until_it_is_given_up() -> None:
    member = Formed()
    assert member.lose(5.0) is Away
    assert member.joiner.returns_to is not None
    now, calls = 5.0, 0
    while member.step() is Away:
        assert not member.is_lost()
        for conn in member.dialed():
            calls += 1
            member.node.handle(Disconnected(conn, "Connection refused (ECONNREFUSED)"), now)
        if member.step() is Away:
            now = member.due()
            member.node.handle(TimerDue(), now)
    assert calls > 1
    assert 5.0 + RETURN_SECONDS <= now < 5.0 + RETURN_SECONDS + 2 * RETRY_SECONDS
    assert member.step() is Detached
    assert "reset" in str(member.membership().host_lost_error)
    assert member.node.next_timer() is None


def test_host_is_not_called_again_while_a_call_is_under_way() -> None:
    member = Formed()
    member.lose(5.0)
    assert len(member.dialed()) == 1
    member.node.handle(TimerDue(), 5.2)
    assert (member.dialed(), member.step()) == ([], Away)


def test_loss_is_forgotten_with_the_seat_that_the_host_gives_again() -> None:
    member = Formed()
    member.lose(5.0)
    member.apply(6.0)
    assert member.membership().connected
    member.says(JOINED, structs.replace(JOINED, token=b"not asked for..."), now=6.0)
    assert (member.step(), member.membership().loss, member.heard()) == (Attached, "", [])
    assert member.joiner.session is not None
    assert member.joiner.session.token == TOKEN


@pytest.mark.parametrize("again", [False, True], ids=["connected", "on the way back"])
def test_refused_member_has_no_host(again: bool) -> None:
    member = Formed()
    if again:
        member.lose(5.0)
        member.apply(6.0)
    member.says(REFUSED, now=6.0)
    assert member.membership().host_gone
    assert member.is_lost() is again


@pytest.mark.parametrize(("after", "state"), [(RETURN_SECONDS - 0.1, Away), (RETURN_SECONDS, Detached)])
def test_host_that_refuses_is_given_up_when_its_time_is_over(after: float, state: type) -> None:
    member = Formed()
    member.lose(5.0)
    member.fail(5.0 + after)
    assert member.step() is state


@pytest.mark.parametrize("reason", ["it has done its work", ""])
def test_host_that_has_said_good_bye_is_given_up_at_once(reason: str) -> None:
    member = Formed()
    member.says(frames.Closed(session=SESSION, reason=reason), now=4.0)
    assert member.lose(5.0) is Detached
    assert member.dialed() == []
    assert reason in member.membership().loss
    assert "reset" not in member.membership().loss
    assert member.is_lost()


# --- READY -----------------------------------------------------------------------------------------------------------


def test_member_comes_back_until_its_ready_was_certainly_heard() -> None:
    member = Formed()
    member.membership().ready(1.0)
    assert member.heard() == [READY]
    lost_at = 1.0
    for _ in range(2):
        lost_at += READY_HEARD_SECONDS - 0.1
        assert member.lose(lost_at) is Away
        assert member.rejoin(lost_at) == [READY]
    assert member.lose(lost_at + READY_HEARD_SECONDS) is Detached
    assert member.dialed() == []
    assert not member.is_lost()


def test_loss_at_any_time_before_ready_calls_the_host() -> None:
    assert Formed().lose(1e6) is Away


def test_ready_of_a_member_that_is_on_its_way_is_said_with_the_seat() -> None:
    member = Formed()
    member.lose(5.0)
    member.membership().ready(6.0)
    assert member.rejoin(7.0) == [READY]
    member.lose(8.0)
    member.apply(9.0)
    member.membership().ready(9.0)
    assert member.heard() == [READY], "it is connected, and can come back late"
    member.says(JOINED, now=9.1)
    assert member.heard() == [READY]


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


@pytest.mark.parametrize("state", [Attached, Away, Joining])
def test_roster_is_asked_for_again_by_a_member_that_comes_back(state: type) -> None:
    member = Formed()
    if state is not Attached:
        member.lose(5.0)
    if state is Joining:
        member.apply(6.0)
    member.membership().ask_roster()
    assert member.heard() == ([] if state is Away else [ASK])
    if state is Joining:
        member.says(JOINED, now=6.0)
        assert member.heard() == [ASK]
    else:
        if state is Attached:
            member.lose(5.0)
        assert member.rejoin(6.0) == [ASK]
    member.says(part(0, SEATS), now=6.5)
    assert tuple(member.membership().roster.seats) == SEATS
    member.lose(7.0)
    assert member.rejoin(8.0) == []


# --- the good-bye ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready", "failed"), [(True, False), (False, False), (False, True)], ids=["ready", "not ready", "failed"]
)
def test_good_bye_of_a_member_that_is_not_ready_says_ready_unless_it_failed(ready: bool, failed: bool) -> None:
    """Without READY the host takes the good-bye for that of a member that never heard GO."""
    member = Formed()
    if ready:
        member.membership().ready(1.0)
    member.membership().leave("done", 2.0, failed=failed)
    assert member.heard() == ([structs.replace(LEAVE, failed=True)] if failed else [READY, LEAVE])


def test_long_reason_fits_into_the_good_bye() -> None:
    member = Formed()
    member.membership().leave("x" * 5000, 1.0, failed=True)
    (leave,) = member.heard()
    assert leave.reason == "x" * frames.MAX_TEXT_CHARACTERS


def test_host_that_does_not_answer_the_good_bye_in_time_is_called_again() -> None:
    member = Formed()
    member.membership().leave("done", 1.0)
    assert member.membership().leaving
    assert member.due() == 1.0 + ANSWER_SECONDS
    member.says(frames.Pong(), now=1.5)
    assert member.due() == 1.5 + ANSWER_SECONDS
    member.node.handle(TimerDue(), member.due() - 0.01)
    assert member.step() is Attached
    member.node.handle(TimerDue(), member.due())
    assert member.step() is Away
    member.apply(4.5)
    assert member.due() == 4.5 + ANSWER_SECONDS


def test_good_bye_is_said_again_to_a_host_that_has_not_answered() -> None:
    member = Formed()
    member.membership().ready(1.0)
    member.membership().leave("done", 2.0)
    member.heard()
    assert member.lose(2.0 + READY_HEARD_SECONDS) is Away, "READY was heard, but not the good-bye"
    assert member.rejoin(20.0) == [READY, LEAVE]


def test_member_that_leaves_calls_a_host_for_as_long_as_it_is_left_to() -> None:
    member = Formed()
    member.membership().leave("done", 2.0)
    member.lose(5.0)
    for now in (6.0, 5.0 + 2 * RETURN_SECONDS):
        member.fail(now, "No route to host")
        member.node.handle(TimerDue(), member.due())
    assert member.step() is Away
    assert member.membership().leaving
    member.node.close("closed")
    assert not member.membership().leaving
    assert member.step() is Detached
    assert member.node.next_timer() is None


@pytest.mark.parametrize("answer", [CLOSED, REFUSED], ids=["CLOSED", "REFUSED"])
def test_answer_to_the_good_bye_ends_it(answer: frames.AnyFrame) -> None:
    member = Formed()
    member.membership().leave("done", 2.0)
    member.heard()
    member.says(answer, now=3.0)
    assert not member.membership().leaving
    assert member.node.next_timer() is None
    member.node.close("closed")
    assert member.heard() == []


@pytest.mark.parametrize("left", [False, True])
def test_last_good_bye_repeats_the_reason_that_was_given(left: bool) -> None:
    member = Formed()
    member.membership().ready(1.0)
    if left:
        member.membership().leave("done", 2.0)
    member.heard()
    member.node.close("its process ends")
    (leave,) = member.heard()
    assert leave.reason == ("done" if left else "its process ends")
    member.node.close("again")
    assert member.step() is Detached
    assert member.heard() == []
