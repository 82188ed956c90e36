"""``doctor`` and ``ping``: on `lo`, and how findings and figures look."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from mingle.cli import checks, main, output
from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.diagnostics import CheckStatus, Finding
from mingle.network import folders, inspection, peers
from mingle.network.directory import Directory
from mingle.observe.ping import Figures, PingPeer
from tests.support.loopback import until
from tests.support.pingers import answering
from tests.support.ports import free_udp_port

FINDINGS = [
    Finding("port", CheckStatus.PASS, "free"),
    Finding("tcp", CheckStatus.FAIL, "filtered\x1b[2J", "nft [bold] insert"),
]
PEER = PingPeer(b"P" * 16, "node2", 7, "10.0.0.2", "eth0", 4000)
PEER.figures["multicast"] = Figures(sent=3, received=2, total=0.004, shortest=0.001, longest=0.003, arrived=2)


def drawn(table: object) -> str:
    text = io.StringIO()
    Console(file=text, width=120, color_system=None).print(table)
    return text.getvalue()


def test_figures_as_a_record_as_rows_and_as_a_table() -> None:
    row = checks.peer_record(PEER)["ways"]["multicast"]
    assert (row["sent"], row["received"], row["loss"], row["min"], row["max"]) == (3, 2, 0.3333, 0.001, 0.003)
    assert checks.peer_record(PEER)["ways"]["tcp"]["avg"] is None
    rows = checks.ping_rows(PEER)
    assert rows[0] == ("node2 (10.0.0.2)", "multicast", "3", "2", "33%", "1.00", "2.00", "3.00", "2")
    assert rows[3] == ("node2 (10.0.0.2)", "TCP", "0", "0", "-", "-", "-", "-", "0")
    assert drawn(checks.ping_table([PEER])).count("node2 (10.0.0.2)") == 1


def test_findings_as_a_record_in_a_pipe_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"name": "port", "status": "PASS", "observation": "free", "remedy": None}
    assert checks.finding_record(FINDINGS[0]) == record
    output.show(checks.findings_table(FINDINGS), checks.finding_lines(FINDINGS))
    assert capsys.readouterr().out == "PASS\tport\tfree\nFAIL\ttcp\tfiltered\\x1b[2J\tnft [bold] insert\n"
    table = drawn(checks.findings_table(FINDINGS))
    assert "→ nft [bold] insert" in table
    assert "\x1b" not in table


def test_commands_stand_below_the_table_and_are_never_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "nft insert rule inet filter input ip saddr 10.0.0.0/24 udp dport 29499 accept"
    remedy = f"let this host and the hosts of 10.0.0.0/24 reach each other:\n{command}"
    found = [Finding("multicast", CheckStatus.FAIL, "dropped", remedy), Finding("tcp", CheckStatus.WARN, "too", remedy)]
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setattr(output, "console", lambda: Console(width=50))
    output.show(checks.findings_table(found), checks.finding_lines(found))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == ["", remedy.partition("\n")[0], f"  {command}"]
    assert sum("nft" in line for line in lines) == 1
    monkeypatch.undo()
    output.show(checks.findings_table(found), checks.finding_lines(found))
    assert capsys.readouterr().out.count(f"reach each other: {command}\n") == 2


# --- doctor ---


def doctor(*words: str, port: int | None = None, **variables: str) -> Result:
    environment = {"MINGLE_PORT": str(port or free_udp_port()), "MINGLE_INTERFACE": "lo", **variables}
    return CliRunner().invoke(main, ["doctor", *words], env=environment, catch_exceptions=False)


def test_doctor_in_json() -> None:
    result = doctor("--json")
    answer = json.loads(result.stdout)
    assert (answer["schema"], answer["command"], answer["peers"]) == (1, "doctor", [])
    for check in answer["checks"]:
        assert set(check) == {"name", "status", "observation", "remedy"}
        assert check["status"] in {"PASS", "WARN", "FAIL"}
        assert (check["remedy"] is None) == (check["status"] == "PASS")
    assert {"interfaces", "port", "multicast", "environment"} <= {check["name"] for check in answer["checks"]}


@pytest.mark.parametrize(
    ("variables", "status", "line"),
    [
        ({"MINGLE_INTERFACE": "nope0"}, 1, "FAIL\tinterfaces\t"),
        ({"RANK": "3"}, 1, "FAIL\tenvironment\t"),
        ({"MASTER_ADDR": "10.9.9.9"}, 0, "WARN\tenvironment\tthe environment has MASTER_ADDR=10.9.9.9 already"),
    ],
)
def test_a_failed_check_is_status_1_and_a_warning_0(variables: dict[str, str], status: int, line: str) -> None:
    result = doctor(**variables)
    assert result.exit_code == status
    assert line in result.stdout


def test_what_passed_is_counted_and_shown_on_demand() -> None:
    port = free_udp_port()
    checked = json.loads(doctor("--json", port=port, MASTER_ADDR="10.9.9.9").stdout)["checks"]
    passed = [each["name"] for each in checked if each["status"] == "PASS"]
    brief, whole = (doctor(*words, port=port, MASTER_ADDR="10.9.9.9") for words in ((), ("--all",)))
    assert "PASS" not in brief.stdout
    assert f"{len(passed)} of {len(checked)} checks passed; --all shows them\n" in brief.stderr
    names = [line.split("\t")[1] for line in whole.stdout.splitlines() if line.startswith("PASS")]
    assert names == passed
    assert "checks passed" not in whole.stderr
    rest = [line for line in whole.stdout.splitlines() if not line.startswith("PASS")]
    assert rest == brief.stdout.splitlines() != []


@pytest.mark.parametrize(
    ("peers", "warns"),
    [("localhost", True), ("127.0.0.1", True), ("127.0.0.1,192.0.2.7", False), ("127.0.0.1,dir:.", False)],
)
def test_doctor_warns_of_peers_that_are_this_machine_alone(peers: str, warns: bool, tmp_path: Path) -> None:
    result = doctor(MINGLE_PEERS=peers.replace("dir:.", f"dir:{tmp_path}"))
    assert result.exit_code == 0
    assert ("WARN\tpeers\tMINGLE_PEERS leads to this machine alone" in result.stdout) is warns


@pytest.mark.parametrize(
    ("job_id", "problem"), [("caf\udce9", "surrogate"), (257 * "x", "257 bytes"), ("", "is empty")]
)
def test_doctor_names_a_job_id_that_cannot_be_one_beside_all_else(job_id: str, problem: str) -> None:
    done = doctor("--all", MINGLE_JOB_ID=job_id)
    assert done.exit_code == 1
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("FAIL")]
    assert line.split("\t")[1] == "environment"
    assert problem in line
    assert "PASS\tinterfaces" in done.stdout


def test_a_peer_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_udp_port()
    with answering(Network(interfaces=("lo",), port=port)):
        for rounds in (checks.CHECK_ROUNDS, 28, 56):
            monkeypatch.setattr(checks, "CHECK_ROUNDS", rounds)
            result = doctor("--check", "127.0.0.1", "--json", port=port)
            answer = json.loads(result.stdout)
            if result.exit_code == 0 and answer["peers"]:
                break
    assert result.exit_code == 0, result.stdout
    assert [peer["address"] for peer in answer["peers"]] == ["127.0.0.1"]
    assert "is an address of this host" not in result.stdout, "but another process there has answered"


def test_a_program_that_does_not_serve_is_told_from_a_port_that_is_closed() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.9", 0))
        result = doctor("--check", f"127.0.0.9:{deaf.getsockname()[1]}")
    assert result.exit_code == 1
    assert "FAIL\t127.0.0.9\t127.0.0.9 did not answer" in result.stdout
    assert "nothing serves" not in result.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no..host"], "no..host"),
        (["fd00::5", "--family", "4"], "no IPv4 address: fd00::5"),
        (["127.0.0.1,dir:/shared/mingle"], "doctor --peers dir:/shared/mingle`"),
        (["127.0.0.1,s3://bucket/mingle"], "doctor --peers s3://bucket/mingle`"),
    ],
    ids=lambda value: str(value[0]),
)
def test_what_can_not_be_checked_is_wrong_usage(words: list[str], told: str) -> None:
    result = doctor("--check", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_serving_ends_when_its_time_is_over() -> None:
    result = doctor("--all", "--serve", "--timeout", "0.3")
    assert "serving" in result.stderr
    assert result.stdout.count("PASS") >= 5


def test_a_host_that_can_not_serve_gives_one_answer() -> None:
    result = doctor("--serve", "--json", MINGLE_INTERFACE="nope0")
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["checks"][0]["status"] == "FAIL"
    assert "mingle-discover doctor: no interface has the name 'nope0'" in result.stderr


def test_a_check_of_this_host_itself_is_not_passed_over() -> None:
    result = doctor("--check", "127.0.0.1")
    assert "WARN\t127.0.0.1\t127.0.0.1 is an address of this host" in result.stdout


def test_a_check_asks_no_address_to_which_no_route_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "has_route", lambda address: ":" not in address)
    monkeypatch.setattr(inspection, "resolve_all", lambda names: dict.fromkeys(names, (["fd00::5", "10.0.0.5"], "")))
    assert checks._resolve(Network(), ("node-5",)) == ((Peer("10.0.0.5"),), ["fd00::5", "10.0.0.5"], {})


def test_names_are_looked_up_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer costs one time limit, however many names there are."""
    names = ("node-1", "node-2", "node-3")
    together = threading.Barrier(len(names))

    def look_up(host: str, *_args: object, **_kwargs: object) -> list[object]:
        together.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer for {host}")

    monkeypatch.setattr(inspection, "NAME_SECONDS", 30.0)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert checks._resolve(Network(peers=tuple(map(Peer, names))), ()) == (
        (),
        [],
        {name: f"no answer for {name}" for name in names},
    )


