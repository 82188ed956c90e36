"""The progress line: its texts, when it is shown, and who shows it. The clock is the test's."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
from msgspec import structs
from rich.status import Status

from mingle.engine import progress
from mingle.engine.progress import Progress, line, say
from mingle.protocol.explain.observations import Diagnostics, NetworkFacts, Situation
from mingle.wire import frames
from tests.support.alarms import alarm_is_passed_on
from tests.support.failing import refusing
from tests.support.loopback import job_name, until

Make = Callable[..., Progress]
Lines = Callable[..., dict[float, str]]
SEEKING = Situation(diagnostics=Diagnostics(), rank=1)


def joined(number: int, size: int, awaited: tuple[int, ...] = (), **more: Any) -> Situation:
    """How a job stands of which so many have joined."""
    status = frames.Status(
        joined=number, world_size=size, **{"missing" if number < size else "unconfirmed": awaited}, **more
    )
    return Situation(diagnostics=Diagnostics(), rank=1, status=status, connected=True)


class Waiting:
    """A machine that waits, and counts how often it is asked to ask its host."""

    def __init__(self, situation: Situation, cause: str = "") -> None:
        self._situation = situation
        self._cause = cause
        self.asked = 0

    def situation(self) -> Situation:
        return self._situation

    def cause(self, facts: NetworkFacts, now: float) -> tuple[str, str] | None:
        return (self._cause, "do something.") if self._cause else None

    def ask_status(self) -> None:
        self.asked += 1


def show(shown: Progress, now: float, situation: Situation = SEEKING, *, cause: str = "") -> bool:
    """Show how a machine stands; return whether its host was asked."""
    machine = Waiting(situation, cause)
    shown.show(machine, now, NetworkFacts)
    assert machine.asked <= 1
    return machine.asked == 1


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")


class Terminal(io.StringIO):
    """An stderr that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Condition()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self.written:
            self.written.notify_all()
            return super().write(text)

    def shows(self, text: str) -> bool:
        """Whether it does, within some seconds: a thread of rich's paints."""
        with self.written:
            return self.written.wait_for(lambda: text in self.getvalue(), timeout=30)


@pytest.fixture
def job() -> str:
    return job_name("progress")


@pytest.fixture
def made(job: str) -> Iterator[Make]:
    """Make the progress of processes of one job, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(job: str = job, *, off: bool = False) -> Progress:
            shown = Progress(job, off=off, now=0.0)
            stack.callback(shown.close)
            return shown

        yield make


@pytest.fixture(autouse=True)
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """A script that has not set logging up; under pytest every logger of the process has handlers."""
    alone = logging.Logger("mingle", logging.WARNING)  # noqa: LOG001 - belongs to no tree
    alone.addHandler(logging.NullHandler())
    monkeypatch.setattr(progress, "logger", alone)
    return alone


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One to redirect stderr to; pytest has an stderr of its own for each phase of a test."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal()


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What was written to stderr since the last look."""
    return capsys.readouterr().err


class Collecting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


# --- the texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("situation", "text"),
    [
        (SEEKING, "looking for rank 0"),
        (structs.replace(SEEKING, rank=None), "looking for a host"),
        (None, "looking for a host"),
        (structs.replace(SEEKING, connected=True), "rank 0 found, joining"),
        (joined(5, 10, (3, 7, 8, 9)), "5/10 joined, waiting for ranks 3, 7-9"),
        (joined(9, 10, (3,)), "9/10 joined, waiting for rank 3"),
        (joined(5, 10), "5/10 joined"),
        (joined(5, 10, hosts="node1, node2"), "5/10 joined (node1, node2)"),
        (joined(9, 10, (3,), hosts="node1, node2"), "9/10 joined, waiting for rank 3"),
        (joined(10, 10, phase="confirming"), "10/10 joined, confirming"),
        (joined(10, 10, (2, 4), phase="sealing"), "10/10 joined, sealing, no answer yet from ranks 2, 4"),
        (joined(10, 10, (4,), phase="sealing"), "10/10 joined, sealing, no answer yet from rank 4"),
        (
            structs.replace(joined(5, 10, (3,)), running="host node0"),
            "the job is already running, hosted by host node0",
        ),
    ],
)
def test_texts(situation: Situation | None, text: str) -> None:
    assert line("resnet", situation, 12.4) == f"job resnet: {text} · 12 s"


