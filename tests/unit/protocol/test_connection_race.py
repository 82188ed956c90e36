"""The race for a session: who is dialed when, what wins, and what is counted as silence."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec import structs

from mingle.protocol.effects import Dial, Effect, Hangup, Write
from mingle.protocol.events import BytesReceived, Connected, ConnectionEvent, Disconnected
from mingle.protocol.links.handshake import Call, HandshakeFailed, HostConversation
from mingle.protocol.links.race import (
    ADDRESS_SECONDS,
    FAILURE_SECONDS,
    MAX_TARGETS,
    STAGGER_SECONDS,
    Attempt,
    ConnectionRace,
    DialTarget,
    RaceState,
    merged,
    named,
)
from mingle.protocol.machine import Context
from mingle.wire.datagrams import Offer, Rejected
from mingle.wire.frames import Ping

SESSION = b"S" * 16
FIRST, SECOND, THIRD = "10.0.0.1", "10.1.0.1", "172.17.0.1"


CALL = Call(job="job", member=b"M" * 16, session=SESSION, purpose="join")


class Race:
    """A race and the hosts at its addresses."""

    def __init__(self, *addresses: str, all_ways: bool = False) -> None:
        self.context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.links, self.effects = self.context.links, self.context.links.effects
        self.received: list[object] = []
        self.race = self.begin(
            structs.replace(CALL, purpose="join" if all_ways else "probe"),
            [DialTarget(address, "eth0", 4000) for address in addresses],
        )

    def begin(self, call: Call, targets: list[DialTarget]) -> ConnectionRace:
        return ConnectionRace(call, targets, key=None, context=self.context, handler=self._handle, now=0.0)

    def _handle(self, attempt: Attempt, event: ConnectionEvent, now: float) -> None:
        match event:
            case Connected():
                attempt.race.connected(attempt, event)
            case BytesReceived(_, untrusted):
                self.received += attempt.race.received(attempt, untrusted, now)
            case Disconnected(_, reason):
                attempt.race.disconnected(attempt, reason, now)

    def pending(self) -> bool:
        return self.race.pending

    def winner(self) -> int | None:
        return None if self.race.winner is None else self.race.winner.conn

    def state(self) -> RaceState:
        return self.race.state

    def done(self) -> list[Effect]:
        return self.links.take_effects()

    def dialed(self) -> list[str]:
        return [effect.address for effect in self.done() if isinstance(effect, Dial)]

    def answer(self, conn: int, now: float, session: bytes = SESSION) -> list[object]:
        """Connect, and have the host at the other end answer."""
        self.links.handle(Connected(conn, "10.0.0.9", "eth0"), now)
        (write,) = [effect for effect in self.done() if isinstance(effect, Write) and effect.conn == conn]
        host = HostConversation(job="job", attempt="", session=session, addresses=(FIRST, SECOND, THIRD), port=4000)
        try:
            host.receive_data(write.data)
        except HandshakeFailed:
            assert session != SESSION
        host.send(Ping())
        self.received.clear()
        self.links.handle(BytesReceived(conn, host.data_to_send()), now)
        return list(self.received)


def test_addresses_are_dialed_one_after_the_other() -> None:
    race = Race(FIRST, SECOND, THIRD)
    assert race.dialed() == [FIRST]
    assert race.race.next_timer() == STAGGER_SECONDS
    race.race.handle_timer(STAGGER_SECONDS)
    assert race.dialed() == [SECOND]
    race.race.handle_timer(2 * STAGGER_SECONDS)
    assert race.dialed() == [THIRD]
    assert race.race.next_timer() == ADDRESS_SECONDS


def test_a_failure_lets_the_next_one_start_at_once() -> None:
    race = Race(FIRST, SECOND)
    race.done()
    race.links.handle(Disconnected(1, "Connection refused"), 0.01)
    assert race.dialed() == [SECOND]
    assert race.race.failures == {FIRST: "Connection refused"}


def test_the_first_that_proves_the_session_wins_and_the_others_are_hung_up() -> None:
    race = Race(FIRST, SECOND)
    race.race.handle_timer(STAGGER_SECONDS)
    race.done()
    assert race.answer(2, 0.1) == [Ping()]
    assert race.state() is RaceState.PROVED
    assert race.winner() == 2
    assert Hangup(1) in race.done()
    assert set(race.race.paths) == {SECOND}
    assert not race.pending()


def test_answer_for_another_session_does_not_win() -> None:
    race = Race(FIRST)
    race.done()
    assert race.answer(1, 0.1, session=b"X" * 16) == []
    assert race.state() is RaceState.DEAD
    assert race.race.failures[FIRST].startswith("session")


def test_foreign_protocol_does_not_win() -> None:
    race = Race(FIRST)
    race.links.handle(Connected(1, "10.0.0.9", "eth0"), 0.0)
    race.links.handle(BytesReceived(1, b"HTTP/1.1 400 Bad Request\r\n"), 0.1)
    assert race.state() is RaceState.DEAD


@pytest.mark.parametrize("first_is", ["refused", "silent"])
def test_silence_is_not_death(first_is: str) -> None:
    race = Race(FIRST)
    if first_is == "refused":
        race.links.handle(Disconnected(1, "Connection refused"), 0.1)
        assert race.state() is RaceState.DEAD
    else:
        race.race.handle_timer(ADDRESS_SECONDS)
        assert race.state() is RaceState.SILENT
        assert Hangup(1) in race.done()
    assert race.race.next_timer() is None


def test_all_ways_are_tried_after_the_win_and_then_hung_up() -> None:
    race = Race(FIRST, SECOND, THIRD, all_ways=True)
    race.done()
    race.answer(1, 0.01)
    assert race.pending()
    assert race.dialed() == [SECOND, THIRD]
    race.answer(2, 0.02)
    assert Hangup(2) in race.done()
    assert race.winner() == 1
    race.race.handle_timer(0.01 + ADDRESS_SECONDS)
    assert not race.pending()
    assert set(race.race.paths) == {FIRST, SECOND}
    assert race.state() is RaceState.PROVED


def test_further_addresses_are_taken_in_once() -> None:
    race = Race(FIRST, all_ways=True)
    race.answer(1, 0.01)
    race.done()
    for _ in range(2):
        race.race.add([DialTarget(FIRST, "eth0", 4000), DialTarget(SECOND, "eth1", 4000)])
    due = race.race.next_timer()
    assert due is not None
    race.race.handle_timer(max(due, 0.02))
    assert race.dialed() == [SECOND]


def test_ways_are_proved_again() -> None:
    race = Race(FIRST, SECOND, all_ways=True)
    race.answer(1, 0.01)
    race.answer(2, 0.02)
    race.done()
    race.race.prove_again(5.0)
    assert set(race.race.paths) == {FIRST}
    assert race.dialed() == [SECOND]
    race.race.handle_timer(5.0 + ADDRESS_SECONDS)
    assert set(race.race.paths) == {FIRST}
    assert not race.pending()


def test_the_winner_may_still_break_the_rules() -> None:
    race = Race(FIRST)
    race.answer(1, 0.01)
    with pytest.raises(Rejected):
        race.links.handle(BytesReceived(1, b"\x00\x00\x00\x01\xc1"), 0.02)
    race.links.handle(Disconnected(1, "reset"), 0.03)
    assert race.winner() is None
    assert race.state() is RaceState.DEAD


def test_abandoned_race_leaves_nothing_open() -> None:
    race = Race(FIRST, SECOND)
    race.race.handle_timer(STAGGER_SECONDS)
    race.done()
    race.race.abandon()
    assert race.done() == [Hangup(1), Hangup(2)]
    assert not race.race.dialing
    assert race.race.next_timer() is None


def test_old_failure_is_tried_again_and_recent_one_is_not() -> None:
    race = Race(FIRST, SECOND, THIRD, all_ways=True)
    race.answer(1, 0.01)
    race.done()
    race.links.handle(Disconnected(2, "No route to host"), 0.02)
    race.links.handle(Disconnected(3, "Connection refused"), FAILURE_SECONDS)
    race.race.try_again(FAILURE_SECONDS + 0.1)
    assert race.dialed() == [SECOND]
    race.answer(4, FAILURE_SECONDS + 0.2)
    assert set(race.race.paths) == {FIRST, SECOND}
    race.done()
    race.race.try_again(FAILURE_SECONDS + 0.3)
    assert race.dialed() == []


def test_a_way_over_another_network_is_marked() -> None:
    race = Race(FIRST, all_ways=True)
    race.links.handle(Connected(1, "10.0.0.9", "eth0", weak=True), 0.0)
    host = HostConversation(job="job", attempt="", session=SESSION, addresses=(FIRST,), port=4000)
    (write,) = [effect for effect in race.done() if isinstance(effect, Write)]
    host.receive_data(write.data)
    race.links.handle(BytesReceived(1, host.data_to_send()), 0.1)
    assert race.race.paths[FIRST].weak
    assert race.race.address == FIRST
    race.done()
    # An interface on that network may have come meanwhile: the way is proved anew, the connection stays.
    race.race.prove_again(5.0)
    assert race.dialed() == [FIRST]
    assert race.race.paths[FIRST].weak
    race.answer(2, 5.1)
    assert not race.race.paths[FIRST].weak
    assert race.winner() == 1


def test_one_address_is_tried_at_every_port_that_was_named_with_it() -> None:
    """A forged OFFER names the right session at the wrong port; the host's own comes while the race is on."""
    race = Race(FIRST)
    race.race.add([DialTarget(FIRST, "eth0", 5000)])
    race.links.handle(Disconnected(1, "refused"), 0.01)
    assert [(effect.address, effect.port) for effect in race.done() if isinstance(effect, Dial)] == [
        (FIRST, 4000),
        (FIRST, 5000),
    ]


