"""A node of a torchrun job that can't reach another one: it gets no place, both say why, and the others train."""

from __future__ import annotations

import time

import pytest

from . import Host, Lab
from .scenarios import wait_for_log
from .torchrun_jobs import SECONDS, Job, MakeJob

MENDED_SECONDS = 60.0
"""By when a node comes in after the network was mended: it asks every 30 s, and torch makes a new round."""


def logs(made: Job, host: Host) -> str:
    return "\n".join(event["text"] for event in made.agents[host].events if event.name == "log")


@pytest.mark.soak(10)
@pytest.mark.timeout(600)
def test_a_node_that_reaches_not_all_is_left_out_until_the_network_is_mended(lab: Lab, job: MakeJob) -> None:
    made = job("left-out", "2:3", restarts=3, conf="last_call_timeout=3,mesh=on")
    first, one, other = hosts = lab.lan(3)
    made.start(first)
    wait_for_log(made.agents[first], f"job {made.name}: open, 1/", SECONDS)  # it has the job's session
    one.drop(f"meta l4proto tcp ip saddr {other.address()}")
    made.start(one)
    made.wait_for_group([first, one])
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
    assert len(made.rounds()) == 2, "one round of two nodes"
    one.clear_rules()
    mended = time.monotonic()
    made.wait_for_group(hosts, since=mended, seconds=MENDED_SECONDS + 30.0)
    made.finish(*hosts)
