"""The store as a machine wants it: opened one at a time, kept for its session, and an error that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mingle.engine import store
from mingle.engine.store import StoreKeeper, StoreServer
from mingle.errors import ConfigurationError, MingleError


class User:
    """The owner of a machine, of which these tests need nothing."""

    hosting = part = None
    finished = False


@pytest.fixture
def keeper() -> StoreKeeper:
    """A keeper whose threads a test runs itself."""
    return StoreKeeper(User(), lambda _: None, lambda *_: None, port=None)  # type: ignore[arg-type]


def test_a_store_that_stands_serves_its_session_again(keeper: StoreKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_server(*wanted: Any) -> StoreServer:
        opened.append(wanted)
        return StoreServer(wanted[0], 5000, wanted[2], "token")

    monkeypatch.setattr(store, "open_server", open_server)
    first = keeper._opened_server("127.0.0.1", b"one")
    assert isinstance(first, StoreServer)
    keeper.server = first
    assert keeper._opened_server("127.0.0.1", b"one") is first
    assert keeper._opened_server("127.0.0.1", b"two") is not first
    assert len(opened) == 2


def test_a_store_moves_to_another_address_with_its_port(keeper: StoreKeeper) -> None:
    keeper.server = first = store.open_server("127.0.0.1", None, b"S" * 16)
    keeper.port = first.port
    moved = keeper._opened_server("127.0.0.2", b"S" * 16)
    assert isinstance(moved, StoreServer)
    store.prove("127.0.0.2", first.port, b"S" * 16, moved.token)


PLACE = "127.0.0.1", b"S" * 16
NEW = "127.0.0.1", None, b"S" * 16


def test_stores_are_opened_one_at_a_time_and_the_last_that_waits_counts(
    keeper: StoreKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[], Callable[[], None]]] = []
    done: list[int] = []
    monkeypatch.setattr(keeper, "_run", lambda _, work: started.append(work))
    for number in range(3):
        keeper._open_in_turn(lambda number=number: lambda: done.append(number), PLACE)
    assert len(started) == 1
    started[0]()()
    assert (len(started), done) == (2, [0])
    keeper._open_in_turn(lambda: lambda: done.append(3), PLACE)
    keeper.close()
    started[1]()()
    assert (len(started), done) == (2, [0, 2])


def test_a_store_that_stands_already_is_not_waited_for(keeper: StoreKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Callable[[], Callable[[], None]]] = []
    done: list[int] = []
    monkeypatch.setattr(keeper, "_run", lambda _, work: started.append(work))
    keeper._open_in_turn(lambda: lambda: setattr(keeper, "server", store.open_server(*NEW)), PLACE)
    keeper._open_in_turn(lambda: lambda: done.append(1), PLACE)  # comes while the first is at work
    assert done == []
    started[0]()()
    keeper._open_in_turn(lambda: lambda: done.append(2), PLACE)
    assert (len(started), done) == (1, [1, 2])
    keeper._open_in_turn(lambda: lambda: done.append(3), ("127.0.0.2", b"S" * 16))
    assert (len(started), done) == (2, [1, 2])
    assert keeper.server is not None
    keeper.server.release()


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (ConfigurationError.explain("taken", cause="c", remedy="r"), ConfigurationError),
        (RuntimeError("libuv says no"), MingleError),
    ],
)
def test_a_store_that_cannot_be_opened_is_an_error_that_says_why(
    keeper: StoreKeeper, monkeypatch: pytest.MonkeyPatch, problem: Exception, kind: type[MingleError]
) -> None:
    def open_server(*_: Any) -> StoreServer:
        raise problem

    monkeypatch.setattr(store, "open_server", open_server)
    error = keeper._opened_server("127.0.0.1", b"one")
    assert isinstance(error, kind)
    assert str(problem).splitlines()[0] in error.observation
