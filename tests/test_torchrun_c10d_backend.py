from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from mingle.elastic import c10d_backend
from mingle.elastic.c10d_backend import Backend


class Sleeps:
    """Notes what torch sleeps in its rendezvous, and wakes it at once."""

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


@pytest.fixture(autouse=True)
def _no_store_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the handler sets it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def made() -> Iterator[list[DynamicRendezvousHandler]]:
    handlers: list[DynamicRendezvousHandler] = []
    yield handlers
    for handler in handlers:
        handler._stop_heartbeats()


def node(
    store: HashStore, made: list[DynamicRendezvousHandler], *, minimum: int = 3, maximum: int = 3
) -> DynamicRendezvousHandler:
    params = RendezvousParameters("mingle", "", "job", minimum, maximum, "127.0.0.1", last_call_timeout="60")
    backend = Backend(store, "job", maximum)
    handler = create_handler(store, backend, params)
    backend.node = handler._this_node
    made.append(handler)
    return handler


def join_all(handlers: list[DynamicRendezvousHandler]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=60))


def test_nodes_that_come_together_never_sleep(
    sleeps: Sleeps, made: list[DynamicRendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is: the last one comes in time.
    monkeypatch.setattr(c10d_backend, "LINGER_SECONDS", 60.0)
    store = HashStore()
    handlers = [node(store, made) for _ in range(3)]
    for _ in range(2):  # the second time as after a worker's failure
        infos = join_all(handlers)
        assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
    assert sleeps.whole_seconds == 0


def test_a_node_that_waits_for_long_sleeps_as_torch_does(
    sleeps: Sleeps, made: list[DynamicRendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c10d_backend, "LINGER_SECONDS", 0.05)
    store = HashStore()
    first, second = (node(store, made, minimum=2, maximum=2) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.next_rendezvous)
        assert sleeps.asleep.wait(30)
        second.next_rendezvous()
        assert waiting.result(30).world_size == 2


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that a write looks again."""
    noted: list[int] = []
    real = Backend.get_state
    monkeypatch.setattr(c10d_backend, "LINGER_SECONDS", 0.1)
    monkeypatch.setattr(Backend, "get_state", lambda self: noted.append(1) or real(self))
    return noted


def test_only_who_has_nothing_to_do_waits(
    sleeps: Sleeps, made: list[DynamicRendezvousHandler], looks: list[int]
) -> None:
    store = HashStore()
    handler = node(store, made, minimum=1, maximum=2)
    holder = handler._state_holder

    def write() -> int:
        holder.mark_dirty()
        looks.clear()
        assert holder.sync()
        return len(looks)

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


def test_a_write_that_comes_too_late_returns_at_once(looks: list[int], made: list[DynamicRendezvousHandler]) -> None:
    store = HashStore()
    handler, other = (node(store, made, minimum=1, maximum=2) for _ in range(2))
    other._state_holder.mark_dirty()
    assert other._state_holder.sync()
    handler._state_holder.state.participants[handler._this_node] = 0
    handler._state_holder.mark_dirty()
    assert handler._state_holder.sync() is False
    assert looks == []


def test_the_more_nodes_the_rarer_the_looks() -> None:
    store = HashStore()
    few, many, too_many = (Backend(store, "job", nodes)._look_seconds for nodes in (2, 500, 100_000))
    assert few < many < too_many == c10d_backend.LINGER_SECONDS