# --- where it is said -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shows", "quiet", "logged", "written"),
    [
        pytest.param(None, False, False, True, id="without logging on stderr"),
        pytest.param(logging.INFO, False, True, False, id="by logging alone"),
        pytest.param(logging.ERROR, False, False, True, id="on stderr, where logging does not show the level"),
        pytest.param(logging.ERROR, True, False, False, id="quiet"),
        pytest.param(logging.INFO, True, True, False, id="quiet, with logging"),
    ],
)
def test_where_a_message_goes(
    logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    shows: int | None,
    quiet: bool,
    logged: bool,
    written: bool,
) -> None:
    handler = Collecting()
    if shows is not None:
        handler.setLevel(shows)
        logger.addHandler(handler)
    say(logging.WARNING, "two \x07things", quiet=quiet)
    assert handler.lines == [(logging.WARNING, "two \\x07things")] * logged
    assert said(capsys) == "mingle: two \\x07things\n" * written


def test_parents_handler_counts_unless_it_is_cut_off(
    capsys: pytest.CaptureFixture[str], logger: logging.Logger
) -> None:
    handler, logger.parent = Collecting(), logging.Logger("root")  # noqa: LOG001 - not that of the process
    logger.parent.addHandler(handler)
    logger.propagate = False
    say(logging.WARNING, "cut off")
    assert (handler.lines, said(capsys)) == ([], "mingle: cut off\n")
    logger.propagate = True
    say(logging.WARNING, "passed on")
    assert (handler.lines, said(capsys)) == ([(logging.WARNING, "passed on")], "")


class Broken(io.StringIO):
    """An stderr whose reader is gone: `python train.py 2>&1 | head`."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, Broken(), closed()], ids=["none", "without a reader", "closed"])
def test_process_without_words_goes_on(made: Make, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    say(logging.WARNING, "one thing")
    shown = made()
    assert shown.next_timer() == 3.5, "that is no terminal"
    show(shown, 10.0)


def test_an_stderr_that_can_only_write_is_no_terminal(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What scripts put in its place to write a file as well: no stream, and without `isatty`."""
    text = list[str]()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=text.append))
    show(made(), 10.0)
    assert "looking for rank 0" in "".join(text)


# --- when -----------------------------------------------------------------------------------------------------------


def test_log_has_a_line_after_ten_seconds_then_every_thirty(
    capsys: pytest.CaptureFixture[str], made: Make, job: str
) -> None:
    shown, lines = made(), {}
    for step in range(101 * 20):
        show(shown, step / 20)
        if text := said(capsys):
            lines[step / 20] = text
    assert lines == {seconds: f"mingle: job {job}: looking for rank 0 · {seconds} s\n" for seconds in (10, 40, 70, 100)}


def test_on_a_terminal_one_line_lives_from_two_seconds_on(terminal: Terminal, made: Make, job: str) -> None:
    with contextlib.redirect_stderr(terminal):
        shown = made()
        for now in (0.5, 1.0, 1.99):
            show(shown, now)
        assert terminal.getvalue() == ""
        assert show(shown, 2.0)
        assert terminal.shows(f"job {job}: looking for rank 0 · 2 s")
        assert shown.next_timer() == 2.5
        show(shown, 3.0, joined(1, 2, (0,)))
        assert terminal.shows(f"job {job}: 1/2 joined, waiting for rank 0 · 3 s")
        shown.close()
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is taken away"
    assert shown.next_timer() is None


def test_markup_in_a_job_id_is_text(terminal: Terminal, made: Make, job: str) -> None:
    with contextlib.redirect_stderr(terminal):
        shown = made(f"[red]{job}[/nonsense]")
        show(shown, 5.0)
        assert terminal.shows(f"[red]{job}[/nonsense]")
        shown.close()


def test_off_is_off(terminal: Terminal, made: Make) -> None:
    with contextlib.redirect_stderr(terminal):
        shown = made(off=True)
        assert shown.next_timer() is None
        assert not show(shown, 100.0)
        shown.interrupted(lambda: SEEKING, 100.0)
        shown.close()
    assert terminal.getvalue() == ""


def test_in_a_log_the_host_is_asked_for_each_look_and_shortly_before_each_line(made: Make) -> None:
    shown = made()
    asked = [step / 20 for step in range(111 * 20) if show(shown, step / 20)]
    looks = [*(3.5 + 3 * number for number in range(20)), *(70.5 + 10 * number for number in range(5))]
    assert asked == sorted({*looks, 9, 39, 69, 99})
    assert show(shown, 150.0), "the process was stopped"
    timers = [shown.next_timer()]
    show(shown, 179.0)
    assert [*timers, shown.next_timer()] == [160.0, 180.0]
    shown.close()
    assert not show(shown, 190.0)


def test_on_a_terminal_the_host_is_asked_once_a_second(terminal: Terminal, made: Make) -> None:
    with contextlib.redirect_stderr(terminal):
        shown = made()
        asked = [step / 20 for step in range(100) if show(shown, step / 20)]
        shown.close()
    assert asked == [1.0, 2.0, 3.0, 4.0]


