"""Agents in the simulated network: the host dies, the network parts and heals, others come late or finish."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mingle.elastic.host import STORE_GONE_SECONDS, ElasticHost
from mingle.elastic.leases import LEASE_SECONDS
from mingle.elastic.member import ElasticMember
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Nodes
from mingle.errors import ConflictError, DiscoveryTimeoutError
from mingle.protocol.events import Address, AddressesChanged
from mingle.protocol.explain.ladder import waiting
from mingle.protocol.participant import AwaitingGo, AwaitingSeal, ProvingStore
from mingle.protocol.session.applications import Applications, Verdict, rank_taken
from mingle.protocol.session.phases import Confirming, Sealing
from mingle.protocol.session.phases import State as SessionState
from mingle.protocol.session.seats import Seated, Seats
from mingle.wire import frames
from mingle.wire.datagrams import MAX_ADDRESSES
from tests.lan.agents import STARTED_AT, AgentGathering, AgentProcess
from tests.lan.network import Barrier
from tests.lan.planting import Act, Rule, Seam, always, expect_found
from tests.support.levels import repeated

SEEDS = repeated(3, soak=3)
NOTICED_SECONDS = 10.5
"""After so long without a word a host is known to be lost."""
BARRIERS: tuple[Barrier, ...] = ("drop", "reset", "icmp")


def running(gathering: AgentGathering, count: int) -> list[AgentProcess]:
    """So many agents, in one session for a while."""
    agents = gathering.everybody(count)
    gathering.run_until_together(agents, 15.0)
    gathering.world.run(3.0)
    return agents


def without(agents: Sequence[AgentProcess], *gone: AgentProcess) -> list[AgentProcess]:
    return [agent for agent in agents if agent not in gone]


@pytest.mark.parametrize("seed", SEEDS)
def test_agents_that_start_gather_in_one_session(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 4))
    agents = gathering.everybody(4)
    gathering.run_until_together(agents, 5.0)
    (generation,) = {agent.agent.memory.generation for agent in agents}
    assert STARTED_AT < generation <= STARTED_AT + gathering.world.now
    assert not any(agent.notices for agent in agents)


@pytest.mark.parametrize("nodes", [(2, 4), (4, 4)])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_no_other_can_call_keeps_nobody_out(nodes: tuple[int, int], seed: int) -> None:
    """Its id is the lowest, so it hosts first."""
    gathering = AgentGathering(seed, nodes)
    agents = gathering.everybody(4, within=0.0)
    min(agents, key=lambda agent: agent.identity.member).machine.takes_calls = False
    gathering.run_until_together(agents, 20.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_survivors_of_a_killed_host_go_on_at_once_and_it_comes_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.lan.agents.UNREAD", 0.0)
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    first = host.agent.generation
    host.kill()
    rest = without(agents, host)
    gathering.world.run(2.5)
    assert gathering.together(rest)
    (second,) = {agent.agent.memory.generation for agent in rest}
    assert second > first
    gathering.run_until_together([*rest, gathering.start(host.machine.name)], 3.0)
    assert {agent.agent.losses for agent in rest} == {1}


# --- the order of sessions --------------------------------------------------------------------------------------------


def generations_over_restarts(seed: int, losses: int) -> list[int]:
    """The numbers of the sessions of a job that is killed and started again as a whole, and loses its host at times."""
    gathering, found = AgentGathering(seed, (2, 3)), []
    for start in range(6):
        agents = running(gathering, 3)
        found.append(agents[0].agent.generation)
        for _ in range(losses if start in (2, 4) else 0):
            host = gathering.host_of(agents)
            host.kill()
            agents = [*without(agents, host), gathering.start(host.machine.name, at=1.0)]
            gathering.run_until_together(agents, 30.0)
            found.append(agents[0].agent.generation)
        for agent in agents:
            agent.kill()
        gathering.world.run(0.5)
    return found


@pytest.mark.parametrize("losses", [0, 1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_session_sorts_after_the_earlier_ones_also_after_a_restart_of_all_agents(seed: int, losses: int) -> None:
    found = generations_over_restarts(seed, losses)
    assert len(found) == 6 + 2 * losses
    assert sorted(set(found)) == found
    assert {len(f"{number:010d}") for number in found} == {10}


def test_numbers_that_follow_no_clock_begin_again_with_each_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "clock", 0)
    with pytest.raises(AssertionError, match="sorts before an earlier one"):
        generations_over_restarts(0, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_clocks_that_are_set_back_while_the_job_runs_change_no_order(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    first = host.agent.generation
    gathering.clock_errors = {agent.machine.name: -3600.0 for agent in agents}
    host.kill()
    gathering.world.run(0.5)
    rest = without(agents, host)
    gathering.run_until_together(rest, NOTICED_SECONDS + 6.0)
    assert gathering.host_of(rest).agent.generation == first + 1


def clock_warnings(agents: Sequence[AgentProcess]) -> list[str]:
    return [notice for agent in agents for notice in agent.notices if "the clock of host" in notice]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("error", [-3700.0, -50.0, 0.0, 50.0, 3700.0])
def test_clocks_that_are_far_apart_are_a_warning_that_names_the_nodes(seed: int, error: float) -> None:
    gathering = AgentGathering(seed, (2, 3))
    gathering.clock_errors = {"m1": error}
    agents = running(gathering, 3)
    warned = clock_warnings(agents)
    assert len(warned) == (abs(error) > 60)
    for text in warned:
        ahead, behind = re.findall(r"host (m\d) \(", text)
        assert (ahead if error > 0 else behind) == "m1"
        assert re.search(r" is 1:01:(39|40|41) ahead of ", text)
        assert "fix: set the clocks of all nodes by NTP" in text


@pytest.mark.parametrize("seed", SEEDS)
def test_the_clock_of_a_latecomer_changes_no_number_before_the_next_session(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 3))
    gathering.clock_errors = {"m2": 3700.0}
    agents = running(gathering, 2)
    host = gathering.host_of(agents)
    first = host.agent.generation
    assert not clock_warnings(agents)
    agents.append(gathering.start("m2"))
    gathering.run_until_together(agents, 5.0)
    gathering.world.run(1.0)
    assert {agent.agent.memory.generation for agent in agents} == {first}
    assert len(clock_warnings(agents)) == 1
    host.kill()
    gathering.world.run(0.5)
    rest = without(agents, host)
    gathering.run_until_together(rest, NOTICED_SECONDS + 6.0)
    second = gathering.host_of(rest).agent.generation
    assert second >= first + 3600
    for agent in rest:
        agent.kill()
    rest = [gathering.start(agent.machine.name) for agent in rest]
    gathering.run_until_together(rest, NOTICED_SECONDS + 6.0)
    assert gathering.host_of(rest).agent.generation > second


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clock_that_was_a_year_ahead_spoils_no_number_once_it_is_right(seed: int) -> None:
    gathering = AgentGathering(seed, (3, 3))
    gathering.invariants.clocks_are_right = False
    gathering.clock_errors = {"m2": 365 * 86_400.0}
    agents = running(gathering, 3)
    found = [gathering.host_of(agents).agent.generation]
    gathering.clock_errors = {}
    for _ in range(3):
        host = gathering.host_of(agents)
        host.kill()
        agents = [*without(agents, host), gathering.start(host.machine.name, at=1.0)]
        gathering.run_until_together(agents, 40.0)
        found.append(gathering.host_of(agents).agent.generation)
    first, *rest = found
    assert first >= STARTED_AT + 365 * 86_400
    assert sorted(set(rest)) == rest
    assert rest[-1] < STARTED_AT + gathering.world.now


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2)])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_of_two_waits_for_the_host_that_was_killed_to_be_started_again(nodes: tuple[int, int], seed: int) -> None:
    gathering = AgentGathering(seed, nodes)
    agents = running(gathering, 2)
    host = gathering.host_of(agents)
    host.kill()
    (other,) = without(agents, host)
    gathering.world.run(60.0)
    assert other.hosted is None
    gathering.run_until_together([other, gathering.start(host.machine.name)], 5.0)


def test_one_of_two_that_waits_in_vain_says_for_whom_and_what_would_help() -> None:
    gathering = AgentGathering(1, (1, 2), timeout=40.0)
    agents = running(gathering, 2)
    host = gathering.host_of(agents)
    (other,) = without(agents, host)
    gathering.network.cut(host.machine)
    gathering.world.run(60.0)
    assert host.hosted is not None, "one keeps a session of 1:2"
    assert isinstance(other.failure, DiscoveryTimeoutError)
    text = str(other.failure)
    assert "1 of 1 to 2 nodes were there" in text
    assert "it takes 2 to begin, or 1 with --rdzv-conf allow_minority=1" in text
    assert f"missed: host {host.machine.name} (10.0.0." in text


def test_one_of_two_goes_on_when_the_user_says_so() -> None:
    gathering = AgentGathering(1, (1, 2), allow_minority=True)
    agents = running(gathering, 2)
    host = gathering.host_of(agents)
    (other,) = without(agents, host)
    gathering.network.cut(host.machine)
    gathering.world.run(NOTICED_SECONDS + gathering.policy.last_call + 3.0)
    assert other.hosted is not None
    assert any("starts with 1 of 2 nodes" in notice for notice in other.notices)
    gathering.network.heal(host.machine)
    gathering.run_until_together(agents, 15.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_whose_cable_is_pulled_stops_and_the_others_go_on(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    gathering.network.cut(host.machine)
    rest = without(agents, host)
    gathering.world.run(8.6)
    assert host.hosted is None, "it stops before the others begin"
    assert not any(agent.hosted for agent in rest)
    gathering.run_until_together(rest, 4.0)
    gathering.network.heal(host.machine)
    gathering.run_until_together(agents, 5.0)


@pytest.mark.parametrize("asleep", [False, True], ids=["stopped", "suspended"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_that_wakes_up_has_lost_its_session(seed: int, asleep: bool) -> None:
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    if asleep:
        host.suspend()
    else:
        host.stop()
    gathering.world.run(NOTICED_SECONDS + 3.0)
    assert gathering.together(without(agents, host))
    if asleep:
        host.resume()
    else:
        host.cont()
    assert host.hosted is None
    gathering.run_until_together(agents, 8.0)


@pytest.mark.parametrize("barrier", BARRIERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_member_that_wakes_up_is_bound_to_nothing_that_lay_in_its_buffer(seed: int, barrier: Barrier) -> None:
    """It was stopped for 22 s, the host was killed meanwhile, and the network is in two parts when it goes on."""
    gathering = AgentGathering(seed, (2, 4))
    agents = running(gathering, 4)
    host = gathering.host_of(agents)
    one, two, three = without(agents, host)
    one.stop()
    gathering.world.run(12.0)
    gathering.split([one.machine], [two.machine, three.machine], barrier=barrier)
    host.kill()
    back = gathering.start(host.machine.name, at=1.0)
    gathering.run_until_together([two, three, back], 15.0)
    one.cont()
    gathering.world.run(15.0)
    assert gathering.together([two, three, back])
    gathering.split([one.machine], [two.machine, three.machine], parted=False)
    gathering.run_until_together([one, two, three, back], 15.0)


def an_answer_that_comes_late(seed: int) -> None:
    """A member hears nothing any more, and TCP delivers its last answers to the host seconds later.

    The member is free 10 s after the last PING that it processed, and founds a session with the third agent. The
    answers renew the host's lease from the sending of those PINGs on, so the host has stopped by then.
    """
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    member, third = without(agents, host)
    gathering.split([host.machine], [third.machine])
    gathering.world.run(12.0)
    assert gathering.together([host, member])
    gathering.split([member.machine], [host.machine], one_way=True)
    gathering.world.run(1.2)
    gathering.split([host.machine], [member.machine], one_way=True)
    gathering.world.run(5.6)
    # The way heals for a moment, too short for anything that was lost to come again, and then one way only.
    gathering.split([host.machine], [member.machine], parted=False)
    gathering.world.run(0.005)
    gathering.split([host.machine], [member.machine], one_way=True)
    gathering.world.run(0.5)
    gathering.split([host.machine], [member.machine])
    gathering.run_until_together([member, third], 15.0)
    gathering.network.heal_all()
    gathering.run_until_together(agents, 15.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_that_comes_late_renews_no_lease(seed: int) -> None:
    an_answer_that_comes_late(seed)


def renew_from_now(genuine: Any, host: ElasticHost, caller: Any, said: frames.AnyFrame, now: float) -> None:
    genuine(host, caller, said, now)
    until = host.quorum.leases._until
    if caller.hello.member in until:
        until[caller.hello.member] = now + LEASE_SECONDS


@pytest.mark.parametrize("kind", [frames.Pong, object], ids=["an answer", "any frame"])
def test_a_lease_that_counts_from_the_reception_is_found(kind: type) -> None:
    def is_of_this_kind(_: ElasticHost, caller: Any, said: frames.AnyFrame, now: float) -> bool:
        return isinstance(said, kind)

    seam = Act(ElasticHost, "caller_said", renew_from_now, when=is_of_this_kind)
    run = functools.partial(an_answer_that_comes_late, 0)
    expect_found("count_a_lease_from_the_reception", seam, run=run, finding="two hosts hold")


@pytest.mark.parametrize("asleep", [False, True], ids=["stopped", "suspended"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_member_that_wakes_up_continues_no_session_that_replaced_it(seed: int, asleep: bool) -> None:
    """A new agent takes its place, the host is killed, and the two agents that are left cannot reach each other."""
    gathering = AgentGathering(seed, (1, 2))
    agents = running(gathering, 2)
    host = gathering.host_of(agents)
    (one,) = without(agents, host)
    stopped_at = gathering.world.now
    if asleep:
        one.suspend()
    else:
        one.stop()
    gathering.world.run(12.0)
    replacement = gathering.start("m9")
    gathering.run_until_together([host, replacement], 6.0)
    gathering.world.run(5.0)
    gathering.split([one.machine], [replacement.machine])
    host.kill()
    gathering.world.run(stopped_at + 22.0 - gathering.world.now)
    if asleep:
        one.resume()
    else:
        one.cont()
    gathering.world.run(30.0)
    assert one.hosted is None
    assert replacement.hosted is None, "it takes two agents to found a session of 1:2"
    gathering.split([one.machine], [replacement.machine], parted=False)
    gathering.run_until_together([one, replacement], 15.0)


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
    assert len(host.registrar.seats) == 2


@pytest.mark.soak
@pytest.mark.parametrize(
    "barrier", ["drop", *(pytest.param(each, marks=pytest.mark.slow) for each in ("reset", "icmp"))]
)
@pytest.mark.parametrize("seed", repeated(2, soak=100))
@pytest.mark.parametrize(
    ("nodes", "with_host", "goes_on"),
    [
        ((1, 2), 1, "host"),
        ((2, 2), 1, "host"),
        ((2, 3), 2, "host"),
        ((2, 3), 1, "others"),
        ((1, 3), 1, "others"),
        ((2, 4), 2, "host"),
        ((2, 5), 2, "others"),
        ((2, 5), 3, "host"),
    ],
    ids=["1+1 of 1:2", "1+1 of 2", "2+1", "1+2", "1+2 of 1:3", "2+2", "2+3", "3+2"],
)
def test_of_two_parts_one_goes_on(
    seed: int, nodes: tuple[int, int], with_host: int, goes_on: str, barrier: Barrier
) -> None:
    """A firewall cannot make a live process look dead, because no rule counts a member as dead."""
    gathering = AgentGathering(seed, nodes)
    agents = running(gathering, nodes[1])
    host = gathering.host_of(agents)
    left = [host, *without(agents, host)[: with_host - 1]]
    right = without(agents, *left)
    machines = [agent.machine for agent in left], [agent.machine for agent in right]
    gathering.split(*machines, barrier=barrier)
    gathering.world.run(30.0)
    winners, losers = (left, right) if goes_on == "host" else (right, left)
    assert gathering.together(winners)
    assert not any(agent.outcome for agent in losers)
    gathering.split(*machines, parted=False)
    gathering.run_until_together(agents, 15.0)
    gathering.world.run(30.0)
    assert gathering.together(agents)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_address_at_which_nobody_listens_proves_nothing(seed: int) -> None:
    """NAT: the host knows its members by the address of a gateway, which refuses what is not forwarded."""
    gathering = AgentGathering(seed, (1, 3))
    gateway = gathering.network.machine("gateway").nics[0].address
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    for other in without(agents, host):
        other.machine.nat = gateway
        other.kill()
    rest = [gathering.start(other.machine.name) for other in without(agents, host)]
    gathering.run_until_together([host, *rest], 60.0)
    host = gathering.host_of([host, *rest])
    right = without([*agents, *rest], *(each for each in [*agents, *rest] if not each.alive), host)
    gathering.split([host.machine], [agent.machine for agent in right])
    gathering.world.run(30.0)
    assert gathering.together(right)
    assert host.hosted is None


@pytest.mark.parametrize("seed", SEEDS)
def test_an_address_that_every_machine_has_proves_nothing(seed: int) -> None:
    """A bridge's address is the same on all machines, and none of them announces it: each has 14 addresses."""
    bridge = "172.17.0.1"
    gathering = AgentGathering(seed, (1, 3))
    for number in range(3):
        machine = gathering.network.machine(f"m{number}")
        for other in range(MAX_ADDRESSES):
            gathering.network.plug(machine.name, f"br{other}", f"172.{20 + other}.{number}.1")
        gathering.network.plug(machine.name, "docker0", bridge)
        machine.nat = bridge
    agents = running(gathering, 3)
    assert bridge not in {address.address for agent in agents for address in agent.agent.endpoints.addresses}
    host = gathering.host_of(agents)
    others = without(agents, host)
    machines = [host.machine], [agent.machine for agent in others]
    gathering.split(*machines)
    gathering.world.run(30.0)
    assert host.hosted is None
    assert gathering.together(others)
    gathering.split(*machines, parted=False)
    gathering.run_until_together(agents, 15.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_began_in_two_halves_becomes_one(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 4))
    agents = [gathering.start(f"m{number}") for number in range(4)]
    machines = [agent.machine for agent in agents]
    gathering.split(machines[:2], machines[2:])
    gathering.world.run(gathering.policy.last_call + 4.0)
    assert gathering.together(agents[:2])
    assert gathering.together(agents[2:])
    warned = [notice for agent in agents for notice in agent.notices if "it could start a second time" in notice]
    assert len(warned) == 2
    assert "--nnodes=3:4 would prevent it" in warned[0]
    gathering.split(machines[:2], machines[2:], parted=False)
    gathering.run_until_together(agents, 10.0)
    assert sum(agent.agent.losses for agent in agents) == 2, "one half stays where it is"
    gathering.world.run(1.5)  # until all have answered one PING
    host = gathering.host_of(agents).hosted
    assert host is not None
    assert host.quorum.had_quorum, "it has had F members: from now on K keep it"


