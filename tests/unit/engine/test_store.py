"""Rank 0's store, on `lo`: opened, proved, shared with torch, let go of, cut off."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from subprocess import PIPE
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import tests.support.in_process  # noqa: F401 - torch, so that it costs each test as little as it can
from mingle.detached import AbandonedError
from mingle.engine import store
from mingle.engine.store import StoreServer, await_server, check_port, connect, open_server, prove
from mingle.errors import ConfigurationError, DiscoveryTimeoutError, MingleError
from mingle.network.connections import bare_address, tune
from mingle.network.interfaces import scan
from tests.support.alarms import alarm_is_passed_on
from tests.support.children import in_child
from tests.support.failing import no_descriptor_left, refusing
from tests.support.loopback import answers, busy_port, closed_port, until
from tests.support.ports import free_tcp_port
from tests.support.receiving import no_descriptor_leaks

SESSION = b"S" * 16
LO = next(interface for interface in scan() if interface.loopback)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="this is how Linux behaves")
needs_ipv6 = pytest.mark.skipif(not LO.of_family("6"), reason="lo has no IPv6 address")


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = open_server("127.0.0.1", None, SESSION)
    yield server
    server.release()


def client_of(server: StoreServer, seconds: float = 30, *, shares: bool = False) -> TCPStore:
    """Connect by torch itself; one that shares makes the store its own as `env://` does."""
    patience = timedelta(seconds=seconds)
    return TCPStore(
        server.address, server.port, is_master=shares, timeout=patience, wait_for_workers=False, multi_tenant=shares
    )


def gone(server: StoreServer) -> bool:
    """Whether its port refuses, after a moment if need be: the server ends in a thread of torch's."""
    until(lambda: not answers(server.port))
    return True


# --- opening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_store_is_proved_by_its_token(server: StoreServer, address: str) -> None:
    """Two stores never share one."""
    another = open_server(address, None, SESSION)
    assert (another.address, another.session, another.held) == (address, SESSION, True)
    prove(address, another.port, SESSION, another.token)
    with pytest.raises(OSError, match="belongs to another session"):
        prove(address, another.port, SESSION, server.token)
    another.release()


@linux_only
def test_the_connection_of_a_process_group_has_patience(server: StoreServer) -> None:
    place = "127.0.0.2", server.port
    # One of ours at the same port of another host, as impatient as it can be.
    with socket.create_server(place), socket.create_connection(place) as elsewhere:
        tune(elsewhere)
        impatient = patience(elsewhere)
        client = connect("127.0.0.1", server.port)
        assert kept_patience(server.port) == {"127.0.0.1": (0, 0), "127.0.0.2": impatient}
        assert client.token(SESSION) == server.token
        handed = client.hand_over()
        assert kept_patience(server.port) == {"127.0.0.1": (1, 0), "127.0.0.2": impatient}
        handed.set("a", "b")
        assert handed.get("a") == b"b"


