"""Two that want the same place: the living ones are named, the dead ones are not in the way."""

from __future__ import annotations

import pytest

from . import Lab
from .scenarios import TIMEOUT, check, hold, results, train, wait_for_log
from .test_timeouts import timed


@pytest.mark.quick
def test_the_same_rank_twice(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    ranks = [hosts[0].start(train, "twice", 0, 3), hosts[1].start(train, "twice", 1, 3)]
    wait_for_log(ranks[1], "seated")
    newcomer = hosts[2].start(timed, "twice", 1, 3)
    error = newcomer.error()
    assert newcomer.wait_for("ended")["seconds"] < 20
    assert error.name == "ConflictError"
    for part in ("is already taken", "rank 1 on host", hosts[1].name, hosts[1].address(), f"pid {ranks[1].pid}"):
        assert part in error.message
    # Those who were right are not disturbed.
    ranks.append(hosts[2].start(train, "twice", 2, 3))
    check(results(ranks), hosts, hosts[0])


def test_a_rank_whose_holder_is_frozen_is_replaced(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    ranks = [hosts[0].start(train, "frozen", 0, 3)]
    frozen = hosts[1].start(timed, "frozen", 1, 3)
    wait_for_log(frozen, "seated")
    frozen.stop()
    ranks.append(hosts[1].start(train, "frozen", 1, 3))
    ranks.append(hosts[2].start(train, "frozen", 2, 3))
    check(results(ranks), hosts, hosts[0])


@pytest.mark.quick
def test_two_rank_zeros(lab: Lab) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    conflicts = [host.start(timed, "rivals", 0, 3, discovery_timeout=TIMEOUT) for host in hosts[:2]]
    hosts[2].start(timed, "rivals", 1, 3, discovery_timeout=TIMEOUT)
    for mine, other in ((0, 1), (1, 0)):
        error = conflicts[mine].error()
        assert conflicts[mine].wait_for("ended")["seconds"] < 20
        assert error.name == "ConflictError"
        for part in (hosts[other].name, hosts[other].address(), f"pid {conflicts[other].pid}"):
            assert part in error.message


@pytest.mark.parametrize("end", ["kill", "interrupt"])
def test_a_job_that_ended_is_not_in_the_way(lab: Lab, end: str) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(2)]
    old = [host.start(hold, "ended", rank, 2) for rank, host in enumerate(hosts)]
    for each in old:
        each.wait_for("running")
    # The new ones are there before the old ones end, and go on when they do.
    new = [host.start(train, "ended", rank, 2) for rank, host in enumerate(hosts)]
    for rank in new:
        wait_for_log(rank, "has been running for")
    for each in old:
        if end == "kill":
            each.kill()
        else:
            each.interrupt()
    check(results(new), hosts, hosts[0])
