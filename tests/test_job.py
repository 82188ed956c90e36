"""A job as its user holds it, with a session that the test plays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def a_job(**more: Any) -> Job:
    return Job(
        job_id="resnet",
        rank=1,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        node_rank=1,
        num_nodes=2,
        master_addr="10.0.0.0",
        master_port=4321,
        interface="eth0",
        address="10.0.0.1",
        elapsed=0.5,
        **more,
    )


def test_members_are_fetched_once_and_kept_after_the_end() -> None:
    session = PlayedSession()
    job = a_job(_session=session)
    assert session.asked == 0
    assert job.members == MEMBERS
    job.close()
    assert job.members is job.members
    assert session.asked == 1


def test_members_asked_for_the_first_time_after_the_end() -> None:
    job = a_job(_session=PlayedSession())
    job.close()
    with pytest.raises(MingleError, match="'resnet' were never asked for, and now the job is closed") as caught:
        _ = job.members
    assert "read job.members once while the job is open" in str(caught.value)


def test_members_that_cannot_be_fetched_may_be_asked_for_again() -> None:
    session = PlayedSession(MingleError("rank 0 did not answer"))
    job = a_job(_session=session)
    with pytest.raises(MingleError, match="did not answer"):
        _ = job.members
    session.problem = None
    assert job.members == MEMBERS


def test_threads_share_one_question() -> None:
    asking, answer = threading.Event(), threading.Event()

    class SlowSession(PlayedSession):
        def roster(self) -> tuple[Member, ...]:
            asking.set()
            assert answer.wait(5)
            return super().roster()

    session = SlowSession()
    job = a_job(_session=session)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(lambda: job.members) for _ in range(2)]
        assert asking.wait(5)
        answer.set()
        assert [each.result(5) for each in answers] == [MEMBERS, MEMBERS]
    assert session.asked == 1


def test_closing_twice_closes_once_and_leaves_the_process_group() -> None:
    session, destroyed = PlayedSession(), list[bool]()
    job = a_job(_session=session, _destroy_group=destroyed.append)
    job.close()
    job.close()
    assert (session.closed, destroyed) == ([False], [])


def test_the_end_of_the_block_ends_the_process_group_first() -> None:
    order: list[object] = []

    class Ordered(PlayedSession):
        def close(self, *, failing: bool) -> None:
            order.append(("session", failing))

    with a_job(_session=Ordered(), _destroy_group=lambda failing: order.append(("group", failing))) as job:
        assert job.rank == 1
    assert order == [("group", False), ("session", False)]
    job.close()
    job.__exit__(None, None, None)
    assert len(order) == 2


def test_an_exception_in_the_block_is_told_to_both() -> None:
    session, destroyed = PlayedSession(), list[bool]()
    with pytest.raises(ZeroDivisionError), a_job(_session=session, _destroy_group=destroyed.append):
        _ = 1 / 0
    assert (session.closed, destroyed) == ([True], [True])


def test_a_block_after_close_still_ends_the_process_group() -> None:
    session, destroyed = PlayedSession(), list[bool]()
    with a_job(_session=session, _destroy_group=destroyed.append) as job:
        job.close()
    assert (session.closed, destroyed) == ([False], [False])


def test_a_process_group_that_fails_to_end_keeps_the_session_from_nothing() -> None:
    def fail(_: bool) -> None:
        raise RuntimeError("the backend is broken")

    session = PlayedSession()
    with pytest.raises(RuntimeError, match="broken"), a_job(_session=session, _destroy_group=fail):
        pass
    assert session.closed == [True]


def test_where_torchrun_did_the_discovery_there_are_no_members() -> None:
    job = a_job(_members=())
    assert job.members == ()
    job.close()


def test_it_shows_what_its_user_wants_to_see() -> None:
    job = a_job(_session=PlayedSession())
    assert repr(job) == (
        "Job(job_id='resnet', rank=1, world_size=2, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2, "
        "master_addr='10.0.0.0', master_port=4321, interface='eth0', address='10.0.0.1', elapsed=0.5)"
    )
