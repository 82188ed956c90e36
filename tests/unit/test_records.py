"""Records of threads in which no line of the application may run."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mingle import records
from mingle.cli import output
from mingle.engine import progress
from mingle.records import logger
from tests.support.in_process import formed
from tests.support.loopback import until

needs_poll = pytest.mark.skipif(not hasattr(select, "poll"), reason="this system has no poll()")


class Handler(logging.Handler):
    """A handler of the application."""

    def __init__(self, does: Callable[[logging.LogRecord], object] = bool) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.threads: set[str] = set()
        self._does = does

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.threads.add(threading.current_thread().name)
        self._does(record)


Adds = Callable[[Handler], Handler]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FLUSH_SECONDS", 30.0)


@pytest.fixture
def handled() -> Iterator[Adds]:
    """Adds a handler to the logger ``mingle``, at DEBUG, until the end of the test."""
    mingle, added = logging.getLogger("mingle"), list[Handler]()
    before = mingle.level

    def add(handler: Handler) -> Handler:
        added.append(handler)
        mingle.addHandler(handler)
        mingle.setLevel(logging.DEBUG)
        return handler

    yield add
    mingle.setLevel(before)
    for each in added:
        mingle.removeHandler(each)
    records.flush()


def deferring(action: Callable[[], object]) -> None:
    """Run something in a thread that defers, and wait for the end of it."""

    def run() -> None:
        records.defer_here()
        action()

    thread = threading.Thread(target=run, name="mingle-of-a-test", daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_records_of_a_deferring_thread_come_in_order_and_as_they_were_made(handled: Adds) -> None:
    handler = handled(Handler(lambda _: time.sleep(0.001)))

    def several() -> None:
        for number in range(20):
            logger.info("number %d", number)

    began = time.time()
    deferring(several)
    ended = time.time()
    records.flush()
    assert [record.getMessage() for record in handler.records] == [f"number {number}" for number in range(20)]
    assert handler.threads == {"mingle-log"}
    for record in handler.records:
        assert (record.threadName, record.funcName, record.filename) == (
            "mingle-of-a-test",
            "several",
            "test_records.py",
        )
        assert began <= record.created <= ended


def test_other_threads_log_at_once_and_by_their_own_name(handled: Adds) -> None:
    handler = handled(Handler())
    logger.debug("here")
    (record,) = handler.records
    assert handler.threads == {threading.current_thread().name}
    assert (record.funcName, record.filename) == (
        "test_other_threads_log_at_once_and_by_their_own_name",
        "test_records.py",
    )


def test_a_handler_that_raises_is_shown_and_the_next_record_is_handled(
    handled: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    handler = handled(Handler(lambda record: 1 // (record.getMessage() != "bad")))
    deferring(lambda: [logger.info(text) for text in ("bad", "good")])
    records.flush()
    assert [record.getMessage() for record in handler.records] == ["bad", "good"]
    assert [each.exc_type for each in shown] == [ZeroDivisionError]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_handler_that_forks_leaves_no_process_and_starts_it_with_the_signals_of_the_application(
    handled: Adds,
) -> None:
    children: list[int] = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    masks: list[set[Any]] = []

    def fork(_: logging.LogRecord) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        if child := os.fork():
            children.append(child)

    handled(Handler(fork))

    def blocks_and_logs() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        logger.info("fork")

    deferring(blocks_and_logs)
    until(lambda: children)
    until(lambda: os.waitpid(children[0], os.WNOHANG)[0] == children[0])
    assert masks == [blocked]


def test_records_deferred_behind_a_blocked_handler_are_bounded(handled: Adds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_DEFERRED", 10)
    monkeypatch.setattr(records, "FLUSH_SECONDS", 0.05)
    free = threading.Event()
    handler = handled(Handler(lambda _: free.wait(20)))
    deferring(lambda: [logger.info("%d", number) for number in range(100)])
    records.flush()
    assert len(handler.records) <= 1
    free.set()
    monkeypatch.setattr(records, "FLUSH_SECONDS", 30.0)
    records.flush()
    assert 10 <= len(handler.records) <= 11


def test_a_job_forms_while_a_handler_blocks_and_no_line_of_the_application_runs_in_its_loop(
    handled: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FLUSH_SECONDS", 0.05)
    free = threading.Event()
    handler = handled(Handler(lambda record: record.threadName == "mingle-rank" and free.wait(20)))
    with formed(2) as ranks:
        assert len(ranks) == 2
    free.set()
    monkeypatch.setattr(records, "FLUSH_SECONDS", 30.0)
    records.flush()
    assert "mingle-rank" in {record.threadName for record in handler.records}
    assert not any(name.startswith("mingle-") and name != "mingle-log" for name in handler.threads)


def test_a_handler_that_exits_silences_no_later_record(handled: Adds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's own counts SystemExit

    def leave(record: logging.LogRecord) -> None:
        if "first" in record.getMessage():
            raise SystemExit(1)

    handler = handled(Handler(leave))
    for text in ("the first", "the second"):
        deferring(lambda text=text: records.logger.info(text))  # type: ignore[misc]
        records.flush()
    assert [record.getMessage() for record in handler.records] == ["the first", "the second"]


def test_replaced_stderr_is_written_to_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, str]] = []

    class Stderr:
        def write(self, text: str) -> None:
            written.append((threading.current_thread().name, text))

        def flush(self) -> None:
            pass

    monkeypatch.setattr(records, "handlers", lambda *_: iter(()))
    monkeypatch.setattr(sys, "stderr", Stderr())
    deferring(lambda: progress.say(logging.WARNING, "look"))
    records.flush()
    assert written == [("mingle-log", "mingle: look\n")]


# --- a log that nobody reads ------------------------------------------------------------------------------------------


class Unread:
    """A file whose reader has stopped: a pipe that is full, or a terminal after Ctrl-S."""

    def __init__(self, kind: str) -> None:
        self._stopped = kind == "stopped terminal"
        self._reader, writer = os.openpty() if self._stopped else os.pipe()
        self.file = os.fdopen(writer, "w")
        if self._stopped:
            termios.tcflow(writer, termios.TCOOFF)
            return
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)

    def read_on(self) -> None:
        """Have the reader read again, and take what is there."""
        if self._stopped:
            termios.tcflow(self.file.fileno(), termios.TCOON)
        else:
            os.read(self._reader, 1 << 20)

    def text(self, end: str) -> str:
        """Return what has come since, up to this end: the kernel hands a terminal's output on in pieces."""
        got = b""
        while not (text := got.decode().replace("\r\n", "\n")).endswith(end):
            ready, _, _ = select.select([self._reader], [], [], 30)
            assert ready, f"nothing more was written than {text!r}"
            got += os.read(self._reader, 1 << 20)
        return text

    def close(self) -> None:
        if self._stopped:
            termios.tcflow(self.file.fileno(), termios.TCOON)
        os.close(self._reader)
        with contextlib.suppress(OSError):
            self.file.close()


