"""Which host gets which rank under torchrun, whoever came first."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from tests.support.levels import chosen

from . import Host, Lab
from .torchrun_jobs import Job, MakeJob

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak(5)]


def start_in_any_order(made: Job, asked: dict[Host, dict[str, str]], seed: int) -> None:
    rng = random.Random(seed)
    for host in rng.sample(list(asked), len(asked)):
        made.start(host, **asked[host])
        threading.Event().wait(rng.uniform(0, 1))


def ranks(made: Job, hosts: Sequence[Host]) -> list[int]:
    """The ranks of the workers that run on these hosts, one on each, in their last start."""
    made.until(lambda: all(made.said(host) for host in hosts), "a step on each host")
    return [int(made.said(host, "started")[-1]["rank"]) for host in hosts]


@pytest.mark.parametrize("variable", chosen(["PET_NODE_RANK"], soak=["MINGLE_NODE_RANK"]))
def test_node_ranks_that_hosts_ask_for(lab: Lab, job: MakeJob, variable: str, seed: int) -> None:
    hosts = lab.lan(3)
    made = job("asked", "3")
    start_in_any_order(made, {host: {variable: str(rank)} for host, rank in zip(hosts, (2, 0, 1), strict=True)}, seed)
    assert ranks(made, hosts) == [2, 0, 1]
    said = [event["text"] for event in made.agents[hosts[0]].events if event.name == "log"]
    assert [text for text in said if "node rank" in text] == []
    made.finish(*hosts)


def test_a_host_that_comes_back_is_the_last_and_a_new_start_is_in_order(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    first, second, third = hosts = [lab.host(network, name=name) for name in ("node1", "node2", "node10")]
    made = job("back", "2:3", restarts=3, conf="last_call_timeout=15")
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
