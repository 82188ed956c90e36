"""Decisions are data: what is equal says the same, and nobody changes one that was handed out."""

from __future__ import annotations

import typing

import pytest

from mingle.protocol import decisions, machine
from mingle.wire import frames


def test_every_decision_is_a_frozen_record_with_a_text() -> None:
    kinds = typing.get_args(decisions.Decision)
    assert {kind.__name__ for kind in kinds} | {"Decision"} == set(decisions.__all__)
    for kind in kinds:
        assert kind.__struct_config__.frozen
        assert kind.__doc__


def test_a_decision_cannot_be_changed() -> None:
    told = decisions.Tell(1, frames.Ping(number=2))
    assert told == decisions.Tell(1, frames.Ping(number=2))
    with pytest.raises(AttributeError):
        told.conn = 2  # type: ignore[misc]


def test_opening_the_store_is_decided_and_carried_out_in_the_same_words() -> None:
    assert decisions.OpenStore is machine.OpenStore
    assert decisions.PrepareStore is machine.PrepareStore
