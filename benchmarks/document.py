"""docs/benchmarks.md, made from the results: nothing in it is typed by hand but what introduces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import table
from benchmarks.plots import PICTURES
from benchmarks.results import ROOT, Comparison

DOCUMENT = ROOT / "docs" / "benchmarks.md"

INTRODUCTION = """\
# Benchmarks

Made by `make bench` (root; Linux) from `benchmarks/results/*.json`, which hold every single measurement. Seconds on
somebody else's machine mean little; what counts is the command that you can run on yours. `make bench-quick` takes less
than three minutes, compares the ratios with the committed ones, and says what got worse.

Every host is a network namespace with an interface of its own on one bridge, and every rank a process of its own in
which torch is imported already. All processes of a machine read the same monotonic clock. Contenders take turns,
A B A B …, and each is the real package or the real torch. Nothing is switched off in mingle for it: all sessions are
proved, confirmed and acknowledged as they always are.

The machine's load is given with each. Where it says SCHED_RR, other work was going on, and what is measured, of every
contender alike, took precedence over that (`--realtime`).
"""


def write(ordered: Sequence[tuple[Comparison, Mapping[str, str]]], path: Path = DOCUMENT) -> Path:
    """Writes the document and returns it."""
    parts = [INTRODUCTION, _overview([comparison for comparison, _ in ordered])]
    for comparison, about in ordered:
        parts += [f"## {comparison.title}\n", f"{comparison.text}\n", f"{table.markdown(comparison)}\n"]
        if comparison.goals:
            parts.append("\n".join(f"* {verdict}" for verdict in table.verdicts(comparison)) + "\n")
        picture = PICTURES / f"bench-{comparison.name.replace('_', '-')}.png"
        if picture.exists():
            parts.append(f"![{comparison.title}](pictures/{picture.name})\n")
        parts.append(f"`python -m benchmarks {comparison.name}`; {_about(about)}.\n")
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _overview(comparisons: Sequence[Comparison]) -> str:
    lines = ["| goal | limit | measured | |", "|---|---:|---:|---|"]
    lines += [
        f"| {goal.text} | {table.number(goal.limit)} {goal.unit} | {table.number(goal.value)} {goal.unit} | "
        f"{'reached' if goal.met else '**missed**'} |"
        for comparison in comparisons
        for goal in comparison.goals
    ]
    return "\n".join(lines) + "\n"


def _about(about: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name not in ("cpu", "kernel", "load"))
    return f"{about['cpu']}, {about['kernel']}, {versions}; load average before the run {about['load']}"
