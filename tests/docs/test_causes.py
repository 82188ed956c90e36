"""Every rung of the ladders from what was observed to the cause that is named, and no warning in a cause's place."""

from __future__ import annotations

import pytest

from tests.support.causes import LADDERS, Row

ROWS = [pytest.param(who, row, id=f"{who}: {row.observed}") for who, (_, rows) in LADDERS.items() for row in rows]


@pytest.mark.parametrize(("who", "row"), ROWS)
def test_the_cause_that_is_named(who: str, row: Row) -> None:
    names, _ = LADDERS[who]
    assert row.cause in names(row)