@pytest.mark.parametrize("seed", SEEDS)
def test_agent_of_a_session_with_a_quorum_starts_no_small_one(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 4))
    agents = running(gathering, 4)
    for agent in agents[:2]:
        agent.kill()
    gathering.world.run(60.0)
    left = agents[2:]
    assert gathering.together(left) or not any(agent.outcome for agent in left)
    if not gathering.together(left):
        gathering.run_until_together([*left, gathering.start("m0")], 15.0)


@pytest.mark.parametrize("step", [AwaitingSeal, ProvingStore, AwaitingGo])
def test_a_host_that_is_stopped_before_go_holds_nobody_up_until_the_deadline(step: type) -> None:
    """Its kernel keeps the connections alive, and the three others of 2:4 are a quorum."""
    gathering = AgentGathering(0, (2, 4))
    agents = gathering.everybody(4)

    def there() -> list[AgentProcess]:
        joiners = [(each, each.joiner) for each in agents if each.core is not None]
        return [each for each, joiner in joiners if joiner.part is not None and isinstance(joiner.part.state, step)]

    assert gathering.world.run(15.0, until=lambda: len(there()) >= 2)
    hosts = [(each, each.agent.host) for each in agents if each.core is not None]
    (host,) = [each for each, machine in hosts if machine is not None and len(machine.registrar.seats) > 1]
    host.stop()
    gathering.run_until_together(without(agents, host), 25.0)
    host.cont()
    gathering.run_until_together(agents, 15.0)


