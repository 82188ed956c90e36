"""Many ranks on one machine, beside a bare TCPStore with as many clients."""

from __future__ import annotations

import gc
import os
import struct
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tests.lab import report
from torch.distributed import TCPStore

import mingle
from benchmarks import mingle_ranks, precedence
from benchmarks.hosts import Field, Gate, Place, field
from benchmarks.results import Comparison
from benchmarks.samples import alternate

HOSTS = 8
SIZES = (8, 64, 256, 1024)
PORT = 29400
TIMEOUT = 180.0
MIB_PER_RANK = 12

TEXT = """\
Ranks spread over 8 hosts that share two cores; all begin at one moment, until the last has GO, with a mesh of 56
connections. They are forked, and each has made such a call once. The other contender is nothing but
`TCPStore(..., world_size=N)`; a torch client that connects before the store is listening sleeps for 250 to 750 ms."""


def run(rounds: int) -> Comparison:
    """Measure; a size that the machine has no memory for is left out."""
    samples: dict[str, list[float]] = {}
    room = _available_mib() // MIB_PER_RANK
    with field(HOSTS) as hosts:
        for size in (size for size in SIZES if size <= room):
            taken = alternate(
                min(rounds, max(2, rounds * 32 // size)),
                {
                    "mingle": partial(_crowd, hosts, "mingle", size),
                    "TCPStore": partial(_crowd, hosts, "TCPStore", size),
                },
            )
            samples |= {f"{name}, {size} ranks": values for name, values in taken.items()}
    return Comparison(name="scale", title="Many ranks", text=TEXT, unit="ms", samples=samples)


def _available_mib() -> int:
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return int(text.partition("MemAvailable:")[2].split()[0]) // 1024


def _crowd(hosts: Field, contender: str, size: int, _round: int = 0) -> float:
    """Return the milliseconds from the common begin until the last rank is done."""
    each = size // HOSTS
    begin, ends = hosts.everywhere(_host, lambda place, host: (place, contender, host * each, each, size), TIMEOUT)
    return max(float(end["at"]) - begin for end in ends) * 1e3


def _host(place: Place, contender: str, first: int, count: int, size: int, gate: Gate) -> None:
    """Fork the ranks of one host, and report when all of them wait, and when the last of them was done."""
    join, rehearse = {"mingle": (_mingle, mingle_ranks.rehearse), "TCPStore": (_store, _rehearse_store)}[contender]
    gc.freeze()
    begin = gate.come()
    reader, writer = os.pipe()
    for rank in range(first, first + count):
        if os.fork() == 0:
            os.close(reader)
            _rank(rehearse, partial(join, place, rank, size), writer, begin)
    os.close(writer)
    with os.fdopen(reader, "rb") as ends:
        _times(ends, count)
        report("ready")
        report("done", at=max(_times(ends, count)))
    threading.Event().wait()


def _times(ends: BinaryIO, count: int) -> list[float]:
    """Return what so many ranks say."""
    times = [struct.unpack("d", ends.read(8))[0] for _ in range(count)]
    if min(times) < 0:
        raise RuntimeError("a rank failed")
    return times


def _rank(rehearse: Callable[[], None], join: Callable[[], object], writer: int, begin: int) -> None:
    """Join when the gate opens, tell when it waits there and when it was done (negative: it failed), and stay."""
    at = -1.0
    try:
        rehearse()
        precedence.take()
        os.write(writer, struct.pack("d", time.monotonic()))
        os.read(begin, 1)  # ends when the gate is opened
        kept = join()
        at = time.monotonic()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        os.write(writer, struct.pack("d", at))
    threading.Event().wait()
    del kept


def _mingle(place: Place, rank: int, size: int) -> object:
    return mingle.discover(place.job, rank=rank, world_size=size, discovery_timeout=TIMEOUT)


def _store(place: Place, rank: int, size: int) -> object:
    return TCPStore(place.address, PORT, size, rank == 0, timedelta(seconds=TIMEOUT), wait_for_workers=True)


def _rehearse_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
