"""The TCPStore: opened on the address chosen at the seal, proved by every rank, handed to torch.

`StoreKeeper` does so for a machine, in threads, because every call of torch can block.

What this module assumes of torch was found by running it; where it matters the version is named. TCPStore has neither
authentication nor encryption: every process that can open TCP to its port can read and change everything in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from msgspec import Struct

from mingle import detached, forksafe, records
from mingle.detached import AbandonedError
from mingle.errors import (
    ConfigurationError,
    DiscoveryTimeoutError,
    MingleError,
    comes_from_a_signal_handler,
    lacks_descriptor,
    no_port,
    refused,
)
from mingle.network.connections import BACKLOG, bare_address, canonical_address, keep_open
from mingle.network.routes import port_range
from mingle.network.transport import socket_address
from mingle.protocol.effects import Effect, FormedStore, OpenStore, ProveStore
from mingle.protocol.events import StoreFailed, StoreOpened, StoreProved, StoreUnreachable
from mingle.text import endpoint_text

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from mingle.engine.driver import Driver
    from mingle.protocol.host import Host
    from mingle.protocol.node import Node

_Work: TypeAlias = Callable[[], Callable[[], None]]
"""Work that can block; it returns a call for the loop."""

PORT_FORBIDDEN = "a port below 1024, which only root may open, or one that a policy of the system forbids"
CONNECT_SECONDS = 2.0
CONNECT_AGAIN_SECONDS = 0.2
PROVE_SECONDS = 10.0
"""There is no point in exceeding the host's ACK timeout."""
LOOK_UP_SECONDS = 1
"""How long torch waits for each name server while it connects; the resolver's default is 10 s (resolv.conf(5))."""
OPERATION_SECONDS = 30.0
KEY_PREFIX = "mingle/"
_MOST_DESCRIPTORS = 65_536
NOTHING = "-"
"""A value that is no token."""
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})


class StoreServer(Struct):
    """Rank 0's store. Torch's ``env://`` in the same process shares it by its port (``multi_tenant``)."""

    address: str
    port: int
    session: bytes
    token: str
    """The store's value under the session's key."""
    _store: TCPStore | None = None

    @property
    def held(self) -> bool:
        """Whether this process still holds the store."""
        return self._store is not None

    @property
    def handle(self) -> TCPStore | None:
        """The store itself, while we hold it."""
        return self._store

    def stands_at(self, address: str, session: bytes) -> bool:
        """Return whether this is the store of that session, on that address."""
        return (self.address, self.session) == (address, session)

    def release(self) -> None:
        """Drop the reference to the store: it lives on while a process group uses it, and ends with the group.

        A reference kept longer leaves old keys behind and breaks the next initialization in this process.
        """
        self._store = None

    def abort(self) -> None:
        """Shut down every connection to the store, so that its users fail now and not at torch's timeout.

        The process group holds the store as well, so letting go is not enough; torch has no call for this.
        """
        self.release()
        for own in _own_sockets(socket.socket.getsockname, self.port, self.address):
            with contextlib.suppress(OSError):
                own.getpeername()  # raises for the listener, which stays
                own.shutdown(socket.SHUT_RDWR)


class StoreClient(Struct):
    """A member's connection to rank 0's store: it proves the store, and can then serve a process group."""

    address: str
    port: int
    _store: TCPStore
    proved_at: float = -math.inf
    """The time of the last successful proof."""

    def leads_to(self, address: str, port: int) -> bool:
        """Return whether this is a connection to that store."""
        return (self.address, self.port) == (address, port)

    def token(self, session: bytes) -> str:
        """Return the store's present value under a session's key, or `NOTHING`. This can block.

        By an exchange of one value for the same one, which writes nothing: that is one question and one answer, where
        torch's ``get`` asks the store to wait for the key first.

        Raises:
            OSError: the connection has ended.
        """
        with _failures_as_oserror(self.address, self.port):
            return self._store.compare_set(KEY_PREFIX + session.hex(), NOTHING, NOTHING).decode(errors="replace")

    def hand_over(self) -> TCPStore:
        """Return torch's client for a process group or a rendezvous: its connection lives for hours, mostly idle.

        All connections of this process to that store are kept open.
        """
        for own in _connections_to(self.address, self.port):
            keep_open(own)
        return self._store


def shut_down_connections(address: str, port: int) -> None:
    """Shut down this process's connections to a store, so that a torch call blocked in one fails now.

    Torch has no call for it. Otherwise an abandoned call would continue once the link is back, and take a seat for the
    agent in a rendezvous that the agent has left.
    """
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
    wanted = canonical_address(address)
    for number in _own_descriptors():
        with contextlib.suppress(OSError), _own_socket(number) as own:
            found = None if own is None else _tcp_end(own, end)
            if own is None or found is None or found[1] != port:
                continue
            if address in _EVERY_ADDRESS or found[0] == wanted:
                yield own