@pytest.fixture(params=["full pipe", "stopped terminal"])
def unread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Unread]:
    """A file to redirect stderr to, in the test itself: pytest has an stderr of its own for each phase."""
    unread = Unread(request.param)
    monkeypatch.setattr(sys, "__stderr__", unread.file)
    records.take_dropped()
    yield unread
    unread.close()
    records.take_dropped()


def in_time(action: Callable[[], object]) -> None:
    """Run something that must not wait for the reader of a log."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@needs_poll
def test_lines_on_a_stderr_that_nobody_reads_are_dropped_and_counted(
    unread: Unread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "handlers", lambda *_: iter(()))
    with contextlib.redirect_stderr(unread.file):
        for text in ("one", "two", "three " * 2000):
            in_time(lambda text=text: progress.say(logging.WARNING, text))  # type: ignore[misc]
        in_time(lambda: output.say("four"))
        unread.read_on()
        progress.say(logging.WARNING, "five")
    assert unread.text("five\n") == "mingle: 4 messages dropped, since nothing read this log\nmingle: five\n"


@needs_poll
def test_records_for_a_handler_whose_stream_nobody_reads_are_dropped_and_counted(unread: Unread, handled: Adds) -> None:
    handled(logging.StreamHandler(unread.file))  # type: ignore[arg-type]
    in_time(lambda: logger.info("one"))
    in_time(lambda: logging.getLogger("mingle").info("two"))
    unread.read_on()
    logger.info("three")
    assert unread.text("three\n") == "2 messages dropped, since nothing read this log\nthree\n"


class Odd:
    """What an application has put in place of a stream."""

    def __init__(self, fileno: Callable[[], object]) -> None:
        self.fileno = fileno
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


def _refuse() -> object:
    raise NotImplementedError


@needs_poll
@pytest.mark.parametrize("fileno", [_refuse, lambda: None, lambda: -1, "none of its own"])
def test_a_stream_without_a_descriptor_gets_every_line(fileno: Callable[[], object], handled: Adds) -> None:
    stream = Odd(fileno)
    handled(logging.StreamHandler(stream))  # type: ignore[arg-type]
    logger.info("one")
    assert records.write(stream, "two\n")  # type: ignore[arg-type]
    assert stream.written == "one\ntwo\n"


@needs_poll
def test_a_long_text_is_cut_where_its_pipe_is_full_and_the_rank_goes_on(
    unread: Unread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "handlers", lambda *_: iter(()))
    unread.read_on()
    with contextlib.redirect_stderr(unread.file):
        in_time(lambda: progress.say(logging.WARNING, "x" * (1 << 20)))
    assert unread.text("x" * 1000)
