"""The program of a machine: its start, its signals, its end, and what it leaves behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mingle.cli.options import FAILED
from mingle.errors import ConfigurationError, MingleError
from mingle.run.program import Interrupted, Program
from tests.support.bystanders import command_environment, patched_path
from tests.support.loopback import until
from tests.support.ports import free_udp_port
from tests.support.run_nodes import COMMAND, SAY, WAIT, Nodes, has_ended, state

# --- the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "arguments", "error", "cause"),
    [
        pytest.param("nothing that a kernel starts", [], MingleError, "a script without `#!`", id="text"),
        pytest.param("#!/bin/sh\r\n", [], MingleError, "the interpreter in its first line does not exist", id="crlf"),
        pytest.param("#!/bin/sh\n", ["x" * 200_000], MingleError, "a limit of the system", id="too long a line"),
        # A placeholder can make the name, so the command line has not looked.
        pytest.param(None, [], ConfigurationError, "a mistyped name", id="not there"),
    ],
)
def test_cause_names_why_a_program_can_not_start(
    tmp_path: Path, content: str | None, arguments: list[str], error: type[MingleError], cause: str
) -> None:
    program = tmp_path / "program"
    if content is not None:
        program.write_text(content, newline="")
        program.chmod(0o755)
    with pytest.raises(error, match=cause):
        Program().start([str(program), *arguments], os.environ)


def test_the_program_gets_no_socket_and_no_signal_mask_of_ours_and_what_we_inherited() -> None:
    look = (
        "import json, os; files = ['/proc/self/fd/' + name for name in os.listdir('/proc/self/fd')];"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'));"
        "links = [os.readlink(file) for file in files if os.path.exists(file)];"
        "print(json.dumps([links, [int(status[n], 16) for n in ('SigBlk', 'SigIgn')], os.getsid(0) == os.getpid()]))"
    )
    udp = free_udp_port()
    inherited = int(Path("/proc/self/status").read_text(encoding="ascii").partition("SigIgn:")[2].split()[0], 16)
    read, write = os.pipe()
    try:
        nodes = [
            subprocess.Popen(
                [*COMMAND, "--nnodes", "2", "--node-rank", rank, "--job-id", "test", "--", sys.executable, "-c", look],
                env=command_environment(udp),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=[write],
                text=True,
            )
            for rank in "01"
        ]
        for node in nodes:
            links, (blocked, ignored), leads = json.loads(node.communicate(timeout=60)[0])
            assert not [link for link in links if "socket" in link or "eventpoll" in link]
            assert f"pipe:[{os.fstat(write).st_ino}]" in links
            # CPython itself ignores these two.
            own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
            assert (blocked, ignored & ~own, leads) == (0, inherited & ~own, True)
    finally:
        os.close(read)
        os.close(write)


# --- its signals ---------------------------------------------------------------------------------------------------


def test_other_signals_are_handed_on(nodes: Nodes) -> None:
    nodes.start("--", "sh", "-c", f"trap 'exit 0' USR1; {SAY} while :; do sleep 0.05; done", count=2)
    nodes.started()
    for process in nodes.processes:
        process.send_signal(signal.SIGUSR1)
    assert nodes.statuses() == [0, 0]


def test_a_program_is_suspended_and_continued_with_mingle_run(nodes: Nodes) -> None:
    # No command in a loop: a shell waits in vfork until its child calls exec, and a child that is stopped never does.
    os.mkfifo(nodes.folder / "go")
    nodes.start("--", "sh", "-c", SAY + "read line < go", count=2)
    pids = nodes.started()
    nodes.processes[0].send_signal(signal.SIGTSTP)
    until(lambda: state(pids[0]) == "T" and state(nodes.processes[0].pid) == "T")
    nodes.processes[0].send_signal(signal.SIGCONT)
    until(lambda: state(pids[0]) != "T")
    go = os.open(nodes.folder / "go", os.O_RDWR)
    try:
        os.write(go, b"\n\n")
        assert nodes.statuses() == [0, 0]
    finally:
        os.close(go)


@pytest.mark.parametrize("forked", [False, True], ids=["before fork", "after exec"])
@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGHUP])
def test_a_signal_during_the_start_reaches_the_program(
    number: signal.Signals, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, told, groups = subprocess.Popen, set(), list[int]()

    def interrupted(*words: object, **more: object) -> object:
        if not forked:
            signal.raise_signal(number)
        process = popen(*words, **more)  # type: ignore[call-overload]
        groups.append(process.pid)
        if forked:
            signal.raise_signal(number)
        return process

    program = Program()
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with program.signals(), monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", interrupted)
        patched.setattr(os, "kill", lambda pid, number: told.add((pid, number)))
        patched.setattr(os, "killpg", lambda pid, number: told.add((pid, number)))
        program.start(["true"], os.environ)
    assert program.wait() == 0
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before
    (group,) = groups
    stopped = {(group, signal.SIGSTOP), (os.getpid(), signal.SIGSTOP)}
    assert told == (stopped if number == signal.SIGTSTP else {(group, signal.SIGHUP)})


def test_an_ignored_signal_stays_ignored(nodes: Nodes) -> None:
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        nodes.start("--", "sh", "-c", SAY + WAIT, count=2)
    finally:
        signal.signal(signal.SIGHUP, before)
    nodes.started()
    for process in nodes.processes:
        process.send_signal(signal.SIGHUP)
    nodes.go()
    assert [(status, errors) for status, _, errors in nodes.ended()] == [(0, "")] * 2


@pytest.mark.parametrize(
    ("trap", "how"), [("", "was ended by SIGINT"), ("trap 'exit 3' INT; ", "ended with status 3 after SIGINT")]
)
def test_a_signal_that_was_passed_on_is_named_once(trap: str, how: str, tmp_path: Path) -> None:
    program, there = Program(), tmp_path / "there"
    program.start(["sh", "-c", f"{trap}: > {there}; while :; do sleep 0.05; done"], os.environ)
    until(there.exists)
    with program.signals():
        signal.raise_signal(signal.SIGINT)
        program.wait()
    assert program.how_ended() == how


def test_a_signal_that_is_held_back_ends_the_command_once_what_is_made_will_be_removed() -> None:
    program, made = Program(), list[str]()

    def make() -> None:
        with program.held_back():
            signal.raise_signal(signal.SIGTERM)
            made.append("directory")

    with program.signals(), pytest.raises(Interrupted, match="SIGTERM"):
        make()
    assert made == ["directory"]


# --- its end, and what it leaves behind ------------------------------------------------------------------------------


def group_exists(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_program_that_ignores_sigterm_is_killed_with_its_children(nodes: Nodes) -> None:
    stubborn = f"trap '' TERM; {SAY} (trap '' TERM; echo > child{{node_rank}}; while :; do sleep 0.1; done) & wait"
    head = f"{SAY} until test -e child1 -a -e child2; do sleep 0.05; done; kill -9 $$"
    path = patched_path(nodes.folder, "import mingle.run.program as program\nprogram.GRACE_SECONDS = 0.5\n")
    nodes.start("--head", f"sh -c '{head}'", "--", "sh", "-c", stubborn, PYTHONPATH=path)
    pids = nodes.started()
    assert nodes.statuses() == [128 + signal.SIGKILL] * 3
    until(lambda: not any(map(group_exists, pids)))  # who adopted the children reaps them later


def test_a_stopped_program_is_continued_to_end_and_its_good_end_is_no_success(nodes: Nodes) -> None:
    stopped = f"trap 'exit 0' TERM; {SAY} kill -STOP $$; while :; do sleep 0.05; done"
    nodes.start("--head", f"sh -c '{SAY} {WAIT} exit 3'", "--", "sh", "-c", stopped, count=2)
    pids = nodes.started()
    until(lambda: state(pids[1]) == "T")
    nodes.go()
    assert nodes.statuses() == [3, 1]


@pytest.mark.parametrize("how", ["fails", "SIGTERM", "SIGTERM of two"])
def test_leftovers_of_a_program_that_fails_or_is_interrupted_are_ended(nodes: Nodes, how: str) -> None:
    """Also in a session of its own, as the workers of a torchrun that was killed."""
    leave = "trap 'exit 0' TERM; setsid sleep 100 >/dev/null 2>&1 & echo $! > pid{node_rank}; "
    end = "kill -9 $$" if how == "fails" else "wait"
    nodes.start("--", "sh", "-c", leave + end, count=2 if how == "SIGTERM of two" else 1)
    sleepers = nodes.started()
    if how != "fails":
        nodes.processes[0].send_signal(signal.SIGTERM)
    assert nodes.statuses()[0] == (128 + signal.SIGKILL if how == "fails" else 0)
    assert all(map(has_ended, sleepers))


def test_orphans_are_reaped_while_the_program_runs(nodes: Nodes) -> None:
    orphan = f"(sh -c 'echo $$ > orphan; {WAIT}' &)"
    nodes.start("--", "sh", "-c", f"{orphan}; {SAY} until test -e end; do sleep 0.05; done", count=1)
    nodes.started()
    until(lambda: (nodes.folder / "orphan").exists() and (nodes.folder / "orphan").read_text())
    pid = int((nodes.folder / "orphan").read_text())
    assert state(pid) != "Z"
    nodes.go()
    until(lambda: not Path(f"/proc/{pid}").exists())
    (nodes.folder / "end").touch()
    assert nodes.statuses() == [0]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingle.run.program.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("mingle.run.program._KILLED_SECONDS", 0.1)


def refuse(_process: int, _number: int) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.usefixtures("impatient")
def test_a_program_that_takes_no_signal_is_pointed_out_once_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of another user."""
    program = Program()
    with monkeypatch.context() as patched, program.signals():
        patched.setattr(os, "killpg", refuse)
        program.start(["sleep", "100"], os.environ)
        signal.raise_signal(signal.SIGWINCH)  # of a terminal, which asks for nothing
        assert not caplog.messages
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert program.end() == FAILED
        assert program.status is None
    (message,) = caplog.messages
    assert "takes no signal" in message
    assert program.end() == 128 + signal.SIGTERM


@pytest.mark.usefixtures("impatient")
def test_a_leftover_that_takes_no_signal_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the `sudo` of a shell that was ended."""
    program = Program()
    program.start(["false"], os.environ)
    program.wait()
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as leftover:
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", refuse)
            assert program.end() == 1
        leftover.kill()
    (message,) = caplog.messages
    assert message.startswith(f"process {leftover.pid} of the command takes no signal")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells what a program leaves behind")
def test_the_helpers_of_mingle_run_are_not_the_programs() -> None:
    program = Program()
    with subprocess.Popen(["sleep", "100"]) as helper:  # as that of a bucket, which a session starts
        program.start(["false"], os.environ)
        assert program.wait() == 1
        assert program.end() == 1
        assert helper.poll() is None
        helper.kill()


def test_daemons_that_a_program_leaves_behind_live_on(nodes: Nodes) -> None:
    """As Ray's `ray start` has it."""
    nodes.start("--", "sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $! > pid{node_rank}", count=2)
    assert nodes.statuses() == [0, 0]
    for pid in nodes.started():
        os.kill(pid, signal.SIGKILL)  # raises if it has ended
