from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from mingle.elastic import store as agent_store
from mingle.engine import store


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
