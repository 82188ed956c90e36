"""An agent that joins: what it tells of its past, what it learns, and how it notices that its host is lost."""

from __future__ import annotations

import pytest

from mingle.agents.heartbeat import HOST_SILENT_SECONDS
from mingle.agents.joining import AgentJoiner
from mingle.agents.quorum import LEASE_SECONDS
from mingle.election.electing import Elector
from mingle.rank.membership import Membership
from mingle.rules.machine import Source
from mingle.wire.datagrams import Offer
from mingle.wire.frames import Sighting
from tests.lan.agents import AgentGathering, AgentProcess
from tests.views import application, member


@pytest.fixture
def gathering() -> AgentGathering:
    return AgentGathering(11, (1, 3))


@pytest.fixture
def host(gathering: AgentGathering) -> AgentProcess:
    process = gathering.start("m0")
    gathering.run_until_together([process], gathering.last_call + 3.0)
    return process


@pytest.fixture
def joined(gathering: AgentGathering, host: AgentProcess) -> AgentProcess:
    process = gathering.start("m1")
    gathering.run_until_together([host, process], 3.0)
    gathering.world.run(0.5)
    return process


def part(process: AgentProcess) -> AgentJoiner:
    assert isinstance(process.agent.part, AgentJoiner)
    return process.agent.part


def test_it_is_bound_to_a_host_that_it_hears(gathering: AgentGathering, joined: AgentProcess) -> None:
    assert joined.agent.standing.bound_until > gathering.world.now + LEASE_SECONDS - 1.5
    gathering.world.run(20.0)
    assert joined.agent.standing.bound_until > gathering.world.now + LEASE_SECONDS - 1.5


def test_a_silent_host_is_lost(gathering: AgentGathering, host: AgentProcess, joined: AgentProcess) -> None:
    host.stop()
    gathering.world.run(HOST_SILENT_SECONDS - 1.5)
    assert joined.agent.losses == 0
    gathering.world.run(2.0)
    assert joined.agent.lost is not None
    assert "it was silent for 10 s" in joined.agent.lost


def test_a_connection_that_ends_is_a_loss_at_once(
    gathering: AgentGathering, host: AgentProcess, joined: AgentProcess
) -> None:
    host.kill()
    gathering.world.run(0.1)
    assert joined.agent.lost is not None
    assert "Connection reset by peer" in joined.agent.lost


def test_a_host_that_has_finished_is_no_loss(
    gathering: AgentGathering, host: AgentProcess, joined: AgentProcess
) -> None:
    host.close()
    gathering.world.run(0.1)
    assert (joined.agent.lost, joined.agent.ended) == (None, "its workers are done")


def test_after_a_loss_it_tells_of_its_past(gathering: AgentGathering, host: AgentProcess, joined: AgentProcess) -> None:
    settled = joined.agent.standing.settled
    assert settled is not None
    assert len(settled.nodes) == 2
    host.kill()
    gathering.world.run(0.2)
    elector = joined.agent.part
    assert isinstance(elector, Elector)
    join = elector.joiner.membership.application(application("B"))
    assert (join.settled, join.proposed) == (settled, None)
    assert join.port == joined.agent.reach.port
    assert join.bound is not None
    assert LEASE_SECONDS - 1.5 < join.bound <= LEASE_SECONDS


def test_a_fresh_one_has_no_past(gathering: AgentGathering) -> None:
    process = gathering.start("m0")
    gathering.world.run(0.3)
    elector = process.agent.part
    assert isinstance(elector, Elector)
    join = elector.joiner.membership.application(application("B"))
    assert (join.settled, join.proposed, join.bound) == (None, None, None)


def test_it_tells_its_host_of_other_sessions(
    joined: AgentProcess, gathering: AgentGathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    joiner = part(joined)
    sent: list[object] = []
    monkeypatch.setattr(Membership, "send", lambda _, frame: sent.append(frame))
    current = joiner.membership.current
    assert current is not None
    other = Offer(
        job="job",
        session=member("T"),
        host=member("A"),
        addresses=("10.0.0.9",),
        port=4000,
        world_size=3,
        joined=2,
        state="sealed",
        kind="agents",
    )
    now = gathering.world.now + 5.0
    for message in (other, other, current.offer):
        joiner.heard(message, Source(interface="eth0"), now)
    assert sent == [Sighting(offer=other)]
    joiner.heard(other, Source(interface="eth0"), now + 1.0)
    assert len(sent) == 2
