"""What several files of tests of `mingle-run` need."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.run_nodes import Nodes


@pytest.fixture(autouse=True)
def _no_orphan_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would last for the tests' process."""
    monkeypatch.setattr("mingle.run.program._adopt_orphans", lambda: None)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Give several `mingle-run` of one job; what is left of them at the end is killed."""
    made = Nodes(tmp_path)
    try:
        yield made
    finally:
        if any(process.poll() is None for process in made.processes):
            for name in tmp_path.glob("pid*"):  # a stopped program does not end with its mingle-run, and holds the pipe
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.killpg(int(name.read_text()), signal.SIGKILL)
        for process in made.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
