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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
from msgspec import structs

from mingle.check import control
from mingle.check.messages import Introduction, ProbedRank
from tests.support.evidence import HELLO
from tests.support.loopback import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PROBE_SECONDS", 60.0)
    monkeypatch.setitem(control.dial.__kwdefaults__, "seconds", 60.0)


@pytest.fixture
def server() -> Iterator[control.Server]:
    """Give the port of rank 0."""
    with contextlib.closing(control.Server(0)) as opened:
        yield opened


@pytest.fixture
def tracebacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.ExceptHookArgs]]:
    """Give the exceptions that end a thread."""
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    yield seen
    assert seen == []


def peer_of(server: control.Server) -> ProbedRank:
    return ProbedRank(0, "127.0.0.1", server.port, server.token)


def tell(line: Connection, message: dict[str, Any]) -> None:
    line.send_bytes(json.dumps(message).encode())


def heard(line: Connection) -> Any:
    return json.loads(line.recv_bytes())


def framed(body: bytes) -> bytes:
    return struct.pack("!i", len(body)) + body


def call(server: control.Server) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", server.port))
    caller.settimeout(30)
    return caller


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


HOSTILE = {
    "a token that is not ASCII": framed('{"token": "é"}'.encode()),
    "a token with a surrogate": framed(rb'{"token": "\ud800"}'),
    "200 KB of brackets": framed(b"[" * 200_000),
    "brackets in a hello": framed(b'{"token": "t", "hello": ' + b'{"a":' * 50_000),
    "no object": framed(b"[1]"),
    "a number": framed(b"9" * 5000),
    "not UTF-8": framed(b'{"token": "\xff"}'),
    "nothing": framed(b""),
    "a negative length": struct.pack("!i", -1) + struct.pack("!Q", 1 << 40),
    "a length beyond the limit": struct.pack("!i", 1 << 30),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_end_in_a_dropped_connection(
    server: control.Server, name: str, tracebacks: list[threading.ExceptHookArgs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CONNECT_SECONDS", 600.0)  # the deadline would drop it as well
    with call(server) as caller:
        caller.sendall(HOSTILE[name])
        with contextlib.suppress(ConnectionError):
            assert caller.recv(100) == b""
    assert control.reaches(peer_of(server))


CHANGES: list[tuple[str, Any]] = [
    *[("hello", hello) for hello in (1, [], {}, {"rank": 0}, {**HELLO, "rank": []}, {**HELLO, "rank": -1})],
    *[("hello", {**HELLO, name: value}) for name, value in (("address", "a"), ("networks", 1), ("port", "x"))],
    *[("probe", probe) for probe in (1, "x", {}, {"rank": 1}, {**HELLO, "address": 5}, {**HELLO, "port": 1 << 20})],
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_question_of_a_rank_that_makes_no_sense_ends_in_a_dropped_connection(
    server: control.Server, change: tuple[str, Any], tracebacks: list[threading.ExceptHookArgs]
) -> None:
    with call(server) as caller:
        caller.sendall(framed(json.dumps({"token": server.token, change[0]: change[1]}).encode()))
        with contextlib.suppress(ConnectionError):
            assert caller.recv(100) == b""
    assert server.controls.empty()


def test_a_hello_comes_through_as_it_was_sent(server: control.Server) -> None:
    with control.dial("127.0.0.1", server.port) as line:
        line.send_bytes(json.dumps({"token": server.token, "hello": HELLO, "later": 1}).encode())
        connection, hello = server.controls.get(timeout=30)
        connection.close()
    assert msgspec.to_builtins(hello) == {**HELLO, "reached": "127.0.0.1"}


def test_a_slow_caller_is_dropped_at_a_deadline(server: control.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONNECT_SECONDS", 0.5)
    with call(server) as caller, contextlib.suppress(ConnectionError):
        caller.sendall(struct.pack("!i", 1000))
        for _ in range(100):  # each byte in time, and the message never
            caller.sendall(b"[")
            time.sleep(0.1)
        pytest.fail("it is still listened to after 10 s")


def test_a_rank_that_does_not_take_its_answer_is_dropped_at_a_deadline(
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


def test_strangers_are_bounded_and_the_newest_stay(server: control.Server) -> None:
    with contextlib.ExitStack() as open_:
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
        with contextlib.suppress(ConnectionError):
            assert caller.recv(1) == b""
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
    with contextlib.closing(control.Server(0)) as server:
        assert control.reaches(peer_of(server))
    assert len(tries) == 6
    assert tries[-1] - tries[0] > 0.09


def test_a_worker_without_descriptors_tells_rank_zero() -> None:
    here, there = multiprocessing.Pipe()
    starved = threading.Event()
    running = threading.Thread(target=lambda: control.Worker(there, [], 60, starved).run(None, str))
    running.start()
    tell(here, {})
    assert heard(here) == {}
    starved.set()
    tell(here, {})
    assert heard(here) == {"gone": "descriptors"}
    tell(here, {"report": {}})
    running.join(30)
    here.close()


@pytest.mark.parametrize(
    "untrusted",
    [
        *[b"[" * 200_000, b"\xff", b"[1]", b""],
        *[
            b'{"show": 1}',
            b'{"roster": [{}]}',
            b'{"do": []}',
            b'{"report": {"lost": 1}}',
            b'{"report": {"pairs": [{"from": 0, "to": 1}]}}',
        ],
    ],
)
def test_a_worker_that_reads_no_message_has_lost_rank_zero(untrusted: bytes) -> None:
    here, there = multiprocessing.Pipe()
    here.send_bytes(untrusted)
    with pytest.raises(control.LostError), here:
        control.Worker(there, [], 60).run(None, str)


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


def test_a_lost_rank_is_judged_by_a_roster_in_which_others_are_missing(roster: list[Introduction]) -> None:
    assert control.judge_loss([roster[0], roster[2]], 2, 0, "ended") == "ended"


def test_another_process_at_the_address_of_a_rank_is_not_taken_for_it(roster: list[Introduction]) -> None:
    imposter = structs.replace(roster[1], rank=0)
    assert control.reaches(roster[1])
    assert not control.reaches(imposter)
    assert not control.reaches(structs.replace(roster[1], token="another"))


class _Tasks:
    def __init__(self) -> None:
        self.ends = threading.Event()

    def hang(self) -> None:
        self.ends.wait()

    def add(self, *, one: int, other: int) -> int:
        return one + other


def test_a_task_that_hangs_gives_way_to_the_next() -> None:
    here, there = multiprocessing.Pipe()
    tasks, steps = _Tasks(), list[str]()
    worker = control.Worker(there, [], 60)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(worker.run, tasks, steps.append)
        tell(here, {"id": 1, "show": "first", "do": "hang", "with": {}})
        tell(here, {"id": 2, "show": "second", "do": "add", "with": {"one": 1, "other": 2}})
        assert heard(here) == {"id": 2, "result": 3}
        tell(here, {"id": 3, "show": "third", "do": "add", "with": {"one": 1}})
        assert "TypeError" in heard(here)["error"]
        tell(here, {"id": 4, "show": "of a later version", "do": "guess", "with": {}})
        assert "AttributeError" in heard(here)["error"]
        tell(here, {})
        assert heard(here) == {}
        tell(here, {"report": {"healthy": True}})
        assert running.result(30).healthy
        assert worker.hangs()
        tasks.ends.set()
    until(lambda: not worker.hangs())
    assert steps == ["first", "second", "third", "of a later version"]


def test_an_error_is_told_before_what_the_failed_call_used_is_let_go() -> None:
    """A group of NCCL can take as long to end as its deadline is."""
    here, there = multiprocessing.Pipe()
    told: list[bool] = []

    class Group:
        def __del__(self) -> None:
            told.append(here.poll(2))

    class Tasks:
        def fail(self) -> None:
            _group = Group()
            raise RuntimeError("NCCL error")

    with ThreadPoolExecutor() as pool:
        running = pool.submit(control.Worker(there, [], 60).run, Tasks(), str)
        tell(here, {"id": 1, "show": "first", "do": "fail", "with": {}})
        until(lambda: told)
        assert heard(here) == {"id": 1, "error": "RuntimeError: NCCL error"}
        tell(here, {"report": {}})
        running.result(30)
    assert told == [True]


def test_ctrl_c_that_hits_the_start_of_a_task_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()  # as CPython's Condition does then: a RuntimeError

    here, there = multiprocessing.Pipe()
    tell(here, {"id": 1, "show": "first", "do": "add", "with": {"one": 1, "other": 2}})
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        control.Worker(there, [], 60).run(_Tasks(), str)
    assert heard(here) == {"gone": "interrupted"}


def test_a_rank_knows_how_it_lost_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PULSE_SECONDS", 0.02)
    for end, how in ((False, "silent"), (True, "ended")):
        here, there = multiprocessing.Pipe()
        if end:
            here.close()
        with pytest.raises(control.LostError) as lost:
            control.Worker(there, [], 0.1).run(_Tasks(), str)
        assert lost.value.how == how
