"""One agent from generation to generation: what it does when its session is no more."""

from __future__ import annotations

import pytest

from mingle.agents.generations import AgentCandidacy
from mingle.agents.hosting import AgentHost
from mingle.agents.joining import AgentJoiner
from mingle.election.electing import Elector
from mingle.rules.machine import Identity
from mingle.wire.datagrams import Offer
from mingle.wire.frames import Who
from tests.lan.agents import AgentGathering
from tests.views import member

IDENTITY = Identity(
    job="job", attempt="", member=member("M"), rank=None, world_size=4, node="M", who=Who(), kind="agents"
)


def offer(host: str, *, generation: int = 0, joined: int = 1, state: str = "open", kind: str = "agents") -> Offer:
    return Offer(
        job="job",
        session=member("T"),
        host=member(host),
        addresses=("10.0.0.9",),
        port=4000,
        world_size=4,
        joined=joined,
        state=state,  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        generation=generation,
        assigned=True,
    )


@pytest.mark.parametrize(
    ("other", "competes"),
    [
        (offer("A"), True),
        (offer("A", state="sealed", joined=3), True),
        (offer("A", state="sealed", joined=4), False),
        (offer("M"), False),
        (offer("A", kind="ranks"), False),
    ],
)
def test_every_session_that_could_be_joined_competes(other: Offer, competes: bool) -> None:
    assert AgentCandidacy(IDENTITY, lambda: 1).competes(other) is competes


@pytest.mark.parametrize(
    ("other", "stands", "loses"),
    [
        (offer("A", generation=1), False, True),
        (offer("Z", generation=1), False, False),
        (offer("Z", generation=2), False, True),
        (offer("A", generation=0), False, False),
        (offer("Z", generation=0, state="sealed"), False, True),
        (offer("Z", generation=1), True, True),
    ],
)
def test_sealed_comes_before_open_then_the_higher_generation_then_the_lower_id(
    other: Offer, stands: bool, loses: bool
) -> None:
    candidacy = AgentCandidacy(IDENTITY, lambda: 1)
    assert candidacy.loses_to(other, stands=stands, now=0.0) is loses
    candidacy.stand_against(other.host, 0.0)
    assert not candidacy.loses_to(other, stands=stands, now=1.0)


def test_from_seeking_to_a_session_and_on_to_the_next() -> None:
    gathering = AgentGathering(5, (1, 2))
    one, other = agents = [gathering.start("m0"), gathering.start("m1")]
    gathering.world.run(0.1)
    assert all(isinstance(each.agent.part, Elector) for each in agents)
    gathering.run_until_together(agents, 12.0)
    assert {type(each.agent.part) for each in agents} == {AgentHost, AgentJoiner}
    host = gathering.host_of(agents)
    rest = other if host is one else one
    port, identity = rest.agent.reach.port, rest.identity.member
    assert (rest.agent.stage(), rest.agent.losses, rest.agent.lost) == ("formed", 0, None)
    host.kill()
    gathering.world.run(0.01)
    assert rest.outcome is None
    assert isinstance(rest.agent.part, Elector)
    gathering.world.run(3.0)
    assert rest.hosted is not None
    assert rest.hosted.offer().generation == 1
    assert (rest.agent.reach.port, rest.hosted.identity.member) == (port, identity)
    assert rest.agent.dead.keys() == {host.identity.member}
    assert rest.agent.losses == 1


def test_after_a_failure_it_rests_until_it_is_asked_again() -> None:
    gathering = AgentGathering(5, (2, 2), timeout=5.0)
    process = gathering.start("m0")
    gathering.world.run(1.0)
    agent = process.agent
    now = gathering.world.now
    agent.give_up(process.facts(), now)
    assert agent.failure is not None
    assert agent.part is None
    assert (agent.stage(), agent.snapshot().phase, agent.calling(), agent.next_timer()) == (
        "at rest",
        "at rest",
        None,
        None,
    )
    agent.gather(now)
    assert agent.failure is None
    assert isinstance(agent.part, Elector)
    assert not agent.deadline_passed(now + 4.9)
    assert agent.deadline_passed(now + 5.0)


def test_a_closed_one_looks_for_nobody() -> None:
    gathering = AgentGathering(5, (2, 2))
    process = gathering.start("m0")
    gathering.world.run(1.0)
    agent = process.agent
    agent.close("done")
    agent.close("done")
    agent.gather(gathering.world.now)
    assert agent.part is None
    assert agent.closed


def test_what_an_earlier_part_asked_for_is_none_of_the_present_one() -> None:
    gathering = AgentGathering(5, (1, 2))
    agents = gathering.everybody(2)
    gathering.run_until_together(agents, 12.0)
    host = gathering.host_of(agents)
    rest = next(each for each in agents if each is not host)
    old_part, old_host = rest.agent.part, host.hosted
    assert old_host is not None
    host.kill()
    gathering.world.run(0.01)
    now = gathering.world.now
    rest.agent.store_proved(old_part, 1, now)
    rest.agent.store_unreachable(old_part, 1, "no answer", now)
    rest.agent.store_opened(old_host, 1, 5000, "token", now)
    assert isinstance(rest.agent.part, Elector)
    assert rest.outcome is None