def test_hosts_that_do_not_answer_are_examined_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ("127.0.0.7", "127.0.0.8", "127.0.0.9")
    together = threading.Barrier(len(hosts))

    def refuses(address: str, _port: int) -> bool:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(30)
        return address == "127.0.0.8"

    monkeypatch.setattr(checks, "refuses", refuses)
    findings, _ = checks.examine(Network(interfaces=("lo",), port=free_udp_port()), hosts)
    assert not together.broken
    silent = {each.name: "nothing serves" in each.observation for each in findings if each.name in hosts}
    assert silent == {"127.0.0.7": False, "127.0.0.8": True, "127.0.0.9": False}


# --- ping ---


def ping(*words: str, port: int) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["ping", *words], env={"MINGLE_PORT": str(port), "MINGLE_INTERFACE": "lo"})
    return result.exit_code, result.stdout, result.stderr


def pinged(*words: str, port: int, enough: Callable[[str, str], bool]) -> tuple[int, str, str]:
    """Ping for ever more rounds until the answer and the errors are enough: a busy machine loses pings."""
    for count in ("4", "20", "100"):
        status, answer, errors = ping(*words, "--count", count, "--interval", "0.1", port=port)
        if enough(answer, errors):
            break
    return status, answer, errors


def passes(answer: str, _errors: str) -> bool:
    return "PASS" in answer and "WARN" not in answer


