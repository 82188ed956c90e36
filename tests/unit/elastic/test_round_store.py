"""The store that torchrun's agent is given for a round, by torch's own code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.elastic.agent.server.api as agent_api
from torch.distributed import DistStoreError, HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.utils.store import barrier, store_timeout

from mingle.elastic.round_store import EXIT_BARRIER, RoundStore


class Handler:
    """Makes every call until it is told to refuse them."""

    def __init__(self) -> None:
        self.calls = 0
        self.done = self.round_is_void = self.lost = self.closed = self.in_vain = False
        self.closes = False
        """Whether it hears within seconds that the host has closed the job."""
        self.refusal: Exception | None = None
        self.waiting = 0

    def call(self, function: Callable[[], Any]) -> Any:
        self.calls += 1
        if self.refusal is not None:
            raise self.refusal
        return function()

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def is_lost(self) -> bool:
        return self.lost

    def has_ended(self, *, patient: bool = False) -> bool:
        return self.closed or (self.closes and patient)

    def waits_in_vain(self) -> bool:
        return self.in_vain

    def workers_done(self) -> None:
        self.done = True


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def inner() -> HashStore:
    return HashStore()


def make(inner: HashStore, handler: Handler, rank: int = 0, size: int = 1) -> RoundStore:
    return RoundStore(inner, handler, rank=rank, size=size)  # type: ignore[arg-type]


def operations(store: RoundStore) -> list[Callable[[], Any]]:
    return [
        lambda: store.set("a", "1"),
        lambda: store.get("a"),
        lambda: store.multi_set(["b", "c"], ["2", "3"]),
        lambda: store.multi_get(["b", "c"]),
        lambda: store.wait(["a", "b"]),
        lambda: store.check(["a"]),
        lambda: store.add("count", 2),
    ]


def test_round_store_supports_each_operation_of_an_agent(inner: HashStore, handler: Handler) -> None:
    results = [operation() for operation in operations(make(inner, handler))]
    assert results == [None, b"1", None, [b"2", b"3"], None, True, 2]
    assert inner.get("agent/a") == b"1"
    assert handler.calls == len(results)


def test_every_operation_goes_by_way_of_the_call_that_can_end(inner: HashStore, handler: Handler) -> None:
    handler.refusal, handler.lost = ConnectionError("given up"), True
    for operation in operations(make(inner, handler)):
        with pytest.raises(ConnectionError, match="given up"):
            operation()


def test_the_exit_barrier_is_told_apart_by_its_key(inner: HashStore, handler: Handler) -> None:
    assert agent_api._TERMINAL_STATE_SYNC_ID == EXIT_BARRIER
    make(inner, handler).add("other", 1)
    assert not handler.done
    make(inner, handler).add(EXIT_BARRIER + "/num_members", 1)
    assert handler.done


def test_the_exit_barrier_is_over_once_the_host_has_closed_the_job(inner: HashStore, handler: Handler) -> None:
    """The host of a short job left the barrier first, and another agent logged a traceback and still ended with 0."""
    store = make(inner, handler)
    handler.refusal, handler.closed = RendezvousConnectionError("the agents' store is gone: closed"), True
    store.wait([EXIT_BARRIER + "/last_member"])
    with pytest.raises(RendezvousConnectionError):
        store.wait(["another key"])
    handler.closed = False
    with pytest.raises(RendezvousConnectionError):
        store.wait([EXIT_BARRIER + "/last_member"])
    handler.refusal = None
    inner.set(f"agent/{EXIT_BARRIER}/last_member", "1")
    store.wait([EXIT_BARRIER + "/last_member"])


def test_the_store_can_be_closed_before_an_agent_in_the_exit_barrier_hears_of_the_end(
    inner: HashStore, handler: Handler
) -> None:
    store = make(inner, handler)
    handler.refusal = RuntimeError("Broken pipe")
    with pytest.raises(RuntimeError, match="Broken pipe"):
        store.wait([EXIT_BARRIER + "/last_member"])
    handler.closes = True
    store.wait([EXIT_BARRIER + "/last_member"])


def test_the_exit_barrier_takes_no_longer_than_its_timeout(inner: HashStore, handler: Handler) -> None:
    began_at = time.monotonic()
    with pytest.raises(DistStoreError, match="timeout"):
        barrier(make(inner, handler), 2, EXIT_BARRIER, barrier_timeout=2)
    assert time.monotonic() - began_at < 20.0


def test_the_exit_barrier_ends_for_all_once_the_host_waits_in_vain(inner: HashStore, handler: Handler) -> None:
    host, other = make(inner, handler, 0, 3), make(inner, Handler(), 1, 3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(each.wait, [EXIT_BARRIER + "/last_member"]) for each in (other, host)]
        with pytest.raises(FutureTimeoutError):
            waiting[0].result(0.3)
        handler.in_vain = True
        for each in waiting:
            each.result(30)


# --- the exchange of roles -------------------------------------------------------------------------------------------


def ranks(store: RoundStore, rank: int, size: int, workers: int) -> list[tuple[int, int, int, int]]:
    """Have torch's agent ask for its workers' ranks: for each rank and world size, in all and in its role."""
    spec = SimpleNamespace(role="default", local_world_size=workers)
    assign: Any = agent_api.SimpleElasticAgent._assign_worker_ranks
    return [
        (worker.global_rank, worker.world_size, worker.role_rank, worker.role_world_size)
        for worker in assign(SimpleNamespace(), store, rank, size, spec)
    ]


def test_agents_with_different_numbers_of_workers_share_the_ranks(inner: HashStore) -> None:
    handlers = [Handler(), Handler()]
    stores = [make(inner, handler, rank, 2) for rank, handler in enumerate(handlers)]
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(ranks, stores[1], 1, 2, 2)
        assert ranks(stores[0], 0, 2, 1) == [(0, 3, 0, 3)]
        assert second.result(30) == [(1, 3, 1, 3), (2, 3, 2, 3)]
    assert not any(handler.round_is_void for handler in handlers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gathering_lost_meanwhile_does_not_end_the_agent(inner: HashStore, handler: Handler, rank: int) -> None:
    handler.refusal, handler.lost = RuntimeError("the host is gone"), True
    base = 2 * rank
    assert ranks(make(inner, handler, rank, 3), rank, 3, 2) == [(base, 6, base, 6), (base + 1, 6, base + 1, 6)]
    assert handler.round_is_void, "another round must follow"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_gone_before_it_said_its_role_is_not_waited_for(
    inner: HashStore, handler: Handler, rank: int
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks, make(inner, handler, rank, 2), rank, 2, 1)
        with pytest.raises(FutureTimeoutError):
            waiting.result(0.1)
        handler.waiting = 1
        assert waiting.result(30) == [(rank, 2, rank, 2)]
    assert handler.round_is_void


def test_an_exchange_that_fails_otherwise_is_an_error(inner: HashStore, handler: Handler) -> None:
    handler.refusal = ConnectionError("the job has been ended")
    with pytest.raises(ConnectionError, match="ended"):
        ranks(make(inner, handler, 1, 2), 1, 2, 1)
    assert not handler.round_is_void


def test_a_key_that_comes_late_is_waited_for(inner: HashStore, handler: Handler) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks, make(inner, handler, 1, 2), 1, 2, 1)
        threading.Event().wait(0.1)
        assert not waiting.done()
        ranks(make(inner, Handler(), 0, 2), 0, 2, 1)
        assert waiting.result(30) == [(1, 2, 1, 2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_exchange_takes_no_longer_than_the_timeout_of_the_store(
    inner: HashStore, handler: Handler, rank: int
) -> None:
    """A node that is connected, and has hung before it said its role."""
    store = make(inner, handler, rank, 2)
    began_at = time.monotonic()
    with store_timeout(store, 1), pytest.raises(DistStoreError, match=r"(?i)timeout"):
        ranks(store, rank, 2, 1)
    assert time.monotonic() - began_at < 20.0
    assert not handler.round_is_void
