from __future__ import annotations

import threading
import time

import pytest

from mingle import abandonable
from mingle.abandonable import AbandonedError


def never() -> bool:
    return False


def test_a_call_returns_what_its_function_does() -> None:
    assert abandonable.run(lambda: 7, "test", never) == 7


def test_a_call_raises_what_its_function_does() -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        abandonable.run(fail, "test", never)


def test_a_call_that_is_given_up_is_left_running_under_a_name_that_says_so() -> None:
    release, name = threading.Event(), []

    def block() -> None:
        name.append(threading.current_thread().name)
        release.wait()

    started = time.monotonic()
    with pytest.raises(AbandonedError):
        abandonable.run(block, "test", lambda: True)
    assert time.monotonic() - started < 1
    assert name == ["mingle-abandoned-test"]
    release.set()


def test_an_outcome_that_is_there_counts_more_than_giving_up() -> None:
    assert abandonable.run(lambda: "done", "test", lambda: True) == "done"


def test_an_error_is_handed_on_once_and_not_kept() -> None:
    call = abandonable.Call(lambda: int("x"), "test")
    with pytest.raises(ValueError, match="invalid literal"):
        call.outcome(never)
    assert call._error is None
