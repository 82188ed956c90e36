"""What the registrar decides, as data for somebody else to carry out."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from mingle.protocol.machine import OpenStore, PrepareStore
from mingle.wire import frames


class Tell(Struct, frozen=True):
    """Send this frame on that connection."""

    conn: int
    frame: frames.AnyFrame


class Drop(Struct, frozen=True):
    """Hang up, after what is still to be sent."""

    conn: int


class NoCommonNetwork(Struct, frozen=True):
    """No address of the host was reached by every member."""

    matrix: str


class Reopened(Struct, frozen=True):
    """An epoch was voided: say on the network that the session takes members again."""

    reason: str


class Formed(Struct, frozen=True):
    """GO was decided."""

    contiguous: bool


class Deserted(Struct, frozen=True):
    """A member was lost after GO, before its process group stood: nobody else can get on without it."""

    who: frames.ProcessInfo


Decision: TypeAlias = Tell | Drop | PrepareStore | OpenStore | NoCommonNetwork | Reopened | Formed | Deserted

__all__ = [
    "Decision",
    "Deserted",
    "Drop",
    "Formed",
    "NoCommonNetwork",
    "OpenStore",
    "PrepareStore",
    "Reopened",
    "Tell",
]
