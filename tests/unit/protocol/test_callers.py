"""Callers: what they are told, and when they are hung up on."""

from __future__ import annotations

import itertools
import random

import pytest

from mingle.protocol.effects import Effect, Hangup, Reset, Write
from mingle.protocol.events import BytesReceived, Disconnected
from mingle.protocol.links.callers import (
    GREETING_SECONDS,
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
OTHER = Call(job="job", member=b"M" * 16, session=b"T" * 16, purpose="join")
"""A call for another session."""
JOIN = frames.Join(world_size=4, rank=1, node="B", who=ProcessInfo(hostname="node-B", pid=66, address="10.0.0.2"))


class Called:
    """A port that is called, and its callers' side."""

    def __init__(self, expected: int = 0) -> None:
        self.gone: list[int] = []
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

    def conversation(self) -> HostConversation:
        return HostConversation(job="job", attempt="", session=SESSION, addresses=("10.0.0.1",), port=4000)

    def caller_proved(self, caller: Caller, now: float) -> None:
        pass

    def caller_said(self, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        pass

    def caller_lost(self, caller: Caller, reason: str, now: float) -> None:
        self.gone.append(caller.conn)

    def call(self, conn: int, purpose: Purpose = "join", *, source: str = "", now: float = 0.0) -> None:
        """Connect."""
        call = Call(job="job", member=b"M" * 16, session=SESSION, purpose=purpose)
        self.members[conn] = MemberConversation(call, ("10.0.0.1", 4000))
        self.callers.accepted(conn, source or f"10.0.0.{conn}", now)

    def say(self, conn: int, *said: frames.AnyFrame, now: float = 0.0) -> None:
        """Write what is to be written on a connection, and then these frames."""
        for frame in said:
            self.members[conn].send(frame)
        self.links.handle(BytesReceived(conn, self.members[conn].data_to_send()), now)

    def come(self, conn: int, purpose: Purpose = "join", *, source: str = "", now: float = 0.0) -> list[Effect]:
        """Connect, and prove itself."""
        self.call(conn, purpose, source=source, now=now)
        self.say(conn, now=now)
        done = self.carry()
        self.say(conn, now=now)
        return done + self.carry()

    def carry(self) -> list[Effect]:
        """What was written arrives; return what else is done."""
        done = self.links.take_effects()
        for effect in done:
            if isinstance(effect, Write):
                self.members[effect.conn].receive_data(effect.data)
        return [effect for effect in done if not isinstance(effect, Write)]


@pytest.mark.parametrize(
    ("purpose", "seconds"),
    [("probe", None), ("conflict", None), ("join", PROOF_SECONDS), ("mesh", GREETING_SECONDS)],
)
def test_a_caller_has_a_time_to_prove_itself_and_then_one_for_what_it_has_called_for(
    purpose: Purpose, seconds: float | None
) -> None:
    called = Called()
    called.call(2, now=0.5)
    assert called.callers.next_timer() == 0.5 + PROOF_SECONDS
    called.callers.hang_up(2)
    called.come(1, purpose, now=2.0)
    assert called.callers.next_timer() == (None if seconds is None else 2.0 + seconds)
    called.callers.handle_timer(99.0)
    assert (1 in called.callers) is (seconds is None)


def test_a_caller_that_has_sent_join_has_no_deadline() -> None:
    called = Called()
    called.come(1)
    called.say(1, JOIN)
    assert called.callers.next_timer() is None


def test_probing_caller_gains_nothing_by_sending_join() -> None:
    called = Called()
    called.come(0, "probe")
    called.say(0, JOIN)
    for conn in range(1, MAX_STRANGERS + 1):
        called.come(conn, "probe", source="10.0.0.0")
    assert 0 not in called.callers


@pytest.mark.parametrize("purpose", ["probe", "conflict", "join"])
def test_without_a_seat_no_more_are_kept_than_there_is_room_for(purpose: Purpose) -> None:
    called = Called(expected=5)
    called.come(0, "probe", source="10.9.9.9")
    room = MAX_STRANGERS + 5
    for conn in range(1, room + 2):
        called.come(conn, purpose, source="10.0.0.1")
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
    called.come(1, source="10.0.2.9")
    for conn in range(2, MAX_STRANGERS + 3):
        called.callers.accepted(conn, f"10.0.{conn % 3}.9", 0.0)
    assert [effect for effect in called.links.effects if not isinstance(effect, Write)] == [Hangup(2)]
    assert 1 in called.callers


def test_a_displaced_caller_that_does_not_read_holds_no_descriptor() -> None:
    called = Called()
    called.unsent = {2: 10_000}
    for conn in range(1, 4):
        called.come(conn, "probe", source="10.0.0.9")
    called.free = -len(called.callers.connections())
    assert called.come(4, "probe", source="10.0.0.9", now=ROOM_SECONDS) == [Hangup(1), Reset(2), Hangup(3)]


@pytest.mark.parametrize("addresses", [1, 20])
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
        if purpose is None:
            called.call(conn)
        else:
            called.come(conn, purpose)
    ranks = 0 if sealed and purpose is None else 800 // RANKS_SHARE
    strangers = min(MAX_WHEN_SEALED, 100) if sealed else 800 // STRANGERS_SHARE
    assert len(called.callers.connections()) == strangers + ranks
    assert called.callers.connections()[-1] == 1_999, "the newest stays"


def test_of_both_kinds_together_a_quarter_is_left() -> None:
    called = Called(expected=1_000)
    called.free = 800
    for conn in range(1_000):
        called.come(conn, "probe")
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
    called.call(1)
    called.members[1] = MemberConversation(OTHER, ("10.0.0.1", 4000))
    called.say(1)
    assert called.gone == [1]
    with pytest.raises(HandshakeFailed, match="another session"):
        called.carry()


@pytest.mark.parametrize(("purpose", "asks"), [("probe", True), ("conflict", False), ("join", False)])
def test_asking_caller_is_known_by_its_call(purpose: Purpose, asks: bool) -> None:
    called = Called()
    called.call(1, purpose)
    assert not called.callers[1].asks_only
    called.say(1)
    assert called.callers[1].asks_only is asks


def test_a_caller_does_not_choose_the_address_that_others_are_shown() -> None:
    called = Called()
    called.call(1)
    shown = called.callers[1].as_seen(ProcessInfo(hostname="h", pid=1, address="192.0.2.1"))
    assert shown == ProcessInfo(hostname="h", pid=1, address="10.0.0.1")
