"""How a rank takes part in a check; on rank 0, the conductor as well."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec
import torch.distributed as dist
from msgspec import structs, to_builtins

from mingle import detached
from mingle.check import control, messages, probes
from mingle.check.conductor import END_SECONDS, Conductor, Options, evidence_of, report_of
from mingle.check.messages import Introduction, Question, Reply
from mingle.check.verdicts import Report
from mingle.errors import lacks_descriptor
from mingle.job import Job

_T = TypeVar("_T")
_KEY = "mingle-check"


def take_part(
    job: Job,
    server: control.Server,
    options: Options,
    show: Callable[[str], None],
    before: Callable[[str], None] = lambda _step: None,
) -> Report:
    """Take part in a check; return the report of rank 0, or what this rank knows without it.

    Args:
        job: the job to check.
        server: for the other ranks; it has to outlive the check.
        options: the same on every rank.
        show: called with the name of each step.
        before: called on rank 0 with the name of each step, before the step.
    """
    started = time.monotonic()
    # Under torchrun the job names no interface, and the store's link-local address has this machine's zone.
    control.own_interface = job.interface or job.master_addr.partition("%")[2]
    hello = Introduction(
        rank=job.rank,
        node=job.node_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        address=job.address,
        interface=job.interface,
        networks=probes.networks(),
        port=server.port,
        token=server.token,
        options=to_builtins(options),
    )
    roster: list[Introduction] = []
    conducting = worker = None
    patience = options.patience
    try:
        try:
            store = _within(patience, lambda: _connect_store(patience))
            if job.rank == 0:
                conducting = control.start(Conductor(job, server, options, before, hello).run)
                store.set(_KEY, msgspec.json.encode((server.port, server.token)).decode())
            port, token = messages.decode(messages.ADDRESS, _within(patience, lambda: store.get(_KEY)))
        except (detached.AbandonedError, RuntimeError, ValueError):
            raise control.LostError(_how_store_was_lost(job)) from None
        line = _call_rank_zero(job, server, port, token, hello)
        worker = control.Worker(line, roster, control.SILENCE_SECONDS if job.rank else math.inf, server.starved)
        return worker.run(probes.Probes(job, store, roster), show)
    except control.LostError as error:
        how = error.how
        if roster and how != control.NO_DESCRIPTOR:
            how = control.judge_loss(roster, job.rank, 0, how)
        lost = {job.rank if how == "cut" else 0: how}
    except OSError as error:  # the store has answered, and the check's own port does not
        lost = {job.rank: control.NO_DESCRIPTOR if lacks_descriptor(error) else "cut"}
    finally:
        if conducting:
            conducting.join(2 * END_SECONDS)
        if worker and not worker.hangs():
            _destroy_group()
    if not roster:
        roster = [hello]
        if job.rank:
            zero = structs.replace(hello, rank=0, node=0, host=job.master_addr, pid=None, networks=[])
            zero.address = job.master_addr  # it can be a name
            roster = [zero, hello]
    return report_of(evidence_of(roster, lost), roster, started)


def _call_rank_zero(job: Job, server: control.Server, port: int, token: str, hello: Introduction) -> Connection:
    """Return this rank's control connection. Without a descriptor for it, tell rank 0 so in place of the own port.

    Under torchrun the job names no address of this rank, and the rank announces the one from which it called.

    Raises:
        OSError: rank 0 is not reached, or there is no descriptor.
    """

    def call() -> Connection:
        line = control.dial(job.master_addr if job.rank else "127.0.0.1", port, segment=control.SEGMENT_BYTES)
        hello.address = hello.address or control.own_address(line)
        messages.send(line, Question(token, hello))
        return line

    try:
        return call()
    except OSError as error:
        if lacks_descriptor(error):
            server.starved.set()
            if job.rank:  # rank 0's own part sees the event, and goes on with its port
                server.close()
                with suppress(OSError), call() as line:
                    messages.send(line, Reply(gone=control.NO_DESCRIPTOR))
        raise


def _connect_store(seconds: float) -> dist.Store:
    """Return the job's store as torch's ``env://`` does."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds)))[0]
    return store


def _how_store_was_lost(job: Job) -> str:
    """Return ``ended`` if the kernel of rank 0's machine refuses connections to the store, ``cut`` if none answers."""
    try:
        control.dial(job.master_addr, job.master_port).close()
    except ConnectionRefusedError:
        return "ended"
    except OSError as error:
        if lacks_descriptor(error):
            raise
        return "cut"
    return "silent"  # the kernel accepts connections for a process that is stopped


def _within(seconds: float, function: Callable[[], _T]) -> _T:
    deadline = time.monotonic() + seconds
    return detached.run(function, "check-store", lambda: time.monotonic() > deadline)


def _destroy_group() -> None:
    """Destroy the process group, which no other thread uses; a backend that waits for ranks that are gone is left."""
    if dist.is_initialized():
        with suppress(detached.AbandonedError, RuntimeError):
            _within(END_SECONDS, dist.destroy_process_group)
