"""The TCPStore: opened on the address chosen at the seal, proved by every rank, handed to torch.

Facts this file stands on were found by running torch; where it matters the version is named. TCPStore has neither
authentication nor encryption: whoever can open TCP to its port can read and change everything in it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mingle import forksafe
from mingle.abandonable import AbandonedError
from mingle.errors import ConfigurationError, DiscoveryTimeoutError, MingleError
from mingle.network.connections import bare_address, tune, untune

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BACKLOG = 4096
CONNECT_SECONDS = 2.0
CONNECT_AGAIN_SECONDS = 0.2
PROVE_SECONDS = 10.0
"""Longer than the host waits for the proof helps nobody, and shorter fails where reverse look-ups stall (5 s each)."""
OPERATION_SECONDS = 30.0
KEY_PREFIX = "mingle/"
_MOST_DESCRIPTORS = 65_536
NOTHING = "-"
"""No token looks like this."""
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})


class StoreServer(Struct):
    """Rank 0's store. Torch's ``env://`` in the same process shares it by its port (``multi_tenant``)."""

    address: str
    port: int
    session: bytes
    token: str
    """What the store holds under the session's key."""
    _store: TCPStore | None = None

    @property
    def held(self) -> bool:
        """Whether we still hold it."""
        return self._store is not None

    @property
    def handle(self) -> TCPStore | None:
        """The store itself, while we hold it."""
        return self._store

    def stands_at(self, address: str, session: bytes) -> bool:
        """Whether this is the store of that session, on that address."""
        return (self.address, self.session) == (address, session)

    def release(self) -> None:
        """Lets go of the store: it lives on as long as a process group uses it, and ends with that.

        A reference kept longer leaves old keys behind and breaks the next initialisation in this process.
        """
        self._store = None

    def abort(self) -> None:
        """Cuts every connection to the store, so that all who use it fail now and not at torch's timeout.

        The process group holds the store as well, so letting go is not enough; torch has no call for this.
        """
        self.release()
        for own in _own_sockets(socket.socket.getsockname, self.port, self.address):
            with contextlib.suppress(OSError):
                own.getpeername()  # raises for the listener, which stays
                own.shutdown(socket.SHUT_RDWR)


class StoreClient(Struct):
    """A connection to rank 0's store: it waits to be needed, proves the store, and may serve a process group then."""

    address: str
    port: int
    _store: TCPStore
    proved_at: float = -math.inf
    """When it was read last."""
    _tuned: bool = False

    def leads_to(self, address: str, port: int) -> bool:
        """Whether that is the store it is connected to."""
        return (self.address, self.port) == (address, port)

    def token(self, session: bytes) -> str:
        """Returns what the store holds now under a session's key, or `NOTHING`. May block.

        By an exchange of one value for the same one, which writes nothing: that is one question and one answer, where
        torch's ``get`` asks the store to wait for the key first.

        Raises:
            OSError: the connection has ended.
        """
        with _failures_as_oserror(self.address, self.port):
            return self._store.compare_set(KEY_PREFIX + session.hex(), NOTHING, NOTHING).decode(errors="replace")

    def hand_over(self) -> TCPStore:
        """Returns torch's client for a process group, its connection as torch makes it."""
        if self._tuned:
            for own in _connections_to(self.address, self.port):
                untune(own)
        return self._store

    def tune(self) -> None:
        """Has the connection notice a dead peer while it waits, and no firewall forget it."""
        for own in _connections_to(self.address, self.port):
            tune(own)
        self._tuned = True


def cut_off(address: str, port: int) -> None:
    """Shut down this process's connections to a store, so that a torch call blocked in one fails now."""
    for own in _connections_to(address, port):
        with contextlib.suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)


def _connections_to(address: str, port: int) -> Iterator[socket.socket]:
    # Torch does not show its descriptor.
    return _own_sockets(socket.socket.getpeername, port, address)


def _own_sockets(end: Callable[[socket.socket], Any], port: int, address: str) -> Iterator[socket.socket]:
    """Yield copies of this process's TCP sockets that have one end (`getsockname`, `getpeername`) at an endpoint.

    The port alone says nothing: another service of this process, or of another host, may have the same one on another
    address. Each socket is closed when the next one is asked for.

    Args:
        end: which end.
        port: its port.
        address: its address; the unspecified address matches every address.
    """
    for number in own_descriptors():
        with contextlib.suppress(OSError), own_socket(number) as own:
            found = None if own is None else _tcp_end(own, end)
            if own is None or found is None or found[1] != port:
                continue
            if address in _EVERY_ADDRESS or found[0] == bare_address(address):
                yield own


