"""The ports of the program: kept free until all machines are there, and released before any program starts.

The program binds ``MASTER_PORT`` itself, so nothing can hold the port for it. Until GO, a listening socket takes the
place of the store: each machine connects to it, which proves that the address and the port are in reach.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from mingle import detached
from mingle.engine.store import PORT_FORBIDDEN, StoreKeeper, StoreServer, connect_plainly
from mingle.errors import ConfigurationError, MingleError
from mingle.network.connections import BACKLOG
from mingle.network.inspection import holders
from mingle.protocol.effects import ProveStore

CALLER_SECONDS = 0.5
"""How long a machine has to close its connection to the port; it does so at once."""
END_SECONDS = 1.0
"""How long to wait for the end of the thread that accepts."""
_PREFERRED = range(20_000, 32_768)
_TRIES = 32
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Reservation(StoreServer):
    """A listening socket on the port of the program, in the place of a store."""

    listener: socket.socket | None = None
    thread: threading.Thread | None = None

    def accept_all(self) -> None:
        """Accept connections in a thread: the kernel's queue can be shorter than a job has machines.

        Before Linux 5.4 it has 128 places by default (net.core.somaxconn), and a caller beyond them is not answered.
        """
        self.thread = threading.Thread(target=_accept_all, args=(self.listener,), name="mingle-port", daemon=True)
        detached.start(self.thread)

    @property
    def held(self) -> bool:
        """Whether the port is held."""
        return self.listener is not None

    def release(self) -> None:
        """Let go of the port."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)  # ends the wait in accept()
            if self.thread is not None:
                self.thread.join(END_SECONDS)
            self.listener.close()
            self.listener = None

    abort = release


class PortKeeper(StoreKeeper):
    """Holds the port until GO, and reaches the port of another machine."""

    def open(self, address: str, session: bytes) -> StoreServer:
        """Hold the fixed port, else any free one."""
        listener = reserve(self.port)
        reservation = Reservation(address, listener.getsockname()[1], session, "", listener=listener)
        reservation.accept_all()
        return reservation

    def prove(self, wanted: ProveStore) -> None:
        """Connect to the port that node 0 holds."""
        connect_plainly(wanted.address, wanted.port).close()

    def formed(self) -> None:
        """Let go of the port before a program of another machine can look for it."""
        self.release()


def _accept_all(listener: socket.socket) -> None:
    """Accept connections until the listener is shut down.

    Each caller hangs up first, or is reset: an orderly close here would leave the port in TIME_WAIT, and a program that
    does not set SO_REUSEADDR could not bind it for a minute.
    """
    with contextlib.suppress(OSError):
        while True:
            with contextlib.suppress(ConnectionError, TimeoutError), listener.accept()[0] as caller:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                caller.settimeout(CALLER_SECONDS)
                caller.recv(1)


def reserve(port: int | None) -> socket.socket:
    """Return a socket that listens at a port on all addresses.

    Args:
        port: the port; None: a free one. It is none that the kernel gives to outgoing connections, since such a
            connection could take it before the program binds it.

    Raises:
        ConfigurationError: the fixed port is taken or forbidden.
        MingleError: no port is free.
    """
    if port is not None:
        try:
            return _listen(port)
        except OSError as error:
            if error.errno == errno.EACCES:
                raise ConfigurationError.explain(
                    f"the program can't listen on port {port} (MASTER_PORT) of this machine: {error.strerror}.",
                    cause=PORT_FORBIDDEN,
                    remedy="name a port from 1024 on with --master-port.",
                ) from error
            raise taken(port, error.strerror or str(error)) from error
    return _first_free(_listen)


def hold(*, but: int | None) -> socket.socket:
    """Return a socket that keeps a free port for the program of this machine, until the socket is closed.

    It does not listen. A program of another machine that starts earlier is refused there, and tries again; the kernel
    would accept its connection to a listening socket, and reset it later.

    Args:
        but: a port that is not meant, because node 0 needs it.

    Raises:
        MingleError: no port is free.
    """
    return _first_free(lambda candidate: _bind(candidate, reuse=False), but=but)


def _first_free(open_at: Callable[[int], socket.socket], *, but: int | None = None) -> socket.socket:
    for candidate in [*random.sample(_outside_ephemeral(), _TRIES), 0]:
        if candidate == but:
            continue
        try:
            return open_at(candidate)
        except OSError as error:
            last = error
    raise MingleError.explain(
        f"no TCP port can be opened for the program: {last.strerror}.",
        cause="the system refused a socket",
        remedy="look at this machine's limits and at what listens there (`ss -tln`).",
    ) from last


def is_taken(port: int) -> bool:
    """Return whether a process listens at a port."""
    try:
        _listen(port).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def taken(port: int, why: str) -> ConfigurationError:
    """Return the error for a port that the program can't bind."""
    found = ", ".join(str(holder) for holder in holders(port, "tcp"))
    return ConfigurationError.explain(
        f"the program can't listen on port {port} (MASTER_PORT) of this machine: {why}{f'; {found}' if found else ''}.",
        cause="another program holds it, perhaps an earlier run of this one",
        remedy=f"end that program (`ss -tlnp 'sport = :{port}'` shows it), or name another port with --master-port.",
    )


def _listen(port: int) -> socket.socket:
    """Listen on all addresses.

    A program that has just ended leaves connections in TIME_WAIT, which must not count: hence SO_REUSEADDR.
    """
    listener = _bind(port, reuse=True)
    try:
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _bind(port: int, *, reuse: bool) -> socket.socket:
    """Bind to all addresses of both families, where the system has IPv6.

    Without SO_REUSEADDR no other socket can be bound to the port, whatever its options.
    """
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        place: tuple[str, int] = ("::", port)
    except OSError:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        place = ("0.0.0.0", port)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(place)
    except OSError:
        listener.close()
        raise
    return listener


def _outside_ephemeral() -> list[int]:
    try:
        low, high = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        low, high = 32_768, 65_535
    outside = [port for port in _PREFERRED if not low <= port <= high]
    return outside if len(outside) >= _TRIES else list(_PREFERRED)
