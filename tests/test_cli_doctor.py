"""``doctor`` on `lo`."""

from __future__ import annotations

import json
import socket

from click.testing import CliRunner, Result

from mingle.cli import main
from mingle.config.settings import Network
from tests.bystanders import free_udp_port
from tests.pingers import answering


def doctor(*words: str, port: int, **variables: str) -> Result:
    environment = {"MINGLE_PORT": str(port), "MINGLE_INTERFACE": "lo", **variables}
    return CliRunner().invoke(main, ["doctor", *words], env=environment, catch_exceptions=False)


def test_records() -> None:
    result = doctor("--json", port=free_udp_port())
    answer = json.loads(result.stdout)
    assert (answer["schema"], answer["command"], answer["peers"]) == (1, "doctor", [])
    for check in answer["checks"]:
        assert set(check) == {"name", "status", "observation", "remedy"}
        assert check["status"] in {"PASS", "WARN", "FAIL"}
        assert (check["remedy"] is None) == (check["status"] == "PASS")
    assert {"interfaces", "port", "multicast", "environment"} <= {check["name"] for check in answer["checks"]}


def test_a_failed_check_is_status_1() -> None:
    result = doctor(port=free_udp_port(), MINGLE_INTERFACE="nope0")
    assert result.exit_code == 1
    assert "FAIL\tinterfaces\tthere is no interface with the name 'nope0'" in result.stdout
    result = doctor(port=free_udp_port(), RANK="3")
    assert result.exit_code == 1
    assert "FAIL\tenvironment" in result.stdout


def test_a_warning_is_status_0() -> None:
    result = doctor(port=free_udp_port(), MASTER_ADDR="10.9.9.9")
    assert result.exit_code == 0
    assert "WARN\tenvironment\tthe environment has MASTER_ADDR=10.9.9.9 already" in result.stdout


def test_a_peer_that_serves() -> None:
    port = free_udp_port()
    with answering(Network(interfaces=("lo",), port=port)):
        result = doctor("--check", "127.0.0.1", "--json", port=port)
    assert result.exit_code == 0, result.stdout
    answer = json.loads(result.stdout)
    assert [peer["address"] for peer in answer["peers"]] == ["127.0.0.1"]


def test_a_peer_that_does_not_answer() -> None:
    result = doctor("--check", "127.0.0.9", port=free_udp_port())
    assert result.exit_code == 1
    assert "FAIL\t127.0.0.9\tnobody serves on 127.0.0.9" in result.stdout
    assert "start `mingle-discover doctor --serve` on 127.0.0.9" in result.stdout


def test_a_program_that_does_not_serve_is_told_from_a_port_that_is_closed() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.9", 0))
        result = doctor("--check", f"127.0.0.9:{deaf.getsockname()[1]}", port=free_udp_port())
    assert result.exit_code == 1
    assert "FAIL\t127.0.0.9\t127.0.0.9 did not answer" in result.stdout
    assert "nobody serves" not in result.stdout


def test_a_peer_that_does_not_resolve_is_wrong_usage() -> None:
    result = doctor("--check", "no..host", port=free_udp_port())
    assert result.exit_code == 2
    assert "no..host" in result.stderr


def test_serving_ends_when_its_time_is_over() -> None:
    result = doctor("--serve", "--timeout", "0.3", port=free_udp_port())
    assert "serving" in result.stderr
    assert result.stdout.count("PASS") >= 5
