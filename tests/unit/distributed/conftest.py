"""What mingle opens and says in a process is seen, and no session outlives its test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mingle.distributed import rendezvous
from mingle.engine import driver, progress, store, udp_endpoint
from tests.support.failing import raising

_forbidden = raising(AssertionError("a socket was opened"))


@pytest.fixture(autouse=True)
def _no_session_is_left() -> Iterator[None]:
    yield
    rendezvous.end_session()


@pytest.fixture
def no_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever could send one is not even opened."""
    monkeypatch.setattr(udp_endpoint, "Transport", _forbidden)
    monkeypatch.setattr(driver, "Connections", _forbidden)


@pytest.fixture
def no_socket(no_packet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a store, which a rank alone has, too."""
    monkeypatch.setattr(store, "open_server", _forbidden)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[store.StoreServer]:
    """The stores that this process opens."""
    servers: list[store.StoreServer] = []
    open_server = store.open_server

    def remembered(*arguments: Any) -> store.StoreServer:
        servers.append(open_server(*arguments))
        return servers[-1]

    monkeypatch.setattr(store, "open_server", remembered)
    return servers


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What mingle tells the user: level and text."""
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(progress, "say", lambda level, text, **_: told.append((level, text)))
    return told
