"""A node of a torchrun job that can't reach another one: it gets no place, both say why, and the others train."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mingle.protocol.member import LEFT_OUT_SECONDS
from tests.support.levels import repeated, soaking

from . import Host, Lab
from .scenarios import wait_for_log
from .torchrun_jobs import SECONDS, Job, jobs

pytestmark = pytest.mark.timeout(600)
MakeJob = Callable[..., Job]
CONF = "last_call_timeout=3,mesh=on"
MENDED_SECONDS = 60.0
"""By when a node comes in after the network was mended: it asks every 30 s, and torch makes a new round."""


TRIES_SECONDS = 300.0 if soaking() else 45.0
"""For how long a node that can't reach a member comes again and again."""


@pytest.fixture
def job() -> Iterator[MakeJob]:
    with jobs() as make:
        yield make


def hosted(lab: Lab, made: Job, count: int) -> list[Host]:
    """Hosts of a network; the agents of the first has the job's session."""
    network = lab.network()
    hosts = [lab.host(network) for _ in range(count)]
    made.start(hosts[0])
    wait_for_log(made.agents[hosts[0]], f"job {made.name}: open, 1/", SECONDS)
    return hosts


def logs(made: Job, host: Host) -> str:
    return "\n".join(event["text"] for event in made.agents[host].events if event.name == "log")


def cut(one: Host, other: Host) -> None:
    """Let no TCP pass between two hosts; datagrams do."""
    one.drop(f"meta l4proto tcp ip saddr {other.address()}")


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_a_node_that_reaches_not_all_is_left_out_until_the_network_is_mended(lab: Lab, job: MakeJob, seed: int) -> None:
    made = job(f"left-out-{seed}", "2:3", restarts=3, conf=CONF)
    hosts = hosted(lab, made, 3)
    one, other = hosts[1:]
    cut(one, other)
    made.start(one)
    made.wait_for_group([hosts[0], one])
    began = time.monotonic()
    made.start(other)
    wait_for_log(made.agents[other], "this node gets no place", SECONDS)
    print(f"left out {time.monotonic() - began:.1f} s after its start")
    print(logs(made, other))
    wait_for_log(made.agents[one], "gets no place", SECONDS)
    for host in (one, other):
        (said, *_) = [line for line in logs(made, host).splitlines() if "gets no place" in line]
        assert "host host2" in said
        assert "host host3" in said
        assert "doctor" in said, "a latecomer is not asked to look at its firewall, which that command names"
    steps = len(made.said(one))
    made.until(lambda: len(made.said(one)) > steps, "a step without the node that was left out")
    assert made.group(one) == ("host1", "host2")
    one.clear_rules()
    mended = time.monotonic()
    made.wait_for_group(hosts, since=mended, seconds=MENDED_SECONDS + 30.0)
    made.finish(*hosts)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=2))
def test_a_filtered_node_that_comes_again_and_again_restarts_nobody(lab: Lab, job: MakeJob, seed: int) -> None:
    made = job(f"filtered-{seed}", "2:3", conf=CONF)
    hosts = hosted(lab, made, 3)
    one, filtered = hosts[1:]
    cut(one, filtered)
    made.start(one)
    made.wait_for_group([hosts[0], one])
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
    for host in hosts[:2]:
        made.agents[host].result(SECONDS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=10))
def test_a_spare_node_takes_the_place(lab: Lab, job: MakeJob, seed: int) -> None:
    made = job(f"spare-{seed}", "3", restarts=3, conf=CONF)
    hosts = hosted(lab, made, 4)
    _, one, other, spare = hosts
    cut(one, other)
    made.start(one, other)
    made.until(
        lambda: any("this node gets no place" in logs(made, host) for host in (one, other)), "a node that is left out"
    )
    (left_out,) = [host for host in (one, other) if "this node gets no place" in logs(made, host)]
    made.start(spare)
    made.wait_for_group([host for host in hosts if host is not left_out])
    made.stop_file.touch()
    for host in hosts:
        if host is not left_out:
            made.agents[host].result(90.0)
