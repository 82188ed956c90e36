"""make: what it does before anything is installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.documents import ROOT


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60, check=False)


def test_an_old_python_makes_no_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || touch {tmp_path}/venv\nexit 1\n')
    python.chmod(0o755)
    assert make(f"VENV={tmp_path}/venv", f"PYTHON={python}", f"{tmp_path}/venv/bin/pip").returncode != 0
    assert not (tmp_path / "venv").exists()


def test_help_lists_every_target_but_itself() -> None:
    phony = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets = {target for line in phony for target in line.split()}
    assert set(re.findall(r"^  make ([\w-]+) ", make("help").stdout, re.MULTILINE)) == targets - {"help"}