@pytest.mark.parametrize("latecomer", [False, True], ids=["founders", "latecomer"])
@pytest.mark.parametrize("seed", SEEDS)
def test_agent_that_acknowledged_and_missed_go_starts_no_small_session(seed: int, latecomer: bool) -> None:
    """Three of 2:4 found a session, or the third joins it, and GO is lost: a fourth comes to the host."""
    gathering = AgentGathering(seed, (2, 4))
    agents = gathering.everybody(2 if latecomer else 3)
    if latecomer:
        gathering.run_until_together(agents, gathering.policy.last_call + 5.0)
        agents.append(gathering.start("m2"))

    def hosted() -> list[AgentProcess]:
        hosts = [(each, each.agent.host) for each in agents if each.core is not None]
        return [each for each, host in hosts if host is not None and host.quorum.had_quorum]

    assert gathering.world.run(15.0, until=lambda: bool(hosted()))
    (host,) = hosted()
    others = without(agents, host)
    late = gathering.network.machine("m3")
    gathering.split([host.machine, late], [each.machine for each in others])
    fourth = gathering.start("m3", at=0.1)
    gathering.world.run(60.0)
    if latecomer:
        assert gathering.together([host, fourth])
    else:
        assert host.hosted is None, "no member has ever answered, so no newcomer may fill its session"
    assert not any(each.outcome for each in others)
    gathering.split([host.machine, late], [each.machine for each in others], parted=False)
    gathering.run_until_together([*agents, fourth], 15.0)


