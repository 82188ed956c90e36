"""Nodes of a torchrun job that come again and again, or one by one: how often they restart the others."""

from __future__ import annotations

import threading
import time

import pytest

from mingle.protocol.member import LEFT_OUT_SECONDS
from tests.support.levels import chosen, soaking

from . import Host, Lab
from .scenarios import wait_for_log
from .torchrun_jobs import SECONDS, Job, MakeJob

pytestmark = pytest.mark.timeout(600)

LAST_CALL = 30.0
"""Torch's default: newcomers that make the session full restart the others once in this time, and any other newcomers
once the round is older than this."""
LOOP_SECONDS = 65.0
UP_SECONDS, DOWN_SECONDS = 2.0, 1.0
"""How long the node of a crash loop runs, and how long it does not."""
GAP_SECONDS = 6.0
"""How long after one another nodes trickle in."""
TRIES_SECONDS = 300.0 if soaking() else 45.0
"""For how long a node that can't reach a member comes again and again."""


def rounds_of(made: Job, host: Host, since: float) -> list[float]:
    """When the torchrun of a host got its rounds."""
    return [at for at, name, _ in made.rounds(since) if name == host.name]


@pytest.mark.soak(4)
@pytest.mark.parametrize(("nodes", "count"), chosen([("2:3", 3)], soak=[("2:4", 4), ("2:5", 4)]))
def test_a_node_in_a_crash_loop_restarts_the_others_seldom(lab: Lab, job: MakeJob, nodes: str, count: int) -> None:
    hosts = lab.lan(count)
    made = job("loop", nodes, restarts=99, conf="")
    made.start(*hosts)
    made.wait_for_group(hosts)
    holder = made.store_host(hosts)
    looping = next(host for host in hosts if host is not holder)
    others = [host for host in hosts if host is not looping]
    at, deaths = time.monotonic(), 0
    while time.monotonic() < at + LOOP_SECONDS:
        looping.kill()
        deaths += 1
        threading.Event().wait(DOWN_SECONDS)
        made.start(looping)
        threading.Event().wait(UP_SECONDS)
    looping.kill()
    end = time.monotonic()
    made.wait_for_group(others, since=end)
    restarts = [[round(when - at, 1) for when in rounds_of(made, host, at)] for host in others]
    print(f"{deaths + 1} deaths in {end - at:.0f} s, rounds of the others after {restarts} s")
    # A session that it makes full takes it in at once, and again after each last call; any other one only then.
    # The first loss costs a round, and so do each return that the others take in, and the loss that follows.
    returns = (1 if nodes.endswith(f":{count}") else 0) + int((end - at) / LAST_CALL)
    assert all(1 <= len(each) <= 1 + 2 * returns for each in restarts)
    made.finish(*others)


@pytest.mark.soak(10)
def test_nodes_that_trickle_in_do_not_restart_the_first_one_each_time(lab: Lab, job: MakeJob) -> None:
    hosts = lab.lan(4)
    made = job("trickle", "1:4", restarts=9, conf="")
    made.start(hosts[0])
    made.wait_for_group(hosts[:1])
    at = time.monotonic()
    for host in hosts[1:]:
        made.start(host)
        threading.Event().wait(GAP_SECONDS)
    whole = made.wait_for_group(hosts, since=at)
    restarts = rounds_of(made, hosts[0], at)
    print(f"four trained {whole - at:.1f} s after the start of the second; restarts of the first: {len(restarts)}")
    # At most one when its round is older than a last call, and one when the job is whole.
    assert len(restarts) <= 2
    made.finish(*hosts)


@pytest.mark.soak(2)
def test_a_filtered_node_that_comes_again_and_again_restarts_nobody(lab: Lab, job: MakeJob) -> None:
    first, one, filtered = lab.lan(3)
    made = job("filtered", "2:3", conf="last_call_timeout=3,mesh=on")
    one.drop(f"meta l4proto tcp ip saddr {filtered.address()}")
    made.start(first)
    wait_for_log(made.agents[first], f"job {made.name}: open, 1/", SECONDS)  # it has the job's session
    made.start(one)
    made.wait_for_group([first, one])
    began, starts = time.monotonic(), 0
    while time.monotonic() < began + TRIES_SECONDS:
        made.start(filtered)
        starts += 1
        wait_for_log(made.agents[filtered], "this node gets no place", SECONDS)
        if starts % 2 == 0:  # each second one asks again by itself
            threading.Event().wait(LEFT_OUT_SECONDS + 5.0)
        filtered.kill()
    print(f"{starts} starts in {time.monotonic() - began:.0f} s")
    assert len(made.rounds()) == 2, "one round of two nodes"
    made.stop_file.touch()
    for host in (first, one):
        made.agents[host].result(SECONDS)
