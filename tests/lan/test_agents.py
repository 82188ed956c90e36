"""Agents in the simulated network: the host dies, the network parts and heals, others come late or finish."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mingle.agents.quorum import Nodes
from mingle.election.electing import Elector
from mingle.errors import ConflictError, DiscoveryTimeoutError
from tests.lan.agents import AgentGathering, AgentProcess

SEEDS = range(5)
NOTICED_SECONDS = 10.0
"""After so long without a word a host is known to be lost."""


def running(gathering: AgentGathering, count: int) -> list[AgentProcess]:
    """So many agents, in one session for a while."""
    agents = gathering.everybody(count)
    gathering.run_until_together(agents, 15.0)
    gathering.world.run(3.0)
    return agents


def without(agents: Sequence[AgentProcess], *gone: AgentProcess) -> list[AgentProcess]:
    return [agent for agent in agents if agent not in gone]


@pytest.mark.parametrize("seed", SEEDS)
def test_all_that_start_come_together(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 4))
    agents = gathering.everybody(4)
    gathering.run_until_together(agents, 5.0)
    assert {agent.agent.generation for agent in agents} == {0}
    assert not any(agent.notices for agent in agents)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_survivors_of_a_killed_host_go_on_at_once_and_it_comes_back(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    host.kill()
    rest = without(agents, host)
    gathering.world.run(2.5)
    assert gathering.together(rest)
    assert {agent.agent.generation for agent in rest} == {1}
    gathering.run_until_together([*rest, gathering.start(host.machine.name)], 3.0)
    assert {agent.agent.losses for agent in rest} == {1}


@pytest.mark.parametrize("seed", SEEDS)
def test_one_of_two_goes_on_when_the_host_is_proved_dead(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 2))
    agents = running(gathering, 2)
    host = gathering.host_of(agents)
    host.kill()
    gathering.world.run(2.5)
    assert without(agents, host)[0].hosted is not None


def test_one_of_two_does_not_go_on_when_the_host_is_silent() -> None:
    gathering = AgentGathering(1, (1, 2), timeout=40.0)
    agents = running(gathering, 2)
    host = gathering.host_of(agents)
    (other,) = without(agents, host)
    gathering.network.cut(host.machine)
    gathering.world.run(60.0)
    assert host.hosted is not None, "half, and it breaks the tie"
    assert isinstance(other.failure, DiscoveryTimeoutError)
    assert "1 of 1 to 2 nodes were there" in str(other.failure)
    assert "a majority of the nodes that were in the job before (1 of 2)" in str(other.failure)
    assert "allow_minority=1" in str(other.failure)


def test_one_of_two_goes_on_when_the_user_says_so() -> None:
    gathering = AgentGathering(1, (1, 2), allow_minority=True)
    agents = running(gathering, 2)
    host = gathering.host_of(agents)
    (other,) = without(agents, host)
    gathering.network.cut(host.machine)
    gathering.world.run(NOTICED_SECONDS + gathering.last_call + 3.0)
    assert other.hosted is not None
    assert any("goes on with 1 node(s)" in notice for notice in other.notices)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_whose_cable_is_pulled_stops_and_the_others_go_on(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    gathering.network.cut(host.machine)
    rest = without(agents, host)
    gathering.world.run(NOTICED_SECONDS - 1.0)
    assert host.hosted is None, "it stops before the others begin"
    assert not any(agent.hosted for agent in rest)
    gathering.run_until_together(rest, 4.0)
    gathering.network.heal(host.machine)
    gathering.run_until_together(agents, 5.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stopped_host_finds_that_the_job_went_on(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    host.stop()
    gathering.world.run(NOTICED_SECONDS + 3.0)
    assert gathering.together(without(agents, host))
    host.cont()
    gathering.run_until_together(agents, 8.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gone", ["killed", "cut off"])
def test_the_loss_of_another_disturbs_nobody(seed: int, gone: str) -> None:
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    other = without(agents, gathering.host_of(agents))[0]
    rest = without(agents, other)
    if gone == "killed":
        other.kill()
    else:
        gathering.network.cut(other.machine)
    gathering.world.run(30.0)
    assert gathering.together(rest)
    assert {agent.agent.losses for agent in rest} == {0}
    host = gathering.host_of(rest).hosted
    assert host is not None
    assert host.roll is not None
    assert len(host.roll.settled.nodes) == 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("count", "with_host", "goes_on"),
    [(4, 2, "host"), (3, 2, "host"), (3, 1, "others"), (5, 2, "others"), (5, 3, "host")],
    ids=["2+2", "2+1", "1+2", "2+3", "3+2"],
)
def test_of_two_parts_one_goes_on(seed: int, count: int, with_host: int, goes_on: str) -> None:
    gathering = AgentGathering(seed, (2, count))
    agents = running(gathering, count)
    host = gathering.host_of(agents)
    left = [host, *without(agents, host)[: with_host - 1]]
    right = without(agents, *left)
    machines = [agent.machine for agent in left], [agent.machine for agent in right]
    gathering.split(*machines)
    gathering.world.run(25.0)
    winners, losers = (left, right) if goes_on == "host" else (right, left)
    assert gathering.together(winners)
    assert not any(agent.outcome for agent in losers)
    gathering.split(*machines, parted=False)
    gathering.run_until_together(agents, 15.0)
    gathering.world.run(30.0)
    assert gathering.together(agents)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_began_in_two_halves_becomes_one(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 4))
    agents = [gathering.start(f"m{number}") for number in range(4)]
    machines = [agent.machine for agent in agents]
    gathering.split(machines[:2], machines[2:])
    gathering.world.run(gathering.last_call + 4.0)
    assert gathering.together(agents[:2])
    assert gathering.together(agents[2:])
    warned = [notice for agent in agents for notice in agent.notices if "could start it a second time" in notice]
    assert len(warned) == 2
    gathering.split(machines[:2], machines[2:], parted=False)
    gathering.run_until_together(agents, 10.0)
    assert sum(agent.agent.losses for agent in agents) == 2, "one half stays where it is"


@pytest.mark.parametrize("seed", SEEDS)
def test_late_agents_are_admitted_until_the_job_is_full(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 3), timeout=20.0)
    agents = [gathering.start("m0")]
    gathering.run_until_together(agents, gathering.last_call + 3.0)
    for number in (1, 2):
        agents.append(gathering.start(f"m{number}"))
        gathering.run_until_together(agents, 2.0)
    assert {agent.agent.losses for agent in agents} == {0}
    surplus = gathering.start("m3")
    gathering.world.run(10.0)
    assert surplus.outcome is None
    assert surplus.failure is None, "it waits"
    agents.pop().close()
    gathering.run_until_together([*agents, surplus], 5.0)
    too_many = gathering.start("m4")
    gathering.world.run(25.0)
    assert isinstance(too_many.failure, ConflictError)
    assert "runs already" in str(too_many.failure)


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_finishes_triggers_no_election(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 4))
    agents = running(gathering, 4)
    host = gathering.host_of(agents)
    one, two, three = without(agents, host)
    session = host.outcome
    for finished in (one, two):
        finished.close()
        gathering.world.run(20.0)
        assert host.outcome == session
    assert {each.agent.losses for each in (host, three)} == {0}
    host.close()
    gathering.world.run(20.0)
    assert three.agent.ended == "its workers are done"
    assert three.outcome is None
    assert three.agent.part is None
    assert three.agent.losses == 0


@pytest.mark.parametrize("loss_is_noticed_first", [False, True])
def test_who_rests_elects_nobody(loss_is_noticed_first: bool) -> None:
    gathering = AgentGathering(3, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    if loss_is_noticed_first:
        host.kill()
        gathering.world.run(0.01)
        assert all(isinstance(agent.agent.part, Elector) for agent in without(agents, host))
    for agent in without(agents, host):
        agent.agent.rest()
    host.kill()
    gathering.world.run(20.0)
    assert all(agent.agent.losses == 1 and agent.agent.part is None for agent in without(agents, host))


def test_too_few_nodes_say_who_was_there() -> None:
    gathering = AgentGathering(2, (3, 4), timeout=15.0)
    agents = gathering.everybody(2)
    gathering.world.run(25.0)
    for agent in agents:
        assert isinstance(agent.failure, DiscoveryTimeoutError)
        assert "2 of 3 to 4 nodes were there" in str(agent.failure)
        assert "host m0" in str(agent.failure)
        assert "host m1" in str(agent.failure)


def test_other_numbers_of_nodes_are_refused() -> None:
    gathering = AgentGathering(2, (2, 3))
    agents = running(gathering, 3)
    agents.pop().close()
    other = gathering.start("m9", nodes=Nodes(minimum=1, maximum=3))
    gathering.world.run(5.0)
    assert isinstance(other.failure, ConflictError)
    assert "--nnodes=2:3, the newcomer with --nnodes=1:3" in str(other.failure)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_secret_and_on_a_bad_network(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 4), secret=b"secret")
    gathering.lan.loss = 0.3
    agents = running(gathering, 4)
    host = gathering.host_of(agents)
    host.kill()
    gathering.world.run(6.0)
    assert gathering.together(without(agents, host))