def a_spare_on_the_other_side(seed: int) -> tuple[AgentGathering, list[AgentProcess]]:
    """Three of 2:3 and a spare that waits; then the host and one are on one side, another one and the spare beyond."""
    gathering = AgentGathering(seed, (2, 3))
    agents = running(gathering, 3)
    spare = gathering.start("spare")
    gathering.world.run(5.0)
    host = gathering.host_of(agents)
    one, two = without(agents, host)
    gathering.split([host.machine, one.machine], [two.machine, spare.machine])
    gathering.world.run(40.0)
    assert gathering.together([host, one])
    assert two.outcome is None
    assert spare.outcome is None, "one of three and one that was never in: they are no quorum"
    return gathering, [host, one, two, spare]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spare_takes_the_place_of_a_lost_node_and_founds_nothing_before(seed: int) -> None:
    gathering, (host, one, two, spare) = a_spare_on_the_other_side(seed)
    assert spare.agent.memory.surplus
    gathering.split([host.machine, one.machine], [two.machine, spare.machine], parted=False)
    two.kill()
    gathering.run_until_together([host, one, spare], 15.0)
    assert not spare.agent.memory.surplus


def test_a_spare_that_counted_for_the_founding_would_split_the_job() -> None:
    run = functools.partial(a_spare_on_the_other_side, 0)
    expect_found("found_with_a_spare", Rule(ElasticMember, "is_surplus", always(False)), run=run)


