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
from tests.support.run_nodes import SAY, Nodes, has_ended, one


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
        (["--nnodes", "2", "--head", "no-such-program", "--", "true"], "the program 'no-such-program' is not there"),
        (["--nnodes", "2", "--", "/tmp"], "the program '/tmp' is not there"),
        (["--nnodes", "1", "--mlx", "--", "true"], "--mlx needs --nnodes 2 or more"),
    ],
    ids=" ".join,
)
def test_bad_input_is_wrong_usage_before_a_packet(words: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", never)
    done = CliRunner().invoke(run, words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert text in done.stderr


def test_a_node_rank_of_the_environment_is_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    done = CliRunner().invoke(run, ["--nnodes", "2", "--node-rank", "0", "--", "true"])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "--node-rank=0 contradicts Kubernetes Indexed Job's" in done.stderr


def test_a_job_id_of_the_environment_that_is_too_long_is_not_blamed_on_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINGLE_JOB_ID", 256 * "x")  # a rank can use it
    done = CliRunner().invoke(run, ["--nnodes", "2", "--", "true"])
    assert done.exit_code == 2
    assert "mingle-run- with MINGLE_JOB_ID='mingle-run-xxx" in done.stderr
    assert "is 267 bytes long in UTF-8" in done.stderr
    assert "--job-id" not in done.stderr


def test_machines_on_which_another_line_is_typed_have_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def meet(wanted: Settings, *_given: object, **_more: object) -> int:
        found.append(wanted.job_id)
        return 0

    monkeypatch.setattr("mingle.run.command._meet_and_run", meet)
    lines = [
        ["--nnodes", "2", "--", "true"],
        ["--nnodes", "3", "--", "true"],
        ["--nnodes", "2", "--head", "true", "--", "true"],
        ["--nnodes", "2", "--", "true", "x"],
    ]
    for line in (*lines, *lines):
        assert CliRunner().invoke(run, line).exit_code == 0
    assert len(set(found[:4])) == 4
    assert found[4:] == found[:4]


def test_a_file_without_the_right_to_execute_it_is_wrong_usage(tmp_path: Path) -> None:
    script = tmp_path / "no-right"
    script.touch()
    done = CliRunner().invoke(run, ["--nnodes", "2", "--", str(script)])
    assert done.exit_code == 2
    assert "is not executable" in done.stderr
    assert f"chmod +x {script}" in done.stderr


def test_the_program_of_another_node_need_not_be_there() -> None:
    for words in (["--node-rank", "0", "--head", "true", "--", "no-such"], ["--head", "no-such", "--", "true"]):
        done = one("--nnodes", "1", *words)
        assert done.returncode == (0 if "--node-rank" in words else 2), done.stderr


@pytest.mark.parametrize(
    ("variables", "status"),
    [({}, 2), ({"MINGLE_NODE_RANK": "1"}, 0), ({"JOB_COMPLETION_INDEX": "1"}, 2)],
    ids=["assigned", "by hand", "launched"],
)
def test_a_worker_by_environment_need_not_have_the_program_of_node_0(
    variables: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mingle.run.command._meet_and_run", lambda *_given, **_more: 0)
    done = CliRunner().invoke(run, ["--nnodes", "2", "--head", "no-such-program", "--", "true"])
    assert done.exit_code == status, done.output
    assert ("the program 'no-such-program' is not there" in done.stderr) == (status == 2)


def test_help_and_version() -> None:
    shown = CliRunner().invoke(run, ["-h"])
    assert shown.exit_code == 0
    assert shown.output.startswith("Usage: mingle-run --nnodes N [OPTIONS] -- COMMAND [ARG]...")
    for option in ("--interface", "--peers", "--secret-file", "--timeout", "--head", "--keep-going", "--mlx"):
        assert option in shown.output
    assert "--json" not in shown.output
    assert CliRunner().invoke(run, ["--version"]).output.startswith("mingle-run ")


def test_options_after_the_program_are_its_own() -> None:
    done = one("--nnodes", "1", "echo", "--nnodes", "7", "-h")
    assert (done.returncode, done.stdout) == (0, "--nnodes 7 -h\n")


def test_one_machine_needs_no_network() -> None:
    done = one("--nnodes", "1", "--", "sh", "-c", "echo {master_addr} {node_rank} {nnodes} $NNODES; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "127.0.0.1 0 1 1\n", "")


def test_one_machine_is_told_everybodys_address() -> None:
    done = one("--nnodes", "1", "--", "sh", "-c", "echo {hosts} {hostports} {my_port}; cat {hostfile}")
    hosts, hostports, own, listed = done.stdout.split()
    assert (hosts, hostports, listed) == ("127.0.0.1", f"127.0.0.1:{own}", "127.0.0.1")


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
hosts, hostfile, hostports, own, *place = sys.argv[1:]
file, names = hostfile, ("MLX_RANK", "VLLM_HOST_IP", "SGLANG_HOST_IP", "HOST_IP")
placed = [os.environ[name] for name in ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")]
with socket.socket() as server:
    server.bind(("127.0.0.1", int(own)))  # without SO_REUSEADDR
print(json.dumps({
    "rank": int(os.environ["NODE_RANK"]), "hosts": hosts, "hostports": hostports, "own": own, "file": file,
    "same": [os.environ["MINGLE_HOSTS"] == hosts, os.environ["MINGLE_HOSTFILE"] == hostfile],
    "lines": open(file).read().splitlines(), "ring": json.load(open(os.environ["MLX_HOSTFILE"])),
    "modes": [stat.S_IMODE(os.stat(path).st_mode) for path in (os.path.dirname(file), file)],
    "told": [os.environ[name] for name in names], "nccl": os.environ["NCCL_SOCKET_IFNAME"],
    "placed": placed, "place": place,
}))
"""


def test_every_machine_is_told_the_addresses_and_ports_of_all(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "everybody.py").write_text(EVERYBODY)
    words = [sys.executable, "everybody.py", "{hosts}", "{hostfile}", "{hostports}", "{my_port}"]
    words += ["{node_rank}", "{nnodes}", "{master_addr}", "{master_port}", "{interface}", "{address}"]
    nodes.start("--mlx", "--", *words, given=[None] * 3, TMPDIR=str(tmp_path), VLLM_HOST_IP="192.0.2.9", HOST_IP="")
    done = nodes.ended()
    assert [(status, errors) for status, _, errors in done] == [(0, "")] * 3
    said = sorted((json.loads(output) for _, output, _ in done), key=lambda each: int(each["rank"]))
    ports = [each["own"] for each in said]
    assert len(set(ports)) == 3
    (master_port,) = {each["place"][3] for each in said}
    for rank, each in enumerate(said):
        file = Path(each["file"])
        assert file.parent.parent == tmp_path
        assert not file.parent.exists()
        placed = [str(rank), "3", "127.0.0.1", master_port, "lo"]
        assert each == {
            "rank": rank,
            "placed": placed,
            "place": [*placed, "127.0.0.1"],
            "nccl": "=lo",
            "own": ports[rank],
            "file": str(file),
            "hosts": "127.0.0.1,127.0.0.1,127.0.0.1",
            "hostports": ",".join(f"127.0.0.1:{number}" for number in ports),
            "same": [True, True],
            "lines": ["127.0.0.1"] * 3,
            "ring": [[f"127.0.0.1:{number}"] for number in ports],
            "modes": [0o700, 0o600],
            "told": [str(rank), "192.0.2.9", "127.0.0.1", "127.0.0.1"],
        }


@pytest.mark.parametrize("end", ["fails", "SIGTERM", pytest.param("SIGTERM before the start", marks=pytest.mark.slow)])
def test_the_host_file_is_gone_at_the_end(nodes: Nodes, tmp_path: Path, end: str) -> None:
    def files() -> list[Path]:
        return list(tmp_path.glob("mingle-run-*"))

    waits = end == "SIGTERM before the start"
    given = [0] if waits else [0, 1]
    nodes.start(
        "--",
        "sh",
        "-c",
        SAY + "until test -e go; do sleep 0.05; done; exit 5",
        given=given,
        count=2,
        TMPDIR=str(tmp_path),
    )
    until(lambda: len(files()) == len(given), 60)
    if not waits:
        nodes.started()
    if end == "fails":
        (tmp_path / "go").touch()
    else:
        nodes.processes[0].send_signal(signal.SIGTERM)
    assert 0 not in [status for status, _, _ in nodes.ended()]
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
    assert "mingle-run: the loop has ended\n  likely cause: a test" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_the_status_is_that_of_the_program_also_without_a_standard_stream(closed: str) -> None:
    command = f'"{sys.executable}" -m mingle.run.command --nnodes 1 -- true {closed}>&-'
    assert subprocess.run(command, shell=True, env=command_environment(29499), timeout=60, check=False).returncode == 0
