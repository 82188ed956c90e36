"""A member's place in a job that has formed: the way back to its host, the roster, and the good-bye."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from mingle.protocol.events import Disconnected, StoreProved, TimerDue
from mingle.protocol.member import Attached, Away, Detached, Joiner, Joining
from mingle.protocol.membership import ANSWER_SECONDS, READY_HEARD_SECONDS, RETURN_SECONDS, Membership, RosterAnswer
from mingle.protocol.node import Node
from mingle.protocol.sessions import RETRY_SECONDS
from mingle.wire import frames
from tests.support.scripted_host import ADDRESS, SESSION, Alone

READY = frames.Ready(session=SESSION)
LEAVE = frames.Leave(session=SESSION, reason="done")
ASK = frames.Ask(what="roster")
TOKEN = b"k" * 16
JOINED = frames.Joined(session=SESSION, token=TOKEN)
SEATS = tuple(
    frames.Seat(rank=rank, local_rank=rank, node_rank=0, hostname="host1", address=ADDRESS, pid=rank)
    for rank in range(2)
)


class Member:
    """A member that has heard GO, and its host, which says what the test says."""

    def __init__(self) -> None:
        self._alone = Alone(timeout=1e9)
        self._dialed: list[int] = []
        self.conn = self._alone.seal(0.0)
        self.node.handle(StoreProved(SESSION, 1), 0.0)
        self._alone.hear(self.conn, 0.0, frames.Go(session=SESSION, epoch=1))
        assert self.state() is Attached
        self.said()

    @property
    def node(self) -> Node:
        return self._alone.node

    @property
    def joiner(self) -> Joiner:
        return self._alone.joiner

    @property
    def membership(self) -> Membership:
        return self._alone.membership()

    def state(self) -> type:
        return type(self.joiner.state)

    def said(self) -> list[Any]:
        """Return what the host has heard since the last time."""
        self._dialed += self._alone.dialed()
        said, self._alone.said = self._alone.said, []
        return said

    def hear(self, frame: frames.AnyFrame, now: float) -> None:
        self._alone.hear(self.conn, now, frame)

    def lose(self, now: float, reason: str = "reset") -> type:
        """Lose the connection; return the state to which that leads."""
        self.node.handle(Disconnected(self.conn, reason), now)
        return self.state()

    def calls(self) -> list[int]:
        """Return the connections to the host that were begun since the last time."""
        dialed, self._dialed = self._dialed + self._alone.dialed(), []
        return dialed

    def return_to_host(self, now: float) -> None:
        """Let the host answer the call that is under way, and hear JOIN."""
        calls = self.calls()
        if not calls:
            self.node.handle(TimerDue(), now)
            calls = self.calls()
        (self.conn,) = calls
        self._alone.answer(self.conn, now)
        assert isinstance(self.said()[-1], frames.Join)

    def come_back(self, now: float) -> list[Any]:
        """Get the seat again; return what the host hears then."""
        self.return_to_host(now)
        self.hear(JOINED, now)
        assert self.state() is Attached
        return self.said()

    def refuse(self, now: float, reason: str = "Connection refused (ECONNREFUSED)") -> None:
        """Let the call that is under way fail."""
        for conn in self.calls():
            self.node.handle(Disconnected(conn, reason), now)

    def due(self) -> float:
        due = self.node.next_timer()
        assert due is not None
        return due

    def is_lost(self) -> bool:
        return self.membership.host_lost_error is not None


# --- the way back ----------------------------------------------------------------------------------------------------


def test_member_without_a_loss_has_nothing_to_do() -> None:
    member = Member()
    assert member.membership.connected
    assert member.node.next_timer() is None
    assert not member.is_lost()


def test_host_is_called_at_once_and_then_until_it_is_given_up() -> None:
    member = Member()
    assert member.lose(5.0) is Away
    assert member.joiner.returns_to is not None
    now, calls = 5.0, 0
    while member.state() is Away:
        assert not member.is_lost()
        calls += len(member._dialed)
        member.refuse(now)
        now = member.due() if member.state() is Away else now
        member.node.handle(TimerDue(), now)
        member.said()
    assert calls > 1
    assert 5.0 + RETURN_SECONDS <= now < 5.0 + RETURN_SECONDS + 2 * RETRY_SECONDS
    assert member.state() is Detached
    assert "reset" in str(member.membership.host_lost_error)
    assert member.node.next_timer() is None


def test_host_is_not_called_again_while_a_call_is_under_way() -> None:
    member = Member()
    member.lose(5.0)
    assert len(member.calls()) == 1
    member.node.handle(TimerDue(), 5.2)
    assert (member.calls(), member.state()) == ([], Away)


def test_loss_is_forgotten_with_the_seat_that_the_host_gives_again() -> None:
    member = Member()
    member.lose(5.0)
    member.return_to_host(6.0)
    assert member.state() is Joining
    assert member.membership.connected
    member.hear(JOINED, 6.0)
    assert (member.state(), member.membership.loss) == (Attached, "")
    assert member.joiner.session is not None
    assert member.joiner.session.token == TOKEN
    assert member.said() == []


def test_joined_without_join_changes_nothing() -> None:
    member = Member()
    member.hear(JOINED, 1.0)
    assert member.state() is Attached
    assert member.joiner.session is not None
    assert member.joiner.session.token == b""


@pytest.mark.parametrize("again", [False, True], ids=["connected", "on the way back"])
def test_refused_member_has_no_host(again: bool) -> None:
    member = Member()
    if again:
        member.lose(5.0)
        member.return_to_host(6.0)
    member.hear(frames.Refused(reason="running"), 6.0)
    assert member.membership.host_gone
    assert member.is_lost() is again


def test_host_that_refuses_is_given_up_when_its_time_is_over() -> None:
    early, late = Member(), Member()
    for member in (early, late):
        member.lose(5.0)
    early.refuse(5.0 + RETURN_SECONDS - 0.1)
    late.refuse(5.0 + RETURN_SECONDS)
    assert (early.state(), late.state()) == (Away, Detached)


@pytest.mark.parametrize(("reason", "told"), [("it has done its work", "it has done its work"), ("", "no reason")])
def test_host_that_has_said_good_bye_is_given_up_at_once(reason: str, told: str) -> None:
    member = Member()
    member.hear(frames.Closed(session=SESSION, reason=reason), 4.0)
    assert member.lose(5.0) is Detached
    assert member.calls() == []
    assert told in member.membership.loss
    assert "reset" not in member.membership.loss
    assert member.is_lost()


# --- READY -----------------------------------------------------------------------------------------------------------


def test_loss_after_ready_is_no_error() -> None:
    member = Member()
    member.membership.ready(1.0)
    assert member.said() == [READY]
    assert member.lose(1.0 + READY_HEARD_SECONDS) is Detached
    assert member.calls() == []
    assert not member.is_lost()


def test_member_comes_back_until_its_ready_was_certainly_heard() -> None:
    member = Member()
    member.membership.ready(1.0)
    lost_at = 1.0
    for _ in range(2):
        lost_at += READY_HEARD_SECONDS - 0.1
        assert member.lose(lost_at) is Away
        assert member.come_back(lost_at) == [READY]
    assert member.lose(lost_at + READY_HEARD_SECONDS) is Detached


def test_loss_at_any_time_before_ready_calls_the_host() -> None:
    assert Member().lose(1e6) is Away


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
    member.hear(JOINED, 6.1)
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


@pytest.mark.parametrize("state", [Attached, Away, Joining])
def test_roster_is_asked_for_again_by_a_member_that_comes_back(state: type) -> None:
    member = Member()
    if state is not Attached:
        member.lose(5.0)
    if state is Joining:
        member.return_to_host(6.0)
    member.membership.ask_roster()
    assert member.said() == ([] if state is Away else [ASK])
    if state is Joining:
        member.hear(JOINED, 6.0)
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
    assert failed.said() == [structs.replace(LEAVE, failed=True)]


def test_long_reason_fits_into_the_good_bye() -> None:
    member = Member()
    member.membership.leave("x" * 5000, 1.0, failed=True)
    (leave,) = member.said()
    assert leave.reason == "x" * frames.MAX_TEXT_CHARACTERS


def test_host_that_does_not_answer_the_good_bye_in_time_is_called_again() -> None:
    member = Member()
    member.membership.leave("done", 1.0)
    assert member.membership.leaving
    assert member.due() == 1.0 + ANSWER_SECONDS
    member.hear(frames.Pong(), 1.5)
    assert member.due() == 1.5 + ANSWER_SECONDS
    member.node.handle(TimerDue(), member.due() - 0.01)
    assert member.state() is Attached
    member.node.handle(TimerDue(), member.due())
    assert member.state() is Away
    member.return_to_host(4.5)
    assert member.due() == 4.5 + ANSWER_SECONDS


def test_good_bye_is_said_again_to_a_host_that_has_not_answered() -> None:
    member = Member()
    member.membership.ready(1.0)
    member.membership.leave("done", 2.0)
    member.said()
    assert member.lose(2.0 + READY_HEARD_SECONDS) is Away, "READY was heard, but not the good-bye"
    assert member.come_back(20.0) == [READY, LEAVE]


def test_member_that_leaves_calls_a_host_for_as_long_as_it_is_left_to() -> None:
    member = Member()
    member.membership.leave("done", 2.0)
    member.lose(5.0)
    for now in (6.0, 5.0 + 2 * RETURN_SECONDS):
        member.refuse(now, "No route to host")
        member.node.handle(TimerDue(), member.due())
    assert member.state() is Away
    assert member.membership.leaving
    member.node.close("closed")
    assert not member.membership.leaving
    assert member.state() is Detached
    assert member.node.next_timer() is None


def test_answer_to_the_good_bye_ends_it() -> None:
    member = Member()
    member.membership.leave("done", 2.0)
    member.said()
    member.hear(frames.Closed(session=SESSION, reason="it has left"), 3.0)
    assert not member.membership.leaving
    assert member.node.next_timer() is None
    member.node.close("closed")
    assert member.said() == []


@pytest.mark.parametrize("left", [False, True])
def test_last_good_bye_repeats_the_reason_that_was_given(left: bool) -> None:
    member = Member()
    member.membership.ready(1.0)
    if left:
        member.membership.leave("done", 2.0)
    member.said()
    member.node.close("its process ends")
    (leave,) = member.said()
    assert leave.reason == ("done" if left else "its process ends")
    member.node.close("again")
    assert member.state() is Detached
    assert member.said() == []


def test_host_that_has_refused_hears_no_good_bye() -> None:
    member = Member()
    member.membership.leave("done", 2.0)
    member.said()
    member.hear(frames.Refused(reason="running"), 3.0)
    assert not member.membership.leaving
    assert member.node.next_timer() is None
