"""Agents of torchrun on real hosts, without torchrun: the job goes on when its host dies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from mingle.elastic.leases import BINDING_SECONDS

from . import Host, Lab, Rank, report


def agent(job_id: str, minimum: int, maximum: int) -> str:
    """Gathers, and again after every loss, until the host ends the job."""
    from mingle.config.launchers import Placement
    from mingle.config.settings import Settings
    from mingle.elastic.gathering import Gathering
    from mingle.elastic.quorum import Nodes, Policy
    from mingle.errors import MingleError

    settings = Settings(
        job_id=job_id,
        placement=Placement(rank=None, world_size=maximum),
        discovery_timeout=90.0,
        progress="off",
        mesh="off",
    )
    gathering = Gathering(settings, Policy(nodes=Nodes(minimum=minimum, maximum=maximum), last_call=3.0))
    try:
        while True:
            try:
                found = gathering.gather()
            except MingleError as error:
                return str(error)
            hosts = gathering.stores.server is not None
            report("gathered", session=found.formation.session, generation=found.generation, is_host=hosts)
            gathering.session_lost.wait()
            report("session_lost", lost=gathering.state.lost)
    finally:
        gathering.close("the test is over")


class Agents:
    """The agents of one job, each on a host of its own."""

    def __init__(self, hosts: Sequence[Host], minimum: int) -> None:
        self._arguments = ("agents", minimum, len(hosts))
        self.ranks: dict[Host, Rank[str]] = {}
        self.latest: dict[Host, Any] = {}
        self.start(*hosts)
        self.gather(hosts, within=60.0)

    def start(self, *hosts: Host) -> None:
        """Start the agents of these hosts."""
        for host in hosts:
            self.ranks[host] = host.start(agent, *self._arguments)

    def gather(self, hosts: Sequence[Host], within: float) -> None:
        """Wait until all of these report one session; who was in one before reports another now."""
        end = time.monotonic() + within
        for host in hosts:
            self._next(host, end)
        while len({self.latest[host]["session"] for host in hosts}) > 1:
            # Who came to a session that did not last is the one to speak again.
            newest = max(self.latest[host]["generation"] for host in hosts)
            behind = [host for host in hosts if self.latest[host]["generation"] < newest] or hosts
            self._next(behind[0], end)

    def _next(self, host: Host, end: float) -> None:
        self.latest[host] = self.ranks[host].wait_for("gathered", max(0.1, end - time.monotonic()))


@pytest.mark.soak(3)
def test_the_survivors_of_a_killed_host_go_on_and_it_comes_back(lab: Lab) -> None:
    hosts = lab.lan(3)
    agents = Agents(hosts, minimum=2)
    (host,) = (each for each in hosts if agents.latest[each]["is_host"])
    rest = [each for each in hosts if each is not host]
    first = agents.latest.pop(host)["generation"]
    host.kill()
    for each in rest:
        assert agents.ranks[each].wait_for("session_lost", 7.0)["lost"]
    # At once after an orderly end. A kernel that had bytes unread for the killed process sends a reset in its place,
    # which a firewall could have sent, too: then those that were told so are bound for BINDING_SECONDS.
    agents.gather(rest, within=5.0 + BINDING_SECONDS)
    assert {agents.latest[each]["generation"] > first for each in rest} == {True}
    agents.start(host)
    agents.gather([host], within=30.0)
    assert agents.latest[host]["session"] == agents.latest[rest[0]]["session"]
    assert not agents.latest[host]["is_host"]
