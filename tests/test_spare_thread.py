"""The spare thread: it is there before there is work, does one thing after another, and is replaced when it hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from mingle.engine import spare_thread
from mingle.engine.spare_thread import SpareThread


@pytest.fixture
def spare() -> Iterator[SpareThread]:
    made = SpareThread()
    yield made
    made.end()


def names() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("mingle-"))


def done(work: Callable[[], object] = lambda: None) -> tuple[threading.Event, Callable[[], None]]:
    """Returns an event, and work that sets it at its end."""
    event = threading.Event()

    def run() -> None:
        work()
        event.set()

    return event, run


def when_idle(spare: SpareThread, thread: threading.Thread) -> None:
    """Waits until the thread has gone back to waiting: it says so after its work has ended."""
    pause = threading.Event()
    for _ in range(1000):
        assert spare._worker is not None
        if not spare._worker.busy:
            return
        pause.wait(0.002)
    raise AssertionError(f"{thread.name} is still at work")


def test_it_is_there_before_there_is_work(spare: SpareThread) -> None:
    assert names() == []
    spare.prepare()
    spare.prepare()
    assert names() == ["mingle-spare"]


def test_one_thread_does_one_thing_after_another_under_the_name_of_each(spare: SpareThread) -> None:
    seen: list[tuple[str, int]] = []
    spare.prepare()
    for name in ("mingle-first", "mingle-second"):
        event, run = done(lambda: seen.append((threading.current_thread().name, threading.get_ident())))
        thread = spare.run(name, run)
        assert event.wait(5)
        when_idle(spare, thread)
    (first, ident), (second, other) = seen
    assert (first, second) == ("mingle-first", "mingle-second")
    assert ident == other
    assert names() == ["mingle-spare"]


def test_who_does_not_prepare_it_gets_it_all_the_same(spare: SpareThread) -> None:
    event, run = done()
    spare.run("mingle-work", run)
    assert event.wait(5)


def test_one_that_hangs_is_left_to_itself_and_ends_with_its_work(spare: SpareThread) -> None:
    go_on = threading.Event()
    hanging = spare.run("mingle-hanging", lambda: go_on.wait(20))
    event, run = done()
    assert spare.run("mingle-work", run) is not hanging
    assert event.wait(5), "nobody waits for the one that hangs"
    go_on.set()
    hanging.join(5)
    assert not hanging.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_fails_is_replaced(spare: SpareThread) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    failing = spare.run("mingle-failing", fail)
    failing.join(5)
    event, run = done()
    spare.run("mingle-work", run)
    assert event.wait(5)


def test_at_its_end_an_idle_one_is_gone_and_one_at_work_is_not_waited_for(spare: SpareThread) -> None:
    spare.prepare()
    spare.end()
    assert names() == []
    busy, go_on = SpareThread(), threading.Event()
    thread = busy.run("mingle-busy", lambda: go_on.wait(20))
    busy.end()
    assert thread.is_alive()
    go_on.set()
    thread.join(5)
    assert not thread.is_alive()


def test_an_interrupt_that_the_waiting_turns_into_another_error_is_one(
    spare: SpareThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr(spare_thread, "INTERRUPTED_SECONDS", 0.0)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spare.prepare()


@pytest.mark.parametrize("there", [True, False])
def test_an_interrupt_while_it_is_started_leaves_none(
    there: bool, spare: SpareThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if there:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(spare_thread, "INTERRUPTED_SECONDS", 0.05 if not there else 5.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spare.prepare()
    assert names() == []
    spare.prepare()
    assert names() == ["mingle-spare"]


def test_work_that_comes_after_the_end_is_done_by_a_thread_that_ends_with_it(spare: SpareThread) -> None:
    spare.end()
    event, run = done()
    thread = spare.run("mingle-late", run)
    assert event.wait(5)
    thread.join(5)
    assert not thread.is_alive()


def test_its_own_work_may_end_it(spare: SpareThread) -> None:
    thread = spare.run("mingle-closing", spare.end)
    thread.join(5)
    assert not thread.is_alive()
