"""``python -m mingle`` is the command."""

from __future__ import annotations

import mingle
from tests.support.bystanders import run_command


def test_the_package_runs_as_the_command() -> None:
    assert run_command("--version", port=1).stdout == f"mingle-discover {mingle.__version__}\n"
    assert run_command("--help", port=1).stdout.startswith("Usage: mingle-discover ")
