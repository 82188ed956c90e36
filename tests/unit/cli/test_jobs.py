"""``list``, ``watch`` and ``find``: against jobs on `lo`, and their records and rows."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from mingle.cli import jobs, main
from mingle.cli.jobs import changes
from mingle.config.settings import Network
from mingle.errors import DiscoveryTimeoutError
from mingle.observe.finder import Seeking
from mingle.wire.datagrams import Seek
from tests.support.bystanders import Wire, command_environment, gathering, run_command
from tests.support.in_process import formed
from tests.support.loopback import longer
from tests.support.ports import free_udp_port

SECRET = "correct horse battery staple"

FIELDS = {
    *("job", "kind", "state", "session", "host", "address", "port", "endpoint", "world_size", "joined", "missing"),
    *("secret", "proved", "problem", "seconds"),
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
    assert "likely cause: " in result.stderr
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
        gathering("all there", port, (0, 1), world_size=2),
    ):
        rows = [line.split("\t") for line in shown("list", port=port, enough=proved(3))]
        record = longer(
            lambda seconds: json.loads(command("list", "--json", "-t", str(seconds), port=port).stdout),
            lambda record: [job["proved"] for job in record["jobs"]] == [True, True, False],
        )
        found = command("find", "all there", "-t", "60", port=port)
        verbose = command("find", "all there", "-v", "--json", "-t", "60", port=port)
    formed, half, headless = rows
    assert (formed[:2], formed[3:5]) == (["all there", "running"], ["127.0.0.1:29500", "2/2"])
    assert half[:3] == ["half there\\n", "open", "node0 pid 100"]
    assert half[4:] == ["3/6", "1, 4, 5", "-", "-"]
    assert headless == ["headless", "seeking", "-", "-", "0/8", "-", "rank 4 on node4 pid 104", "-"]

    assert (record["schema"], record["command"]) == (1, "list")
    for job in record["jobs"]:
        assert set(job) == FIELDS | {"seeking"}
    running, open_job, seeking = record["jobs"]
    assert (running["endpoint"], running["kind"], running["joined"]) == ("store", "ranks", 2)
    assert (open_job["joined"], open_job["world_size"], open_job["missing"]) == (3, 6, [1, 4, 5])
    assert open_job["proved"] is True
    assert (open_job["endpoint"], open_job["state"]) == ("control", "open")
    assert (seeking["host"], seeking["address"], seeking["seeking"][0]["rank"]) == (None, None, 4)

    assert found.exit_code == 0
    assert found.stdout == "127.0.0.1:29500\n"
    assert "datagrams sent" in verbose.stderr
    answer = json.loads(verbose.stdout)
    assert set(answer) == FIELDS | {"schema", "command"}
    assert (answer["address"], answer["port"], answer["endpoint"]) == ("127.0.0.1", 29500, "store")


def proved(count: int) -> Callable[[list[str]], bool]:
    """Return whether there are this many lines, and none of a host that is not proved."""
    return lambda lines: len(lines) == count and not any("not proved" in line for line in lines)


def shown(*arguments: str, port: int, enough: Callable[[list[str]], bool], **variables: str) -> list[str]:
    """Return the lines of a list."""
    return longer(
        lambda seconds: command(*arguments, "-t", str(seconds), port=port, **variables).stdout.splitlines(), enough
    )


def test_a_secret_is_shown_and_opens_the_answer(port: int) -> None:
    with gathering("guarded", port, (0,), world_size=1, secret=SECRET.encode()):
        (closed,) = shown("list", port=port, enough=lambda lines: len(lines) == 1)
        (opened,) = shown("list", port=port, enough=proved(1), MINGLE_SECRET=SECRET)
        refused = longer(
            lambda seconds: command("find", "guarded", "-t", str(seconds), port=port),
            lambda result: "--secret-file" in result.stderr,
        )
        found = command("find", "guarded", "-t", "60", port=port, MINGLE_SECRET=SECRET)
    assert closed.split("\t")[1] == "sealed, not proved"
    assert closed.endswith("\tsecret")
    assert opened.split("\t")[1] == "running"
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--secret-file" in refused.stderr
    assert found.stdout == "127.0.0.1:29500\n"


def test_export_is_what_a_shell_evaluates(port: int) -> None:
    with gathering("exported", port, (0,), world_size=1):
        exported = command("find", "exported", "--export", "-t", "60", port=port)
    shell = ["sh", "-c", 'eval "$1"; printf "%s|%s" "$MASTER_ADDR" "$MASTER_PORT"', "sh", exported.stdout]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "127.0.0.1|29500"


@pytest.mark.parametrize(("words", "expected"), [((), ""), (("--export",), "false\n"), (("--json",), "")])
def test_a_job_that_gathers_has_no_store_to_print(port: int, words: tuple[str, ...], expected: str) -> None:
    with gathering("not yet", port, (0, 2), world_size=3):
        result = longer(
            lambda seconds: command("find", "not yet", "-t", str(seconds), *words, port=port),
            lambda result: "joined" in result.stderr,
        )
    assert result.exit_code == 1
    assert "2 of 3 ranks joined, missing ranks: 1" in result.stderr
    assert ("error" in json.loads(result.stdout)) if words == ("--json",) else (result.stdout == expected)


def test_find_waits_as_long_as_the_ranks_do_where_they_are_told(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    result = command("find", "nothing", port=port, MINGLE_TIMEOUT="0.5")
    assert "within 0.5 s" in result.stderr
    limits: list[float] = []

    def searched(_job: str, network: Network) -> NoReturn:
        limits.append(network.discovery_timeout)
        raise DiscoveryTimeoutError("nothing")

    monkeypatch.setattr(jobs, "find_job", searched)
    for words, variable in (((), ""), ((), " "), ((), "7"), (("-t", "9"), "7")):
        command("find", "nothing", *words, port=port, MINGLE_TIMEOUT=variable)
    assert limits == [5, 5, 7, 9]


def test_a_job_that_has_formed_is_found_at_its_store(port: int) -> None:
    with formed(job_id="real", port=port) as ranks:
        exported = run_command("find", "real", "--export", "-t", "60", port=port).stdout
        (row,) = shown("list", port=port, enough=proved(1))
    formation = ranks[0].formation
    address, store_port = formation.store_address, formation.store_port
    assert shlex.split(exported) == ["export", f"MASTER_ADDR={address}", f"MASTER_PORT={store_port}"]
    cells = row.split("\t")
    assert cells[0] == "real"
    assert cells[1] in {"sealed", "running"}
    assert cells[3:7] == [f"{address}:{store_port}", "2/2", "-", "-"]


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
    words = ["watch", "-t", "120", *(["--json"] if as_json else [])]
    with subprocess.Popen(
        [sys.executable, "-m", "mingle", *words],
        env=command_environment(port),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        with gathering("resnet", port, (0,), world_size=1):
            first = proof = watching.stdout.readline()
            said = [first]
            # The first probe was lost, or the job seemed to be gone for a while.
            unproved = ("not proved", '"proved": false', '"event": "gone"')
            while proof and (proof.startswith("-") or any(words in proof for words in unproved)):
                said.append(proof := watching.stdout.readline())
            assert proof
            assert len(said) < 8, said  # this machine may stand still once or twice
        last = ""
        while not last.startswith(("-", '{"schema": 1, "command": "watch", "event": "gone"')):
            last = watching.stdout.readline()
            assert last
        watching.terminate()
    if as_json:
        event, job = json.loads(first), json.loads(proof)["job"]
        assert (event["event"], event["job"]["job"]) == ("new", "resnet")
        assert (job["job"], job["port"]) == ("resnet", 29500)
    else:
        assert first.startswith("+\tresnet\t")
        assert proof[1:].startswith("\tresnet\trunning\t")
        assert last.startswith("-\tresnet\t")


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
    assert (record["world_size"], jobs.row(record)[4]) == (None, "0/?")


def test_a_seeker_has_an_address_or_the_folder_that_holds_its_sign() -> None:
    heard = a_seeker("resnet", 1)
    found = Seeking(heard.seek, "dir:/shared", signed=False, in_folder=True)
    assert str(found) == "rank 1 on host node (in dir:/shared), pid 5"
    fields = []
    for each in (heard, found):
        ((seeking,),) = [record["seeking"] for record in jobs.records([], [each])]
        fields.append((seeking["address"], seeking["folder"]))
    assert fields == [("10.0.0.5", None), (None, "dir:/shared")]


def test_the_order_in_which_ranks_are_heard_is_no_change() -> None:
    ranks = [a_seeker("resnet", 1), a_seeker("resnet", None), a_seeker("resnet", 0)]
    assert jobs.records([], ranks) == jobs.records([], ranks[::-1])


def test_a_session_that_is_proved() -> None:
    wire = Wire()
    finder = wire.look(None, "10.0.0.9")
    wire.host()
    wire.run(2)
    (record,) = jobs.records(finder.sessions, [])
    assert (record["proved"], record["problem"]) == (True, None)
    assert jobs.row(record)[:4] == ("resnet", "running", "node0 pid 100", "10.0.0.1:29500")
    assert jobs.record(finder.sessions[0])["session"] == record["session"]
