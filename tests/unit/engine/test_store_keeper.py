"""The store as a machine wants it: opened one at a time, kept for its session, and an error that says why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from mingle.engine import store
from mingle.engine.store import StoreKeeper, StoreServer
from mingle.errors import ConfigurationError, MingleError
from mingle.protocol.effects import OpenStore, ProveStore, ReachStore
from mingle.protocol.events import Event, StoreFailed, StoreOpened


class Machine:
    """A machine that notes what its keeper tells it."""

    hosting: Any = None
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
            machine.hosting = SimpleNamespace(session=b"two", closed=False)
        opened.append(StoreServer(address, 5000, session, "token", object()))  # type: ignore[arg-type]
        return opened[-1]

    machine.hosting = host
    monkeypatch.setattr(store, "open_server", open_server)
    keeper.perform(OpenStore(1, "127.0.0.1"))
    assert not opened[0].held
    assert (keeper.server, machine.told) == (None, [])


def test_a_session_learns_of_its_store_and_of_a_failure(
    keeper: StoreKeeper, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.hosting = SimpleNamespace(session=b"one", closed=False)
    monkeypatch.setattr(store, "open_server", lambda address, _, session: StoreServer(address, 5000, session, "token"))
    keeper.perform(OpenStore(1, "127.0.0.1"))
    assert machine.told == [StoreOpened(1, 5000, "token")]
    taken = ConfigurationError.explain("taken", cause="c", remedy="r")

    def fail(*_: Any) -> StoreServer:
        raise taken

    monkeypatch.setattr(store, "open_server", fail)
    keeper.perform(OpenStore(2, "127.0.0.2"))
    assert machine.told[1:] == [StoreFailed(2, taken)]


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


def test_store_that_was_reached_too_late_does_not_replace_the_one_that_was_proved(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interface is lost while the store is reached ahead over it, and the seal names another address."""
    proved: Any = object()
    release = threading.Event()
    results: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def reach(*_: object) -> Any:
        assert release.wait(30)
        return SimpleNamespace(tune=lambda: None)

    monkeypatch.setattr(store, "connect", reach)
    monkeypatch.setattr(store, "prove", lambda *_, **__: proved)
    driver: Any = SimpleNamespace(machine=machine, tell=machine.told.append)
    keeper = StoreKeeper(driver, results.put, port=None, ahead=True, workers=2)
    keeper.perform(ReachStore("10.60.0.1", 5000))
    keeper.perform(ProveStore(1, "10.70.0.1", 5000, b"session", "token"))
    results.get(timeout=30)()
    assert keeper.client is proved
    release.set()
    results.get(timeout=30)()
    assert keeper.client is proved
