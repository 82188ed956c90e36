"""The sessions a rank has heard of, by themselves."""

from __future__ import annotations

import itertools

import pytest

from mingle.protocol.connection_race import ADDRESS_SECONDS, DialTarget
from mingle.protocol.machine import Dial, Effect, Hangup, Identity
from mingle.protocol.sessions import REMEMBERED_BY_SENDER, REMEMBERED_SESSIONS, RETRY_SECONDS, Session, Sessions
from mingle.wire.datagrams import Offer, State
from mingle.wire.frames import ProcessInfo

IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h", pid=1)
)
ENDPOINTS = [DialTarget("10.0.0.1", "eth0")]


def offer(number: int = 0, state: State = "open") -> Offer:
    name = number.to_bytes(16, "big")
    return Offer(
        job="job",
        session=name,
        host=name,
        addresses=("10.0.0.1",),
        port=4000,
        world_size=2,
        state=state,
        hostname="h0",
        pid=7,
    )


def known(effects: list[Effect] | None = None) -> Sessions:
    return Sessions(IDENTITY, None, itertools.count(1).__next__, [] if effects is None else effects)


def remembered(sessions: Sessions, number: int = 0, state: State = "open") -> Session:
    session = sessions.remember(offer(number, state), ENDPOINTS, keep=None)
    assert session is not None
    return session


def test_the_oldest_idle_one_makes_room() -> None:
    sessions = known()
    racing, kept, *_ = (remembered(sessions, number) for number in range(REMEMBERED_SESSIONS))
    sessions.race(racing, 0.0)
    assert sessions.remember(offer(99), ENDPOINTS, keep=kept) is not None
    assert len(list(sessions)) == REMEMBERED_SESSIONS
    assert sessions.get(racing.name) is racing
    assert sessions.get(kept.name) is kept
    assert sessions.get(offer(2).session) is None


def test_who_invents_sessions_leaves_room_for_those_of_others() -> None:
    sessions = known()
    for number in range(2 * REMEMBERED_SESSIONS):
        session = sessions.remember(offer(number), ENDPOINTS, keep=None, sender="10.0.0.66")
        if session is not None:
            sessions.race(session, 0.0)
    assert len(list(sessions)) == REMEMBERED_BY_SENDER
    assert sessions.remember(offer(99), ENDPOINTS, keep=None, sender="10.0.0.9") is not None


def test_where_all_are_raced_for_nobody_makes_room() -> None:
    sessions = known()
    for number in range(REMEMBERED_SESSIONS):
        sessions.race(remembered(sessions, number), 0.0)
    assert sessions.remember(offer(99), ENDPOINTS, keep=None) is None
    assert sessions.get(offer(99).session) is None


@pytest.mark.parametrize(
    ("state", "confirmed", "purpose"), [("open", False, "join"), ("sealed", False, "probe"), ("sealed", True, "join")]
)
def test_a_sealed_one_is_only_asked_unless_it_was_sealed_with_us(state: State, confirmed: bool, purpose: str) -> None:
    sessions = known()
    session = remembered(sessions, state=state)
    session.confirmed = confirmed
    assert session.purpose == purpose
    sessions.race(session, 0.0)
    assert session.races_to(session.purpose)
    assert not session.races_to("rival")


def test_a_connection_has_one_owner() -> None:
    effects: list[Effect] = []
    sessions = known(effects)
    one, other = remembered(sessions, 1), remembered(sessions, 2)
    sessions.race(one, 0.0)
    sessions.race(other, 0.0)
    conns = [effect.conn for effect in effects if isinstance(effect, Dial)]
    assert [sessions.owner(conn) for conn in conns] == [(one, one.race), (other, other.race)]
    assert not sessions.owns(max(conns) + 1)


def test_all_but_the_chosen_one_are_hung_up_on() -> None:
    effects: list[Effect] = []
    sessions = known(effects)
    chosen, other = remembered(sessions, 1), remembered(sessions, 2)
    sessions.race(chosen, 0.0)
    sessions.race(other, 0.0)
    (_, conn) = [effect.conn for effect in effects if isinstance(effect, Dial)]
    effects.clear()
    sessions.keep_only(chosen)
    assert other.race is None
    assert chosen.race is not None
    assert Hangup(conn) in effects
    sessions.hang_up()
    assert chosen.race is None


def test_a_race_that_is_over_is_none() -> None:
    sessions = known()
    session = remembered(sessions)
    sessions.race(session, 0.0)
    assert session.race is not None
    session.race.handle_timer(ADDRESS_SECONDS)
    assert not session.races_to("join")


def test_it_is_tried_again_after_a_while() -> None:
    session = Session(offer(), ENDPOINTS)
    session.retry_later(3.0)
    assert session.retry_at == 3.0 + RETRY_SECONDS


def test_its_host_has_a_name() -> None:
    assert Session(offer(), ENDPOINTS).host_name == "host h0 (10.0.0.1:4000), pid 7"
