"""Several machines: how they meet, and how the end of one reaches the others."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.bystanders import ROOT, command_environment, patched_path
from tests.support.loopback import job_name, longer, until
from tests.support.ports import free_udp_port
from tests.support.run_nodes import COMMAND, SAY, Nodes, has_ended, one


def test_an_error_calls_the_machines_nodes() -> None:
    words = ("--nnodes", "2", "--node-rank", "1", "--job-id", job_name("alone"))
    joined = "1 of 2 nodes joined ("
    done = longer(lambda seconds: one(*words, "-t", str(3 * seconds), "--", "true"), lambda done: joined in done.stderr)
    assert (done.returncode, "rank" in done.stderr) == (1, False), done.stderr
    assert joined in done.stderr


def test_lines_that_differ_are_not_blamed_on_a_job_id_that_nobody_gave() -> None:
    port, differ = free_udp_port(), f"the command lines differ: host {socket.gethostname()}"
    with subprocess.Popen(
        [*COMMAND, "-vv", "--nnodes", "2", "-t", "120", "--", "echo", "one"],
        env=command_environment(port),
        stderr=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stderr is not None
        while "seeking" not in (line := other.stderr.readline()):
            assert line
        done = longer(
            lambda seconds: one("--nnodes", "2", "-t", str(3 * seconds), "--", "echo", "two", MINGLE_PORT=str(port)),
            lambda done: differ in done.stderr,
        )
        other.terminate()
    assert differ in done.stderr
    assert "run the same command on every machine" in done.stderr
    assert "same job id" not in done.stderr


@pytest.mark.slow
def test_machines_need_no_torch(nodes: Nodes) -> None:
    modules = nodes.folder / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text("raise ImportError('torch is not installed')")
    nodes.start("--", "true", given=[0, 1, 2], count=3, PYTHONPATH=f"{modules}:{ROOT / 'src'}")
    assert [(status, errors) for status, _, errors in nodes.ended() if status] == []


def test_a_program_that_fails_ends_those_of_the_other_machines(nodes: Nodes) -> None:
    nodes.start(
        "--head", f"sh -c '{SAY} sleep 100'", "--", "sh", "-c", SAY + "test {node_rank} = 1 && exit 3; sleep 100"
    )
    done = nodes.ended()
    assert [status for status, _, _ in done] == [128 + signal.SIGTERM, 3, 128 + signal.SIGTERM]
    assert "the command ended with status 3; those of the other machines are ended, too" in done[1][2]
    for number in (0, 2):
        assert f"node 1 on host {socket.gethostname()} (127.0.0.1), pid " in done[number][2]
        assert ": its command ended with status 3" in done[number][2]
        assert "likely cause: " in done[number][2]


def test_failure_of_node_0_names_it_and_its_status(nodes: Nodes) -> None:
    nodes.start("--head", "sh -c 'exit 4'", "--", "sleep", "100")
    done = nodes.ended()
    assert [status for status, _, _ in done] == [4, 128 + signal.SIGTERM, 128 + signal.SIGTERM]
    assert f"node 0 on host {socket.gethostname()}: its command ended with status 4" in done[2][2]


def test_ctrl_c_during_the_good_bye_of_a_failed_command_keeps_its_status_and_ends_its_workers(nodes: Nodes) -> None:
    worker = "sleep 100 >/dev/null 2>&1 & echo $! > worker; until test -e go; do sleep 0.05; done; exit 3"
    path = patched_path(nodes.folder, "import mingle.run.session as session\nsession.LEAVE_SECONDS = 60.0\n")
    nodes.start("--head", f"sh -c '{SAY} exec sleep 100'", "--", "sh", "-c", SAY + worker, count=2, PYTHONPATH=path)
    nodes.started()
    node_0, node_1 = nodes.processes
    node_0.send_signal(signal.SIGSTOP)  # it answers no good-bye
    (nodes.folder / "go").touch()
    errors = node_1.stderr
    assert errors is not None
    assert "the command ended with status 3" in errors.readline()
    node_1.send_signal(signal.SIGINT)
    _, said = node_1.communicate(timeout=60)
    assert node_1.returncode == 3
    assert "SIGINT ended the wait for an answer" in said
    assert has_ended(int((nodes.folder / "worker").read_text()))
    node_0.send_signal(signal.SIGCONT)
    assert "its command ended with status 3" in node_0.communicate(timeout=60)[1]


@pytest.mark.slow
def test_with_keep_going_a_failure_ends_no_other_program(nodes: Nodes) -> None:
    # Node 0 fails first, and goes on keeping the others together.
    nodes.start(
        "--keep-going", "--", "sh", "-c", SAY + "test {node_rank} = 2 || exit 3; until test -e go; do sleep 0.05; done"
    )
    nodes.started()
    assert nodes.processes[1].wait(60) == 3
    assert nodes.processes[2].poll() is None
    (nodes.folder / "go").touch()
    assert [status for status, _, _ in nodes.ended()] == [3, 3, 0]


def test_with_keep_going_a_lost_machine_is_told_and_ends_nothing(nodes: Nodes) -> None:
    nodes.start("--keep-going", "--", "sh", "-c", SAY + "until test -e go; do sleep 0.05; done")
    pids = nodes.started()
    nodes.processes[0].kill()
    until(lambda: has_ended(pids[0]))
    (nodes.folder / "go").touch()
    done = nodes.ended()
    assert [status for status, _, _ in done] == [-signal.SIGKILL, 0, 0]


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_mingle_run_that_is_killed_ends_its_program_and_the_others(nodes: Nodes, victim: int) -> None:
    nodes.start("--", "sh", "-c", SAY + "exec sleep 100")
    pids = nodes.started()
    nodes.processes[victim].kill()
    done = nodes.ended()
    assert [status for status, _, _ in done] == [
        -signal.SIGKILL if number == victim else 128 + signal.SIGTERM for number in range(3)
    ]
    for number, (_, _, errors) in enumerate(done):
        if number != victim:
            assert f"node {victim} " in errors
            assert "is lost" in errors
    until(lambda: all(has_ended(pid) for pid in pids))


@pytest.mark.parametrize(
    "number", ["SIGINT", *(pytest.param(each, marks=pytest.mark.slow) for each in ("SIGTERM", "SIGHUP", "SIGQUIT"))]
)
def test_a_signal_goes_to_the_program_and_its_end_ends_the_others(nodes: Nodes, number: str) -> None:
    trap = f"trap 'echo caught; exit 0' {number[3:]}; {SAY} while :; do sleep 0.05; done"
    nodes.start("--", "sh", "-c", trap)
    nodes.started()
    nodes.processes[1].send_signal(getattr(signal, number))
    done = nodes.ended()
    # The program has ended well, and the job has not: it was asked to end.
    assert done[1][:2] == (0, "caught\n")
    assert [done[0][0], done[2][0]] == [128 + signal.SIGTERM, 128 + signal.SIGTERM] or number == "SIGTERM"
    assert f"its command ended with status 0 after {number}" in done[0][2]
    assert f"its command ended with status 0 after {number}" in done[2][2]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_the_wait_for_the_others(nodes: Nodes, number: int) -> None:
    nodes.start("-vv", "--", "true", given=[0, 1])
    for process in nodes.processes:
        assert process.stderr is not None
        while "2/3 joined" not in (line := process.stderr.readline()) and "seated" not in line:
            assert line
    for process in nodes.processes:
        process.send_signal(number)
    assert [status for status, _, _ in nodes.ended()] == [128 + number] * 2


def test_node_0_waits_for_the_programs_of_the_others(nodes: Nodes) -> None:
    nodes.start(
        "--head", f"sh -c '{SAY}'", "--", "sh", "-c", SAY + "until test -e go; do sleep 0.05; done; exit {node_rank}"
    )
    nodes.started()
    nodes.wait_for_words("the command of node 0 has ended; waiting")
    (nodes.folder / "go").touch()
    # Its own status is not 0 then, although its own command has succeeded: the job has failed.
    assert sorted(status for status, _, _ in nodes.ended()) in ([1, 1, 2], [1, 1, 143], [1, 2, 143])


def test_ctrl_c_on_a_node_0_that_waits_ends_the_others(nodes: Nodes) -> None:
    nodes.start("--head", f"sh -c '{SAY}'", "--", "sh", "-c", SAY + "exec sleep 100")
    nodes.started()
    nodes.wait_for_words("the command of node 0 has ended; waiting")
    nodes.processes[0].send_signal(signal.SIGINT)
    assert [status for status, _, _ in nodes.ended()] == [130, 143, 143]


def test_a_closed_stderr_keeps_no_failure_from_the_others(nodes: Nodes) -> None:
    nodes.start("--head", f"sh -c '{SAY} until test -e go; do sleep 0.05; done; exit 3'", "--", "sleep", "100", count=2)
    nodes.started(1)
    assert nodes.processes[0].stderr is not None
    nodes.processes[0].stderr.close()
    (nodes.folder / "go").touch()
    assert nodes.processes[0].wait(60) == 3
    assert nodes.processes[1].wait(60) == 128 + signal.SIGTERM
    nodes.processes[0].stderr = None


def test_a_log_whose_reader_is_gone_ends_nothing(nodes: Nodes) -> None:
    nodes.start("-vv", "--", "true", given=[0], count=2)
    (node_0,) = nodes.processes
    assert node_0.stderr is not None
    assert node_0.stderr.readline()
    node_0.stderr.close()
    nodes.start("--", "true", given=[1], count=2)
    assert [process.wait(60) for process in nodes.processes] == [0, 0]
    node_0.stderr = None


def test_a_node_rank_that_is_given_twice_is_a_conflict(nodes: Nodes) -> None:
    nodes.start("-t", "60", "--", "true", given=[0, 1, 1])
    refused = next(iter(done for done in _in_order_of_end(nodes)))
    assert refused[0] == 1
    assert "node rank taken (node rank 1 is held by another live node)" in refused[1]
    assert "give each machine its own node rank" in refused[1]
    for process in nodes.processes:
        process.send_signal(signal.SIGINT)


def _in_order_of_end(nodes: Nodes) -> Iterator[tuple[int, str]]:
    while True:
        ended = [process for process in nodes.processes if process.poll() is not None]
        for process in ended:
            nodes.processes.remove(process)
            yield process.returncode, process.communicate()[1]
        time.sleep(0.02)