def test_invented_addresses_do_not_make_a_race_endless() -> None:
    race = Race(FIRST)
    race.race.add([DialTarget(f"10.0.{number}.1", "eth0", 4000) for number in range(200)])
    for tick in range(200):
        race.race.handle_timer(tick * STAGGER_SECONDS)
    assert len(race.dialed()) == MAX_TARGETS


STRANGER = "10.0.0.66"


def test_address_that_its_host_has_named_stays_named_by_the_host() -> None:
    """The budget of others that name it, too, must not delay the host."""
    own, claimed = DialTarget(FIRST, "eth0", 4000, FIRST), DialTarget(FIRST, "eth0", 4000, STRANGER)
    assert merged([claimed], [own]) == [own]
    assert merged([own], [claimed]) == [own]
    for named_by in ([own, claimed], [claimed, own]):
        race = Race(SECOND)
        while race.context.dials.take(THIRD, STRANGER, 0.0) == 0:
            pass
        for each in named_by:
            race.race.add([each])
        race.race.handle_timer(STAGGER_SECONDS)
        assert race.dialed() == [SECOND, FIRST]


def test_session_that_proves_itself_costs_its_sender_nothing() -> None:
    race = Race()
    for _ in range(100):
        race.race = race.begin(CALL, [DialTarget(FIRST, "eth0", 4000, STRANGER)])
        (dial,) = race.effects
        assert isinstance(dial, Dial)
        race.answer(dial.conn, 0.0)
        race.race.abandon()
        race.done()


