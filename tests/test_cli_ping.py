"""``ping`` on `lo`: two processes, and nobody."""

from __future__ import annotations

import json

from click.testing import CliRunner

from mingle.cli import main
from mingle.config.settings import Network
from tests.bystanders import free_udp_port
from tests.pingers import answering


def ping(*words: str, port: int) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["ping", *words], env={"MINGLE_PORT": str(port), "MINGLE_INTERFACE": "lo"})
    return result.exit_code, result.stdout, result.stderr


def test_nobody_is_status_1() -> None:
    status, answer, errors = ping("--count", "2", "--interval", "0.05", port=free_udp_port())
    assert (status, answer) == (1, "")
    assert "nobody answered" in errors


def test_lines_in_a_pipe() -> None:
    port = free_udp_port()
    with answering(Network(interfaces=("lo",), port=port), "resnet"):
        status, answer, _ = ping("resnet", "--count", "4", "--interval", "0.1", port=port)
    assert status == 0
    lines = [line.split("\t") for line in answer.splitlines()]
    assert [line[0] for line in lines] == ["+", "=", "=", "=", "=", "PASS"]
    assert [line[2] for line in lines[1:5]] == ["multicast", "224.0.0.x", "unicast", "TCP"]
    assert all(len(line) == 10 for line in lines[1:5])


def test_json() -> None:
    port = free_udp_port()
    with answering(Network(interfaces=("lo",), port=port)):
        status, answer, _ = ping("--count", "4", "--interval", "0.1", "--json", port=port)
    assert status == 0
    record = json.loads(answer)
    assert (record["schema"], record["command"], record["job"]) == (1, "ping", None)
    (peer,) = record["peers"]
    assert set(peer) == {"hostname", "address", "pid", "interface", "gone", "ways"}
    assert set(peer["ways"]) == {"multicast", "link", "unicast", "tcp"}
    assert set(peer["ways"]["tcp"]) == {"sent", "received", "loss", "min", "avg", "max", "arrived", "reason"}
    assert 0 < peer["ways"]["multicast"]["min"] < 5
    assert [finding["status"] for finding in record["findings"]] == ["PASS"]


def test_another_job_is_another_conversation() -> None:
    port = free_udp_port()
    with answering(Network(interfaces=("lo",), port=port), "bert"):
        status, answer, _ = ping("resnet", "--count", "2", "--interval", "0.1", port=port)
    assert status == 1
    assert "+" not in answer
