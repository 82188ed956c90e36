"""What goes on behind a job that has formed: the roster, the process group's coming and going, the end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest

import mingle
from mingle.distributed import process_group, session
from mingle.distributed.session import RunningSession
from mingle.engine import discovery, party, store
from mingle.errors import MingleError
from mingle.protocol import member
from mingle.protocol.host import Host
from tests.support.alarms import alarm_after
from tests.support.children import in_child
from tests.support.in_process import Formed, formed
from tests.support.loopback import answers, job_name, until

forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


AT_ONCE = 50.0
"""Less than what a wait in vain costs here, however busy the machine is."""


@pytest.fixture(autouse=True)
def _long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(party, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(session, "ROSTER_SECONDS", 60.0)


class Group:
    """Stands for torch's default process group: tells whether there is one."""

    def __init__(self) -> None:
        self.stands = False

    def __call__(self) -> bool:
        return self.stands


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr(process_group, "stands", group)
    return group


@pytest.fixture
def ranks(group: Group) -> Iterator[list[Formed]]:
    with formed() as ranks:
        yield ranks


@pytest.fixture
def sessions(ranks: list[Formed]) -> list[RunningSession]:
    return [RunningSession(*rank) for rank in ranks]


def fails_soon(asked: RunningSession, match: str, fix: str = "read job.members once, early") -> None:
    started = time.monotonic()
    with pytest.raises(MingleError, match=match) as caught:
        asked.roster()
    assert time.monotonic() - started < AT_ONCE
    assert fix in str(caught.value)
    assert caught.value.__cause__ is None


# --- the roster -----------------------------------------------------------------------------------------------------


def test_the_roster_is_the_same_on_every_rank(ranks: list[Formed], sessions: list[RunningSession]) -> None:
    rosters = [each.roster() for each in sessions]
    assert rosters[0] == rosters[1] == sessions[1].roster()
    assert [(each.rank, each.local_rank, each.node_rank) for each in rosters[0]] == [(0, 0, 0), (1, 1, 0)]
    for each in rosters[0]:
        assert (each.address, each.pid) == ("127.0.0.1", os.getpid())


def test_the_roster_after_rank_zero_has_ended(sessions: list[RunningSession]) -> None:
    sessions[0].close(failing=False)
    fails_soon(sessions[1], "rank 0 has ended its job")


def test_the_roster_of_a_session_that_has_ended_here(sessions: list[RunningSession]) -> None:
    # A job whose place another call has taken: its user still holds it.
    for each in reversed(sessions):
        each.close(failing=False)
    for each in sessions:
        fails_soon(each, "its session has ended")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_roster_that_was_not_the_one_sealed(ranks: list[Formed], rank: int) -> None:
    discovery, formation = ranks[rank]
    other = RunningSession(ranks[1 - rank].discovery, ranks[1 - rank].formation)
    mine = RunningSession(discovery, msgspec.structs.replace(formation, roster_digest=b"another"))
    fails_soon(mine, r"what came is not the roster that was sealed(.|\n)*another process than rank 0 answered")
    assert len(other.roster()) == 2


