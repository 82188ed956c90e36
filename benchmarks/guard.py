"""The regression guard: today's ratios against the committed ones. Seconds differ between machines, ratios hardly."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results import Comparison

TOLERANCE = 1.5
"""A ratio of medians over few rounds on a busy machine moves by a third; what is half as much again has a cause."""

LIMITS: Mapping[tuple[str, str], float] = {
    ("last_rank", "zeroconf"): 0.25,
    ("capacity", "256 members"): 15.0,
    ("wire", "zeroconf"): 1.5,
}
"""The largest value of each ratio that CI guards, by comparison and peer: several times an idle machine's value of the
times, twice that of the datagrams. On a machine that does other work the times are seven times as long."""


def beyond_limits(present: Mapping[str, Comparison]) -> list[str]:
    """Return a sentence for each guarded ratio that is beyond its limit or was not measured."""
    found = []
    for (name, what), limit in LIMITS.items():
        now = present[name].ratios.get(what) if name in present else None
        if now is None:
            found.append(f"{name}: {what} could not be measured")
        elif now > limit:
            found.append(f"{name}: {what} is {now:.3g} (limit: {limit:g})")
    return found


def regressions(
    committed: Mapping[str, Comparison], present: Mapping[str, Comparison], tolerance: float = TOLERANCE
) -> list[str]:
    """Return a sentence for each ratio that got worse, and for each that is no longer measured.

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
