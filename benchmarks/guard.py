"""The regression guard: today's ratios against the committed ones. Seconds differ between machines, ratios hardly."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results import Comparison

TOLERANCE = 1.5
"""A ratio of medians over few rounds on a busy machine moves by a third; what is half as much again has a cause."""


def regressions(
    committed: Mapping[str, Comparison], present: Mapping[str, Comparison], tolerance: float = TOLERANCE
) -> list[str]:
    """Returns a sentence for each ratio that got worse, and for each that is no longer measured.

    A comparison that was not run at all is not judged.
    """
    found = []
    for name, comparison in present.items():
        if name not in committed:
            continue
        for what, before in committed[name].ratios.items():
            if what not in comparison.ratios:
                found.append(f"{name}: {what} is no longer measured; committed is {before:.3g}")
                continue
            now = comparison.ratios[what]
            if now > before * tolerance:
                found.append(
                    f"{name}: {what} is {now:.3g}, {now / before:.1f} times the committed {before:.3g} "
                    f"(tolerated: {tolerance:g} times)"
                )
    return found
