"""What a check found: the record that ``mingle-discover doctor`` prints and that the library's errors quote."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct


class Status(IntEnum):
    """How a check ended; the higher, the worse."""

    PASS = 0
    WARN = 1
    """It may be meant so, and may explain what does not work."""
    FAIL = 2
    """It keeps ranks from finding each other."""


class Finding(Struct, frozen=True):
    """One check's result."""

    name: str
    """The check, or the other host it is about."""
    status: Status
    observation: str
    remedy: str = ""
    """A line to type, or a setting; empty where nothing is wrong."""
    explains_silence: bool = False
    """Whether a warning can be the reason why no other host is heard; other warnings are only reported."""

    def __str__(self) -> str:
        return f"{self.observation}; {self.remedy}" if self.remedy else self.observation


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the worst status among them."""
    return max((finding.status for finding in findings), default=Status.PASS)
