"""The rendezvous of one session, its backend and its monitor, without a network."""

from __future__ import annotations

import inspect
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from mingle.config.order import MAX_ORDER_BYTES, order_key
from mingle.detached import AbandonedError
from mingle.elastic import rounds as agent_rounds
from mingle.elastic import settings as agent_settings
from mingle.elastic.rounds import (
    BACKEND,
    Backend,
    Monitor,
    Rounds,
    Since,
    doubts,
    member_of,
    node_name,
    open_for_workers,
)
from mingle.engine.store import StoreServer, open_server, shut_down_connections
from mingle.wire.frames import MAX_GENERATION
from tests.support.fixed_gathering import FixedGathering, Place, set_last_call


@pytest.fixture(autouse=True)
def _no_store_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the handler sets it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def make(
    place: Place, *, order: bytes = b"", since: Since | None = None, small: bool = False, **config: str
) -> tuple[Rounds, FixedGathering]:
    config = {"last_call_timeout": "60", **config}
    wanted = agent_settings.resolve({}, run_id="rounds", endpoint="", minimum=1, maximum=2, config=config)
    gathering = FixedGathering(place)
    gathered = replace(gathering.gather(), small=small)
    return Rounds(wanted, gathering, gathered, order=order, since=since), gathering  # type: ignore[arg-type]


def inner_of(rounds: Rounds) -> DynamicRendezvousHandler:
    assert rounds._opened is not None
    return rounds._opened[0]


def monitor_of(rounds: Rounds) -> Monitor:
    assert rounds._opened is not None
    return rounds._opened[1]


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


# --- which node is first ---------------------------------------------------------------------------------------------

EXAMPLES = settings(derandomize=True, database=None, deadline=None)
NODES = st.tuples(st.integers(0, MAX_GENERATION), st.integers(0, 10**8 - 1), st.binary(max_size=MAX_ORDER_BYTES))


@EXAMPLES
@given(NODES, NODES, st.binary(min_size=16, max_size=16))
def test_torch_sorts_names_by_first_round_and_then_by_order(
    one: tuple[int, int, bytes], other: tuple[int, int, bytes], member: bytes
) -> None:
    names = [node_name(Since(*node[:2]), node[2], "10.0.0.1", member) for node in (one, other)]
    assert (names[0] < names[1]) == (one < other)
    assert [member_of(name) for name in names] == [member, member]


def test_of_two_agents_on_one_machine_the_older_process_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for pid in (999, 1000, 30000):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        names.append(node_name(Since(1, 0), b"\1node", "10.0.0.1", secrets.token_bytes(16)))
    assert names == sorted(names)


def ranks(agents: list[Rounds]) -> list[int]:
    """Let agents come for a round together; return their ranks."""
    with ThreadPoolExecutor(len(agents)) as pool:
        joined = list(pool.map(Rounds.next, agents))
    for agent in agents:
        agent.begun()
    assert {each.world_size for each in joined} == {len(agents)}
    return [each.rank for each in joined]


@pytest.mark.parametrize("orders", [(b"\1node\1\x32", b"\1node\2\x31\x30"), (b"\0\0", b"\0\1"), (b"\0\7", b"\1node1")])
def test_agents_that_start_together_are_in_order(place: Place, orders: tuple[bytes, bytes]) -> None:
    for first in (0, 1):
        agents = [make(place, order=order)[0] for order in (orders[first], orders[1 - first])]
        assert ranks(agents) == [first, 1 - first]
        assert ranks(agents) == [first, 1 - first]
        for agent in agents:
            agent.end()
        place.lose()  # everything starts again


def test_a_node_that_comes_later_comes_after_those_that_are_there(place: Place) -> None:
    """Its disk can be empty: as rank 0 it would send fresh weights to the nodes that have trained."""
    old, new = make(place, order=b"\1node9", small=True)[0], make(place, order=b"\1node1")[0]
    assert ranks([old]) == [0]
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(new.next)
        until(lambda: old.nodes_waiting() == 1)
        assert old.next().rank == 0
        assert joining.result(30).rank == 1
    for agent in (old, new):
        agent.begun()
    assert [old.since, new.since] == [Since(0, 0), Since(0, 1)]
    assert ranks([old, new]) == [0, 1]
    for agent in (old, new):
        agent.end()


def test_survivors_of_a_session_come_before_nodes_that_join_the_next_one(place: Place) -> None:
    place.generation = 7
    names = [b"\1node9", b"\1node5", b"\1node1"]
    firsts = [Since(5, 3), Since(5, 0), None]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        agents = [make(place, order=names[each], since=firsts[each])[0] for each in (one, other)]
        assert ranks(agents) == ([1, 0] if (one, other) == (0, 1) else [0, 1])
        for agent in agents:
            agent.end()
        place.close()


