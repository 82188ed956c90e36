"""A soak that was interrupted goes on where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT

TESTS = """
import os
import pytest

@pytest.mark.parametrize("seed", range(3))
def test_a_seed(seed):
    assert str(seed) not in os.environ["FAILING"]

@pytest.fixture
def leaking():
    yield
    assert "leak" not in os.environ["FAILING"]

def test_that_leaves_something_behind(leaking):
    pass
"""
PLUGIN = """
import os
from pathlib import Path
from tests.support.sittings import Sittings

def pytest_configure(config):
    config.pluginmanager.register(Sittings(config, os.environ["TREE"], Path(os.environ["FILE"])))
"""


class Soak:
    """A suite of four tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "passed"
        folder.joinpath("test_some.py").write_text(TESTS)
        folder.joinpath("conftest.py").write_text(PLUGIN)

    def run(self, *arguments: str, tree: str = "1a2b", failing: str = "") -> tuple[int, list[str]]:
        """Run it once; return the exit status and the ends of the lines of its summary."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TREE": tree, "FILE": str(self.file), "FAILING": failing},
            capture_output=True,
            text=True,
            timeout=250,  # each worker imports for seconds of processor time, and others may want it
            check=False,
        )
        return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("soak:")]


def told(all_of_them: int, earlier: int) -> list[str]:
    return [f"soak: {all_of_them} tests have passed on this commit, {earlier} of them in earlier sittings"]


@pytest.mark.parametrize(
    "workers", [pytest.param((), id="alone"), pytest.param(("-n", "2"), id="workers", marks=pytest.mark.slow)]
)
def test_the_next_sitting_runs_what_has_not_passed(tmp_path: Path, workers: tuple[str, ...]) -> None:
    soak = Soak(tmp_path)
    assert soak.run(*workers, failing="1 leak") == (1, told(2, 0))
    assert soak.run(*workers) == (0, told(4, 2))
    assert soak.run(*workers) == (0, told(4, 4))
    assert sorted(soak.file.read_text().splitlines()[1:]) == [
        *(f"test_some.py::test_a_seed[{seed}]" for seed in range(3)),
        "test_some.py::test_that_leaves_something_behind",
    ]


def test_another_commit_begins_anew(tmp_path: Path) -> None:
    soak = Soak(tmp_path)
    assert soak.run() == (0, told(4, 0))
    assert soak.run(tree="3c4d") == (0, told(4, 0))
    assert soak.file.read_text().splitlines()[0] == "3c4d"


def test_changes_that_are_not_committed_leave_nothing_out(tmp_path: Path) -> None:
    soak = Soak(tmp_path)
    assert soak.run(tree="") == (0, told(4, 0))
    assert not soak.file.exists()
