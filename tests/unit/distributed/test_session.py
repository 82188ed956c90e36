"""What goes on behind a job that has formed: the roster, the process group's coming and going, the end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from mingle.distributed import process_group, session
from mingle.distributed.session import RunningSession
from mingle.engine import discovery, party, store
from mingle.errors import MingleError
from mingle.protocol import member
from mingle.protocol.host import Host
from tests.support.alarms import alarm_after
from tests.support.children import in_child
from tests.support.failing import raising
from tests.support.in_process import Formed, formed
from tests.support.loopback import answers, until

AT_ONCE = 50.0
"""Less than what a wait in vain costs here, however busy the machine is."""


@pytest.fixture(autouse=True)
def _long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(party, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(session, "ROSTER_SECONDS", 60.0)


class Group:
    """Stands for the default process group of torch: tells whether there is one."""

    stands = False


class Two:
    """A job of two that has formed. Whether torch has a process group is for the test to say."""

    def __init__(self, ranks: list[Formed], group: Group) -> None:
        self.ranks, self.group = ranks, group
        self.rank0, self.rank1 = self.sessions = [RunningSession(*rank) for rank in ranks]
        self.loop0, self.loop1 = (rank.discovery for rank in ranks)
        self.server: Any = self.loop0.stores.server
        self.host: Any = self.loop0.host
        self.membership: Any = self.loop1.membership


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr(process_group, "stands", lambda: group.stands)
    return group


@pytest.fixture
def two(group: Group) -> Iterator[Two]:
    with formed() as ranks:
        yield Two(ranks, group)


def fails_at_once(call: Callable[[], object], match: str, fix: str = "") -> MingleError:
    """Return the error of a call that waits for nothing."""
    started = time.monotonic()
    with pytest.raises(MingleError, match=match) as caught:
        call()
    assert time.monotonic() - started < AT_ONCE
    assert fix in str(caught.value.remedy)
    return caught.value


# --- the roster -----------------------------------------------------------------------------------------------------


def test_the_roster_is_the_same_on_every_rank(two: Two) -> None:
    roster = two.rank0.roster()
    assert roster == two.rank1.roster() == two.rank1.roster()
    assert [(each.rank, each.local_rank, each.node_rank) for each in roster] == [(0, 0, 0), (1, 1, 0)]
    assert {(each.address, each.pid) for each in roster} == {("127.0.0.1", os.getpid())}


def test_the_roster_after_rank_zero_has_ended(two: Two) -> None:
    two.rank0.close(failing=False)
    fails_at_once(two.rank1.roster, "rank 0 has ended its job", "read job.members once, early")


def test_the_roster_of_a_session_that_has_ended_here(two: Two) -> None:
    # A job whose place another call has taken: its user still holds it.
    for each in (two.rank1, two.rank0):
        each.close(failing=False)
        fails_at_once(each.roster, "its session has ended")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_roster_that_was_not_the_one_sealed(two: Two, rank: int) -> None:
    discovery, formation = two.ranks[rank]
    other = RunningSession(discovery, structs.replace(formation, roster_digest=b"another"))
    fails_at_once(other.roster, r"what came is not the roster that was sealed(.|\n)*another process than rank 0")
    assert len(two.sessions[1 - rank].roster()) == 2


def test_a_host_that_does_not_answer(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ROSTER_SECONDS", 0.2)
    monkeypatch.setattr(two.membership, "ask_roster", lambda: None)
    fails_at_once(two.rank1.roster, "rank 0 has not answered for 0.2 s", "the next use of job.members asks again")


def test_a_host_that_is_lost_without_a_word(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "RETURN_SECONDS", 0.1)
    monkeypatch.setattr(Host, "close", lambda *_, **__: None)  # no good-bye: its sockets just end
    two.rank0.close(failing=True)
    fails_at_once(two.rank1.roster, r"rank 0 is lost \(")


def test_a_job_that_is_closed_while_its_roster_is_fetched_is_named_so(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(two.membership, "ask_roster", asked.set)  # rank 0 is slow
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(two.rank1.roster)
        assert asked.wait(30)
        two.rank1.close(failing=True)
        error = fails_at_once(partial(waiting.result, 60), "its session has ended")
    assert "was closed" in str(error.cause)


def test_the_alarm_of_the_user_is_not_taken_for_a_thread_that_does_not_answer(two: Two) -> None:
    free = threading.Event()
    two.loop1.call(lambda: free.wait(30) and None)  # the session's thread is busy
    before = signal.signal(signal.SIGALRM, raising(TimeoutError("the alarm")))
    try:
        with pytest.raises(TimeoutError, match="the alarm"), alarm_after(0.2):
            two.rank1.roster()
    finally:
        signal.signal(signal.SIGALRM, before)
        free.set()


def test_a_thread_that_does_not_answer_is_not_taken_for_rank_zero(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(party, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(two.loop1, "call", lambda *_: None)
    fails_at_once(two.rank1.roster, "its loop has not answered for 0.05 s", "look at the load of this machine")


# --- the process group ----------------------------------------------------------------------------------------------


def test_the_store_is_let_go_of_when_the_process_group_stands(two: Two) -> None:
    assert two.server.held
    two.group.stands = True
    until(lambda: not two.server.held)
    assert len(two.rank1.roster()) == 2, "rank 0 goes on answering"


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_rank_zero_ends_when_the_groups_of_the_others_stand_or_time_is_up(
    two: Two, monkeypatch: pytest.MonkeyPatch, ready: bool, seen: bool
) -> None:
    """Also where the block of ``discover`` ends before the loop has seen the group that was made in it."""
    says_ready = two.membership.ready
    monkeypatch.setattr(two.membership, "ready", lambda _now: None)  # its init is still at work
    monkeypatch.setattr(session, "READY_SECONDS", 60.0 if ready else 0.5)
    if not seen:
        two.loop0.watch = lambda: 60.0
    two.group.stands = True
    if seen:
        two.rank0.group_stands()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(two.rank0.close, failing=False)
        assert len(two.rank1.roster()) == 2, "the end of rank 0's store would end the init of rank 1"
        if ready:
            time.sleep(0.5)
            assert not closing.done()
            two.loop1.call(partial(says_ready, time.monotonic()))
        closing.result(30)
    assert 0.5 <= time.monotonic() - began < 60


@pytest.mark.parametrize("failing", [True, False])
def test_rank_zero_waits_for_nobody_without_a_group_or_when_it_fails(
    two: Two, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    if failing:
        two.group.stands = True
        two.rank0.group_stands()
    monkeypatch.setattr(session, "READY_SECONDS", 60.0)
    began = time.monotonic()
    two.rank0.close(failing=failing)
    assert time.monotonic() - began < AT_ONCE


def test_made_process_group_counts_before_it_is_seen(two: Two) -> None:
    for each in two.sessions:
        each.group_stands()
    assert not two.server.held


def test_standing_process_group_is_reported_at_once(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "WATCH_STANDING_SECONDS", 60.0)
    monkeypatch.setattr(discovery, "LINGER_SECONDS", 60.0)  # nor for the end of the member's UDP sockets
    with formed() as ranks:
        two = Two(ranks, group)
        group.stands = True
        until(lambda: two.loop0.ask(lambda: two.host.registrar.seats.all_ready))


def test_a_job_ends_with_its_process_group(two: Two) -> None:
    two.group.stands = True
    for each in two.sessions:
        each.group_stands()
    assert len(two.rank1.roster()) == 2
    two.group.stands = False
    until(lambda: not two.membership.connected)
    fails_at_once(two.rank1.roster, "rank 0 has ended its job|its session has ended")


def test_whether_a_process_group_stands_is_told_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_group.stands() is False
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert process_group.stands() is False
    monkeypatch.setitem(sys.modules, "torch.distributed", type(sys)("a torch built without it"))
    assert process_group.stands() is False


# --- rank 0 is lost before there is a process group -------------------------------------------------------------------


@pytest.mark.parametrize(("says_so", "level"), [(True, "INFO"), (False, "ERROR")])
def test_a_rank_zero_that_goes_before_the_process_group_is_named(
    two: Two, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, says_so: bool, level: str
) -> None:
    """A job without a process group may have done its work, if its rank 0 says good-bye."""
    lost = "rank 0 was lost after the job had formed"
    assert [each.loss() for each in two.sessions] == [None, None]
    monkeypatch.setattr(session, "LOSS_NOTICED_SECONDS", 30.0)
    if not says_so:
        monkeypatch.setattr(member, "RETURN_SECONDS", 0.1)
        monkeypatch.setattr(Host, "close", lambda _host, _reason: None)
    caplog.set_level(logging.INFO, "mingle")
    two.rank0.close(failing=True)
    assert lost in str(two.rank1.loss())
    assert lost in str(two.rank1.host_lost_error)
    until(lambda: [record for record in caplog.records if "was lost" in record.message])  # it is said last
    assert {record.levelname for record in caplog.records if "was lost" in record.message} == {level}
    assert (f"pid {os.getpid()}: it ended its session: an exception ended it" in caplog.text) is says_so


def test_a_rank_zero_that_goes_after_it_is_no_loss(two: Two) -> None:
    two.group.stands = True
    two.rank1.group_stands()
    two.rank0.close(failing=False)
    until(lambda: not two.membership.connected)
    assert two.rank1.host_lost_error is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_thread_that_dies_is_told_at_once_wherever_somebody_waits(two: Two, rank: int) -> None:
    mine, loop = two.sessions[rank], two.ranks[rank].discovery
    loop.call(lambda: 1 // 0)
    until(lambda: loop.failure)
    for ask in (mine.group_stands, mine.roster, partial(mine.entry, 60)):
        error = fails_at_once(ask, "ended by an unforeseen ZeroDivisionError")
        assert isinstance(error.__cause__, ZeroDivisionError)
    assert isinstance(mine.loss(), MingleError)
    mine.close(failing=True)


def test_a_proof_that_is_looked_at_again_is_given_up_when_the_thread_dies(
    monkeypatch: pytest.MonkeyPatch, group: Group
) -> None:
    monkeypatch.setattr(session, "FRESH_SECONDS", -1.0)
    waits = threading.Event()

    def never(_address: str, _port: int) -> Any:
        waits.set()
        raise ConnectionRefusedError(111, "Connection refused")

    with formed(enters=True) as ranks, ThreadPoolExecutor(1) as pool:
        two = Two(ranks, group)
        monkeypatch.setattr(store, "connect_plainly", never)
        entry = pool.submit(two.rank1.entry, 60)
        assert waits.wait(30)
        two.loop1.call(lambda: 1 // 0)
        error = fails_at_once(partial(entry.result, 30), "unforeseen ZeroDivisionError")
    assert isinstance(error.__cause__, ZeroDivisionError)


# --- what torch is handed -------------------------------------------------------------------------------------------


def test_torch_is_handed_the_connection_by_which_the_store_was_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, connected = store.connect, list[store.StoreClient]()

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


def test_where_nobody_wants_a_process_group_no_connection_is_kept(two: Two) -> None:
    assert two.loop1.stores.client is None
    assert two.rank1.entry(60) is None


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
        assert sessions[1].entry(60) is not None
        assert looked == [(ranks[0].formation.store_address, ranks[0].formation.store_port)]
        sessions[0].close(failing=True)
        fails_at_once(partial(sessions[2].entry, 60), "rank 0 was lost after the job had formed")


# --- whether it goes on --------------------------------------------------------------------------------------------


def test_a_job_goes_on_with_its_own_process_group_alone(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, present, group = two.rank1, Group(), two.group
    monkeypatch.setattr(process_group, "current", lambda: present if group.stands else None)
    assert mine.goes_on, "a group can still be made"
    group.stands = True
    mine.group_stands()
    until(lambda: two.loop1.group_stands)
    assert mine.goes_on
    two.loop1.call(lambda: 1 // 0)
    until(lambda: two.loop1.failure is not None)
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
        (False, False, False, None),
        (True, True, True, None),
    ],
)
def test_a_member_that_fails_before_its_process_group_stands_is_a_loss(
    two: Two, monkeypatch: pytest.MonkeyPatch, stands: bool, awaits_group: bool, failing: bool, reason: str | None
) -> None:
    """Rank 0's store is closed then: otherwise the other ranks would wait for this one until torch's timeout."""
    losses: list[str] = []
    monkeypatch.setattr(two.loop0, "say", lambda _level, text, _error=None: losses.append(text))
    two.rank1.awaits_group = awaits_group
    two.group.stands = stands
    two.rank1.close(failing=failing)
    until(lambda: two.loop0.ask(lambda: two.host.registrar.seats.all_left))
    if reason is None:
        assert losses == []
    else:
        (loss,) = losses
        for part in ("rank 1", reason, "its store is closed"):
            assert part in loss
        assert not two.server.held


# --- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [True, False])
def test_a_close_that_continues_after_an_interrupt_does_not_ask_the_loop_that_has_ended(
    two: Two, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    """The interpreter's exit would wait 10 s for an answer."""
    ended: list[str] = []
    two.group.stands = True
    for each in two.sessions:
        each.group_stands()
    two.rank0.on_close = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        two.rank0.close(failing=failing)
    monkeypatch.setattr(two.loop0, "ask", lambda _: pytest.fail("the loop is asked"))
    two.rank0.on_close = partial(ended.append, "closed")
    two.rank0.close(failing=False)
    assert ended == ["closed"]


def test_closing_at_the_same_time_is_closing_once(two: Two) -> None:
    """``job.close()`` in one thread and a new call, or the interpreter's exit, in another."""
    ended: list[int] = []
    for number, each in enumerate(two.sessions):
        each.on_close = partial(ended.append, number)
    held = threading.Event()
    two.loop1.call(lambda: until(held.is_set))  # its thread ends only when all of them wait for it
    with ThreadPoolExecutor(4) as pool:
        closing = [pool.submit(each.close, failing=False) for each in (two.rank1, two.rank0) for _ in range(2)]
        until(lambda: all(call.running() or call.done() for call in closing))
        held.set()
        for call in closing:
            call.result(30)
    assert sorted(ended) == [0, 1]
    until(lambda: not answers(two.server.port))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_does_nothing_to_its_parents_session(two: Two) -> None:
    told: list[str] = []
    two.rank0.on_close = partial(told.append, "closed")

    def child() -> str:
        error = fails_at_once(two.rank1.roster, "this process is a fork of the rank")
        for each in two.sessions:
            each.close(failing=False)
            each.close(failing=True)
        return f"{'forked process' in str(error.cause)} {told}"

    assert in_child(child) == "True []"
    assert [len(each.roster()) for each in two.sessions] == [2, 2]
