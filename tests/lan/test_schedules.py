"""Random schedules: thousands of bad days. A failing seed is replayed by ``python -m tests.lan replay SEED``."""

from __future__ import annotations

import os

import pytest

from tests.lan.schedules import Schedule

SEEDS_PER_TEST = 100
TESTS = 200 if os.environ.get("MINGLE_SOAK") == "1" else 15


@pytest.mark.parametrize("first", range(0, TESTS * SEEDS_PER_TEST, SEEDS_PER_TEST))
def test_random_schedules(first: int) -> None:
    failed = []
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            Schedule(seed).run()
        except AssertionError as problem:
            failed.append(f"python -m tests.lan replay {seed}: {str(problem).splitlines()[0]}")
    assert not failed, "\n".join(failed)


def test_the_same_seed_is_the_same_day() -> None:
    days = []
    for _ in range(2):
        schedule = Schedule(11, tracing=True)
        schedule.run()
        days.append((schedule.gathering.world.steps, schedule.gathering.world.trace))
    assert days[0] == days[1]
