"""``benchmarks/history.json``: the ratios of each run that was published, one record a run."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.results import ROOT, Comparison

HISTORY = ROOT / "benchmarks" / "history.json"


def add(comparisons: Iterable[Comparison], path: Path = HISTORY) -> None:
    """Append a record: the commit, the date, and the ratios of these comparisons."""
    records = json.loads(path.read_text("utf-8")) if path.exists() else []
    ratios = {
        each.name: {what: float(f"{ratio:.4g}") for what, ratio in each.ratios.items()}
        for each in comparisons
        if each.ratios
    }
    if ratios:
        records.append({"commit": _commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "ratios": ratios})
        path.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _commit() -> str:
    """Return the short name of the commit that was measured; empty outside a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()
