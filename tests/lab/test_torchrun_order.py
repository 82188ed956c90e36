"""Which host gets which rank under torchrun, whoever came first."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.levels import chosen, repeated

from . import Host, Lab
from .torchrun_jobs import SECONDS, Job, jobs

pytestmark = pytest.mark.timeout(600)
MakeJob = Callable[..., Job]


@pytest.fixture
def job() -> Iterator[MakeJob]:
    with jobs() as make:
        yield make


def start_in_any_order(made: Job, asked: dict[Host, dict[str, str]], seed: int) -> None:
    rng = random.Random(seed)
    for host in rng.sample(list(asked), len(asked)):
        made.start(host, **asked[host])
        threading.Event().wait(rng.uniform(0, 1))


def ranks(made: Job, hosts: Sequence[Host]) -> list[int]:
    """The ranks of the workers that run on these hosts, one on each, in their last start."""
    made.until(lambda: all(made.said(host) for host in hosts), "a step on each host")
    return [int(made.said(host, "started")[-1]["rank"]) for host in hosts]


def warnings(made: Job, host: Host) -> str:
    return "\n".join(event["text"] for event in made.agents[host].events if event.name == "log")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_hosts_are_in_the_order_of_their_names(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    hosts = {name: lab.host(network, name=name) for name in ("node10", "node2", "node1")}
    in_order = [hosts[name] for name in ("node1", "node2", "node10")]
    made = job(f"names-{seed}", "3")
    start_in_any_order(made, {host: {} for host in in_order}, seed)
    assert ranks(made, in_order) == [0, 1, 2]
    made.finish(*in_order)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_hosts_of_one_name_are_in_the_order_of_their_addresses(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    every = [lab.host(network) for _ in range(10)]
    in_order = [every[1], every[8], every[9]]
    assert [host.address().rpartition(".")[2] for host in in_order] == ["2", "9", "10"]
    for host in in_order:
        host.hosts_file.write_text("127.0.0.1 localhost\n")
        assert host.run(["hostname", "localhost"]).wait() == 0
    made = job(f"addresses-{seed}", "3")
    start_in_any_order(made, {host: {} for host in in_order}, seed)
    assert ranks(made, in_order) == [0, 1, 2]
    made.finish(*in_order)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("variable", chosen(["PET_NODE_RANK"], soak=["MINGLE_NODE_RANK"]))
def test_node_ranks_that_hosts_ask_for(lab: Lab, job: MakeJob, variable: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(f"asked-{seed}", "3")
    start_in_any_order(made, {host: {variable: str(rank)} for host, rank in zip(hosts, (2, 0, 1), strict=True)}, seed)
    assert ranks(made, hosts) == [2, 0, 1]
    assert "node rank" not in warnings(made, hosts[0])
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_node_ranks_that_some_hosts_ask_for_are_named(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    first, second, third = hosts = [lab.host(network) for _ in range(3)]
    made = job(f"some-{seed}", "3")
    start_in_any_order(made, {first: {}, second: {}, third: {"MINGLE_NODE_RANK": "1"}}, seed)
    assert ranks(made, hosts) == [1, 2, 0]
    text = f"some nodes ask for a node rank, and come first; these do not: {first.address()}, {second.address()}"
    made.until(lambda: all(text in warnings(made, host) for host in hosts), "the warning on each host")
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_node_rank_that_another_host_has_is_an_error_that_names_it(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    first, second, third = (lab.host(network) for _ in range(3))
    made = job(f"twice-{seed}", "2:3")
    ranked = {first: "0", second: "1", third: "1"}
    start_in_any_order(made, {host: {"MINGLE_NODE_RANK": rank} for host, rank in ranked.items()}, seed)
    claimants = [second, third]
    made.until(lambda: any(made.agents[host].exit_code is not None for host in claimants), "an error")
    refused, holder = claimants if made.agents[second].exit_code is not None else claimants[::-1]
    failure = made.agents[refused].error(SECONDS)
    assert failure.name == "ConflictError"
    assert f"host {holder.name} ({holder.address()}), pid {made.agents[holder].pid}: " in failure.message
    assert "node rank taken (node rank 1 is held by another live node)" in failure.message
    assert "(this one by MINGLE_NODE_RANK='1')" in failure.message
    assert "fix: give each machine its own node rank" in failure.message
    made.wait_for_group([first, holder])
    assert ranks(made, [first, holder]) == [0, 1]
    made.finish(first, holder)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize("struck", chosen([0], soak=[1]))
def test_a_host_that_is_killed_and_started_again_keeps_its_node_rank(
    lab: Lab, job: MakeJob, struck: int, seed: int
) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(f"again-{struck}-{seed}", "2:3", restarts=3, conf="last_call_timeout=15")
    ranked = {host: {"MINGLE_NODE_RANK": str(rank)} for rank, host in enumerate(hosts)}
    start_in_any_order(made, ranked, seed)
    made.wait_for_group(hosts)
    hosts[struck].kill()
    made.start(hosts[struck], **ranked[hosts[struck]])
    began = time.monotonic()
    made.wait_for_group(hosts, since=began)
    others = [host for host in hosts if host is not hosts[struck]]
    assert ranks(made, [*others, hosts[struck]]) == [0, 1, 2]
    made.finish(*hosts)


def test_a_node_rank_that_cannot_be_ends_at_once(lab: Lab, job: MakeJob) -> None:
    host = lab.host()  # without a network: nothing could be sent
    made = job("beyond", "2")
    made.start(host, MINGLE_NODE_RANK="2")
    failure = made.agents[host].error(SECONDS)
    assert failure.name == "ConfigurationError"
    assert re.search(r"MINGLE_NODE_RANK='2' does not fit a job of 2 nodes", failure.message)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_a_host_that_comes_back_is_the_last_and_a_new_start_is_in_order(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    first, second, third = hosts = [lab.host(network) for _ in range(3)]
    made = job(f"back-{seed}", "2:3", restarts=3, conf="last_call_timeout=15")
    made.start(*hosts)
    made.wait_for_group(hosts)
    assert ranks(made, hosts) == [0, 1, 2]
    first.kill()
    made.wait_for_group([second, third])
    assert ranks(made, [second, third]) == [0, 1]
    made.start(first)
    made.wait_for_group(hosts)
    assert ranks(made, hosts) == [2, 0, 1]
    made.finish(*hosts)
    made.stop_file.unlink()
    start_in_any_order(made, {host: {} for host in hosts}, seed)
    made.wait_for_group(hosts)
    assert ranks(made, hosts) == [0, 1, 2]
    made.finish(*hosts)
