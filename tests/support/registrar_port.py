"""A registrar in tests, and its port, which writes down what it is called with."""

from __future__ import annotations

from typing import Any, TypeVar

from mingle.protocol.session.admission import Admission
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.network_choice import GiveWay, MeshBroken, NothingShared
from mingle.protocol.session.phases import State
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames

Frame = TypeVar("Frame")
SESSION, HOST = b"S" * 16, b"H" * 16


class RecordingPort:
    """Remembers each call by name, in order, until :meth:`take` hands them out."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def send(self, conn: int, frame: frames.AnyFrame) -> None:
        self.calls.append(("send", conn, frame))

    def ping(self, conn: int, now: float) -> None:
        self.send(conn, frames.Ping())

    def hang_up(self, conn: int) -> None:
        self.calls.append(("hang_up", conn))

    def open_store(self, epoch: int, address: str, now: float) -> None:
        self.calls.append(("open_store", epoch, address))

    def prove_mesh(self, epoch: int, proof: Proof, now: float) -> None:
        self.calls.append(("prove_mesh", epoch, proof))

    def end_without_network(self, end: NothingShared | MeshBroken | GiveWay) -> None:
        self.calls.append(("end_without_network", end))

    def notice(self, text: str, *, warns: bool = True) -> None:
        self.calls.append(("notice", text))

    def reopened(self, reason: str, now: float) -> None:
        self.calls.append(("reopened", reason))

    def formed(self) -> None:
        self.calls.append(("formed",))

    def member_lost(self, who: frames.ProcessInfo, how: str) -> None:
        self.calls.append(("member_lost", who, how))

    def take(self) -> list[tuple[Any, ...]]:
        """Return the calls since the last time."""
        taken, self.calls = self.calls, []
        return taken


def told(calls: list[tuple[Any, ...]], conn: int, kind: type[Frame]) -> list[Frame]:
    """Return the frames of one kind that were sent on a connection."""
    return [call[2] for call in calls if call[:2] == ("send", conn) and isinstance(call[2], kind)]


def of(calls: list[tuple[Any, ...]], name: str) -> list[tuple[Any, ...]]:
    """Return the calls of one name."""
    return [call for call in calls if call[0] == name]


class Recorded(Registrar):
    """A registrar with such a port."""

    def __init__(self, host: HostSeat, admission: Admission, **settings: Any) -> None:
        self.port = RecordingPort()
        super().__init__(SESSION, host, self.port, self.port, admission, **settings)

    @property
    def phase(self) -> type[State]:
        """The state, read anew each time: a type checker takes an attribute for unchanged."""
        return type(self.state)

    def said(self, conn: int, kind: type[Frame]) -> list[Frame]:
        """Return the frames of one kind that were sent on a connection, and forget all calls until now."""
        return told(self.port.take(), conn, kind)