@contextlib.contextmanager
def own_socket(number: int) -> Iterator[socket.socket | None]:
    """Return a socket for a descriptor, a copy if one is free; None if the descriptor is not a socket."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        yield None
        return
    try:
        copied = os.dup(number)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        original = socket.socket(fileno=number)
        try:
            yield original
        finally:
            original.detach()
        return
    with socket.socket(fileno=copied) as copy:
        yield copy


def own_descriptors() -> Sequence[int]:
    """Return the numbers of this process's open files; empty where the system does not list them."""
    try:
        return [int(entry.name) for entry in Path("/dev/fd").iterdir()]  # Linux and macOS
    except OSError as error:
        # Without a free descriptor the directory cannot be opened; open files have the lowest numbers.
        return range(_MOST_DESCRIPTORS) if error.errno in (errno.EMFILE, errno.ENFILE) else ()


def _tcp_end(own: socket.socket, end: Callable[[socket.socket], Any]) -> tuple[str, int] | None:
    if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
        return None
    try:
        address, port = end(own)[:2]
    except OSError:  # not connected; on macOS also one that has been shut down
        return None
    return bare_address(address), port


def _listens_itself(address: str, port: int) -> bool:
    """Return whether this process listens on an endpoint, at that address or at every address."""
    places = {bare_address(address), *_EVERY_ADDRESS}
    return any(
        own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and bare_address(own.getsockname()[0]) in places
        for own in _own_sockets(socket.socket.getsockname, port, "::")
    )


