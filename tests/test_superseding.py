"""A session that comes before ours is believed when it has proved itself over TCP."""

from __future__ import annotations

import itertools

import pytest

from mingle.agents.superseding import AGAIN_SECONDS, Superseding
from mingle.rules.control import HostConversation
from mingle.rules.machine import Dial, Effect, Hangup, Write
from mingle.rules.proving import Endpoint
from mingle.wire import frames
from mingle.wire.authentication import new_nonce
from mingle.wire.datagrams import Offer
from tests.views import member

OFFER = Offer(
    job="job",
    session=member("T"),
    host=member("A"),
    addresses=("10.0.0.9",),
    port=4000,
    world_size=4,
    state="sealed",
    kind="agents",
)
ENDPOINTS = [Endpoint("10.0.0.9", "eth0")]


def hello(session: bytes, purpose: frames.Purpose) -> frames.Hello:
    return frames.Hello(job="job", member=member("B"), session=session, nonce=new_nonce(), purpose=purpose)


@pytest.fixture
def effects() -> list[Effect]:
    return []


@pytest.fixture
def superseding(effects: list[Effect]) -> Superseding:
    return Superseding(hello, None, itertools.count(1).__next__, effects)


def answered(
    superseding: Superseding, effects: list[Effect], *said: frames.AnyFrame, session: bytes = OFFER.session
) -> int:
    """Lets a host answer the question that is under way; returns the connection."""
    conn = next(effect.conn for effect in reversed(effects) if isinstance(effect, Dial))
    superseding.connected(conn, "10.0.0.2", "eth0")
    host = HostConversation(job="job", attempt="", session=OFFER.session, addresses=OFFER.addresses, port=OFFER.port)
    host.receive_data(b"".join(effect.data for effect in effects if isinstance(effect, Write) and effect.conn == conn))
    superseding.received(conn, host.data_to_send(), 0.1)
    for frame in said:
        host.send(frame)
    if said:
        superseding.received(conn, host.data_to_send(), 0.2)
    return conn


def running(state: str) -> frames.Running:
    return frames.Running(state=state, world_size=4, host=frames.Who(hostname="nine"))  # type: ignore[arg-type]


def test_a_session_that_runs_is_found(superseding: Superseding, effects: list[Effect]) -> None:
    superseding.heard(OFFER, ENDPOINTS, 0.0)
    assert superseding.found is None
    conn = answered(superseding, effects, running("running"))
    assert superseding.found == OFFER
    assert Hangup(conn) in effects
    assert superseding.next_timer() is None
    superseding.heard(OFFER, ENDPOINTS, 5.0)
    assert not superseding.owns(conn)


@pytest.mark.parametrize("state", ["open", "sealed"])
def test_one_that_does_not_run_yet_is_asked_again_later(
    superseding: Superseding, effects: list[Effect], state: str
) -> None:
    superseding.heard(OFFER, ENDPOINTS, 0.0)
    answered(superseding, effects, running(state))
    assert superseding.found is None
    effects.clear()
    superseding.heard(OFFER, ENDPOINTS, 0.3)
    assert effects == []
    superseding.heard(OFFER, ENDPOINTS, 0.2 + AGAIN_SECONDS)
    assert any(isinstance(effect, Dial) for effect in effects)


def test_another_session_at_its_address_is_none(superseding: Superseding, effects: list[Effect]) -> None:
    superseding.heard(OFFER, ENDPOINTS, 0.0)
    conn = next(effect.conn for effect in effects if isinstance(effect, Dial))
    superseding.connected(conn, "10.0.0.2", "eth0")
    host = HostConversation(job="job", attempt="", session=member("U"), addresses=OFFER.addresses, port=OFFER.port)
    data = b"".join(effect.data for effect in effects if isinstance(effect, Write))
    with pytest.raises(Exception, match="another session"):
        host.receive_data(data)
    superseding.received(conn, host.data_to_send(), 0.1)
    assert superseding.found is None
    assert superseding.next_timer() is None


def test_one_that_refuses_or_is_silent_is_none(superseding: Superseding, effects: list[Effect]) -> None:
    superseding.heard(OFFER, ENDPOINTS, 0.0)
    conn = next(effect.conn for effect in effects if isinstance(effect, Dial))
    superseding.closed(conn, "Connection refused (ECONNREFUSED)", 0.1)
    assert superseding.next_timer() is None
    superseding.heard(OFFER, ENDPOINTS, 5.0)
    while (due := superseding.next_timer()) is not None:
        superseding.handle_timer(due)
    assert superseding.found is None


def test_one_that_proves_itself_and_says_nothing_is_left(superseding: Superseding, effects: list[Effect]) -> None:
    superseding.heard(OFFER, ENDPOINTS, 0.0)
    conn = answered(superseding, effects)
    due = superseding.next_timer()
    assert due is not None
    superseding.handle_timer(due)
    assert Hangup(conn) in effects
    assert superseding.next_timer() is None
