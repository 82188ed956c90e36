"""Gathering, what the torchrun back-end uses, with real sockets on `lo` and several agents in one process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from mingle.config.launchers import Placement
from mingle.config.settings import Settings
from mingle.elastic import gathering as agents
from mingle.elastic import leases, member, quorum
from mingle.elastic.gathering import Gathered, Gathering
from mingle.elastic.quorum import Nodes, Policy
from mingle.engine import party, store
from mingle.engine.driver import Driver
from mingle.engine.party import ANSWER_SECONDS, FILES_PER_NODE
from mingle.errors import DiscoveryTimeoutError, InterfaceError, MingleError
from mingle.network.transport import NothingOpenedError
from mingle.protocol.explain.observations import NetworkFacts
from mingle.wire.frames import Begin
from tests.support.loopback import answers, job_name, longer, until
from tests.support.ports import free_udp_port

import torch.distributed  # isort: skip # noqa: F401 - takes seconds: here, and not within the time that a test allows


class Job:
    """Agents of one job, closed at the end."""

    def __init__(self) -> None:
        self.job_id = job_name("agents")
        self.port = free_udp_port()
        self.agents: list[Gathering] = []

    def agent(self, minimum: int = 2, maximum: int = 3, *, timeout: float = 60.0) -> Gathering:
        settings = Settings(
            job_id=self.job_id,
            placement=Placement(rank=None, world_size=maximum),
            discovery_timeout=timeout,
            port=self.port,
            interfaces=("lo",),
            family="4",
            progress="off",
            mesh="off",
        )
        policy = Policy(nodes=Nodes(minimum=minimum, maximum=maximum), last_call=0.5)
        self.agents.append(Gathering(settings, policy))
        return self.agents[-1]

    def session(self, minimum: int = 2, maximum: int = 3, *, count: int = 2) -> list[Gathering]:
        """Agents in one session, its host first."""
        several = [self.agent(minimum, maximum) for _ in range(count)]
        gather(*several)
        return sorted(several, key=lambda agent: agent.stores.server is None)

    def close(self) -> None:
        for agent in self.agents:
            agent.close("the test is over")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Give a job whose sessions outlast a machine that is busy with something else."""
    for module in (leases, quorum):
        monkeypatch.setattr(module, "LEASE_SECONDS", 60.0)
    for module in (leases, member):
        monkeypatch.setattr(module, "BINDING_SECONDS", 61.0)
    monkeypatch.setattr(member.ElasticMember, "host_silence", 61.0)
    made = Job()
    yield made
    made.close()


def gather(*several: Gathering) -> list[Gathered]:
    """Let all of them gather at once."""
    with ThreadPoolExecutor(len(several)) as pool:
        return list(pool.map(Gathering.gather, several))


def kill(agent: Gathering) -> None:
    """End an agent as SIGKILL does: the kernel closes its sockets, and nothing is said.

    With unread bytes the kernel would send a reset, which says nothing of the process's end: the others stay bound.
    """

    def die() -> None:
        for connection in agent.driver.connections._connections.values():
            with contextlib.suppress(OSError):  # it does not stand yet
                connection.socket.shutdown(socket.SHUT_WR)
        agent.driver.connections.close()
        agent._machine.closed = True
        agent._stopping = True

    agent.call(die)


