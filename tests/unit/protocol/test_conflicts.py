"""Other hosts of the same job: what is proved counts, what a datagram says does not."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from mingle.protocol.effects import Dial, Write
from mingle.protocol.events import BytesReceived, Connected, ConnectionEvent, Disconnected
from mingle.protocol.links.handshake import Conversation, HostConversation
from mingle.protocol.links.link import Link
from mingle.protocol.links.race import ADDRESS_SECONDS, DialTarget
from mingle.protocol.machine import Context, Identity
from mingle.protocol.session.conflicts import CONFLICT_SECONDS, ConflictingHosts
from mingle.protocol.sessions import REMEMBERED_SESSIONS, RETRY_SECONDS, SessionPolicy
from mingle.protocol.sightings import SILENT_SECONDS, Sightings
from mingle.wire import frames
from mingle.wire.datagrams import Offer, State
from mingle.wire.frames import ProcessInfo

OTHER = b"T" * 16
WHO = ProcessInfo(hostname="h9", pid=9, address="10.0.0.9", rank=0)
ENDPOINTS = [DialTarget("10.0.0.9", "eth0", 4000)]


def offer(state: State = "open", session: bytes = OTHER) -> Offer:
    return Offer(
        job="job", session=session, host=session, addresses=("10.0.0.9",), port=4000, world_size=2, state=state
    )


class Watched:
    """The rivals of a host, and one other host that says what it is told to say."""

    def __init__(self) -> None:
        identity = Identity(job="job", attempt="", member=b"M" * 16, rank=0, world_size=2, node="n", who=WHO)
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.links, self.effects = context.links, context.links.effects
        self.sightings = Sightings(SessionPolicy(), identity, context)
        self.conflicts = ConflictingHosts(identity, self.sightings, context.links)
        self.sightings.policy = self.conflicts
        self.hosts: dict[int, HostConversation] = {}

    def handle(self, event: ConnectionEvent, now: float) -> None:
        self.links.handle(event, now)
        self.conflicts.sightings.weigh(now)

    def dialed(self) -> list[int]:
        found = [effect.conn for effect in self.effects if isinstance(effect, Dial)]
        self.effects.clear()
        return found

    def hear(self, state: State = "open", now: float = 0.0) -> list[int]:
        self.conflicts.heard(offer(state), ENDPOINTS, now)
        return self.dialed()

    def answer(self, conn: int, now: float, *said: frames.AnyFrame) -> None:
        if conn not in self.hosts:
            self.hosts[conn] = HostConversation(
                job="job", attempt="", session=OTHER, addresses=("10.0.0.9",), port=4000
            )
            self.handle(Connected(conn, "10.0.0.1", "eth0"), now)
            self._carry(conn)
            self.handle(BytesReceived(conn, self.hosts[conn].data_to_send()), now)
            self._carry(conn)
        for frame in said:
            self.hosts[conn].send(frame)
        self.handle(BytesReceived(conn, self.hosts[conn].data_to_send()), now)

    def _carry(self, conn: int) -> None:
        for effect in self.links.take_effects():
            if isinstance(effect, Write):
                self.hosts[conn].receive_data(effect.data)


def running(state: Any = "open") -> frames.Running:
    return frames.Running(state=state, world_size=2, host=WHO)


def test_a_datagram_alone_is_no_rival() -> None:
    watched = Watched()
    watched.hear()
    assert not watched.conflicts.any_alive
    assert watched.conflicts.lasting(99.0) == []


def test_a_proved_rival_lasts_after_two_seconds() -> None:
    watched = Watched()
    (conn,) = watched.hear()
    watched.answer(conn, 1.0, running())
    assert watched.conflicts.any_alive
    assert watched.conflicts.lasting(1.0 + CONFLICT_SECONDS - 0.1) == []
    assert watched.conflicts.verdict_timer() == 1.0 + CONFLICT_SECONDS
    assert watched.conflicts.lasting(1.0 + CONFLICT_SECONDS) == [WHO]


def test_a_rival_that_goes_is_forgotten_and_looked_at_again_later() -> None:
    watched = Watched()
    (conn,) = watched.hear()
    watched.answer(conn, 1.0, running())
    watched.handle(Disconnected(conn, "reset"), 2.0)
    assert not watched.conflicts.any_alive
    assert watched.hear(now=2.1) == []
    assert len(watched.hear(now=2.0 + RETRY_SECONDS)) == 1


@pytest.mark.parametrize(("gone_at", "conceded"), [(1.5, False), (1.0 + CONFLICT_SECONDS - 0.01, True)])
def test_a_rival_that_fails_of_the_conflict_takes_us_along(gone_at: float, conceded: bool) -> None:
    watched = Watched()
    (conn,) = watched.hear()
    watched.answer(conn, 1.0, running())
    watched.answer(conn, gone_at, frames.Closed(session=OTHER, reason="two rank 0s", conflict=True))
    watched.handle(Disconnected(conn, "closed"), gone_at)
    assert bool(watched.conflicts.lasting(gone_at)) is conceded


def test_a_run_that_ends_for_another_conflict_is_none_of_this_host() -> None:
    watched = Watched()
    (conn,) = watched.hear("sealed")
    watched.answer(conn, 1.0, running("running"))
    watched.answer(conn, 9.0, frames.Closed(session=OTHER, reason="two rank 0s", conflict=True))
    assert watched.conflicts.lasting(9.0) == []


def test_process_that_calls_and_is_called_is_named_once() -> None:
    watched = Watched()
    (conn,) = watched.hear()
    watched.answer(conn, 1.0, running())
    watched.links.add(Link(conn=50, conversation=Conversation(None), handler=lambda *_: None))
    watched.links.add(Link(conn=51, conversation=Conversation(None), handler=lambda *_: None))
    watched.conflicts.caller(50, OTHER, ProcessInfo(hostname="h9", pid=9, address="10.7.0.9"), 1.0)
    assert watched.conflicts.lasting(9.0) == [WHO]
    watched.links.handle(Disconnected(50, "reset"), 8.0)
    watched.conflicts.caller(51, b"U" * 16, ProcessInfo(hostname="h8", pid=8), 1.0)
    assert len(watched.conflicts.lasting(9.0)) == 2


def test_a_sealed_session_is_waited_for() -> None:
    watched = Watched()
    (conn,) = watched.hear("sealed")
    assert watched.conflicts.any_alive, "GO must wait for the answer"
    watched.answer(conn, 1.0, running("running"))
    assert watched.hosts[conn].hello is not None
    assert watched.hosts[conn].hello.purpose == "probe"
    assert watched.conflicts.any_alive
    assert watched.conflicts.lasting(99.0) == []
    assert watched.conflicts.sightings.running == [running("running")]


@pytest.mark.parametrize(("says", "claims"), [("running", "open"), ("open", "sealed")])
def test_proved_state_outweighs_a_datagram(says: str, claims: State) -> None:
    watched = Watched()
    (conn,) = watched.hear("sealed" if says == "running" else "open")
    watched.answer(conn, 1.0, running(says))
    again = watched.hear(claims, now=2.0)
    # It is asked again, and until it answers the proved word stands.
    assert len(again) == 1
    assert bool(watched.conflicts.sightings.running) is (says == "running")
    watched.answer(again[0], 2.1, running(says))
    assert bool(watched.conflicts.sightings.running) is (says == "running")
    expected = [] if says == "running" else [WHO]
    assert watched.conflicts.lasting(1.0 + CONFLICT_SECONDS) == expected


def test_a_silent_sealed_session_is_suspected_once_for_ten_seconds() -> None:
    watched = Watched()
    watched.hear("sealed")
    now, until = 0.0, None
    while now < 3 * SILENT_SECONDS:
        now += ADDRESS_SECONDS / 2
        watched.conflicts.sightings.handle_timer(now)
        watched.hear("sealed", now)
        if watched.conflicts.any_alive:
            until = now
    assert until is not None
    assert SILENT_SECONDS - ADDRESS_SECONDS < until < SILENT_SECONDS


def claim(watched: Watched, number: int, now: float, sender: str = "") -> None:
    session = number.to_bytes(16, "big")
    watched.conflicts.heard(offer("sealed", session), ENDPOINTS, now, sender=sender)


def test_sealed_sessions_that_are_only_claimed_hold_nobody_up_for_longer_than_one() -> None:
    watched, held = Watched(), []
    for tick in range(60):
        claim(watched, tick, tick / 2)
        watched.conflicts.sightings.handle_timer(tick / 2)
        if watched.conflicts.any_alive:
            held.append(tick / 2)
    assert held == [tick / 2 for tick in range(20)]
    (*_, conn) = watched.hear("sealed", 30.0)
    watched.answer(conn, 30.0, running("running"))
    assert watched.conflicts.any_alive, "what is proved counts in the midst of claims"


def test_time_without_a_claim_is_no_time_of_waiting() -> None:
    watched = Watched()
    for tick in range(10):
        claim(watched, tick, 5.0 * tick)
        watched.conflicts.sightings.handle_timer(5.0 * tick)
        for conn in watched.dialed():
            watched.handle(Disconnected(conn, "ECONNREFUSED"), 5.0 * tick)
        assert not watched.conflicts.any_alive
    claim(watched, 99, 50.0)
    assert watched.conflicts.any_alive


def test_after_a_while_without_claims_the_next_one_counts_again() -> None:
    watched = Watched()
    for tick in range(12):
        claim(watched, tick, float(tick))
        watched.conflicts.sightings.handle_timer(float(tick))
    assert not watched.conflicts.any_alive
    for second in range(12, 40):
        watched.conflicts.sightings.handle_timer(float(second))
    claim(watched, 99, 40.0)
    assert watched.conflicts.any_alive


def test_a_silent_open_session_is_nothing() -> None:
    watched = Watched()
    watched.hear()
    watched.conflicts.sightings.handle_timer(ADDRESS_SECONDS)
    assert not watched.conflicts.any_alive


def test_invented_sessions_are_bounded() -> None:
    watched = Watched()
    for number in range(10 * REMEMBERED_SESSIONS):
        watched.conflicts.heard(offer(session=number.to_bytes(16, "big")), ENDPOINTS, 0.0)
    assert len(watched.dialed()) == REMEMBERED_SESSIONS


def test_abandon_forgets_all_rivals() -> None:
    watched = Watched()
    (conn,) = watched.hear()
    watched.answer(conn, 1.0, running())
    watched.conflicts.abandon()
    assert not watched.conflicts.any_alive
    assert conn not in watched.links
    assert watched.conflicts.verdict_timer() is None
