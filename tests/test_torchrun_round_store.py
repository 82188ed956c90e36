from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.elastic.agent.server.api as agent_api
from torch.distributed import HashStore

from mingle.elastic import round_store
from mingle.elastic.round_store import RoundOverError, RoundStore


class Owner:
    """Makes every call, until it is told to refuse them; and notes which kind."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refusal: Exception | None = None
        self.over = threading.Event()

    def store_call(self, function: Callable[[], Any]) -> Any:
        return self._made("store", function)

    def role_call(self, function: Callable[[], Any]) -> Any:
        return self._made("role", function)

    def check_round(self) -> None:
        if self.over.is_set():
            raise RoundOverError("a node is gone")

    def workers_done(self) -> None:
        self.calls.append("done")

    def _made(self, kind: str, function: Callable[[], Any]) -> Any:
        self.calls.append(kind)
        if self.refusal is not None:
            raise self.refusal
        return function()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def inner() -> HashStore:
    return HashStore()


def make(inner: HashStore, owner: Owner, rank: int = 0, size: int = 1) -> RoundStore:
    return RoundStore("round", inner, owner, rank=rank, size=size)


def test_it_is_a_store_in_every_way_an_agent_uses_it(inner: HashStore, owner: Owner) -> None:
    made = make(inner, owner)
    made.set("a", "1")
    assert made.get("a") == b"1"
    made.multi_set(["b", "c"], ["2", "3"])
    assert made.multi_get(["b", "c"]) == [b"2", b"3"]
    made.wait(["a", "b"])
    assert made.check(["a"])
    assert made.add("count", 2) == 2
    assert inner.get("round/a") == b"1"
    assert set(owner.calls) == {"store"}


def test_the_exit_barrier_is_told_apart_by_its_key(inner: HashStore, owner: Owner) -> None:
    assert agent_api._TERMINAL_STATE_SYNC_ID == round_store.EXIT_BARRIER
    make(inner, owner).add(round_store.EXIT_BARRIER + "/num_members", 1)
    assert owner.calls == ["done", "store"]


def test_every_operation_goes_by_way_of_the_call_that_can_end(inner: HashStore, owner: Owner) -> None:
    made = make(inner, owner)
    owner.refusal = ConnectionError("given up")
    operations: list[Callable[[], Any]] = [
        lambda: made.set("a", "1"),
        lambda: made.get("a"),
        lambda: made.add("a", 1),
        lambda: made.wait(["a"]),
        lambda: made.check(["a"]),
        lambda: made.multi_get(["a"]),
        lambda: made.multi_set(["a"], ["1"]),
    ]
    for operation in operations:
        with pytest.raises(ConnectionError, match="given up"):
            operation()


# --- the exchange of roles, by torch's own code --------------------------------------------------------------------


def ranks(store: RoundStore, rank: int, size: int, workers: int) -> list[tuple[int, int, int, int]]:
    """Has torch's agent ask for its workers' ranks: for each rank and world size, in all and in its role."""
    spec = SimpleNamespace(role="default", local_world_size=workers)
    assign: Any = agent_api.SimpleElasticAgent._assign_worker_ranks
    return [
        (worker.global_rank, worker.world_size, worker.role_rank, worker.role_world_size)
        for worker in assign(SimpleNamespace(), store, rank, size, spec)
    ]


def test_agents_with_different_numbers_of_workers_share_the_ranks(inner: HashStore) -> None:
    owners = [Owner(), Owner()]
    stores = [make(inner, owner, rank, 2) for rank, owner in enumerate(owners)]
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(ranks, stores[1], 1, 2, 2)
        assert ranks(stores[0], 0, 2, 1) == [(0, 3, 0, 3)]
        assert second.result(30) == [(1, 3, 1, 3), (2, 3, 2, 3)]
    assert {call for owner in owners for call in owner.calls} == {"role"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gathering_lost_meanwhile_does_not_end_the_agent(inner: HashStore, owner: Owner, rank: int) -> None:
    owner.refusal = RoundOverError("the host is gone")
    base = 2 * rank
    assert ranks(make(inner, owner, rank, 3), rank, 3, 2) == [(base, 6, base, 6), (base + 1, 6, base + 1, 6)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_gone_before_it_said_its_role_is_not_waited_for(
    inner: HashStore, owner: Owner, rank: int
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks, make(inner, owner, rank, 2), rank, 2, 1)
        with pytest.raises(FutureTimeoutError):
            waiting.result(0.1)
        owner.over.set()
        assert waiting.result(30) == [(rank, 2, rank, 2)]


def test_an_exchange_that_fails_otherwise_is_an_error(inner: HashStore, owner: Owner) -> None:
    owner.refusal = ConnectionError("the job has been ended")
    with pytest.raises(ConnectionError, match="ended"):
        ranks(make(inner, owner, 1, 2), 1, 2, 1)
