"""The plug-in for Lightning, without Lightning: what it asks for is written down here. See also tests/frameworks."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from mingle.config.settings import Arguments
from mingle.distributed import rendezvous
from mingle.errors import ConfigurationError, LauncherError
from mingle.job import Job
from tests.support.children import in_child
from tests.support.loopback import until

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


def job() -> Job:
    place = {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node_rank": 1, "num_nodes": 2}
    reached = {"master_addr": "10.0.0.7", "master_port": 41137, "interface": "eth0", "address": "10.0.0.9"}
    return Job(job_id="resnet", elapsed=0.1, **place, **reached)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Arguments]:
    """The jobs that the plug-in has asked for."""
    made: list[Arguments] = []

    def discover(arguments: Arguments, *, joins: bool) -> Job:
        assert joins
        made.append(arguments)
        return job()

    monkeypatch.setattr(rendezvous, "discover", discover)
    return made


def test_the_ranks_are_brought_together_once_and_when_first_asked(plugin: ModuleType, calls: list[Arguments]) -> None:
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
    assert calls == [Arguments(job_id="resnet", world_size=8, interface="eth0")]


def test_counts_of_lightning_that_fit_are_accepted(plugin: ModuleType, calls: list[Arguments]) -> None:
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
def test_counts_of_lightning_that_do_not_fit_are_refused(
    plugin: ModuleType, calls: list[Arguments], method: str, arguments: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        getattr(plugin.MingleEnvironment(), method)(*arguments)
    assert words in raised.value.observation
    assert "devices=4, num_nodes=2" in str(raised.value.remedy)


def test_error_of_discovery_comes_through_and_is_tried_again(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[LauncherError | Job] = [LauncherError("no rank"), job()]

    def discover(_arguments: Arguments, *, joins: bool) -> Job:
        assert joins
        outcome = outcomes.pop(0)
        if isinstance(outcome, LauncherError):
            raise outcome
        return outcome

    monkeypatch.setattr(rendezvous, "discover", discover)
    environment = plugin.MingleEnvironment()
    with pytest.raises(LauncherError, match="no rank"):
        environment.world_size()
    assert environment.world_size() == 8


# --- a second Trainer -----------------------------------------------------------------------------------------------

ALONE = {"rank": 0, "world_size": 1}


@pytest.fixture
def make(plugin: ModuleType) -> Iterator[Callable[..., Any]]:
    """Makes the environment of a Trainer."""
    yield lambda job_id="again", **options: plugin.MingleEnvironment(job_id, **ALONE | options)
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous.end_session()


def test_a_second_trainer_goes_on_with_the_job_and_its_process_group(make: Callable[..., Any]) -> None:
    """Lightning keeps the process group from one Trainer to the next, as when a notebook's cell is run again."""
    first = make().job
    assert make().job is first, "before there is a group"
    dist.init_process_group("gloo")
    assert make().job is first
    until(lambda: not first._session.server.held)  # it sees now and then that the group stands
    dist.destroy_process_group()
    second = make().job
    assert second is not first
    second.close()
    assert make().job is not second


def test_a_job_whose_end_was_interrupted_is_not_taken_up_again(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make().job
    with monkeypatch.context() as patched:
        patched.setattr(type(first._session), "_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.close()
    assert make().job is not first


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job_id": "other"}, "asks for job 'other'"),
        ({"discovery_timeout": 7}, "asks for it with another discovery_timeout"),
        ({"secret": "tell nobody", "ttl": 3}, "asks for it with another secret, ttl"),
    ],
)
def test_a_second_trainer_with_another_job_is_refused(
    make: Callable[..., Any], change: dict[str, Any], words: str
) -> None:
    first = make().job
    dist.init_process_group("gloo")
    with pytest.raises(ConfigurationError, match="this process is in job 'again'") as raised:
        _ = make(**change).job
    assert words in raised.value.observation
    assert "tell nobody" not in str(raised.value)
    assert "destroy_process_group()" in str(raised.value.remedy)
    assert make().job is first
    until(lambda: not first._session.server.held)
    dist.destroy_process_group()
    assert make(**change).job.job_id == change.get("job_id", "again")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_trainer_in_a_forked_child_is_not_in_the_job_of_its_parent(make: Callable[..., Any]) -> None:
    first = make().job

    def child() -> str:
        with make().job as own:
            return str(own is not first and own.master_port != first.master_port)

    assert in_child(child) == "True"
    assert make().job is first


def test_without_a_process_group_another_job_takes_the_place_of_the_first(make: Callable[..., Any]) -> None:
    assert make().job.job_id == "again"
    assert make("other").job.job_id == "other"


def test_a_second_trainer_under_torchrun(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run-7"}
    for name, value in (place | run).items():
        monkeypatch.setenv(name, value)
    first = make().job
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert make().job is first


def test_a_process_group_that_somebody_else_made_first_is_refused_as_by_discover(make: Callable[..., Any]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigurationError, match="has a process group already"):
        _ = make().job


# --- who starts the processes ----------------------------------------------------------------------------------------


class Strategy:
    """As much of Lightning's strategy as asks the plug-in."""

    def __init__(self, environment: Any, start_method: str) -> None:
        self.cluster_environment = environment
        self._start_method = start_method

    @property
    def node_rank(self) -> int:
        return int(self.cluster_environment.node_rank())

    def set_world_ranks(self) -> None:
        self.cluster_environment.set_global_rank(self.node_rank * 4 + 1)

    def launch(self) -> int:
        return int(self.cluster_environment.main_port)


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_a_strategy_that_starts_the_ranks_itself_is_refused(
    plugin: ModuleType, calls: list[Arguments], start_method: str
) -> None:
    """It asks for the job in the process that is to start the ranks, and would wait there for them."""
    strategy = Strategy(plugin.MingleEnvironment(), start_method)
    with pytest.raises(ConfigurationError, match=f"start_method='{start_method}'") as raised:
        strategy.set_world_ranks()
    assert calls == []
    assert 'strategy="ddp"' in str(raised.value.remedy)
    assert strategy.cluster_environment.job.rank == 5, "the user asks"
    for ask in (strategy.set_world_ranks, strategy.launch):
        with pytest.raises(ConfigurationError, match="starts the ranks itself"):
            ask()


def test_a_strategy_that_starts_no_ranks_is_served(plugin: ModuleType, calls: list[Arguments]) -> None:
    strategy = Strategy(plugin.MingleEnvironment(), "popen")
    strategy.set_world_ranks()
    assert strategy.launch() == 41137


def test_import_without_lightning_names_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "mingle.lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install lightning"):
        importlib.import_module("mingle.lightning")
