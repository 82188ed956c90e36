"""States and transitions of the machines, as data. Pure.

A machine keeps its state as a record. The type of the record names the state, and its fields are what exists in that
state and in no other. A table lists the transitions: for each state the events that end it, and the state that each of
them leads to. The first state of a table is the one in which the machine begins, and a state without events is final.

:func:`transition` is the only way from one state to the next, so a table holds every transition that a machine makes.
``docs/protocol.md`` shows the tables as diagrams. The idea is that of h11's ``_state.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

Transitions: TypeAlias = Mapping[type, Mapping[str, type]]
"""The states, the events that end each of them, and the states that follow."""

_State = TypeVar("_State")


def transition(table: Transitions, state: object, event: str, following: _State) -> _State:
    """Return the following state.

    Args:
        table: the transitions of the machine.
        state: its present state.
        event: why it changes.
        following: the record of the state that follows.

    Raises:
        RuntimeError: the table has no such transition.
    """
    if table[type(state)].get(event) is not type(following):
        raise RuntimeError(f"no transition from {type(state).__name__} to {type(following).__name__} by {event!r}")
    return following