# --- why ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines_of(made: Make, capsys: pytest.CaptureFixture[str]) -> Lines:
    """Return the lines of a log, by time, if a look at each time finds such a cause: what follows the seconds."""

    def collect(causes: Callable[[float], str], seconds: int = 60) -> dict[float, str]:
        shown, lines = made(), {}
        for step in range(seconds * 20):
            show(shown, step / 20, cause=causes(step / 20))
            if text := said(capsys):
                lines[step / 20] = text.rstrip().partition(" s")[2].removeprefix(" · likely cause: ")
        return lines

    return collect


TYPO = "a typo; fix: do something"


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        pytest.param(lambda _: "a typo", {10: TYPO, 40: TYPO}, id="from ten seconds on"),
        pytest.param(lambda now: "a typo" if now > 14 else "", {10: "", 18.5: TYPO, 48.5: TYPO}, id="later"),
        pytest.param(lambda now: "a typo" if 15 < now < 18 else "", {10: "", 40: ""}, id="not by one look alone"),
        pytest.param(lambda now: "a typo" if now < 38 else "", {10: TYPO, 40: ""}, id="not once it is mended"),
        pytest.param(
            lambda now: "a typo" if now < 12 else "a riddle",
            {10: TYPO, 20: "a riddle; fix: do something", 50: "a riddle; fix: do something"},
            id="another one ten seconds after the first",
        ),
    ],
)
def test_when_a_cause_is_named(lines_of: Lines, found: Callable[[float], str], lines: dict[float, str]) -> None:
    assert lines_of(found) == lines


def test_causes_that_take_turns_do_not_fill_a_log(lines_of: Lines) -> None:
    lines = lines_of(lambda now: ("a typo", "a secret")[int(now / 7) % 2], 301)
    assert len(lines) <= 12
    assert {text.partition(";")[0] for text in lines.values()} == {"a typo", "a secret"}
    assert min(after - before for before, after in itertools.pairwise(lines)) >= 10


def test_a_count_that_grows_is_no_new_cause(lines_of: Lines) -> None:
    lines = lines_of(lambda now: f"{now:.0f} datagrams could not be sent")
    assert list(lines) == [10.0, 40.0]
    assert all("datagrams could not be sent" in text for text in lines.values())


def test_on_a_terminal_the_living_line_names_the_cause(terminal: Terminal, made: Make) -> None:
    with contextlib.redirect_stderr(terminal):
        shown = made()
        for step in range(int(9.9 * 20)):
            show(shown, step / 20, cause="a typo")
        assert terminal.shows("looking for rank 0 · 10 s"), "it is 9.5 s"
        assert "likely cause" not in terminal.getvalue()
        for now in (10.0, 10.5):
            show(shown, now, cause="a typo")
        assert terminal.shows("10 s · likely cause: a typo; fix: do something")
        shown.close()


