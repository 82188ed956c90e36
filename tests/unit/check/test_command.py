"""The command line of mingle-check, the further processes of a machine, and what is printed."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
from click.testing import CliRunner, Result
from msgspec import structs
from rich.console import Console

from mingle.check import command, conductor, probes, session
from mingle.check.conductor import Options, report_of
from mingle.check.verdicts import Bandwidth
from mingle.config.settings import Arguments
from mingle.errors import InterfaceError
from tests.support.bystanders import command_environment, patched_path
from tests.support.evidence import PATIENT, healthy, slow
from tests.support.ports import free_udp_port


def check(*words: str, **variables: str | None) -> Result:
    return CliRunner().invoke(command.check, words, prog_name="mingle-check", env=variables)


def drawn(draw: Callable[[Console], object]) -> str:
    """Return what a terminal is sent."""
    file = io.StringIO()
    draw(Console(file=file, force_terminal=True, width=100, color_system="standard"))
    return file.getvalue()


# --- what is printed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terminal", "parts"),
    [
        (True, ["bandwidth of all_reduce", "BUSBW MB/s", "links between the machines", "MB/s from", "healthy: "]),
        (
            False,
            [
                "COLLECTIVE\tDEVICE\tBYTES\tTIME us\tALGBW MB/s\tBUSBW MB/s\nall_reduce\t",
                "LINK\tFROM\tTO\tRTT us\tMB/s\npair\t",
                "healthy: ",
            ],
        ),
    ],
    ids=["terminal", "pipe"],
)
def test_a_report_names_its_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, parts: list[str]
) -> None:
    seen = healthy()
    seen.all_reduce = [Bandwidth("cpu", 4, 1e-4, 4e4, 6e4)]
    monkeypatch.setattr(command.output, "is_terminal", lambda: terminal)
    command.show_report(report_of(seen, [], 0.0))
    shown = capsys.readouterr().out
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


def test_a_terminal_gets_a_matrix_in_color() -> None:
    seen = healthy()
    slow((3, 1))(seen)
    seen.broken = {(0, 2): "no TCP connection"}
    shown = drawn(lambda console: console.print(command.matrix(report_of(seen, [], 0.0))))
    assert "\x1b[1;31m100\x1b[0m" in shown
    assert shown.count("\x1b[1;31mbroken\x1b[0m") == 2
    assert "\x1b[32m1000\x1b[0m" in shown


@pytest.mark.parametrize(
    "steps",
    [
        ["correctness: broadcast on cpu", "bandwidth: all_reduce on cpu: 4 B", "bandwidth: all_reduce on cpu: 16 B"],
        ["warning: the ranks are on 3 machines", "warning: the options differ"],
    ],
    ids=["a size replaces the last one", "each warning stays"],
)
def test_a_terminal_gets_a_line_for_each_step_with_its_time(steps: list[str]) -> None:
    def draw(console: Console) -> None:
        with command.steps(console) as show:
            for step in steps:
                show(step)

    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", drawn(draw)).replace("\r", "\n")
    assert re.findall(r"0:00:\d\d (.*?)\s*$", shown, re.MULTILINE)[-2:] == [steps[0], steps[-1]]


@pytest.mark.parametrize(
    ("rank", "each_machine", "shown", "defect"),
    [
        (0, False, True, ""),
        (1, False, False, ""),
        (1, False, False, "ValueError: no"),
        (1, True, True, "ValueError: no"),
    ],
)
def test_under_a_launcher_one_rank_prints_and_by_hand_one_on_each_machine(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    each_machine: bool,
    shown: bool,
    defect: str,
) -> None:
    job = SimpleNamespace(rank=rank, local_rank=0, world_size=2, local_world_size=1, num_nodes=2, job_id="j")
    report = report_of(structs.replace(healthy(), defect=defect), [], 0.0)
    monkeypatch.setattr("mingle.distributed.rendezvous.discover", lambda _arguments: contextlib.nullcontext(job))
    monkeypatch.setattr(session, "take_part", lambda *_given: report)
    assert command.run(Arguments(), Options(), nnodes=3, per_node=8, each_machine=each_machine) == bool(defect)
    said = capsys.readouterr()
    assert bool(said.out) is shown
    assert ("FAULT: " in said.out) is (shown and bool(defect))
    assert ("--nnodes 3 was given, and the ranks are on 2 machines" in said.err) is shown
    assert ("--nproc-per-node 8 was given, and the launcher has started 1 rank here" in said.err) is shown


# --- the command line ----------------------------------------------------------------------------------------------


Given: TypeAlias = list[tuple[Arguments, Options]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Give what the check is run with; it is healthy."""
    seen: Given = []
    monkeypatch.setattr(command, "run", lambda *arguments, **_more: seen.append(arguments) or 0)
    return seen


