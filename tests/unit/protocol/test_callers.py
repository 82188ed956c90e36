"""Callers: what they are told, and when they are hung up on."""

from __future__ import annotations

import itertools
import random

import pytest

from mingle.protocol.effects import Effect, Hangup, Reset, Write
from mingle.protocol.events import BytesReceived, Disconnected
from mingle.protocol.links.callers import (
    MAX_STRANGERS,
    MAX_WHEN_SEALED,
    PROOF_SECONDS,
    RANKS_SHARE,
    ROOM_SECONDS,
    STRANGERS_SHARE,
    Caller,
    Callers,
)
from mingle.protocol.links.handshake import Call, HandshakeFailed, HostConversation, MemberConversation
from mingle.protocol.machine import Context
from mingle.wire import frames
from mingle.wire.frames import ProcessInfo, Purpose

SESSION = b"S" * 16
JOIN = frames.Join(world_size=4, rank=1, node="B", who=ProcessInfo(hostname="node-B", pid=66, address="10.0.0.2"))


class Called:
    """A port that is called, and its callers' side."""

    def __init__(self, expected: int = 0) -> None:
        self.gone: list[int] = []
        self.heard: list[frames.AnyFrame] = []
        self.free = 1_000_000
        self.unsent: dict[int, int] = {}
        context = Context(
            key=None,
            new_id=itertools.count(1).__next__,
            rng=random.Random(1),
            timeout=60.0,
            free_files=lambda: self.free - len(self.callers.connections()),
            unsent=lambda conn: self.unsent.get(conn, 0),
        )
        self.links = context.links
        self.callers = Callers(self, context, expected=expected)
        self.members: dict[int, MemberConversation] = {}
        self.said: dict[int, list[frames.AnyFrame]] = {}

    def conversation(self) -> HostConversation:
        return HostConversation(job="job", attempt="", session=SESSION, addresses=("10.0.0.1",), port=4000)

    def caller_proved(self, caller: Caller, now: float) -> None:
        pass

    def caller_said(self, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        self.heard.append(frame)

    def caller_lost(self, caller: Caller, reason: str, now: float) -> None:
        self.gone.append(caller.conn)

    def call(
        self,
        conn: int,
        *,
        purpose: Purpose = "join",
        session: bytes = SESSION,
        source: str | None = None,
        now: float = 0.0,
    ) -> None:
        call = Call(job="job", member=b"M" * 16, session=session, purpose=purpose)
        self.members[conn], self.said[conn] = MemberConversation(call, ("10.0.0.1", 4000)), []
        self.callers.accepted(conn, source or f"10.0.0.{conn}", now)

    def say(self, conn: int, now: float = 0.0) -> list[frames.AnyFrame]:
        self.heard.clear()
        self.links.handle(BytesReceived(conn, self.members[conn].data_to_send()), now)
        return list(self.heard)

    def prove(self, conn: int, now: float = 0.0) -> list[frames.AnyFrame]:
        self.say(conn, now)
        self.carry()
        return self.say(conn, now)

    def carry(self) -> list[Effect]:
        """What was written arrives."""
        done = self.links.take_effects()
        for effect in done:
            if isinstance(effect, Write):
                self.said[effect.conn] += self.members[effect.conn].receive_data(effect.data)
        return done


def test_frames_of_a_turn_are_written_together_in_order_of_connection() -> None:
    called = Called()
    for conn in (2, 1):
        called.call(conn)
        called.prove(conn)
    called.carry()
    for number in (7, 8):
        for conn in (2, 1):
            called.callers.send(conn, frames.Pong(number=number))
    assert [(type(effect), effect.conn) for effect in called.carry() if isinstance(effect, Write)] == [
        (Write, 1),
        (Write, 2),
    ]
    assert called.said[1] == [frames.Pong(number=7), frames.Pong(number=8)]
    assert called.carry() == []


def test_proved_asking_caller_has_no_deadline() -> None:
    called = Called()
    called.call(1, purpose="probe", now=1.0)
    assert called.callers.next_timer() == 1.0 + PROOF_SECONDS
    called.prove(1)
    assert called.callers.next_timer() is None
    called.callers.handle_timer(99.0)
    assert 1 in called.callers


@pytest.mark.parametrize("asks", [False, True])
def test_proved_joining_caller_must_send_join_in_time(asks: bool) -> None:
    called = Called()
    called.call(1, now=1.0)
    called.prove(1, now=2.0)
    called.carry()
    assert called.callers.next_timer() == 2.0 + PROOF_SECONDS
    if asks:
        called.members[1].send(JOIN)
        called.say(1, now=3.0)
        assert called.callers.next_timer() is None
    called.callers.handle_timer(2.0 + PROOF_SECONDS)
    assert (1 in called.callers) is asks


def test_probing_caller_gains_nothing_by_sending_join() -> None:
    called = Called()
    called.call(0, purpose="probe")
    called.prove(0)
    called.members[0].send(JOIN)
    called.say(0)
    for conn in range(1, MAX_STRANGERS + 1):
        called.call(conn, purpose="probe", source="10.0.0.0")
        called.prove(conn)
    assert 0 not in called.callers


@pytest.mark.parametrize("purpose", ["probe", "conflict", "join"])
def test_without_a_seat_no_more_are_kept_than_there_is_room_for(purpose: Purpose) -> None:
    called = Called(expected=5)
    called.call(0, source="10.9.9.9", purpose="probe")
    called.prove(0)
    room = MAX_STRANGERS + 5
    for conn in range(1, room + 2):
        called.call(conn, purpose=purpose, source="10.0.0.1")
        called.prove(conn)
    assert called.callers.connections() == [0, *range(3, room + 2)]
    assert 1 not in called.links


def test_only_those_whose_time_is_over_are_hung_up_on() -> None:
    called = Called()
    called.call(1, now=1.0)
    called.call(2, now=1.5)
    called.carry()
    called.callers.handle_timer(1.0 + PROOF_SECONDS)
    assert called.links.effects == [Hangup(1)]
    assert called.callers.connections() == [2]
    assert called.callers.next_timer() == 1.5 + PROOF_SECONDS


def test_a_flood_pushes_out_its_own_and_nobody_who_has_proved_itself() -> None:
    called = Called()
    called.call(1, source="10.0.2.9")
    called.prove(1)
    called.carry()
    for conn in range(2, MAX_STRANGERS + 3):
        called.callers.accepted(conn, f"10.0.{conn % 3}.9", 0.0)
    assert [effect for effect in called.links.effects if not isinstance(effect, Write)] == [Hangup(2)]
    assert 1 in called.callers


def test_a_displaced_caller_that_does_not_read_holds_no_descriptor() -> None:
    called = Called()
    called.unsent = {2: 10_000}
    for conn in range(1, 4):
        called.call(conn, purpose="probe", source="10.0.0.9")
        called.prove(conn)
    called.carry()
    called.free = -len(called.callers.connections())
    called.call(4, purpose="probe", source="10.0.0.9", now=ROOM_SECONDS)
    called.prove(4, now=ROOM_SECONDS)
    ended = [effect for effect in called.carry() if not isinstance(effect, Write)]
    assert ended == [Hangup(1), Reset(2), Hangup(3)]


def test_of_a_flood_and_a_node_with_many_ranks_each_keeps_its_share() -> None:
    called = Called()
    called.callers.expect(0, sealed=True)
    for conn in range(8):
        called.call(conn, source="10.0.0.1")
    for conn in range(8, 2000):
        called.callers.accepted(conn, f"10.0.1.{conn % 15}", 0.0)
    assert [conn in called.callers for conn in range(8)] == [False] * 4 + [True] * (MAX_WHEN_SEALED // 16)


@pytest.mark.parametrize("addresses", [1, 2, 20])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_flood_from_some_addresses_pushes_out_nobody_else(addresses: int, sealed: bool) -> None:
    """However many come between a latecomer's connection and its first words."""
    called = Called()
    called.callers.expect(0, sealed=sealed)
    called.call(1, source="10.0.0.1")
    for conn in range(2, 3 * MAX_STRANGERS):
        called.callers.accepted(conn, f"10.0.1.{conn % addresses}", 0.0)
    assert 1 in called.callers
    assert len(called.callers.connections()) == (MAX_WHEN_SEALED if sealed else MAX_STRANGERS)
    called.callers.handle_timer(PROOF_SECONDS)
    assert called.callers.connections() == []
    assert called.callers.next_timer() is None


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("purpose", [None, "probe"])
def test_strangers_leave_most_descriptors_to_the_process(purpose: Purpose | None, sealed: bool) -> None:
    """However many come and from wherever, whether they prove themselves or not."""
    called = Called(expected=300)
    called.free = 800
    called.callers.expect(300, sealed=sealed)  # agents: a sealed session has free seats
    for conn in range(2_000):
        called.call(conn, purpose=purpose or "join")
        if purpose is not None:
            called.prove(conn)
        called.carry()
    ranks = 0 if sealed and purpose is None else 800 // RANKS_SHARE
    strangers = min(MAX_WHEN_SEALED, 100) if sealed else 800 // STRANGERS_SHARE
    assert len(called.callers.connections()) == strangers + ranks
    assert called.callers.connections()[-1] == 1_999, "the newest stays"


def test_of_both_kinds_together_a_quarter_is_left() -> None:
    called = Called(expected=1_000)
    called.free = 800
    for conn in range(1_000):
        called.call(conn, purpose="probe")
        called.prove(conn)
        called.carry()
    for conn in range(1_000, 2_000):
        called.call(conn)
    assert len(called.callers.connections()) <= 600


def test_descriptors_opened_elsewhere_reduce_the_room_for_callers() -> None:
    called = Called()
    called.free = 800
    for conn in range(100):
        called.call(conn)
    called.free = 80
    called.call(100, now=ROOM_SECONDS)
    assert called.callers.connections() == list(range(91, 101))


def test_with_nothing_free_the_last_caller_is_still_heard() -> None:
    called = Called()
    called.free = 0
    for conn in (1, 2):
        called.call(conn)
    assert called.callers.connections() == [2]


def test_frames_are_written_before_the_hangup() -> None:
    called = Called()
    called.call(1)
    called.prove(1)
    called.carry()
    called.callers.send(1, frames.Pong(number=5))
    called.callers.hang_up(1)
    assert [type(effect) for effect in called.carry()] == [Write, Hangup]
    assert called.said[1] == [frames.Pong(number=5)]


def test_frames_and_hangups_for_a_gone_caller_do_nothing() -> None:
    called = Called()
    called.call(1)
    called.links.handle(Disconnected(1, "closed"), 0.0)
    called.callers.send(1, frames.Ping())
    called.callers.hang_up(1)
    assert called.carry() == []
    assert 1 not in called.callers


def test_end_of_a_connection_from_outside_is_reported_once() -> None:
    called = Called()
    for conn in (1, 2, 3, 4):
        called.call(conn)
    called.links.handle(Disconnected(1, "closed"), 0.0)
    called.callers.hang_up(2)
    called.links.handle(BytesReceived(3, b"GET / HTTP/1.1"), 0.0)
    called.callers.handle_timer(PROOF_SECONDS)
    called.links.handle(Disconnected(4, "closed"), PROOF_SECONDS)
    assert called.gone == [1, 3], "the process knows of those on which it has hung up"


def test_a_caller_of_another_session_hears_why_it_is_dropped() -> None:
    called = Called()
    called.call(1, session=b"T" * 16)
    called.say(1)
    assert called.gone == [1]
    with pytest.raises(HandshakeFailed, match="another session"):
        called.carry()


@pytest.mark.parametrize(("purpose", "asks"), [("probe", True), ("conflict", False), ("join", False)])
def test_asking_caller_is_known_by_its_call(purpose: Purpose, asks: bool) -> None:
    called = Called()
    called.call(1, purpose=purpose)
    assert not called.callers[1].asks_only
    called.say(1)
    assert called.callers[1].asks_only is asks


def test_a_caller_does_not_choose_the_address_that_others_are_shown() -> None:
    called = Called()
    called.call(1)
    shown = called.callers[1].as_seen(ProcessInfo(hostname="h", pid=1, address="192.0.2.1"))
    assert shown == ProcessInfo(hostname="h", pid=1, address="10.0.0.1")
