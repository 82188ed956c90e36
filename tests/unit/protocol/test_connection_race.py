"""The race for a session: who is dialed when, what wins, and what is counted as silence."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest

from mingle.protocol.effects import Dial, Hangup, Write
from mingle.protocol.events import BytesReceived, Connected, ConnectionEvent, Disconnected
from mingle.protocol.links.handshake import HandshakeFailed, HostConversation
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
from mingle.wire import frames
from mingle.wire.datagrams import Offer, Rejected
from tests.support.scripted_host import IDENTITY, OTHER, SESSION

FIRST, SECOND, THIRD = "10.0.0.1", "10.1.0.1", "172.17.0.1"
STRANGER = "10.0.0.66"


def target(address: str, sender: str = "", *, port: int = 4000) -> DialTarget:
    return DialTarget(address, "eth0", port, sender)


class Race:
    """A race and the hosts at its addresses; its connections are numbered from 1."""

    def __init__(self, *addresses: str, all_ways: bool = False) -> None:
        self.context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.links = self.context.links
        self.received: list[object] = []
        self.race = self.begin("join" if all_ways else "probe", *map(target, addresses))

    def begin(self, purpose: frames.Purpose, *targets: DialTarget) -> ConnectionRace:
        call = IDENTITY.call(SESSION, purpose)
        return ConnectionRace(call, targets, key=None, context=self.context, handler=self._handle, now=0.0)

    def _handle(self, attempt: Attempt, event: ConnectionEvent, now: float) -> None:
        match event:
            case Connected():
                attempt.race.connected(attempt, event)
            case BytesReceived(_, untrusted):
                self.received += attempt.race.received(attempt, untrusted, now)
            case Disconnected(_, reason):
                attempt.race.disconnected(attempt, reason, now)

    def dials(self) -> list[Dial]:
        """The connections that are begun since the last time."""
        return [effect for effect in self.links.take_effects() if isinstance(effect, Dial)]

    def dialed(self) -> list[str]:
        return [dial.address for dial in self.dials()]

    def answer(self, conn: int, now: float, session: bytes = SESSION, *, weak: bool = False) -> None:
        """Connect, and have the host at the other end answer, and say PING."""
        self.links.handle(Connected(conn, "10.0.0.9", "eth0", weak=weak), now)
        host = HostConversation(job="job", attempt="", session=session, addresses=(FIRST, SECOND, THIRD), port=4000)
        with contextlib.suppress(HandshakeFailed):  # the host of another session refuses the call, and says so
            for effect in self.links.take_effects():
                if isinstance(effect, Write) and effect.conn == conn:
                    host.receive_data(effect.data)
        host.send(frames.Ping())
        self.links.handle(BytesReceived(conn, host.data_to_send()), now)

    def fail(self, conn: int, now: float, reason: str = "No route to host") -> None:
        self.links.handle(Disconnected(conn, reason), now)

    def hung_up(self) -> list[int]:
        return [effect.conn for effect in self.links.take_effects() if isinstance(effect, Hangup)]

    @property
    def proved(self) -> set[str]:
        """The addresses that were proved."""
        return set(self.race.paths)


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
    race.dialed()
    race.fail(1, 0.01)
    assert race.dialed() == [SECOND]
    assert race.race.failures == {FIRST: "No route to host"}


def test_the_first_that_proves_the_session_wins_and_the_others_are_hung_up() -> None:
    race = Race(FIRST, SECOND)
    race.race.handle_timer(STAGGER_SECONDS)
    race.answer(2, 0.1)
    assert race.received == [frames.Ping()]
    assert race.race.state is RaceState.PROVED
    assert race.race.address == SECOND
    assert race.hung_up() == [1]
    assert race.proved == {SECOND}
    assert not race.race.pending


@pytest.mark.parametrize(
    ("end", "state", "unreached"),
    [
        ("refused", RaceState.DEAD, f"{FIRST} ECONNREFUSED"),
        ("silent", RaceState.SILENT, f"{FIRST} no answer within 1 s"),
        ("another session", RaceState.DEAD, ""),
        ("another protocol", RaceState.DEAD, ""),
        ("closed before the proof", RaceState.DEAD, ""),
    ],
)
def test_silence_is_not_death_and_what_answers_is_reached(end: str, state: RaceState, unreached: str) -> None:
    race = Race(FIRST)
    if end == "refused":
        race.fail(1, 0.1, "ECONNREFUSED")
    elif end == "silent":
        race.race.handle_timer(ADDRESS_SECONDS)
    elif end == "another session":
        race.answer(1, 0.1, OTHER)
    else:
        race.links.handle(Connected(1, "10.0.0.9", "eth0"), 0.0)
        http = BytesReceived(1, b"HTTP/1.1 400 Bad Request\r\n")
        race.links.handle(http if end == "another protocol" else Disconnected(1, "closed"), 0.1)
    assert race.race.state is state
    assert race.race.unreached == unreached
    assert race.proved == set()
    assert race.race.next_timer() is None
    assert 1 not in race.links


@pytest.mark.parametrize(("first", "shown"), [("fe80::1", f"{SECOND} no route"), (FIRST, f"{FIRST} refused")])
def test_of_the_addresses_that_are_not_reached_the_first_is_shown_that_is_not_link_local(
    first: str, shown: str
) -> None:
    race = Race(first, SECOND)
    race.fail(1, 0.1, "refused")
    race.fail(2, 0.2, "no route")
    assert race.race.unreached == shown


def test_all_ways_are_tried_after_the_win_and_then_hung_up() -> None:
    race = Race(FIRST, SECOND, THIRD, all_ways=True)
    race.answer(1, 0.01)
    assert race.race.pending
    assert race.dialed() == [SECOND, THIRD]
    race.answer(2, 0.02)
    assert race.hung_up() == [2]
    race.race.handle_timer(0.01 + ADDRESS_SECONDS)
    assert not race.race.pending
    assert race.proved == {FIRST, SECOND}
    assert race.race.address == FIRST


def test_further_addresses_are_taken_in_once() -> None:
    race = Race(FIRST, all_ways=True)
    race.answer(1, 0.01)
    for _ in range(2):
        race.race.add([target(FIRST), target(SECOND)])
    assert race.race.next_timer() is not None
    race.race.handle_timer(0.02)
    assert race.dialed() == [SECOND]


def test_the_winner_may_still_break_the_rules() -> None:
    race = Race(FIRST)
    race.answer(1, 0.01)
    with pytest.raises(Rejected):
        race.links.handle(BytesReceived(1, b"\x00\x00\x00\x01\xc1"), 0.02)
    race.fail(1, 0.03)
    assert race.race.address is None
    assert race.race.state is RaceState.DEAD


def test_abandoned_race_leaves_nothing_open() -> None:
    race = Race(FIRST, SECOND)
    race.race.handle_timer(STAGGER_SECONDS)
    race.race.abandon()
    assert race.hung_up() == [1, 2]
    assert not race.race.dialing
    assert race.race.next_timer() is None


# --- paths that are proved again --------------------------------------------------------------------------------------


def test_ways_are_proved_again() -> None:
    race = Race(FIRST, SECOND, all_ways=True)
    race.answer(1, 0.01)
    race.answer(2, 0.02)
    race.race.prove_again(5.0)
    assert race.proved == {FIRST}
    assert race.dialed() == [SECOND]
    race.race.handle_timer(5.0 + ADDRESS_SECONDS)
    assert race.proved == {FIRST}
    assert not race.race.pending


def test_a_way_over_another_network_is_proved_anew_beside_the_connection() -> None:
    """An interface on that network may have come meanwhile."""
    race = Race(FIRST, all_ways=True)
    race.answer(1, 0.0, weak=True)
    race.race.prove_again(5.0)
    assert race.dialed() == [FIRST]
    assert race.race.paths[FIRST].weak
    race.answer(2, 5.1)
    assert not race.race.paths[FIRST].weak
    assert 1 in race.links
    assert race.hung_up() == [2]


def test_old_failure_is_tried_again_and_recent_one_is_not() -> None:
    race = Race(FIRST, SECOND, THIRD, all_ways=True)
    race.answer(1, 0.01)
    race.dialed()
    race.fail(2, 0.02)
    race.fail(3, FAILURE_SECONDS)
    race.race.try_again(FAILURE_SECONDS + 0.1)
    assert race.dialed() == [SECOND]
    race.answer(4, FAILURE_SECONDS + 0.2)
    assert race.proved == {FIRST, SECOND}
    race.race.try_again(FAILURE_SECONDS + 0.3)
    assert race.dialed() == []


def test_address_that_is_proved_again_is_dialed_once() -> None:
    race = Race(FIRST, SECOND, all_ways=True)
    race.answer(1, 0.01)
    race.dialed()
    race.fail(2, 0.02)
    race.race.prove_again(FAILURE_SECONDS + 0.1)
    race.race.try_again(FAILURE_SECONDS + 0.2)
    assert race.dialed() == [SECOND]


# --- addresses that others name ---------------------------------------------------------------------------------------


def test_one_address_is_tried_at_every_port_that_was_named_with_it() -> None:
    """A forged OFFER names the right session at the wrong port; the host's own comes while the race is on."""
    race = Race(FIRST)
    race.race.add([target(FIRST, port=5000)])
    race.fail(1, 0.01)
    assert [dial.port for dial in race.dials()] == [4000, 5000]


def test_invented_addresses_do_not_make_a_race_endless() -> None:
    race = Race(FIRST)
    race.race.add([target(f"10.0.{number}.1") for number in range(200)])
    for tick in range(200):
        race.race.handle_timer(tick * STAGGER_SECONDS)
    assert len(race.dialed()) == MAX_TARGETS


def test_address_that_its_host_has_named_stays_named_by_the_host() -> None:
    """The budget of others that name it, too, must not delay the host."""
    own, claimed = target(FIRST, FIRST), target(FIRST, STRANGER)
    assert merged([claimed], [own]) == merged([own], [claimed]) == [own]
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
        race.race = race.begin("join", target(FIRST, STRANGER))
        (dial,) = race.dials()
        race.answer(dial.conn, 0.0)
        race.race.abandon()


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
