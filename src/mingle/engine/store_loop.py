"""What the loops of ranks and agents share beyond sockets: wrongly signed datagrams, a thread for what may block."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from mingle.config import values
from mingle.config.settings import Settings
from mingle.engine import file_limit, progress, store
from mingle.engine.loop import Loop, Machine
from mingle.engine.spare_thread import SpareThread
from mingle.errors import MingleError
from mingle.protocol.machine import Address, Context, Endpoints
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey

logger = logging.getLogger("mingle")

LOOKED_AT_UNVERIFIED = 256
"""How many wrongly signed datagrams are parsed for the report; bounded against a flood of them."""


class JobMachine(Machine, Protocol):
    """A machine of one job."""

    def stage(self) -> str:
        """How far it has come, for the log."""

    def heard_unverified(self, message: datagrams.Datagram, /) -> None:
        """A datagram came in whose signature is missing or wrong."""


class StoreLoop(Loop):
    """A loop whose machine forms one job, and whose host opens a store."""

    _machine: JobMachine
    settings: Settings
    store_server: store.StoreServer | None = None
    _closed: bool = False
    _opening: bool = False
    _open_next: tuple[Callable[[], Callable[[], None]], tuple[str, bytes]] | None = None
    """The opening of a store that waits for the one at work."""

    def __init__(self, settings: Settings, stack: contextlib.ExitStack) -> None:
        self.settings = settings
        self._stage = ""
        self._spare_thread = SpareThread()
        stack.callback(self._spare_thread.end)
        for remark in values.secret_remarks(settings.secret):
            progress.say(logging.WARNING, remark, quiet=settings.progress == "off")
        key = JobKey(settings.secret, settings.job_id) if settings.secret is not None else None
        super().__init__(settings, settings.job_id, key, stack)

    def _carry_out(self) -> None:
        stage = self._machine.stage()
        if stage != self._stage:
            self._stage = stage
            logger.debug("job %s: %s", self.settings.job_id, stage)
        super()._carry_out()

    def _context(self) -> Context:
        """What the machine works with."""
        return Context(
            key=self._key,
            new_id=self.new_id,
            rng=self.rng,
            timeout=self.settings.discovery_timeout,
            free_files=file_limit.free_files,
            unsent=self._connections.unsent,
        )

    def _listen(self) -> Endpoints:
        """Opens the control port and returns where it listens."""
        settings = self.settings
        return Endpoints(
            addresses=self._ready(self._connections.listen),
            port=self._connections.port,
            advertised=(settings.advertise,) if settings.advertise else (),
            named=bool(settings.interfaces),
        )

    def _listen_also(self) -> tuple[Address, ...]:
        """Opens it on addresses that have come since, and returns those at which it listens now."""
        return self._ready(self._connections.listen_also)

    def _ready(self, listen: Callable[[Sequence[tuple[str, int]]], frozenset[tuple[str, int]]]) -> tuple[Address, ...]:
        wanted = self.listening_addresses
        ready = listen([(each.address, each.index) for each in wanted])
        return tuple(each for each in wanted if (each.address, each.index) in ready)

    def _decode(self, untrusted: bytes) -> datagrams.Datagram | None:
        try:
            return datagrams.decode(untrusted, self._key)
        except datagrams.Rejected as rejected:
            self._rejected[rejected.reason] += 1
            return self._look_unverified(untrusted) if rejected.reason in ("unsigned", "signature") else None

    def _look_unverified(self, untrusted: bytes) -> datagrams.Datagram | None:
        """Looks, for the report alone, whether a datagram with a wrong signature speaks of our job.

        A question to the lobby is answered whoever asks: the answer tells what everybody on the network hears anyway.
        """
        if self._rejected["unsigned"] + self._rejected["signature"] > LOOKED_AT_UNVERIFIED:
            return None
        try:
            message = datagrams.decode(untrusted)
        except datagrams.Rejected:
            return None
        if isinstance(message, datagrams.List):
            return message
        self._machine.heard_unverified(message)
        return None

    def _in_thread(self, what: str, work: Callable[[], Callable[[], None]]) -> None:
        """Runs what may block in a daemon thread that may be abandoned; its result is a call for the loop."""

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                result = partial(self._raise, error)  # whatever it is, the loop that waits for it can't go on
            if self._closed:
                result()  # nobody turns the loop any more: it only lets go of what it got
            else:
                self.call(result)

        self._spare_thread.run(f"mingle-abandoned-{what}", run)

    def _raise(self, error: BaseException) -> None:
        if not self._closed:
            raise error

    def _open_in_turn(self, opening: Callable[[], Callable[[], None]], place: tuple[str, bytes]) -> None:
        """Opens a store in a thread, one at a time; of those that wait the last counts.

        One that stands at that place (an address, for a session) already is there at once.

        A seal may be called off and come again while its store is still being opened. Two openings at once would
        contend for a fixed port, and the slower one would replace the store whose port the ranks were told.
        """
        if self._opening:
            self._open_next = opening, place
            return
        if self.store_server is not None and self.store_server.stands_at(*place):
            opening()()
            return
        self._opening = True
        self._in_thread("store", lambda: partial(self._opening_done, opening()))

    def _opening_done(self, result: Callable[[], None]) -> None:
        self._opening = False
        waiting, self._open_next = self._open_next, None
        result()
        if waiting is not None and not self._closed:
            self._open_in_turn(*waiting)

    def _server(self, address: str, port: int | None, session: bytes) -> store.StoreServer | MingleError:
        """Returns the store for a session, the one that stands or a new one, or why there is none."""
        server = self.store_server
        try:
            if server is None or not server.stands_at(address, session):
                if server is not None:
                    server.release()  # torch knows a store by its port: on another address it would be the old one
                server = store.open_server(address, port, session)
        except MingleError as error:
            return error
        except RuntimeError as error:  # every error of torch's C++ side is one
            return MingleError.explain(
                f"torch could not open its store at {address}: {error}",
                cause="torch's TCPStore refused the listening socket",
                remedy="set MINGLE_MASTER_PORT to a free port, or report this with the version of torch.",
            )
        return server

    def _release_store(self) -> None:
        """Lets go of the store, if there is one."""
        if self.store_server is not None:
            self.store_server.release()
            self.store_server = None
