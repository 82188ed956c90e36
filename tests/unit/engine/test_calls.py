"""Calls of other threads."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from mingle.config.settings import Network
from mingle.protocol.events import (
    InterfacesChanged,
)
from tests.support.noting_driver import Noting
from tests.support.ports import free_udp_port


@pytest.fixture
def driver() -> Iterator[Noting]:
    with contextlib.ExitStack() as stack:
        yield Noting(Network(interfaces=("lo",), port=free_udp_port()), stack)


def test_call_of_another_thread_wakes_the_driver(driver: Noting) -> None:
    thread = threading.Thread(target=driver.call, args=(lambda: driver.tell(InterfacesChanged()),))
    thread.start()
    driver.turn_until(InterfacesChanged)
    thread.join()


def test_a_timeout_error_of_a_signal_handler_that_comes_with_a_call_is_not_lost(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alarmed(*_: object) -> None:
        raise TimeoutError("the alarm")

    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "send", lambda *_: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(TimeoutError, match="the alarm"):
                driver.call(list)
    finally:
        signal.signal(signal.SIGALRM, before)
