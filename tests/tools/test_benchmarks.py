"""The figures of the benchmarks, and the guard that says what got worse; nothing is measured here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks import document, guard, plots, results, simulated, table
from benchmarks.document import write
from benchmarks.results import Comparison
from benchmarks.samples import median, percentile, ratio, summarise


def comparison(ours: float = 10.0, name: str = "example") -> Comparison:
    samples = {"mingle": [ours, ours + 1, ours - 1], "peer": [100.0, 110.0, 90.0]}
    return Comparison(
        name=name,
        title="An example",
        text="What it is.",
        unit="ms",
        samples=samples,
        ratios={"peer": ratio(samples["mingle"], samples["peer"])},
        extra={"peer": {"ms of CPU": [3.0, 5.0, 4.0]}},
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
    resumes = titles["recovery"].partition("\n")[2].partition(";")[0]
    readme = (results.ROOT / "README.md").read_text("utf-8")
    assert resumes in readme, "README names it in the text of the chart"
    own_store = median(kept["torchrun_recovery"].samples["c10d, own store, a worker crashes"])
    assert f"`c10d` resumes in {own_store:.3g} s with one more variable" in readme
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
    samples = {**recovery.samples, "c10d, the store's node vanishes": [60.0, 60.0, 12.0]}
    title = plots.titles({**kept, "torchrun_recovery": dataclasses.replace(recovery, samples=samples)})["recovery"]
    assert title.endswith("; c10d resumes in 1 of 3 runs")


def of_known_address(samples: dict[str, list[float]], mesh: str = "on") -> tuple[Comparison, dict[str, str]]:
    kept = dataclasses.replace(comparison(name="known_address"), samples=samples)
    return kept, {**results.machine(), "date": "2026-01-02", "commit": "0123abc", "mesh": mesh}


def test_the_pages_show_the_default_beside_mesh_off_and_each_group_with_its_runs(tmp_path: Path) -> None:
    samples = {
        "mingle.init, 4 ranks": [50.0] * 6,
        "mingle.init, mesh off, 4 ranks": [40.0] * 6,
        "known address, 4 ranks": [20.0] * 2,
        "known address, a client early, 4 ranks": [600.0] * 4,
    }
    page, method = (each.read_text("utf-8") for each in write([of_known_address(samples)], tmp_path))
    assert "| 50.0 ms; mesh off: 40.0 ms | known address, if no client comes early: 20.0 ms (2 runs);" in page
    assert "if one does: 600 ms (4 runs) |" in page
    assert "Measured 2026-01-02, at `0123abc`." in page
    assert "`known_address`, 2026-01-02, commit 0123abc: mingle.init, 4 ranks 50.0 (50.0-50.0) ms, n=6;" in method
    assert "peer, ms of CPU: 4.00" in method


def test_the_pages_say_what_was_not_measured_and_what_ran_without_the_mesh(tmp_path: Path) -> None:
    kept = of_known_address({"mingle.init, 4 ranks": [40.0]}, "off")
    page = write([kept], tmp_path)[0].read_text("utf-8")
    assert " (mesh off) | 40.0 ms (1 run) | known address, if no client comes early: not measured;" in page
    assert "Than `init_process_group`" not in page
    assert "Than zeroconf" in page


def test_the_figures_of_simulated_jobs_are_a_table_of_their_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "SIZES", (16,))
    monkeypatch.setattr(document, "SIZES", (16,))
    kept = simulated.run(1)
    page, method = (each.read_text("utf-8") for each in write([(kept, of_known_address({})[1])], tmp_path))
    assert "| 16 | 1 | " in page
    assert "rank 0 comes last, 16 ranks" in method


def test_a_kept_comparison_is_read_as_it_was(tmp_path: Path) -> None:
    kept, about = of_known_address({"mingle.init, 4 ranks": [1.5, 2.5]})
    assert results.load(results.save(kept, about, tmp_path)) == (kept, about)
