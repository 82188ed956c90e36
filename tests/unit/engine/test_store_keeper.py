"""The store as a machine wants it: opened one at a time, kept for its session, and an error that says why."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mingle.engine import store
from mingle.engine.store import StoreKeeper, StoreServer
from mingle.errors import ConfigurationError, MingleError
from mingle.protocol.effects import OpenStore
from mingle.protocol.events import Event, StoreFailed, StoreOpened


class Machine:
    """A machine that notes what its keeper tells it."""

    host: Any = None
    finished = False

    def __init__(self) -> None:
        self.told: list[Event] = []


@pytest.fixture
def machine() -> Machine:
    """The machine of the keeper."""
    return Machine()


@pytest.fixture
def keeper(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> StoreKeeper:
    """A keeper whose threads a test runs itself."""
    driver: Any = SimpleNamespace(machine=machine, tell=machine.told.append)
    keeper = StoreKeeper(driver, lambda result: result(), port=None)
    monkeypatch.setattr(keeper, "_run", lambda _what, work: work()())
    return keeper


@pytest.mark.parametrize("gone", ["closed", "replaced"])
def test_the_store_of_a_session_that_is_gone_is_released_and_not_told(
    keeper: StoreKeeper, machine: Machine, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    opened: list[StoreServer] = []
    host = SimpleNamespace(session=b"one", closed=False)

    def open_server(address: str, _port: int | None, session: bytes) -> StoreServer:
        if gone == "closed":
            host.closed = True
        else:
            machine.host = SimpleNamespace(session=b"two", closed=False)
        opened.append(StoreServer(address, 5000, session, "token", object()))  # type: ignore[arg-type]
        return opened[-1]

    machine.host = host
    monkeypatch.setattr(store, "open_server", open_server)
    keeper.perform(OpenStore(1, "127.0.0.1"))
    assert not opened[0].held
    assert (keeper.server, machine.told) == (None, [])


def test_a_session_learns_of_its_store_and_of_a_failure(
    keeper: StoreKeeper, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.host = SimpleNamespace(session=b"one", closed=False)
    monkeypatch.setattr(store, "open_server", lambda address, _, session: StoreServer(address, 5000, session, "token"))
    keeper.perform(OpenStore(1, "127.0.0.1"))
    assert machine.told == [StoreOpened(1, 5000, "token")]
    taken = ConfigurationError.explain("taken", cause="c", remedy="r")

    def fail(*_: Any) -> StoreServer:
        raise taken

    monkeypatch.setattr(store, "open_server", fail)
    keeper.perform(OpenStore(2, "127.0.0.2"))
    assert machine.told[1:] == [StoreFailed(2, taken)]


def test_a_store_that_stands_serves_its_session_again(
    keeper: StoreKeeper, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    def open_server(address: str, _port: int | None, session: bytes) -> StoreServer:
        opened.append(session)
        return StoreServer(address, 5000, session, "token")

    monkeypatch.setattr(store, "open_server", open_server)
    for epoch, session in enumerate((b"one", b"one", b"two")):
        machine.host = SimpleNamespace(session=session, closed=False)
        keeper.perform(OpenStore(epoch, "127.0.0.1"))
    assert opened == [b"one", b"two"]
    assert machine.told == [StoreOpened(epoch, 5000, "token") for epoch in range(3)]


def test_a_store_moves_to_another_address_with_its_port(keeper: StoreKeeper) -> None:
    keeper.server = first = store.open_server("127.0.0.1", None, b"S" * 16)
    keeper.port = first.port
    moved = keeper._opened_server("127.0.0.2", b"S" * 16)
    assert isinstance(moved, StoreServer)
    store.prove("127.0.0.2", first.port, b"S" * 16, moved.token)


def test_stores_are_opened_one_at_a_time_and_the_last_that_waits_counts(
    keeper: StoreKeeper, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[], Callable[[], None]]] = []
    opened: list[str] = []

    def open_server(address: str, _port: int | None, session: bytes) -> StoreServer:
        opened.append(address)
        return StoreServer(address, 5000, session, "token")

    machine.host = SimpleNamespace(session=b"one", closed=False)
    monkeypatch.setattr(store, "open_server", open_server)
    monkeypatch.setattr(keeper, "_run", lambda _, work: started.append(work))
    for number in range(1, 4):
        keeper.perform(OpenStore(number, f"127.0.0.{number}"))
    assert len(started) == 1
    started[0]()()
    assert len(started) == 2
    keeper.perform(OpenStore(4, "127.0.0.4"))
    keeper.close()
    started[1]()()
    assert (len(started), opened) == (2, ["127.0.0.1", "127.0.0.3"])
    assert machine.told == [StoreOpened(1, 5000, "token")]


def test_a_store_that_stands_already_is_not_waited_for(
    keeper: StoreKeeper, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[], Callable[[], None]]] = []
    machine.host = SimpleNamespace(session=b"one", closed=False)
    monkeypatch.setattr(store, "open_server", lambda address, _, session: StoreServer(address, 5000, session, "token"))
    monkeypatch.setattr(keeper, "_run", lambda _, work: started.append(work))
    keeper.perform(OpenStore(1, "127.0.0.1"))
    keeper.perform(OpenStore(2, "127.0.0.1"))  # comes while the first is at work
    assert machine.told == []
    started[0]()()
    keeper.perform(OpenStore(3, "127.0.0.1"))
    assert len(started) == 1
    assert machine.told == [StoreOpened(epoch, 5000, "token") for epoch in (1, 2, 3)]
    keeper.perform(OpenStore(4, "127.0.0.2"))
    assert (len(started), len(machine.told)) == (2, 3)


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
