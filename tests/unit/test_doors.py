"""What no door takes: the same faults at each entry point, told by the name that this door gives the setting.

What a value may be stands in ``config/test_values.py``; how a fault is worded is free.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

import mingle
from mingle.check.command import check
from mingle.cli import main as discover
from mingle.config.settings import SETTINGS, VARIABLES
from mingle.distributed import rendezvous
from mingle.elastic import torchrun
from mingle.engine import driver, udp_endpoint
from mingle.errors import MingleError
from mingle.run.command import run
from tests.support.bystanders import gathering
from tests.support.loopback import longer
from tests.support.ports import free_udp_port

SENT = "a socket of the discovery was opened"


@pytest.fixture(autouse=True)
def _no_packet(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """What could send one says so instead, but where a test has others to talk to."""

    def opened(*_: object, **__: object) -> None:
        raise AssertionError(SENT)

    if "_two_of_four" not in request.fixturenames:
        monkeypatch.setattr(udp_endpoint, "Transport", opened)
        monkeypatch.setattr(driver, "Connections", opened)
    yield
    rendezvous.end_session()


def _told_by(call: Callable[[], object]) -> str:
    """Return what a call says that must fail, and leave nothing behind."""
    before = dict(os.environ)
    with pytest.raises((MingleError, RendezvousError)) as caught:
        call()
    assert dict(os.environ) == before
    error = caught.value
    if isinstance(error, MingleError):
        assert error.cause
        assert error.remedy
        assert error.__context__ is None or error.__suppress_context__, "an error of our own depths shows"
    return f"{type(error).__name__}: {error}"


def _python(call: Callable[..., object]) -> Callable[[Mapping[str, Any]], str]:
    return lambda given: _told_by(lambda: call(**{"job_id": "resnet", "rank": 1, "world_size": 2, **given}))


def _url(given: Mapping[str, Any]) -> str:
    place = {"job_id": "resnet", "rank": 1, "world_size": 2, **given}
    job_id = str(place.pop("job_id") or "").encode("utf-8", "surrogateescape")
    method = f"mingle://{quote(job_id)}"
    return _told_by(lambda: dist.init_process_group("gloo", init_method=method, **place))


def _torchrun(given: Mapping[str, Any]) -> str:
    conf = {**given}
    made = RendezvousParameters("mingle", "", conf.pop("job_id", "resnet"), 2, 2, **conf)
    return _told_by(lambda: torchrun.create(made).next_rendezvous())


def _command(command: Any, before: list[str], after: list[str]) -> Callable[[Mapping[str, Any]], str]:
    def door(given: Mapping[str, Any]) -> str:
        of_a_job = {} if command is discover else {"job_id": "resnet"}
        options = [f"{_option(name)}={value}" for name, value in {**of_a_job, **given}.items() if value is not None]
        done = CliRunner().invoke(command, [*before, *options, *after])
        assert done.stdout == ""
        return f"status {done.exit_code}: {done.stderr}{done.exception}"

    return door


def _option(name: str) -> str:
    return "--timeout" if name == "discovery_timeout" else f"--{name.replace('_', '-')}"


DOORS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "init": _python(mingle.init),
    "discover": _python(mingle.discover),
    "mingle://": _url,
    "torchrun": _torchrun,
    "mingle-run": _command(run, ["--nnodes=2"], ["--", "true"]),
    "mingle-check": _command(check, ["--nnodes=2"], []),
    "mingle-discover": _command(discover, ["list"], []),
}
RANKS = [door for door in DOORS if door != "mingle-discover"]
"""The doors that lead into a job."""
PLACE = ("job_id", "rank", "world_size")
_NETWORK = ("interface", "port", "peers", "ttl", "family", "node_rank", "discovery_timeout", "mesh")
TAKES: dict[str, tuple[str, ...]] = {
    "init": (*PLACE, *_NETWORK, "secret", "advertise", "master_port"),
    "discover": (*PLACE, *_NETWORK, "secret", "advertise", "master_port"),
    "mingle://": PLACE,
    "torchrun": (*_NETWORK, "secret_file", "job_id"),
    "mingle-run": (*_NETWORK, "secret_file", "master_port", "job_id"),
    "mingle-check": (*_NETWORK, "secret_file", "job_id"),
    "mingle-discover": ("interface", "port", "peers", "ttl", "family", "discovery_timeout", "secret_file"),
}
"""The settings that are arguments, options or keys of a door; variables count at all of them."""
NOT_OF_THE_NETWORK = ("node_rank", "mesh", "master_port")
WRONG: dict[str, tuple[object, ...]] = {
    "job_id": ("x" * 257, "é" * 129, "\udcff"),
    "rank": (-7, 2),
    "world_size": (0, 1),
    "node_rank": (-1, 2),
    "discovery_timeout": (0, -1, "5m", float("nan")),
    "interface": (",",),
    "port": (0, 65536),
    "peers": ("http://node7/", "[::1"),
    "secret": ("",),
    "secret_file": ("/nonexistent/secret",),
    "ttl": (-1, 256),
    "family": ("5", "ipv4"),
    "advertise": ("node7",),
    "master_port": (0, 65536),
    "mesh": ("of",),
    "progress": ("loud",),
}


WRONG_IN_PYTHON: dict[str, tuple[object, ...]] = {
    "job_id": (7,),
    "rank": (True, "1"),
    "world_size": (2.0, "2"),
    "discovery_timeout": (True, timedelta(seconds=-1)),
    "interface": (5, b"eth0", ["eth0", ""]),
    "port": (True, "29499"),
    "peers": (5, ["node7", ""]),
    "secret": (5, b""),
    "ttl": ("1",),
    "family": (True, 5),
    "advertise": ("",),
}


def _name(door: str, setting: str) -> str:
    """Return what a door calls a setting."""
    if door == "torchrun":
        return "--rdzv-id" if setting == "job_id" else f"--rdzv-conf {setting}"
    if door == "mingle://" and setting == "job_id":
        return "job"
    return _option(setting) if door.startswith("mingle-") else setting


def refused(door: str, given: Mapping[str, Any]) -> str:
    """Return what a door says of wrong usage, before any packet."""
    told = DOORS[door](given)
    assert SENT not in told
    assert told.startswith(("ConfigurationError: ", "status 2: "))
    return told


def _id(value: object) -> str:
    return (value if isinstance(value, str) and value.isprintable() else ascii(value))[:20]


@pytest.mark.parametrize("door", DOORS)
def test_a_call_without_a_fault_would_send(door: str) -> None:
    assert SENT in DOORS[door]({})


@pytest.mark.parametrize(
    ("door", "setting", "value"),
    [
        (door, setting, value)
        for door in DOORS
        for setting in TAKES[door]
        for value in WRONG[setting] + (WRONG_IN_PYTHON.get(setting, ()) if door in {"init", "discover"} else ())
    ],
    ids=_id,
)
def test_an_argument_that_cannot_be_used_is_refused_by_its_name(door: str, setting: str, value: object) -> None:
    assert _name(door, setting) in refused(door, {setting: value})


@pytest.mark.parametrize(
    ("door", "variable", "value"),
    [
        (door, variable, str(value))
        for door in DOORS
        for variable, setting in VARIABLES.items()
        for value in WRONG[setting.name]
        if setting.name not in PLACE
        and not (door == "mingle-discover" and setting.name in {*NOT_OF_THE_NETWORK, "discovery_timeout"})
    ],
    ids=_id,
)
def test_a_variable_that_cannot_be_used_is_refused_by_its_name(
    door: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert variable in refused(door, {})


@pytest.mark.parametrize("door", RANKS)
def test_an_empty_job_id_is_refused(door: str) -> None:
    """It is the trace of a template that had no value: all such jobs would meet."""
    assert re.search("job.id|--rdzv-id", refused(door, {"job_id": ""}))


@pytest.mark.parametrize("door", [door for door in RANKS if door != "torchrun"])
def test_an_empty_job_id_of_the_environment_is_refused(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGLE_JOB_ID", "")
    assert "MINGLE_JOB_ID=''" in refused(door, {"job_id": None})


@pytest.mark.parametrize("door", DOORS)
def test_windows_is_refused(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Windows" in refused(door, {})


@pytest.mark.parametrize("door", DOORS)
def test_an_interface_that_does_not_exist_is_refused_with_those_that_do(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINGLE_INTERFACE", "nosuch0")
    told = DOORS[door]({})
    assert SENT not in told
    assert "nosuch0" in told
    assert re.search(r"\blo\b", told)


@pytest.mark.parametrize("door", RANKS)
def test_a_mistyped_variable_is_pointed_out(
    door: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINGLE_INTEFACE", "eth0")
    monkeypatch.setenv("MINGLE_OF_SOMEBODY_ELSE", "x")
    told = f"{DOORS[door]({})}\n{caplog.text}"
    assert "MINGLE_INTERFACE?" in told
    assert "MINGLE_OF_SOMEBODY_ELSE" not in told


# --- what contradicts the other processes of the job -----------------------------------------------------------------


@pytest.fixture
def _two_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks 0 and 1 of four wait for the others."""
    port = free_udp_port()
    monkeypatch.setenv("MINGLE_PORT", str(port))
    with gathering("resnet", port, (0, 1), world_size=4):
        yield


