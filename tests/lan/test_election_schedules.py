"""Random schedules without ranks. A failing seed is replayed by ``python -m tests.lan elect --replay SEED``."""

from __future__ import annotations

import pytest

from tests.lan.election_schedules import ElectionSchedule
from tests.lan.seeds import failures
from tests.support.levels import batches


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(10, 150, soak=5_000, size=35))
def test_random_schedules(seeds: range) -> None:
    assert list(failures(ElectionSchedule, seeds)) == []