def test_found_or_lost_host_restarts_the_look_for_causes(made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    shown = made()
    for now in (4.0, 7.0, 9.5):
        show(shown, now, cause="rank 0 can't be reached")
    show(shown, 10.0, joined(1, 2, (0,)), cause="rank 0 can't be reached")
    assert "cause" not in said(capsys)


@linux_only
def test_process_without_a_host_speaks_beside_one_with_a_host(
    made: Make, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others do not know what keeps it out: another secret, in the second terminal of one machine."""
    seated, kept_out, another = (made() for _ in range(3))
    show(seated, 10.0, joined(1, 3, (1, 2)))
    assert "1/3 joined" in said(capsys)
    show(kept_out, 10.0)
    show(another, 10.0)
    assert said(capsys) == f"mingle: job {job}: looking for rank 0 · 10 s\n"
    show(kept_out, 40.0, joined(2, 3, (2,)))
    assert said(capsys) == "", "the line of those that have a host is shown already"
    show(another, 40.0)
    assert "looking for rank 0" in said(capsys)


# --- who ------------------------------------------------------------------------------------------------------------


@linux_only
def test_speaker_of_a_node_hands_the_line_on(capsys: pytest.CaptureFixture[str], made: Make) -> None:
    first, second, other = made(), made(), made(job_name("other"))
    assert show(first, 9.0)
    assert not show(second, 9.0)
    assert show(other, 9.0), "jobs have speakers of their own"
    assert not show(second, 10.0)
    assert said(capsys) == ""
    first.close()
    assert show(second, 39.0)
    show(second, 40.0)
    assert "looking for rank 0" in said(capsys)


@linux_only
@pytest.mark.parametrize(("queue", "others"), [(socket.SOMAXCONN, 299), (1, 1)])
def test_one_process_of_a_node_with_many_ranks_speaks(
    made: Make, monkeypatch: pytest.MonkeyPatch, queue: int, others: int
) -> None:
    """Each of the others calls the speaker, which looks only when it has something to do itself."""
    monkeypatch.setattr(socket, "SOMAXCONN", queue)
    speaker = made()
    for now in (9.0, 39.0, 69.0, 99.0):
        assert show(speaker, now)
        assert not any(show(made(), now) for _ in range(others))


@contextlib.contextmanager
def another_speaker(job: str, stderr: TextIO | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that shows the line, until it is killed or the block ends."""
    code = (
        "import sys; from mingle.engine.progress import Progress; from tests.unit.engine.test_progress import show\n"
        "shown = Progress(sys.argv[1], off=False, now=0.0); print(show(shown, 9.0), flush=True); sys.stdin.read()"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, job], env=environ, stdin=PIPE, stdout=PIPE, stderr=stderr, text=True
    ) as speaker:
        assert speaker.stdin is not None
        assert speaker.stdout is not None
        assert speaker.stdout.readline() == "True\n"
        yield speaker
        speaker.stdin.close()


@linux_only
def test_killed_speaker_is_replaced(made: Make, job: str) -> None:
    mine = made()
    with another_speaker(job) as speaker:
        assert not show(mine, 9.0)
        speaker.kill()
    assert show(mine, 39.0)


@contextlib.contextmanager
def held_by_another_user(*names: str, listens: bool) -> Iterator[None]:
    """Have a process of another user hold abstract sockets of these names, of every type."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            held = []
            for name in names:
                for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                    held.append(socket.socket(socket.AF_UNIX, kind))
                    held[-1].bind(f"\0{name}")
                    if listens and kind == socket.SOCK_STREAM:
                        held[-1].listen()
            theirs.send(b"held")
            ours.close()
            theirs.recv(1)
        os._exit(0)
    theirs.close()
    try:
        with ours:
            assert ours.recv(4) == b"held"
            yield
    finally:
        os.waitpid(pid, 0)


@linux_only
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("listens", [True, False])
def test_another_user_silences_nobody(made: Make, job: str, listens: bool) -> None:
    digest = hashlib.sha256(f"{os.geteuid()}\0{job}\0False".encode()).hexdigest()
    name = f"mingle-progress-{digest[:32]}"
    first, second, every = (made() for _ in range(3))
    with held_by_another_user(name, listens=listens):
        assert show(first, 9.0)
        assert not show(second, 9.0), "one process shows the line, as always"
        first.close()
        assert show(second, 39.0)
        second.close()
    with held_by_another_user(name, *(f"{name}-{number}" for number in range(1, 100)), listens=listens):
        assert show(every, 9.0)


@linux_only
def test_second_terminal_says_once_where_the_line_is(terminal: Terminal, made: Make, job: str, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with log.open("w") as stderr, another_speaker(job, stderr) as other, contextlib.redirect_stderr(terminal):
        second = made()
        for now in (1.0, 2.0, 2.5, 3.0, 3.5):
            show(second, now)
            said = terminal.getvalue().count(f"process {other.pid} shows the progress of this node, on {log}")
            assert said == (now >= 2.0)


@linux_only
def test_the_processes_of_one_terminal_do_not_point_to_each_other(terminal: Terminal, made: Make) -> None:
    with contextlib.redirect_stderr(terminal):
        both = made(), made()
        for now in (1.0, 2.0, 3.0):
            for shown in both:
                show(shown, now)
        assert "process" not in terminal.getvalue()
        for shown in both:
            shown.close()


def test_each_process_speaks_on_other_systems(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert [show(made(), 9.0) for _ in range(2)] == [True, True]


@pytest.mark.parametrize("where", ["write", "update", "stop"])
def test_signal_handlers_exception_while_showing_reaches_the_caller(
    where: str, terminal: Terminal, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.redirect_stderr(terminal):
        shown = made()
        show(shown, 3.0)
        with alarm_is_passed_on() as interrupted, monkeypatch.context() as patch:
            if where == "write":
                patch.setattr(sys, "stderr", SimpleNamespace(write=interrupted))
                say(logging.ERROR, "a word")
            patch.setattr(Status, where, interrupted)
            shown.close() if where == "stop" else show(shown, 4.0)
        shown.close()


def test_a_terminal_that_has_gone_is_no_error(terminal: Terminal, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a closed ssh session whose SIGHUP is ignored: each write is EIO, also the one that removes the line."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of rich's thread
    before = threading.active_count()
    with contextlib.redirect_stderr(terminal):
        shown = made()
        show(shown, 3.0)
        assert terminal.shows("looking for rank 0")
        monkeypatch.setattr(terminal, "write", refusing(errno.EIO))
        show(shown, 4.0)
        shown.close()
        assert sys.stderr is terminal
        until(lambda: threading.active_count() <= before)  # as long as its excepthook is ours
