"""``python -m benchmarks``: measures, prints, and keeps the results."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence

from benchmarks import document, guard, precedence, results, table
from benchmarks.results import Comparison

ORDER = (
    "torchrun",
    "script",
    "any_program",
    "known_address",
    "last_rank",
    "torchrun_recovery",
    "broken_pair",
    "scale",
    "simulated",
    "capacity",
    "footprint",
)
"""The comparisons in the order of the document."""
ROUNDS, GUARD_ROUNDS = 20, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 when a ratio is beyond its limit, or a comparison failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which ones (default: all): {', '.join(ORDER)}",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"how often a short one is measured; a long one less often in proportion (default: {ROUNDS})",
    )
    parser.add_argument("--guard", action="store_true", help="few rounds of what CI guards, against fixed limits")
    parser.add_argument("--document", action="store_true", help="only draw and write from the results that are kept")
    parser.add_argument(
        "--realtime", action="store_true", help="on a machine that is not idle: what is measured takes precedence"
    )
    chosen = parser.parse_args(arguments)
    if chosen.realtime:
        os.environ[precedence.VARIABLE] = "1"
    unknown = [name for name in chosen.names if name not in ORDER]
    if unknown:
        parser.error(f"there is no comparison {', '.join(unknown)}; there are: {', '.join(ORDER)}")
    if chosen.document:
        _publish()
        return 0
    if chosen.guard:
        guarded = list(dict.fromkeys(name for name, _ in guard.LIMITS))
        return _guard(_measure(guarded, chosen.rounds or GUARD_ROUNDS, keep=False))
    names = chosen.names or ORDER
    measured = _measure(names, chosen.rounds or ROUNDS, keep=True)
    _publish()
    return 0 if len(measured) == len(names) else 1


def _measure(names: Sequence[str], rounds: int, *, keep: bool) -> dict[str, Comparison]:
    """Measure and print each; one that fails says so and leaves the others alone."""
    measured = {}
    for name in names:
        about, started = results.machine(), time.monotonic()
        try:
            comparison: Comparison = importlib.import_module(f"benchmarks.{name}").run(rounds)
        except Exception as error:
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        measured[name] = comparison
        about["minutes"] = f"{(time.monotonic() - started) / 60:.1f}"
        print(f"{table.plain(comparison)}\n  took {about['minutes']} minutes, load {about['load']}\n", flush=True)
        if keep:
            results.save(comparison, about)
    return measured


def _publish() -> None:
    """Draw the pictures and write the documents, from all results that are kept."""
    from benchmarks import plots

    kept = results.load_all()
    ordered = [kept[name] for name in ORDER if name in kept]
    for comparison, _ in ordered:
        if comparison.unit:  # one scale
            plots.draw(comparison)
    plots.draw_figures()
    document.write(ordered)


def _guard(measured: dict[str, Comparison]) -> int:
    beyond = guard.beyond_limits(measured)
    for sentence in beyond:
        print(f"worse: {sentence}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
