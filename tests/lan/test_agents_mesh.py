"""Agents in the simulated network whose session is to be a mesh: who can't reach a member gets no seat."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from mingle.elastic.leases import LEASE_SECONDS
from mingle.errors import ConnectivityError
from mingle.protocol.member import LEFT_OUT_SECONDS
from mingle.protocol.participant import TryingPaths
from mingle.protocol.session.network_choice import NetworkChoice
from tests.lan.agents import TIMEOUT_SECONDS, AgentGathering, AgentProcess
from tests.lan.meshes import AgentMeshInvariants, AgentMeshSchedule
from tests.lan.network import Barrier
from tests.lan.planting import Rule, always, expect_found
from tests.lan.process import Process
from tests.lan.seeds import failures
from tests.lan.strikes import mark
from tests.support.levels import batches, repeated

pytestmark = pytest.mark.soak
SEEDS = repeated(2, soak=25)
FORMED_SECONDS = 25.0
"""By when the others are in a session: the proofs of a mesh that does not hold take 8 s."""
AGAIN_SECONDS = LEFT_OUT_SECONDS + 15.0


def others(agents: Sequence[AgentProcess], *left_out: AgentProcess) -> list[AgentProcess]:
    return [agent for agent in agents if agent not in left_out]


def in_session(agents: Sequence[AgentProcess]) -> list[AgentProcess]:
    return [agent for agent in agents if agent.outcome is not None]


def dials(agent: AgentProcess) -> bool:
    """Return whether an agent was asked to confirm, and has not done it yet."""
    part = agent.joiner.part if agent.core is not None else None
    return part is not None and isinstance(part.state, TryingPaths)


def running(
    seed: int, nodes: tuple[int, int], count: int, *, timeout: float = TIMEOUT_SECONDS
) -> tuple[AgentGathering, list[AgentProcess]]:
    """Return a job whose session is a mesh, and its agents, so many, which are in the session."""
    gathering = AgentGathering(seed, nodes, mesh="on", timeout=timeout)
    agents = gathering.everybody(count)
    gathering.run_until_together(agents, 15.0)
    return gathering, agents


def start(gathering: AgentGathering, count: int) -> list[AgentProcess]:
    """Start agents; the first has the lowest member id, so that it hosts."""
    agents = [gathering.start(f"m{number}") for number in range(count)]
    return sorted(agents, key=lambda agent: agent.identity.member)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_session_forms_as_a_mesh(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 4), mesh="on")
    agents = gathering.everybody(4)
    gathering.run_until_together(agents, 5.0)
    assert not any(agent.notices for agent in agents)


@pytest.mark.parametrize("barrier", ["drop", "reset"])
@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_of_two_members_that_do_not_reach_each_other_gets_no_seat(
    seed: int, barrier: Barrier, one_way: bool
) -> None:
    gathering = AgentGathering(seed, (2, 4), mesh="on")
    _, one, other, _ = agents = start(gathering, 4)
    gathering.split([one.machine], [other.machine], barrier=barrier, one_way=one_way)
    gathering.world.run(FORMED_SECONDS, until=lambda: len(in_session(agents)) == 3)
    inside = in_session(agents)
    assert len(inside) == 3
    assert gathering.together(inside)
    (left_out,) = others(agents, *inside)
    assert left_out in (one, other)
    gathering.world.run(3.0)
    blamed = other if left_out is one else one
    assert any("this node gets no place" in notice and blamed.machine.name in notice for notice in left_out.notices)
    for agent in inside:
        assert any(
            "gets no place" in notice and one.machine.name in notice and other.machine.name in notice
            for notice in agent.notices
        ), (agent.name, agent.notices)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_was_left_out_comes_in_once_the_network_is_mended(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 4), mesh="on")
    _, one, other, _ = agents = start(gathering, 4)
    gathering.split([one.machine], [other.machine])
    gathering.world.run(FORMED_SECONDS, until=lambda: len(in_session(agents)) == 3)
    rounds_before = [agent.agent.losses for agent in agents]
    gathering.world.run(LEFT_OUT_SECONDS * 1.5)
    assert len(in_session(agents)) == 3
    gathering.split([one.machine], [other.machine], parted=False)
    gathering.run_until_together(agents, AGAIN_SECONDS)
    assert [agent.agent.losses for agent in agents] == rounds_before


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spare_takes_the_seat_of_a_node_that_does_not_reach_all(seed: int) -> None:
    gathering = AgentGathering(seed, (3, 3), mesh="on", timeout=120.0)
    host, one, other, spare = agents = start(gathering, 4)
    gathering.split([one.machine], [other.machine])
    gathering.world.run(60.0, until=lambda: len(in_session(agents)) == 3)
    inside = in_session(agents)
    assert len(inside) == 3
    assert gathering.together(inside)
    assert spare in inside
    assert host in inside


@pytest.mark.parametrize("seed", SEEDS)
def test_a_late_node_that_does_not_reach_a_member_gets_no_seat(seed: int) -> None:
    gathering, agents = running(seed, (2, 3), 2)
    host = gathering.host_of(agents)
    (member,) = others(agents, host)
    gathering.world.run(3.0)
    late = gathering.start("late")
    gathering.split([late.machine], [member.machine])
    gathering.world.run(20.0)
    assert late.outcome is None
    assert gathering.together(agents)
    assert any("this node gets no place" in notice and member.machine.name in notice for notice in late.notices)
    for agent in agents:
        assert any("late" in notice and member.machine.name in notice for notice in agent.notices)
    gathering.split([late.machine], [member.machine], parted=False)
    gathering.run_until_together([*agents, late], AGAIN_SECONDS)
    assert {agent.agent.losses for agent in agents} == {0}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_stays_left_out_fails_at_its_deadline_and_names_the_pair(seed: int) -> None:
    gathering, agents = running(seed, (2, 3), 2, timeout=60.0)
    (member,) = others(agents, gathering.host_of(agents))
    late = gathering.start("late")
    gathering.split([late.machine], [member.machine])
    gathering.world.run(70.0, until=lambda: late.failure is not None)
    assert isinstance(late.failure, ConnectivityError)
    assert member.machine.name in str(late.failure)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_node_whose_time_is_up_last_names_the_pair_as_well(seed: int) -> None:
    """A job of fixed size waits for the node that is left out, and its host gives up first."""
    gathering = AgentGathering(seed, (3, 3), mesh="on", timeout=40.0)
    host = gathering.start("m0")
    gathering.world.run(2.0)
    one, other = gathering.start("m1"), gathering.start("m2")
    gathering.split([one.machine], [other.machine])
    gathering.world.run(50.0, until=lambda: None not in (host.failure, one.failure, other.failure))
    for agent in (host, one, other):
        assert agent.failure is not None
        text, cause = str(agent.failure), str(agent.failure.cause)
        assert f"host {one.machine.name} " in text, text
        assert f"host {other.machine.name} " in text, text
        assert "not started" not in cause, text
        assert "heard but not joined" not in cause, text


@pytest.mark.parametrize("stopped_for", [3.0, 8.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_that_is_stopped_is_no_broken_path(seed: int, stopped_for: float) -> None:
    gathering = AgentGathering(seed, (3, 3), mesh="on")
    agents = start(gathering, 3)
    victim = agents[1 + seed % 2]
    assert gathering.world.run(15.0, until=lambda: dials(victim))
    victim.stop()
    gathering.world.after(stopped_for, victim.cont)
    gathering.run_until_together(agents, stopped_for + 10.0)
    assert not any("gets no place" in notice for agent in agents for notice in agent.notices)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_warn_the_session_forms_all_the_same(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 3), mesh="warn")
    host, one, other = agents = start(gathering, 3)
    gathering.split([one.machine], [other.machine])
    gathering.run_until_together(agents, FORMED_SECONDS)
    assert any(one.machine.name in text and other.machine.name in text for text in host.notices)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_latecomer_waits_no_longer_for_a_member_that_is_lost(seed: int) -> None:
    """The member is stopped when the latecomer dials it, and then it is killed."""
    gathering, agents = running(seed, (2, 4), 3)
    host = gathering.host_of(agents)
    member, rest = others(agents, host)
    late = gathering.start("late")
    member.stop()
    gathering.world.run(5.0)
    assert late.outcome is None
    gathering.run_until_together([host, rest, late], LEASE_SECONDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_machine_that_has_failed_costs_the_one_in_its_place_no_seat(seed: int) -> None:
    """The host still counts the failed one for 8 s, which is longer than the latecomer dials it."""
    gathering, agents = running(seed, (2, 4), 3)
    gathering.world.run(3.0)
    host = gathering.host_of(agents)
    failed, member = others(agents, host)
    gathering.network.cut(failed.machine)
    failed.kill()
    late = gathering.start("late")
    gathering.run_until_together([host, member, late], 15.0)
    assert not any("gets no place" in notice for agent in (host, member, late) for notice in agent.notices)


@pytest.mark.parametrize("gap", [0.0, 5.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_latecomer_waits_for_no_other_latecomer(seed: int, gap: float) -> None:
    gathering, agents = running(seed, (2, 5), 3)
    stopped = gathering.start("stopped")
    assert gathering.world.run(15.0, until=lambda: dials(stopped))
    stopped.stop()
    gathering.world.run(gap)
    late = gathering.start("late")
    gathering.run_until_together([*agents, late], 8.0)
    stopped.cont()
    gathering.run_until_together([*agents, late, stopped], 10.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_latecomer_that_was_overtaken_by_one_that_it_does_not_reach_gets_no_seat(seed: int) -> None:
    """It was asked first, so only the other one has dialed it, in vain, before either was a member."""
    gathering, first = running(seed, (2, 4), 2)
    gathering.world.run(3.0)
    slow = gathering.start("slow")
    assert gathering.world.run(15.0, until=lambda: dials(slow))
    slow.stop()
    quick = gathering.start("quick")
    gathering.split([slow.machine], [quick.machine])
    gathering.run_until_together([*first, quick], 10.0)
    slow.cont()
    gathering.world.run(10.0)
    assert slow.outcome is None
    assert any("this node gets no place" in notice and "quick" in notice for notice in slow.notices)


def test_a_mistake_about_pairs_of_latecomers_is_found() -> None:
    overtaken = functools.partial(test_a_latecomer_that_was_overtaken_by_one_that_it_does_not_reach_gets_no_seat, 0)
    overtaken()
    mistake = Rule(NetworkChoice, "lacks_members", always(False))
    expect_found("admit_a_latecomer_that_lacks_a_member", mistake, run=overtaken)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_latecomer_that_joined_over_another_network_is_dialed_all_the_same(seed: int) -> None:
    """It has proved no path on the network of the job yet when the other one is told whom to dial."""
    gathering = AgentGathering(seed, (2, 4), mesh="on")
    world, network, lan = gathering.world, gathering.network, gathering.lan
    AgentMeshInvariants(world)
    for number, name in enumerate(("m0", "m1", "slow", "quick"), 1):
        network.machine(name)
        network.plug(name, "eth1", f"10.9.0.{number}", "second")
    first = gathering.everybody(2)
    gathering.run_until_together(first, 15.0)
    world.run(3.0)
    slow = gathering.start("slow")
    gathering.split([slow.machine], [agent.machine for agent in first])
    assert world.run(5.0, until=lambda: slow.core is not None and slow.agent.stage() == "joining")
    gathering.split([slow.machine], [agent.machine for agent in first], parted=False)
    assert world.run(5.0, until=lambda: dials(slow))
    slow.stop()
    quick = gathering.start("quick")
    network.part(lan, slow.machine, quick.machine)
    gathering.run_until_together([*first, quick], 5.0)
    slow.cont()
    world.run(10.0)
    assert slow.outcome is None
    assert any("this node gets no place" in notice and "quick" in notice for notice in slow.notices)


@pytest.mark.parametrize("count", [8, 24])
def test_many_latecomers_at_once_dial_each_other_once(count: int) -> None:
    """Each is asked to dial those that are there or wait already, and nobody again because another one was quicker."""
    gathering = AgentGathering(3, (1, count + 2), mesh="on", last_call=1.0)
    first = gathering.everybody(2)
    gathering.run_until_together(first, 15.0)
    asked = []
    gathering.world.before_write.append(lambda _sender, _receiver, data: asked.extend(data.split(mark("confirm"))[1:]))
    agents = first + [gathering.start(f"late{number}") for number in range(count)]
    gathering.run_until_together(agents, 10.0)
    assert count <= len(asked) < 1.5 * count


@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_in_the_place_of_a_killed_one_dials_for_its_machine(seed: int) -> None:
    """The killed one still counts: nobody has heard of its end."""
    gathering, agents = running(seed, (2, 4), 3)
    host = gathering.host_of(agents)
    killed, member = others(agents, host)
    gathering.network.cut(killed.machine)
    killed.kill()
    gathering.split([killed.machine], [member.machine])
    gathering.network.heal(killed.machine)
    late = gathering.start(killed.machine.name)
    gathering.world.run(20.0)
    assert late.outcome is None
    assert any("this node gets no place" in notice and member.machine.name in notice for notice in late.notices)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_that_reaches_nobody_gives_way_to_nodes_that_reach_each_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The firewalls of the others admit their own subnet only; the host takes all calls."""
    gathering = AgentGathering(seed, (3, 5), mesh="on")
    host, *_ = agents = start(gathering, 5)
    genuine = Process._arrive

    def arrive(process: Process, conn: int, address: str, port: int) -> None:
        route = process.network.route(process.machine, address)
        if process.machine is not host.machine or route is None or route.far.machine is process.machine:
            genuine(process, conn, address, port)

    monkeypatch.setattr(Process, "_arrive", arrive)
    gathering.world.run(60.0, until=lambda: len(in_session(agents)) == 4)
    inside = in_session(agents)
    assert len(inside) == 4
    assert host not in inside
    assert gathering.together(inside)
    assert any("this node gets no place" in notice for notice in host.notices)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_stays_left_out_is_no_flood_of_messages(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 6), mesh="on")
    agents = start(gathering, 6)
    member = agents[1]
    for other in agents[2:]:
        gathering.split([member.machine], [other.machine])
    gathering.world.run(120.0)
    assert len(in_session(agents)) == 5
    assert max(len(agent.notices) for agent in agents) < 10


# --- bad days -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", batches(4, 40, soak=2_000, size=12))
def test_random_schedules(seeds: range) -> None:
    assert list(failures(AgentMeshSchedule, seeds)) == []
