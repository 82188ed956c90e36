"""What the registrar decides, as data for somebody else to carry out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from mingle import frames
from mingle.machine import OpenStore


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this frame on that connection."""

    conn: int
    frame: frames.AnyFrame


@dataclass(frozen=True, slots=True)
class Drop:
    """Hang up, after what is still to be sent."""

    conn: int


@dataclass(frozen=True, slots=True)
class NoCommonNetwork:
    """No address of the host was reached by every member."""

    matrix: str


@dataclass(frozen=True, slots=True)
class Reopened:
    """An epoch was voided: say on the network that the session takes members again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Formed:
    """GO was decided."""

    contiguous: bool


@dataclass(frozen=True, slots=True)
class Deserted:
    """A member was lost after GO, before its process group stood: nobody else can get on without it."""

    who: frames.Who


Decision: TypeAlias = Tell | Drop | OpenStore | NoCommonNetwork | Reopened | Formed | Deserted

__all__ = [
    "Decision",
    "Deserted",
    "Drop",
    "Formed",
    "NoCommonNetwork",
    "OpenStore",
    "Reopened",
    "Tell",
]
