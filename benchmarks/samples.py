"""What is made of repeated measurements: medians, percentiles, ratios; and the order in which they are taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Some measurements of one thing."""

    median: float
    low: float
    """The 5th percentile."""
    high: float
    """The 95th percentile."""
    count: int


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least this fraction of all values does not exceed (the nearest rank).

    It is always one of the values: with few of them an interpolated 99th percentile would be an invention.

    Raises:
        ValueError: there are no values, or the fraction is not within 0 … 1.
    """
    if not values or not 0 <= fraction <= 1:
        raise ValueError(f"no percentile {fraction} of {len(values)} values")
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the middle two.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no median of no values")
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def summarise(values: Sequence[float]) -> Summary:
    """Return the figures of some measurements.

    Raises:
        ValueError: there are none.
    """
    return Summary(median(values), percentile(values, 0.05), percentile(values, 0.95), len(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how many times as much ours is as theirs, by their medians; less than 1 is less.

    Raises:
        ValueError: one of them is empty, or theirs is zero.
    """
    divisor = median(theirs)
    if divisor == 0:
        raise ValueError("no ratio to zero")
    return median(ours) / divisor


def alternate(rounds: int, contenders: Mapping[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """Measure all contenders in turn, A B C A B C …: what else the machine does hits all of them alike.

    Args:
        rounds: how often each is measured.
        contenders: by name what measures once; it is given the number of the round, from 0.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds):
        for name, measure in contenders.items():
            taken[name].append(measure(round_))
    return taken
