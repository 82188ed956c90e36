"""The part of every rank in a check: how it finds rank 0, and what it reports without rank 0."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

import mingle
from mingle.check import control, session
from mingle.check.conductor import Options
from mingle.check.messages import Order, send
from mingle.check.verdicts import Report
from tests.support.ports import free_tcp_port


@pytest.fixture
def store() -> Iterator[socket.socket]:
    """Give what listens in place of the job's store: at a port that no other process takes once it has ended."""
    with socket.create_server(("127.0.0.1", free_tcp_port())) as listening:
        yield listening


def job_of(rank: int, store: socket.socket) -> mingle.Job:
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
        interface="eth0",
        address=f"10.0.0.{rank + 1}",
        elapsed=0.0,
    )


@pytest.fixture
def store_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], str]], None]:
    """Make torch's store of the job answer what this function returns; rank 0 conducts nothing."""

    def make(get: Callable[[], str]) -> None:
        answering = SimpleNamespace(set=lambda *_pair: None, get=lambda _key: get())
        monkeypatch.setattr(session.dist, "rendezvous", lambda *_place, **_timeout: iter([(answering, 0, 2)]))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")

    monkeypatch.setattr(session.Conductor, "run", str)
    return make


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["silent", "ended", "cut"])
def test_a_store_that_does_not_answer_is_rank_zero_s(
    monkeypatch: pytest.MonkeyPatch,
    store: socket.socket,
    store_says: Callable[[Callable[[], str]], None],
    how: str,
    rank: int,
) -> None:
    ends = threading.Event()
    store_says(lambda: str(ends.wait()))
    monkeypatch.setattr(control, "SILENCE_SECONDS", 0.1)
    job = job_of(rank, store)
    if how == "ended":
        store.close()
    elif how == "cut":
        job = dataclasses.replace(job, master_addr="255.255.255.255")  # to which the kernel does not connect
    with closing(control.Server(rank)) as server:
        report = session.take_part(job, server, Options(seconds=0.1), str)
    ends.set()
    if how == "cut":
        assert report.lost == {rank: how}
        return
    assert report.lost == {0: how}
    (verdict,) = report.verdicts
    assert verdict.kind == f"rank-{how}"
    assert ("127.0.0.1" if rank else "10.0.0.1") in verdict.observation


def test_a_rank_whose_job_names_no_address_announces_the_one_from_which_it_called(
    monkeypatch: pytest.MonkeyPatch, store: socket.socket, store_says: Callable[[Callable[[], str]], None]
) -> None:
    """As torchrun's ranks: rank 0 can see the address of a proxy instead."""
    monkeypatch.setitem(control.dial.__kwdefaults__, "source", "127.0.0.6")
    with closing(control.Server(0)) as zero, closing(control.Server(1)) as own, ThreadPoolExecutor(1) as pool:
        store_says(lambda: f'[{zero.port}, "{zero.token}"]')
        job = dataclasses.replace(job_of(1, store), address="")
        taking_part = pool.submit(session.take_part, job, own, Options(), str)
        line, hello = zero.controls.get(timeout=60)
        with line:
            send(line, Order(report=Report(backend="gloo")))
        assert taking_part.result(60) == Report(backend="gloo")
    assert hello.address == "127.0.0.6"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_descriptors_names_itself(
    monkeypatch: pytest.MonkeyPatch,
    store: socket.socket,
    store_says: Callable[[Callable[[], str]], None],
    rank: int,
) -> None:
    """It closes its own port first, so that rank 0 is told."""
    here, there = multiprocessing.Pipe()
    answers = iter([OSError(errno.EMFILE, os.strerror(errno.EMFILE)), there])

    def dial(*_where: object, **_how: object) -> Any:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    store_says(lambda: '[4567, "t"]')
    monkeypatch.setattr(control, "dial", dial)
    with closing(control.Server(rank)) as server, here, there:
        report = session.take_part(job_of(rank, store), server, Options(seconds=1), str)
        assert server.starved.is_set()
        if rank:
            assert json.loads(here.recv_bytes())["hello"]["rank"] == rank
            assert json.loads(here.recv_bytes()) == {"gone": "descriptors"}
    assert report.lost == {rank: "descriptors"}
    assert [verdict.kind for verdict in report.verdicts] == ["rank-descriptors"]
