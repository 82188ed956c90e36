"""Runs of mingle-check on hosts of the lab, each fault made for real. Used by its tests and by the picture."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mingle.check import command, control
from mingle.check.conductor import Options
from mingle.config.settings import Arguments
from tests.support.levels import soaking

from . import Host, Lab, Rank, report

SLOW = "meta l4proto tcp limit rate over 4 mbytes/second burst 128 kbytes"
"""What a host drops in order to be slow: less than a tenth of what a link carries, also on a busy machine."""
SECONDS = 12.0
SLOW_SECONDS = 20.0
"""For a link that is slow: it loses whole windows, and TCP's retransmission timer doubles while that goes on."""
FORMS = 90.0
TIMEOUT = 150.0


def check(
    rank: int | None,
    size: int,
    *,
    hold: str = "",
    until: str = "",
    as_json: bool = True,
    mesh: str | None = None,
    **more: Any,
) -> tuple[int, str]:
    """Run mingle-check, as a rank if one is given.

    Rank 0 waits before the step ``hold`` until the FIFO ``until`` is written to. Where the fault is there from the
    start, ``mesh="off"`` lets the job form, as it does if the fault comes later.
    """

    def before(step: str) -> None:
        # The FIFO is opened before the report, so that what is written after it waits there.
        held = os.open(until, os.O_RDWR) if hold and step.startswith(hold) else None
        report("step", name=step)
        if held is not None:
            os.read(held, 1)
            os.close(held)

    class Server(control.Server):
        def __init__(self, rank: int) -> None:
            super().__init__(rank)
            report("port", number=self.port)

    control.Server = Server  # type: ignore[misc]
    text = io.StringIO()
    options = Options(**{"seconds": SECONDS, "max_size": 1 << 24, **more})
    arguments = Arguments(job_id="check", rank=rank, world_size=size, discovery_timeout=FORMS, mesh=mesh)
    with contextlib.redirect_stdout(text):
        status = command.run(arguments, options, as_json=as_json, before=before)
    return status, text.getvalue()


def start(hosts: Sequence[Host], **more: Any) -> list[Rank[tuple[int, str]]]:
    """Start one rank on each host; ``env`` is their environment."""
    if "until" in more:
        os.mkfifo(more["until"])
    return [host.start(check, rank, len(hosts), **more) for rank, host in enumerate(hosts)]


def hosts_of(lab: Lab, count: int) -> list[Host]:
    """Return hosts on one network, ``node0`` first."""
    lan = lab.network(link_local=False)
    return [lab.host(lan, name=f"node{number}") for number in range(count)]


def at_step(ranks: Sequence[Rank[Any]], step: str, file: Path, make: Callable[[], None]) -> None:
    """Make a fault between two steps: rank 0 was started with ``hold`` and this FIFO."""
    while not ranks[0].wait_for("step", FORMS)["name"].startswith(step):
        pass
    make()
    fifo = os.open(file, os.O_RDWR)
    os.write(fifo, b"\n")
    os.close(fifo)


def use_up_descriptors(pid: int) -> None:
    """Leave a process no file descriptor beyond those that it has."""
    most = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most + 1, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


def crowd(ports: Sequence[tuple[str, int]], count: int) -> None:
    """Be so many callers of each port who send what is hostile, or nothing, and stay until the process is killed."""
    hostile = itertools.cycle(('{"token": "é"}'.encode(), b"[" * 200_000, b"[", b""))
    callers = []
    for address, port in itertools.islice(itertools.cycle(ports), count * len(ports)):
        with contextlib.suppress(ConnectionError):
            callers.append(socket.create_connection((address, port)))
            body = next(hostile)
            callers[-1].sendall(struct.pack("!i", len(body) or 1000) + body)
    report("crowded")
    signal.pause()


def outcomes(ranks: Sequence[Rank[tuple[int, str]]]) -> list[dict[str, Any]]:
    """Return the reports of these ranks; every status agrees with its report."""
    found = []
    for rank in ranks:
        status, text = rank.result(TIMEOUT)
        found.append(json.loads(text))
        assert status == (0 if found[-1]["healthy"] else 1)
    return found


def verdicts(outcome: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the kind of each verdict and the hosts it is blamed on."""
    return [(verdict["kind"], tuple(verdict["where"])) for verdict in outcome["verdicts"]]


def note(fault: str, seed: int, outcome: dict[str, Any]) -> None:
    """In a soak, keep what was said: the lines of the confusion table."""
    if soaking():
        rates = sorted(pair["rate"] / 1e6 for pair in outcome["pairs"] if pair["rate"])
        record = {"fault": fault, "run": seed, "verdicts": verdicts(outcome), "elapsed": outcome["elapsed"]}
        record |= {"rates": [round(rate) for rate in rates], "load": os.getloadavg()[0]}
        record |= {"host_seconds": [rank["host_seconds"] for rank in outcome["ranks"]]}
        with Path(os.environ.get("CHECK_LOG", "check-soak.log")).open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
