"""A job as its user holds it, with a session that the test plays."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from mingle.errors import MingleError
from mingle.job import Job, Member

MEMBERS = tuple(
    Member(rank=rank, local_rank=0, node_rank=rank, hostname=f"node{rank}", address=f"10.0.0.{rank}", pid=7)
    for rank in range(2)
)


class PlayedSession:
    def __init__(self, problem: MingleError | None = None) -> None:
        self.problem = problem
        self.asked = 0
        self.closed: list[bool] = []

    def roster(self) -> tuple[Member, ...]:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        return MEMBERS

    def close(self, *, failing: bool) -> None:
        self.closed.append(failing)


FIELDS = (
    *("job_id", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"),
    *("master_addr", "master_port", "interface", "address", "elapsed"),
)
VALUES = ("resnet", 1, 2, 0, 1, 1, 2, "10.0.0.0", 4321, "eth0", "10.0.0.1", 0.5)


def a_job(
    session: PlayedSession | None = None,
    members: tuple[Member, ...] | None = None,
    destroy_group: Callable[[bool], None] | None = None,
) -> Job:
    job = Job(**dict(zip(FIELDS, VALUES, strict=True)))
    if session is not None:
        job._with(session, members)
    if destroy_group is not None:
        job._owns_group(destroy_group)
    return job


def test_members_are_fetched_once_and_kept_after_the_end() -> None:
    session = PlayedSession()
    job = a_job(session=session)
    assert session.asked == 0
    assert job.members == MEMBERS
    job.close()
    assert job.members is job.members
    assert session.asked == 1


def test_members_asked_for_the_first_time_after_the_end() -> None:
    job = a_job(session=PlayedSession())
    job.close()
    with pytest.raises(MingleError, match="'resnet' were never asked for, and now the job is closed") as caught:
        _ = job.members
    assert "read job.members once while the job is open" in str(caught.value)


def test_members_that_cannot_be_fetched_may_be_asked_for_again() -> None:
    session = PlayedSession(MingleError("rank 0 did not answer"))
    job = a_job(session=session)
    with pytest.raises(MingleError, match="did not answer"):
        _ = job.members
    session.problem = None
    assert job.members == MEMBERS


def test_threads_share_one_question() -> None:
    asking, answer = threading.Event(), threading.Event()

    class SlowSession(PlayedSession):
        def roster(self) -> tuple[Member, ...]:
            asking.set()
            assert answer.wait(30)
            return super().roster()

    session = SlowSession()
    job = a_job(session=session)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(lambda: job.members) for _ in range(2)]
        assert asking.wait(30)
        answer.set()
        assert [each.result(30) for each in answers] == [MEMBERS, MEMBERS]
    assert session.asked == 1


def test_a_signal_handler_may_ask_for_the_members_while_they_are_fetched() -> None:
    class Interrupted(PlayedSession):
        def roster(self) -> tuple[Member, ...]:
            members = super().roster()
            return members if self.asked > 1 else job.members

    job = a_job(session=Interrupted())
    fetched: list[tuple[Member, ...]] = []
    thread = threading.Thread(target=lambda: fetched.append(job.members), daemon=True)
    thread.start()
    thread.join(30)
    assert fetched == [MEMBERS]


@pytest.mark.parametrize("way", ["block", "close"])
def test_the_process_group_ends_first_and_once(way: str) -> None:
    order: list[object] = []

    class Ordered(PlayedSession):
        def close(self, *, failing: bool) -> None:
            order.append(("session", failing))

    job = a_job(session=Ordered(), destroy_group=lambda failing: order.append(("group", failing)))
    if way == "block":
        with job:
            assert job.rank == 1
    else:
        job.close()
    assert order == [("group", False), ("session", False)]
    job.close()
    job.__exit__(None, None, None)
    assert len(order) == 2


@pytest.mark.parametrize("way", ["block", "finally"])
def test_an_exception_on_its_way_is_told_to_group_and_session(way: str) -> None:
    session, destroyed = PlayedSession(), list[bool]()
    job = a_job(session=session, destroy_group=destroyed.append)
    with pytest.raises(ZeroDivisionError), job if way == "block" else contextlib.nullcontext():  # noqa: PT012
        try:
            _ = 1 / 0
        finally:
            if way == "finally":
                job.close()
    assert (session.closed, destroyed) == ([True], [True])


def test_a_process_group_that_fails_to_end_keeps_the_session_from_nothing() -> None:
    def fail(_: bool) -> None:
        raise RuntimeError("the backend is broken")

    session = PlayedSession()
    with pytest.raises(RuntimeError, match="broken"), a_job(session=session, destroy_group=fail):
        pass
    assert session.closed == [True]


@pytest.mark.parametrize("at", ["group", "session"])
def test_a_close_that_was_interrupted_goes_on_with_the_next_one(at: str) -> None:
    order: list[str] = []

    def end(what: str) -> None:
        order.append(what)
        if what == at and order.count(what) == 1:
            raise KeyboardInterrupt

    class Ordered(PlayedSession):
        def close(self, *, failing: bool) -> None:
            end("session")

    job = a_job(session=Ordered(), destroy_group=lambda _: end("group"))
    with pytest.raises(KeyboardInterrupt):
        job.close()
    job.close()
    job.close()
    assert sorted(order) == sorted(["group", "session", at])


def test_a_close_at_the_same_time_waits_for_the_first_and_does_nothing() -> None:
    ending, go_on = threading.Event(), threading.Event()

    class SlowSession(PlayedSession):
        def close(self, *, failing: bool) -> None:
            ending.set()
            assert go_on.wait(30)
            super().close(failing=failing)

    session, destroyed = SlowSession(), list[bool]()
    job = a_job(session=session, destroy_group=destroyed.append)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(job.close)
        assert ending.wait(30)
        second = pool.submit(job.close)
        assert not second.done()
        go_on.set()
        first.result(30)
        second.result(30)
    assert (session.closed, destroyed) == ([False], [False])


def test_a_close_out_of_a_signal_handler_while_it_closes_does_not_wait_for_itself() -> None:
    class Interrupted(PlayedSession):
        def close(self, *, failing: bool) -> None:
            super().close(failing=failing)
            job.close()

    session = Interrupted()
    job = a_job(session=session)
    job.close()
    assert session.closed == [False]


# --- copies ---------------------------------------------------------------------------------------------------------


COPIES: dict[str, Callable[[Job], Job]] = {
    "pickle": lambda job: cast("Job", pickle.loads(pickle.dumps(job))),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_a_record_of_the_job_and_ends_nothing(copied: Callable[[Job], Job]) -> None:
    session, destroyed = PlayedSession(), list[bool]()
    job = a_job(session=session, destroy_group=destroyed.append)
    twin = copied(job)
    assert twin == job
    assert repr(twin) == repr(job)
    with pytest.raises(MingleError, match="'resnet' were never asked for, and this is a copy"):
        _ = twin.members
    with twin:
        pass
    twin.close()
    assert (session.closed, destroyed, session.asked) == ([], [], 0)
    job.close()
    assert (session.closed, destroyed) == ([False], [False])


@pytest.mark.parametrize("name", ["pickle", "copy", "deepcopy"])
def test_a_copy_knows_the_members_that_were_fetched_before(name: str) -> None:
    job = a_job(session=PlayedSession())
    assert job.members == COPIES[name](job).members == MEMBERS


def test_a_job_is_shown_and_written_without_internals() -> None:
    job = a_job(session=PlayedSession(), destroy_group=lambda _: None)
    record = dataclasses.asdict(job)
    assert (tuple(record), tuple(record.values())) == (FIELDS, VALUES)
    assert json.loads(json.dumps(record)) == record
    assert repr(job) == f"Job({', '.join(f'{name}={value!r}' for name, value in record.items())})"


def test_where_torchrun_did_the_discovery_there_are_no_members() -> None:
    job = a_job(session=PlayedSession(), members=())
    assert job.members == ()
    job.close()
