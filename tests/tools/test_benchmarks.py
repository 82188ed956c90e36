"""The figures of the benchmarks, and the guard that says what got worse; nothing is measured here."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks import guard, results
from benchmarks.document import write
from benchmarks.results import Comparison, Goal
from benchmarks.samples import percentile, ratio, summarise


def comparison(ours: float = 10.0, name: str = "example") -> Comparison:
    samples = {"mingle": [ours, ours + 1, ours - 1], "peer": [100.0, 110.0, 90.0]}
    return Comparison(
        name=name,
        title="An example",
        text="What it is.",
        unit="ms",
        samples=samples,
        goals=(Goal("time", ours, 12.0, "ms"),),
        ratios={"peer": ratio(samples["mingle"], samples["peer"])},
        extra={"peer": {"CPU": 3.0}},
    )


def test_the_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 101)]
    assert summarise(values[::-1]) == summarise(values)
    assert (summarise(values).median, summarise(values).low, summarise(values).high) == (50.5, 5.0, 95.0)
    assert [percentile(values, fraction) for fraction in (0, 0.99, 1)] == [1.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0


def test_ci_fails_when_a_guarded_ratio_is_beyond_its_limit_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LIMITS", {("example", "peer"): 0.15})
    for measured, status in (({"example": comparison()}, 0), ({"example": comparison(ours=20.0)}, 1), ({}, 1)):
        monkeypatch.setattr(command, "_measure", lambda *_, measured=measured, **__: measured)
        assert command.main(["--guard"]) == status


def test_the_guarded_ratios_are_those_of_comparisons() -> None:
    assert {name for name, _ in guard.LIMITS} <= set(command.ORDER)


def test_the_committed_document_is_that_of_the_committed_results(tmp_path: Path) -> None:
    kept = results.load_all()
    ordered = [kept[name] for name in command.ORDER if name in kept]
    assert len(ordered) == len(kept)
    assert write(ordered, tmp_path / "it.md").read_text("utf-8") == (results.ROOT / "docs" / "benchmarks.md").read_text(
        "utf-8"
    )
