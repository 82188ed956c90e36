"""Detached calls, and the start of a thread."""

from __future__ import annotations

import gc
import threading

import pytest

import mingle
from mingle import detached
from mingle.detached import AbandonedError
from mingle.errors import MingleError
from tests.support.loopback import job_name, until
from tests.support.ports import free_udp_port

# --- starting a thread ---------------------------------------------------------------------------------------------


def test_an_interrupt_that_the_waiting_turns_into_another_error_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        detached.start_explained(threading.Thread())


@pytest.fixture
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


@pytest.mark.usefixtures("_no_thread")
def test_a_thread_that_cannot_be_started_while_an_exception_is_handled() -> None:
    try:
        raise ValueError
    except ValueError:
        with pytest.raises(RuntimeError, match="can't start"):
            detached.start(threading.Thread())


@pytest.mark.usefixtures("_no_thread")
def test_a_system_that_allows_no_more_threads_is_no_defect() -> None:
    port = free_udp_port()
    for world_size, rank in ((2, 0), (2, 1), (1, 0)):
        with pytest.raises(MingleError, match="can't start new thread") as caught:
            mingle.discover(job_name("threads"), port=port, rank=rank, world_size=world_size, discovery_timeout=5)
        assert "limit of threads" in (caught.value.cause or "")


# --- detached calls -------------------------------------------------------------------------------------------------


def test_a_call_that_is_given_up_is_left_running_under_a_name_that_says_so() -> None:
    started, release, name = threading.Event(), threading.Event(), []

    def block() -> None:
        name.append(threading.current_thread().name)
        started.set()
        release.wait()

    with pytest.raises(AbandonedError):
        detached.run(block, "test", started.is_set)
    assert name == ["mingle-abandoned-test"]
    release.set()


def test_an_outcome_that_is_there_counts_more_than_giving_up() -> None:
    asked, threads = threading.Event(), list[threading.Thread]()

    def wait_until_asked() -> str:
        threads.append(threading.current_thread())
        asked.wait(30)
        return "done"

    def given_up() -> bool:
        asked.set()
        until(lambda: threads and not threads[0].is_alive())
        return True

    assert detached.run(wait_until_asked, "test", given_up) == "done"


def test_an_error_is_handed_on_and_not_kept() -> None:
    class GoneError(Exception):
        pass

    def fail() -> None:
        raise GoneError

    gc.disable()
    raised = False
    try:
        try:
            detached.run(fail, "test", lambda: False)
        except GoneError:
            raised = True
        assert raised
        assert not [each for each in gc.get_objects() if type(each) is GoneError], "a cycle keeps it"
    finally:
        gc.enable()
