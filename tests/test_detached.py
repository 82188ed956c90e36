"""Detached calls, and the pre-started worker: it exists before there is work, and is replaced when it hangs."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import mingle
from mingle import detached
from mingle.detached import AbandonedError, PreStartedWorker
from mingle.errors import MingleError
from tests.bystanders import free_udp_port
from tests.loopback import job_name


@pytest.fixture
def worker() -> Iterator[PreStartedWorker]:
    made = PreStartedWorker()
    yield made
    made.end()


def names() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("mingle-"))


def done(work: Callable[[], object] = lambda: None) -> tuple[threading.Event, Callable[[], None]]:
    """Return an event, and work that sets it at its end."""
    event = threading.Event()

    def run() -> None:
        work()
        event.set()

    return event, run


def when_idle(worker: PreStartedWorker, thread: threading.Thread) -> None:
    """Wait until the thread has gone back to waiting: it says so after its work has ended."""
    pause = threading.Event()
    for _ in range(1000):
        assert worker._worker is not None
        if not worker._worker.busy:
            return
        pause.wait(0.002)
    raise AssertionError(f"{thread.name} is still at work")


def test_it_is_there_before_there_is_work(worker: PreStartedWorker) -> None:
    assert names() == []
    worker.prepare()
    worker.prepare()
    assert names() == ["mingle-idle"]


def test_one_thread_does_one_thing_after_another_under_the_name_of_each(worker: PreStartedWorker) -> None:
    seen: list[tuple[str, int]] = []
    worker.prepare()
    for name in ("mingle-first", "mingle-second"):
        event, run = done(lambda: seen.append((threading.current_thread().name, threading.get_ident())))
        thread = worker.run(name, run)
        assert event.wait(5)
        when_idle(worker, thread)
    (first, ident), (second, other) = seen
    assert (first, second) == ("mingle-first", "mingle-second")
    assert ident == other
    assert names() == ["mingle-idle"]


def test_who_does_not_prepare_it_gets_it_all_the_same(worker: PreStartedWorker) -> None:
    event, run = done()
    worker.run("mingle-work", run)
    assert event.wait(5)


def test_one_that_hangs_is_left_to_itself_and_ends_with_its_work(worker: PreStartedWorker) -> None:
    go_on = threading.Event()
    hanging = worker.run("mingle-hanging", lambda: go_on.wait(20))
    event, run = done()
    assert worker.run("mingle-work", run) is not hanging
    assert event.wait(5), "nobody waits for the one that hangs"
    go_on.set()
    hanging.join(5)
    assert not hanging.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_fails_is_replaced(worker: PreStartedWorker) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    failing = worker.run("mingle-failing", fail)
    failing.join(5)
    event, run = done()
    worker.run("mingle-work", run)
    assert event.wait(5)


def test_at_its_end_an_idle_one_is_gone_and_one_at_work_is_not_waited_for(worker: PreStartedWorker) -> None:
    worker.prepare()
    worker.end()
    assert names() == []
    busy, go_on = PreStartedWorker(), threading.Event()
    thread = busy.run("mingle-busy", lambda: go_on.wait(20))
    busy.end()
    assert thread.is_alive()
    go_on.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit], ids=["Ctrl-C", "a SIGTERM handler"])
def test_an_interrupt_that_the_waiting_turns_into_another_error_is_one(
    raised: type[BaseException], worker: PreStartedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: threading.Thread) -> None:
        try:
            raise raised
        finally:
            threading.Lock().release()

    monkeypatch.setattr(detached, "INTERRUPTED_SECONDS", 0.0)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(raised):
        worker.prepare()


def test_a_thread_that_cannot_be_started_while_an_exception_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    try:
        raise ValueError
    except ValueError:
        with pytest.raises(RuntimeError, match="can't start"):
            detached.start(threading.Thread())


@pytest.mark.parametrize("there", [True, False])
def test_an_interrupt_while_it_is_started_leaves_none(
    there: bool, worker: PreStartedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if there:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(detached, "INTERRUPTED_SECONDS", 0.05 if not there else 5.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.prepare()
    assert names() == []
    worker.prepare()
    assert names() == ["mingle-idle"]


def test_a_system_that_allows_no_more_threads_is_no_defect(
    worker: PreStartedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(detached, "INTERRUPTED_SECONDS", 0.0)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(MingleError, match="can't start new thread") as caught:
        worker.prepare()
    assert "limit of threads" in (caught.value.cause or "")
    port = free_udp_port()
    for world_size, rank in ((2, 0), (2, 1), (1, 0)):
        with pytest.raises(MingleError, match="limit of threads"):
            mingle.discover(job_name("threads"), port=port, rank=rank, world_size=world_size, discovery_timeout=5)


def test_work_that_comes_after_the_end_is_done_by_a_thread_that_ends_with_it(worker: PreStartedWorker) -> None:
    worker.end()
    event, run = done()
    thread = worker.run("mingle-late", run)
    assert event.wait(5)
    thread.join(5)
    assert not thread.is_alive()


def test_its_own_work_may_end_it(worker: PreStartedWorker) -> None:
    thread = worker.run("mingle-closing", worker.end)
    thread.join(5)
    assert not thread.is_alive()


# --- detached calls -------------------------------------------------------------------------------------------------


def never() -> bool:
    return False


def test_a_call_returns_what_its_function_does() -> None:
    assert detached.run(lambda: 7, "test", never) == 7


def test_a_call_raises_what_its_function_does() -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        detached.run(fail, "test", never)


def test_a_call_that_is_given_up_is_left_running_under_a_name_that_says_so() -> None:
    release, name = threading.Event(), []

    def block() -> None:
        name.append(threading.current_thread().name)
        release.wait()

    started = time.monotonic()
    with pytest.raises(AbandonedError):
        detached.run(block, "test", lambda: True)
    assert time.monotonic() - started < 1
    assert name == ["mingle-abandoned-test"]
    release.set()


def test_an_outcome_that_is_there_counts_more_than_giving_up() -> None:
    assert detached.run(lambda: "done", "test", lambda: True) == "done"


def test_an_error_is_handed_on_and_not_kept() -> None:
    class GoneError(Exception):
        pass

    def fail() -> None:
        raise GoneError

    gc.disable()
    try:
        with contextlib.suppress(GoneError):
            detached.run(fail, "test", never)
        assert not [each for each in gc.get_objects() if type(each) is GoneError], "a cycle keeps it"
    finally:
        gc.enable()
