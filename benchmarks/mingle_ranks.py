"""mingle, as the function of a rank; without the mesh where its function does not say so."""

from __future__ import annotations

import contextlib
import threading
import time

import torch.distributed  # noqa: F401 - a training script has imported it before it calls mingle
from tests.lab import report

import mingle
from benchmarks.hosts import Place
from mingle.config.settings import Mesh

TIMEOUT = 60.0


def rehearse() -> None:
    """Do the same once, in a job without a host: a forked process copies each page at its first write there."""
    with contextlib.suppress(mingle.DiscoveryTimeoutError):
        mingle.discover("rehearsal", rank=1, world_size=2, discovery_timeout=0.01, interface="lo")


def discover(place: Place) -> None:
    """Discover; the rank stays until it is killed."""
    _discover(place)
    threading.Event().wait()


def discover_with_mesh(place: Place) -> None:
    """As `discover`, and all hosts have reached each other."""
    _discover(place, "on")
    threading.Event().wait()


def _discover(place: Place, mesh: Mesh = "off") -> mingle.Job:
    if place.gate is None:
        rehearse()
    if place.rank == 0:
        report("hosting")  # it listens long before the others have settled
    started, cpu = place.wait(), time.process_time()
    job = mingle.discover(
        place.job,
        rank=place.rank,
        world_size=place.world_size,
        discovery_timeout=TIMEOUT,
        mesh=mesh,
    )
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
    return job


def init(place: Place, mesh: Mesh = "off") -> None:
    """Make the process group; the rank stays until it is killed."""
    started, cpu = place.wait(), time.process_time()
    mingle.init(
        place.job,
        rank=place.rank,
        world_size=place.world_size,
        backend="gloo",
        discovery_timeout=TIMEOUT,
        mesh=mesh,
    )
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
    threading.Event().wait()


def init_with_mesh(place: Place) -> None:
    """As `init`, and all hosts have reached each other."""
    init(place, "on")
