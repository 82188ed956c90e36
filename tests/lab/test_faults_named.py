"""Each fault that people meet is named by what they see: the library's error, `doctor`, `ping`, `list`."""

from __future__ import annotations

import pytest

from . import Lab
from .faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title.replace(" ", "-"))
def test_the_true_cause_is_named(lab: Lab, fault: Fault) -> None:
    told = fault.make(lab)
    assert told.keys() == fault.words.keys()
    for who, words in fault.words.items():
        for word in words:
            assert word in told[who], f"{who} does not say {word!r}:\n{told[who]}"
