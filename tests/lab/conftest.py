"""The `lab` fixture, and one zygote for all tests of a pytest process."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.levels import repeated

from .lab import Lab, why_unavailable
from .zygote_client import close_shared_zygote, shared_zygote

if TYPE_CHECKING:
    from .torchrun_jobs import MakeJob

_HERE = Path(__file__).parent
_failed = pytest.StashKey[bool]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a scenario that is marked ``soak(times)`` so often in ``make soak``, and once on any other level."""
    mark = metafunc.definition.get_closest_marker("soak")
    if mark is not None and mark.args:
        metafunc.parametrize("seed", repeated(1, soak=mark.args[0]), indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this directory, and as slow what is not one of the few scenarios of the quick suite."""
    here = {path for path in {item.path for item in items} if _HERE in path.parents}
    for item in items:
        if item.path in here:
            item.add_marker(pytest.mark.lab)
            if item.get_closest_marker("quick") is None:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember for the `lab` fixture whether the test failed."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def _zygote() -> Iterator[None]:
    """Start the zygote before the first test's leak check looks; only who uses it waits for it."""
    if why_unavailable() is None:
        shared_zygote()
    yield
    close_shared_zygote()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The number of this run of the scenario, for what chance decides in it."""
    return int(getattr(request, "param", 0))


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab of the test's own; what its processes wrote and reported shows when the test fails."""
    reason = why_unavailable()
    if reason is not None:
        if os.environ.get("MINGLE_LAB_REQUIRED") == "1":
            pytest.fail(f"{reason} (MINGLE_LAB_REQUIRED=1)")
        pytest.skip(reason)
    with Lab() as made:
        yield made
        if request.node.stash.get(_failed, False):
            print(made.describe())


@pytest.fixture
def job() -> Iterator[MakeJob]:
    """Makes jobs of torchrun."""
    from .torchrun_jobs import jobs  # which imports torch, and not all directories that have the `lab` fixture need it

    with jobs() as make:
        yield make
