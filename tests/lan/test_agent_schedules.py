"""Random schedules of agents. A failing seed is replayed by ``python -m tests.lan agents --replay SEED``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mingle.agents import registrar as agent_registrar
from mingle.agents.hosting import AgentHost
from mingle.agents.quorum import members_of
from mingle.agents.registrar import AgentsRegistrar
from mingle.agents.roll import Roll
from tests.lan.agent_schedules import AgentSchedule
from tests.soak import repeated

SEEDS_PER_TEST = 50
PLANTED_SEEDS = 300
"""Within so many schedules each planted bug must be found."""


@pytest.mark.soak
@pytest.mark.parametrize("batch", repeated(4, soak=200))
def test_random_schedules(batch: int) -> None:
    failed = []
    for seed in range(batch * SEEDS_PER_TEST, (batch + 1) * SEEDS_PER_TEST):
        try:
            AgentSchedule(seed).run()
        except AssertionError as problem:
            failed.append(f"python -m tests.lan agents --replay {seed}: {str(problem).splitlines()[0]}")
    assert not failed, "\n".join(failed)


def test_the_same_seed_is_the_same_day() -> None:
    days = []
    for _ in range(2):
        schedule = AgentSchedule(5, tracing=True)
        schedule.run()
        days.append((schedule.gathering.world.steps, schedule.gathering.world.trace))
    assert days[0] == days[1]


def half_survives(view: Any, present: Any, **_: Any) -> bool:
    """Is content with half of those that were there before."""
    return 2 * len(members_of(view) & present) >= len(view.nodes)


def plant_half_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent_registrar, "survives", half_survives)


def plant_host_that_never_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roll, "holds", lambda *_: True)


def plant_survivors_that_never_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentsRegistrar, "_has_majority", lambda *_: True)


def plant_host_that_never_makes_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentHost, "_sighted", lambda *_: None)


@pytest.mark.parametrize(
    ("plant", "finding"),
    [
        (plant_half_is_enough, "two halves have a majority"),
        (plant_host_that_never_counts, "has no majority for"),
        (plant_survivors_that_never_count, "two halves have a majority|went back to generation|has no majority"),
        (plant_host_that_never_makes_way, "not together"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], finding: str
) -> None:
    plant(monkeypatch)

    def search() -> None:
        for seed in range(PLANTED_SEEDS):
            AgentSchedule(seed).run()

    with pytest.raises(AssertionError, match=finding):
        search()