def test_ping_without_an_answer_is_status_1() -> None:
    status, answer, errors = ping("--count", "2", "--interval", "0.05", port=free_udp_port())
    assert status == 1
    assert all(line.startswith("WARN\tinterfaces\tMINGLE_INTERFACE names loopback") for line in answer.splitlines())
    assert "no host answered" in errors


def test_ping_in_a_pipe() -> None:
    port = free_udp_port()
    with answering(Network(interfaces=("lo",), port=port), "resnet"):
        status, answer, _ = pinged("resnet", "--header", port=port, enough=passes)
    assert status == 0
    lines = [line.split("\t") for line in answer.splitlines()]
    assert [line[0] for line in lines] == ["EVENT", "+", "=", "=", "=", "=", "STATUS", "PASS"]
    assert [line[2] for line in lines[2:6]] == ["multicast", "224.0.0.x", "unicast", "TCP"]
    assert all(len(line) == 10 for line in lines[2:6])


def test_ping_in_json() -> None:
    port = free_udp_port()
    with answering(Network(interfaces=("lo",), port=port)):
        status, answer, _ = pinged("--json", port=port, enough=passes)
    assert status == 0
    record = json.loads(answer)
    assert (record["schema"], record["command"], record["job"]) == (1, "ping", None)
    (peer,) = record["peers"]
    assert set(peer) == {"hostname", "address", "pid", "interface", "gone", "ways"}
    assert set(peer["ways"]) == {"multicast", "link", "unicast", "tcp"}
    assert set(peer["ways"]["tcp"]) == {"sent", "received", "loss", "min", "avg", "max", "arrived", "reason"}
    assert 0 < peer["ways"]["multicast"]["min"] < 1000
    assert [finding["status"] for finding in record["findings"]] == ["PASS"]


def test_another_job_is_another_conversation() -> None:
    port = free_udp_port()
    with answering(Network(interfaces=("lo",), port=port), "bert"):
        status, answer, errors = pinged("resnet", port=port, enough=lambda _, errors: "pings about" in errors)
    assert status == 1
    assert "+" not in answer
    assert "likely cause: 127.0.0.1 pings about 'bert', and not with us" in errors


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is waited for, however busy the machine is."""
    monkeypatch.setattr(Directory, "leave_seconds", 60.0)
    monkeypatch.setattr(Directory, "patience", 60.0)


@pytest.mark.usefixtures("_patient")
def test_doctor_checks_the_shared_directories(tmp_path: Path) -> None:
    network = Network(interfaces=("lo",), port=free_udp_port(), folders=(f"dir:{tmp_path}", f"dir:{tmp_path}/missing"))
    found, _ = checks.examine(network, ())
    good, bad = [each for each in found if each.name == "folder"]
    assert (good.status, bad.status) == (CheckStatus.PASS, CheckStatus.FAIL)
    assert f"dir:{tmp_path}/missing in MINGLE_PEERS does not exist" in bad.observation
    assert "no other host has written there just now" in good.observation
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_patient")
def test_doctor_reads_what_another_host_shows_in_a_directory(tmp_path: Path) -> None:
    network = Network(interfaces=("lo",), port=free_udp_port(), folders=(f"dir:{tmp_path}",))
    with folders.examined(network.folders, "another node"):
        until(lambda: list(tmp_path.rglob("s-*")))
        found, _ = checks.examine(network, ())
    (good,) = [each for each in found if each.name == "folder"]
    assert good.status is CheckStatus.PASS
    assert re.search(r"and reads what 1 other host wrote; the newest is \d+ s old", good.observation)
    assert not list(tmp_path.iterdir())
