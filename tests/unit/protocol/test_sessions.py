"""The table of sessions, and the already-running check."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from mingle.errors import ConflictError
from mingle.protocol.claims import SILENT_SECONDS, ClaimBudget
from mingle.protocol.connection_race import ADDRESS_SECONDS, DialTarget
from mingle.protocol.effects import Dial, Effect, Hangup, Notice
from mingle.protocol.handshake import Call
from mingle.protocol.machine import Context, Identity
from mingle.protocol.sessions import (
    REMEMBERED_BY_SENDER,
    REMEMBERED_SESSIONS,
    RETRY_SECONDS,
    RUNNING_NOTICE_SECONDS,
    RUNNING_PATIENCE_SECONDS,
    KnownSession,
    RunningCheck,
    SessionPolicy,
    SessionTable,
    remember,
)
from mingle.wire import frames
from mingle.wire.datagrams import Offer, State
from mingle.wire.frames import ProcessInfo
from tests.support.proved_session import ProvedSession

IDENTITY = Identity(
    job="job", attempt="", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h", pid=1)
)
TARGETS = [DialTarget("10.0.0.1", "eth0", 4000)]


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


class Keeping(SessionPolicy[KnownSession]):
    """Keeps one session, whatever comes."""

    kept: KnownSession | None = None

    def keeps(self, session: KnownSession) -> bool:
        return session is self.kept


class Table:
    """A table whose races have nobody at the other end."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.policy = Keeping()
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.sessions: SessionTable[KnownSession] = SessionTable(self.policy, context, self.effects)

    def add(self, number: int = 0, state: State = "open", sender: str = "") -> KnownSession | None:
        session = KnownSession(offer(number, state), TARGETS, sender)
        return session if self.sessions.add(session) else None

    def added(self, number: int = 0, state: State = "open") -> KnownSession:
        session = self.add(number, state)
        assert session is not None
        return session

    def race(self, session: KnownSession, purpose: frames.Purpose = "join") -> None:
        call = Call(job="job", member=b"M" * 16, session=session.name, purpose=purpose)
        self.sessions.race(session, call, 0.0)


def test_the_idle_one_that_was_silent_for_longest_makes_room() -> None:
    table = Table()
    racing, kept, heard, *_ = (table.added(number) for number in range(REMEMBERED_SESSIONS))
    table.race(racing)
    table.policy.kept = kept
    table.sessions.heard(heard)
    assert table.add(99) is not None
    assert len(list(table.sessions)) == REMEMBERED_SESSIONS
    for session in (racing, kept, heard):
        assert table.sessions.get(session.name) is session
    assert table.sessions.get(offer(3).session) is None


def test_sender_of_invented_sessions_leaves_room_for_others() -> None:
    table = Table()
    for number in range(2 * REMEMBERED_SESSIONS):
        if (session := table.add(number, sender="10.0.0.66")) is not None:
            table.race(session)
    assert len(list(table.sessions)) == REMEMBERED_BY_SENDER
    assert table.add(99, sender="10.0.0.9") is not None


def test_table_full_of_races_takes_no_session() -> None:
    table = Table()
    for number in range(REMEMBERED_SESSIONS):
        table.race(table.added(number))
    assert table.add(99) is None
    assert table.sessions.get(offer(99).session) is None


def test_a_connection_has_one_owner_until_it_is_hung_up() -> None:
    table = Table()
    one, other = table.added(1), table.added(2)
    table.race(one)
    table.race(other)
    conns = [effect.conn for effect in table.effects if isinstance(effect, Dial)]
    assert [table.sessions.owner(conn) for conn in conns] == [one, other]
    assert not table.sessions.owns(max(conns) + 1)
    one.hang_up()
    assert [table.sessions.owns(conn) for conn in conns] == [False, True]
    table.sessions.remove(other)
    assert not table.sessions.owns(conns[1])


def test_all_but_the_chosen_one_are_hung_up_on() -> None:
    table = Table()
    chosen, other = table.added(1), table.added(2)
    table.race(chosen)
    table.race(other)
    (_, conn) = [effect.conn for effect in table.effects if isinstance(effect, Dial)]
    table.effects.clear()
    table.sessions.hang_up(but=chosen)
    assert other.race is None
    assert chosen.race is not None
    assert Hangup(conn) in table.effects
    table.sessions.hang_up()
    assert chosen.race is None


def test_a_race_that_was_lost_is_none_and_not_run_again_at_once() -> None:
    table = Table()
    session = table.added()
    table.race(session)
    assert session.races_to("join")
    assert not session.races_to("probe")
    table.sessions.handle_timer(ADDRESS_SECONDS)
    assert session.race is None
    assert session.retry_at == ADDRESS_SECONDS + RETRY_SECONDS


# --- the already-running check -----------------------------------------------------------------------------------


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


def test_session_that_is_heard_of_again_does_not_make_room() -> None:
    table = Table()
    for number in range(REMEMBERED_SESSIONS):
        remember(table.sessions, offer(number), TARGETS)
    remember(table.sessions, offer(0), TARGETS)
    remember(table.sessions, offer(99), TARGETS)
    assert table.sessions.get(offer(0).session) is not None
    assert table.sessions.get(offer(1).session) is None


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
