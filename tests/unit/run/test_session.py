"""Several machines: how they meet, and how the end of one reaches the others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

import pytest

from tests.support.bystanders import ROOT, command_environment, patched_path
from tests.support.loopback import job_name, longer, until
from tests.support.ports import free_udp_port
from tests.support.run_nodes import COMMAND, SAY, WAIT, Nodes, has_ended, one

ENDED, KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL
"""The status of a command that mingle-run has ended, and of one that was killed."""

# --- how they meet -------------------------------------------------------------------------------------------------


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
    assert "same job id" not in done.stderr


@pytest.mark.slow
def test_machines_need_no_torch(nodes: Nodes) -> None:
    modules = nodes.folder / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text("raise ImportError('torch is not installed')")
    nodes.start("--", "true", PYTHONPATH=f"{modules}:{ROOT / 'src'}")
    assert [(status, errors) for status, _, errors in nodes.ended() if status] == []


def test_a_node_rank_that_is_given_twice_is_a_conflict(nodes: Nodes) -> None:
    nodes.start("-t", "60", "--", "true", given=[0, 1, 1])
    _, *twins = nodes.processes
    until(lambda: any(process.poll() is not None for process in twins), 60)
    refused = next(process for process in twins if process.poll() is not None)
    assert refused.wait() == 1
    assert refused.stderr is not None
    assert "node rank taken (node rank 1 is held by another live node)" in refused.stderr.read()
    for process in nodes.processes:
        process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_the_wait_for_the_others(nodes: Nodes, number: int) -> None:
    nodes.start("-vv", "--", "true", given=[0, 1])
    for process in nodes.processes:
        assert process.stderr is not None
        while "2/3 joined" not in (line := process.stderr.readline()) and "seated" not in line:
            assert line
    for process in nodes.processes:
        process.send_signal(number)
    assert nodes.statuses() == [128 + number] * 2


# --- the end of one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_program_that_fails_ends_those_of_the_other_machines_which_name_it(nodes: Nodes, victim: int) -> None:
    nodes.start("--", "sh", "-c", f"{SAY} test {{node_rank}} = {victim} && exit 3; exec sleep 100")
    for number, (status, _, errors) in enumerate(nodes.ended()):
        assert status == (3 if number == victim else ENDED)
        if number == victim:
            assert "the command ended with status 3; those of the other machines are ended, too" in errors
        else:
            assert f"node {victim} on host {socket.gethostname()}" in errors
            assert ": its command ended with status 3" in errors


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_mingle_run_that_is_killed_ends_its_program_and_the_others(nodes: Nodes, victim: int) -> None:
    nodes.start("--", "sh", "-c", SAY + "exec sleep 100")
    pids = nodes.started()
    nodes.processes[victim].kill()
    for number, (status, _, errors) in enumerate(nodes.ended()):
        assert status == (-signal.SIGKILL if number == victim else ENDED)
        assert number == victim or (f"node {victim} " in errors and "is lost" in errors)
    until(lambda: all(map(has_ended, pids)))


@pytest.mark.parametrize(
    "number", ["SIGINT", *(pytest.param(each, marks=pytest.mark.slow) for each in ("SIGTERM", "SIGHUP", "SIGQUIT"))]
)
def test_a_signal_goes_to_the_program_and_its_end_ends_the_others(nodes: Nodes, number: str) -> None:
    """The program has ended well, and the job has not: it was asked to end."""
    nodes.start("--", "sh", "-c", f"trap 'echo caught; exit 0' {number[3:]}; {SAY} while :; do sleep 0.05; done")
    nodes.started()
    nodes.processes[1].send_signal(getattr(signal, number))
    first, asked, last = nodes.ended()
    assert asked[:2] == (0, "caught\n")
    assert [first[0], last[0]] == [ENDED, ENDED] or number == "SIGTERM"
    for _, _, errors in (first, last):
        assert f"its command ended with status 0 after {number}" in errors


@pytest.mark.parametrize("lost", ["commands", "machine"])
def test_with_keep_going_the_programs_of_the_others_run_on(nodes: Nodes, lost: str) -> None:
    nodes.start("--keep-going", "--", "sh", "-c", SAY + WAIT)
    pids = nodes.started()
    if lost == "commands":
        for pid in pids[:2]:  # node 0 goes on keeping the others together
            os.kill(pid, signal.SIGKILL)
        assert nodes.processes[1].wait(60) == KILLED
    else:
        nodes.processes[0].kill()
        nodes.wait_for_words("the command runs on (--keep-going): node 0")
    assert not has_ended(pids[2])
    nodes.go()
    assert nodes.statuses() == ([KILLED, KILLED, 0] if lost == "commands" else [-signal.SIGKILL, 0, 0])


def test_node_0_waits_for_the_programs_of_the_others(nodes: Nodes) -> None:
    nodes.start("--head", f"sh -c '{SAY}'", "--", "sh", "-c", f"{SAY} {WAIT} exit {{node_rank}}")
    nodes.started()
    nodes.wait_for_words("the command of node 0 has ended; waiting")
    nodes.go()
    # Its own status is not 0 then, although its own command has succeeded: the job has failed.
    assert sorted(nodes.statuses()) in ([1, 1, 2], [1, 1, ENDED], [1, 2, ENDED])


def test_ctrl_c_on_a_node_0_that_waits_ends_the_others(nodes: Nodes) -> None:
    nodes.start("--head", f"sh -c '{SAY}'", "--", "sh", "-c", SAY + "exec sleep 100")
    nodes.started()
    nodes.wait_for_words("the command of node 0 has ended; waiting")
    nodes.processes[0].send_signal(signal.SIGINT)
    assert nodes.statuses() == [128 + signal.SIGINT, ENDED, ENDED]


def test_ctrl_c_during_the_good_bye_of_a_failed_command_keeps_its_status_and_ends_its_workers(nodes: Nodes) -> None:
    worker = f"sleep 100 >/dev/null 2>&1 & echo $! > worker; {WAIT} exit 3"
    path = patched_path(nodes.folder, "import mingle.run.session as session\nsession.LEAVE_SECONDS = 60.0\n")
    nodes.start("--head", f"sh -c '{SAY} exec sleep 100'", "--", "sh", "-c", SAY + worker, count=2, PYTHONPATH=path)
    nodes.started()
    node_0, node_1 = nodes.processes
    node_0.send_signal(signal.SIGSTOP)  # it answers no good-bye
    nodes.go()
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


def test_a_stderr_whose_reader_is_gone_keeps_no_failure_from_the_others(nodes: Nodes) -> None:
    words = ("--head", "sh -c 'exit 3'", "--", "sleep", "100")
    nodes.start("-vv", *words, given=[0], count=2)
    (node_0,) = nodes.processes
    assert node_0.stderr is not None
    assert node_0.stderr.readline()
    node_0.stderr.close()
    nodes.start(*words, given=[1], count=2)
    assert [process.wait(60) for process in nodes.processes] == [3, ENDED]
    node_0.stderr = None
