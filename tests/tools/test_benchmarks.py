"""The figures of the benchmarks, and the guard that says what got worse; nothing is measured here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks import guard, plots, results, table
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


@pytest.mark.parametrize("count", [1, 2, 4, 5, 20])
def test_few_runs_have_no_percentiles(count: int) -> None:
    samples = {"mingle": [float(value) for value in range(1, count + 1)]}
    heading, row = table.rows(dataclasses.replace(comparison(), samples=samples, extra={}))
    shown = dict(zip(heading, row, strict=True))
    assert (shown["5 %"] != "", shown["95 %"] != "", shown["n"]) == (count >= 5, count >= 5, str(count))


def test_ci_fails_when_a_guarded_ratio_is_beyond_its_limit_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LIMITS", {("example", "peer"): 0.15})
    for measured, status in (({"example": comparison()}, 0), ({"example": comparison(ours=20.0)}, 1), ({}, 1)):
        monkeypatch.setattr(command, "_measure", lambda *_, measured=measured, **__: measured)
        assert command.main(["--guard"]) == status


def test_the_guarded_ratios_are_those_of_comparisons() -> None:
    assert {name for name, _ in guard.LIMITS} <= set(command.ORDER)


def test_the_committed_documents_are_those_of_the_committed_results(tmp_path: Path) -> None:
    kept = results.load_all()
    ordered = [kept[name] for name in command.ORDER if name in kept]
    assert len(ordered) == len(kept)
    for page in write(ordered, tmp_path):
        assert page.read_text("utf-8") == (results.ROOT / "docs" / page.name).read_text("utf-8")


def test_the_committed_figures_say_what_the_committed_results_are() -> None:
    kept = {name: comparison for name, (comparison, _) in results.load_all().items()}
    titles = plots.titles(kept)
    assert len(titles) == 3
    for name, title in titles.items():
        figure = (plots.PICTURES / f"{name}.svg").read_text("utf-8")
        for line in title.splitlines():
            assert f">{line}</text>" in figure, "the results have changed: python -m benchmarks --document"
        # A page in dark colors inverts the text, and nothing is loaded from elsewhere.
        assert "prefers-color-scheme: dark" in figure
        assert "@import" not in figure
        assert "url(http" not in figure


def test_a_figure_says_how_often_a_contender_trained_again() -> None:
    kept = {name: comparison for name, (comparison, _) in results.load_all().items()}
    recovery = kept["torchrun_recovery"]
    samples = {**recovery.samples, "c10d, the store's host dies": [60.0, 60.0, 12.0]}
    title = plots.titles({**kept, "torchrun_recovery": dataclasses.replace(recovery, samples=samples)})["recovery"]
    assert title.endswith("; c10d resumes in 1 of 3 runs")