def test_address_that_is_proved_again_is_dialed_once() -> None:
    race = Race(FIRST, SECOND, all_ways=True)
    race.answer(1, 0.01)
    race.done()
    race.links.handle(Disconnected(2, "No route to host"), 0.02)
    race.race.prove_again(FAILURE_SECONDS + 0.1)
    assert race.dialed() == [SECOND]
    race.race.try_again(FAILURE_SECONDS + 0.2)
    assert race.dialed() == []


def test_earlier_targets_are_kept() -> None:
    def offer(address: str, port: int) -> Offer:
        return Offer(job="job", session=SESSION, host=b"H" * 16, addresses=(address,), port=port, world_size=2)

    known = named(offer(FIRST, 4000), "eth0")
    both = merged(named(offer(FIRST, 5000), "eth1"), known)
    assert [(each.interface, each.port) for each in both] == [("eth1", 5000), ("eth0", 4000)]
    assert merged(named(offer(FIRST, 4000), "eth1"), both) == [DialTarget(FIRST, "eth1", 4000), both[0]]
    for port in range(1, 200):
        both = merged(named(offer(SECOND, port), "eth0"), both)
    assert len(both) == MAX_TARGETS


def test_host_is_not_reached_if_nothing_answered_at_its_first_address() -> None:
    for first in ("fe80::1", FIRST):
        race = Race(first, SECOND)
        race.links.handle(Disconnected(1, "ECONNREFUSED"), 0.1)
        race.links.handle(Disconnected(2, "EHOSTUNREACH"), 0.2)
        assert race.state() is RaceState.DEAD
        shown = f"{SECOND} EHOSTUNREACH" if first == "fe80::1" else f"{FIRST} ECONNREFUSED"
        assert race.race.unreached == shown


def test_host_is_reached_if_something_answered_there() -> None:
    for answers in ("another session", "an end"):
        race = Race(FIRST)
        if answers == "an end":
            race.links.handle(Connected(1, "10.0.0.9", "eth0"), 0.0)
            race.links.handle(Disconnected(1, "closed"), 0.1)
        else:
            race.answer(1, 0.1, b"T" * 16)
        assert race.state() is RaceState.DEAD
        assert race.race.unreached == ""
