"""``list`` and ``find`` against jobs on `lo`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from mingle.cli import main
from tests.bystanders import announcing, command_environment, free_udp_port, gathering, run_command

SECRET = "correct horse battery staple"

FIELDS = {
    "job",
    "kind",
    "state",
    "session",
    "host",
    "address",
    "port",
    "endpoint",
    "world_size",
    "joined",
    "missing",
    "secret",
    "proved",
    "problem",
    "seconds",
}


@pytest.fixture
def port() -> int:
    return free_udp_port()


def command(*arguments: str, port: int, **variables: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"MINGLE_PORT": str(port), **variables}, catch_exceptions=False)


def test_nothing_there_is_an_empty_answer_with_a_word_on_stderr(port: int) -> None:
    result = command("list", "-t", "0.3", port=port)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no job answered" in result.stderr
    assert f"UDP port {port}" in result.stderr
    result = command("list", "-t", "0.3", "--json", port=port)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"schema": 1, "command": "list", "jobs": []}
    for words in (("--fail-if-empty",), ("--fail-if-empty", "--json")):
        result = command("list", "-t", "0.3", *words, port=port)
        assert (result.exit_code, "no job answered" in result.stderr) == (1, True)
    result = command("find", "nothing", "-t", "0.3", "--json", port=port)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["type"] == "DiscoveryTimeoutError"


def test_list_shows_a_gathering_its_missing_ranks_and_who_seeks(port: int) -> None:
    with (
        gathering("half there\n", port, (0, 2, 3), world_size=6),
        gathering("headless", port, (4,), world_size=8),
        announcing("by hand", "--master-port", "29500", port=port),
    ):
        rows = [line.split("\t") for line in command("list", port=port).stdout.splitlines()]
        record = json.loads(command("list", "--json", port=port).stdout)
        found = command("find", "half there\n", "--control", port=port)
        verbose = command("find", "half there\n", "--control", "-v", "--json", port=port)
    by_hand, half, headless = rows
    assert (by_hand[0], by_hand[1], by_hand[3], by_hand[4]) == (
        "by hand",
        "announced",
        "127.0.0.1:29500",
        "-",
    )
    assert half[:3] == ["half there\\n", "open", "node0 pid 100"]
    assert half[4:] == ["3/6", "1, 4, 5", "-", "-"]
    assert headless == ["headless", "seeking", "-", "-", "0/8", "-", "rank 4 on node4 pid 104", "-"]

    assert (record["schema"], record["command"]) == (1, "list")
    for job in record["jobs"]:
        assert set(job) == FIELDS | {"seeking"}
    announced, open_job, seeking = record["jobs"]
    assert announced["endpoint"] == "announced"
    assert announced["kind"] == "announcement"
    assert (announced["joined"], announced["world_size"]) == (None, None)
    assert (open_job["joined"], open_job["world_size"], open_job["missing"]) == (3, 6, [1, 4, 5])
    assert open_job["proved"] is True
    assert (open_job["endpoint"], open_job["state"]) == ("control", "open")
    assert (seeking["host"], seeking["address"], seeking["seeking"][0]["rank"]) == (None, None, 4)

    assert found.exit_code == 0
    assert found.stdout == f"127.0.0.1:{open_job['port']}\n"
    assert "datagrams sent" in verbose.stderr
    answer = json.loads(verbose.stdout)
    assert set(answer) == FIELDS | {"schema", "command"}
    assert (answer["address"], answer["port"], answer["endpoint"]) == (
        "127.0.0.1",
        open_job["port"],
        "control",
    )


def test_a_secret_is_shown_and_opens_the_answer(port: int) -> None:
    with announcing("guarded", "--master-port", "29500", port=port, MINGLE_SECRET=SECRET):
        (closed,) = command("list", "-t", "1", port=port).stdout.splitlines()
        (opened,) = command("list", "-t", "1", port=port, MINGLE_SECRET=SECRET).stdout.splitlines()
        refused = command("find", "guarded", "-t", "1", port=port)
        found = command("find", "guarded", port=port, MINGLE_SECRET=SECRET)
    assert closed.split("\t")[1] == "announced, not proved"
    assert closed.endswith("\tsecret")
    assert opened.split("\t")[1] == "announced"
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--secret-file" in refused.stderr
    assert found.stdout == "127.0.0.1:29500\n"


def test_export_is_what_a_shell_evaluates(port: int) -> None:
    with announcing("exported", "--master-port", "29500", "--master-addr", "fd00::7", port=port):
        plain = command("find", "exported", port=port)
        exported = command("find", "exported", "--export", port=port)
    assert plain.stdout == "[fd00::7]:29500\n"
    shell = ["sh", "-c", 'eval "$1"; printf "%s|%s" "$MASTER_ADDR" "$MASTER_PORT"', "sh", exported.stdout]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "fd00::7|29500"


@pytest.mark.parametrize("words", [(), ("--export",), ("--json",)])
def test_a_job_that_gathers_has_no_store_to_print(port: int, words: tuple[str, ...]) -> None:
    with gathering("not yet", port, (0, 2), world_size=3):
        result = command("find", "not yet", "-t", "1", *words, port=port)
    assert result.exit_code == 1
    assert "2 of 3 ranks joined, missing ranks: 1" in result.stderr
    assert "--control" in result.stderr
    assert ("error" in json.loads(result.stdout)) if words == ("--json",) else (result.stdout == "")


def test_a_control_port_is_nothing_to_export(port: int) -> None:
    result = command("find", "job", "--export", "--control", port=port)
    assert result.exit_code == 2
    assert "--control" in result.stderr


def test_find_waits_as_long_as_the_ranks_do(port: int) -> None:
    result = command("find", "nothing", port=port, MINGLE_TIMEOUT="0.5")
    assert "within 0.5 s" in result.stderr


RANK = """
import sys, mingle
with mingle.discover("real", rank=int(sys.argv[1]), world_size=2, discovery_timeout=60) as job:
    print(job.master_addr, job.master_port, flush=True)
    sys.stdin.read()
"""


def test_a_job_that_has_formed_is_found_at_its_store(port: int) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank)],
            env=command_environment(port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        exported = run_command("find", "real", "--export", "-t", "60", port=port).stdout
        control = json.loads(run_command("find", "real", "--control", "--json", port=port).stdout)
        (row,) = command("list", port=port).stdout.splitlines()
    finally:
        said = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    (address, store_port), _ = said
    assert said[0] == said[1]
    assert shlex.split(exported) == ["export", f"MASTER_ADDR={address}", f"MASTER_PORT={store_port}"]
    assert (control["address"], control["endpoint"]) == (address, "control")
    assert control["port"] != int(store_port)
    cells = row.split("\t")
    assert cells[0] == "real"
    assert cells[1] in {"sealed", "running"}
    assert cells[3:7] == [f"{address}:{store_port}", "2/2", "-", "-"]
    assert [rank.returncode for rank in ranks] == [0, 0]
