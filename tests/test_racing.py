"""Which sessions are raced for, and when. With hosts at the other end it runs in test_joining."""

from __future__ import annotations

import itertools
import random

import pytest

from mingle.protocol.blocking import Blocking
from mingle.protocol.connection_race import ADDRESS_SECONDS
from mingle.protocol.handshake import HostConversation
from mingle.protocol.machine import Diagnostics, Dial, Effect, Identity, Write
from mingle.protocol.membership import RETURN_SECONDS, Membership, Step
from mingle.protocol.moving import Moving
from mingle.protocol.pacing import Seeker
from mingle.protocol.racing import TELL_HOST_SECONDS, Racing
from mingle.protocol.sessions import Session, Sessions
from mingle.wire.datagrams import Offer, State
from mingle.wire.frames import ProcessInfo, Running

ONE, OTHER = b"S" * 16, b"T" * 16


class Race:
    def __init__(self, rank: int | None = 1) -> None:
        identity = Identity(
            job="job",
            attempt="",
            member=b"M" * 16,
            rank=rank,
            world_size=2,
            node="n",
            who=ProcessInfo(hostname="h", pid=1),
        )
        self.effects: list[Effect] = []
        self.diagnostics = Diagnostics()
        sessions = Sessions(identity, None, itertools.count(1).__next__, self.effects)
        self.membership = Membership(identity, sessions, self.effects, self.diagnostics)
        self.blocking = Blocking(identity, sessions, Seeker(2, 0.0, random.Random(1)), 300.0, self.effects)
        self.moving = Moving(sessions, self.membership)
        self.racing = Racing(sessions, self.membership, self.blocking, self.moving, self.diagnostics)
        self.sessions = sessions

    def hear(self, name: bytes = ONE, now: float = 1.0, state: State = "open", address: str = "10.0.0.1") -> Session:
        offer = Offer(
            job="job", session=name, host=name, addresses=(address,), port=4000, world_size=2, state=state, pid=name[0]
        )
        self.racing.offered(offer, "eth0", now)
        session = self.sessions.get(name)
        assert session is not None
        return session

    def dialled(self) -> list[str]:
        dialled = [effect.address for effect in self.effects if isinstance(effect, Dial)]
        self.effects.clear()
        return dialled


def test_sessions_are_raced_for_side_by_side_and_each_once() -> None:
    race = Race()
    race.hear(ONE, address="10.0.0.1")
    race.hear(OTHER, address="10.0.0.2")
    race.hear(ONE, address="10.0.0.1")
    assert race.dialled() == ["10.0.0.1", "10.0.0.2"]
    assert race.racing.host_in_sight
    assert len(race.diagnostics.hosts) == 2


def test_who_has_a_host_races_for_no_other_but_asks_whether_its_own_lives() -> None:
    race = Race()
    race.membership.join(race.hear(ONE))
    race.dialled()
    race.hear(OTHER, 2.0, address="10.0.0.2")
    assert race.dialled() == []
    assert race.membership.doubt_until is not None


@pytest.mark.parametrize("rank", [None, 1])
def test_a_member_without_a_rank_tells_its_host_of_others(rank: int | None) -> None:
    race = Race(rank)
    race.membership.join(race.hear(ONE))
    race.membership.step = Step.SEATED
    other = race.hear(OTHER, 2.0)
    assert other.retry_at == (0.0 if rank is not None else 2.0 + TELL_HOST_SECONDS)


def test_none_is_joined_while_the_job_runs_elsewhere_but_sealed_ones_are_asked() -> None:
    race = Race()
    running = race.hear(ONE, state="sealed")
    answer = Running(state="running", world_size=2, seconds=1.0, host=ProcessInfo(hostname="h0", pid=1))
    race.blocking.says(running, answer, 1.0)
    race.dialled()
    race.hear(OTHER, address="10.0.0.2")
    assert race.dialled() == []
    race.hear(b"U" * 16, state="sealed", address="10.0.0.3")
    assert race.dialled() == ["10.0.0.3"]


def test_the_session_to_return_to_comes_first_and_has_its_time() -> None:
    race = Race()
    session = race.hear(ONE)
    race.membership.join(session)
    race.membership.step = Step.CONFIRMED
    session.hang_up()
    race.membership.lost(session, "reset", 2.0)
    race.dialled()
    other = race.hear(OTHER, address="10.0.0.2")
    assert race.racing.bound_elsewhere(other)
    assert not race.racing.bound_elsewhere(session)
    race.racing.handle_timer(2.1)
    assert race.dialled() == ["10.0.0.1"]
    race.racing.handle_timer(2.1 + ADDRESS_SECONDS)
    assert race.membership.return_to is session
    race.racing.handle_timer(2.0 + RETURN_SECONDS)
    assert race.membership.return_to is None


def test_where_a_member_is_sent_it_may_go_though_it_has_a_host() -> None:
    race = Race(None)
    race.membership.join(race.hear(ONE))
    race.membership.step = Step.SEATED
    race.dialled()
    other = race.hear(OTHER, 2.0, address="10.0.0.2")
    assert race.racing.bound_elsewhere(other)
    assert race.moving.sent_after(other.offer, 2.0)
    race.racing.make_for(other.offer, "eth0", 2.0)
    assert race.dialled() == ["10.0.0.2"]


def test_a_race_that_was_lost_is_noted_and_run_again_later() -> None:
    race = Race()
    session = race.hear()
    race.racing.handle_timer(1.0 + ADDRESS_SECONDS)
    assert session.race is None
    assert any("not reached" in text for text in race.diagnostics.hosts.values())
    race.dialled()
    race.hear(now=session.retry_at - 0.01)
    assert race.dialled() == []
    race.hear(now=session.retry_at)
    assert race.dialled() == ["10.0.0.1"]


@pytest.mark.parametrize(("address", "doubted"), [("10.0.0.1", False), ("10.0.0.7", True)])
def test_a_host_that_no_longer_offers_the_address_in_use_is_asked_whether_it_lives(address: str, doubted: bool) -> None:
    race = Race()
    session = race.hear(ONE)
    prove(session, race)
    race.membership.join(session)
    race.hear(ONE, 2.0, address=address)
    assert (race.membership.doubt_until is not None) is doubted


@pytest.mark.parametrize("step", [Step.SEATED, Step.CONFIRMED])
def test_when_the_own_interfaces_change_the_ways_are_proved_again(step: Step) -> None:
    race = Race()
    session = race.hear(ONE)
    prove(session, race)
    race.membership.join(session)
    race.membership.step = step
    race.hear(ONE, 2.0, address="10.0.0.7")
    assert session.race is not None
    session.race.handle_timer(2.0)
    assert race.dialled() == ["10.0.0.7"]
    session.race.disconnected(2, "Network is unreachable", 2.0)
    race.racing.rewired(3.0)
    # Who has confirmed has told its host what counts.
    assert race.dialled() == (["10.0.0.7"] if step is Step.SEATED else [])


def prove(session: Session, race: Race) -> None:
    """Its first address proves itself."""
    assert session.race is not None
    session.race.connected(1, "10.0.0.2", "eth0")
    host = HostConversation(job="job", attempt="", session=session.name, addresses=("10.0.0.1",), port=4000)
    (write,) = [effect for effect in race.effects if isinstance(effect, Write)]
    host.receive_data(write.data)
    session.race.received(1, host.data_to_send(), 1.0)
    race.effects.clear()