def test_a_host_that_does_not_answer(
    sessions: list[RunningSession], ranks: list[Formed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ROSTER_SECONDS", 0.2)
    monkeypatch.setattr(ranks[1].discovery.membership, "ask_roster", lambda: None)
    fails_soon(sessions[1], "rank 0 has not answered for 0.2 s", "the next use of job.members asks again")


def test_a_host_that_is_lost_without_a_word(sessions: list[RunningSession], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "RETURN_SECONDS", 0.1)
    monkeypatch.setattr(Host, "close", lambda *_, **__: None)  # no good-bye: its sockets just end
    sessions[0].close(failing=True)
    fails_soon(sessions[1], r"rank 0 is lost \(")


def test_a_job_that_is_closed_while_its_roster_is_fetched_is_named_so(
    sessions: list[RunningSession], ranks: list[Formed], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(ranks[1].discovery.membership, "ask_roster", asked.set)  # rank 0 is slow
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(sessions[1].roster)
        assert asked.wait(30)
        started = time.monotonic()
        sessions[1].close(failing=True)
        error = waiting.exception(timeout=60)
    assert time.monotonic() - started < AT_ONCE
    assert isinstance(error, MingleError)
    assert "its session has ended" in str(error)
    assert error.cause is not None
    assert "was closed" in error.cause


def test_the_alarm_of_the_user_is_not_taken_for_a_thread_that_does_not_answer(
    sessions: list[RunningSession], ranks: list[Formed]
) -> None:
    def alarmed(*_: object) -> None:
        raise TimeoutError("the alarm")

    free = threading.Event()
    ranks[1].discovery.call(lambda: free.wait(30) and None)  # the session's thread is busy
    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        with pytest.raises(TimeoutError, match="the alarm"), alarm_after(0.2):
            sessions[1].roster()
    finally:
        signal.signal(signal.SIGALRM, before)
        free.set()


def test_a_thread_that_does_not_answer_is_not_taken_for_rank_zero(
    sessions: list[RunningSession], ranks: list[Formed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(party, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(ranks[1].discovery, "call", lambda *_: None)
    fails_soon(sessions[1], "its loop has not answered for 0.05 s", "look at the load of this machine")


# --- the process group ----------------------------------------------------------------------------------------------


def test_the_store_is_let_go_of_when_the_process_group_stands(
    ranks: list[Formed], sessions: list[RunningSession], group: Group
) -> None:
    server = ranks[0].discovery.stores.server
    assert server is not None
    assert server.held
    group.stands = True
    until(lambda: not server.held)
    assert len(sessions[1].roster()) == 2, "rank 0 goes on answering"


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_rank_zero_ends_when_the_groups_of_the_others_stand_or_time_is_up(
    ranks: list[Formed],
    sessions: list[RunningSession],
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    ready: bool,
    seen: bool,
) -> None:
    """Also where the block of ``discover`` ends before the loop has seen the group that was made in it."""
    membership = ranks[1].discovery.membership
    assert membership is not None
    says_ready = membership.ready
    monkeypatch.setattr(membership, "ready", lambda _now: None)  # its init is still at work
    monkeypatch.setattr(session, "READY_SECONDS", 60.0 if ready else 0.5)
    if not seen:
        ranks[0].discovery.watch = lambda: 60.0
    group.stands = True
    if seen:
        sessions[0].group_stands()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(sessions[0].close, failing=False)
        assert len(sessions[1].roster()) == 2, "the end of rank 0's store would end the init of rank 1"
        if ready:
            time.sleep(0.5)
            assert not closing.done()
            ranks[1].discovery.call(partial(says_ready, time.monotonic()))
        closing.result(30)
    assert 0.5 <= time.monotonic() - began < 60


@pytest.mark.parametrize("failing", [True, False])
def test_rank_zero_waits_for_nobody_without_a_group_or_when_it_fails(
    ranks: list[Formed], sessions: list[RunningSession], group: Group, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    if failing:
        group.stands = True
        sessions[0].group_stands()
    monkeypatch.setattr(session, "READY_SECONDS", 60.0)
    began = time.monotonic()
    sessions[0].close(failing=failing)
    assert time.monotonic() - began < session.READY_SECONDS


def test_made_process_group_counts_before_it_is_seen(ranks: list[Formed], sessions: list[RunningSession]) -> None:
    server = ranks[0].discovery.stores.server
    for each in sessions:
        each.group_stands()
    assert server is not None
    assert not server.held


def test_standing_process_group_is_reported_at_once(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "WATCH_STANDING_SECONDS", 60.0)
    monkeypatch.setattr(discovery, "LINGER_SECONDS", 60.0)  # nor for the end of the member's UDP sockets
    with formed() as ranks:
        assert [RunningSession(*rank) for rank in ranks]
        host = ranks[0].discovery.host
        assert host is not None
        group.stands = True
        until(lambda: ranks[0].discovery.ask(lambda: host.registrar.seats.all_ready))


def test_a_job_ends_with_its_process_group(ranks: list[Formed], sessions: list[RunningSession], group: Group) -> None:
    group.stands = True
    for each in sessions:
        each.group_stands()
    assert len(sessions[1].roster()) == 2
    group.stands = False
    membership = ranks[1].discovery.membership
    assert membership is not None
    until(lambda: not membership.connected)
    fails_soon(sessions[1], "rank 0 has ended its job|its session has ended")


def test_whether_a_process_group_stands_is_told_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_group.stands() is False
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert process_group.stands() is False
    monkeypatch.setitem(sys.modules, "torch.distributed", type(sys)("a torch built without it"))
    assert process_group.stands() is False


# --- rank 0 is lost before there is a process group -------------------------------------------------------------------


def test_a_rank_zero_that_goes_before_the_process_group_is_named(
    sessions: list[RunningSession], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sessions[1].host_lost_error is None
    assert [each.loss() for each in sessions] == [None, None]
    monkeypatch.setattr(session, "LOSS_NOTICED_SECONDS", 30.0)
    caplog.set_level(logging.INFO, "mingle")
    sessions[0].close(failing=True)
    assert "rank 0 was lost after the job had formed" in str(sessions[1].loss())
    until(lambda: [record for record in caplog.records if "was lost" in record.message])  # it is said last
    assert sessions[1].host_lost_error is not None
    assert {record.levelname for record in caplog.records if "was lost" in record.message} == {"INFO"}
    assert "rank 0 was lost after the job had formed" in str(sessions[1].host_lost_error)
    assert f"pid {os.getpid()}: it ended its session: an exception ended it" in caplog.text


def test_a_rank_zero_that_dies_before_the_process_group_is_an_error_in_the_log(
    sessions: list[RunningSession], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "RETURN_SECONDS", 0.1)
    monkeypatch.setattr(session, "LOSS_NOTICED_SECONDS", 30.0)
    monkeypatch.setattr(Host, "close", lambda _host, _reason: None)  # no good-bye: its sockets just end
    sessions[0].close(failing=True)
    assert "rank 0 was lost after the job had formed" in str(sessions[1].loss())
    until(lambda: [record for record in caplog.records if "was lost" in record.message])  # it is said last
    assert {record.levelname for record in caplog.records if "was lost" in record.message} == {"ERROR"}


def test_a_rank_zero_that_goes_after_it_is_no_loss(
    sessions: list[RunningSession], ranks: list[Formed], group: Group
) -> None:
    group.stands = True
    sessions[1].group_stands()
    sessions[0].close(failing=False)
    membership = ranks[1].discovery.membership
    assert membership is not None
    until(lambda: not membership.connected)
    assert sessions[1].host_lost_error is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_thread_that_dies_is_told_at_once_wherever_somebody_waits(
    ranks: list[Formed], sessions: list[RunningSession], rank: int
) -> None:
    mine, died = sessions[rank], threading.Event()

    def die() -> None:
        died.set()
        raise ZeroDivisionError("a riddle")

    ranks[rank].discovery.call(die)
    assert died.wait(30)
    until(lambda: ranks[rank].discovery.failure)
    started = time.monotonic()
    for ask in (mine.group_stands, mine.roster, partial(mine.entry, 60)):
        with pytest.raises(MingleError, match="ended by an unforeseen ZeroDivisionError: a riddle") as caught:
            ask()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert isinstance(mine.loss(), MingleError)
    assert time.monotonic() - started < AT_ONCE
    mine.close(failing=True)


def test_a_proof_that_is_looked_at_again_is_given_up_when_the_thread_dies(
    monkeypatch: pytest.MonkeyPatch, group: Group
) -> None:
    monkeypatch.setattr(session, "FRESH_SECONDS", -1.0)
    waits = threading.Event()

    def never(_address: str, _port: int) -> Any:
        waits.set()
        raise ConnectionRefusedError(111, "Connection refused")

    with formed(2, enters=True) as ranks:
        waiting = RunningSession(*ranks[1])
        monkeypatch.setattr(store, "connect_plainly", never)
        with ThreadPoolExecutor(1) as pool:
            entry = pool.submit(waiting.entry, 60)
            assert waits.wait(30)
            ranks[1].discovery.call(lambda: 1 // 0)
            error = entry.exception(30)
        assert "unforeseen ZeroDivisionError" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)  # type: ignore[union-attr]


@pytest.mark.parametrize("stands", [False, True])
def test_blocked_store_call_fails_when_the_members_thread_dies(
    group: Group, stands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is torch's call, which nothing else ends; unless the process group stands, and the job trains."""
    with formed(2, enters=True) as ranks, ThreadPoolExecutor(1) as pool:
        sessions = [RunningSession(*rank) for rank in ranks]
        entry = sessions[1].entry(60)
        assert entry is not None
        handle, discovery, server = entry[0], ranks[1].discovery, ranks[0].discovery.stores.server
        assert server is not None
        held = server.handle
        assert held is not None
        monkeypatch.setattr(store.StoreServer, "abort", lambda _: None)  # the host's, which is slower
        if stands:
            group.stands = True
            until(lambda: discovery.group_stands)
        blocked = pool.submit(handle.get, "a key")
        discovery.call(lambda: 1 // 0)
        until(lambda: discovery.failure is not None and discovery.driver.udp.transport is None)
        if stands:
            held.set("a key", "a value")
            assert blocked.result(30) == b"a value"
        else:
            with pytest.raises(RuntimeError):
                blocked.result(30)


# --- what torch is handed -------------------------------------------------------------------------------------------


def test_torch_is_handed_the_connection_by_which_the_store_was_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, connected = store.connect, []

    def counted(*place: Any) -> store.StoreClient:
        connected.append(connect(*place))
        return connected[-1]

    monkeypatch.setattr(store, "connect", counted)
    monkeypatch.setattr(session, "FRESH_SECONDS", 60.0)
    monkeypatch.setattr(store, "await_server", lambda *_place, **_more: pytest.fail("a fresh proof is looked at"))
    with formed(3, enters=True) as ranks:
        sessions = [RunningSession(*rank) for rank in ranks]
        proved = list(connected)
        entries = [entry for each in sessions if (entry := each.entry(5)) is not None]
        assert [place for _, *place in entries] == [[0, 3], [1, 3], [2, 3]]
        assert ranks[0].discovery.stores.server is not None
        assert entries[0][0] is ranks[0].discovery.stores.server.handle
        assert {id(handle) for handle, *_ in entries[1:]} == {id(each.hand_over()) for each in proved}
        assert connected == proved, "none is opened for torch"
        entries[1][0].set("a", "b")
        assert [handle.get("a") for handle, *_ in entries] == [b"b"] * 3
        assert [each.entry(5) for each in sessions[1:]] == [None, None], "it is handed out once"


def test_where_nobody_wants_a_process_group_no_connection_is_kept(
    ranks: list[Formed], sessions: list[RunningSession]
) -> None:
    assert ranks[1].discovery.stores.client is None
    assert sessions[1].entry(60) is None


def test_a_proof_of_the_store_that_is_not_fresh_any_more_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's calls can't be stopped where the store is out of reach; this one can."""
    monkeypatch.setattr(session, "FRESH_SECONDS", -1.0)
    looked: list[tuple[str, int]] = []
    await_server = store.await_server

    def counted(address: str, port: int, **more: Any) -> None:
        looked.append((address, port))
        await_server(address, port, **more)

    monkeypatch.setattr(store, "await_server", counted)
    with formed(3, enters=True) as ranks:
        sessions = [RunningSession(*rank) for rank in ranks]
        place = ranks[0].formation.store_address, ranks[0].formation.store_port
        assert sessions[1].entry(60) is not None
        assert looked == [place]
        sessions[0].close(failing=True)
        with pytest.raises(MingleError, match="rank 0 was lost after the job had formed"):
            sessions[2].entry(60)


# --- whether it goes on --------------------------------------------------------------------------------------------


def test_a_job_goes_on_with_its_own_process_group_alone(
    group: Group, ranks: list[Formed], sessions: list[RunningSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, present, loop = sessions[1], Group(), ranks[1].discovery
    monkeypatch.setattr(process_group, "current", lambda: present if group.stands else None)
    assert mine.goes_on, "a group can still be made"
    group.stands = True
    mine.group_stands()
    until(lambda: loop.group_stands)
    assert mine.goes_on
    loop.call(lambda: 1 // 0)
    until(lambda: loop.failure is not None)
    assert mine.goes_on, "the group stands whatever becomes of the thread"
    group.stands = False
    assert not mine.goes_on
    group.stands, present = True, Group()
    assert not mine.goes_on, "another group that was made meanwhile"


# --- a member that ends before its process group stands ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("stands", "awaits_group", "failing", "reason"),
    [
        (False, False, True, "an exception ended it"),
        (False, True, True, "its process group could not be made"),
        (False, True, False, "its process group could not be made"),
        (False, False, False, ""),
        (True, True, True, ""),
    ],
)
def test_a_member_that_fails_before_its_process_group_stands_is_a_loss(
    ranks: list[Formed],
    sessions: list[RunningSession],
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    stands: bool,
    awaits_group: bool,
    failing: bool,
    reason: str,
) -> None:
    """Rank 0's store is closed then: otherwise the other ranks would wait for this one until torch's timeout."""
    host, server = ranks[0].discovery.host, ranks[0].discovery.stores.server
    assert host is not None
    assert server is not None
    losses: list[str] = []
    monkeypatch.setattr(ranks[0].discovery, "say", lambda _level, text, _error=None: losses.append(text))
    sessions[1].awaits_group = awaits_group
    group.stands = stands
    sessions[1].close(failing=failing)
    until(lambda: ranks[0].discovery.ask(lambda: host.registrar.seats.all_left))
    assert [text for text in losses if "rank 1" in text and reason in text and "its store is closed" in text] == losses
    assert bool(losses) == bool(reason)
    assert not (reason and server.held)


# --- the end --------------------------------------------------------------------------------------------------------


def test_closing_ends_everything_once(ranks: list[Formed], sessions: list[RunningSession]) -> None:
    ended: list[int] = []
    port = ranks[0].formation.store_port
    for number in (1, 0):
        sessions[number].on_close = partial(ended.append, number)
        sessions[number].close(failing=False)
    assert ended == [1, 0]
    until(lambda: not answers(port))


@pytest.mark.parametrize("failing", [True, False])
def test_a_close_that_continues_after_an_interrupt_does_not_ask_the_loop_that_has_ended(
    ranks: list[Formed], sessions: list[RunningSession], group: Group, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    """The interpreter's exit would wait 10 s for an answer."""
    ended: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    group.stands = True
    sessions[1].group_stands()
    sessions[0].group_stands()
    sessions[0].on_close = interrupt
    with pytest.raises(KeyboardInterrupt):
        sessions[0].close(failing=failing)
    monkeypatch.setattr(ranks[0].discovery, "ask", lambda _: pytest.fail("the loop is asked"))
    sessions[0].on_close = lambda: ended.append("closed")
    sessions[0].close(failing=False)
    assert ended == ["closed"]


def test_closing_at_the_same_time_is_closing_once(ranks: list[Formed], sessions: list[RunningSession]) -> None:
    """``job.close()`` in one thread and a new call, or the interpreter's exit, in another."""
    ended: list[int] = []
    for number, each in enumerate(sessions):
        each.on_close = partial(ended.append, number)
    held = threading.Event()
    ranks[1].discovery.call(lambda: until(held.is_set))  # its thread ends only when all of them wait for it
    with ThreadPoolExecutor(4) as pool:
        closing = [pool.submit(each.close, failing=False) for each in (sessions[1], sessions[0]) for _ in range(2)]
        until(lambda: all(call.running() or call.done() for call in closing))
        held.set()
        for call in closing:
            call.result(30)
    assert sorted(ended) == [0, 1]


@needs_fork
@forks
def test_a_forked_child_does_nothing_to_its_parents_session(sessions: list[RunningSession]) -> None:
    told: list[str] = []
    sessions[0].on_close = lambda: told.append("closed")

    def child() -> str:
        with pytest.raises(MingleError, match="this process is a fork of the rank") as refused:
            sessions[1].roster()
        assert "forked process" in str(refused.value.cause)
        for each in sessions:
            each.close(failing=False)
            each.close(failing=True)
        return f"closed nothing {told}"

    assert in_child(child) == "closed nothing []"
    assert [len(each.roster()) for each in sessions] == [2, 2]


# --- alone ----------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_the_thread_of_a_rank_alone_is_started_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython can turn it into a RuntimeError, see `detached.start`."""

    def interrupted(_: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mingle.discover(job_name("interrupted"), rank=0, world_size=1)
