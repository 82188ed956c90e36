"""Random schedules of rounds. A failing seed is replayed by ``python -m tests.lan rounds --replay SEED``."""

from __future__ import annotations

import pytest

from tests.lan.round_schedules import RoundSchedule
from tests.lan.seeds import failures
from tests.support.levels import batches


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(5, 60, soak=1_500, size=15))
def test_random_schedules(seeds: range) -> None:
    assert list(failures(RoundSchedule, seeds)) == []
