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
from tests.support.failing import raising


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


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[StoreServer]:
    """The stores that were opened, none of them for real."""
    made: list[StoreServer] = []

    def open_server(address: str, _port: int | None, session: bytes) -> StoreServer:
        made.append(StoreServer(address, 5000, session, "token", object()))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(store, "open_server", open_server)
    return made


def hosting(session: bytes = b"one") -> SimpleNamespace:
    return SimpleNamespace(session=session, closed=False)


@pytest.mark.parametrize("gone", ["closed", "replaced"])
def test_the_store_of_a_session_that_is_gone_is_released_and_not_told(
    keeper: StoreKeeper, machine: Machine, opened: list[StoreServer], monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    machine.host = host = hosting()
    open_server = store.open_server

    def too_late(*arguments: Any) -> StoreServer:
        machine.host = hosting(b"two") if gone == "replaced" else host
        host.closed = gone == "closed"
        return open_server(*arguments)

    monkeypatch.setattr(store, "open_server", too_late)
    keeper.perform(OpenStore(1, "127.0.0.1"))
    assert not opened[0].held
    assert (keeper.server, machine.told) == (None, [])


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (ConfigurationError.explain("taken", cause="c", remedy="r"), ConfigurationError),
        (RuntimeError("libuv says no"), MingleError),
    ],
)
def test_a_session_learns_why_its_store_can_not_be_opened(
    keeper: StoreKeeper, machine: Machine, monkeypatch: pytest.MonkeyPatch, problem: Exception, kind: type[MingleError]
) -> None:
    machine.host = hosting()
    monkeypatch.setattr(store, "open_server", raising(problem))
    keeper.perform(OpenStore(2, "127.0.0.2"))
    (failed,) = machine.told
    assert isinstance(failed, StoreFailed)
    assert (failed.epoch, isinstance(failed.error, kind)) == (2, True)
    assert str(problem).splitlines()[0] in failed.error.observation


def test_store_that_stands_serves_again(keeper: StoreKeeper, machine: Machine, opened: list[StoreServer]) -> None:
    for epoch, session in enumerate((b"one", b"one", b"two")):
        machine.host = hosting(session)
        keeper.perform(OpenStore(epoch, "127.0.0.1"))
    assert [each.session for each in opened] == [b"one", b"two"]
    assert machine.told == [StoreOpened(epoch, 5000, "token") for epoch in range(3)]


def test_a_store_moves_to_another_address_with_its_port(keeper: StoreKeeper, machine: Machine) -> None:
    machine.host = hosting(b"S" * 16)
    keeper.perform(OpenStore(1, "127.0.0.1"))
    assert keeper.server is not None
    keeper.port = keeper.server.port
    keeper.perform(OpenStore(2, "127.0.0.2"))
    store.prove("127.0.0.2", keeper.port, b"S" * 16, keeper.server.token)
    keeper.release()


@pytest.fixture
def started(keeper: StoreKeeper, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What the threads of the keeper do, which a test runs when it wants."""
    begun: list[Callable[[], Any]] = []
    machine.host = hosting()
    monkeypatch.setattr(keeper, "_run", lambda _, work: begun.append(lambda: work()()))
    return begun


def test_stores_are_opened_one_at_a_time_and_the_last_that_waits_counts(
    keeper: StoreKeeper, machine: Machine, opened: list[StoreServer], started: list[Callable[[], Any]]
) -> None:
    for number in range(1, 4):
        keeper.perform(OpenStore(number, f"127.0.0.{number}"))
    assert len(started) == 1
    started[0]()
    assert len(started) == 2
    keeper.perform(OpenStore(4, "127.0.0.4"))
    keeper.close()
    started[1]()
    assert (len(started), [each.address for each in opened]) == (2, ["127.0.0.1", "127.0.0.3"])
    assert machine.told == [StoreOpened(1, 5000, "token")]


@pytest.mark.usefixtures("opened")
def test_a_store_that_stands_already_is_not_waited_for(
    keeper: StoreKeeper, machine: Machine, started: list[Callable[[], Any]]
) -> None:
    for epoch in (1, 2):  # the second one comes while the first is at work
        keeper.perform(OpenStore(epoch, "127.0.0.1"))
    assert machine.told == []
    started[0]()
    keeper.perform(OpenStore(3, "127.0.0.1"))
    assert len(started) == 1
    assert machine.told == [StoreOpened(epoch, 5000, "token") for epoch in (1, 2, 3)]
    keeper.perform(OpenStore(4, "127.0.0.2"))
    assert (len(started), len(machine.told)) == (2, 3)
