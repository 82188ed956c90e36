"""What a comparison yields, kept as JSON: every measurement, and the ratios that the guard watches."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import precedence

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "zeroconf", "multicast_expert", "msgspec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One comparison's outcome.

    Attributes:
        name: of its module and its files.
        title: its heading.
        text: what was measured, and what its figures are made of.
        unit: of the samples; empty: each name ends with its own, after a comma.
        samples: by contender the measurements in their order.
        ratios: ours to a peer's, less is better: comparable across machines, so the guard watches them.
        extra: measurements beside the time, by contender and by what they are; the latter starts with the unit.
    """

    name: str
    title: str
    text: str
    unit: str
    samples: Mapping[str, list[float]]
    ratios: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)


def machine() -> dict[str, str]:
    """Return what the figures depend on: the day, the commit, the machine, its load before the run, the versions."""
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _commit(),
        "cpu": f"{os.cpu_count()} × {_processor()}",
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "mesh": os.environ.get("MINGLE_MESH", "on"),
        "scheduling": "SCHED_RR" if precedence.asked_for() else "",
    }
    for package in PACKAGES:
        try:
            about[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            about[package] = "not installed"
    return about


@functools.cache
def _commit() -> str:
    """Return the commit that is measured, asked once: the first result that is kept changes the working tree."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # another system than Linux
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def save(comparison: Comparison, about: Mapping[str, str], folder: Path = RESULTS) -> Path:
    """Write a comparison to ``folder`` and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{comparison.name}.json"
    kept = dataclasses.asdict(comparison)
    kept["samples"] = _rounded(comparison.samples)
    kept["extra"] = {name: _rounded(each) for name, each in comparison.extra.items()}
    text = json.dumps({"machine": dict(about), **kept}, indent=1, ensure_ascii=False)
    path.write_text(_short_lists(text) + "\n", encoding="utf-8")
    return path


def _rounded(samples: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: [float(f"{value:.5g}") for value in values] for name, values in samples.items()}


def load(path: Path) -> tuple[Comparison, dict[str, str]]:
    """Return a comparison and the machine it was taken on.

    Raises:
        OSError: the file can't be read.
        ValueError: it holds something else.
    """
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    about = kept.pop("machine")
    return Comparison(**kept), about


def load_all(folder: Path = RESULTS) -> dict[str, tuple[Comparison, dict[str, str]]]:
    """Return all comparisons in a folder by their names."""
    return {path.stem: load(path) for path in sorted(folder.glob("*.json"))}


def _short_lists(text: str) -> str:
    """Put each list of numbers on one line: a hundred lines of numbers hide what changed."""
    return re.sub(r"\[\s+([-+.,\de\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
