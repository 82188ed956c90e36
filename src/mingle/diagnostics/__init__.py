"""What is wrong with a machine, judged from facts: one implementation for ``doctor`` and for the library's errors."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar

from msgspec import Struct

__all__ = ["CheckStatus", "Detour", "Finding", "worst"]


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
    explains_unreached: bool = False
    """Whether a warning can be the reason why a host that was heard can't be reached."""

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


class Detour(Struct, frozen=True):
    """The kernel sends to an address by another interface than the one that leads to it."""

    MARK: ClassVar[str] = "sent through"

    address: str
    wanted: str
    """The interface in whose subnet the address is."""
    taken: str
    """The interface whose route comes first: another one leads there, or it has no carrier."""
    carrier: bool = True
    heard: bool = False
    """Whether multicasts from the address tell which interface leads there, and not the user."""

    def __str__(self) -> str:
        why = f"and {self.address} was heard on {self.wanted}" if self.heard else f"and {self.wanted} was named"
        if not self.carrier:
            why = f"which has no carrier, and not through {self.wanted}"
        return f"the kernel sends to {self.address} through {self.taken}, {why}"

    @property
    def brief(self) -> str:
        """What this machine tells the other ones, which know the address: a report looks for the mark."""
        return f"{self.MARK} {self.taken}, not {self.wanted}"

    @property
    def remedy(self) -> str:
        """What to do about it; the last line is a command."""
        if not self.carrier:
            return f"plug in the cable of {self.taken}, or set it down:\nsudo ip link set {self.taken} down"
        command = route_through(self.wanted, self.address)
        return f"route each other node through {self.wanted}, as this one:\n{command}"


def route_through(interface: str, address: str) -> str:
    """Return the command that has this machine's connections to an address leave by an interface."""
    return f"sudo ip route add {address}/{128 if ':' in address else 32} dev {interface}"


def worst(findings: Iterable[Finding]) -> CheckStatus:
    """Return the worst status among them; PASS for none."""
    return max((finding.status for finding in findings), default=CheckStatus.PASS)
