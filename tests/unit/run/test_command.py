"""The command line of mingle-run: what it refuses before a packet, and what it tells the program."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner

from mingle.config.settings import Settings
from mingle.errors import MingleError
from mingle.run.command import _attend, run
from mingle.run.program import Program
from mingle.run.session import NodeSession
from tests.support.bystanders import command_environment
from tests.support.loopback import until
from tests.support.run_nodes import SAY, WAIT, Nodes, has_ended, one


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nnodes", "2"], "Missing argument 'COMMAND"),
        (["--", "true"], "Missing option '--nnodes'"),
        (["--nnodes", "0", "--", "true"], "0 is not in the range 1<=x<=1000000"),
        (["--nnodes", "2", "--", "echo", "{node}"], "{node} in the command is not a placeholder"),
        (["--nnodes", "2", "--head", "echo {node}", "--", "true"], "{node} in the command is not a placeholder"),
        (["--nnodes", "2", "--head", "echo '", "--", "true"], "can't be split into words"),
        (["--nnodes", "2", "--head", " ", "--", "true"], "--head is empty"),
        (["--nnodes", "2", "--", "no-such-program"], "the program 'no-such-program' is not there"),
        (["--nnodes", "2", "--", "/tmp"], "the program '/tmp' is not there"),
        (["--nnodes", "2", "--", "/etc/passwd"], "is not executable"),
        (["--nnodes", "1", "--mlx", "--", "true"], "--mlx needs --nnodes 2 or more"),
        (["--nnodes", "2", "--node-rank", "0", "--", "true"], "--node-rank=0 contradicts Kubernetes Indexed Job's"),
    ],
    ids=" ".join,
)
def test_bad_input_is_wrong_usage_before_a_packet(words: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", never)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    done = CliRunner().invoke(run, words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert text in done.stderr


def test_a_job_id_of_the_environment_that_is_too_long_is_not_blamed_on_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINGLE_JOB_ID", 256 * "x")  # a rank can use it
    done = CliRunner().invoke(run, ["--nnodes", "2", "--", "true"])
    assert done.exit_code == 2
    assert "mingle-run- with MINGLE_JOB_ID='mingle-run-xxx" in done.stderr
    assert "--job-id" not in done.stderr


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the job ids with which machines begin to look for each other."""
    found: list[str] = []

    def meet(wanted: Settings, *_given: object, **_more: object) -> int:
        found.append(wanted.job_id)
        return 0

    monkeypatch.setattr("mingle.run.command._meet_and_run", meet)
    return found


def test_machines_on_which_another_line_is_typed_have_another_job(jobs: list[str]) -> None:
    lines = [
        ["--nnodes", "2", "--", "true"],
        ["--nnodes", "3", "--", "true"],
        ["--nnodes", "2", "--head", "true", "--", "true"],
        ["--nnodes", "2", "--", "true", "x"],
    ]
    for line in (*lines, *lines):
        assert CliRunner().invoke(run, line).exit_code == 0
    assert len(set(jobs[:4])) == 4
    assert jobs[4:] == jobs[:4]


@pytest.mark.parametrize(
    ("variables", "words", "status"),
    [
        ({}, ["--head", "no-such-program", "--", "true"], 2),
        ({}, ["--node-rank", "1", "--head", "no-such-program", "--", "true"], 0),
        ({}, ["--node-rank", "0", "--head", "true", "--", "no-such-program"], 0),
        ({"MINGLE_NODE_RANK": "1"}, ["--head", "no-such-program", "--", "true"], 0),
        ({"JOB_COMPLETION_INDEX": "1"}, ["--head", "no-such-program", "--", "true"], 2),
    ],
    ids=["assigned", "node 1", "node 0", "by hand", "launched"],
)
def test_the_program_of_another_node_need_not_be_there(
    jobs: list[str], variables: dict[str, str], words: list[str], status: int
) -> None:
    done = CliRunner().invoke(run, ["--nnodes", "2", *words], env=variables)
    assert done.exit_code == status, done.output
    assert ("the program 'no-such-program' is not there" in done.stderr) == (status == 2)
    assert bool(jobs) == (status == 0)


def test_options_after_the_program_are_its_own() -> None:
    done = one("--nnodes", "1", "echo", "--nnodes", "7", "-h")
    assert (done.returncode, done.stdout) == (0, "--nnodes 7 -h\n")


def test_one_machine_needs_no_network_and_is_told_the_same_as_several() -> None:
    words = "{master_addr} {node_rank} {nnodes} $NNODES {hosts} {my_port} {hostports}"
    done = one("--nnodes", "1", "--", "sh", "-c", f"echo {words}; cat {{hostfile}}; exit 7")
    *told, own, hostports, listed = done.stdout.split()
    assert (done.returncode, done.stderr) == (7, "")
    assert told == ["127.0.0.1", "0", "1", "1", "127.0.0.1"]
    assert (hostports, listed) == (f"127.0.0.1:{own}", "127.0.0.1")


