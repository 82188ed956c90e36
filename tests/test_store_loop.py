"""What loops share: a wrongly signed datagram is looked at for the report alone, and a store that fails says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mingle.engine import store, store_loop
from mingle.engine.store import StoreServer
from mingle.engine.store_loop import StoreLoop
from mingle.errors import ConfigurationError, MingleError
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import List, Seek


class Machine:
    """Remembers what it is shown."""

    def __init__(self) -> None:
        self.unverified: list[datagrams.Datagram] = []

    def heard_unverified(self, message: datagrams.Datagram) -> None:
        self.unverified.append(message)


@pytest.fixture
def loop() -> StoreLoop:
    """A loop without sockets."""
    from collections import Counter

    bare = StoreLoop.__new__(StoreLoop)
    bare._key = JobKey(b"secret", "job")
    bare._rejected = Counter()
    bare._machine = Machine()  # type: ignore[assignment]
    return bare


SEEK = Seek(job="job", member=bytes(16), world_size=2)


def test_a_datagram_without_our_signature_is_shown_and_not_believed(loop: StoreLoop) -> None:
    assert loop._decode(datagrams.encode(SEEK, loop._key)) == SEEK
    assert loop._decode(datagrams.encode(SEEK)) is None
    assert loop._decode(datagrams.encode(SEEK, JobKey(b"another", "job"))) is None
    assert loop._decode(b"noise of somebody else") is None
    assert loop._machine.unverified == [SEEK, SEEK]  # type: ignore[attr-defined]
    assert loop._rejected == {"unsigned": 1, "signature": 1, "magic": 1}


def test_whoever_asks_in_the_lobby_is_answered(loop: StoreLoop) -> None:
    question = List(member=bytes(16))
    assert loop._decode(datagrams.encode(question)) == question


def test_a_flood_of_them_is_not_looked_at(loop: StoreLoop) -> None:
    for _ in range(store_loop.LOOKED_AT_UNVERIFIED + 10):
        loop._decode(datagrams.encode(SEEK))
    assert len(loop._machine.unverified) == store_loop.LOOKED_AT_UNVERIFIED  # type: ignore[attr-defined]


def test_a_store_that_stands_is_used_again_for_its_session(loop: StoreLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_server(*wanted: Any) -> StoreServer:
        opened.append(wanted)
        return StoreServer(wanted[0], 5000, wanted[2], "token")

    monkeypatch.setattr(store, "open_server", open_server)
    first = loop._server("127.0.0.1", None, b"one")
    assert isinstance(first, StoreServer)
    loop.store_server = first
    assert loop._server("127.0.0.1", None, b"one") is first
    assert loop._server("127.0.0.1", None, b"two") is not first
    assert len(opened) == 2


def test_a_store_moves_to_another_address_with_its_port(loop: StoreLoop) -> None:
    loop.store_server = first = store.open_server("127.0.0.1", None, b"S" * 16)
    moved = loop._server("127.0.0.2", first.port, b"S" * 16)
    assert isinstance(moved, StoreServer)
    store.prove("127.0.0.2", first.port, b"S" * 16, moved.token)


PLACE = "127.0.0.1", b"S" * 16
NEW = "127.0.0.1", None, b"S" * 16


def test_stores_are_opened_one_at_a_time_and_the_last_that_waits_counts(
    loop: StoreLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[], Callable[[], None]]] = []
    done: list[int] = []
    monkeypatch.setattr(loop, "_in_thread", lambda _, work: started.append(work))
    for number in range(3):
        loop._open_in_turn(lambda number=number: lambda: done.append(number), PLACE)
    assert len(started) == 1
    started[0]()()
    assert (len(started), done) == (2, [0])
    loop._open_in_turn(lambda: lambda: done.append(3), PLACE)
    loop._closed = True
    started[1]()()
    assert (len(started), done) == (2, [0, 2])


def test_a_store_that_stands_already_is_not_waited_for(loop: StoreLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Callable[[], Callable[[], None]]] = []
    done: list[int] = []
    monkeypatch.setattr(loop, "_in_thread", lambda _, work: started.append(work))
    loop._open_in_turn(lambda: lambda: setattr(loop, "store_server", store.open_server(*NEW)), PLACE)
    loop._open_in_turn(lambda: lambda: done.append(1), PLACE)  # comes while the first is at work
    assert done == []
    started[0]()()
    loop._open_in_turn(lambda: lambda: done.append(2), PLACE)
    assert (len(started), done) == (1, [1, 2])
    loop._open_in_turn(lambda: lambda: done.append(3), ("127.0.0.2", b"S" * 16))
    assert (len(started), done) == (2, [1, 2])
    assert loop.store_server is not None
    loop.store_server.release()


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (ConfigurationError.explain("taken", cause="c", remedy="r"), ConfigurationError),
        (RuntimeError("libuv says no"), MingleError),
    ],
)
def test_a_store_that_cannot_be_opened_is_an_error_that_says_why(
    loop: StoreLoop, monkeypatch: pytest.MonkeyPatch, problem: Exception, kind: type[MingleError]
) -> None:
    def open_server(*_: Any) -> StoreServer:
        raise problem

    monkeypatch.setattr(store, "open_server", open_server)
    error = loop._server("127.0.0.1", None, b"one")
    assert isinstance(error, kind)
    assert str(problem).splitlines()[0] in error.observation
