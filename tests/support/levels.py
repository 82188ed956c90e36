"""How often a scenario runs on each level of the suite, stated once, where the scenario stands.

| level | command | runs |
|---|---|---|
| quick | ``make test`` | each test that is not marked ``slow``, on its first seeds |
| all | ``make test-all`` | each test, on as many seeds as `repeated` says |
| soak | ``make soak`` | the tests marked ``soak``, as often as `repeated` and `batches` say for it |

A soak that takes a night is not run. On two cores it ends within two hours: each variant of a scenario of the lab runs
three times, one that is a race five or more times; thousands of schedules are the simulator's.

A test of the lab is slow unless it is marked ``quick`` (`tests/lab/conftest.py`); any other test is quick unless it is
marked ``slow``. ``make test`` ends with the slowest tests of the run: what stands there and catches little is the next
to be marked.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def soaking() -> bool:
    """Return whether this run is ``make soak``."""
    return os.environ.get("MINGLE_SOAK") == "1"


def repeated(times: int, *, soak: int) -> list[ParameterSet]:
    """Return the seeds of a scenario: the first on every level, ``times`` on level all, ``soak`` in ``make soak``."""
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if seed and not soaking() else [])
        for seed in range(soak if soaking() else times)
    ]


def batches(quick: int, whole: int, *, soak: int, size: int) -> list[ParameterSet]:
    """Return the seeds of a test that goes through many of them: ``quick`` on every level, ``whole`` on level all.

    Args:
        quick: the number of seeds in ``make test``.
        whole: that in ``make test-all``.
        soak: that in ``make soak``.
        size: of a batch; each is a test, and the first has the quick ones.
    """
    count = soak if soaking() else whole
    edges = [0, *range(quick, count, size), count]
    return [
        pytest.param(
            range(first, end), id=f"{first}-{end - 1}", marks=[pytest.mark.slow] if first and not soaking() else []
        )
        for first, end in pairwise(edges)
    ]


def spread(first: int, times: int) -> list[ParameterSet]:
    """Return the seeds of a test that goes through several: the first on every level, the rest on level all."""
    return [
        pytest.param(range(first), id="first"),
        pytest.param(range(first, times), id="rest", marks=pytest.mark.slow),
    ]


def chosen(always: list[T], *, soak: list[T]) -> list[T]:
    """Return the variants of a scenario: one of each kind, and in ``make soak`` those besides."""
    return [*always, *soak] if soaking() else always
