"""mingle, as the function of a rank: with its defaults, or without the mesh where the option says so."""

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
MESH_OFF = "mesh off"


def rehearse() -> None:
    """Do the same once, in a job without a host: a forked process copies each page at its first write there."""
    with contextlib.suppress(mingle.DiscoveryTimeoutError):
        mingle.discover("rehearsal", rank=1, world_size=2, discovery_timeout=0.01, interface="lo")


def discover(place: Place) -> None:
    """Discover; the rank stays until it is killed."""
    rehearse()
    if place.rank == 0:
        report("hosting")  # it listens long before the others have settled
    started, cpu = place.wait(), time.process_time()
    job = mingle.discover(
        place.job,
        rank=place.rank,
        world_size=place.world_size,
        discovery_timeout=TIMEOUT,
        mesh=_mesh(place),
    )
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
    threading.Event().wait()
    del job


def init(place: Place) -> None:
    """Make the process group; the rank stays until it is killed."""
    started, cpu = place.wait(), time.process_time()
    mingle.init(
        place.job,
        rank=place.rank,
        world_size=place.world_size,
        backend="gloo",
        discovery_timeout=TIMEOUT,
        mesh=_mesh(place),
    )
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
    threading.Event().wait()


def _mesh(place: Place) -> Mesh | None:
    return "off" if place.option == MESH_OFF else None