def test_gathering_imports_without_torch() -> None:
    code = "import sys, mingle.elastic.gathering; sys.exit('torch' in sys.modules)"
    sources = Path(agents.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": str(sources)})


def test_an_agent_alone_opens_its_store_and_closes_it(job: Job) -> None:
    alone = job.agent(1, 1)
    (found,) = gather(alone)
    server, control = alone.stores.server, alone._machine.endpoints.port
    assert server is not None
    assert server.handle is not None
    assert answers(found.formation.store_port)
    assert answers(control)
    thread = alone._thread
    alone.close("the test is over")
    assert thread is not None
    assert not thread.is_alive()
    assert not answers(control)
    assert server.handle is None


def test_every_agent_makes_room_since_each_can_become_host(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(party, "make_room", lambda *count, what, quiet: asked.append((*count, quiet)))
    with ThreadPoolExecutor(1) as pool:
        agent = job.agent(1, 700)
        gathering = pool.submit(agent.gather)
        agent.ask(lambda: None)
        agent.close("the test is over")
        assert isinstance(gathering.exception(30), MingleError | None)
    assert asked == [(700, FILES_PER_NODE, True)]


def test_a_thread_that_the_system_refuses_is_an_error_and_a_later_call_starts_anew(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    alone = job.agent(1, 1)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(MingleError, match="can't start new thread"):
            alone.gather()
    assert not hasattr(alone, "driver")
    alone.gather()
    assert alone.state.gathered is not None


def test_agents_gather_and_share_a_store(job: Job) -> None:
    began = time.time()
    host, *others = several = job.session(count=3)
    found = gather(*several)
    assert len({each.formation.session for each in found}) == 1, "asked again, it is the same session"
    assert {(each.formation.store_address, each.formation.interface) for each in found} == {("127.0.0.1", "lo")}
    (generation,) = {each.generation for each in found}
    assert began - 1 <= generation <= time.time()
    assert host.stores.server is not None
    assert all(other.stores.server is None for other in others)
    assert host.stores.server.port == found[0].formation.store_port
    assert not any(agent.session_lost.is_set() or agent.state.lost or agent.state.ended for agent in several)


def test_a_host_that_ends_for_good_ends_the_job_for_all(job: Job) -> None:
    host, other = job.session()
    host.close("its workers failed")
    host.close("a second time")
    assert other.session_lost.wait(30)
    assert (other.state.lost, other.state.ended) == (None, "its workers failed")
    with pytest.raises(MingleError, match="has ended: its workers failed"):
        other.gather()
    with pytest.raises(MingleError, match="this agent has closed its part"):
        host.gather()


def test_round_of_a_session_that_is_lost_is_not_returned_and_the_next_gathering_begins_anew(job: Job) -> None:
    host, other = job.session(1, 2)
    first = other.gather()
    with ThreadPoolExecutor(1) as pool:

        def lost_meanwhile() -> bool:
            """The session is lost, and another one stands, just when the round could be returned."""
            if other.state.lost is None:
                kill(host)
                assert other.session_lost.wait(30)
                pool.submit(job.agent(1, 2).gather)
                until(stands)
            return False

        def stands() -> bool:
            other.call(lambda: other._machine.ask_round(other.clock()))
            return other.state.gathered is not None and other.state.hold.allows(other.clock() - 0.5, other.clock())

        assert not other.await_round(lost_meanwhile, 60.0)
    assert other.state.lost is not None
    assert other.gather().formation.session != first.formation.session
    assert (other.state.lost, other.session_lost.is_set()) == (None, False)


def test_round_is_returned_for_answers_to_what_was_asked_after_it_was_complete(job: Job) -> None:
    host, member = job.session()
    assert host.await_round(lambda: False, 30.0)
    stopped, goes_on = threading.Event(), threading.Event()
    member.call(lambda: (stopped.set(), goes_on.wait(30), None)[-1])
    assert stopped.wait(30)
    try:
        assert not host.await_round(lambda: False, 0.2), "its answers to earlier questions are young"
    finally:
        goes_on.set()
    assert host.await_round(lambda: False, 30.0)


def next_round(*several: Gathering) -> list[Begin | None]:
    """Let all of them wait for a round at once."""
    with ThreadPoolExecutor(len(several)) as pool:
        return list(pool.map(lambda agent: agent.next_round((-1, -1), 30.0), several))


def test_agents_begin_rounds_together_and_learn_that_another_one_has_to_follow(job: Job) -> None:
    host, other = several = job.session(2, 2)
    begun = next_round(*several)
    assert sorted((each.number, each.rank, each.size) for each in begun if each) == [(0, 0, 2), (0, 1, 2)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.next_round, (1, 0), 60.0)
        until(lambda: host.state.round_wanted)
        mine, others = host.next_round((-1, -1), 60.0), waiting.result(30)
    assert [(each.number, each.rank) for each in (others, mine) if each] == [(1, 0), (1, 1)]
    assert not any(agent.state.round_wanted for agent in several)


def test_a_round_that_does_not_begin_is_not_waited_for_without_end(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingle.elastic.gathering.REMARK_SECONDS", 0.05)
    host, _ = job.session(2, 2)
    remarks: list[None] = []
    with pytest.raises(TimeoutError):
        host.next_round((-1, -1), 0.3, lambda: remarks.append(None))
    assert remarks == [None]


@pytest.mark.parametrize("end", ["killed", "closed", "closed here"])
def test_a_wait_for_a_round_ends_with_the_session(job: Job, end: str) -> None:
    host, other = job.session()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.next_round, (-1, -1), 60.0)
        until(lambda: other._machine.memory.asked is not None)
        if end == "killed":
            kill(host)
        else:
            (host if end == "closed" else other).close("the test is over")
        assert waiting.result(30) is None
    assert (other.state.lost is not None) is (end == "killed")


def test_a_wait_for_a_round_of_a_lost_session_says_nothing_in_the_next_one(job: Job) -> None:
    host, other = job.session(1, 2)
    kill(host)
    assert other.session_lost.wait(30)
    gather(job.agent(1, 2))
    until(lambda: other.state.gathered is not None)
    assert other.next_round((-1, -1), 30.0) is None
    assert (other._machine.memory.asked, other._machine.memory.round) == (None, None)
    gather(other)
    assert {(each.number, each.size) for each in next_round(other, job.agents[-1]) if each is not None} == {(0, 2)}


@pytest.mark.parametrize("part", ["host", "member"])
def test_an_agent_that_gets_no_round_ends_the_job_for_nobody_else(job: Job, part: str) -> None:
    several = job.session(count=3)
    next_round(*several)
    leaves = several[0 if part == "host" else 2]
    leaves.close("ended by RendezvousTimeoutError", failed=True)
    stay = [agent for agent in several if agent is not leaves]
    if part == "host":
        assert all(agent.session_lost.wait(30) for agent in stay)
    gather(*stay)
    assert {each.size for each in next_round(*stay) if each is not None} == {2}
    assert not any(agent.state.ending or agent.state.ended for agent in stay)


def test_people_are_told_which_node_a_round_has_lost_while_no_caller_waits(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[str]()

    def told() -> list[str]:
        return [text for text in shown if " has lost " in text]

    monkeypatch.setattr(party.Party, "say", lambda _agent, _level, text, _error=None: shown.append(text))
    several = [job.agent() for _ in range(3)]
    for pid, agent in enumerate(several, start=1):  # one process has them all
        agent.identity = replace(agent.identity, who=replace(agent.identity.who, pid=pid))
    gather(*several)
    next_round(*several)
    leaves = next(agent for agent in several if agent.stores.server is None)
    leaves.close("ended by RendezvousTimeoutError", failed=True)
    until(lambda: len(told()) == 2)
    who, why = replace(leaves.identity.who, address="127.0.0.1"), "ended by RendezvousTimeoutError"
    lost = f"job {job.job_id!r} has lost {who}"
    assert sorted(told()) == sorted(f"{lost}{each}; a new round begins without it" for each in ("", f": {why}"))


def test_a_member_that_ends_for_good_ends_the_job_for_all(job: Job) -> None:
    host, other = several = job.session(1, 2)
    next_round(*several)
    other.close("its workers failed")
    until(lambda: host.state.ending)
    assert next_round(host) == [None]
    assert not host.session_lost.is_set(), "the others' workers continue"


def test_agent_with_finished_workers_gathers_no_more(job: Job) -> None:
    host, other = job.session(1, 2)
    other.workers_done()
    kill(host)
    assert other.session_lost.wait(30)
    # Its word and the loss may come in one round of the loop, in either order.
    until(lambda: other._machine.closed)


def test_too_few_nodes_are_an_error_that_counts_and_names_them_and_can_be_repeated(job: Job) -> None:
    def too_few(timeout: float) -> str:
        alone = job.agent(2, 4, timeout=timeout)
        for _ in range(2):
            with pytest.raises(DiscoveryTimeoutError) as failure:
                alone.gather()
        return str(failure.value)

    failure = longer(lambda seconds: too_few(1.5 * seconds), lambda said: "nodes were there" in said)
    assert "1 of 2 to 4 nodes were there" in failure
    assert f"pid {os.getpid()}" in failure
    for part in ("interfaces: lo ", f"UDP port {job.port}", "datagrams: "):
        assert part in failure


def test_a_call_that_is_interrupted_when_its_time_is_up_leaves_no_loop_at_rest(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop waits for what the caller finds out about this machine."""

    def interrupted() -> NetworkFacts:
        raise KeyboardInterrupt

    alone = job.agent(2, 4, timeout=0.5)
    monkeypatch.setattr(alone, "facts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alone.gather()
    until(lambda: isinstance(alone.state.failure, DiscoveryTimeoutError))


def test_closing_ends_a_call_that_waits(job: Job) -> None:
    waiting = job.agent(2, 2)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(waiting.gather)
        waiting.ask(lambda: None)
        waiting.close("changed its mind")
        with pytest.raises(MingleError, match="this agent has closed its part") as refused:
            call.result(30)
    assert "shutdown" in str(refused.value.cause)


def test_an_interrupt_while_the_thread_is_started_leaves_nothing_behind(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    alone = job.agent(1, 1)
    closed: list[str] = []
    storages = {"dir:/shared": SimpleNamespace(close=lambda: closed.append("dir:/shared"))}
    with monkeypatch.context() as patched:
        patched.setattr(party.folders, "storages", lambda *_: storages)
        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            alone.gather()
    assert closed == ["dir:/shared"]
    with pytest.raises(MingleError, match="this agent has closed its part"):
        alone.gather()
    alone.close("the test is over")
    assert not hasattr(alone, "driver")


def test_a_store_of_a_session_that_was_given_up_is_not_kept(job: Job) -> None:
    _, member = job.session(2, 2)
    given_up = store.open_server("127.0.0.1", None, b"S" * 16)
    member.ask(lambda: setattr(member.stores, "server", given_up))
    until(lambda: member.stores.server is None)
    assert given_up.handle is None


def test_sockets_that_cannot_be_opened_are_no_defect_of_ours(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Driver:
        raise NothingOpenedError(29499, {"eth0": "EADDRNOTAVAIL"})

    monkeypatch.setattr(party, "Driver", fail)
    agent = job.agent()
    with pytest.raises(InterfaceError, match="nothing could be opened for discovery on UDP port 29499"):
        agent.gather()
    agent.close("the test is over")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("part", ["host", "member"])
def test_a_thread_that_dies_while_the_job_runs_is_a_loss_at_once(
    job: Job, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, member = job.session(2, 2)
    formation = host.gather().formation
    mine, other = (host, member) if part == "host" else (member, host)
    client = socket.create_connection((formation.store_address, formation.store_port))
    control = mine._machine.endpoints.port
    mine.call(lambda: 1 // 0)
    assert mine.session_lost.wait(30)
    assert "unforeseen ZeroDivisionError" in (mine.state.lost or "")
    with client:
        client.settimeout(30)
        if part == "host":
            with contextlib.suppress(ConnectionResetError):  # torch had not accepted it yet
                assert client.recv(1) == b"", "calls on the store fail now, not at torch's timeout"
            until(lambda: not answers(formation.store_port))  # it would hold the others in a lost session
    until(lambda: not answers(control))
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(MingleError, match="unforeseen ZeroDivisionError") as caught:
            mine.gather()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert time.monotonic() - began < ANSWER_SECONDS, "no call waits for the thread that died"
    if part == "host":
        assert other.session_lost.wait(30), "the others see its connections end"
    mine.close("the test is over")
    # Another thread writes the log.
    until(lambda: "its loop was ended by an unforeseen ZeroDivisionError" in caplog.text)


def test_a_lease_that_has_ended_is_noticed_before_the_loop_does(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    several = job.session()
    assert all(agent.await_round(lambda: False, 60.0) for agent in several)
    later = agents.boot_time() + 80.0
    monkeypatch.setattr(agents, "boot_time", lambda: later)
    assert not any(agent.await_round(lambda: False, 0.5) for agent in several)
    assert not any(agent.session_lost.is_set() for agent in several)