@contextlib.contextmanager
def _own_socket(number: int) -> Iterator[socket.socket | None]:
    """Return a socket for a descriptor, a copy if one is free; None if the descriptor is not a socket."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        yield None
        return
    try:
        copied = os.dup(number)
    except OSError as error:
        if not lacks_descriptor(error):
            raise
        original = _wrapped(number)
        try:
            yield original
        finally:
            original.detach()
        return
    try:
        copy = _wrapped(copied)
    except OSError:  # the number is another file's by now, or the socket is of a family without names, such as AF_ALG
        os.close(copied)
        raise
    with copy:
        yield copy


def _wrapped(number: int) -> socket.socket:
    """Return a socket for a descriptor, and leave the file behind it, which others use, as it is."""
    if socket.getdefaulttimeout() is None:
        return socket.socket(fileno=number)
    blocking = os.get_blocking(number)
    wrapped = socket.socket(fileno=number)  # made non-blocking, with all its copies, where there is a default timeout
    os.set_blocking(number, blocking)
    return wrapped


def _own_descriptors() -> Sequence[int]:
    """Return the numbers of this process's open files; empty where the system does not list them."""
    try:
        return [int(entry.name) for entry in Path("/dev/fd").iterdir()]  # Linux and macOS
    except OSError as error:
        # Without a free descriptor the directory cannot be opened; open files have the lowest numbers.
        return range(_MOST_DESCRIPTORS) if lacks_descriptor(error) else ()


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
    """Open the store on one address, and put the session's token into it.

    The listening socket is ours and is never released before the store is, so that no other process can take its port
    between here and torch's own use of it.

    Raises:
        ConfigurationError: the fixed port is taken.
        MingleError: the address can't be used.
    """
    from torch.distributed import TCPStore

    listener = _listen(address, port)
    bound = listener.getsockname()[1]
    forksafe.register_fd(listener.fileno())
    with _brief_look_ups():
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
    token = os.urandom(16).hex()
    store.set(KEY_PREFIX + session.hex(), token)
    return StoreServer(address, bound, session, token, store)


def check_port(port: int, addresses: list[str]) -> None:
    """Check early that the fixed port is free: otherwise the ranks would wait for a job that cannot form.

    Raises:
        ConfigurationError: it is taken.
    """
    for address in addresses:
        _listen(address, port).close()


def _listen(address: str, port: int | None) -> socket.socket:
    try:
        own = socket_address(address, port or 0)
        listener = socket.socket(socket.AF_INET6 if len(own) == 4 else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise _bind_failed(address, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(own)
        # Before any rank is told the port: a client that comes early waits in the backlog.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_failed(address, port, error) from error
    return listener


def _bind_failed(address: str, port: int | None, error: OSError) -> MingleError:
    where = address if port is None else endpoint_text(address, port)
    if port is not None and error.errno == errno.EADDRINUSE and _listens_itself(address, port):
        return ConfigurationError.explain(
            f"the store can't listen on {where}: {error.strerror}",
            cause="this process itself holds MINGLE_MASTER_PORT (master_port=): the process group of an earlier call "
            "lives on, for example in a model in DistributedDataParallel, which keeps it",
            remedy="`del` the model before the next call; or leave the port unset, then any free one is taken.",
        )
    if port is not None and error.errno == errno.EACCES:
        return ConfigurationError.explain(
            f"the store can't listen on {where}: {error.strerror}",
            cause=f"MINGLE_MASTER_PORT (master_port=) is {PORT_FORBIDDEN}",
            remedy="name a port from 1024 on; or leave the port unset, then any free one is taken.",
        )
    if port is not None and error.errno == errno.EADDRINUSE:
        return ConfigurationError.explain(
            f"the store can't listen on {where}: {error.strerror}",
            cause="another process holds MINGLE_MASTER_PORT (master_port=), perhaps an earlier run of this job",
            remedy=f"find it with `ss -tlnp 'sport = :{port}'`; or leave the port unset, then any free one is taken.",
        )
    if error.errno == errno.EADDRINUSE:
        cause, remedy = no_port(*port_range())
        return MingleError.explain(f"the store can't listen on {where}: {error.strerror}", cause=cause, remedy=remedy)
    if lacks_descriptor(error):
        return refused(f"the store can't listen on {where}", error)
    return MingleError.explain(
        f"the store can't listen on {where}: {error.strerror}",
        cause="the address has just gone from its interface",
        remedy="look at `ip address`; name a steady interface with MINGLE_INTERFACE.",
    )


def connect(address: str, port: int, workers: int | None = None) -> StoreClient:
    """Connect to a store. This can block for long: call it in a thread.

    A plain connection goes first: TCPStore's constructor blocks for a minute or more if no answer comes.

    Args:
        address: where it listens.
        port: where it listens.
        workers: counts this client among so many workers, for whom rank 0 waits if it makes its process group by
            torch's own ``env://``.

    Raises:
        OSError: it was not reached.
    """
    from torch.distributed import TCPStore

    connect_plainly(address, port).close()
    with _failures_as_oserror(address, port), _brief_look_ups():
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
def _brief_look_ups() -> Iterator[None]:
    """Have this thread ask each name server once, for a second: torch looks up the name of the host it connects to.

    Only messages of torch have that name, and a name server that does not answer would cost every connection 10 s.
    """
    # The state of glibc's resolver is one for each thread, and begins with these two numbers (resolver(3)).
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "__res_state") and hasattr(libc, "__res_init")) or libc.__res_init() != 0:
        yield
        return
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int * 2)
    numbers = libc.__res_state().contents
    before = tuple(numbers)
    numbers[0], numbers[1] = LOOK_UP_SECONDS, 1
    try:
        yield
    finally:
        numbers[0], numbers[1] = before