@pytest.mark.usefixtures("_two_of_four")
@pytest.mark.parametrize("door", ["init", "discover", "mingle://", "mingle-check"])
@pytest.mark.parametrize(
    ("job_id", "place", "kind", "named"),
    [
        pytest.param("resnet", (1, 4), "ConflictError", "rank 1 on host node1", id="a rank twice"),
        pytest.param("resnet", (0, 4), "ConflictError", "rank 0 on host node0", id="two rank 0s"),
        pytest.param("resnet", (2, 3), "ConflictError", "rank 0 on host node0", id="world sizes that differ"),
        pytest.param("resent", (2, 4), "DiscoveryTimeoutError", "'resnet'", id="a mistyped job id"),
    ],
)
def test_a_contradiction_names_the_other_side(
    door: str, job_id: str, place: tuple[int, int], kind: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, world_size = place
    monkeypatch.setenv("MINGLE_RANK", str(rank))  # of mingle-check; the others are told the same by arguments
    monkeypatch.setenv("MINGLE_WORLD_SIZE", str(world_size))
    call = DOORS[door] if door != "mingle-check" else _command(check, [], [])
    given = {"job_id": job_id, **({} if door == "mingle-check" else {"rank": rank, "world_size": world_size})}

    def told_within(seconds: float) -> str:
        monkeypatch.setenv("MINGLE_TIMEOUT", str(seconds if kind == "DiscoveryTimeoutError" else 60))
        return call(given)

    told = longer(told_within, lambda told: named in told)
    assert told.startswith((f"{kind}: ", "status 1: "))
    assert named in told


def test_each_setting_has_a_fault() -> None:
    assert WRONG.keys() == SETTINGS.keys()
