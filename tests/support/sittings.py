"""The sittings of a soak, which takes hours: `make soak` goes on where an earlier run of the commit was interrupted.

The file has the tests that have passed, below the commit that they belong to. With another commit, or with changes
that are not committed, a soak begins anew.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT

FILE = ROOT / "soak.passed"


def commit() -> str:
    """Return the commit of this tree; empty: it has changes, or is no clone."""
    try:
        changes = _git("status", "--porcelain", "--untracked-files=no")
        return "" if changes else _git("rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


class Sittings:
    """A plug-in of pytest that leaves out what has passed, and takes note of what passes.

    Args:
        config: of this process. Workers leave out what the process that has started them has read.
        tree: the commit; empty: nothing is read, and nothing is written.
        file: where the tests are.
    """

    def __init__(self, config: pytest.Config, tree: str, file: Path = FILE) -> None:
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._file = file if tree and worker is None else None
        self._called: set[str] = set()
        self._now = 0
        if worker is not None:
            self.passed = frozenset(worker["soak_passed"])
        else:
            self.passed = frozenset(_passed(tree, file))
            if self._file is not None and not self.passed:
                self._file.write_text(f"{tree}\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker what has passed: all must collect the same tests, also one that takes another's place later."""
        node.workerinput["soak_passed"] = sorted(self.passed)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has passed."""
        config.hook.pytest_deselected(items=[each for each in items if each.nodeid in self.passed])
        items[:] = [each for each in items if each.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of a test that has passed, and has left nothing behind."""
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self._called:
            self._now += 1
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Count it as a success if all tests have passed in earlier sittings."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many tests have passed in all sittings."""
        terminalreporter.write_line(
            f"soak: {len(self.passed) + self._now} tests have passed on this commit, {len(self.passed)} of them in "
            "earlier sittings"
        )


def _passed(tree: str, file: Path) -> list[str]:
    """Return the tests that have passed on this commit."""
    if not tree or not file.exists():
        return []
    known, *passed = file.read_text().splitlines() or [""]
    return passed if known == tree else []
