from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed.elastic.agent.server.api as agent_api
from torch.distributed import TCPStore

from mingle.engine import store
from mingle.torchrun import store as agent_store


@pytest.fixture
def server() -> Iterator[store.StoreServer]:
    made = store.open_server("127.0.0.1", None, secrets.token_bytes(16))
    yield made
    made.release()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_a_client_reads_what_another_wrote(server: store.StoreServer) -> None:
    first, second = (agent_store.connect("127.0.0.1", server.port, 5) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_where_nobody_listens_a_client_fails_at_once() -> None:
    with pytest.raises(ConnectionRefusedError):
        agent_store.connect("127.0.0.1", free_port(), 60)


def test_a_store_that_goes_away_while_a_client_is_made_is_dialled_for_seconds_not_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "PROVE_SECONDS", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def go_away() -> None:
        with listener:
            listener.accept()[0].close()

    thread = threading.Thread(target=go_away)
    thread.start()
    started = time.monotonic()
    with pytest.raises((RuntimeError, OSError)):
        agent_store.connect("127.0.0.1", port, 60)
    assert time.monotonic() - started < 20
    thread.join()


def test_a_client_waits_as_long_as_it_was_told(server: store.StoreServer) -> None:
    assert agent_store.connect("127.0.0.1", server.port, 60).timeout == timedelta(seconds=60)


def test_severing_ends_a_call_that_waits_and_leaves_other_stores_alone(server: store.StoreServer) -> None:
    other = store.open_server("127.0.0.1", None, secrets.token_bytes(16))
    kept = agent_store.connect("127.0.0.1", other.port, 5)
    client = agent_store.connect("127.0.0.1", server.port, 60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "never set")
        threading.Event().wait(0.2)
        assert not waiting.done()
        agent_store.sever("127.0.0.1", server.port)
        with pytest.raises(RuntimeError):
            waiting.result(5)
    kept.set("key", "value")
    assert kept.get("key") == b"value"
    # The server goes on serving others.
    agent_store.connect("127.0.0.1", server.port, 5).set("key", "value")
    other.release()


@pytest.mark.parametrize(
    ("written", "plain"), [("::ffff:127.0.0.1", "127.0.0.1"), ("fe80::1%eth0", "fe80::1"), ("10.0.0.1", "10.0.0.1")]
)
def test_an_address_is_one_however_it_is_written(written: str, plain: str) -> None:
    assert str(agent_store._plain(written)) == plain


@pytest.mark.parametrize(
    ("local_addr", "listens_on"),
    [(None, "127.0.0.1"), ("127.0.0.9", "127.0.0.9"), ("203.0.113.7", "0.0.0.0"), ("no such name", "0.0.0.0")],
)
def test_the_workers_store_listens_where_they_are_sent(local_addr: str | None, listens_on: str) -> None:
    server = agent_store.open_for_workers("127.0.0.1", local_addr)
    assert server.address == listens_on
    server.release()


def direct(function: Callable[[], Any]) -> Any:
    return function()


def test_a_round_store_is_a_store_in_every_way_an_agent_uses_it(server: store.StoreServer) -> None:
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    calls: list[str] = []
    made = agent_store.RoundStore("round", client, direct, lambda: calls.append("done"))
    made.set("a", "1")
    assert made.get("a") == b"1"
    made.multi_set(["b", "c"], ["2", "3"])
    assert made.multi_get(["b", "c"]) == [b"2", b"3"]
    made.wait(["a", "b"])
    assert made.check(["a"])
    assert made.add("count", 2) == 2
    assert client.get("round/a") == b"1"
    assert calls == []


def test_the_exit_barrier_is_told_apart_by_its_key(server: store.StoreServer) -> None:
    assert agent_store.EXIT_BARRIER == agent_api._TERMINAL_STATE_SYNC_ID
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    calls: list[str] = []
    made = agent_store.RoundStore("round", client, direct, lambda: calls.append("done"))
    made.add(agent_store.EXIT_BARRIER + "/num_members", 1)
    assert calls == ["done"]


def test_every_operation_goes_by_way_of_the_call_that_can_end(server: store.StoreServer) -> None:
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    def refuse(function: Callable[[], Any]) -> Any:
        raise ConnectionError("given up")

    made = agent_store.RoundStore("round", client, refuse, lambda: None)
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
