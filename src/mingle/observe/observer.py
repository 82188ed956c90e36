"""The loop of a command: it drives a finder or a pinger, without torch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mingle.config.settings import Network
from mingle.engine import driver
from mingle.engine.driver import Driver
from mingle.network.folders import storages
from mingle.network.transport import NothingOpenedError
from mingle.protocol.effects import Effect
from mingle.protocol.explain.observations import NetworkFacts
from mingle.protocol.machine import Machine
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Group
from mingle.wire.frames import ProcessInfo

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("mingle")


class Observer:
    """The sockets and the clock of one command. Use it in a ``with`` statement.

    Args:
        network: how to discover.
        job: the job whose group to join beside the browse group; None: only the browse group.
        key: signs what is sent.
        groups: the multicast groups to join in place of these two.
        folders: whether to read what is shown in the shared folders as well.
        perform: carries out the effects that the driver does not know.
        scanned: called after each scan of the interfaces, as by the driver.

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
        folders: bool = False,
        perform: Callable[[Effect], None] = driver.no_effect,
        scanned: Callable[[float, bool], None] | None = None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            try:
                self.driver = Driver(
                    network,
                    job,
                    key,
                    stack,
                    groups=groups,
                    storages=storages(network.folders if folders else (), job or ""),
                    perform=perform,
                    scanned=scanned,
                )
                self.driver.folders.watch(job)
            except NothingOpenedError as error:
                raise error.diagnosed() from None
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        self._stack.close()

    def facts(self, *, diagnosed: bool) -> NetworkFacts:
        """Return what a report says of the network.

        Args:
            diagnosed: whether to examine this machine as well, which takes a moment.
        """
        evidence = self.driver.evidence
        return evidence.facts(evidence.diagnose(evidence.observed()) if diagnosed else ())

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
