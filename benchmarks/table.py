"""A comparison as text, for a terminal and for Markdown alike."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results import Comparison
from benchmarks.samples import median, summarise

FEW = 5
"""Of fewer measurements a 5th or a 95th percentile would be no more than the lowest or the highest one."""


def number(value: float) -> str:
    """Return a figure with three digits that count, and no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.4f}" if 0 < value < 0.1 else f"{value:.2f}"


def rows(comparison: Comparison) -> list[list[str]]:
    """Return the table of a comparison, its heading first: each contender's figures, and how it stands to mingle."""
    columns = sorted({column for each in comparison.extra.values() for column in each})
    middle = f"median ({comparison.unit})" if comparison.unit else "median"
    heading = ["", middle, "5 %", "95 %", "n", "mingle is", *columns]
    ours = comparison.samples.get("mingle")
    table = [heading]
    for name, values in comparison.samples.items():
        summary = summarise(values)
        beside: Mapping[str, list[float]] = comparison.extra.get(name, {})
        table.append(
            [
                name,
                number(summary.median),
                number(summary.low) if summary.count >= FEW else "",
                number(summary.high) if summary.count >= FEW else "",
                str(summary.count),
                "" if ours is None or name == "mingle" else _standing(summarise(ours).median, summary.median),
                *(number(median(beside[column])) if column in beside else "" for column in columns),
            ]
        )
    return table


def _standing(ours: float, theirs: float) -> str:
    if theirs <= 0 or ours <= 0:
        return ""
    return f"{number(theirs / ours)} × less" if theirs >= 2 * ours else f"{number(ours / theirs)} ×"


def plain(comparison: Comparison) -> str:
    """Return a comparison for a terminal."""
    table = rows(comparison)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [comparison.title]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
