"""A token bucket: its burst, its rate, and clocks that jump."""

from __future__ import annotations

import pytest

from mingle.token_bucket import TokenBucket


def test_burst_is_followed_by_the_sustained_rate() -> None:
    bucket = TokenBucket.full(2.0, 3.0, 10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait(10.0) == pytest.approx(0.5)
    assert [bucket.take(now) for now in (10.4, 10.5, 10.6, 11.0)] == [False, True, False, True]


def test_pause_earns_no_more_than_the_burst() -> None:
    bucket = TokenBucket.full(2.0, 3.0, 0.0)
    assert [bucket.take(1e6) for _ in range(4)] == [True, True, True, False]


def test_clock_that_goes_backwards_costs_nothing() -> None:
    bucket = TokenBucket.full(2.0, 3.0, 10.0)
    assert bucket.take(10.0)
    assert bucket.wait(4.0) == 0.0
    assert [bucket.take(4.0) for _ in range(3)] == [True, True, False]
