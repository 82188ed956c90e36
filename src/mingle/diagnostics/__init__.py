"""What is wrong with a machine, judged from facts: one implementation for ``doctor`` and for the library's errors."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

__all__ = ["CheckStatus", "Finding", "worst"]


class CheckStatus(IntEnum):
    """The result of a check; a higher one is worse."""

    PASS = 0
    WARN = 1
    """It can be intended, and it can explain a failure."""
    FAIL = 2
    """It keeps ranks from finding each other."""


class Finding(Struct, frozen=True):
    """The result of one check."""

    name: str
    """The check, or the other host it is about."""
    status: CheckStatus
    observation: str
    remedy: str = ""
    """What to do; empty if nothing is wrong. Each line after the first is a command to paste, and nothing else."""
    explains_silence: bool = False
    """Whether a warning can be the reason why no other host is heard; other warnings are only reported."""
    keeps_to_itself: bool = False
    """Whether all that this host hears comes from itself, so that what it hears explains nothing."""

    def __str__(self) -> str:
        return f"{self.observation}; {self.fix_in_one_line}" if self.remedy else self.observation

    @property
    def fix(self) -> str:
        """The remedy as an error shows it: no period stands behind a command."""
        return self.remedy if "\n" in self.remedy else f"{self.remedy}."

    @property
    def fix_in_one_line(self) -> str:
        """The remedy for a table, or a line of a log, with its commands as a shell takes them."""
        words, *commands = self.remedy.split("\n")
        return f"{words} {'; '.join(commands)}" if commands else words


def worst(findings: Iterable[Finding]) -> CheckStatus:
    """Return the worst status among them; PASS for none."""
    return max((finding.status for finding in findings), default=CheckStatus.PASS)
