"""One rank's part in a check: form the job, meet rank 0 on a control connection, do its tasks, show its report."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

import mingle
from mingle import detached
from mingle.check import conduct, control, probes
from mingle.check import report as shown
from mingle.check.control import Record
from mingle.cli import output
from mingle.cli.options import FAILED

_KEY = "mingle-check"
_DESTROY_SECONDS = 2.0


class Options(Struct, frozen=True, kw_only=True):
    """What the user asks for."""

    backend: str = "auto"
    max_size: int = 1 << 26
    seconds: float = 20.0
    """The deadline of each step."""
    as_json: bool = False
    nnodes: int | None = None
    """The machines that the user expects; None: any number."""
    each_machine: bool = True
    """Whether the first rank of each machine prints the report, or rank 0 alone."""


def run(job_id: str, options: Options, *, before: Callable[[str], None] = lambda _name: None, **discovery: Any) -> int:
    """Run the check on this rank and return the exit status.

    Args:
        job_id: under which the ranks find each other.
        options: the same on every rank.
        before: called on rank 0 with the name of each step before the step.
        **discovery: further arguments of :func:`mingle.discover`.
    """
    with mingle.discover(job_id, **discovery) as job:
        shows = job.local_rank == 0 and (options.each_machine or job.rank == 0)
        say = output.say if shows else _say_nothing
        say(f"rank {job.rank} of {job.world_size}: the job has formed on {job.num_nodes} machines")
        if options.nnodes not in (None, job.num_nodes):
            say(f"warning: --nnodes {options.nnodes} was given, and the ranks are on {job.num_nodes} machines")
        try:
            report, cut_off = _take_part(job, options, say, before)
        finally:
            _destroy_group()
        if shows and options.as_json:
            output.answer_json("check", {"job_id": job.job_id, **report})
        elif shows:
            shown.show(report)
        if cut_off:
            # Other ranks may still have to ask this one whether it lives.
            time.sleep(control.SILENCE_SECONDS + control.CONNECT_SECONDS)
    return 0 if report["healthy"] else FAILED


def _take_part(
    job: mingle.Job, options: Options, say: Callable[[str], None], before: Callable[[str], None]
) -> tuple[Record, bool]:
    """Return the report, and whether this rank alone has lost rank 0."""
    hello: Record = {
        "rank": job.rank,
        "node": job.node_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "address": job.address,
        "interface": job.interface,
        "networks": probes.networks(),
        "gpus": probes.gpus(),
        "local_world_size": job.local_world_size,
    }
    rank_zero = {**hello, "rank": 0, "node": 0, "host": job.master_addr, "address": job.master_addr, "networks": []}
    deadline = time.monotonic() + options.seconds
    conductor = None
    try:
        store = _within(deadline, lambda: probes.connect_store(options.seconds))
        if job.rank == 0:
            conductor = control.Conductor(job.world_size, secrets.token_hex(16))
            addresses = [job.address, job.master_addr, *(each["address"] for each in hello["networks"])]
            contact = {"addresses": addresses, "port": conductor.port, "token": conductor.token}
            store.set(_KEY, json.dumps(contact))
        contact = json.loads(_within(deadline, lambda: store.get(_KEY)))
        addresses = ["127.0.0.1"] if conductor else [address for address in contact["addresses"] if address]
        connection = control.first_reached(addresses, contact["port"], options.seconds)
    except (detached.AbandonedError, OSError, RuntimeError):
        return conduct.without_rank_zero([rank_zero, hello], job.rank, "silent"), False
    peers = control.Peers(job.rank, contact["token"])
    hello["address"] = hello["address"] or control.plain(connection.getsockname()[0])
    worker = control.Worker(connection, peers, {**hello, "token": contact["token"], "port": peers.port})
    if conductor is not None:
        conducting = threading.Thread(
            target=conduct.run, args=(conductor, options, before), name="mingle-check-conduct", daemon=True
        )
        conducting.start()
    actions = probes.Probes(job, store, contact["token"]).actions()
    try:
        return worker.run(actions, say), False
    except control.LostError as lost:
        hellos = worker.roster or [rank_zero, hello]
        return conduct.without_rank_zero(hellos, job.rank, lost.how), lost.how == "cut"
    finally:
        if conductor is not None:
            conducting.join(2 * control.GRACE_SECONDS)


def _within(deadline: float, function: Callable[[], Any]) -> Any:
    return detached.run(function, "check-store", lambda: time.monotonic() > deadline)


def _destroy_group() -> None:
    """Destroy the process group; a backend that waits for ranks that are gone is left to itself."""
    import torch.distributed as dist

    if dist.is_initialized():
        deadline = time.monotonic() + _DESTROY_SECONDS
        try:
            _within(deadline, dist.destroy_process_group)
        except (detached.AbandonedError, RuntimeError):
            return


def _say_nothing(_text: str) -> None:
    """Stand in for `output.say` on ranks that show nothing."""
