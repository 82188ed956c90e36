"""The plug-in for Lightning, without Lightning: what it asks for is written down here. See also tests/frameworks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from mingle.distributed import rendezvous
from mingle.errors import ConfigurationError, LauncherError
from mingle.job import Job

_PACKAGES = ("lightning", "lightning.fabric", "lightning.fabric.plugins", "lightning.fabric.plugins.environments")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, on a stand-in for the part of Lightning that it is made for."""
    for name in _PACKAGES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[_PACKAGES[-1]].ClusterEnvironment = type("ClusterEnvironment", (), {})  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "mingle.lightning", raising=False)
    yield importlib.import_module("mingle.lightning")
    del sys.modules["mingle.lightning"]


def job(**fields: Any) -> Job:
    plain: dict[str, Any] = {
        "job_id": "resnet",
        "rank": 5,
        "world_size": 8,
        "local_rank": 1,
        "local_world_size": 4,
        "node_rank": 1,
        "num_nodes": 2,
        "master_addr": "10.0.0.7",
        "master_port": 41137,
        "interface": "eth0",
        "address": "10.0.0.9",
        "elapsed": 0.1,
    }
    return Job(**plain | fields)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, dict[str, Any]]]:
    """What the plug-in has asked of `mingle.discover`."""
    made: list[tuple[str | None, dict[str, Any]]] = []

    def discover(job_id: str | None = None, **options: Any) -> Job:
        made.append((job_id, options))
        return job()

    monkeypatch.setattr(rendezvous, "discover", discover)
    return made


def test_the_ranks_are_brought_together_once_and_when_first_asked(plugin: ModuleType, calls: list[Any]) -> None:
    environment = plugin.MingleEnvironment(job_id="resnet", world_size=8, interface="eth0")
    assert calls == []
    assert environment.creates_processes_externally is True
    assert plugin.MingleEnvironment.detect() is False
    assert calls == []
    assert (environment.main_address, environment.main_port) == ("10.0.0.7", 41137)
    assert (environment.global_rank(), environment.world_size()) == (5, 8)
    assert (environment.local_rank(), environment.node_rank()) == (1, 1)
    environment.teardown()
    assert environment.job.job_id == "resnet"
    assert calls == [("resnet", {"world_size": 8, "interface": "eth0"})]


def test_what_lightning_has_counted_right_is_accepted(plugin: ModuleType, calls: list[Any]) -> None:
    environment = plugin.MingleEnvironment()
    environment.set_global_rank(5)
    environment.set_world_size(8)
    environment.validate_settings(num_devices=4, num_nodes=2)


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("set_global_rank", (4,), "takes this process for rank 4, and it is rank 5"),
        ("set_world_size", (2,), "counts 2 ranks, and the job has 8"),
        ("validate_settings", (2, 4), "devices=2 and num_nodes=4, and the job has 4 ranks on this node, one of 2"),
    ],
)
def test_what_it_has_counted_wrong_is_refused(
    plugin: ModuleType, calls: list[Any], method: str, arguments: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        getattr(plugin.MingleEnvironment(), method)(*arguments)
    assert words in raised.value.observation
    assert "devices=4, num_nodes=2" in str(raised.value.remedy)


def test_what_discovery_raises_comes_through_and_is_tried_again(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[LauncherError | Job] = [LauncherError("no rank"), job()]

    def discover(job_id: str | None = None, **options: Any) -> Job:
        outcome = outcomes.pop(0)
        if isinstance(outcome, LauncherError):
            raise outcome
        return outcome

    monkeypatch.setattr(rendezvous, "discover", discover)
    environment = plugin.MingleEnvironment()
    with pytest.raises(LauncherError, match="no rank"):
        environment.world_size()
    assert environment.world_size() == 8


def test_without_lightning_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "mingle.lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'multinode-mingle\[lightning\]'"):
        importlib.import_module("mingle.lightning")