def test_a_node_has_the_name_of_a_round_only_once_it_is_in_it(made: list[DynamicRendezvousHandler]) -> None:
    """Another node's write can come first, and the round become complete with it."""
    store = HashStore()
    late, quick = (node(store, made, minimum=1, maximum=3, name_in=lambda number: f"{number}.late") for _ in range(2))

    def enter(handler: DynamicRendezvousHandler) -> bool | None:
        executor = handler._op_executor
        executor._state = handler._state_holder.state  # type: ignore[attr-defined]
        executor._add_to_participants()  # type: ignore[attr-defined]
        handler._state_holder.mark_dirty()
        return handler._state_holder.sync()

    late._state_holder.sync()
    quick._state_holder.state.round = 4
    assert enter(quick)
    assert not enter(late)
    assert late._this_node.addr == "127.0.0.1"
    assert enter(late)
    assert late._this_node.addr == "4.late"
    assert set(late._state_holder.state.participants) == {late._this_node, quick._this_node}


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([b"\1node1", b"\1node2", b"\1node2"], ""),
        ([order_key(0, "", ""), order_key(1, "", "")], ""),
        ([order_key(0, "", ""), order_key(0, "", "") + b"\1a", order_key(0, "", "") + b"\1b"], ""),
        (
            [order_key(0, "", ""), b"\1node", b"\1node"],
            "some nodes ask for a node rank, and come first; these do not: 10.0.0.1, 10.0.0.2; "
            "fix: give each node a node rank of its own, or none",
        ),
    ],
)
def test_doubtful_node_ranks_are_named(orders: list[bytes], expected: str) -> None:
    names = [node_name(Since(1, 0), order, f"10.0.0.{number}", b"M" * 16) for number, order in enumerate(orders)]
    assert doubts(names) == expected


def test_doubts_are_pointed_out_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    agents = [make(place, order=order)[0] for order in (order_key(0, "", ""), b"\1node")]
    for _ in range(2):
        assert ranks(agents) == [0, 1]
    for agent in agents:
        agent.end()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in said if text.startswith("job rounds: some nodes ask for a node rank")] == [said[0]] * 2


# --- one session -----------------------------------------------------------------------------------------------------


def test_torch_is_told_its_own_settings_and_our_names(place: Place) -> None:
    made, gathering = make(
        place, last_call_timeout="1", join_timeout="7", keep_alive_interval="3", keep_alive_max_attempt="4"
    )
    assert made.next().world_size == 1
    inner = inner_of(made)
    told = inner.settings
    assert (told.run_id, told.min_nodes, told.max_nodes) == ("rounds", 1, 2)
    assert (told.timeout.join.seconds, told.timeout.last_call.seconds, told.timeout.close.seconds) == (7, 1, 30)
    if "keep_alive_interval" in inspect.signature(DynamicRendezvousHandler.from_backend).parameters:
        assert (told.keep_alive_interval.seconds, told.keep_alive_max_attempt) == (3, 4)
    else:  # torch 2.6 to 2.8 have them fixed
        assert (told.keep_alive_interval.seconds, told.keep_alive_max_attempt) == (5, 3)
    assert inner._this_node.addr == node_name(Since(0, 0), b"", "127.0.0.1", gathering.member)
    assert member_of(inner._this_node.addr) == gathering.member
    assert inner.get_backend() == BACKEND == "mingle"
    made.end()


def test_a_link_local_address_of_the_workers_store_has_the_zone_of_each_agents_interface(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines joined by one cable: a zone is a name on one machine, and torch can't connect without one."""
    opened: list[str] = []

    def open_here(address: str, _local_addr: str | None) -> StoreServer:
        opened.append(address)
        return open_server("127.0.0.1", None, b"S" * 16)

    monkeypatch.setattr(agent_rounds, "open_for_workers", open_here)
    agents = [make(place)[0] for _ in range(2)]
    for number, (agent, interface) in enumerate(zip(agents, ("eth0", "lan0"), strict=True)):
        agent._formation = structs.replace(agent._formation, address=f"fe80::{number}", interface=interface)
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(Rounds.next, agents))
    for agent in agents:
        agent.end()
    told = [each.bootstrap_store_info.master_addr for each in joined if each.bootstrap_store_info]
    address, _, zone = opened[0].partition("%")
    assert address == f"fe80::{['eth0', 'lan0'].index(zone)}"
    assert told == [f"{address}%eth0", f"{address}%lan0"]


