"""The sessions that a process has heard of: which are in the way, for how long, and what is said of them."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec import structs

from mingle.errors import ConflictError
from mingle.protocol.effects import Notice
from mingle.protocol.links.race import ADDRESS_SECONDS, ConnectionRace
from mingle.protocol.machine import Context
from mingle.protocol.sessions import KnownSession, SessionPolicy
from mingle.protocol.sightings import (
    CLAIM_PAUSE_SECONDS,
    RUNNING_NOTICE_SECONDS,
    RUNNING_PATIENCE_SECONDS,
    SILENT_SECONDS,
    Sightings,
)
from mingle.wire import frames
from tests.support.scripted_host import IDENTITY, running
from tests.support.session_tables import TARGETS, offer


class Blocked(SessionPolicy[KnownSession]):
    """Two sealed sessions, of which nothing more is known."""

    def __init__(self, patience: float = RUNNING_PATIENCE_SECONDS, *, rank: int | None = 1) -> None:
        self.freed: list[float] = []
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.links = context.links
        self.check = Sightings(self, structs.replace(IDENTITY, rank=rank), context)
        self.check.patience = patience
        self.one, self.other = self.heard(1), self.heard(2)

    def heard(self, number: int) -> KnownSession:
        session = self.check.remember(offer(number, "sealed"), TARGETS)
        assert session is not None
        return session

    def on_freed(self, now: float) -> None:
        self.freed.append(now)

    def race(self, purpose: frames.Purpose) -> ConnectionRace:
        self.check.race(self.one, IDENTITY.call(self.one.name, purpose), 0.0)
        assert self.one.race is not None
        return self.one.race

    def notices(self) -> list[str]:
        return [effect.text for effect in self.links.effects if isinstance(effect, Notice)]

    def silent(self, now: float) -> bool:
        """Whether a session still counts as alive after a race that nobody answered."""
        race = self.race("probe")
        race.handle_timer(ADDRESS_SECONDS)
        self.one.race = None
        return self.check.unreached(self.one, race, now)


def test_a_session_is_in_the_way_of_all_others_but_not_of_itself() -> None:
    blocked = Blocked()
    assert not blocked.check.runs()
    blocked.check.said(blocked.one, running(), 1.0)
    assert blocked.check.runs()
    assert blocked.check.runs(blocked.other)
    assert not blocked.check.runs(blocked.one)
    assert blocked.check.running == [running()]


def test_session_being_probed_may_run_unless_presumed_dead() -> None:
    blocked = Blocked()
    blocked.race("probe")
    assert not blocked.check.runs()
    assert blocked.check.may_run()
    blocked.one.presumed_dead = True
    assert not blocked.check.may_run()


def test_silence_is_life_for_a_while_once() -> None:
    blocked = Blocked()
    assert blocked.silent(1.0)
    assert blocked.silent(0.9 + SILENT_SECONDS)
    assert not blocked.silent(1.0 + SILENT_SECONDS)
    blocked.check.free(blocked.one, 12.0)
    assert blocked.freed == [12.0]
    assert not blocked.silent(2.0 + SILENT_SECONDS)
    blocked.check.proved(blocked.one, 20.0)
    assert not blocked.check.runs(), "it has to say how it stands"
    blocked.check.said(blocked.one, running(), 30.0)
    assert not blocked.one.presumed_dead
    assert blocked.check.runs()


def test_a_job_is_waited_for_from_when_it_runs() -> None:
    blocked = Blocked(7.0)
    blocked.check.said(blocked.one, running("open"), 1.0)
    blocked.check.said(blocked.one, running(), 20.0)
    assert blocked.check.verdict(20.0 + 6.9) is None
    assert blocked.check.verdict(20.0 + 7.0) is not None


@pytest.mark.parametrize("patience", [RUNNING_PATIENCE_SECONDS, 7.0])
def test_running_job_is_noticed_once_and_becomes_an_error(patience: float) -> None:
    blocked = Blocked(patience)
    blocked.check.said(blocked.one, running(), 1.0)
    assert blocked.check.verdict_timer() == 1.0 + RUNNING_NOTICE_SECONDS
    for _ in range(2):
        assert blocked.check.verdict(1.0 + RUNNING_NOTICE_SECONDS) is None
        assert len(blocked.notices()) == 1
    assert blocked.check.verdict_timer() == 1.0 + patience
    assert isinstance(blocked.check.verdict(1.0 + patience), ConflictError)


def test_a_sealed_session_is_no_running_job_until_its_host_says_so() -> None:
    blocked = Blocked(7.0)
    blocked.check.proved(blocked.one, 0.5)
    assert blocked.check.failure(20.0) is None
    blocked.check.said(blocked.one, running("sealed"), 1.0)
    assert blocked.check.runs(), "it may be about to run"
    assert blocked.check.verdict(20.0) is None
    assert blocked.check.failure(20.0) is None
    assert blocked.notices() == []
    blocked.check.said(blocked.one, running(), 2.0)
    assert isinstance(blocked.check.failure(3.0), ConflictError)
    assert "has been running for 11 s" in str(blocked.check.verdict(8.0)), "5 s when its host said so, 6 s ago"


def test_a_job_that_runs_is_the_reason_also_while_it_is_asked_anew() -> None:
    blocked = Blocked()
    blocked.check.said(blocked.one, running(), 1.0)
    blocked.one.ask_anew()
    assert not blocked.check.runs()
    assert isinstance(blocked.check.failure(5.0), ConflictError)
    blocked.check.free(blocked.one, 6.0)
    assert blocked.check.failure(7.0) is None


# --- the time for claims -------------------------------------------------------------------------------------------


def held_up(blocked: Blocked, first: float, last: float) -> bool:
    """Claim a session from one moment to another; whether that still holds this process up at the end."""
    blocked.one.presumed_dead = False
    blocked.race("probe")
    blocked.check.weigh(first)
    blocked.check.weigh(last)
    may_run = blocked.check.may_run()
    blocked.one.hang_up()
    blocked.check.weigh(last)
    return may_run


def test_a_claim_holds_up_for_a_limited_time() -> None:
    assert held_up(Blocked(), 0.0, SILENT_SECONDS - 0.1)
    assert not held_up(Blocked(), 0.0, SILENT_SECONDS)


@pytest.mark.parametrize(
    ("pause", "holds"),
    [(1.0, False), (CLAIM_PAUSE_SECONDS, False), (CLAIM_PAUSE_SECONDS + 0.1, True)],
    ids=["a gap", "a pause", "the end of claims"],
)
def test_the_time_does_not_come_back_while_claims_go_on(pause: float, holds: bool) -> None:
    blocked = Blocked()
    assert held_up(blocked, 0.0, 6.0)
    assert held_up(blocked, 6.0 + pause, 12.0 + pause) is holds


def test_claims_that_are_refused_at_once_cost_the_time_between_them() -> None:
    blocked = Blocked()
    assert all(held_up(blocked, second, second) for second in range(int(SILENT_SECONDS)))
    assert not held_up(blocked, SILENT_SECONDS, SILENT_SECONDS)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_host_that_is_dialed_is_a_claim_where_its_call_delays_an_election(rank: int | None) -> None:
    blocked = Blocked(rank=rank)
    blocked.race("join")
    blocked.check.weigh(0.0)
    blocked.check.weigh(SILENT_SECONDS)
    assert blocked.check.claims_spent is (rank is None)


def test_another_role_waits_for_no_session_of_the_last_one() -> None:
    blocked = Blocked()
    blocked.check.said(blocked.other, running(), 0.0)
    blocked.race("probe")
    blocked.check.serve(blocked)
    assert not blocked.check.may_run()
    assert not len(blocked.links)
