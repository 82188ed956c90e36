"""Random schedules: thousands of bad days. A failing seed is replayed by ``python -m tests.lan replay SEED``."""

from __future__ import annotations

import pytest

from tests.lan.agent_schedules import AgentSchedule
from tests.lan.election_schedules import ElectionSchedule
from tests.lan.schedules import Schedule
from tests.lan.seeds import failures
from tests.support.levels import batches


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(25, 400, soak=5_000, size=75))
def test_random_schedules(seeds: range) -> None:
    assert list(failures(Schedule, seeds)) == []


@pytest.mark.parametrize("kind", [Schedule, ElectionSchedule, AgentSchedule])
def test_the_same_seed_is_the_same_day(kind: type[Schedule | AgentSchedule]) -> None:
    days = []
    for _ in range(2):
        schedule = kind(11, tracing=True)
        schedule.run()
        days.append((schedule.gathering.world.steps, schedule.gathering.world.trace))
    assert days[0] == days[1]


@pytest.mark.parametrize("kind", [Schedule, ElectionSchedule, AgentSchedule])
def test_a_fresh_machine_that_is_told_the_same_comes_to_the_same_end(kind: type[Schedule | AgentSchedule]) -> None:
    """Nothing else of the world has a say: each process is played again by itself."""
    schedule = kind(7, tracing=True)
    schedule.run()
    processes = [each for each in schedule.gathering.world.processes if each.core is not None]
    assert sum(len(each.recording.steps) for each in processes) > 500
    for process in processes:
        machine = process.recording.replay()
        assert (machine.stage(), machine.outcome) == (process.core.stage(), process.core.outcome)
