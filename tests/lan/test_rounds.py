"""The rounds of agents in the simulated network: what makes another one necessary, and who is in it how soon."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest

from mingle.elastic.agent import JobEnd
from mingle.elastic.rounds import COMPANIONS_SECONDS, STOP_SECONDS, Rounds
from mingle.network.connections import CLOSED_BY_PEER
from tests.lan.agents import AgentGathering, AgentProcess
from tests.lan.planting import Act, Rule, Seam, always, expect_found, nothing
from tests.support.levels import repeated

SEEDS = repeated(2, soak=3)
LAST_CALL = 30.0
"""Torch's default."""
SILENT_SECONDS = 10.5
"""How long it takes at most until a host that is cut off is known to be lost."""


@pytest.fixture(autouse=True)
def _workers_that_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.lan.agents.STOP_SECONDS", (0.2,))
    monkeypatch.setattr("tests.lan.agents.UNREAD", 0.0)


class Job(AgentGathering):
    """Agents of which all that were started are in a round."""

    def __init__(self, seed: int, nodes: tuple[int, int], count: int | None = None) -> None:
        super().__init__(seed, nodes, last_call=LAST_CALL)
        self.running = self.everybody(nodes[1] if count is None else count, within=0.5)

    def begun(self) -> Job:
        """Run until the first round, and for a while."""
        self.expect(self.running, within=LAST_CALL + 5.0)
        self.world.run(2 * LAST_CALL)
        return self

    @property
    def host(self) -> AgentProcess:
        return self.host_of(self.running)

    @property
    def member(self) -> AgentProcess:
        return next(each for each in self.running if each.hosted is None)

    def without(self, *gone: AgentProcess) -> list[AgentProcess]:
        """Those that are left."""
        self.running = [each for each in self.running if each not in gone]
        return self.running

    def expect(self, agents: Sequence[AgentProcess], *, within: float) -> float:
        """Demand that these, and no others, are in one round in time; return after how long."""
        began = self.world.now
        met = self.world.run(within, until=lambda: self.in_one_round(agents))
        assert met, f"{[(each.name, each.workers and each.workers[1]) for each in agents]} after {within:g} s"
        return self.world.now - began

    def numbers(self) -> list[int]:
        """The number of the round that each is in."""
        return [each.workers[1].number for each in self.running if each.workers is not None]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("nodes", [(2, 3), (4, 4), (1, 1)])