def test_a_rendezvous_that_has_ended_is_not_entered(place: Place) -> None:
    made, _ = make(place)
    made.end()
    with pytest.raises(AbandonedError):
        made.next()


def test_the_end_of_a_rendezvous_ends_the_call_that_is_blocked_in_it_and_its_heartbeats(place: Place) -> None:
    made, _ = make(place, keep_alive_interval="1")
    other, _ = make(place)
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(made.next)
        kept = pool.submit(other.next).result(30).store
        waiting = pool.submit(joined.result(30).store.get, "never set")
        inner = inner_of(made)
        timer: Any = inner._keep_alive_timer
        threading.Event().wait(0.2)
        assert not waiting.done()
        made.end()
        with pytest.raises(RuntimeError):
            waiting.result(30)
    assert not timer._thread.is_alive()
    with pytest.raises(RendezvousConnectionError):
        inner.set_closed()
    # The connections of other agents and other stores remain.
    kept.set("key", "value")
    assert kept.get("key") == b"value"
    other.end()


@pytest.mark.parametrize(
    ("local_addr", "listens_on"),
    [(None, "127.0.0.1"), ("127.0.0.9", "127.0.0.9"), ("203.0.113.7", "0.0.0.0"), ("no such name", "0.0.0.0")],
)
def test_the_workers_store_listens_where_they_are_sent(local_addr: str | None, listens_on: str) -> None:
    server = open_for_workers("127.0.0.1", local_addr)
    assert server.address == listens_on
    server.release()


