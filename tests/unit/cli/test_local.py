"""``interfaces`` and ``env``: what a rank started here would work with."""

from __future__ import annotations

import json
from ipaddress import ip_interface
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mingle.cli import main
from mingle.network import interfaces
from mingle.network.interfaces import Interface
from tests.support.launcher_environments import TORCHRUN

LO = Interface("lo", 1, (ip_interface("127.0.0.1/8"),), multicast=False, loopback=True)
ETH = Interface("eth0", 2, (ip_interface("10.0.0.5/24"), ip_interface("fd00::5/64")))
DOCKER = Interface("docker0", 3, (ip_interface("172.17.0.1/16"),), running=False)
DOWN = Interface("eth1", 4, (), up=False, running=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "scan", lambda: (LO, ETH, DOCKER, DOWN))


def command(*arguments: str, **variables: str | None) -> Result:
    environ: dict[str, str | None] = {"MINGLE_INTERFACE": None, **variables}
    return CliRunner().invoke(main, arguments, env=environ, catch_exceptions=False)


def answer(*arguments: str, **variables: str | None) -> dict[str, Any]:
    record = json.loads(command(*arguments, "--json", **variables).stdout)
    assert record.pop("schema") == 1
    assert record.pop("command") == arguments[0]
    assert isinstance(record, dict)
    return record


@pytest.mark.usefixtures("machine")
def test_every_interface_is_shown_the_used_ones_first_the_others_with_the_reason() -> None:
    rows = [line.split("\t") for line in command("interfaces").stdout.splitlines()]
    assert [row[:2] for row in rows] == [
        ["eth0", "yes, preferred"],
        ["docker0", "yes, choice 2"],
        ["lo", "no: loopback: used when nothing else is, or when it is named"],
        ["eth1", "no: down"],
    ]
    assert rows[1][2:4] == ["virtual", "up, no carrier"]
    assert rows[0][4] == "10.0.0.5/24, fd00::5/64"


@pytest.mark.usefixtures("machine")
def test_interfaces_in_json() -> None:
    record = answer("interfaces", "--family", "6")
    assert (record["named"], record["named_by"]) == ([], None)
    by_name = {each["name"]: each for each in record["interfaces"]}
    assert by_name["docker0"]["reason"] == "no IPv6 address"
    assert by_name["eth0"] == {
        "name": "eth0",
        "index": 2,
        "addresses": ["10.0.0.5/24", "fd00::5/64"],
        "kind": "physical",
        "up": True,
        "running": True,
        "multicast": True,
        "used": True,
        "preference": 1,
        "reason": None,
    }


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("variable", ["MINGLE_INTERFACE", "GLOO_SOCKET_IFNAME"])
def test_interfaces_names_the_variable_that_named_the_interface(variable: str) -> None:
    record = answer("interfaces", **{variable: "docker0"})
    assert (record["named"], record["named_by"]) == (["docker0"], variable)
    assert [each["name"] for each in record["interfaces"] if each["used"]] == ["docker0"]


@pytest.mark.usefixtures("machine")
def test_an_interface_that_cannot_be_used_is_status_1_and_all_are_shown() -> None:
    result = command("interfaces", "-i", "eth1")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 4
    assert "cannot be used: down" in result.stderr
    assert "name another one in --interface" in result.stderr
    record = answer("interfaces", "-i", "wlan7")
    assert record["error"]["type"] == "InterfaceError"
    assert len(record["interfaces"]) == 4


def test_a_plain_shell_has_no_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINGLE_LAB_REQUIRED", "MINGLE_SOAK"):  # the tests' own, which no user has
        monkeypatch.delenv(name, raising=False)
    result = command("env")
    assert (result.exit_code, result.stderr) == (0, "")
    record = answer("env")
    assert [record[each] for each in ("launchers", "variables", "warnings", "conflicts")] == [[], [], [], []]
    assert record["resolved"]["port"] == 29499
    assert record["resolved"]["rank"] is None


def test_a_launcher_and_its_place_are_shown() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"}
    record = answer("env", **slurm)
    assert record["conflicts"] == []
    (launcher,) = record["launchers"]
    assert launcher == {"name": "Slurm", "variables": slurm}
    resolved = record["resolved"]
    assert (resolved["launcher"], resolved["rank"], resolved["world_size"]) == ("Slurm", 3, 8)
    assert resolved["job_id"] == "77.0"
    assert "Launcher\tSLURM_PROCID\t3\tset by Slurm" in command("env", **slurm).stdout


