"""The regression guard: today's ratios against fixed limits. Seconds differ between machines, ratios hardly."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results import Comparison

LIMITS: Mapping[tuple[str, str], float] = {
    ("last_rank", "zeroconf"): 0.25,
    ("last_rank", "zeroconf's datagrams"): 2.5,
    ("capacity", "256 members"): 15.0,
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