def open_server(address: str, port: int | None, session: bytes) -> StoreServer:
    """Opens the store on one address and puts the session's token into it.

    The listening socket is ours and is never released before the store is, so that nobody can take its port between
    here and torch's own use of it.

    Raises:
        ConfigurationError: the fixed port is taken.
        MingleError: the address can't be used.
    """
    from torch.distributed import TCPStore

    listener = _listen(address, port)
    bound = listener.getsockname()[1]
    forksafe.register_fd(listener.fileno())
    store = TCPStore(
        address,
        bound,
        is_master=True,
        timeout=timedelta(seconds=OPERATION_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # torch's from here on, also when this fails
        use_libuv=_libuv_takes_descriptors(),
    )
    token = secrets.token_hex(16)
    store.set(KEY_PREFIX + session.hex(), token)
    return StoreServer(address, bound, session, token, store)


def check_port(port: int, addresses: list[str]) -> None:
    """Looks early whether the fixed port is free, so that nobody waits for a job that can't be.

    Raises:
        ConfigurationError: it is taken.
    """
    for address in addresses:
        _listen(address, port).close()


def _listen(address: str, port: int | None) -> socket.socket:
    literal, _, zone = address.partition("%")
    family = socket.AF_INET6 if ":" in literal else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _bind_failed(address, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            scope = socket.if_nametoindex(zone) if zone else 0
            listener.bind((literal, port or 0, 0, scope))
        else:
            listener.bind((literal, port or 0))
        # Before anybody is told the port: a client that comes early waits in the backlog.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_failed(address, port, error) from error
    return listener


def _bind_failed(address: str, port: int | None, error: OSError) -> MingleError:
    where = f"[{address}]" if ":" in address else address
    if port is not None and error.errno == errno.EADDRINUSE and _listens_itself(address, port):
        return ConfigurationError.explain(
            f"the store can't listen on {where}:{port}: {error.strerror}",
            cause="this process itself holds MINGLE_MASTER_PORT (master_port=): the process group of an earlier call "
            "lives on, for example in a model in DistributedDataParallel, which keeps it",
            remedy="`del` the model before the next call; or leave the port unset, then any free one is taken.",
        )
    if port is not None and error.errno in (errno.EADDRINUSE, errno.EACCES):
        return ConfigurationError.explain(
            f"the store can't listen on {where}:{port}: {error.strerror}",
            cause="another process holds MINGLE_MASTER_PORT (master_port=), perhaps an earlier run of this job",
            remedy=f"find it with `ss -tlnp 'sport = :{port}'`; or leave the port unset, then any free one is taken.",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return MingleError.explain(
            f"the store can't listen on {where}: {error.strerror}",
            cause="this process, or the whole system, has no file descriptor left",
            remedy="look at `ulimit -n` and at what the process holds in /proc/PID/fd.",
        )
    return MingleError.explain(
        f"the store can't listen on {where}: {error.strerror}",
        cause="the address has just gone from its interface",
        remedy="look at `ip address`; name a steady interface with MINGLE_INTERFACE.",
    )


def connect(address: str, port: int, workers: int | None = None) -> StoreClient:
    """Connects to a store. May block for long: call it in a thread.

    A plain connection goes first: TCPStore's constructor blocks for a minute or more where nobody answers.

    Args:
        address: where it listens.
        port: where it listens.
        workers: counts this client among so many workers, for whom rank 0 waits if it makes its process group by
            torch's own ``env://``.

    Raises:
        OSError: it was not reached.
    """
    from torch.distributed import TCPStore

    _connect(address, port).close()
    with _failures_as_oserror(address, port):
        # Its bytes on the wire are torch's own business: only a client of torch's proves that one will be served.
        store = TCPStore(
            address,
            port,
            is_master=False,
            timeout=timedelta(seconds=PROVE_SECONDS),
            world_size=workers,
            wait_for_workers=workers is not None,  # only a store's own process waits; a client is counted
        )
    return StoreClient(address, port, store)


@contextlib.contextmanager
def _failures_as_oserror(address: str, port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # every error of torch's C++ side is one
        raise OSError(f"the store at {address}:{port} failed: {str(error).splitlines()[0]}") from error


def prove(
    address: str,
    port: int,
    session: bytes,
    token: str,
    *,
    ahead: StoreClient | None = None,
    workers: int | None = None,
) -> StoreClient:
    """Reads the session's token in the store, by ``ahead`` if that leads there. May block: call it in a thread.

    Args:
        address: where the store listens.
        port: where it listens.
        session: whose token it must hold.
        token: what it must hold.
        ahead: a connection that is there already.
        workers: as for `connect`, if a connection is to be made.

    Returns:
        The connection by which it was read.

    Raises:
        OSError: it was not reached, or holds another token.
    """
    found, client = None, ahead
    if client is not None and client.leads_to(address, port):
        with contextlib.suppress(OSError):  # broken while it waited: a new one tells more
            found = client.token(session)
    if client is None or found is None:
        client = connect(address, port, workers)
        found = client.token(session)
    if found != token:
        raise OSError(f"the store at {address}:{port} belongs to another session")
    client.proved_at = time.monotonic()
    return client


def await_server(address: str, port: int, *, seconds: float, given_up: Callable[[], bool]) -> None:
    """Waits until somebody takes connections at a store's port.

    Torch's calls go on until their own timeout or longer, and nothing ends them before: where the store may be out of
    reach they are better not begun.

    Raises:
        AbandonedError: ``given_up()`` became true first.
        DiscoveryTimeoutError: nobody did within that time.
    """
    deadline = time.monotonic() + seconds
    while not given_up():
        try:
            _connect(address, port).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise DiscoveryTimeoutError.explain(
                    f"rank 0's store at {address}:{port} was not reached within {seconds:g} s: {error}",
                    cause="a firewall has closed its port since the job formed, or the link to rank 0 is down",
                    remedy="look at rank 0's output, and at whether its machine can be reached.",
                ) from error
            time.sleep(CONNECT_AGAIN_SECONDS)
        else:
            return
    raise AbandonedError


def _connect(address: str, port: int) -> socket.socket:
    """Returns a connection to an address literal. Not by create_connection: that loads the codec for names, 2 ms."""
    literal, _, zone = address.partition("%")
    family = socket.AF_INET6 if ":" in literal else socket.AF_INET
    target = (literal, port, 0, socket.if_nametoindex(zone) if zone else 0)
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(target if family == socket.AF_INET6 else target[:2])
    except BaseException:
        connection.close()
        raise
    return connection


def _libuv_takes_descriptors() -> bool:
    """Before 2.8 torch's libuv backend can't take a listening socket that somebody else has opened."""
    return torch_version() >= (2, 8)


def torch_version() -> tuple[int, int]:
    """Returns the major and the minor version of torch."""
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return major, minor
