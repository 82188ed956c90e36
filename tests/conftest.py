"""For every test: no packet leaves this machine, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator

import pytest

from mingle.config import values
from tests.support.leaks import leak_check
from tests.support.levels import soaking
from tests.support.sittings import Sittings, commit

_TORCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_OF_THE_TESTS = ("MINGLE_LAB_", "MINGLE_SOAK")


def pytest_configure(config: pytest.Config) -> None:
    """Keep discovery on the loopback interface, free of settings, from before test modules are imported."""
    # A shell starts background jobs with these ignored, and every command that a test signals would inherit that.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    for name in list(os.environ):
        if name in _TORCH_VARIABLES or (name.startswith("MINGLE_") and not name.startswith(_OF_THE_TESTS)):
            patch.delenv(name)
    patch.setenv("MINGLE_INTERFACE", "lo")
    if soaking():
        config.pluginmanager.register(Sittings(config, commit()))
    gc.disable()  # what collecting the tests allocates stays: collections of garbage would take a tenth of the time


def pytest_collection_finish() -> None:
    """Leave what the imports made out of every collection of garbage: torch alone makes them slower than most tests."""
    _freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _hangup_for_commands() -> Iterator[None]:
    with hangup_for_commands():
        yield


@contextlib.contextmanager
def hangup_for_commands() -> Iterator[None]:
    """Have the commands that tests start take SIGHUP where `nohup` has this process ignore it, as it still does.

    The process of pytest-xdist that starts the workers keeps it ignored for them.
    """
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # a handler ends with exec, and an ignored signal stays ignored
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module", autouse=True)
def _no_imports_of_other_tests_in_the_garbage() -> Iterator[None]:
    """Tests import, too, and what a large package has allocated makes the collections of all tests after it slower."""
    yield
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_remarks_of_other_tests() -> Iterator[None]:
    """A warning about a secret is kept for the process until a command shows it, here that of a later test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "_remarks", {})
        yield


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with leak_check():
        yield