@contextlib.contextmanager
def _failures_as_oserror(address: str, port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # every error of torch's C++ side is one
        raise OSError(f"the store at {endpoint_text(address, port)} failed: {str(error).splitlines()[0]}") from error


def prove(address: str, port: int, session: bytes, token: str, *, workers: int | None = None) -> StoreClient:
    """Connect to the store and read the session's token there. This can block: call it in a thread.

    Args:
        address: where the store listens.
        port: where it listens.
        session: whose token it must hold.
        token: what it must hold.
        workers: as for `connect`.

    Returns:
        The connection by which it was read.

    Raises:
        OSError: it was not reached, or holds another token.
    """
    client = connect(address, port, workers)
    if client.token(session) != token:
        raise OSError(f"the store at {endpoint_text(address, port)} belongs to another session")
    client.proved_at = time.monotonic()
    return client


def await_server(address: str, port: int, *, seconds: float, given_up: Callable[[], bool]) -> None:
    """Wait until a store's port accepts connections.

    Torch's calls go on until their own timeout or longer, and nothing ends them before: where the store may be out of
    reach they are better not begun.

    Raises:
        AbandonedError: ``given_up()`` became true first.
        DiscoveryTimeoutError: the port did not within that time.
    """
    deadline = time.monotonic() + seconds
    while not given_up():
        try:
            connect_plainly(address, port).close()
        except OSError as error:
            if comes_from_a_signal_handler(error):
                raise
            if time.monotonic() >= deadline:
                raise DiscoveryTimeoutError.explain(
                    f"rank 0's store at {endpoint_text(address, port)} was not reached within {seconds:g} s: {error}",
                    cause="a firewall has closed its port since the job formed, or the link to rank 0 is down",
                    remedy="look at rank 0's output, and at whether its machine can be reached.",
                ) from error
            time.sleep(CONNECT_AGAIN_SECONDS)
        else:
            return
    raise AbandonedError


def connect_plainly(address: str, port: int) -> socket.socket:
    """Return a TCP connection to an address literal. `create_connection` would load the codec for names, 2 ms."""
    target = socket_address(address, port)
    connection = socket.socket(socket.AF_INET6 if len(target) == 4 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(target)
    except BaseException:
        connection.close()
        raise
    return connection


def _libuv_takes_descriptors() -> bool:
    """Before 2.8 torch's libuv backend can't take a listening socket that other code has opened."""
    return torch_version() >= (2, 8)


def torch_version() -> tuple[int, int]:
    """Return the major and the minor version of torch."""
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return major, minor


# --- the store as a machine wants it --------------------------------------------------------------------------------


class StoreKeeper:
    """The stores of a driver's machine: it opens and proves them in threads, because each call can block.

    Args:
        driver: drives the machine.
        call: has the loop run what follows from a result.
        port: the fixed port of the store; None: any free one.
        workers: for how many workers a rank 0 waits that makes its process group by torch's own ``env://``, if this
            member's connection serves a process group; None: it does not.
    """

    def __init__(
        self,
        driver: Driver,
        call: Callable[[Callable[[], None]], None],
        *,
        port: int | None,
        workers: int | None = None,
    ) -> None:
        self.port = port
        self.server: StoreServer | None = None
        """The store that this process hosts."""
        self.client: StoreClient | None = None
        """The connection by which a member has proved the store, if it serves a process group."""
        self._driver = driver
        self._call = call
        self._workers = workers
        self._closed = False
        self._opening = False
        self._waiting: tuple[Host, int, str] | None = None
        """The opening of a store that waits for the one in progress."""

    @property
    def _node(self) -> Node:
        return cast("Node", self._driver.machine)

    def perform(self, effect: Effect) -> None:
        """Begin to carry out an effect that concerns a store."""
        host = self._node.host
        match effect:
            case OpenStore(epoch, address):
                if host is not None:
                    self._open_in_turn(host, epoch, address)
            case ProveStore():
                self._run("store-proof", partial(self._prove, effect))
            case FormedStore():
                self.formed()
            case _:
                raise AssertionError(f"not an effect of a store: {effect}")

    # --- what another kind of store does in its own way ------------------------------------------------------------

    def open(self, address: str, session: bytes) -> StoreServer:
        """Open a store; see `open_server`. This can block."""
        return open_server(address, self.port, session)

    def prove(self, wanted: ProveStore) -> StoreClient | None:
        """Prove the store that the host named; see the function of this name. This can block."""
        return prove(wanted.address, wanted.port, wanted.session, wanted.token, workers=self._workers)

    def formed(self) -> None:
        """Process the decision for GO, before any member hears of it."""

    def _run(self, what: str, work: _Work) -> None:
        """Run what can block in a daemon thread; its result is a call for the loop."""

        def run() -> None:
            records.defer_here()
            try:
                result = work()
            except BaseException as error:
                result = partial(self._raise, error)  # the loop waits for the result and cannot go on without it
            if self._closed:
                result()  # the loop has ended: this only releases what was opened
            else:
                self._call(result)

        detached.start_explained(detached.thread(what, run))

    def _raise(self, error: BaseException) -> None:
        if not self._closed:
            raise error

    # --- on the host -----------------------------------------------------------------------------------------------

    def _open_in_turn(self, host: Host, epoch: int, address: str) -> None:
        """Open a store in a thread, one at a time; of those that wait, the last one replaces the others.

        A store that the session has on that address is there at once. A seal can be voided and come again while its
        store is still being opened: two openings at once would contend for a fixed port, and the slower one would
        replace the store whose port the ranks were told.
        """
        if self._opening:
            self._waiting = host, epoch, address
        elif self.server is not None and self.server.stands_at(address, host.session):
            self._opened(host, epoch, self.server)
        else:
            self._opening = True
            self._run("store", partial(self._open, host, epoch, address))

    def _open(self, host: Host, epoch: int, address: str) -> Callable[[], None]:
        return partial(self._opening_done, host, epoch, self._opened_server(address, host.session))

    def _opening_done(self, host: Host, epoch: int, server: StoreServer | MingleError) -> None:
        self._opening = False
        waiting, self._waiting = self._waiting, None
        self._opened(host, epoch, server)
        if waiting is not None and not self._closed:
            self._open_in_turn(*waiting)

    def _opened(self, host: Host, epoch: int, server: StoreServer | MingleError) -> None:
        """Keep an opened store if its session still exists: an election can have given it up meanwhile."""
        if self._closed or host.closed or host is not self._node.host:
            if isinstance(server, StoreServer):
                server.release()
        elif isinstance(server, StoreServer):
            self.server = server
            self._driver.tell(StoreOpened(epoch, server.port, server.token))
        else:
            self._driver.tell(StoreFailed(epoch, server))

    def _opened_server(self, address: str, session: bytes) -> StoreServer | MingleError:
        """Return a new store for a session, or why there is none."""
        if self.server is not None:
            self.server.release()  # torch knows a store by its port: on another address it would be the old one
        try:
            return self.open(address, session)
        except MingleError as error:
            return error
        except RuntimeError as error:  # every error of torch's C++ side is one
            return MingleError.explain(
                f"torch could not open its store at {address}: {error}",
                cause="torch's TCPStore refused the listening socket",
                remedy="set MINGLE_MASTER_PORT to a free port, or report this with the version of torch.",
            )

    # --- on a member -----------------------------------------------------------------------------------------------

    def _prove(self, wanted: ProveStore) -> Callable[[], None]:
        try:
            client = self.prove(wanted)
        except OSError as error:
            return partial(self._unreachable, wanted, str(error))
        return partial(self._proved, wanted, client)

    def _proved(self, wanted: ProveStore, client: StoreClient | None) -> None:
        if self._workers is not None and not self._closed and not self._node.finished:
            self.client = client
        self._driver.tell(StoreProved(wanted.session, wanted.epoch))

    def _unreachable(self, wanted: ProveStore, reason: str) -> None:
        self._driver.tell(StoreUnreachable(wanted.session, wanted.epoch, reason))

    # --- the end ---------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Cut every connection to the store that this process hosts."""
        if self.server is not None:
            self.server.abort()

    def release(self) -> None:
        """Drop the reference to the store that this process hosts."""
        if self.server is not None:
            self.server.release()
            self.server = None

    def close(self) -> None:
        """Drop a member's connection and every later result of a thread: the driver's loop has ended."""
        self._closed = True
        self.client = None
