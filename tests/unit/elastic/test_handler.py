"""The handler against a gathering without a network: all agents are threads of this process."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier

from mingle.distributed import gloo
from mingle.elastic import handler as agent_handler
from mingle.elastic import round_store, worker_store
from mingle.elastic import settings as agent_settings
from mingle.elastic.handler import NEVER, MingleRendezvousHandler, first_line
from mingle.errors import ConfigurationError, DiscoveryTimeoutError, MingleError
from mingle.protocol.machine import Formation
from mingle.wire.frames import Begin, ProcessInfo
from tests.support.fixed_gathering import FixedGathering, Place

SECONDS = 30


class Agent:
    """One of MIN to MAX agents; a round of fewer than MAX waits a second for the others."""

    def __init__(self, job: Job, minimum: int, maximum: int, *, timeout: bool = False, **given: Any) -> None:
        wanted = agent_settings.resolve(
            {"MINGLE_PROGRESS": "off"},
            run_id="handled",
            endpoint="",
            minimum=minimum,
            maximum=maximum,
            config={"last_call_timeout": "1", **given.pop("config", {})},
            **given,
        )
        self.gathering = FixedGathering(job.place, wanted, timeout=timeout)
        self.handler = MingleRendezvousHandler(wanted, self.gathering)  # type: ignore[arg-type]
        self._pool = job.pool

    def next(self) -> RendezvousInfo:
        return self.handler.next_rendezvous()

    def later(self) -> Future[RendezvousInfo]:
        """Wait for a round in a thread."""
        return self._pool.submit(self.next)

    def waiting(self) -> int:
        return self.handler.num_nodes_waiting()


class Job:
    """The agents of one job, all shut down at the end however a test ends."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.place = Place()
        self.pool = pool
        self.agents: list[Agent] = []

    def agent(self, minimum: int = 2, maximum: int = 2, **given: Any) -> Agent:
        self.agents.append(Agent(self, minimum, maximum, **given))
        return self.agents[-1]

    def together(self, more: int = 0) -> list[RendezvousInfo]:
        """Bring all agents, and so many new ones, into one round."""
        for _ in range(more):
            self.agent()
        futures = [agent.later() for agent in self.agents]
        return [future.result(SECONDS) for future in futures]

    def pair(self, minimum: int = 2) -> list[Agent]:
        """Two agents in one round."""
        both = [self.agent(minimum) for _ in range(2)]
        self.together()
        return both

    def waiting(self) -> list[int]:
        return [agent.waiting() for agent in self.agents]


@pytest.fixture
def job() -> Iterator[Job]:
    with ThreadPoolExecutor(4) as pool:
        made = Job(pool)
        yield made
        for agent in made.agents:
            agent.handler.shutdown()
        made.place.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def bootstrap(info: RendezvousInfo) -> tuple[str, int]:
    place = info.bootstrap_store_info
    assert place is not None
    return place.master_addr, place.master_port


# --- the next round --------------------------------------------------------------------------------------------------


def test_two_agents_meet_and_part(job: Job) -> None:
    infos = job.together(2)
    first, second = job.agents
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    address, port = bootstrap(infos[0])
    assert bootstrap(infos[1]) == (address, port)
    assert address == "127.0.0.1"
    # Its server is there already, in an agent: workers are clients.
    assert first.handler.use_agent_store
    TCPStore(address, port, is_master=False, wait_for_workers=False).set("a worker", "was here")
    assert (first.handler.get_backend(), first.handler.get_run_id()) == ("mingle", "handled")
    assert job.waiting() == [0, 0]
    assert not first.handler.is_closed()
    assert first.handler.shutdown()
    assert second.handler.is_closed()
    assert second.waiting() == 0
    with pytest.raises(RendezvousClosedError, match="'handled' has been closed by one of its agents"):
        second.next()
    assert second.handler.shutdown()
    assert second.gathering.closed == "closed"


def test_the_workers_are_told_their_round_and_a_later_one_sorts_after_it(job: Job) -> None:
    """A node that was left out of a round of the same session can still have workers of the last one."""
    agent, told = job.agent(1, 1), []
    for session in range(2):
        for number in range(2):
            agent.next()
            told.append(os.environ["MINGLE_GENERATION"].rpartition("-"))
            assert told[-1][0] == f"{session:010d}-{number:06d}"
        job.place.lose()
    names = [each[2] for each in told]
    assert names[0] == names[1] != names[2] == names[3], "sessions that don't know each other can have one number"
    assert agent.gathering.asked == [NEVER, (0, 0), (0, 0), (0, 0)]
    agent.handler.shutdown()
    assert "MINGLE_GENERATION" not in os.environ


