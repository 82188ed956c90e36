"""Calls of other threads."""

from __future__ import annotations

import socket
import threading

import pytest

from mingle.protocol.events import InterfacesChanged
from tests.support.alarms import alarm_is_passed_on
from tests.support.noting_driver import Noting


def test_call_of_another_thread_wakes_the_driver(driver: Noting) -> None:
    thread = threading.Thread(target=driver.call, args=(lambda: driver.tell(InterfacesChanged()),))
    thread.start()
    driver.turn_until(InterfacesChanged)
    thread.join()


def test_a_timeout_error_of_a_signal_handler_that_comes_with_a_call_is_not_lost(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alarm_is_passed_on() as interrupted, monkeypatch.context() as patched:
        patched.setattr(socket.socket, "send", interrupted)
        driver.call(list)
