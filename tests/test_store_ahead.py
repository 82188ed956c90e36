"""When a store is opened ahead of the seal, and who is told of it."""

from __future__ import annotations

from mingle.protocol.store_ahead import AHEAD_SECONDS, StoreAhead


def test_it_waits_for_a_quiet_moment_and_is_due_once() -> None:
    ahead = StoreAhead(wanted=True)
    assert not ahead.is_due(100.0)
    ahead.came(1.0)
    ahead.came(1.1)
    assert not ahead.is_due(1.0 + AHEAD_SECONDS)
    assert ahead.due == 1.1 + AHEAD_SECONDS
    assert ahead.is_due(1.1 + AHEAD_SECONDS)
    assert not ahead.is_due(100.0)
    assert ahead.due is None


def test_where_it_is_not_wanted_it_is_never_due() -> None:
    ahead = StoreAhead(wanted=False)
    ahead.came(1.0)
    ahead.reopened(2.0)
    assert ahead.due is None
    assert not ahead.is_due(100.0)


def test_everybody_is_told_once_of_each_place() -> None:
    ahead = StoreAhead(wanted=True)
    ahead.address = "10.0.0.1"
    assert ahead.to_tell([1, 2], 4000) == [1, 2]
    assert ahead.to_tell([1, 2, 3], 4000) == [3]
    assert ahead.to_tell([3], 4001) == [3]
    ahead.address = "10.1.0.1"
    assert ahead.to_tell([1, 3], 4000) == [1, 3]


def test_who_was_told_of_another_place_since_is_told_again_and_who_has_gone_is_forgotten() -> None:
    ahead = StoreAhead(wanted=True)
    for address, told in (("10.0.0.1", [1, 2]), ("10.1.0.1", [1, 2]), ("10.0.0.1", [1, 2]), ("10.0.0.1", [])):
        ahead.address = address
        assert ahead.to_tell([1, 2], 4000) == told
    assert ahead.to_tell([3], 4000) == [3]
    assert ahead.to_tell([2, 3], 4000) == [2]


def test_a_seal_that_is_called_off_begins_anew() -> None:
    ahead = StoreAhead(wanted=True)
    ahead.address = "10.0.0.1"
    ahead.to_tell([1], 4000)
    ahead.reopened(5.0)
    assert ahead.due == 5.0 + AHEAD_SECONDS
    assert ahead.to_tell([1], 4000) == [1]
