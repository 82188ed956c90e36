"""A network that falls apart while torchrun trains: one side at most goes on, and healed it is one job again."""

from __future__ import annotations

import threading
import time
from typing import Literal

import pytest

from tests.support.levels import chosen

from . import Host, Lab
from .torchrun_jobs import Job, MakeJob, never_apart

pytestmark = pytest.mark.timeout(600)

APART_SECONDS = 25.0
"""Longer than every heartbeat and lease."""


def sides(made: Job, hosts: list[Host], with_host: int) -> tuple[list[Host], list[Host]]:
    """So many hosts, among them the one that holds the store, and the others, once all train."""
    made.start(*hosts)
    made.wait_for_group(hosts)
    holder = made.store_host(hosts)
    in_order = [holder, *(host for host in hosts if host is not holder)]
    return in_order[:with_host], in_order[with_host:]


@pytest.mark.soak(3)
@pytest.mark.parametrize(("count", "with_host"), chosen([(3, 1)], soak=[(3, 2), (4, 2), (5, 2)]))
def test_one_side_of_a_partition_goes_on(lab: Lab, job: MakeJob, count: int, with_host: int) -> None:
    hosts = lab.lan(count)
    network = hosts[0].nic().network
    made = job("part", f"2:{count}", restarts=3)
    side, other_side = sides(made, hosts, with_host)
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


@pytest.mark.soak(5)
@pytest.mark.parametrize(
    ("nodes", "with_host", "how"),
    chosen(
        [("2:4", 2, "reset")],
        soak=[("1:2", 1, "reset"), ("1:3", 1, "icmp"), ("1:3", 2, "reset"), ("2:4", 2, "icmp"), ("2:5", 2, "reset")],
    ),
)
def test_a_firewall_that_rejects_makes_no_second_job(
    lab: Lab, job: MakeJob, nodes: str, with_host: int, how: Literal["reset", "icmp"]
) -> None:
    """A refused connection is no proof of a death: the firewall answers for processes that live."""
    hosts = lab.lan(int(nodes[2:]))
    made = job("reject", nodes, restarts=9)
    side, other_side = sides(made, hosts, with_host)
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