def test_a_round_of_all_nodes_begins_at_once(seed: int, nodes: tuple[int, int]) -> None:
    job = Job(seed, nodes)
    job.expect(job.running, within=3.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_round_of_all_waits_for_more_nodes(seed: int) -> None:
    job = Job(seed, (2, 4), 3)
    assert job.expect(job.running, within=LAST_CALL + 3.0) > LAST_CALL - 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failed_worker_restarts_all_in_the_same_session(seed: int) -> None:
    job = Job(seed, (2, 3)).begun()
    session = job.host.outcome
    job.member.fail_workers()
    job.world.run(2.0)
    assert job.in_one_round(job.running)
    assert job.numbers() == [1, 1, 1]
    assert job.host.outcome == session


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_asks_again_while_its_round_begins_restarts_nobody(seed: int) -> None:
    job = Job(seed, (2, 2))
    job.lan.tcp_delay = (0.05, 0.05)
    host, member = job.begun().host, job.member
    host.fail_workers()
    assert job.world.run(5.0, until=lambda: member.agent.memory.asked is not None)
    again = functools.partial(member.agent.next_round, member.first, member.now)
    job.world.after(0.03, functools.partial(member._event, again))
    job.world.run(5.0)
    assert job.in_one_round(job.running)
    assert job.numbers() == [1, 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_others_go_on_without_a_node_that_is_killed(seed: int) -> None:
    def scenario() -> None:
        for of_the_host in (False, True):
            job = Job(seed, (2, 3)).begun()
            killed = job.host if of_the_host else job.member
            killed.kill()
            job.expect(job.without(killed), within=5.0)

    scenario()
    if not seed:
        lost = Rule(Rounds, "lost", always(set()))
        expect_found("go_on_without_a_lost_participant", lost, run=scenario, finding="after 5 s")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("least", "follows"), [(2, "a new round begins without it"), (3, "a new round takes 3 nodes, and 2 are here")]
)
def test_the_others_are_told_which_node_is_lost_and_its_host_knows_why(seed: int, least: int, follows: str) -> None:
    job = Job(seed, (least, 3)).begun()
    host, killed = job.host, job.member
    killed.kill()
    job.world.run(3.0)
    for each in job.without(killed):
        (told,) = [notice for notice in each.notices if " has lost " in notice]
        why = f": {CLOSED_BY_PEER}" if each is host else ""
        assert told == f"job 'job' has lost {killed.identity.who}{why}; {follows}"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_others_go_on_without_a_node_that_is_cut_off(seed: int) -> None:
    for of_the_host in (False, True):
        job = Job(seed, (2, 3)).begun()
        lost = job.host if of_the_host else job.member
        job.network.cut(lost.machine)
        job.expect(job.without(lost), within=SILENT_SECONDS + COMPANIONS_SECONDS + 3.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_comes_back_makes_the_job_whole_and_comes_last(seed: int) -> None:
    job = Job(seed, (2, 3)).begun()
    first = next(each for each in job.running if each.workers is not None and each.workers[1].rank == 0)
    first.kill()
    job.expect(job.without(first), within=5.0)
    job.running.append(job.start(first.machine.name, at=1.0))
    job.expect(job.running, within=5.0)
    assert job.running[-1].workers is not None
    assert job.running[-1].workers[1].rank == 2, "its disk can be empty"


@pytest.mark.parametrize("seed", [7])
def test_a_host_that_founds_again_waits_for_an_earlier_host_that_had_come_back(seed: int) -> None:
    job = Job(seed, (2, 5)).begun()
    earlier = job.host
    job.network.cut(earlier.machine)
    job.world.run(SILENT_SECONDS + COMPANIONS_SECONDS)
    job.network.heal(earlier.machine)
    job.expect(job.running, within=30.0)
    host = job.host
    for each in job.running:
        job.network.cut(each.machine)
    job.world.run(12.0)
    for each in job.running:
        job.world.after(1.0 if each is earlier else 0.0, functools.partial(job.network.heal, each.machine))
    job.expect(job.running, within=30.0)
    assert job.host is host is not earlier
    assert job.numbers() == [0] * 5, "one round, and not another one for the earlier host"


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_that_come_one_by_one_do_not_restart_the_others_each_time(seed: int) -> None:
    job = Job(seed, (1, 8), 5)
    job.expect(job.running, within=LAST_CALL + 3.0)
    for _ in range(2):
        job.running.append(job.start(f"m{len(job.running)}"))
        job.world.run(LAST_CALL / 5)
    assert job.numbers() == [0] * 5
    job.expect(job.running, within=LAST_CALL)
    assert set(job.numbers()) == {1}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_in_a_crash_loop_restarts_a_full_job_seldom(seed: int) -> None:
    """Each end of it costs a round, and so would each return."""
    job = Job(seed, (2, 3)).begun()
    looping, before = job.member, job.numbers()[0]
    job.without(looping)
    for _ in range(12):
        looping.kill()
        looping = job.start("m9", at=2.0)
        job.world.run(5.0)
    rounds = job.numbers()[0] - before
    assert 2 <= rounds <= 2 + 2 * (60 / LAST_CALL) + 1, f"{rounds} rounds in 60 s"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_whose_workers_do_not_end_is_left_out(seed: int) -> None:
    job = Job(seed, (2, 3)).begun()
    hung = job.member
    hung._stop_workers = lambda: None  # type: ignore[method-assign]
    failing = next(each for each in job.running if each is not hung)
    failing.fail_workers()
    job.world.run(STOP_SECONDS - 1.0)
    assert failing.workers is None
    left = job.without(hung)
    job.world.run(3.0)
    assert [each.workers[1].size for each in left if each.workers is not None] == [2, 2]
    assert hung.outcome is not None, "it keeps its seat"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_end_of_an_agent_ends_the_job_unless_it_got_no_round(seed: int) -> None:
    job = Job(seed, (2, 5), 3)
    job.expect(job.running, within=LAST_CALL + 5.0)
    newcomer = job.start("m9")
    job.world.run(1.0)
    assert newcomer.outcome is not None
    newcomer.agent.close("ended by RendezvousTimeoutError", failed=True)
    newcomer._carry_out()
    newcomer._end()
    job.world.run(LAST_CALL)
    assert job.numbers() == [0, 0, 0]
    assert not any(each.agent.job_end is JobEnd.ANNOUNCED for each in job.running)
    job.member.close()
    job.world.run(1.0)
    rest = [each for each in job.running if each.alive]
    assert [each.agent.job_end is JobEnd.ANNOUNCED for each in rest] == [True, True]
    rest[0].fail_workers()
    job.world.run(LAST_CALL)
    assert rest[0].workers is None
    assert rest[1].workers is not None, "healthy workers go on"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_that_is_done_is_not_waited_for(seed: int) -> None:
    job = Job(seed, (2, 3)).begun()
    done = job.member
    done.agent.stop_electing(done.now)
    done._flush()
    failing = next(each for each in job.running if each is not done)
    failing.fail_workers()
    job.world.run(2.0)
    assert [each.workers[1].size for each in job.without(done) if each.workers is not None] == [2, 2]
    done.kill()
    job.world.run(2.0)
    assert job.numbers() == [1, 1], "its end restarts nobody"


# --- mistakes -------------------------------------------------------------------------------------------------------


def for_ever(right: float | None, rounds: Rounds, *_: object) -> float | None:
    return None if rounds.participants - rounds._waiting.keys() else right


def at_once(right: float | None, rounds: Rounds, present: int) -> float | None:
    return None if right is None else float("-inf")


@pytest.mark.parametrize(
    ("mistake", "seam", "scenario", "seed"),
    [
        ("wait_for_ever", Rule(Rounds, "begins_at", for_ever), test_a_node_whose_workers_do_not_end_is_left_out, 0),
        (
            "await_those_that_are_done",
            Act(Rounds, "said_done", nothing),
            test_an_agent_that_is_done_is_not_waited_for,
            0,
        ),
        (
            "restart_for_each_newcomer",
            Rule(Rounds, "newcomers_at", at_once),
            test_nodes_that_come_one_by_one_do_not_restart_the_others_each_time,
            0,
        ),
        (
            "restart_for_each_return",
            Rule(Rounds, "newcomers_at", at_once),
            test_a_node_in_a_crash_loop_restarts_a_full_job_seldom,
            0,
        ),
        (
            "begin_without_companions",
            Rule(Rounds, "_pause", always(0.0)),
            test_a_host_that_founds_again_waits_for_an_earlier_host_that_had_come_back,
            7,
        ),
    ],
)
def test_a_mistake_about_rounds_is_found(mistake: str, seam: Seam, scenario: Callable[[int], None], seed: int) -> None:
    expect_found(mistake, seam, run=lambda: scenario(seed))
