"""A network that falls apart while torchrun trains: one side at most goes on, and healed it is one job again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from tests.support.levels import chosen, repeated

from . import Lab
from .torchrun_jobs import Job, jobs, never_apart, never_back

pytestmark = pytest.mark.timeout(600)
MakeJob = Callable[..., Job]

HELD_SECONDS = 12.0
"""Longer than a host that is cut off counts its members."""
APART_SECONDS = 25.0
"""Longer than every heartbeat and lease."""


@pytest.fixture
def job() -> Iterator[MakeJob]:
    with jobs() as make:
        yield make


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
@pytest.mark.parametrize(
    ("count", "nodes", "with_host"),
    chosen([(3, "2:3", 1)], soak=[(3, "2:3", 2), (4, "2:4", 2), (5, "2:5", 2)]),
)
def test_one_side_of_a_partition_goes_on(
    lab: Lab, job: MakeJob, count: int, nodes: str, with_host: int, seed: int
) -> None:
    """``with_host`` hosts are on the side of the one that holds the store, itself included."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(count)]
    made = job(f"part-{count}-{with_host}-{seed}", nodes, restarts=3)
    made.start(*hosts)
    made.wait_for_group(hosts)
    holder = made.store_host(hosts)
    others = [host for host in hosts if host is not holder]
    side, other_side = [holder, *others[: with_host - 1]], others[with_host - 1 :]
    lab.split(network, side, other_side)
    at = time.monotonic()
    # More than half go on; at exactly half it is the side that keeps the host.
    going_on = side if 2 * len(side) >= count else other_side
    again = made.wait_for_group(going_on, since=at)
    print(f"{len(going_on)} of {count} trained again after {again - at:.1f} s")
    threading.Event().wait(max(0.0, at + APART_SECONDS - time.monotonic()))
    lab.join(network)
    healed = time.monotonic()
    whole = made.wait_for_group(hosts, since=healed)
    print(f"one job of {count} again {whole - healed:.1f} s after the network was whole")
    never_apart(made.groups(since=at + 1))
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=5))
@pytest.mark.parametrize(
    ("nodes", "with_host", "how"),
    chosen(
        [("2:4", 2, "reset")],
        soak=[
            (nodes, with_host, how)
            for nodes, with_host in (("1:2", 1), ("1:3", 1), ("1:3", 2), ("2:4", 2), ("2:5", 2))
            for how in ("reset", "icmp")
            if (nodes, how) != ("2:4", "reset")
        ],
    ),
)
def test_a_firewall_that_rejects_makes_no_second_job(
    lab: Lab, job: MakeJob, nodes: str, with_host: int, how: Literal["reset", "icmp"], seed: int
) -> None:
    """A refused connection is no proof of a death: the firewall answers for processes that live."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(int(nodes[2:]))]
    made = job(f"reject-{nodes[2:]}-{with_host}-{how}-{seed}", nodes, restarts=9)
    made.start(*hosts)
    made.wait_for_group(hosts)
    holder = made.store_host(hosts)
    others = [host for host in hosts if host is not holder]
    side, other_side = [holder, *others[: with_host - 1]], others[with_host - 1 :]
    for host in hosts:
        host.reject(other_side if host in side else side, how)
    at = time.monotonic()
    threading.Event().wait(APART_SECONDS)
    for host in hosts:
        host.clear_rules()
    healed = time.monotonic()
    apart = made.groups(since=at + 10)
    print(f"trained while apart: {sorted({tuple(sorted(group)) for _, group in apart})}")
    never_apart(apart)
    whole = made.wait_for_group(hosts, since=healed)
    print(f"one job of {len(hosts)} again {whole - healed:.1f} s after the network was whole")
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_split_from_the_start_heals_into_one_job(lab: Lab, job: MakeJob, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(4)]
    lab.split(network, hosts[:2], hosts[2:])
    made = job(f"split-{seed}", "2:4", restarts=3)
    made.start(*hosts)
    for side in (hosts[:2], hosts[2:]):
        made.wait_for_group(side)  # nobody can know of the other side: two jobs, and a warning
    lab.join(network)
    healed = time.monotonic()
    whole = made.wait_for_group(hosts, since=healed)
    print(f"two jobs were one {whole - healed:.1f} s after the network was whole")
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_host_that_is_cut_off_gets_no_round_once_the_others_started_again_have_theirs(
    lab: Lab, job: MakeJob, seed: int
) -> None:
    """The two agents that it counts were killed and started again: they are free, and more than half."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    made = job(f"again-{seed}", "1:3", restarts=9, conf="last_call_timeout=1")
    made.start(*hosts)
    made.wait_for_group(hosts)
    holder = made.store_host(hosts)
    others = [host for host in hosts if host is not holder]
    holder.cut()
    at = time.monotonic()
    threading.Event().wait(0.3)
    for host in others:
        host.kill()
    made.start(*others)
    again = made.wait_for_group(others, since=at)
    print(f"the two trained again after {again - at:.1f} s")
    threading.Event().wait(max(0.0, at + HELD_SECONDS - time.monotonic()))
    print([(round(when - at, 1), name, session) for when, name, session in made.rounds(since=at)])
    never_back(made.rounds())
    holder.heal()
    healed = time.monotonic()
    made.wait_for_group(hosts, since=healed)
    never_back(made.rounds())
    made.finish(*hosts)
