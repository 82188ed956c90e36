"""The already-running check: which sessions are in the way, for how long, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from mingle.errors import ConflictError
from mingle.protocol.claims import SILENT_SECONDS, ClaimBudget
from mingle.protocol.connection_race import ADDRESS_SECONDS
from mingle.protocol.effects import Notice
from mingle.protocol.machine import Identity
from mingle.protocol.running_check import RUNNING_NOTICE_SECONDS, RUNNING_PATIENCE_SECONDS, RunningCheck
from mingle.wire import frames
from mingle.wire.frames import ProcessInfo
from tests.support.proved_session import ProvedSession
from tests.support.session_tables import Table

IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h", pid=1)
)


class Blocked:
    """Two sealed sessions, of which nothing more is known."""

    def __init__(self, patience: float = RUNNING_PATIENCE_SECONDS) -> None:
        self.table = Table()
        self.freed: list[float] = []
        self.check = RunningCheck(
            IDENTITY,
            self.table.sessions,
            self.table.effects,
            claims=ClaimBudget(),
            patience=patience,
            freed=self.freed.append,
        )
        self.one, self.other = self.table.added(1, "sealed"), self.table.added(2, "sealed")

    def notices(self) -> list[str]:
        return [effect.text for effect in self.table.effects if isinstance(effect, Notice)]

    def silent(self, now: float) -> bool:
        """Whether a session still counts as alive after a race that nobody answered."""
        self.table.race(self.one, "probe")
        race = self.one.race
        assert race is not None
        race.handle_timer(ADDRESS_SECONDS)
        self.one.race = None
        return self.check.unreached(self.one, race, now)


def running(state: Any = "running") -> frames.Running:
    return frames.Running(state=state, world_size=2, seconds=5.0, host=ProcessInfo(hostname="h0", pid=1, rank=0))


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
    blocked.table.race(blocked.one, "probe")
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


def test_host_that_proves_itself_and_then_says_nothing_is_in_the_way_once() -> None:
    proved, freed = ProvedSession(), list[float]()
    check = RunningCheck(
        IDENTITY, proved.table, proved.effects, claims=ClaimBudget(), patience=30.0, freed=freed.append
    )
    check.proved(proved.session, 0.0)
    assert check.runs()
    assert check.next_timer() == SILENT_SECONDS
    check.handle_timer(SILENT_SECONDS)
    assert freed == [SILENT_SECONDS]
    assert proved.session.race is None, "its host can be asked again later"
    proved.connect(20.0)
    check.proved(proved.session, 20.0)
    assert not check.runs()


def test_host_that_is_sealed_and_never_says_that_it_runs_is_in_the_way_for_a_while() -> None:
    proved = ProvedSession()
    check = RunningCheck(IDENTITY, proved.table, proved.effects, claims=ClaimBudget(), patience=30.0)
    check.proved(proved.session, 0.0)
    check.said(proved.session, running("sealed"), 1.0)
    assert check.next_timer() == 1.0 + SILENT_SECONDS
    check.handle_timer(1.0 + SILENT_SECONDS)
    assert not check.runs()
    assert proved.session.race is None


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


def test_at_the_deadline_only_a_session_that_has_spoken_is_the_reason() -> None:
    blocked = Blocked()
    blocked.check.proved(blocked.one, 1.0)
    assert blocked.check.failure(5.0) is None
    blocked.check.said(blocked.one, running(), 2.0)
    assert isinstance(blocked.check.failure(5.0), ConflictError)


def test_a_sealed_session_is_no_running_job_until_its_host_says_so() -> None:
    blocked = Blocked(7.0)
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
