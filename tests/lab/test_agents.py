"""Agents of torchrun on real hosts, without torchrun: the job goes on when its host dies or is cut off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from mingle.elastic.leases import BINDING_SECONDS
from tests.support.levels import repeated

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
            report("session_lost", lost=gathering.state.lost, ended=gathering.state.ended)
    finally:
        gathering.close("the test is over")


class Agents:
    """The agents of one job, each on a host of its own."""

    def __init__(self, lab: Lab, job_id: str, minimum: int, maximum: int) -> None:
        self.network = lab.network()
        self.hosts = [lab.host(self.network) for _ in range(maximum)]
        self._arguments = (job_id, minimum, maximum)
        self.ranks: dict[Host, Rank[str]] = {}
        self.latest: dict[Host, Any] = {}

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

    def lose(self, hosts: Sequence[Host], within: float) -> None:
        """Wait until each of these has said that its session is lost."""
        end = time.monotonic() + within
        for host in hosts:
            assert self.ranks[host].wait_for("session_lost", max(0.1, end - time.monotonic()))["lost"]

    @property
    def chosen(self) -> Host:
        """The host of the session that all are in."""
        (host,) = [host for host, found in self.latest.items() if found["is_host"]]
        return host

    def without(self, *gone: Host) -> list[Host]:
        return [host for host in self.hosts if host not in gone]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_the_survivors_of_a_killed_host_go_on_and_it_comes_back(lab: Lab, seed: int) -> None:
    agents = Agents(lab, f"killed {seed}", 2, 3)
    agents.start(*agents.hosts)
    agents.gather(agents.hosts, within=60.0)
    host = agents.chosen
    rest = agents.without(host)
    first = agents.latest[host]["generation"]
    host.kill()
    del agents.latest[host]
    agents.lose(rest, within=7.0)
    # At once after an orderly end. A kernel that had bytes unread for the killed process sends a reset in its place,
    # which a firewall could have sent, too: then those that were told so are bound for BINDING_SECONDS.
    agents.gather(rest, within=5.0 + BINDING_SECONDS)
    assert {agents.latest[each]["generation"] > first for each in rest} == {True}
    agents.start(host)
    agents.gather([host], within=30.0)
    assert agents.latest[host]["session"] == agents.latest[rest[0]]["session"]
    assert not agents.latest[host]["is_host"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_a_host_that_is_cut_off_stops_and_comes_back(lab: Lab, seed: int) -> None:
    agents = Agents(lab, f"cut off {seed}", 2, 3)
    agents.start(*agents.hosts)
    agents.gather(agents.hosts, within=60.0)
    host = agents.chosen
    rest = agents.without(host)
    host.cut(agents.network)
    agents.lose(agents.hosts, within=25.0)
    agents.gather(rest, within=20.0)
    host.heal(agents.network)
    agents.gather([host], within=30.0)
    assert agents.latest[host]["session"] == agents.latest[rest[0]]["session"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=3))
def test_of_two_halves_the_one_with_the_host_goes_on(lab: Lab, seed: int) -> None:
    agents = Agents(lab, f"halves {seed}", 2, 4)
    agents.start(*agents.hosts)
    agents.gather(agents.hosts, within=60.0)
    host = agents.chosen
    session = agents.latest[host]["session"]
    one, two, three = agents.without(host)
    lab.split(agents.network, [host, one], [two, three])
    agents.lose([two, three], within=25.0)
    lab.join(agents.network)
    agents.gather([two, three], within=60.0)
    assert {agents.latest[each]["session"] for each in agents.hosts} == {session}
