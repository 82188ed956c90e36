"""``list``, ``watch``, ``find`` and ``announce``: against jobs on `lo`, and their records and rows."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from mingle.cli import jobs, main
from mingle.cli.jobs import MAX_ADDRESS_LENGTH, changes
from mingle.config.settings import Network
from mingle.errors import DiscoveryTimeoutError
from mingle.observe.finder import Seeking, find_job
from mingle.wire.datagrams import Seek
from tests.bystanders import (
    Wire,
    a_finder,
    an_announcement,
    announcing,
    command_environment,
    free_udp_port,
    gathering,
    run_command,
)

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
        (closed,) = command("list", "-t", "3", port=port).stdout.splitlines()
        (opened,) = command("list", "-t", "3", port=port, MINGLE_SECRET=SECRET).stdout.splitlines()
        refused = command("find", "guarded", "-t", "3", port=port)
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


# --- watch ---

A, B = ("a", "1"), ("b", None)


def test_a_watch_tells_changes() -> None:
    record = {"state": "open", "seconds": 1.0}
    assert list(changes({}, {A: record})) == [("new", A)]
    assert list(changes({A: record}, {})) == [("gone", A)]
    assert list(changes({A: record}, {A: {**record, "seconds": 9.0}})) == []
    assert list(changes({A: record}, {A: {**record, "state": "sealed"}, B: record})) == [("changed", A), ("new", B)]


@pytest.mark.parametrize("as_json", [False, True])
def test_watch_in_a_pipe(as_json: bool) -> None:
    port = free_udp_port()
    words = ["watch", "-t", "30", *(["--json"] if as_json else [])]
    with subprocess.Popen(
        [sys.executable, "-m", "mingle", *words],
        env=command_environment(port),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        with announcing("resnet", "--master-port", "29500", port=port):
            first = watching.stdout.readline()
        last = ""
        while not last.startswith(("-", '{"schema": 1, "command": "watch", "event": "gone"')):
            last = watching.stdout.readline()
            assert last
        watching.terminate()
    if as_json:
        event = json.loads(first)
        assert (event["event"], event["job"]["job"], event["job"]["port"]) == ("new", "resnet", 29500)
    else:
        assert first.startswith("+\tresnet\tannounced\t")
        assert last.startswith("-\tresnet\t")


# --- announce ---


def test_it_prints_what_it_announces_and_ends_after_its_time() -> None:
    port = free_udp_port()
    done = run_command("announce", "timed", "--master-port", "29500", "-t", "0.2", port=port)
    assert done.stdout == "127.0.0.1:29500\n"
    assert done.stderr.startswith("announcing job 'timed'")
    done = run_command(
        *("announce", "timed", "--master-port", "29500", "--master-addr", "node7", "--world-size", "4"),
        *("-t", "0.2", "--json"),
        port=port,
    )
    record = json.loads(done.stdout)
    assert set(record) == {
        "schema",
        "command",
        "job",
        "session",
        "address",
        "port",
        "world_size",
        "control_addresses",
        "control_port",
    }
    assert (record["schema"], record["address"], record["port"], record["world_size"]) == (
        1,
        "node7",
        29500,
        4,
    )


def test_after_its_good_bye_it_is_found_no_more() -> None:
    network = Network(interfaces=("lo",), port=free_udp_port(), discovery_timeout=10)
    with announcing("passing", "--master-port", "29500", port=network.port):
        assert str(find_job("passing", network)[0].target()) == "127.0.0.1:29500"
    with pytest.raises(DiscoveryTimeoutError):
        find_job("passing", Network(interfaces=("lo",), port=network.port, discovery_timeout=0.5))


def test_ranks_that_look_for_the_job_are_told_of_and_do_not_join() -> None:
    port = free_udp_port()
    with announcing("taken for a job", "--master-port", "29500", port=port) as process:
        assert process.stderr is not None
        with gathering("taken for a job", port, (1,), world_size=2):
            line = process.stderr.readline()
    assert line.startswith("warning: rank 1 on host node1")
    assert "wait for a rank 0" in line


@pytest.mark.parametrize("address", ["", "10.0.0.1:80", "fe80::1%eth0", "-x", "a b", "x" * (MAX_ADDRESS_LENGTH + 1)])
def test_what_is_no_address_is_not_announced(address: str) -> None:
    arguments = ["announce", "job", "--master-port", "29500", f"--master-addr={address}"]
    result = CliRunner().invoke(main, arguments, env={"MINGLE_PORT": str(free_udp_port())})
    assert (result.exit_code, result.stdout) == (2, "")
    assert "can't be announced" in result.stderr


# --- records and rows ---


def a_seeker(job: str, rank: int | None, size: int = 4) -> Seeking:
    seek = Seek(job=job, member=bytes([rank or 9]) * 16, world_size=size, rank=rank, hostname="node", pid=5)
    return Seeking(seek, "10.0.0.5", signed=False)


def test_a_job_that_only_seekers_speak_of() -> None:
    (record,) = jobs.records([], [a_seeker("resnet", 1), a_seeker("resnet", None)])
    assert (record["job"], record["state"], record["world_size"], record["host"]) == ("resnet", "seeking", 4, None)
    assert [each["rank"] for each in record["seeking"]] == [1, None]
    row = jobs.row(record)
    assert len(row) == len(jobs.COLUMNS)
    assert row[:5] == ("resnet", "seeking", "-", "-", "0/4")
    assert row[6] == "rank 1 on node pid 5; a process on node pid 5"
    (record,) = jobs.records([], [a_seeker("resnet", 1), a_seeker("resnet", 2, size=8)])
    assert record["world_size"] is None


def test_the_order_in_which_ranks_are_heard_is_no_change() -> None:
    ranks = [a_seeker("resnet", 1), a_seeker("resnet", None), a_seeker("resnet", 0)]
    assert jobs.records([], ranks) == jobs.records([], ranks[::-1])


def test_a_session_that_is_proved() -> None:
    wire = Wire()
    finder = a_finder(wire, None)
    wire.add("10.0.0.9", finder)
    wire.add("10.0.0.1", an_announcement(wire, "resnet", "10.0.0.1"), 5000)
    wire.run(2)
    (record,) = jobs.records(finder.sessions, [])
    assert record["proved"]
    assert jobs.row(record)[:4] == ("resnet", "announced", "announcer pid 1", "10.0.0.1:29500")
    assert jobs.record(finder.sessions[0])["session"] == record["session"]
