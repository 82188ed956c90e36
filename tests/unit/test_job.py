"""A job as its user holds it, with a session that the test plays."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from mingle import detached
from mingle.errors import MingleError
from mingle.job import Job, Member
from tests.support.failing import raising

MEMBERS = tuple(
    Member(rank=rank, local_rank=0, node_rank=rank, hostname=f"node{rank}", address=f"10.0.0.{rank}", pid=7)
    for rank in range(2)
)
RECORD: dict[str, Any] = {
    "job_id": "resnet",
    "rank": 1,
    "world_size": 2,
    "local_rank": 0,
    "local_world_size": 1,
    "node_rank": 1,
    "num_nodes": 2,
    "master_addr": "10.0.0.0",
    "master_port": 4321,
    "interface": "eth0",
    "address": "10.0.0.1",
    "elapsed": 0.5,
}


class Played:
    """The session behind a job, and its process group; ``meanwhile`` runs within each call."""

    def __init__(self, meanwhile: Callable[[str], object] = str) -> None:
        self.meanwhile = meanwhile
        self.asked = 0
        self.ended: list[tuple[str, bool]] = []
        self.job = Job(**RECORD)._with(self)
        self.job._owns_group(lambda failing: self._end("group", failing))

    def roster(self) -> tuple[Member, ...]:
        self.asked += 1
        self.meanwhile("roster")
        return MEMBERS

    def close(self, *, failing: bool) -> None:
        self._end("session", failing)

    def _end(self, what: str, failing: bool) -> None:
        self.ended.append((what, failing))
        self.meanwhile(what)


ENDED = [("group", False), ("session", False)]
asks = pytest.mark.parametrize(
    ("ask", "answer", "ended"),
    [(lambda job: job.members, MEMBERS, []), (lambda job: job.close(), None, ENDED)],
    ids=["members", "close"],
)


def test_members_are_fetched_once_and_kept_after_the_end() -> None:
    played = Played()
    assert played.asked == 0
    assert played.job.members == MEMBERS
    played.job.close()
    assert played.job.members == MEMBERS
    assert played.asked == 1


def test_members_asked_for_the_first_time_after_the_end_are_refused() -> None:
    job = Played().job
    job.close()
    with pytest.raises(MingleError, match="never asked for, and now the job is closed"):
        _ = job.members


def test_members_that_cannot_be_fetched_may_be_asked_for_again() -> None:
    played = Played(raising(MingleError("rank 0 did not answer")))
    with pytest.raises(MingleError, match="did not answer"):
        _ = played.job.members
    played.meanwhile = str
    assert played.job.members == MEMBERS


@asks
def test_two_threads_that_ask_the_same_wait_for_one_answer(
    ask: Callable[[Job], object], answer: object, ended: list[tuple[str, bool]]
) -> None:
    asking, go_on = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        asking.set()
        assert go_on.wait(30)

    played = Played(wait)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ask, played.job) for _ in range(2)]
        assert asking.wait(30)
        assert not any(call.done() for call in calls)
        go_on.set()
        assert [call.result(30) for call in calls] == [answer, answer]
    assert (played.asked, played.ended) == (int(not ended), ended)


@asks
def test_a_signal_handler_may_ask_the_same_within_a_call(
    ask: Callable[[Job], object], answer: object, ended: list[tuple[str, bool]]
) -> None:
    handled: list[str] = []

    def handle(what: str) -> None:
        if what not in handled:
            handled.append(what)
            ask(played.job)

    played = Played(handle)
    deadline = time.monotonic() + 30  # a call that waits for itself never ends
    assert detached.run(partial(ask, played.job), "call", lambda: time.monotonic() > deadline) == answer
    assert played.ended == ended


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("way", ["block", "close"])
def test_the_process_group_ends_first_and_both_once_and_hear_of_an_exception_on_its_way(
    way: str, failing: bool
) -> None:
    played = Played()
    job = played.job
    with (
        pytest.raises(ZeroDivisionError) if failing else contextlib.nullcontext(),
        job if way == "block" else contextlib.nullcontext(),
    ):
        try:
            _ = 1 / (not failing)
        finally:
            if way == "close":
                job.close()
    assert played.ended == [("group", failing), ("session", failing)]
    job.close()
    job.__exit__(None, None, None)
    assert len(played.ended) == 2


def test_a_process_group_that_fails_to_end_keeps_the_session_from_nothing() -> None:
    def fail(what: str) -> None:
        if what == "group":
            raise RuntimeError("the backend is broken")

    played = Played(fail)
    with pytest.raises(RuntimeError, match="broken"), played.job:
        pass
    assert played.ended == [("group", False), ("session", True)]


@pytest.mark.parametrize("at", ["group", "session"])
def test_a_close_that_was_interrupted_goes_on_with_the_next_one(at: str) -> None:
    def interrupt(what: str) -> None:
        if what == at:
            played.meanwhile = str
            raise KeyboardInterrupt

    played = Played(interrupt)
    with pytest.raises(KeyboardInterrupt):
        played.job.close()
    for _ in range(2):
        played.job.close()
    assert sorted(what for what, _ in played.ended) == sorted(["group", "session", at])


# --- copies ---------------------------------------------------------------------------------------------------------


COPIES: dict[str, Callable[[Job], Any]] = {
    "pickle": lambda job: pickle.loads(pickle.dumps(job)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_a_record_of_the_job_and_ends_nothing(copied: Callable[[Job], Job]) -> None:
    played = Played()
    twin = copied(played.job)
    assert twin == played.job
    assert repr(twin) == repr(played.job)
    with pytest.raises(MingleError, match="never asked for, and this is a copy"):
        _ = twin.members
    with twin:
        pass
    assert (played.ended, played.asked) == ([], 0)
    played.job.close()
    assert played.ended == ENDED


@pytest.mark.parametrize("name", ["pickle", "copy", "deepcopy"])
def test_a_copy_knows_the_members_that_were_fetched_before(name: str) -> None:
    job = Played().job
    assert job.members == COPIES[name](job).members == MEMBERS


def test_a_job_is_shown_and_written_without_internals() -> None:
    job = Played().job
    record = dataclasses.asdict(job)
    assert list(record.items()) == list(RECORD.items())
    assert json.loads(json.dumps(record)) == record
    assert repr(job) == f"Job({', '.join(f'{name}={value!r}' for name, value in record.items())})"
