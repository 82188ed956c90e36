"""Directed schedules of agents, one or more for each rule that keeps two sessions from having rounds at once.

Random schedules reach most of these mistakes rarely or never. Each schedule holds, and finds the mistake that breaks
its rule. In all of them the network is in two parts: the host of a session and few of its members on the left, and on
the right those that found the next session. Agents vanish without a sign, as with a machine that loses its power, and
others are started in their place on the same part or on the other one. So no more than MAX agents live at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from mingle.elastic.leases import ANSWER_SECONDS, BINDING_SECONDS, GROWN_SECONDS, LEASE_SECONDS
from mingle.elastic.quorum import Quorum
from mingle.elastic.rounds import STOP_SECONDS
from mingle.protocol.session.phases import Acknowledging
from tests.lan.agents import AgentGathering, AgentProcess
from tests.lan.network import Machine
from tests.lan.planted import (
    CONFIRM_WHILE_BOUND,
    COUNT_WHO_HAS_A_SEAT,
    DATE_THE_BINDING_BEFORE,
    FOUND_YOUNG,
    HANG_UP_ON_WHO_COUNTS,
    LOOK_AFTER_THE_SOCKETS,
    SLEEPING_CLOCK,
    TAKE_A_RESET_FOR_AN_END,
)
from tests.lan.planting import Act, Rule, Seam, always, expect_found
from tests.support.levels import repeated

SEEDS = repeated(2, soak=25)


class Parts(AgentGathering):
    """A job whose network falls into two parts."""

    def __init__(self, seed: int, nodes: tuple[int, int], count: int, *, last_call: float = 0.1) -> None:
        super().__init__(seed, nodes, last_call=last_call)
        self.lan.tcp_again = (0.01, 0.02)
        agents = self.everybody(count, within=0.2)
        self.run_until_together(agents, 15.0)
        self.world.run(4.0)
        self.host = self.host_of(agents)
        self.members = [agent for agent in agents if agent is not self.host]
        self._left: list[Machine] = []
        self._right: list[Machine] = []

    def part(self, *left: AgentProcess, gone: list[AgentProcess] | None = None) -> None:
        """Leave the host and these on the left, and all others on the right. Kill those that are ``gone``."""
        stay = (self.host, *left)
        self._left = [each.machine for each in stay]
        self._right = [each.machine for each in self.members if each not in stay]
        self.split(self._left, self._right)
        for each in gone or ():
            each.kill()

    def _put(self, name: str, own: list[Machine], other: list[Machine]) -> AgentProcess:
        machine = self.network.machine(name)
        own.append(machine)
        self.split([machine], other)
        return self.start(name, at=0.02)

    def left(self, name: str) -> AgentProcess:
        """Start an agent on a new machine on the left."""
        return self._put(name, self._left, self._right)

    def right(self, name: str) -> AgentProcess:
        """Start one on the right."""
        return self._put(name, self._right, self._left)

    def vanish(self, agent: AgentProcess) -> None:
        """Have an agent and its machine vanish without a sign."""
        self.network.cut(agent.machine)
        agent.kill()

    def answered_at(self, host: AgentProcess, member: AgentProcess) -> float:
        """When the last PING was sent that a host knows a member to have answered."""
        assert host.hosted is not None
        return host.hosted.quorum.leases.answered_at(member.identity.member)

    def until_answered(self, host: AgentProcess, *members: AgentProcess) -> None:
        """Run until these have answered a PING a moment ago, all the same one."""
        began = self.world.now

        def have() -> bool:
            answered = {self.answered_at(host, each) for each in members}
            return len(answered) == 1 and min(answered) * host.rate >= began * host.rate

        assert self.world.run(3.0, until=have)

    def expect_together(self, *agents: AgentProcess, within: float) -> None:
        self.run_until_together(agents, within)


# --- the founding ---------------------------------------------------------------------------------------------------


def an_agent_moves_to_a_new_session(seed: int) -> None:
    """Of 2:4, two wait on the right for a third; it was in the old session, which has its answer, until just now."""
    parts = Parts(seed, (2, 4), 4)
    moves, *waiting = parts.members
    parts.part(moves)
    parts.world.run(12.0)
    parts.until_answered(parts.host, moves)
    parts.vanish(moves)
    parts.expect_together(parts.right("r1"), *waiting, within=5.0)
    parts.world.run(10.0)


def its_acknowledgement_comes_late(seed: int) -> None:
    """The same; if it is asked at once, its ACK comes when it is old enough, and another one has moved to the left."""
    parts = Parts(seed, (2, 4), 4)
    moves, *waiting = parts.members
    parts.part(moves)
    parts.world.run(12.0)
    (founding,) = [each for each in waiting if each.agent.host is not None and len(each.agent.host.registrar.seats) > 1]
    (other,) = [each for each in waiting if each is not founding]
    parts.until_answered(parts.host, moves)
    parts.vanish(moves)
    moved = parts.right("r1")

    def is_sealed() -> bool:
        host = founding.agent.host
        return host is not None and isinstance(host.registrar.state, Acknowledging)

    if parts.world.run(1.0, until=is_sealed):
        parts.split([moved.machine], [founding.machine])
        parts.world.run(0.3)
        parts.vanish(other)
        parts.expect_together(parts.host, parts.left("l1"), within=1.2)
        parts.world.run(GROWN_SECONDS - 0.3)
        parts.split([moved.machine], [founding.machine], parted=False)
    parts.world.run(10.0)


def ages_at_go_alone(genuine: Any, quorum: Quorum, now: float) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quorum, "is_grown", always(True))
        return bool(genuine(quorum, now))


def has_young(quorum: Quorum, now: float) -> bool:
    return any(not quorum.is_grown(seat.member, now) for seat in quorum.seats.members())


# --- what a session counts ------------------------------------------------------------------------------------------


def members_are_replaced_one_by_one(seed: int) -> None:
    """Three keep a session of 4:6. One of them moves to the right; then another one is started again on the left.

    The host knows an answer of each within the last 2 s, but never did three live on the left after the first had gone.
    """
    parts = Parts(seed, (4, 6), 4)
    stays, moves, ends = parts.members
    parts.part(stays, moves, gone=[ends])
    waiting = [parts.right(f"r{number}") for number in range(3)]
    parts.world.run(12.0)
    host = parts.host
    parts.until_answered(host, stays, moves)
    gone_at = parts.world.now
    parts.vanish(moves)
    moved = parts.right("r3")
    parts.world.run(ANSWER_SECONDS - 1.3)
    parts.until_answered(host, stays)
    assert parts.world.now < gone_at + ANSWER_SECONDS - 0.1
    parts.vanish(stays)
    new = parts.left("l1")
    parts.world.run(0.5)
    parts.expect_together(*waiting, moved, within=3.0)
    assert parts.world.now < gone_at + 2 * ANSWER_SECONDS - 0.5
    parts.world.run(10.0)
    assert not parts.together([host, new])


def the_sum_of_those_that_answered(right: float, quorum: Quorum) -> float:
    answered = sorted(map(quorum.leases.answered_at, quorum._others()), reverse=True)
    needed = quorum.wanted - 1
    return right if not 0 < needed <= len(answered) else answered[needed - 1]


def a_small_session_counts_one_that_has_left(seed: int) -> None:
    """Two of 2:4 keep the old session; two new ones on the right have started small. One of each side changes sides.

    Each host still has the lease of the one that has left it.
    """
    parts = Parts(seed, (2, 4), 3, last_call=2.0)
    stays, ends = parts.members
    parts.part(stays, gone=[ends])
    small = [parts.right("r1"), parts.right("r2")]
    parts.expect_together(*small, within=10.0)
    parts.world.run(4.0)
    host = parts.host_of(small)
    (leaves,) = [each for each in small if each is not host]
    parts.until_answered(host, leaves)
    parts.vanish(leaves)
    parts.expect_together(parts.host, stays, parts.left("l1"), within=1.5)
    parts.vanish(stays)
    parts.world.run(0.02)
    parts.expect_together(host, parts.right("r3"), within=1.0)
    parts.world.run(10.0)


def by_leases(_: Any, quorum: Quorum, now: float) -> None:
    quorum.had_quorum |= len(quorum._founders_among(quorum.counting(now), now)) >= quorum.policy.nodes.founders


def a_host_is_left_alone(seed: int) -> None:
    """Three keep a session of 4:6. Both members vanish, one of them to the right, and a newcomer asks for a seat."""
    parts = Parts(seed, (4, 6), 4)
    stays, moves, ends = parts.members
    parts.part(stays, moves, gone=[ends])
    waiting = [parts.right(f"r{number}") for number in range(3)]
    parts.world.run(12.0)
    parts.vanish(stays)
    parts.vanish(moves)
    parts.expect_together(*waiting, parts.right("r3"), within=5.0)
    parts.left("l1")
    parts.world.run(10.0)


# --- leases and bindings ----------------------------------------------------------------------------------------------


def members_are_reset_while_their_host_counts_them(seed: int) -> None:
    """A firewall answers two members of 2:3 with resets, and drops what comes from their host."""
    parts = Parts(seed, (2, 3), 3)
    host, members = [parts.host.machine], [each.machine for each in parts.members]
    parts.split(host, members, one_way=True)
    parts.split(members, host, barrier="reset", one_way=True)
    parts.world.run(LEASE_SECONDS - 0.5)
    assert not any(each.outcome for each in parts.members), "reset, and bound"
    parts.run_until_together(parts.members, 6.0)


def a_host_hears_nobody(seed: int) -> None:
    """The two others of 2:3 hear it, and found a session once it has released them."""
    parts = Parts(seed, (2, 3), 3)
    parts.split([each.machine for each in parts.members], [parts.host.machine], one_way=True)
    parts.world.run(LEASE_SECONDS - 1.5)
    parts.world.run(2.0)
    parts.run_until_together(parts.members, 8.0)


def a_host_sleeps(seed: int, *, suspended: bool) -> None:
    """The two others of 2:3 found a session meanwhile."""
    parts = Parts(seed, (2, 3), 3)
    if suspended:
        parts.host.suspend()
    else:
        parts.host.stop()
    parts.world.run(BINDING_SECONDS + 1.0)
    parts.run_until_together(parts.members, 5.0)
    if suspended:
        parts.host.resume()
    else:
        parts.host.cont()
    parts.run_until_together([parts.host, *parts.members], 15.0)


# --- who is in a round ------------------------------------------------------------------------------------------------


def one_of_three_begins_a_round_alone(seed: int) -> None:
    """Three keep a session of 1:6. The workers of two hang, and then these two move to the right."""
    parts = Parts(seed, (1, 6), 4, last_call=3.0)
    alone, hangs, ends = parts.members
    assert parts.world.run(5.0, until=lambda: parts.in_one_round([parts.host, *parts.members]))
    parts.part(alone, hangs, gone=[ends])
    for each in (parts.host, hangs):
        each._stop_workers = lambda: None  # type: ignore[method-assign]
    parts.world.run(2.0)
    alone.fail_workers()
    parts.world.run(STOP_SECONDS + 5.0)
    parts.vanish(hangs)
    parts.vanish(parts.host)
    parts.expect_together(*(parts.right(f"r{number}") for number in range(4)), within=5.0)
    parts.world.run(10.0)


def least(_: int, quorum: Quorum) -> int:
    return quorum.policy.nodes.minimum


RULES: dict[str, tuple[Callable[[int], None], tuple[Seam, ...], str]] = {
    "found_young": (an_agent_moves_to_a_new_session, (FOUND_YOUNG,), "can return a round although"),
    "look_at_ages_at_go_alone": (
        its_acknowledgement_comes_late,
        (Act(Quorum, "complete", ages_at_go_alone, when=has_young),),
        "two hosts hold",
    ),
    "count_an_agent_and_the_one_in_its_place": (
        members_are_replaced_one_by_one,
        (Rule(Quorum, "proved_at", the_sum_of_those_that_answered),),
        "can return a round although",
    ),
    "have_a_quorum_by_leases": (
        a_small_session_counts_one_that_has_left,
        (Act(Quorum, "note_quorum", by_leases),),
        "two hosts hold",
    ),
    "admit_without_answers": (
        a_host_is_left_alone,
        (Rule(Quorum, "admits", always(True)),),
        "takes a member although",
    ),
    "confirm_while_bound": (members_are_reset_while_their_host_counts_them, (CONFIRM_WHILE_BOUND,), "two hosts hold"),
    "take_a_reset_for_an_end": (
        members_are_reset_while_their_host_counts_them,
        (TAKE_A_RESET_FOR_AN_END,),
        "two hosts hold",
    ),
    "date_the_binding_before_the_processing": (
        members_are_reset_while_their_host_counts_them,
        (DATE_THE_BINDING_BEFORE,),
        "two hosts hold",
    ),
    "hang_up_orderly_on_a_member_that_counts": (a_host_hears_nobody, HANG_UP_ON_WHO_COUNTS, "two hosts hold"),
    "count_everybody_who_has_a_seat": (
        functools.partial(a_host_sleeps, suspended=False),
        (COUNT_WHO_HAS_A_SEAT,),
        "two hosts hold",
    ),
    "look_at_the_clock_after_the_sockets": (
        functools.partial(a_host_sleeps, suspended=False),
        LOOK_AFTER_THE_SOCKETS,
        "two hosts hold",
    ),
    "measure_by_a_clock_that_sleeps": (
        functools.partial(a_host_sleeps, suspended=True),
        SLEEPING_CLOCK[:1],
        "two hosts hold",
    ),
    "begin_a_round_with_less_than_keep_the_session": (
        one_of_three_begins_a_round_alone,
        (Rule(Quorum, "round_minimum", least),),
        "two sessions have a round",
    ),
}
"""By the name of a mistake: the schedule, the mistake, and what finds it."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mistake", RULES)
def test_the_schedule_holds_and_finds_the_mistake(mistake: str, seed: int) -> None:
    schedule, seams, finding = RULES[mistake]
    schedule(seed)
    if not seed:
        expect_found(mistake, *seams, run=functools.partial(schedule, seed), finding=finding)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_that_an_earlier_session_begins_is_returned_to_nobody(seed: int) -> None:
    """A host begins it as soon as enough agents have said NEXT, also ones that have vanished since."""
    parts = Parts(seed, (2, 4), 4)
    moves, *waiting = parts.members
    host = parts.host
    parts.part(moves)
    parts.world.run(15.0)
    assert parts.in_one_round([host, moves])
    host._stop_workers = lambda: None  # type: ignore[method-assign]
    moves.fail_workers()
    assert parts.world.run(10.0, until=lambda: host.agent.memory.round_wanted)
    parts.vanish(moves)
    parts.expect_together(parts.right("r1"), *waiting, within=5.0)
    assert host.hosted is not None
    before = host.hosted.rounds.number
    host._workers_stopped()
    assert host.hosted.rounds.number == before + 1
    parts.world.run(LEASE_SECONDS)
    assert host.workers is None
    assert host.hosted is None, "its torchrun has waited for no longer than the lease of the agent that has vanished"