def test_users_of_a_descriptor_find_it_as_it_was_where_sockets_have_a_default_timeout(server: StoreServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as own:
        socket.setdefaulttimeout(10)
        try:
            connect("127.0.0.1", server.port).hand_over()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(own.fileno())


def patience(own: socket.socket) -> tuple[int, int]:
    """Whether a connection looks after a silent peer, and for how long it waits for one that it has written to."""
    return (
        own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


def kept_patience(port: int) -> dict[str, tuple[int, int]]:
    """That of all connections of this process to a port, by address."""
    return {
        bare_address(own.getpeername()[0]): patience(own)
        for own in store._own_sockets(socket.socket.getpeername, port, "::")
    }


@linux_only
def test_descriptor_that_becomes_another_file_meanwhile_leaves_no_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads open and close files meanwhile; a socket of a family that has no names is refused as well."""
    monkeypatch.setattr(store.stat, "S_ISSOCK", lambda _mode: True)
    with no_descriptor_leaks():
        assert list(store._own_sockets(socket.socket.getpeername, 1, "192.0.2.77")) == []


@pytest.mark.parametrize("address", ["0.0.0.0", pytest.param("::", marks=needs_ipv6)])
def test_a_store_on_every_address_is_cut_off_on_each(address: str) -> None:
    server = open_server(address, None, SESSION)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
    server.abort()
    with pytest.raises(RuntimeError):
        client.get("never set")


@linux_only
def test_a_port_that_this_process_holds_on_another_address_is_not_the_one_that_is_taken() -> None:
    with closed_port() as taken, socket.create_server(("127.0.0.2", taken)):
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{taken}: Address already in use") as caught:
            check_port(taken, ["127.0.0.1"])
        assert "another process holds" in str(caught.value.cause)


def test_a_client_may_count_as_one_of_the_workers_for_whom_rank_zero_waits(server: StoreServer) -> None:
    """Rank 0 may make its process group by torch's own road, where it waits for as many clients as there are ranks."""

    def wait_for_four(seconds: float) -> TCPStore:
        patience = timedelta(seconds=seconds)
        return TCPStore("127.0.0.1", server.port, 4, True, patience, wait_for_workers=True, multi_tenant=True)

    clients = [prove("127.0.0.1", server.port, SESSION, server.token)]
    clients.append(prove("127.0.0.1", server.port, SESSION, server.token, workers=4))
    with pytest.raises(RuntimeError, match="2/4"):  # itself and the second one
        wait_for_four(2.0)
    clients.append(prove("127.0.0.1", server.port, SESSION, server.token, workers=4))
    assert wait_for_four(30.0).port == server.port, "it has been counted twice by now"


def test_store_listens_on_its_address_alone(server: StoreServer) -> None:
    assert answers(server.port)
    assert not answers(server.port, "127.0.0.2")


def test_a_fixed_port_is_used_and_may_be_used_again() -> None:
    port = free_tcp_port()
    first = open_server("127.0.0.1", port, SESSION)
    prove("127.0.0.1", first.port, SESSION, first.token)
    first.release()
    assert gone(first)
    check_port(port, ["127.0.0.1"])
    # Connections of the first one may linger in TIME_WAIT at this port.
    second = open_server("127.0.0.1", port, SESSION)
    assert second.port == port
    second.release()


def test_a_fixed_port_that_this_process_still_holds_is_no_strangers() -> None:
    first = open_server("127.0.0.1", free_tcp_port(), SESSION)
    group = first.handle  # as a model in DistributedDataParallel keeps it
    first.release()
    for attempt in (
        lambda: open_server("127.0.0.1", first.port, SESSION),
        lambda: check_port(first.port, ["127.0.0.1"]),
    ):
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{first.port}: Address already in use") as caught:
            attempt()
        assert "this process itself" in str(caught.value)
        assert "DistributedDataParallel" in str(caught.value)
        assert "another process" not in str(caught.value)
    del group
    assert gone(first)
    check_port(first.port, ["127.0.0.1"])


def test_a_fixed_port_that_only_root_may_open_is_held_by_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", refusing(errno.EACCES))
    with pytest.raises(ConfigurationError, match="which only root may open") as told:
        check_port(80, ["127.0.0.1"])
    assert "another process" not in str(told.value)


def test_a_fixed_port_that_another_process_holds_is_told_at_once() -> None:
    """A connection of this process to that port is no listener."""
    with foreign_listener() as port, socket.create_connection(("127.0.0.1", port)):
        for attempt in (
            lambda: open_server("127.0.0.1", port, SESSION),
            lambda: check_port(port, ["127.0.0.2", "127.0.0.1"]),
        ):
            with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}: Address already in use") as caught:
                attempt()
            assert "another process holds MINGLE_MASTER_PORT" in str(caught.value)
            assert f"ss -tlnp 'sport = :{port}'" in str(caught.value)


@contextlib.contextmanager
def foreign_listener() -> Iterator[int]:
    """A port of 127.0.0.1 that a process of its own listens on."""
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate("\n")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.EADDRINUSE, "no port is free among those that the system chooses from"),
        (errno.EADDRNOTAVAIL, "the address has just gone"),
    ],
)
def test_what_the_system_lacks_is_the_cause(number: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", refusing(number))
    with pytest.raises(MingleError, match=rf"can't listen on 127\.0\.0\.1: {os.strerror(number)}") as caught:
        open_server("127.0.0.1", None, SESSION)
    assert words in str(caught.value)
    assert not isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(
    ("version", "takes"),
    [("2.6.0+cu124", False), ("2.7.1", False), ("2.8.0+cpu", True), ("2.10.0a0+git1", True), ("3.0.1", True)],
)
def test_which_torch_takes_listeners_with_libuv(monkeypatch: pytest.MonkeyPatch, version: str, takes: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert store._libuv_takes_descriptors() is takes


# --- proving --------------------------------------------------------------------------------------------------------


@linux_only
def test_a_host_that_does_not_answer_costs_seconds_not_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CONNECT_SECONDS", 0.2)
    started = time.monotonic()
    # Once its queue of one is full, the kernel lets the listener drop what comes.
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        socket.create_connection(silent.getsockname(), timeout=30),
        pytest.raises(TimeoutError),
    ):
        prove("127.0.0.1", silent.getsockname()[1], SESSION, "0" * 32)
    assert time.monotonic() - started < 60


def test_a_server_is_awaited() -> None:
    with closed_port() as port:
        looked = iter([False, False, True])
        with pytest.raises(AbandonedError):
            await_server("127.0.0.1", port, seconds=60, given_up=lambda: next(looked))
        with pytest.raises(DiscoveryTimeoutError, match=f"127.0.0.1:{port} was not reached within 0 s"):
            await_server("127.0.0.1", port, seconds=0, given_up=lambda: False)
        with pytest.raises(ConnectionRefusedError):
            prove("127.0.0.1", port, SESSION, "0" * 32)
    with busy_port() as port:
        await_server("127.0.0.1", port, seconds=0, given_up=lambda: False)


def test_a_store_without_the_sessions_key(server: StoreServer) -> None:
    with pytest.raises(OSError, match="belongs to another session"):
        prove("127.0.0.1", server.port, b"T" * 16, server.token)
    assert not client_of(server).check([store.KEY_PREFIX + (b"T" * 16).hex()]), "who reads must not write"


def test_a_store_that_ends_while_it_is_read(server: StoreServer) -> None:
    client = connect("127.0.0.1", server.port)
    server.abort()
    with pytest.raises(OSError, match=f"the store at 127.0.0.1:{server.port} failed: ") as caught:
        client.token(SESSION)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PROVE_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        port = other.getsockname()[1]

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # until the listener is shut down
                while True:
                    other.accept()[0].close()

        pool.submit(hang_up)
        with pytest.raises(OSError, match=f"the store at 127.0.0.1:{port} failed: "):
            prove("127.0.0.1", port, SESSION, "0" * 32)
        other.shutdown(socket.SHUT_RDWR)


# --- sharing and letting go -----------------------------------------------------------------------------------------


def test_torch_shares_the_store_by_its_port_and_outlives_us(server: StoreServer) -> None:
    shared = client_of(server, shares=True)
    shared.set("theirs", "1")
    server.release()
    assert not server.held
    client = client_of(server)
    assert client.get(store.KEY_PREFIX + SESSION.hex()).decode() == server.token
    assert client.get("theirs") == b"1"
    del client, shared
    assert gone(server)


@linux_only
def test_aborting_cuts_all_connections_of_that_store_alone(server: StoreServer) -> None:
    """Torch's own timeout is two minutes here; a service of the user's stands at that port of another address."""
    place = "127.0.0.2", server.port
    other = open_server("127.0.0.1", None, SESSION)
    waiting, client, shared = client_of(server, 120), client_of(server, 120), client_of(server, 120, shares=True)
    bystander = client_of(other)
    with socket.create_server(place) as listener, socket.create_connection(place) as caller:
        served, _ = listener.accept()
        with served, ThreadPoolExecutor(1) as pool:
            wait = pool.submit(waiting.get, "what nobody has set")
            until(lambda: wait.running())
            server.abort()
            assert isinstance(wait.exception(60), RuntimeError)
            for each in (client, shared):
                with pytest.raises(RuntimeError):
                    each.get("what nobody has set")
            assert answers(server.port), "torch goes on accepting: its own thread must not find its socket shut down"
            bystander.set("alive", "1")
            assert bystander.get("alive") == b"1"
            caller.sendall(b"?")
            assert served.recv(1) == b"?"
    del waiting, client, bystander, shared
    other.release()


@pytest.mark.parametrize("call", ["abort", "release"])
def test_aborting_what_was_released_is_no_error(call: str) -> None:
    server = open_server("127.0.0.1", None, SESSION)
    server.release()
    getattr(server, call)()
    assert gone(server)


# --- names ----------------------------------------------------------------------------------------------------------


@linux_only
def test_torch_asks_each_name_server_once_for_a_second(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """That torch's look-up goes by these numbers is shown in the lab."""
    libc, during = ctypes.CDLL(None), list[tuple[int, ...]]()
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int * 2)  # seconds and tries for each server (resolver(3))
    assert libc.__res_init() == 0
    numbers = libc.__res_state().contents
    before = tuple(numbers)

    class Observed(TCPStore):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            during.append(tuple(numbers))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("torch.distributed.TCPStore", Observed)
    connect(server.address, server.port)
    open_server("127.0.0.1", None, SESSION).release()
    assert during == [(1, 1), (1, 1)]
    assert tuple(numbers) == before


# --- forks ----------------------------------------------------------------------------------------------------------


@linux_only
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_port_open(server: StoreServer) -> None:
    """A DataLoader worker that outlives its rank: the others must be refused, not kept waiting."""
    mine, childs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        mine.close()
        childs.recv(1)
        os._exit(0)
    childs.close()
    try:
        with mine:
            server.release()
            assert gone(server)
    finally:
        os.waitpid(pid, 0)


@linux_only
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_that_ends_leaves_the_store_alone(server: StoreServer) -> None:
    assert in_child(lambda: "alive") == "alive"
    prove(server.address, server.port, SESSION, server.token)


def test_signal_handlers_exception_while_awaiting_a_store_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count as a store that is out of reach."""
    with alarm_is_passed_on() as interrupted:
        monkeypatch.setattr(store, "connect_plainly", interrupted)
        store.await_server("127.0.0.1", 1, seconds=0.0, given_up=lambda: False)


def test_a_store_is_cut_off_although_no_descriptor_is_left(server: StoreServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        until(lambda: len(list(store._own_sockets(socket.socket.getsockname, server.port, server.address))) > 1)
        with no_descriptor_left():
            server.abort()
        client.settimeout(30)
        with contextlib.suppress(ConnectionResetError):  # torch's thread had not accepted it yet
            assert client.recv(1) == b""
