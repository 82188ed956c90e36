"""What several files of tests of `mingle-run` need."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.run_nodes import Nodes


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Give a script without the permission to execute it."""
    file = tmp_path / "no-right"
    file.write_text("#!/bin/sh\n")
    return file


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