@pytest.mark.parametrize("end", ["host first", "members at once", "members 0.3 s before", "members 2 s before"])
@pytest.mark.parametrize(("nodes", "count"), [((2, 2), 2), ((1, 1), 1), ((2, 3), 3), ((2, 4), 3)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_second_run_that_waits_for_the_first_one_begins_once_that_has_ended(
    seed: int, nodes: tuple[int, int], count: int, end: str
) -> None:
    gathering = AgentGathering(seed, nodes)
    first = running(gathering, nodes[1])
    gathering.lan.loss = gathering.rng.choice((0.0, 0.3))
    second = [gathering.start(f"other{number}", at=gathering.rng.uniform(0, 3)) for number in range(count)]
    gathering.world.run(20.0)
    assert all(agent.agent.memory.surplus and agent.outcome is None for agent in second)
    host = gathering.host_of(first)
    members = without(first, host)
    for agent in [host, *members] if end == "host first" else members:
        agent.close()
    if end != "host first":
        gathering.world.run({"members at once": 0.0, "members 0.3 s before": 0.3, "members 2 s before": 2.0}[end])
        host.close()
    gathering.run_until_together(second, 20.0)
    assert not any(agent.agent.memory.surplus for agent in second)


@pytest.mark.parametrize("nodes", [(2, 2), (2, 3)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_second_run_that_was_out_of_reach_of_the_first_one_begins_once_that_has_ended(
    seed: int, nodes: tuple[int, int]
) -> None:
    gathering = AgentGathering(seed, nodes)
    first = running(gathering, nodes[1])
    second = [gathering.start(f"other{number}") for number in range(nodes[1])]
    gathering.world.run(10.0)
    sides = [agent.machine for agent in first], [agent.machine for agent in second]
    gathering.split(*sides, barrier="reset")  # as a firewall does that is loaded anew
    gathering.world.run(60.0)
    assert {agent.agent.stage() for agent in second} == {"seeking"}, "they are surplus"
    gathering.split(*sides, parted=False)
    gathering.world.run(5.0)
    assert not any(agent.outcome for agent in second)
    for agent in first:
        agent.close()
    gathering.run_until_together(second, 20.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_second_run_that_does_not_hear_how_the_first_one_ended_says_why_it_waits(seed: int) -> None:
    gathering = AgentGathering(seed, (2, 2), timeout=60.0)
    first = running(gathering, 2)
    second = [gathering.start(f"other{number}") for number in range(2)]
    gathering.world.run(10.0)
    for agent in first:
        agent.kill()
    gathering.world.run(20.0)
    for agent in second:
        agent._event(agent.agent.ask_status)
    gathering.world.run(1.0)
    for agent in second:
        cause = waiting(agent.agent.situation(), agent.facts(), agent.now)
        assert cause is not None
        assert re.match(r"nodes came while the job ran on others \(node 0 on host m[01] \(10.0.0.[12]\), pid", cause[0])
    gathering.world.run(40.0)
    for agent in second:
        text = str(agent.failure)
        assert re.search("it lacks a place: all 2 places were taken when this node came", text)
        assert "if that run has ended, start the nodes of this one again" in text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_waits_for_a_job_of_one_node_is_asked_for_its_nnodes(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 1), timeout=20.0)
    running(gathering, 1)
    other = gathering.start("other")
    gathering.world.run(5.0)
    assert any("a job of 1 node runs there: was --nnodes forgotten?" in notice for notice in other.notices)
    gathering.world.run(20.0)
    assert isinstance(other.failure, ConflictError)
    assert "full with 1 node, hosted by host m0" in str(other.failure)
    assert "was --nnodes forgotten?" in str(other.failure)


@pytest.mark.parametrize("seed", SEEDS)
def test_agents_of_one_machine_that_are_several_nodes_of_a_job_are_named(seed: int) -> None:
    gathering = AgentGathering(seed, (3, 3), timeout=20.0)
    together = [gathering.start("m0") for _ in range(3)]
    gathering.run_until_together(together, 5.0)
    said = "several torchruns of one machine are in this job (m0, pids 101, 102, 103)"
    assert sum(said in notice for agent in together for notice in agent.notices) == 1
    other = gathering.start("m1")
    gathering.world.run(5.0)
    assert any("several torchruns of one machine are in this job" in notice for notice in other.notices)
    gathering.world.run(20.0)
    assert "likely cause: several torchruns of one machine are in this job" in str(other.failure)
    assert said in str(other.failure)


@pytest.mark.parametrize("seed", SEEDS)
def test_late_agents_are_admitted_until_the_job_is_full(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 3), timeout=20.0)
    agents = [gathering.start("m0")]
    gathering.run_until_together(agents, gathering.policy.last_call + 3.0)
    for number in (1, 2):
        agents.append(gathering.start(f"m{number}"))
        gathering.run_until_together(agents, 2.0)
    assert {agent.agent.losses for agent in agents} == {0}
    surplus = gathering.start("m3")
    gathering.world.run(10.0)
    assert surplus.outcome is None
    assert surplus.failure is None, "it waits"
    agents.pop().kill()
    gathering.run_until_together([*agents, surplus], 15.0)
    too_many = gathering.start("m4")
    gathering.world.run(25.0)
    assert isinstance(too_many.failure, ConflictError)
    assert "has been running for" in str(too_many.failure)


@pytest.mark.parametrize("seed", SEEDS)
def test_finished_agent_triggers_no_election(seed: int) -> None:
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
    assert three.agent.closed
    assert three.agent.losses == 0


@pytest.mark.parametrize("loss_is_noticed_first", [False, True])
def test_agent_that_stopped_electing_stays_without_a_session(loss_is_noticed_first: bool) -> None:
    gathering = AgentGathering(3, (2, 3))
    agents = running(gathering, 3)
    host = gathering.host_of(agents)
    if loss_is_noticed_first:
        host.kill()
        gathering.world.run(0.01)
        assert not any(agent.finished or agent.agent.closed for agent in without(agents, host))
    for agent in without(agents, host):
        agent.agent.stop_electing(agent.now)
    host.kill()
    gathering.world.run(20.0)
    assert all(agent.agent.losses == 1 and agent.agent.closed for agent in without(agents, host))


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
    agents.pop().kill()
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
    gathering.run_until_together(without(agents, host), NOTICED_SECONDS + 6.0)


def test_a_host_that_is_alone_gives_up_the_session_whose_address_it_has_lost() -> None:
    gathering = AgentGathering(5, (2, 2))
    agents = gathering.everybody(2)
    gathering.run_until_together(agents, 12.0)
    host = gathering.host_of(agents)
    machine = host.machine
    gathering.network.unplug(machine.nics[0])
    gathering.network.plug(machine.name, "eth0", "10.0.9.9", "lan", 16)
    gathering.network.heal(machine)
    host._event(lambda: host.agent.handle(AddressesChanged((Address("10.0.9.9", "eth0", 16),)), host.now))
    gathering.world.run(12.0)
    gathering.run_until_together(agents, 30.0)


def test_a_session_whose_address_has_gone_ends_though_its_members_reach_the_host_at_another_one() -> None:
    gathering = AgentGathering(1, (2, 3))
    network = gathering.network
    for number in range(3):
        network.plug(network.machine(f"m{number}").name, "eth1", f"10.9.0.{number + 1}", "other", 16)
    gathering.lan.tcp_delay = (0.02, 0.03)
    agents = gathering.everybody(2)
    gathering.run_until_together(agents, 5.0)
    host = gathering.host_of(agents)
    assert host.outcome is not None
    (member,) = without(agents, host)
    assert member.joiner.session is not None
    assert member.joiner.session.race is not None
    assert member.joiner.session.race.address != host.outcome.store_address
    gone = host.machine.nic(host.outcome.store_address)
    assert gone is not None
    network.unplug(gone)
    own = tuple(Address(nic.address, nic.name, nic.prefix_length) for nic in host.machine.nics)
    host._event(lambda: host.agent.handle(AddressesChanged(own), host.now))
    third = gathering.start("m2")
    assert gathering.world.run(STORE_GONE_SECONDS + 3.0, until=lambda: host.agent.losses == 1)
    gathering.run_until_together([member, third], 15.0)


def test_an_address_that_is_gone_for_a_moment_ends_no_session() -> None:
    """A DHCP client takes it away and gives it back; the connections to the store survive that."""
    gathering = AgentGathering(1, (1, 2))
    agents = gathering.everybody(2)
    gathering.run_until_together(agents, 5.0)
    host = gathering.host_of(agents)
    core, session = host.agent, host.outcome and host.outcome.session
    old = tuple(core.endpoints.addresses)
    host._event(lambda: core.handle(AddressesChanged((Address("10.0.9.9", "eth0", 16),)), host.now))
    gathering.world.run(STORE_GONE_SECONDS - 1.5)
    host._event(lambda: core.handle(AddressesChanged(old), host.now))
    gathering.world.run(2 * STORE_GONE_SECONDS)
    assert gathering.host_of(agents) is host
    assert host.outcome is not None
    assert host.outcome.session == session


@pytest.mark.parametrize("seed", SEEDS)
def test_a_session_that_was_about_to_form_when_it_was_asked_wins_a_small_one_over(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 3))
    small, *others = [gathering.network.machine(f"m{number}") for number in range(3)]
    for machine in others:
        machine.opening = (6.0, 6.0)
    gathering.split([small], others)
    agents = [gathering.start("m0"), gathering.start("m1", at=5.0), gathering.start("m2", at=5.0)]
    gathering.world.run(9.0)
    assert agents[0].hosted is not None
    assert Sealing in {type(host.registrar.state) for agent in agents if (host := agent.agent.host) is not None}
    gathering.split([small], others, parted=False)
    gathering.run_until_together(agents, 15.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_session_that_waits_for_a_confirmation_when_it_hears_of_a_small_one_wins_it_over(seed: int) -> None:
    gathering = AgentGathering(seed, (1, 5))
    small, *others = [gathering.network.machine(f"m{number}") for number in range(4)]
    gathering.split([small], others)
    first = gathering.start(small.name)
    assert gathering.world.run(15.0, until=lambda: first.hosted is not None)
    agents = [gathering.start(each.name) for each in others]

    def confirming() -> list[AgentProcess]:
        hosts = [(each, each.agent.host) for each in agents if each.core is not None]
        return [each for each, host in hosts if host is not None and isinstance(host.registrar.state, Confirming)]

    assert gathering.world.run(15.0, until=lambda: bool(confirming()))
    (host,) = confirming()
    late = without(agents, host)[0]
    late.stop()
    gathering.split([small], others, parted=False)
    asking = gathering.start("m4")  # both hosts answer it, and hear each other
    gathering.world.run(3.0)
    assert confirming() == [host]
    late.cont()
    gathering.run_until_together([first, *agents, asking], 15.0)
    assert gathering.host_of([first, *agents, asking]) is host


# --- node ranks given by hand -----------------------------------------------------------------------------------------


def claim(rank: int) -> bytes:
    return bytes((0, 0, 0, 0, rank))


def claimants(seed: int, nodes: tuple[int, int] = (2, 4), *, twice: bool = True) -> AgentGathering:
    """A gathering of machines with a node rank of their own; ``m3`` has that of ``m1``, too."""
    gathering = AgentGathering(seed, nodes)
    gathering.orders = {f"m{number}": claim(number) for number in range(4)}
    if twice:
        gathering.orders["m3"] = claim(1)
    return gathering


def expect_conflict(refused: AgentProcess, holder: AgentProcess) -> None:
    """Demand that an agent has failed since another one has its node rank."""
    text = str(refused.agent.failure)
    assert isinstance(refused.agent.failure, ConflictError), text
    assert f"refused by {holder.identity.who}: node rank taken (node rank 1 is held by another live node)" in text


def only_one(gathering: AgentGathering, one: AgentProcess, other: AgentProcess, within: float) -> AgentProcess:
    """Run until one of two agents with one node rank has failed because of the other one; return the other one."""
    assert gathering.world.run(within, until=lambda: one.failed_at is not None or other.failed_at is not None)
    refused, holder = (one, other) if one.failed_at is not None else (other, one)
    expect_conflict(refused, holder)
    return holder


@pytest.mark.parametrize("seed", repeated(5, soak=15))
def test_two_agents_that_start_with_one_node_rank(seed: int) -> None:
    """They host, are members, or come when the others have begun."""
    gathering = claimants(seed)
    gathering.lan.loss = gathering.rng.choice((0.0, 0.3))
    agents = gathering.everybody(4, within=gathering.rng.choice((0.0, 2.0, 9.0)))
    holder = only_one(gathering, agents[1], agents[3], 25.0)
    gathering.run_until_together([agents[0], agents[2], holder], 15.0)


@pytest.mark.parametrize("machine", ["m1", "m3"])
@pytest.mark.parametrize("seed", SEEDS)
def test_two_agents_that_come_late_with_one_node_rank(seed: int, machine: str) -> None:
    """On one machine or on two; neither has a seat yet when the other one asks for one."""
    gathering = claimants(seed, (2, 5))
    others = [gathering.start("m0"), gathering.start("m2"), gathering.start("m4")]
    gathering.run_until_together(others, 15.0)
    holder = only_one(gathering, gathering.start("m1"), gathering.start(machine), 10.0)
    gathering.run_until_together([*others, holder], 15.0)
    gathering.world.run(20.0)
    assert gathering.together([*others, holder])


@pytest.mark.parametrize("end", ["killed", "power off", "stopped"])
@pytest.mark.parametrize("victim", ["host", "member"])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_is_started_again_gets_the_node_rank_of_the_one_that_is_gone(
    seed: int, victim: str, end: str
) -> None:
    gathering = claimants(seed, (2, 5), twice=False)
    agents = running(gathering, 4)
    host = gathering.host_of(agents)
    old = host if victim == "host" else without(agents, host)[0]
    if end == "stopped":
        old.stop()
    else:
        if end == "power off":
            gathering.network.cut(old.machine)
        old.kill()
        gathering.network.heal(old.machine)
    new = gathering.start(old.machine.name, at=gathering.rng.uniform(0, 3))
    gathering.run_until_together([*without(agents, old), new], NOTICED_SECONDS + 15.0)
    assert new.agent.failure is None
    if end == "stopped":
        old.cont()
        assert gathering.world.run(30.0, until=lambda: old.failed_at is not None)
        assert f"refused by {new.identity.who}: node rank taken" in str(old.agent.failure)


def unless_it_came_late(right: Seated | None, *_: object) -> Seated | None:
    return None if right is not None and right.is_latecomer else right


def refuse_at_once(
    _: Any,
    applications: Applications,
    holder: Seated,
    conn: int,
    member: bytes,
    applicant: frames.Join,
    state: SessionState,
    now: float,
) -> Verdict:
    applications._refuse(conn, applicant, rank_taken(holder))
    return "nothing"


def come_late(seed: int) -> None:
    test_two_agents_that_come_late_with_one_node_rank(seed, "m3")


def come_again(seed: int) -> None:
    test_an_agent_that_is_started_again_gets_the_node_rank_of_the_one_that_is_gone(seed, "member", "stopped")


@pytest.mark.parametrize(
    ("seam", "scenario"),
    [
        (Rule(Seats, "same_place", unless_it_came_late), come_late),
        (Act(Applications, "_challenge", refuse_at_once), come_again),
    ],
    ids=["latecomers pass", "refused without a question"],
)
def test_a_mistake_about_node_ranks_is_found(seam: Seam, scenario: Callable[[int], None]) -> None:
    scenario(0)
    expect_found("mistake_about_node_ranks", seam, run=functools.partial(scenario, 0))
