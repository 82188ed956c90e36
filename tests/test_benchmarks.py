"""The figures of the benchmarks, and the guard that says what got worse; nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks import guard, history, results, table
from benchmarks.document import write
from benchmarks.results import Comparison, Goal
from benchmarks.samples import alternate, median, percentile, ratio, summarise
from benchmarks.stats import code_lines, lines_per_room
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ABOUT = {"cpu": "2 × some", "kernel": "Linux 6", "python": "3.11", "load": "0.1", "torch": "2.13"}


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


# --- statistics -----------------------------------------------------------------------------------------------------


def test_the_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 101)]
    assert summarise(values[::-1]) == summarise(values)
    assert (summarise(values).median, summarise(values).low, summarise(values).high) == (50.5, 5.0, 95.0)
    assert [percentile(values, fraction) for fraction in (0, 0.99, 1)] == [1.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a loaded machine is slow, and that is all
@given(st.lists(st.floats(0, 1e9), min_size=1), st.floats(0, 1))
def test_a_percentile_is_one_of_the_values_and_no_smaller_share_is_below(values: list[float], fraction: float) -> None:
    found = percentile(values, fraction)
    assert found in values
    assert sum(value <= found for value in values) >= fraction * len(values) - 1e-6
    assert min(values) <= median(values) <= max(values)


@pytest.mark.parametrize("call", [lambda: percentile([], 0.5), lambda: percentile([1.0], 1.5), lambda: median([])])
def test_there_are_no_figures_of_nothing(call: object) -> None:
    with pytest.raises(ValueError, match=r"no (percentile|median)"):
        call()  # type: ignore[operator]


def test_a_ratio_is_that_of_the_medians() -> None:
    assert ratio([1.0, 2.0, 100.0], [4.0, 4.0, 0.1]) == 0.5
    with pytest.raises(ValueError, match="no ratio to zero"):
        ratio([1.0], [0.0])


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return len(order)

    taken = alternate(2, {"A": lambda _: measure("A"), "B": lambda _: measure("B")})
    assert order == ["A", "B", "A", "B"]
    assert taken == {"A": [1.0, 3.0], "B": [2.0, 4.0]}


# --- results --------------------------------------------------------------------------------------------------------


def test_results_are_kept_and_found_again(tmp_path: Path) -> None:
    kept = comparison()
    path = results.save(kept, ABOUT, tmp_path)
    assert results.load(path) == (kept, ABOUT)
    assert results.load_all(tmp_path) == {"example": (kept, ABOUT)}
    assert "[10.0, 11.0, 9.0]" in path.read_text(encoding="utf-8"), "one line for each contender"


def test_a_goal_is_reached_up_to_its_limit() -> None:
    assert [Goal("", value, 10, "").met for value in (9.9, 10, 10.1)] == [True, True, False]


def test_the_machine_is_described() -> None:
    about = results.machine()
    assert {"cpu", "kernel", "python", "load", "torch", "zeroconf"} <= about.keys()
    assert all(about.values())


# --- the guard ------------------------------------------------------------------------------------------------------


def test_what_got_worse_is_named_with_both_figures() -> None:
    (sentence,) = guard.regressions({"example": comparison()}, {"example": comparison(ours=20.0)})
    assert "example: peer is 0.2, 2.0 times the committed 0.1" in sentence


@pytest.mark.parametrize("ours", [1.0, 10.0, 14.9])
def test_what_is_better_or_moves_as_ratios_do_is_no_regression(ours: float) -> None:
    assert guard.regressions({"example": comparison()}, {"example": comparison(ours)}) == []


def test_a_ratio_that_is_no_longer_measured_is_named() -> None:
    without = Comparison(name="example", title="", text="", unit="ms", samples={})
    assert "peer is no longer measured" in guard.regressions({"example": comparison()}, {"example": without})[0]


def test_what_was_not_run_or_never_kept_is_not_judged() -> None:
    assert guard.regressions({"example": comparison()}, {}) == []
    assert guard.regressions({}, {"example": comparison()}) == []


def test_the_command_fails_when_something_got_worse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(results, "load_all", lambda: {"example": (comparison(), ABOUT)})
    for ours, status in ((10.0, 0), (20.0, 1)):
        monkeypatch.setattr(command, "_measure", lambda *_, ours=ours, **__: {"example": comparison(ours=ours)})
        assert command.main(["--quick"]) == status


def test_ci_fails_when_a_guarded_ratio_is_beyond_its_limit_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LIMITS", {("example", "peer"): 0.15})
    for measured, status in (({"example": comparison()}, 0), ({"example": comparison(ours=20.0)}, 1), ({}, 1)):
        monkeypatch.setattr(command, "_measure", lambda *_, measured=measured, **__: measured)
        assert command.main(["--guard"]) == status


def test_the_guarded_ratios_are_those_of_comparisons() -> None:
    assert {name for name, _ in guard.LIMITS} <= set(command.ORDER)


def test_each_published_run_adds_a_record(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    for ours in (10.0, 20.0):
        history.add([comparison(ours)], path)
    assert [record["ratios"] for record in json.loads(path.read_text("utf-8"))] == [
        {"example": {"peer": 0.1}},
        {"example": {"peer": 0.2}},
    ]


def test_an_unknown_comparison_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["last_rnak"])
    assert stopped.value.code == 2
    assert "there is no comparison last_rnak; there are: torchrun, " in capsys.readouterr().err


# --- what people read -----------------------------------------------------------------------------------------------


def test_the_table_says_how_the_others_stand_to_mingle() -> None:
    heading, ours, peer = table.rows(comparison())
    assert heading == ["", "median (ms)", "5 %", "95 %", "n", "mingle is", "CPU"]
    assert ours == ["mingle", "10.0", "9.00", "11.0", "3", "", ""]
    assert peer == ["peer", "100", "90.0", "110", "3", "10.0 × less", "3.00"]
    assert "reached: time: 10.0 ms (goal: at most 12.0 ms)" in table.plain(comparison())
    assert "missed: time" in table.plain(comparison(ours=13.0))


def test_the_document_is_made_of_the_results(tmp_path: Path) -> None:
    text = write([(comparison(), ABOUT), (comparison(13.0, "other"), ABOUT)], tmp_path / "it.md").read_text("utf-8")
    assert text.index("## What does it cost me?") < text.index("### An example") < text.index("own goals")
    assert "| time | 12.0 ms | 10.0 ms | reached |" in text
    assert "| time | 12.0 ms | 13.0 ms | **missed** |" in text
    assert "`python -m benchmarks other`; 2 × some, Linux 6, python 3.11, torch 2.13; load average" in text


def test_the_committed_document_is_that_of_the_committed_results(tmp_path: Path) -> None:
    kept = results.load_all()
    ordered = [kept[name] for name in command.ORDER if name in kept]
    assert len(ordered) == len(kept)
    assert write(ordered, tmp_path / "it.md").read_text("utf-8") == (results.ROOT / "docs" / "benchmarks.md").read_text(
        "utf-8"
    )


# --- lines of code --------------------------------------------------------------------------------------------------


def test_text_and_blank_lines_are_no_lines_of_code(tmp_path: Path) -> None:
    source = (
        '"""Text\nof two lines."""\n\n# a comment\nX = (\n    1,\n)\n"""About X."""\nY = """two\nlines"""  # more\n'
    )
    assert code_lines(source) == 5
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text(source)
    (tmp_path / "room" / "two.py").write_text("")
    (tmp_path / "top.py").write_text("X = 1\n")
    assert lines_per_room(tmp_path) == {"room": (2, 5), "(top)": (1, 1)}