def test_the_sections_of_env_hold_the_results_and_the_variables_behind_them() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MINGLE_JOB_ID": "ada-resnet", "MASTER_ADDR": "10.0.0.5"}
    peers = "node1,dir:/shared/mingle,s3://bucket/jobs"
    rows = [line.split("\t") for line in command("env", "--peers", peers, **place).stdout.splitlines()]
    assert list(dict.fromkeys(row[0] for row in rows)) == ["Launcher", "Job", "Network", "torch"]
    value = {(row[0], row[1]): row[2] for row in rows}
    assert value["Job", "rank"] == value["Job", "RANK"] == "1"
    assert value["Job", "job_id"] == value["Job", "MINGLE_JOB_ID"] == "ada-resnet"
    assert value["Network", "peers"] == "node1, dir:/shared/mingle, s3://bucket/jobs"
    assert value["torch", "MASTER_ADDR"] == "10.0.0.5"
    # Every result is in the table, as in JSON.
    assert {row[1] for row in rows if row[1].islower()} == set(answer("env", **place)["resolved"])


@pytest.mark.parametrize(
    ("variables", "kind", "words"),
    [
        ({"SLURM_NTASKS": "8"}, "LauncherError", "SLURM_PROCID"),
        ({"JOB_COMPLETION_INDEX": "2"}, "LauncherError", "but not WORLD_SIZE"),
        ({"RANK": "3"}, "ConfigurationError", "without a world size"),
        ({"MINGLE_PORT": "x"}, "ConfigurationError", "MINGLE_PORT"),
        ({"MINGLE_JOB_ID": ""}, "ConfigurationError", "is empty"),
        ({"MINGLE_JOB_ID": "nccl"}, "ConfigurationError", "name of a torch backend"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": 257 * "x"}, "ConfigurationError", "257 bytes long"),
        ({"MINGLE_MASTER_PORT": "abc"}, "ConfigurationError", "MINGLE_MASTER_PORT"),
        ({"MINGLE_MESH": "yes"}, "ConfigurationError", "MINGLE_MESH"),
        ({**TORCHRUN, "MASTER_PORT": "abc"}, "LauncherError", "MASTER_PORT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_env_names_a_setting_that_would_make_a_rank_fail_as_conflict(
    variables: dict[str, str], kind: str, words: str
) -> None:
    record = answer("env", **variables)
    assert [error["type"] for error in record["conflicts"]] == [kind]
    assert words in record["conflicts"][0]["observation"]
    result = command("env", **variables)
    assert result.exit_code == 1
    assert f"conflict: {record['conflicts'][0]['observation']}" in result.stderr


def test_a_secret_is_never_shown() -> None:
    for flags in ((), ("--json",), ("-vv",)):
        result = command("env", *flags, MINGLE_SECRET="hunter2")
        assert result.exit_code == 0
        assert "MINGLE_SECRET" in result.output
        assert "hunter2" not in result.output


@pytest.mark.parametrize("password", ["hunter2", "hunter2?", "hunter2:x"])
def test_a_password_in_a_url_is_never_shown(password: str) -> None:
    for flags in ((), ("--json",)):
        result = command("env", *flags, MINGLE_PEERS=f"10.0.0.1 sftp://ann:{password}@store/x")
        assert "ann:***@store/x" in result.output
        assert "hunter2" not in result.output + result.stderr


def test_a_mistyped_variable_is_pointed_out() -> None:
    result = command("env", MINGLE_JOBID="x")
    assert result.exit_code == 0, "a warning is healthy"
    assert "MINGLE_JOBID" in result.stderr
    assert "did you mean MINGLE_JOB_ID?" in result.stderr


def test_options_count_as_they_do_elsewhere() -> None:
    words = ("env", "-i", "lo", "--peers", "a:1,b", "-t", "9")
    resolved = answer(*words, MINGLE_INTERFACE="eth9")["resolved"]
    named = {"interfaces": "lo", "interfaces_from": "--interface", "peers": "a:1, b", "discovery_timeout": 9}
    assert {name: resolved[name] for name in named} == named
    rows = [line.split("\t")[:3] for line in command(*words).stdout.splitlines()]
    assert ["Job", "discovery_timeout", "9"] in rows, "no fraction"
