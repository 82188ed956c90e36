"""Random schedules of agents. A failing seed is replayed by ``python -m tests.lan agents --replay SEED``."""

from __future__ import annotations

import pytest

from tests.lan.agent_schedules import AgentSchedule, CrowdedAgentSchedule
from tests.lan.seeds import failures
from tests.support.levels import batches


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(5, 90, soak=5_000, size=15))
def test_random_schedules(seeds: range) -> None:
    assert list(failures(AgentSchedule, seeds)) == []


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(2, 32, soak=1_500, size=15))
def test_random_schedules_of_more_agents_than_a_job_can_have(seeds: range) -> None:
    assert list(failures(CrowdedAgentSchedule, seeds)) == []
