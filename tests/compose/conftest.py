"""An engine and an image for all tests here, and compose projects for each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.conftest import _zygote, lab, pytest_runtest_makereport
from tests.support.asked_for import leave_out_unless_asked_for

from .base_image import BASE_IMAGE, import_base_image, torch_wheel
from .commands import run
from .engine import Engine, running_engine, started_engine
from .project import MakeProject, Project, compose_command, stage

__all__ = ["_zygote", "lab", "pytest_runtest_makereport"]

_HERE = Path(__file__).parent
_IMAGE = "mingle-test/demo"
_BUILD_SECONDS = 900.0
_TEST_SECONDS = 1500  # the first test waits for the image, too


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "compose: runs containers; only when asked for, as by make test-compose")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this directory, and leave them out of a run that does not ask for them."""
    leave_out_unless_asked_for(config, items, _HERE, "compose", _TEST_SECONDS)


@pytest.fixture(scope="session", autouse=True)
def engine() -> Iterator[Engine]:
    """The Docker engine that runs already, or one for these tests."""
    found = running_engine()
    if found is not None:
        yield found
        return
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        reason = "no Docker engine answers, and only root can start one: start it, or run the tests as root"
        if os.environ.get("MINGLE_LAB_REQUIRED") == "1":
            pytest.fail(f"{reason} (MINGLE_LAB_REQUIRED=1)")
        pytest.skip(reason)
    with started_engine() as started:
        yield started


@pytest.fixture(scope="session")
def compose(engine: Engine) -> list[str]:
    """The command of compose."""
    return compose_command()


@pytest.fixture(scope="session")
def image(engine: Engine, compose: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image, built as the compose file says: on $BASE_IMAGE, else on one that is made here."""
    directory = tmp_path_factory.mktemp("context")
    base = os.environ.get("BASE_IMAGE")
    if base is None:
        import_base_image(engine)
    stage(directory, None if base else torch_wheel())
    run(
        *(*compose, "--file", str(directory / "docker-compose.yml"), "build", "trainer"),
        timeout=_BUILD_SECONDS,
        environment={**engine.environment, "IMAGE": _IMAGE, "BASE_IMAGE": base or BASE_IMAGE},
    )
    yield _IMAGE
    if not engine.own:
        engine.docker("image", "rm", "--force", _IMAGE, *([] if base else [BASE_IMAGE]))


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    """Numbers of projects."""
    return itertools.count(64)


@pytest.fixture
def project(
    engine: Engine, compose: list[str], image: str, numbers: Iterator[int], tmp_path: Path
) -> Iterator[MakeProject]:
    """Make projects; they end with the test, and what their containers wrote shows when it fails."""
    made: list[Project] = []

    def make(override: dict[str, Any] | None = None, **variables: str) -> Project:
        number = next(numbers)
        made.append(Project(engine, compose, number, tmp_path, {"IMAGE": image, **variables}, override or {}))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            print(f"=== {each.name}\n{each.describe()}")
            each.down()
