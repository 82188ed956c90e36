"""A driver of a machine that only notes what it is told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from ipaddress import ip_interface
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from mingle.config.settings import Network
from mingle.engine.driver import Driver
from mingle.network import interfaces
from mingle.network.folders import storages
from mingle.protocol.effects import Effect
from mingle.protocol.events import Event, Heard, Source, TimerDue
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Datagram, Offer, Seek
from tests.support.ports import free_udp_port

MEMBER, SESSION = b"m" * 16, b"s" * 16
SEEK = Seek(job="a job", member=MEMBER, world_size=2)


class Notes:
    """A machine without rules."""

    def __init__(self) -> None:
        self.to_do: list[Effect] = []
        self.told: list[Event] = []
        self.due: float | None = None
        self.says: Datagram | None = None
        self.shows: Seek | Offer | None = None
        self.instead: dict[type[Event], Callable[[], object]] = {}
        """What it does when it is told of events of a kind."""

    def handle(self, event: Event, now: float) -> None:
        self.instead.get(type(event), lambda: None)()
        if isinstance(event, TimerDue):
            self.due = None
        self.told.append(event)

    def effects(self) -> list[Effect]:
        done, self.to_do = self.to_do, []
        return done

    def next_timer(self) -> float | None:
        return self.due

    def calling(self) -> Datagram | None:
        return self.says

    def showing(self) -> Seek | Offer | None:
        return self.shows

    links = range(1000)

    def heard(self) -> list[Datagram]:
        """The datagrams that it was told of."""
        return [event.message for event in self.told if isinstance(event, Heard)]


E = TypeVar("E", bound=Event)


class Noting(Driver):
    """A driver of that machine."""

    def __init__(
        self, network: Network, stack: contextlib.ExitStack, job: str = "a job", key: JobKey | None = None
    ) -> None:
        super().__init__(network, job, key, stack, storages=storages(network.folders, job))
        self.notes = Notes()
        self.drive(self.notes, verifies=True)

    def turn_until(self, kind: type[E]) -> E:
        """Turns until the machine was told of an event of this kind."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for told in self.notes.told:
                if isinstance(told, kind):
                    return told
            self.notes.due = self.notes.due or time.monotonic() + 0.2  # no turn lasts longer
            self.carry_out()
            self.turn()
        raise AssertionError(f"never told of {kind.__name__}: {self.notes.told}")

    def turn_until_dropped(self, number: int) -> None:
        """Turns until so much input was dropped because it could not be handled."""
        deadline = time.monotonic() + 30
        while self.rejections.counts["fault"] < number:
            assert time.monotonic() < deadline, "nothing was dropped"
            self.notes.due = time.monotonic() + 0.1  # no turn lasts longer
            self.carry_out()
            self.turn()

    def hear(self) -> tuple[Any, Source]:
        """Turns until the machine has heard a datagram."""
        heard = self.turn_until(Heard)
        return heard.message, heard.source


def let_lo_have(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Have each scan of the interfaces find lo alone, with this address alone."""
    (lo,) = (each for each in interfaces.scan() if each.name == "lo")
    moved = msgspec.structs.replace(lo, addresses=(ip_interface(f"{address}/8"),))
    monkeypatch.setattr(interfaces, "scan", lambda: (moved,))


def folder_driver(stack: contextlib.ExitStack, folder: Path, key: JobKey | None = None) -> Noting:
    """Return a driver that has one shared folder."""
    network = Network(interfaces=("lo",), port=free_udp_port(), folders=(f"dir:{folder}",))
    return Noting(network, stack, key=key)


def fail(*_: object, **__: object) -> Any:
    """Raise what nobody foresees."""
    raise ZeroDivisionError("a riddle")
