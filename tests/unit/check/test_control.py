"""The port of a rank of mingle-check, its connection to rank 0, and how either is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
from msgspec import structs

from mingle.check import control
from mingle.check.messages import Introduction, ProbedRank
from mingle.check.verdicts import Report
from tests.support.evidence import HELLO
from tests.support.loopback import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PROBE_SECONDS", 60.0)
    monkeypatch.setitem(control.dial.__kwdefaults__, "seconds", 60.0)


@pytest.fixture
def server() -> Iterator[control.Server]:
    """Give the port of rank 0, none of whose threads ends with an exception."""
    with closing(control.Server(0)) as opened, pytest.MonkeyPatch.context() as patch:
        ended: list[threading.ExceptHookArgs] = []
        patch.setattr(threading, "excepthook", ended.append)
        yield opened
        assert ended == []


def peer_of(server: control.Server) -> ProbedRank:
    return ProbedRank(0, "127.0.0.1", server.port, server.token)


def tell(line: Connection, **message: Any) -> None:
    line.send_bytes(json.dumps(message).encode())


def heard(line: Connection) -> Any:
    return json.loads(line.recv_bytes())


def framed(body: bytes) -> bytes:
    return struct.pack("!i", len(body)) + body


def call(server: control.Server) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", server.port))
    caller.settimeout(30)
    return caller


def drops(caller: socket.socket) -> bool:
    """Return whether the other end closes the connection without an answer."""
    with contextlib.suppress(ConnectionError):
        return caller.recv(100) == b""
    return True


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process without a free file descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def serving_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "mingle-check-serve"]


# --- the port ------------------------------------------------------------------------------------------------------

HOSTILE = {
    "a token that is not ASCII": framed('{"token": "é"}'.encode()),
    "a token with a surrogate": framed(rb'{"token": "\ud800"}'),
    "a negative length": struct.pack("!i", -1) + struct.pack("!Q", 1 << 40),
    "a length beyond the limit": struct.pack("!i", 1 << 30),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_end_in_a_dropped_connection(
    server: control.Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CONNECT_SECONDS", 600.0)  # the deadline would drop it as well
    with call(server) as caller:
        caller.sendall(HOSTILE[name])
        assert drops(caller)
    assert control.reaches(peer_of(server))


def test_a_hello_without_the_token_is_dropped_and_with_it_comes_through_as_it_was_sent(server: control.Server) -> None:
    with call(server) as stranger, control.dial("127.0.0.1", server.port) as line:
        stranger.sendall(framed(json.dumps({"token": "t", "hello": HELLO}).encode()))
        assert drops(stranger)
        tell(line, token=server.token, hello=HELLO, later=1)
        connection, hello = server.controls.get(timeout=30)
        connection.close()
    assert msgspec.to_builtins(hello) == {**HELLO, "reached": "127.0.0.1"}
    assert server.controls.empty()


def test_a_slow_caller_is_dropped_at_a_deadline(server: control.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONNECT_SECONDS", 0.5)
    with call(server) as caller, contextlib.suppress(ConnectionError):
        caller.sendall(struct.pack("!i", 1000))
        for _ in range(100):  # each byte in time, and the message never
            caller.sendall(b"[")
            time.sleep(0.1)
        pytest.fail("it is still listened to after 10 s")


def test_a_rank_that_asks_without_end_is_dropped_at_a_deadline(
    server: control.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PROBED_SECONDS", 0.5)
    with control.dial("127.0.0.1", server.port) as line:
        control.greet(line, peer_of(server))
        with contextlib.suppress(EOFError, OSError):
            for _ in range(100):
                control.exchange(line, 1, 1)
                time.sleep(0.1)
            pytest.fail("it is still served after 10 s")


def test_strangers_are_bounded_and_the_newest_stay(server: control.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONNECT_SECONDS", 600.0)  # the deadline would drop the oldest as well
    with ExitStack() as open_:
        callers = [open_.enter_context(call(server)) for _ in range(control.STRANGERS + 20)]
        assert callers[0].recv(1) == b""
        until(lambda: len(serving_threads()) <= control.STRANGERS + 1)  # a thread ends after its connection
        assert control.reaches(peer_of(server))


def test_a_thread_that_can_t_be_started_costs_the_caller_alone(
    server: control.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, call(server) as caller:
        patch.setattr(control.detached, "start", refuse)
        caller.sendall(b"x")
        assert drops(caller)
    assert control.reaches(peer_of(server))


def test_a_process_without_descriptors_says_so_to_its_callers_and_accepts_again(server: control.Server) -> None:
    assert control.reaches(peer_of(server))
    until(lambda: not serving_threads())  # the descriptor of that caller is free, and will not become so meanwhile
    with socket.socket() as first, socket.socket() as caller:
        caller.settimeout(30)
        with no_descriptors():
            first.connect(("127.0.0.1", server.port))  # the kernel took a descriptor for it when the wait began
            caller.connect(("127.0.0.1", server.port))
            size = int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "big")
            assert json.loads(caller.recv(size, socket.MSG_WAITALL)) == {"gone": "descriptors"}
    assert server.starved.is_set()
    assert control.reaches(peer_of(server))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENETDOWN])
def test_accept_pauses_after_an_error_and_goes_on(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    tries: list[float] = []
    real = socket.socket.accept

    def accept(self: socket.socket) -> Any:
        if len(tries) < 6:
            tries.append(time.monotonic())
            raise OSError(number, os.strerror(number))
        return real(self)

    monkeypatch.setattr(control, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(socket.socket, "accept", accept)
    with closing(control.Server(0)) as server:
        assert control.reaches(peer_of(server))
    assert len(tries) == 6
    assert tries[-1] - tries[0] > 0.09


# --- who reaches whom ----------------------------------------------------------------------------------------------


@pytest.fixture
def roster() -> Iterator[list[Introduction]]:
    """Give three ranks on machines of their own, whose servers run in this process."""
    with ExitStack() as servers:
        made = [servers.enter_context(closing(control.Server(rank))) for rank in range(3)]
        yield [
            msgspec.convert(
                HELLO
                | {"rank": rank, "node": rank, "address": "127.0.0.1", "port": server.port, "token": server.token},
                Introduction,
            )
            for rank, server in enumerate(made)
        ]


def test_a_lost_rank_is_cut_off_if_another_machine_reaches_it_and_gone_if_none_does(
    roster: list[Introduction], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert control.judge_loss(roster, 1, 0, "silent") == "cut"
    monkeypatch.setattr(control, "PROBE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        roster[0].port = silent.getsockname()[1]
        assert control.judge_loss(roster, 1, 0, "silent") == "silent"
        assert control.judge_loss(roster[:2], 1, 0, "silent") == "silent"
    assert control.judge_loss(roster, 1, 0, "ended") == "ended"
    assert control.judge_loss(roster[:2], 1, 0, "silent") == "cut"
    assert control.judge_loss([roster[0], roster[2]], 2, 0, "ended") == "ended", "others are missing in the roster"


def test_another_process_at_the_address_of_a_rank_is_not_taken_for_it(roster: list[Introduction]) -> None:
    assert control.reaches(roster[1])
    assert not control.reaches(structs.replace(roster[1], rank=0))
    assert not control.reaches(structs.replace(roster[1], token="another"))


# --- the loop of a rank --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def working(
    tasks: object = None, show: Callable[[str], None] = str, starved: threading.Event | None = None
) -> Iterator[tuple[Connection, control.Worker, Future[Report]]]:
    """Run the loop of a rank; give the end of rank 0, which sends the report at the end if it has not done so."""
    here, there = multiprocessing.Pipe()
    worker = control.Worker(there, [], 60, starved)
    with ThreadPoolExecutor() as pool, here:
        running = pool.submit(worker.run, tasks, show)
        yield here, worker, running
        if not running.done():
            tell(here, report={})
        running.result(30)


def test_a_worker_without_descriptors_tells_rank_zero() -> None:
    starved = threading.Event()
    with working(starved=starved) as (zero, _, _):
        tell(zero)
        assert heard(zero) == {}
        starved.set()
        tell(zero)
        assert heard(zero) == {"gone": "descriptors"}


def test_a_task_that_hangs_gives_way_to_the_next() -> None:
    ends = threading.Event()

    class Tasks:
        def hang(self) -> None:
            ends.wait()

        def add(self, *, one: int, other: int) -> int:
            return one + other

    steps: list[str] = []
    with working(Tasks(), steps.append) as (zero, worker, running):
        tell(zero, **{"id": 1, "show": "first", "do": "hang", "with": {}})
        tell(zero, **{"id": 2, "show": "second", "do": "add", "with": {"one": 1, "other": 2}})
        assert heard(zero) == {"id": 2, "result": 3}
        tell(zero, **{"id": 3, "show": "third", "do": "add", "with": {"one": 1}})
        assert "TypeError" in heard(zero)["error"]
        tell(zero, **{"id": 4, "show": "of a later version", "do": "guess", "with": {}})
        assert "AttributeError" in heard(zero)["error"]
        tell(zero)
        assert heard(zero) == {}
        tell(zero, report={"healthy": True})
        assert running.result(30).healthy
        assert worker.hangs()
        ends.set()
        until(lambda: not worker.hangs())
    assert steps == ["first", "second", "third", "of a later version"]


def test_an_error_is_told_before_what_the_failed_call_used_is_let_go() -> None:
    """A group of NCCL can take as long to end as its deadline is."""
    told: list[bool] = []

    class Group:
        def __del__(self) -> None:
            told.append(zero.poll(2))

    class Tasks:
        def fail(self) -> None:
            _group = Group()
            raise RuntimeError("NCCL error")

    with working(Tasks()) as (zero, _, _):
        tell(zero, **{"id": 1, "show": "first", "do": "fail", "with": {}})
        until(lambda: told)
        assert heard(zero) == {"id": 1, "error": "RuntimeError: NCCL error"}
    assert told == [True]


def test_ctrl_c_that_hits_the_start_of_a_task_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()  # as CPython's Condition does then: a RuntimeError

    here, there = multiprocessing.Pipe()
    tell(here, id=1, do="add")
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        control.Worker(there, [], 60).run(None, str)
    assert heard(here) == {"gone": "interrupted"}
    here.close()


@pytest.mark.parametrize(
    ("happens", "how"),
    [
        (lambda _zero: None, "silent"),
        (Connection.close, "ended"),
        (lambda zero: zero.send_bytes(b"\xff"), "ended"),
        (lambda zero: tell(zero, gone="descriptors"), "descriptors"),
    ],
    ids=["nothing", "end of file", "no message", "its own words"],
)
def test_a_rank_knows_how_it_lost_rank_zero(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[Connection], None], how: str
) -> None:
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.02)
    here, there = multiprocessing.Pipe()
    happens(here)
    with pytest.raises(control.LostError) as lost, here:
        control.Worker(there, [], 0.1).run(None, str)
    assert lost.value.how == how
