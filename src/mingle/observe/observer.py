"""The loop of a command: it drives a finder, an announcement or a pinger, without torch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from mingle.config.settings import Network
from mingle.engine import driver
from mingle.engine.driver import Driver
from mingle.protocol.machine import Address, Effect, Machine
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Group
from mingle.wire.frames import ProcessInfo

if TYPE_CHECKING:
    from typing_extensions import Self

    from mingle.observe.announcement import Announcement

logger = logging.getLogger("mingle")


class Observer:
    """The sockets and the clock of one command. Use it in a ``with`` statement.

    Args:
        network: how to discover.
        job: the job whose group to join beside the browse group; None: only the browse group.
        key: signs what is sent.
        groups: the multicast groups to join in place of these two.
        perform: carries out the effects that the driver does not know.
        scanned: called after each scan of the interfaces, as by the driver; None: what `listen` has opened is extended.

    Raises:
        InterfaceError: no interface can be used.
        MingleError: no file descriptor is free.
    """

    def __init__(
        self,
        network: Network,
        job: str | None = None,
        key: JobKey | None = None,
        *,
        groups: Sequence[Group] = (),
        perform: Callable[[Effect], None] = driver.no_effect,
        scanned: Callable[[float, bool], None] | None = None,
    ) -> None:
        self._listens = False
        scanned = scanned or self._scanned
        with contextlib.ExitStack() as stack:
            self.driver = Driver(network, job, key, stack, groups=groups, perform=perform, scanned=scanned)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        self._stack.close()

    def listen(self) -> tuple[tuple[str, ...], int]:
        """Open a control port on every own address; return the addresses to announce and the port.

        The machine announces addresses that this host gets later as well, by its method ``readdress``.

        Raises:
            InterfaceError: no address can be bound.
        """
        endpoints = self.driver.listen()
        self._listens = True
        return self._announced(endpoints.addresses), endpoints.port

    def readdress(self, addresses: tuple[Address, ...], now: float) -> None:
        """Have the machine announce these addresses, on which the control port listens now."""
        cast("Announcement", self.driver.machine).readdress(self._announced(addresses), now)

    def _scanned(self, now: float, _changed: bool) -> None:
        if self._listens:
            self.driver.relisten(self, now)

    def _announced(self, addresses: tuple[Address, ...]) -> tuple[str, ...]:
        advertised = (self.driver.network.advertise,) if self.driver.network.advertise else ()
        return (*advertised, *(each.address for each in addresses))[: datagrams.MAX_ADDRESSES]

    def run(
        self,
        machine: Machine,
        *,
        until: float | None,
        done: Callable[[], bool] = lambda: False,
        every: float | None = None,
    ) -> None:
        """Drive a machine until it is done or the deadline has passed, and close it in any case.

        Args:
            machine: what to drive.
            until: a time of ``time.monotonic()``; None: no deadline.
            done: checked before each turn.
            every: the longest time between two checks, in seconds; None: as long as nothing happens.

        Raises:
            MingleError: an unforeseen exception ended the loop; its ``__cause__`` is that exception.
        """
        self.driver.drive(machine)
        names = ", ".join(each.name for each in self.driver.interfaces.usable)
        logger.info("listening on %s, UDP port %d", names, self.driver.network.port)
        reason = "interrupted"
        try:
            with self.driver.failures_explained():
                self.driver.carry_out()
            while not done() and (until is None or time.monotonic() < until):
                times = [until, None if every is None else time.monotonic() + every]
                with self.driver.failures_explained():
                    self.driver.turn(min((each for each in times if each is not None), default=None))
            reason = "done"
        finally:
            self.driver.part(partial(machine.close, reason))


def this_process() -> ProcessInfo:
    """Return the name of this process for others."""
    return ProcessInfo(hostname=datagrams.truncate_utf8(socket.gethostname()), pid=os.getpid())


def new_name() -> bytes:
    """Return sixteen random bytes, for a session or a member."""
    return secrets.token_bytes(16)
