"""The program of a machine: its start, its signals, its end, and what it leaves behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mingle.cli.options import FAILED
from mingle.errors import MingleError
from mingle.run.addresses import private_directory
from mingle.run.program import Interrupted, Program
from tests.support.bystanders import command_environment, patched_path
from tests.support.loopback import until
from tests.support.ports import free_udp_port
from tests.support.run_nodes import COMMAND, SAY, Nodes, has_ended, one, state


@pytest.mark.parametrize(
    ("program", "content", "status", "text"),
    [
        ("text", "nothing that a kernel starts", 1, "can't be started: Exec format error"),
        ("crlf", "#!/bin/sh\r\n", 1, "the interpreter in its first line does not exist"),
        ("crlf-{node_rank}", "", 2, "crlf-0' is not there"),
    ],
)
def test_cause_names_why_a_program_can_not_start(
    tmp_path: Path, program: str, content: str, status: int, text: str
) -> None:
    (tmp_path / program).write_text(content, newline="")
    (tmp_path / program).chmod(0o755)
    done = one("--nnodes", "1", "--", f"{tmp_path}/{program}")
    assert done.returncode == status
    assert text in done.stderr


def test_a_limit_that_keeps_a_program_from_its_start_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_more: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(MingleError, match="a limit of the system"):
        Program().start(["true"], os.environ)


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
    done = nodes.ended()
    assert [status for status, _, _ in done] == [128 + signal.SIGKILL] * 3
    until(lambda: not any(map(group_exists, pids)))  # who adopted the children reaps them later


def test_other_signals_are_handed_on(nodes: Nodes) -> None:
    nodes.start("--", "sh", "-c", f"trap 'exit 0' USR1; {SAY} while :; do sleep 0.05; done", count=2)
    nodes.started()
    for process in nodes.processes:
        process.send_signal(signal.SIGUSR1)
    assert [status for status, _, _ in nodes.ended()] == [0, 0]


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
        assert [status for status, _, _ in nodes.ended()] == [0, 0]
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
        nodes.start("--", "sh", "-c", SAY + "until test -e go; do sleep 0.05; done", count=2)
    finally:
        signal.signal(signal.SIGHUP, before)
    nodes.started()
    for process in nodes.processes:
        process.send_signal(signal.SIGHUP)
    (nodes.folder / "go").touch()
    assert [(status, errors) for status, _, errors in nodes.ended()] == [(0, "")] * 2


def test_leftovers_of_a_failed_program_are_ended(nodes: Nodes) -> None:
    """Also in a session of its own, as the workers of a torchrun that was killed."""
    nodes.start("--", "sh", "-c", "setsid sleep 100 & echo $! > pid{node_rank}; kill -9 $$", count=1)
    assert nodes.ended()[0][0] == 128 + signal.SIGKILL
    assert has_ended(*nodes.started())


@pytest.mark.parametrize("count", [1, 2])
def test_leftovers_of_an_interrupted_program_are_ended(nodes: Nodes, count: int) -> None:
    script = "trap 'exit 0' TERM; setsid sleep 100 >/dev/null 2>&1 & echo $! > pid{node_rank}; wait"
    nodes.start("--", "sh", "-c", script, count=count)
    sleepers = nodes.started()
    nodes.processes[0].send_signal(signal.SIGTERM)
    assert nodes.ended()[0][0] == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in sleepers))


def test_orphans_are_reaped_while_the_program_runs(nodes: Nodes) -> None:
    orphan = "(sh -c 'echo $$ > orphan; until test -e go; do sleep 0.05; done' &)"
    nodes.start("--", "sh", "-c", f"{orphan}; echo $$ > pid0; until test -e end; do sleep 0.05; done", count=1)
    nodes.started()
    until(lambda: (nodes.folder / "orphan").exists() and (nodes.folder / "orphan").read_text())
    pid = int((nodes.folder / "orphan").read_text())
    assert state(pid) != "Z"
    (nodes.folder / "go").touch()
    until(lambda: not Path(f"/proc/{pid}").exists())
    (nodes.folder / "end").touch()
    assert nodes.ended()[0][0] == 0


def test_a_stopped_program_is_continued_to_end_and_its_good_end_is_no_success(nodes: Nodes) -> None:
    stopped = f"trap 'exit 0' TERM; {SAY} kill -STOP $$; while :; do sleep 0.05; done"
    failing = f"{SAY} until test -e go; do sleep 0.05; done; exit 3"
    nodes.start("--head", f"sh -c '{failing}'", "--", "sh", "-c", stopped, count=2)
    pids = nodes.started()
    until(lambda: state(pids[1]) == "T")
    (nodes.folder / "go").touch()
    assert [status for status, _, _ in nodes.ended()] == [3, 1]


def test_a_program_that_takes_no_signal_is_pointed_out_once_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of another user."""

    def refuse(_group: int, _number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    program = Program()
    with monkeypatch.context() as patched, program.signals():
        patched.setattr("mingle.run.program.GRACE_SECONDS", 0.1)
        patched.setattr("mingle.run.program._KILLED_SECONDS", 0.1)
        patched.setattr(os, "killpg", refuse)
        program.start(["sleep", "100"], os.environ)
        signal.raise_signal(signal.SIGWINCH)  # of a terminal, which asks for nothing
        assert not caplog.messages
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert program.end() == FAILED
        assert program.status is None
    (message,) = caplog.messages
    assert "takes no signal from mingle-run" in message
    assert "sudo kill" in message
    assert program.end() == 128 + signal.SIGTERM


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


def test_a_leftover_that_takes_no_signal_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the `sudo` of a shell that was ended."""

    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("mingle.run.program.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("mingle.run.program._KILLED_SECONDS", 0.1)
    program = Program()
    program.start(["false"], os.environ)
    program.wait()
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as leftover:
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", refuse)
            status = program.end()
        leftover.kill()
    assert status == 1
    assert [message.splitlines()[0] for message in caplog.messages] == [
        f"process {leftover.pid} of the command takes no signal from mingle-run: Operation not permitted."
    ]


def test_the_children_of_what_became_mingle_run_are_not_the_programs(tmp_path: Path) -> None:
    line = shlex.join([*COMMAND, "--nnodes", "1", "--", "false"])
    done = subprocess.run(
        ["sh", "-c", f"sleep 100 >/dev/null 2>&1 & echo $!; exec {line}"],
        env=command_environment(29499),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    os.kill(int(done.stdout), signal.SIGKILL)  # raises if it has ended


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
    assert [status for status, _, _ in nodes.ended()] == [0, 0]
    for pid in nodes.started():
        os.kill(pid, signal.SIGKILL)  # raises if it has ended


def enter_private_directory(program: Program) -> None:
    with contextlib.ExitStack() as stack:
        with program.held_back():
            stack.enter_context(private_directory())
        pytest.fail("the signal has not come")


def test_signal_while_the_directory_is_made_ends_the_command_once_it_will_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    genuine, program = os.mkdir, Program()

    def mkdir(path: str, mode: int = 0o777) -> None:
        genuine(path, mode)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with program.signals(), pytest.raises(Interrupted, match="SIGTERM"):
        enter_private_directory(program)
    assert not list(tmp_path.iterdir())
