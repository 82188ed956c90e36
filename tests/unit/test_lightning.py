"""The plug-in for Lightning, without Lightning: what it asks for is written down here. See also tests/frameworks."""

from __future__ import annotations

import importlib
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
from tests.support.failing import raising
from tests.support.loopback import until

_PACKAGES = ("lightning", "lightning.fabric", "lightning.fabric.plugins", "lightning.fabric.plugins.environments")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
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
    """The jobs that the plug-in has asked for; where none is named, it fails."""
    made: list[Arguments] = []

    def discover(arguments: Arguments, *, joins: bool) -> Job:
        assert joins
        made.append(arguments)
        if len(made) == 1 and arguments.job_id is None:
            raise LauncherError("no rank")
        return job()

    monkeypatch.setattr(rendezvous, "discover", discover)
    return made


def test_the_ranks_are_brought_together_once_and_when_first_asked(plugin: Any, calls: list[Arguments]) -> None:
    environment = plugin.MingleEnvironment(job_id="resnet", world_size=8, interface="eth0")
    assert environment.creates_processes_externally is True
    assert plugin.MingleEnvironment.detect() is False
    assert calls == []
    assert (environment.main_address, environment.main_port) == ("10.0.0.7", 41137)
    assert (environment.global_rank(), environment.world_size()) == (5, 8)
    assert (environment.local_rank(), environment.node_rank()) == (1, 1)
    environment.teardown()
    assert environment.job.job_id == "resnet"
    assert calls == [Arguments(job_id="resnet", world_size=8, interface="eth0")]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("method", "right", "wrong", "words"),
    [
        ("set_global_rank", (5,), (4,), "takes this process for rank 4, and it is rank 5"),
        ("set_world_size", (8,), (2,), "counts 2 ranks, and the job has 8"),
        ("validate_settings", (4, 2), (2, 4), "the job has 4 ranks on this node, one of 2"),
        ("validate_settings", (4, 2), (4, 1), "devices=4 and num_nodes=1"),
    ],
)
def test_counts_of_lightning_that_do_not_fit_are_refused(
    plugin: Any, method: str, right: tuple[int, ...], wrong: tuple[int, ...], words: str
) -> None:
    check = getattr(plugin.MingleEnvironment("resnet"), method)
    check(*right)
    with pytest.raises(ConfigurationError) as raised:
        check(*wrong)
    assert words in raised.value.observation
    assert "devices=4, num_nodes=2" in str(raised.value.remedy)


@pytest.mark.usefixtures("calls")
def test_error_of_discovery_comes_through_and_is_tried_again(plugin: Any) -> None:
    environment = plugin.MingleEnvironment()
    with pytest.raises(LauncherError, match="no rank"):
        environment.world_size()
    assert environment.world_size() == 8


# --- a second Trainer -----------------------------------------------------------------------------------------------


@pytest.fixture
def make(plugin: Any) -> Iterator[Callable[..., Job]]:
    """Asks as a Trainer does, for a job of one rank."""
    alone = {"rank": 0, "world_size": 1}
    yield lambda job_id="again", **options: plugin.MingleEnvironment(job_id, **alone | options).job
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous.end_session()


def end_group(job: Any) -> None:
    """Destroy the process group of a job, once its session has seen that it stands."""
    until(lambda: not job._session.server.held)
    dist.destroy_process_group()


def test_a_second_trainer_goes_on_with_the_job_and_its_process_group(make: Callable[..., Job]) -> None:
    """Lightning keeps the process group from one Trainer to the next, as when a notebook's cell is run again."""
    first = make()
    assert make() is first, "before there is a group"
    dist.init_process_group("gloo")
    assert make() is first
    end_group(first)
    second = make()
    assert second is not first
    second.close()
    assert make() is not second


def test_a_job_whose_end_was_interrupted_is_not_taken_up_again(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    with monkeypatch.context() as patched:
        patched.setattr(type(first._session), "_end", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            first.close()
    assert make() is not first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job_id": "other"}, "asks for job 'other'"),
        ({"discovery_timeout": 7}, "asks for it with another discovery_timeout"),
        ({"secret": "tell nobody", "ttl": 3}, "asks for it with another secret, ttl"),
    ],
)
def test_a_second_trainer_with_another_job_is_refused_while_a_process_group_stands(
    make: Callable[..., Job], change: dict[str, Any], words: str
) -> None:
    first = make()
    dist.init_process_group("gloo")
    with pytest.raises(ConfigurationError, match="this process is in job 'again'") as raised:
        make(**change)
    assert words in raised.value.observation
    assert "tell nobody" not in str(raised.value)
    assert make() is first
    end_group(first)
    assert make(**change).job_id == change.get("job_id", "again")
    assert make().job_id == "again", "without a group it takes the place of the other"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_trainer_in_a_forked_child_is_not_in_the_job_of_its_parent(make: Callable[..., Job]) -> None:
    first = make()

    def child() -> str:
        with make() as own:
            return str(own is not first and own.master_port != first.master_port)

    assert in_child(child) == "True"
    assert make() is first


def test_a_second_trainer_under_torchrun(make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run-7"}
    for name, value in (place | run).items():
        monkeypatch.setenv(name, value)
    first = make()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert make() is first


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
    plugin: Any, calls: list[Arguments], start_method: str
) -> None:
    """It asks for the job in the process that is to start the ranks, and would wait there for them."""
    strategy = Strategy(plugin.MingleEnvironment("resnet"), start_method)
    with pytest.raises(ConfigurationError, match=f"start_method='{start_method}'") as raised:
        strategy.set_world_ranks()
    assert calls == []
    assert 'strategy="ddp"' in str(raised.value.remedy)
    assert strategy.cluster_environment.job.rank == 5, "the user asks"
    for ask in (strategy.set_world_ranks, strategy.launch):
        with pytest.raises(ConfigurationError, match="starts the ranks itself"):
            ask()


@pytest.mark.usefixtures("calls")
def test_a_strategy_that_starts_no_ranks_is_served(plugin: Any) -> None:
    strategy = Strategy(plugin.MingleEnvironment("resnet"), "popen")
    strategy.set_world_ranks()
    assert strategy.launch() == 41137


def test_import_without_lightning_names_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "mingle.lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install lightning"):
        importlib.import_module("mingle.lightning")
