"""The loop of those who are no rank: it drives a finder or an announcement, without torch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from mingle.config.settings import Network
from mingle.engine import loop
from mingle.engine.loop import Loop
from mingle.protocol.machine import Effect
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Datagram
from mingle.wire.frames import ProcessInfo

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("mingle")


class Machine(loop.Machine, Protocol):
    """What an observer's machine is beside that: a ``Finder`` or an ``Announcement``."""

    def accepted(self, conn: int, address: str, now: float, /) -> None:
        """Somebody has connected."""

    def disconnected(self, conn: int, reason: str, now: float, /) -> None:
        """A connection ended."""

    def close(self, reason: str, /) -> None:
        """Ends everything."""


class Observer(Loop):
    """The sockets and the clock of one command. Use it in a ``with`` statement.

    Args:
        network: how to discover.
        job: the job whose group is listened to beside the lobby; None: only the lobby is.
        key: signs what is sent.

    Raises:
        InterfaceError: no interface can be used.
    """

    _machine: Machine

    def __init__(self, network: Network, job: str | None = None, key: JobKey | None = None) -> None:
        self._until: float | None = None
        with contextlib.ExitStack() as stack:
            super().__init__(network, job, key, stack)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def listen(self) -> tuple[tuple[str, ...], int]:
        """Opens a control port on every own address; returns what to announce and the port.

        Raises:
            InterfaceError: none can be bound.
        """
        own = self.listening_addresses
        ready = self._connections.listen([(each.address, each.index) for each in own])
        advertised = () if self.network.advertise is None else (self.network.advertise,)
        listening = [each.address for each in own if (each.address, each.index) in ready]
        return (*advertised, *listening)[: datagrams.MAX_ADDRESSES], self._connections.port

    def run(self, machine: Machine, *, until: float | None, done: Callable[[], bool] = lambda: False) -> None:
        """Drives a machine until it is done or the time has come, and closes it in any case.

        Args:
            machine: what to drive.
            until: a time of ``time.monotonic()``; None: for ever.
            done: checked after each turn.

        Raises:
            MingleError: an unforeseen exception ended the loop; its ``__cause__`` is that exception.
        """
        self._machine, self._until = machine, until
        names = ", ".join(each.name for each in self._nics.usable)
        logger.info("listening on %s, UDP port %d", names, self.network.port)
        reason = "interrupted"
        try:
            with self._failures_explained():
                self._carry_out()
            while not done() and (until is None or time.monotonic() < until):
                with self._failures_explained():
                    self._turn()
            reason = "done"
        finally:
            self._part(partial(machine.close, reason))

    def _more_timers(self) -> Iterable[float | None]:
        return (self._until,)

    def _decode(self, untrusted: bytes) -> Datagram | None:
        try:
            # Without the key on purpose: a signature decides nothing here, and who lacks one shall be named.
            return datagrams.decode(untrusted)
        except datagrams.Rejected as rejected:
            self._rejected[rejected.reason] += 1
            return None

    def _verified(self, untrusted: bytes, offer: datagrams.Offer) -> bool:
        secret = self.network.secret
        if secret is None:
            return False
        try:
            datagrams.decode(untrusted, JobKey(secret, offer.job))
        except datagrams.Rejected:
            return False
        return True

    def _accepted(self, conn: int, address: str, now: float) -> None:
        self._machine.accepted(conn, address, now)

    def _ended(self, conn: int, reason: str, now: float) -> None:
        self._machine.disconnected(conn, reason, now)

    def _perform_more(self, effect: Effect) -> None:
        raise AssertionError(f"a machine that is no rank opens no store: {effect}")


def this_process() -> ProcessInfo:
    """Returns how this process is named to others."""
    return ProcessInfo(hostname=datagrams.clip(socket.gethostname()), pid=os.getpid())


def new_name() -> bytes:
    """Returns sixteen random bytes, for a session or a member."""
    return secrets.token_bytes(16)
