"""A job that runs already, as a rank sees it. The whole way runs in test_joining."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from mingle.errors import ConflictError
from mingle.protocol.blocking import RUNNING_NOTICE_SECONDS, RUNNING_PATIENCE_SECONDS, SILENT_SECONDS, Blocking
from mingle.protocol.connection_race import DialTarget
from mingle.protocol.machine import Effect, Identity, Notice
from mingle.protocol.pacing import Seeker
from mingle.protocol.sessions import Session, Sessions
from mingle.wire import frames
from mingle.wire.datagrams import Offer
from mingle.wire.frames import ProcessInfo

IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h", pid=1)
)


class Blocked:
    """Two sealed sessions, of which nothing more is known."""

    def __init__(self, timeout: float = 300.0) -> None:
        self.effects: list[Effect] = []
        self.sessions = Sessions(IDENTITY, None, itertools.count(1).__next__, self.effects)
        self.seeker = Seeker(2, 0.0, random.Random(1))
        self.blocking = Blocking(IDENTITY, self.sessions, self.seeker, timeout, self.effects)
        self.one, self.other = self.sealed(1), self.sealed(2)

    def sealed(self, number: int) -> Session:
        name = bytes([number]) * 16
        offer = Offer(
            job="job", session=name, host=name, addresses=("10.0.0.1",), port=4000, world_size=2, state="sealed"
        )
        session = self.sessions.remember(offer, [DialTarget("10.0.0.1", "eth0")], keep=None)
        assert session is not None
        return session

    def notices(self) -> list[str]:
        return [effect.text for effect in self.effects if isinstance(effect, Notice)]


def running(state: Any = "running") -> frames.Running:
    return frames.Running(state=state, world_size=2, seconds=5.0, host=ProcessInfo(hostname="h0", pid=1, rank=0))


def test_a_session_is_in_the_way_of_all_others_but_not_of_itself() -> None:
    blocked = Blocked()
    assert not blocked.blocking.known(None)
    blocked.blocking.says(blocked.one, running(), 1.0)
    assert blocked.blocking.known(None)
    assert blocked.blocking.known(blocked.other)
    assert not blocked.blocking.known(blocked.one)
    assert blocked.blocking.running == running()


def test_while_it_is_asked_it_may_be_in_the_way_and_counted_dead_no_more() -> None:
    blocked = Blocked()
    blocked.sessions.race(blocked.one, 0.0)
    assert not blocked.blocking.known(None)
    assert blocked.blocking.possible(None)
    blocked.one.counted_dead = True
    assert not blocked.blocking.possible(None)


def test_silence_is_life_for_a_while_once() -> None:
    blocked = Blocked()
    assert blocked.blocking.silent(blocked.one, 1.0)
    assert blocked.blocking.silent(blocked.one, 0.9 + SILENT_SECONDS)
    assert not blocked.blocking.silent(blocked.one, 1.0 + SILENT_SECONDS)
    blocked.blocking.unblock(blocked.one)
    assert not blocked.blocking.silent(blocked.one, 2.0 + SILENT_SECONDS)
    blocked.blocking.says(blocked.one, running(), 30.0)
    assert not blocked.one.counted_dead


def test_one_that_has_reopened_is_in_nobodys_way() -> None:
    blocked = Blocked()
    blocked.blocking.lives(blocked.one, 1.0)
    blocked.seeker.pause()
    blocked.blocking.says(blocked.one, running("open"), 2.0)
    assert not blocked.blocking.known(None)
    assert blocked.one.retry_at > 2.0
    assert blocked.seeker.next_timer() is not None


@pytest.mark.parametrize(("timeout", "patience"), [(300.0, RUNNING_PATIENCE_SECONDS), (7.0, 7.0)])
def test_it_is_said_once_and_becomes_an_error(timeout: float, patience: float) -> None:
    blocked = Blocked(timeout)
    blocked.blocking.says(blocked.one, running(), 1.0)
    assert sorted(blocked.blocking.timers()) == [1.0 + RUNNING_NOTICE_SECONDS, 1.0 + patience]
    for _ in range(2):
        assert blocked.blocking.watch(1.0 + RUNNING_NOTICE_SECONDS) is None
        assert len(blocked.notices()) == 1
    assert blocked.blocking.timers() == [1.0 + patience]
    assert isinstance(blocked.blocking.watch(1.0 + patience), ConflictError)


def test_at_the_deadline_only_a_proved_one_is_the_reason() -> None:
    blocked = Blocked()
    blocked.blocking.lives(blocked.one, 1.0)
    assert blocked.blocking.failure(5.0) is None
    blocked.blocking.says(blocked.one, running(), 2.0)
    assert isinstance(blocked.blocking.failure(5.0), ConflictError)
