"""Random schedules of agents. A failing seed is replayed by ``python -m tests.lan agents --replay SEED``."""

from __future__ import annotations

import pytest

from tests.lan.agent_schedules import AgentSchedule
from tests.lan.seeds import failures
from tests.support.levels import batches


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(5, 90, soak=5_000, size=15))
def test_random_schedules(seeds: range) -> None:
    assert list(failures(AgentSchedule, seeds)) == []