# --- the monitor -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, place: Place) -> Iterator[list[tuple[Rounds, FixedGathering]]]:
    """Two agents in one round, the first of which hosts; heartbeats would run out after 15 s."""
    monkeypatch.setattr(agent_rounds, "MONITOR_SECONDS", 0.1)
    made = [make(place) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert [each.world_size for each in pool.map(lambda pair: pair[0].next(), made)] == [2, 2]
    yield made
    for rounds, _ in made:
        rounds.end()


def reset_connections(rounds: Rounds) -> None:
    """Do what a firewall does that has forgotten them."""
    shut_down_connections(rounds._formation.store_address, rounds._formation.store_port)


def test_monitor_opens_new_connections_for_those_that_broke(pair: list[tuple[Rounds, FixedGathering]]) -> None:
    (host, _), _ = pair
    before = inner_of(host)._store
    reset_connections(host)
    until(lambda: inner_of(host)._store is not before)
    until(lambda: monitor_of(host)._failing_since is None)
    assert inner_of(host)._store.add("reached", 1) == 1
    assert host.nodes_waiting() == 0


def test_round_that_failed_is_joined_by_new_connections(
    monkeypatch: pytest.MonkeyPatch, pair: list[tuple[Rounds, FixedGathering]]
) -> None:
    agents = [rounds for rounds, _ in pair]
    for each in agents:
        monkeypatch.setattr(monitor_of(each), "_reconnect", str)
    for each in agents:
        reset_connections(each)
    with ThreadPoolExecutor(2) as pool:
        for failed in [pool.submit(rounds.next) for rounds in agents]:
            assert isinstance(failed.exception(30), RendezvousConnectionError | RuntimeError)
        assert [each.world_size for each in pool.map(lambda rounds: rounds.next(), agents)] == [2, 2]


def test_a_node_that_the_gathering_lost_is_not_waited_for(
    pair: list[tuple[Rounds, FixedGathering]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (host, gathering), (other, lost) = pair
    set_last_call(monkeypatch, 1)
    gathering.absent.add(lost.member)
    until(lambda: host.nodes_waiting() == 1)
    assert host.next().world_size == 1
    # It was alive after all: it sees that the others have continued, and joins them.
    until(lambda: other.nodes_waiting() == 1)


def test_an_agent_that_came_back_is_not_waited_for_as_the_node_it_was(
    pair: list[tuple[Rounds, FixedGathering]],
) -> None:
    (host, _), (other, back) = pair
    # Only its connection to the host was reset: no look finds it missing.
    other.end()
    again = Rounds(other._wanted, back, other._gathered)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(again.next)
        try:
            until(lambda: host.nodes_waiting() == 1)
        finally:
            again.end()
        assert isinstance(joining.exception(30), RendezvousConnectionError)


def test_a_node_that_is_missing_for_a_moment_is_not_lost(pair: list[tuple[Rounds, FixedGathering]]) -> None:
    (host, gathering), (_, other) = pair
    everybody, ended = gathering.present, threading.Event()
    assert everybody is not None
    seen = everybody
    ended.set()  # the test looks, and no thread
    monitor = Monitor(host._connect(), inner_of(host).settings, lambda: seen, ended, str)
    monitor.enter_round(host.number, 2)
    for _ in range(3):
        seen = everybody - {other.member}
        monitor._look()
        assert monitor._missed.total() == 1
        seen = everybody
        monitor._look()
        assert monitor._missed.total() == 0
    assert len(monitor._holder.state.participants) == 2
    assert monitor.nodes_waiting() == 0


def test_healthy_workers_are_not_restarted_because_a_heartbeat_is_late(
    pair: list[tuple[Rounds, FixedGathering]],
) -> None:
    (host, gathering), (other, lost) = pair
    holder = inner_of(host)._state_holder

    def written() -> bool:
        for node in holder.state.last_heartbeats:
            holder.state.last_heartbeats[node] = datetime.now(timezone.utc) - timedelta(hours=1)
        holder.mark_dirty()
        return bool(holder.sync())

    with inner_of(host)._heartbeat_lock, inner_of(other)._heartbeat_lock:
        until(written)
        threading.Event().wait(5 * agent_rounds.MONITOR_SECONDS)
        assert [host.nodes_waiting(), other.nodes_waiting()] == [0, 0]
    gathering.absent.add(lost.member)
    until(lambda: host.nodes_waiting() == 1)


def test_no_node_is_lost_where_the_members_are_not_known(pair: list[tuple[Rounds, FixedGathering]]) -> None:
    (host, gathering), (other, _) = pair
    gathering._hosts = False
    threading.Event().wait(1)
    assert [host.nodes_waiting(), other.nodes_waiting()] == [0, 0]
    assert not monitor_of(host)._missed


def test_a_node_without_which_the_others_continued_comes_for_the_next_round(
    pair: list[tuple[Rounds, FixedGathering]],
) -> None:
    (host, _), (other, _) = pair
    monitor_of(host).enter_round(host.number - 1, 2)
    until(lambda: host.nodes_waiting() == 1)
    assert other.nodes_waiting() == 0
    monitor_of(host).enter_round(host.number, 2)
    assert host.nodes_waiting() == 0, "nothing is known of this round yet"


def test_job_that_another_agent_has_ended_is_not_ended_again(
    pair: list[tuple[Rounds, FixedGathering]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store goes with its host, and torch would try for long to reach it."""
    (host, _), (other, _) = pair
    other.close()
    until(lambda: host.closed)
    monkeypatch.setattr(DynamicRendezvousHandler, "set_closed", lambda _: pytest.fail("it is closed"))
    host.close()


def test_what_was_read_before_a_node_entered_its_round_means_nothing(
    pair: list[tuple[Rounds, FixedGathering]],
) -> None:
    (host, _), _ = pair
    armed, ended, seen = threading.Event(), threading.Event(), list[int]()

    def present() -> None:  # called in the middle of each look
        if armed.is_set():
            seen.append(monitor.nodes_waiting())
            monitor.enter_round(host.number, 2)

    monitor = Monitor(host._connect(), inner_of(host).settings, present, ended, str)  # type: ignore[arg-type]
    monitor.enter_round(host.number - 1, 2)
    armed.set()
    until(lambda: len(seen) > 1)
    ended.set()
    assert seen[1] == 0


@pytest.mark.parametrize("small", [True, False])
def test_a_session_that_began_after_a_last_call_makes_no_second_one_before_its_first_round(
    place: Place, small: bool
) -> None:
    last_call = 60 if small else 2
    made, _ = make(place, small=small, last_call_timeout=str(last_call))
    began = time.monotonic()
    assert made.next().world_size == 1
    assert (time.monotonic() - began < last_call) is small
    assert inner_of(made).settings.timeout.last_call == timedelta(seconds=last_call)
    made.end()


@pytest.mark.parametrize("failure", [RendezvousConnectionError, KeyError])
def test_a_state_that_cannot_be_read_for_long_is_an_error(
    pair: list[tuple[Rounds, FixedGathering]], failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    (host, _), _ = pair
    failing = threading.Event()
    genuine = Monitor._look

    def look(monitor: Monitor) -> None:
        if failing.is_set():
            raise failure("that nobody foresaw")
        genuine(monitor)

    monkeypatch.setattr(Monitor, "_look", look)
    failing.set()
    until(lambda: monitor_of(host)._failing_since is not None)
    since = monitor_of(host)._failing_since
    threading.Event().wait(0.3)
    assert host.nodes_waiting() == 0, "it may work again"
    assert monitor_of(host)._failing_since == since, "the time of the first failure in a row"
    monkeypatch.setattr(agent_rounds, "LOSS_SECONDS", 0.2)
    with pytest.raises(failure):
        host.nodes_waiting()
    failing.clear()
    until(lambda: monitor_of(host)._failing_since is None)
    assert host.nodes_waiting() == 0


# --- the backend -----------------------------------------------------------------------------------------------------


class Sleeps:
    """Notes the time that torch sleeps in its rendezvous, and ends it at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole_seconds = 0
        self.asleep = threading.Event()
        monkeypatch.setattr(torchs, "_delay", self._sleep)

    def _sleep(self, seconds: Any) -> None:
        if seconds == 1:
            self.whole_seconds += 1
            self.asleep.set()


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Sleeps:
    return Sleeps(monkeypatch)


@pytest.fixture
def made() -> Iterator[list[DynamicRendezvousHandler]]:
    handlers: list[DynamicRendezvousHandler] = []
    yield handlers
    for handler in handlers:
        handler._stop_heartbeats()


def node(
    store: HashStore,
    made: list[DynamicRendezvousHandler],
    *,
    minimum: int = 3,
    maximum: int = 3,
    name_in: Callable[[int], str] = lambda _number: "127.0.0.1",
) -> DynamicRendezvousHandler:
    params = RendezvousParameters("mingle", "", "job", minimum, maximum, "127.0.0.1", last_call_timeout="60")
    backend = Backend(store, "job", maximum, name_in)
    handler = backend.inner = create_handler(store, backend, params)
    made.append(handler)
    return handler


def join_all(handlers: list[DynamicRendezvousHandler]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=60))


def test_nodes_that_come_together_never_sleep(
    sleeps: Sleeps, made: list[DynamicRendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is: the last one comes in time.
    monkeypatch.setattr(agent_rounds, "LINGER_SECONDS", 60.0)
    store = HashStore()
    handlers = [node(store, made) for _ in range(3)]
    for _ in range(2):  # the second time as after a worker's failure
        infos = join_all(handlers)
        assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
    assert sleeps.whole_seconds == 0


def test_a_node_that_waits_for_long_sleeps_as_torch_does(
    sleeps: Sleeps, made: list[DynamicRendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_rounds, "LINGER_SECONDS", 0.05)
    store = HashStore()
    first, second = (node(store, made, minimum=2, maximum=2) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.next_rendezvous)
        assert sleeps.asleep.wait(30)
        second.next_rendezvous()
        assert waiting.result(30).world_size == 2


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that a write reads the state again."""
    noted: list[int] = []
    real = Backend.get_state
    monkeypatch.setattr(agent_rounds, "LINGER_SECONDS", 0.5)
    monkeypatch.setattr(Backend, "get_state", lambda self: noted.append(1) or real(self))
    return noted


def test_only_a_node_that_has_nothing_to_do_waits(
    sleeps: Sleeps, made: list[DynamicRendezvousHandler], polls: list[int]
) -> None:
    store = HashStore()
    handler = node(store, made, minimum=1, maximum=2)
    holder = handler._state_holder

    def write() -> int:
        holder.mark_dirty()
        polls.clear()
        assert holder.sync()
        return len(polls)

    assert write() == 0  # not in it
    holder.state.participants[handler._this_node] = 0
    assert write() > 0
    holder.state.complete = True
    assert write() == 0
    del holder.state.participants[handler._this_node]
    holder.state.wait_list.add(handler._this_node)
    assert write() > 0
    holder.state.complete = False
    assert write() == 0
    holder.state.complete, holder.state.closed = True, True
    assert write() == 0


def test_a_write_that_comes_too_late_returns_at_once(polls: list[int], made: list[DynamicRendezvousHandler]) -> None:
    store = HashStore()
    handler, other = (node(store, made, minimum=1, maximum=2) for _ in range(2))
    other._state_holder.mark_dirty()
    assert other._state_holder.sync()
    handler._state_holder.state.participants[handler._this_node] = 0
    handler._state_holder.mark_dirty()
    assert handler._state_holder.sync() is False
    assert polls == []


def test_the_more_nodes_the_rarer_the_reads() -> None:
    store = HashStore()
    few, many, too_many = (Backend(store, "job", nodes, str)._poll_seconds for nodes in (2, 500, 100_000))
    assert few < many < too_many == agent_rounds.LINGER_SECONDS
