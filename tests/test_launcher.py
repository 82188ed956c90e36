"""How a row is read, on rows of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from mingle.config.launcher import Launcher, expand_counts
from mingle.errors import LauncherError

WHOLE = {"X_RANK": "1", "X_SIZE": "4"}


def launcher(**fields: Any) -> Launcher:
    plain: dict[str, Any] = {
        "name": "X",
        "marks": ("X_RANK", "X_SIZE"),
        "rank": ("X_RANK",),
        "world_size": ("X_SIZE",),
        "outside": "a part of X's environment",
        "start": "start it with x",
    }
    return Launcher(**plain | fields)


def test_a_row_is_data() -> None:
    found = launcher(local_rank=("X_LOCAL",)).read({**WHOLE, "X_LOCAL": "0"})
    assert (found.rank, found.rank_from, found.world_size, found.world_size_from) == (1, "X_RANK", 4, "X_SIZE")
    assert (found.local_rank, found.local_world_size, found.node, found.job_id, found.attempt) == (0, *[None] * 4)


def test_of_several_names_the_first_that_is_set_counts() -> None:
    row = launcher(rank=("X_NEW", "X_RANK"))
    assert row.read({**WHOLE, "X_NEW": "2"}).rank == 2
    assert row.read({**WHOLE, "X_NEW": " "}).rank_from == "X_RANK"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, None), ({"A": "7"}, None), ({"B": "1"}, None), ({"A": "7", "B": "1"}, "7.1")],
)
def test_a_job_id_has_all_its_parts_or_is_none(environ: dict[str, str], expected: str | None) -> None:
    assert launcher(job_id=(("A",), ("B",))).read({**WHOLE, **environ}).job_id == expected


def test_what_is_computed_is_read_like_a_variable_and_shown_by_none() -> None:
    row = launcher(
        rank=("half of X_RANK",), computed=lambda environ: {"half of X_RANK": str(int(environ["X_RANK"]) // 2)}
    )
    found = row.read({"X_RANK": "6", "X_SIZE": "4"})
    assert (found.rank, found.rank_from) == (3, "half of X_RANK")
    assert "half of X_RANK" not in row.variables
    assert "half of X_RANK" not in row.variables_seen({"X_RANK": "6", "X_SIZE": "4", "half of X_RANK": "0"})


def test_a_row_that_yields_is_not_seen() -> None:
    row = launcher(yields_to=("RANK",))
    assert row.is_seen(WHOLE)
    assert row.is_seen({**WHOLE, "RANK": " "})
    assert not row.is_seen({**WHOLE, "RANK": "0"})


@pytest.mark.parametrize(
    ("count", "refused"), [("0", False), ("1", False), (" 1 ", False), ("2", True), ("auto", True)]
)
def test_one_per_node(count: str, refused: bool) -> None:
    row, environ = launcher(one_per_node=("X_GPUS",)), {**WHOLE, "X_GPUS": count}
    if not refused:
        assert row.read(environ).rank == 1
        return
    with pytest.raises(LauncherError) as raised:
        row.read(environ)
    assert f"X_GPUS={count!r} speaks of several processes" in raised.value.observation
    assert raised.value.remedy == "start it with x"


@pytest.mark.parametrize(
    ("started", "environ", "lacking"),
    [
        (True, {"X_RANK": "1"}, "X_RANK='1', but not X_SIZE"),
        (True, {"X_SIZE": "4"}, "X_SIZE='4', but not X_RANK"),
        (False, WHOLE, "X_RANK='1', X_SIZE='4', but not for a task that it started"),
    ],
)
def test_what_is_incomplete_is_said_with_what_was_seen(started: bool, environ: dict[str, str], lacking: str) -> None:
    with pytest.raises(LauncherError) as raised:
        launcher(started=lambda _: started).read(environ)
    assert lacking in raised.value.observation
    assert (raised.value.cause, raised.value.remedy) == ("a part of X's environment", "start it with x")


def test_a_number_that_is_none_is_shown_among_the_others() -> None:
    with pytest.raises(LauncherError) as raised:
        launcher().read({**WHOLE, "X_SIZE": "many"})
    assert raised.value.observation.startswith("X has set X_RANK='1', X_SIZE='many': X_SIZE='many' is not a whole")


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2]), ("3(x1)", [3])])
def test_expand_counts(text: str, counts: list[int]) -> None:
    assert list(expand_counts(text)) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(x3", "-1", "2,,1"])
def test_expand_counts_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task count"):
        list(expand_counts(text))


@pytest.mark.parametrize(("node_rank", "tasks"), [("0", 2), ("2", 2), ("3", 1)])
def test_the_tasks_of_this_node(node_rank: str, tasks: int) -> None:
    row = launcher(node_rank=("X_NODE",), tasks_per_node=("X_TASKS",))
    environ = {"X_RANK": "6", "X_SIZE": "7", "X_NODE": node_rank, "X_TASKS": "2(x3),1"}
    assert row.read(environ).local_world_size == tasks


def test_a_huge_count_costs_nothing() -> None:
    row = launcher(node_rank=("X_NODE",), tasks_per_node=("X_TASKS",))
    assert row.read({**WHOLE, "X_NODE": "3", "X_TASKS": "1(x999999999)"}).local_world_size == 1