def test_a_survivor_comes_before_a_node_that_joins_after_the_loss_of_the_session(job: Job) -> None:
    assert job.agent(1, 2, config={"node_rank": "1"}).next().rank == 0
    job.place.lose()
    job.agent(1, 2, config={"node_rank": "0"})
    assert [info.rank for info in job.together()] == [0, 1]


def test_a_round_that_did_not_begin_makes_no_survivor(job: Job) -> None:
    began, waits = (job.agent(config={"node_rank": number}) for number in ("1", "0"))
    waits.gathering.held = False
    waiting = waits.later()
    assert began.next().rank == 1
    job.place.lose()
    waits.gathering.held = True
    assert began.next().rank == 0
    assert waiting.result(SECONDS).rank == 1


def test_a_round_counts_only_while_the_lease_is_valid(job: Job) -> None:
    agent = job.agent(1, 1)
    agent.gathering.held = False
    waiting = agent.later()
    until(lambda: agent.gathering.state.round is not None)
    threading.Event().wait(0.2)
    assert not waiting.done()
    # The loss comes first: a lease that is valid for a moment before it would let the first round count.
    job.place.lose("its lease has ended")
    agent.gathering.held = True
    waiting.result(SECONDS)
    assert agent.gathering.gathered == 2
    assert os.environ["MINGLE_GENERATION"].startswith("0000000001-")


def test_a_round_after_which_another_one_has_to_follow_is_not_returned(job: Job) -> None:
    agent, lost = job.agent(1, 2), job.agent(1, 2)
    agent.gathering.held = lost.gathering.held = False
    waiting = [agent.later(), lost.later()]
    until(lambda: agent.gathering.state.round is not None)
    job.place.lose_node(lost.gathering)
    agent.gathering.held = True
    assert waiting[0].result(SECONDS).world_size == 1
    assert agent.gathering.asked == [NEVER, NEVER], "it has said NEXT again"
    assert agent.gathering.gathered == 1, "in the same session"
    lost.gathering.held = True
    job.place.end()
    assert isinstance(waiting[1].exception(SECONDS), RendezvousClosedError)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("end", "said"), [(Place.ending, "closed by one of its agents"), (Place.end, "has ended: ")])
def test_a_job_that_ends_while_a_round_forms_begins_none(
    job: Job, end: Callable[[Place], None], said: str, begun: bool
) -> None:
    agent = job.agent(1, 1) if begun else job.agent()
    agent.gathering.held = False
    forming = agent.later()
    until(lambda: agent.gathering.state.round is not None if begun else bool(agent.gathering.asked))
    end(job.place)
    with pytest.raises(RendezvousClosedError, match=said):
        forming.result(SECONDS)


def test_doubtful_node_ranks_are_pointed_out_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.agent(config={"node_rank": "0"})
    job.agent()
    for _ in range(2):
        assert [info.rank for info in job.together()] == [0, 1]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2, "by each agent"
    assert all(text.startswith("job handled: some nodes ask for a node rank") for text in said)


# --- what the workers inherit ----------------------------------------------------------------------------------------


