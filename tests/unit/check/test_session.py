"""The part of every rank in a check: how it finds rank 0, and what it reports without rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest

import mingle
from mingle.check import control, session
from mingle.check.conductor import Options
from mingle.check.messages import Order, send
from mingle.check.verdicts import Report
from tests.support.ports import free_tcp_port


def job_of(rank: int, store: socket.socket, interface: str = "lo", network: str = "127.0.0") -> mingle.Job:
    return mingle.Job(
        job_id="j",
        rank=rank,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        node_rank=rank,
        num_nodes=2,
        master_addr="127.0.0.1",
        master_port=store.getsockname()[1],
        interface=interface,
        address=f"{network}.{rank + 1}",
        elapsed=0.0,
    )


@pytest.fixture
def store_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], str]], None]:
    """Make torch's store of the job answer what this function returns."""

    def make(get: Callable[[], str]) -> None:
        store = SimpleNamespace(set=lambda *_pair: None, get=lambda _key: get())
        monkeypatch.setattr(session.dist, "rendezvous", lambda *_place, **_timeout: iter([(store, 0, 2)]))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")

    return make


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["silent", "ended", "cut"])
def test_a_store_that_does_not_answer_is_rank_zero_s(
    monkeypatch: pytest.MonkeyPatch, store_of: Callable[[Callable[[], str]], None], how: str, rank: int
) -> None:
    ends = threading.Event()
    store_of(lambda: str(ends.wait()))
    monkeypatch.setattr(session.Conductor, "run", str)
    monkeypatch.setattr(control, "SILENCE_SECONDS", 0.1)
    # A port of the test's own: no other process listens there once the store has ended.
    store = socket.create_server(("127.0.0.1", free_tcp_port()))
    job = job_of(rank, store, "eth0", "10.0.0")
    if how == "ended":
        store.close()
    elif how == "cut":
        job = dataclasses.replace(job, master_addr="255.255.255.255")  # to which the kernel does not connect
    with closing(control.Server(rank)) as server, store:
        report = session.take_part(job, server, Options(seconds=0.1), str)
    ends.set()
    if how == "cut":
        assert report.lost == {rank: how}
        return
    assert report.lost == {0: how}
    (verdict,) = report.verdicts
    assert verdict.kind == f"rank-{how}"
    assert ("127.0.0.1" if rank else "10.0.0.1") in verdict.observation


@contextlib.contextmanager
def sidecar(port: int) -> Iterator[int]:
    """Take a connection for this port, and make one from the address of a sidecar."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def take() -> None:
            caller = stack.enter_context(listening.accept()[0])
            inner = stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.6", 0)))
            back = threading.Thread(target=carry, args=(inner, caller))
            back.start()
            carry(caller, inner)
            back.join(60)

        taking = threading.Thread(target=take)
        taking.start()
        yield listening.getsockname()[1]
        taking.join(60)


def test_a_rank_behind_a_sidecar_announces_the_address_from_which_it_called(
    store_of: Callable[[Callable[[], str]], None],
) -> None:
    """As torchrun's ranks, whose job names no address."""
    with ExitStack() as stack:
        zero, own = (stack.enter_context(closing(control.Server(rank))) for rank in range(2))
        port = stack.enter_context(sidecar(zero.port))
        store = stack.enter_context(socket.create_server(("", 0)))
        store_of(lambda: f'[{port}, "{zero.token}"]')
        job = dataclasses.replace(job_of(1, store), address="")
        with ThreadPoolExecutor(1) as pool:
            taking_part = pool.submit(session.take_part, job, own, Options(), str)
            line, hello = zero.controls.get(timeout=60)
            with line:
                send(line, Order(report=Report(backend="gloo")))
            assert taking_part.result(60) == Report(backend="gloo")
    assert hello.address == "127.0.0.1"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_descriptors_names_itself(
    monkeypatch: pytest.MonkeyPatch, store_of: Callable[[Callable[[], str]], None], rank: int
) -> None:
    """It closes its own port first, so that rank 0 is told."""
    here, there = multiprocessing.Pipe()
    dialed: list[str] = []

    def dial(*_where: object, **_how: object) -> Any:
        dialed.append("")
        if len(dialed) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return there

    store_of(lambda: '[4567, "t"]')
    monkeypatch.setattr(session.Conductor, "run", str)
    monkeypatch.setattr(control, "dial", dial)
    with socket.create_server(("127.0.0.1", 0)) as store, contextlib.closing(control.Server(rank)) as server:
        report = session.take_part(job_of(rank, store), server, Options(seconds=1), str)
    assert report.lost == {rank: "descriptors"}
    (verdict,) = report.verdicts
    assert verdict.kind == "rank-descriptors"
    assert server.starved.is_set()
    if rank:
        assert json.loads(here.recv_bytes())["hello"]["rank"] == rank
        assert json.loads(here.recv_bytes()) == {"gone": "descriptors"}
    here.close()
    there.close()
