"""Each planted mistake of the registry is reached, and found by a random schedule."""

from __future__ import annotations

import pytest

from tests.lan.planted import MISTAKES, search
from tests.lan.planting import Mistake, planted
from tests.support.levels import soaking


@pytest.mark.soak
@pytest.mark.timeout(3600)  # hundreds of schedules, on a machine that has other tests to run
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(each, id=each.name, marks=[] if each.level == "quick" else [pytest.mark.slow])
        for each in MISTAKES
        if each.level != "soak" or soaking()
    ],
)
def test_planted_mistake_is_found(mistake: Mistake) -> None:
    problem = search(mistake, from_zero=soaking()).problem
    assert not problem, problem


def test_each_mistake_has_a_name_of_its_own_and_a_seam_that_is_there() -> None:
    assert len({each.name for each in MISTAKES}) == len(MISTAKES)
    for each in MISTAKES:  # those that are looked for in `make soak` only, too
        with planted(*each.seams) as reached:
            assert len(reached) == len(each.seams)