@pytest.mark.parametrize(
    ("variables", "words", "expected"),
    [
        pytest.param({"RANK": ""}, [], {"world_size": 2}, id="an empty variable of a template is none"),
        pytest.param(
            {"_MINGLE_CHECK_LOCAL": "1"}, ["--nproc-per-node", "3"], {"world_size": 6}, id="a further process"
        ),
        pytest.param({}, [], {"seconds": 20.0, "discovery_timeout": None}, id="the time limit of each step"),
        pytest.param(
            {}, ["--timeout", "3"], {"seconds": 3.0, "discovery_timeout": None}, id="and not of the discovery"
        ),
    ],
)
def test_a_check_is_run_with_what_was_asked_for(
    given: Given, variables: dict[str, str], words: list[str], expected: dict[str, object]
) -> None:
    assert check("--nnodes", "2", *words, **variables).exit_code == 0
    ((arguments, options),) = given
    asked = structs.asdict(arguments) | structs.asdict(options)
    assert {name: asked[name] for name in expected} == expected


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--nnodes", "2", "--max-size", "3"],
        ["--nnodes", "2", "--max-size", "900G"],
        ["--nnodes", "1", "--timeout", "0.5"],
        ["--nnodes", "1", "--timeout", "1e13"],
        ["--nnodes", "1", "--backend", "nccl"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_before_the_first_packet(
    words: list[str], given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "has_gpu", lambda: False)
    told = check(*words)
    assert told.exit_code == 2
    assert "mingle-discover" not in told.output
    assert not given


def test_a_driver_that_hangs_is_told_before_the_first_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(conductor, "GPU_SECONDS", 0.1)
    monkeypatch.setattr(probes, "load_driver", answers.wait)
    told = check("--nnodes", "1", "--backend", "nccl", "--timeout", "1")
    answers.set()
    assert told.exit_code == 2
    assert "the GPU driver of this machine has not answered in 1 s" in told.output


@pytest.mark.parametrize(
    ("environ", "user", "expected"),
    [
        ({}, "ada", "mingle-check-ada"),
        ({}, None, "mingle-check-4000111"),
        ({"USER": "eve", "LOGNAME": "eve"}, "ada", "mingle-check-ada"),
        ({"MINGLE_RANK": "0", "MINGLE_WORLD_SIZE": "2"}, "ada", "mingle-check-ada"),
        ({"MINGLE_JOB_ID": "mine"}, "ada", "mine"),
    ],
)
def test_the_checks_of_two_users_do_not_meet(
    given: Given,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    user: str | None,
    expected: str,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_111)
    if user:
        monkeypatch.setattr("pwd.getpwuid", lambda _number: SimpleNamespace(pw_name=user))
    told = check("--nnodes", "2", **{"USER": None, **environ})
    assert told.exit_code == 0
    assert [arguments.job_id for arguments, _ in given] == [expected]
    assert ("--job-id" in told.stderr) is (not environ or "USER" in environ)


@pytest.mark.parametrize("local", ["", "1"])
def test_an_error_on_a_machine_with_several_processes_is_one_json_object(
    monkeypatch: pytest.MonkeyPatch, local: str
) -> None:
    def run(*_given: object, **_more: object) -> int:
        raise InterfaceError("no interface")

    monkeypatch.setattr(command, "run", run)
    told = check("--nnodes", "2", "--json", _MINGLE_CHECK_LOCAL=local or None)
    assert told.exit_code == 1
    assert told.stderr.splitlines()[-1] == "mingle-check: no interface"
    assert bool(told.stdout) is not bool(local)
    if not local:
        assert json.loads(told.stdout)["command"] == "check"


# --- the further processes of a machine ------------------------------------------------------------------------------


@pytest.fixture
def further(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> subprocess.Popen[bytes]:
    """Give the first further process of this machine that a check starts; the start of a second one fails."""
    first = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = iter([first])

    def start(*_line: object, **_more: object) -> subprocess.Popen[bytes]:
        if (process := next(started, None)) is None:
            raise request.param
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    return first


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_processes_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, further: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    monkeypatch.setattr(command, "run", lambda *_given, **_more: signal.raise_signal(number))
    before = signal.signal(signal.SIGTERM, command._terminate)
    try:
        told = check("--nnodes", "2", "--nproc-per-node", "2")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told.exit_code == 128 + number
    assert number.name in told.stderr
    assert told.stdout == ""
    assert further.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("further", "status"),
    [(KeyboardInterrupt(), 128 + signal.SIGINT), (OSError(errno.EAGAIN, "Resource temporarily unavailable"), 1)],
    indirect=["further"],
)
def test_processes_that_were_started_before_a_failure_end(further: subprocess.Popen[bytes], status: int) -> None:
    told = check("--nnodes", "2", "--nproc-per-node", "4")
    assert further.returncode == -signal.SIGTERM
    assert told.exit_code == status
    assert ("the other ranks of this machine can't be started" in told.output) is (status == 1)


BY_HAND = [sys.executable, "-m", "mingle.check.command", "--nnodes=1", "--nproc-per-node=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        BY_HAND,
        ["bash", "-c", '"$@" --secret-file <(echo a-long-secret-of-20-b)', "-", *BY_HAND],
        [*TORCHRUN, "-m", "mingle.check.command"],
        [*TORCHRUN, "--no-python", "mingle-check"],
    ],
    ids=["by hand", "by hand, the secret from a process", "torchrun", "torchrun and the console script"],
)
def test_two_processes_of_one_machine_check_each_other(line: list[str], tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*line, "--max-size=1M", "--timeout=100", "--json"],
        env={**command_environment(free_udp_port()), "PYTHONPATH": patched_path(tmp_path, PATIENT), "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema"] == 1
    assert answer["command"] == "check"
    assert {verdict["kind"] for verdict in answer["verdicts"]} <= {"cpu-busy"}  # true of a busy machine
    assert answer["healthy"] is not bool(answer["verdicts"])
    assert done.returncode == (not answer["healthy"])
    assert [pair["fault"] for pair in answer["pairs"]] == [None, None]
    assert answer["all_reduce"][-1]["size"] == 1 << 20
    # nccl-tests: of two ranks, the bus carries what the algorithm does.
    assert all(each["busbw"] == pytest.approx(each["algbw"]) for each in answer["all_reduce"])
