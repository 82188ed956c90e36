"""The transitions of a machine are those of its table."""

from __future__ import annotations

import pytest

from mingle.protocol.states import Transitions, transition


class Off:
    """A lamp that is off."""


class On:
    """A lamp that is on."""


LAMP: Transitions = {Off: {"pressed": On}, On: {"pressed": Off, "the bulb has burnt out": Off}}


def test_a_transition_of_the_table_leads_to_the_given_record() -> None:
    on = On()
    assert transition(LAMP, Off(), "pressed", on) is on


@pytest.mark.parametrize(
    ("state", "event", "following"),
    [(Off(), "the bulb has burnt out", Off()), (On(), "pressed", On()), (Off(), "broken", On())],
    ids=["event of another state", "another following state", "unknown event"],
)
def test_any_other_transition_is_an_error(state: object, event: str, following: object) -> None:
    with pytest.raises(RuntimeError, match=f"from {type(state).__name__} to {type(following).__name__} by '{event}'"):
        transition(LAMP, state, event, following)
