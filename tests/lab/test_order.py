"""Assigned ranks follow the machines on real hosts: by every entry point, in any order of starts, and under loss."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from tests.support.levels import chosen, repeated

from . import Host, Lab, Rank
from .checks import check, outcomes
from .scenarios import results
from .test_election import assigned
from .test_run import COMMAND, SECONDS

NAMES = ("node1", "node2", "node3", "node10")
Started = TypeVar("Started")


def hosts_of(lab: Lab, *, loss: int = 0) -> list[Host]:
    """Hosts in their natural order."""
    network = lab.network()
    # The addresses say the reverse.
    hosts = [lab.host(network, name=name) for name in reversed(NAMES)][::-1]
    for host in hosts:
        if loss:
            host.drop_udp(loss)
    return hosts


def in_any_order(
    hosts: Sequence[Host], seed: int, start: Callable[[Host], Started], *, first_last: bool = False
) -> list[Started]:
    """Start something on each host, at random moments, on the first one last if told; return it by host."""
    rng, pause, before = random.Random(seed), threading.Event(), 0.0
    moments = [rng.uniform(0, 2) for _ in hosts]
    if first_last:
        moments[0] = 4.0
    started: dict[int, Started] = {}
    for index in sorted(range(len(hosts)), key=moments.__getitem__):
        pause.wait(moments[index] - before)
        before = moments[index]
        started[index] = start(hosts[index])
    return [started[index] for index in range(len(hosts))]


def expect_in_order(ranks: Sequence[Rank[dict[str, Any]]], hosts: Sequence[Host]) -> None:
    """Demand that ranks, members and the store's address are those of this order of hosts."""
    found = results(ranks)
    assert [result["rank"] for result in found] == list(range(len(hosts)))
    assert {result["master_addr"] for result in found} == {hosts[0].address()}
    for result in found:
        assert [member.address for member in result["members"]] == [host.address() for host in hosts]


@pytest.mark.quick
@pytest.mark.soak
@pytest.mark.parametrize(
    ("first_last", "loss"),
    chosen([(True, 30)], soak=[(False, 0), (False, 30), (True, 0)]),
)
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_init_in_any_order_of_starts(lab: Lab, seed: int, first_last: bool, loss: int) -> None:
    hosts = hosts_of(lab, loss=loss)
    start = in_any_order(
        hosts, seed, lambda host: host.start(assigned, f"order {seed}", len(hosts)), first_last=first_last
    )
    expect_in_order(start, hosts)


def named(name: str, job_id: str, world_size: int) -> dict[str, Any]:
    """What every process runs, on a machine of this name."""
    socket.sethostname(name)
    return assigned(job_id, world_size)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_machines_of_one_name_follow_their_addresses_as_numbers(lab: Lab, seed: int) -> None:
    network = lab.network()
    numbers = {int(host.address().rpartition(".")[2]): host for host in (lab.host(network) for _ in range(10))}
    hosts = [numbers[number] for number in (2, 9, 10)]
    expect_in_order(in_any_order(hosts, seed, lambda host: host.start(named, "same", f"equal {seed}", 3)), hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_node_ranks_that_are_given_come_first(lab: Lab, seed: int) -> None:
    hosts = hosts_of(lab)
    given: dict[Host, dict[str, int]] = {hosts[3]: {"node_rank": 0}, hosts[1]: {"node_rank": 1}}
    ranks = in_any_order(
        hosts, seed, lambda host: host.start(assigned, f"given {seed}", len(hosts), **given.get(host, {}))
    )
    wanted = [hosts[3], hosts[1], hosts[0], hosts[2]]
    expect_in_order([ranks[hosts.index(host)] for host in wanted], wanted)


@pytest.mark.soak
@pytest.mark.parametrize("first_last", chosen([True], soak=[False]))
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_mingle_run_in_any_order_of_starts(lab: Lab, seed: int, first_last: bool) -> None:
    hosts = hosts_of(lab, loss=30 if seed % 2 else 0)
    words = [*COMMAND, "--nnodes", str(len(hosts)), "--job-id", f"run {seed}", "--", "echo", "{node_rank} {hosts}"]
    processes = in_any_order(
        hosts, seed, lambda host: host.run(words, env={"MINGLE_TIMEOUT": f"{SECONDS:g}"}), first_last=first_last
    )
    assert [process.wait(SECONDS) for process in processes] == [0] * len(hosts)
    addresses = ",".join(host.address() for host in hosts)
    assert [process.stdout.strip() for process in processes] == [f"{rank} {addresses}" for rank in range(len(hosts))]


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("first_last", chosen([True], soak=[False]))
@pytest.mark.parametrize("seed", repeated(1, soak=5))
def test_mingle_check_in_any_order_of_starts(lab: Lab, seed: int, first_last: bool) -> None:
    hosts = hosts_of(lab)
    ranks = in_any_order(
        hosts, seed, lambda host: host.start(check, None, len(hosts), seconds=3.0), first_last=first_last
    )
    for report in outcomes(ranks):
        assert [(each["rank"], each["host"]) for each in report["ranks"]] == list(enumerate(NAMES))