def test_the_workers_inherit_the_interface_unless_the_user_chose(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_SOCKET_IFNAME", "mine")
    agent = job.agent(1, 1, local_addr="localhost")
    assert bootstrap(agent.next())[0] == "localhost"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["TP_SOCKET_IFNAME"] == "mine"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    assert agent.handler.shutdown()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("chosen", [None, "lo", "eth7"])
@pytest.mark.parametrize("by_itself", ["127.0.0.1", "10.0.0.1"])
def test_the_workers_gloo_is_told_the_address_where_it_would_take_another(
    job: Job, monkeypatch: pytest.MonkeyPatch, by_itself: str, chosen: str | None
) -> None:
    monkeypatch.setattr(gloo, "default_address", lambda _: by_itself)
    if chosen is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    before = dict(os.environ)
    agent = job.agent(1, 1)
    agent.next()
    told = gloo.for_workers("127.0.0.1", before)
    inherited = {name: value for name, value in os.environ.items() if name in told}
    if by_itself == "10.0.0.1" and chosen != "eth7":
        assert inherited == told
    else:
        assert inherited == {name: value for name, value in before.items() if name in told}
    assert agent.handler.shutdown()
    assert os.environ == before


# --- while the workers run -------------------------------------------------------------------------------------------


def test_a_node_that_comes_late_or_vanishes_makes_another_round_necessary(job: Job) -> None:
    """With torch alone the others' workers would wait in a collective until that times out."""
    agent, late = job.agent(1), job.agent(1)
    assert agent.next().world_size == 1
    joins = late.later()
    until(lambda: agent.waiting() == 1)
    assert agent.next().world_size == 2
    assert joins.result(SECONDS).world_size == 2
    assert agent.waiting() == 0
    job.place.lose_node(late.gathering)
    assert agent.waiting() == 1
    assert agent.next().world_size == 1
    assert agent.waiting() == 0


def test_the_loss_of_the_store_is_survived(job: Job) -> None:
    agents = job.pair()
    assert job.waiting() == [0, 0]
    job.place.lose()
    assert job.waiting() == [1, 1]
    assert {info.world_size for info in job.together()} == {2}
    assert [agent.gathering.gathered for agent in agents] == [2, 2]
    assert job.waiting() == [0, 0]


def test_the_store_is_lost_while_a_round_forms(job: Job) -> None:
    first = job.agent()
    forming = first.later()
    until(lambda: bool(first.gathering.asked))
    assert not forming.done()
    job.place.lose()
    assert job.agent().next().world_size == 2
    assert forming.result(SECONDS).world_size == 2
    assert first.gathering.gathered == 2


ROLE = json.dumps({"role": "default", "rank": 0, "local_world_size": 2})


def test_the_store_is_lost_while_roles_are_exchanged(job: Job) -> None:
    infos = job.together(2)
    for info in infos:
        info.store.set(round_store.ROLE + str(info.rank), ROLE)
    waiting = [job.pool.submit(info.store.get, round_store.RANKS + str(info.rank)) for info in infos]
    threading.Event().wait(0.2)
    assert not any(each.done() for each in waiting)
    job.place.lose()
    for info, each in zip(infos, waiting, strict=True):
        # Ranks that will do for the moment until torchrun asks:
        assert json.loads(each.result(SECONDS)) == [2 * info.rank, 4] * 2
    assert job.waiting() == [1, 1]
    job.together()
    assert job.waiting() == [0, 0]


def test_store_that_fails_a_moment_before_the_gathering_notices_is_lost(job: Job) -> None:
    agent = job.agent()
    agent.gathering.gather()
    loss = threading.Timer(0.1, job.place.lose)
    loss.start()
    assert agent.handler.is_lost()
    loss.join()


# --- the end of the job ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "said"), [(Place.ending, "closed by one of its agents"), (Place.end, "has finished")])
def test_the_end_of_the_job_restarts_nobody_but_workers_with_stand_in_ranks_and_starts_no_round(
    job: Job, end: Callable[[Place], None], said: str
) -> None:
    agent, _ = job.pair()
    end(job.place)
    assert job.waiting() == [0, 0]
    agent.gathering.lost = "the host is gone"
    assert agent.waiting() == 0
    agent.gathering.lost, agent.handler.round_is_void = None, True
    assert agent.waiting() == 1
    with pytest.raises(RendezvousClosedError, match=said):
        agent.next()
    assert agent.handler.is_closed()


def test_a_node_that_ends_for_good_ends_the_job_for_all_and_restarts_nobody(job: Job) -> None:
    agent, ends = job.pair(1)
    assert ends.handler.shutdown()
    assert (ends.gathering.closed, ends.gathering.failed) == ("closed", False)
    assert agent.waiting() == 0
    assert agent.handler.is_closed()


def test_a_node_that_ends_before_its_first_round_ends_the_job_for_nobody(job: Job) -> None:
    agent, newcomer = job.agent(1), job.agent(1)
    agent.next()
    waiting = newcomer.later()
    until(lambda: agent.waiting() == 1)
    assert newcomer.handler.shutdown()
    assert (newcomer.gathering.closed, newcomer.gathering.failed) == ("closed", True)
    assert not agent.handler.is_closed()
    assert agent.next().world_size == 1
    job.place.lose()
    assert isinstance(waiting.exception(SECONDS), RendezvousClosedError)


@pytest.mark.parametrize("ended", [False, True])
def test_a_node_that_gives_up_its_wait_for_a_round_ends_the_job_for_nobody_unless_it_has_ended(
    job: Job, ended: bool
) -> None:
    agent, waits = job.agent(), job.agent(config={"join_timeout": "1"})
    job.together()
    if ended:
        assert agent.handler.shutdown()
    with pytest.raises(RendezvousClosedError if ended else RendezvousTimeoutError):
        waits.next()
    assert waits.handler.shutdown()
    assert waits.gathering.failed is not ended
    assert agent.handler.is_closed() is ended


def test_a_handler_that_is_closed_before_it_gathered_starts_nothing(job: Job) -> None:
    agent = job.agent()
    agent.handler.set_closed()
    assert agent.handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        agent.next()
    assert agent.gathering.gathered == 0


def test_the_reason_of_an_end_reaches_the_gathering(job: Job) -> None:
    agent = job.agent()
    with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
        stack.callback(agent.handler.shutdown)
        raise KeyError
    assert agent.gathering.closed == "ended by KeyError"


def test_a_call_in_the_store_of_a_job_that_has_ended_says_why(job: Job) -> None:
    infos = job.together(2)
    job.place.end("node-1 has finished")
    with pytest.raises(RendezvousConnectionError, match="node-1 has finished"):
        infos[0].store.multi_get([round_store.ROLE + "0"])


def in_exit_barrier(job: Job, infos: list[RendezvousInfo]) -> list[Future[None]]:
    """Let these agents, whose workers are done, wait for all others."""
    wait = [job.pool.submit(barrier, i.store, i.world_size, round_store.EXIT_BARRIER, 60) for i in infos]
    until(lambda: all(agent.gathering.done for agent in job.agents[: len(infos)]))
    threading.Event().wait(0.3)
    assert not any(each.done() for each in wait)
    return wait


def test_the_exit_barrier_ends_with_the_gathering(job: Job) -> None:
    infos = job.together(2)
    infos[0].store.set("other", "key")
    assert not job.agents[0].gathering.done
    (waiting,) = in_exit_barrier(job, infos[:1])
    job.place.lose("the host is gone")
    with pytest.raises((RendezvousConnectionError, RuntimeError)):
        waiting.result(SECONDS)


def test_the_exit_barrier_ends_for_all_once_nobody_else_can_come(job: Job) -> None:
    host, _, _ = (job.agent(3, 3) for _ in range(3))
    waiting = in_exit_barrier(job, job.together()[:2])
    host.gathering.round_over = True
    for each in waiting:
        each.result(SECONDS)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_too_few_nodes_are_a_timeout_that_says_who_was_there(job: Job) -> None:
    agent = job.agent(timeout=True)
    with pytest.raises(RendezvousTimeoutError, match="1 of 2 nodes") as error:
        agent.next()
    assert isinstance(error.value.__context__, DiscoveryTimeoutError)
    assert error.value.__cause__ is None, "torchrun would print the same message twice"
    assert agent.waiting() == 0
    assert not agent.handler.is_closed()


def test_a_round_that_does_not_begin_in_time_is_a_timeout(job: Job) -> None:
    agent = job.agent(1, 3, config={"join_timeout": "1"})
    with pytest.raises(RendezvousTimeoutError, match="no round of the job began within 1 s") as error:
        agent.next()
    assert "fewer than 2 nodes are there" in str(error.value), "MIN is less, and they could not keep the session"


def test_a_round_that_too_few_nodes_answer_is_a_timeout(job: Job) -> None:
    agent = job.agent(1, 1, config={"join_timeout": "1"})
    agent.gathering.held = False
    with pytest.raises(RendezvousTimeoutError, match="a round was complete, and too few nodes answered within 2 s"):
        agent.next()


def test_a_long_wait_for_a_round_is_explained(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    waits = job.agent(2, 3).gathering
    waits.waits_long, waits.present = True, (ProcessInfo(hostname="desk2", pid=7), ProcessInfo(hostname="desk3", pid=8))
    job.agent(2, 3)
    for first in (True, False):
        caplog.clear()
        job.together()
        (said,) = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
        assert "it takes 2 nodes or more" in said
        assert ("the first one waits 1 s (last_call_timeout)" in said) is first
        assert "; here are host desk2, pid 7; host desk3, pid 8; this node waits 600 s at most (join_timeout)" in said


def test_a_failure_of_the_gathering_is_an_error_that_says_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = job.agent(1, 1)

    def fail(*_: object) -> None:
        raise MingleError.explain("its loop has failed", cause="a bug", remedy="report it")

    monkeypatch.setattr(agent.gathering, "next_round", fail)
    with pytest.raises(RendezvousError, match="its loop has failed") as error:
        agent.next()
    assert error.value.__cause__ is None, "torchrun would print the same message twice"


# --- stores that fail ------------------------------------------------------------------------------------------------


class BrokenStores:
    """Has the stores of the first rounds fail; notes the session of each attempt, counted from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agent: Agent, *failures: Callable[[], Exception]) -> None:
        self.attempts: list[int] = []
        self._failures = list(failures)
        self._gathering = agent.gathering
        self._meet = worker_store.meet
        monkeypatch.setattr(agent_handler, "LOSS_SECONDS", 0.1)
        monkeypatch.setattr(worker_store, "meet", self.meet)

    def meet(self, *arguments: Any, **options: Any) -> worker_store.Stores:
        self.attempts.append(self._gathering.gathered)
        if self._failures:
            failure = self._failures.pop(0)()
            raise failure
        return self._meet(*arguments, **options)


def broken() -> Exception:
    return RuntimeError("wait timeout\nC++ frames")


def test_a_round_that_loses_its_agent_zero_is_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = job.agent(1, 1)
    stores = BrokenStores(monkeypatch, agent, broken, lambda: RendezvousConnectionError("reset"))
    assert agent.next().world_size == 1
    assert stores.attempts == [1, 1, 1]
    assert "joining the next one: wait timeout" in caplog.text
    assert "joining the next one: reset" in caplog.text
    assert "C++" not in caplog.text
    assert first_line(RuntimeError()) == "RuntimeError", "it says nothing"


def test_rounds_that_broke_in_an_earlier_session_do_not_count(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Exception:
        job.place.lose()
        return RendezvousConnectionError("reset")

    agent = job.agent(1, 1)
    stores = BrokenStores(monkeypatch, agent, broken, broken, lost, broken, broken)
    assert agent.next().world_size == 1
    assert stores.attempts == [1, 1, 1, 2, 2, 2]


def test_stores_that_fail_while_their_host_lives_are_an_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_handler, "LOSS_SECONDS", 0.1)
    agent = job.agent(1, 1)
    agent.next()
    job.place.close()  # and nobody says so
    with pytest.raises(RendezvousConnectionError, match="the agents' store can't be reached"):
        agent.next()
    assert len(agent.gathering.asked) == 1 + agent_handler.BROKEN_ROUNDS


def test_a_workers_store_that_cannot_be_opened_is_an_error_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> Exception:
        return ConfigurationError.explain("port 29400 is taken", cause="another process", remedy="stop it")

    agent = job.agent(1, 1)
    stores = BrokenStores(monkeypatch, agent, taken)
    with pytest.raises(RendezvousError, match="port 29400 is taken"):
        agent.next()
    assert stores.attempts == [1]


@pytest.mark.parametrize("lost", ["session", "node"])
def test_a_workers_store_that_agent_zero_never_opens_is_given_up_with_the_round(
    job: Job, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    real, entered, ends = worker_store.meet, threading.Event(), threading.Event()

    def meet(formation: Formation, begun: Begin, **options: Any) -> worker_store.Stores:
        if begun.rank == 0 and not entered.is_set():
            entered.set()
            ends.wait(SECONDS)
        return real(formation, begun, **options)

    agent, gone = job.pair(1)
    monkeypatch.setattr(worker_store, "meet", meet)
    waiting = [gone.later(), agent.later()]
    assert entered.wait(SECONDS)
    if lost == "session":
        job.place.lose()
        assert {each.result(SECONDS).world_size for each in waiting} == {2}
    else:
        job.place.lose_node(gone.gathering)
        assert waiting[1].result(SECONDS).world_size == 1
    assert agent.gathering.gathered == (2 if lost == "session" else 1)
    job.place.end()
    ends.set()