def test_mingle_run_loads_neither_torch_nor_rich() -> None:
    code = (
        "import sys, mingle.run.command as command, mingle.run.session, mingle.run.port\n"
        "try:\n    command.run(['--nnodes', '1', '--', 'true'])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "loaded = {'torch', 'rich', 'numpy'} & {*sys.modules}; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], env=command_environment(29499), check=True, timeout=60)


EVERYBODY = """\
import json, os, socket, stat, sys
own, hostfile, *place = sys.argv[1:]
with socket.socket() as server:
    server.bind(("127.0.0.1", int(own)))  # without SO_REUSEADDR
modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (os.path.dirname(hostfile), hostfile)]
files = [open(hostfile).read().split(), json.load(open(os.environ["MLX_HOSTFILE"]))]
print(json.dumps([own, hostfile, place, modes, files, dict(os.environ)]))
"""


def test_every_machine_is_told_the_addresses_and_ports_of_all(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "everybody.py").write_text(EVERYBODY)
    placeholders = "node_rank nnodes master_addr master_port interface address hosts hostports"
    words = [sys.executable, "everybody.py", "{my_port}", "{hostfile}"]
    words += [f"{{{name}}}" for name in placeholders.split()]
    nodes.start("--mlx", "--", *words, given=[None] * 3, TMPDIR=str(tmp_path), VLLM_HOST_IP="192.0.2.9", HOST_IP="")
    done = nodes.ended()
    assert [(status, errors) for status, _, errors in done] == [(0, "")] * 3
    said = sorted((json.loads(output) for _, output, _ in done), key=lambda each: int(each[2][0]))
    ports = [own for own, *_ in said]
    assert len(set(ports)) == 3
    hosts, hostports = ["127.0.0.1"] * 3, [f"127.0.0.1:{port}" for port in ports]
    master_port = said[0][2][3]
    for rank, (_, hostfile, place, modes, files, environment) in enumerate(said):
        assert place == [
            *(str(rank), "3", "127.0.0.1", master_port, "lo", "127.0.0.1"),
            *(",".join(hosts), ",".join(hostports)),
        ]
        expected = {
            "NODE_RANK": str(rank),
            "NNODES": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": master_port,
            "MINGLE_HOSTS": ",".join(hosts),
            "MINGLE_HOSTFILE": hostfile,
            "MLX_RANK": str(rank),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
            "VLLM_HOST_IP": "192.0.2.9",
            "SGLANG_HOST_IP": "127.0.0.1",
            "HOST_IP": "127.0.0.1",
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert files == [hosts, [[each] for each in hostports]]
        assert modes == [0o700, 0o600]
        assert Path(hostfile).parent.parent == tmp_path
        assert not Path(hostfile).parent.exists()


@pytest.mark.parametrize("end", ["fails", "SIGTERM", pytest.param("SIGTERM before the start", marks=pytest.mark.slow)])
def test_the_host_file_is_gone_at_the_end(nodes: Nodes, tmp_path: Path, end: str) -> None:
    def files() -> list[Path]:
        return list(tmp_path.glob("mingle-run-*"))

    given = [0] if end == "SIGTERM before the start" else [0, 1]
    nodes.start("--", "sh", "-c", f"{SAY} {WAIT} exit 5", given=given, count=2, TMPDIR=str(tmp_path))
    until(lambda: len(files()) == len(given), 60)
    if len(given) == 2:
        nodes.started()
    if end == "fails":
        nodes.go()
    else:
        nodes.processes[0].send_signal(signal.SIGTERM)
    assert 0 not in nodes.statuses()
    assert files() == []


class BrokenSession:
    """The session of a machine whose loop has ended with an error."""

    trouble = None

    def turn(self, _until: float | None = None) -> None:
        time.sleep(0.01)

    def fail(self, _how: str) -> None:
        raise MingleError.explain("the loop has ended", cause="a test", remedy="none.")


def test_an_error_during_the_good_bye_of_a_failed_command_keeps_its_status_and_ends_its_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program()
    program.start(["sh", "-c", f"sleep 100 >/dev/null 2>&1 & echo $! > {tmp_path}/worker; exit 3"], os.environ)
    assert _attend(program, cast("NodeSession", BrokenSession()), keep_going=False) == 3
    until(lambda: has_ended(int((tmp_path / "worker").read_text())))
    assert "mingle-run: the loop has ended" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_the_status_is_that_of_the_program_also_without_a_standard_stream(closed: str) -> None:
    command = f'"{sys.executable}" -m mingle.run.command --nnodes 1 -- true {closed}>&-'
    assert subprocess.run(command, shell=True, env=command_environment(29499), timeout=60, check=False).returncode == 0
