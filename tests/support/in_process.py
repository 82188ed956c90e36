"""Ranks of one job as threads of the test's process, each with a loop and sockets of its own, on `lo`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch.distributed  # noqa: F401 - takes seconds: here, and not within the time that a test allows

from mingle.config.launchers import Placement
from mingle.config.settings import Settings
from mingle.engine.discovery import Discovery
from mingle.protocol.machine import Formation
from tests.support.loopback import job_name
from tests.support.ports import free_udp_port


class Formed(NamedTuple):
    """A rank whose job has formed."""

    discovery: Discovery
    formation: Formation


def settings_of(job_id: str, rank: int, world_size: int, port: int, *, timeout: float = 60.0, **more: Any) -> Settings:
    """Return the settings of a rank on `lo`."""
    told = {name: more.pop(name) for name in Placement.__struct_fields__ if name in more}
    return Settings(
        job_id=job_id,
        placement=Placement(rank=rank, world_size=world_size, **told),
        discovery_timeout=timeout,
        port=port,
        **{
            "interfaces": ("lo",),
            "interfaces_from": "MINGLE_INTERFACE",
            "family": "4",
            "progress": "off",
            "mesh": "off",
            **more,
        },
    )


def discovery_of(settings: Settings, *, enters: bool = False) -> Discovery:
    """Return a rank's discovery, which the test runs and closes; torch must have been imported."""
    return Discovery(settings, enters=enters)


def opened(discovery: Discovery) -> Discovery:
    """Start a rank's loop, wait until its sockets are open, and return it: its caller waits for nothing."""
    discovery.start()
    discovery.ask(lambda: None)
    return discovery


@contextlib.contextmanager
def formed(
    world_size: int = 2, *, enters: bool = False, job_id: str = "", port: int = 0, **more: Any
) -> Iterator[list[Formed]]:
    """All the ranks of a job that has formed, in order; closed at the end, members before rank 0."""
    job_id, port = job_id or job_name("formed"), port or free_udp_port()
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world_size):
            ranks.append(discovery_of(settings_of(job_id, rank, world_size, port, **more), enters=enters))
            stack.callback(ranks[-1].close, "the test is over")
        with ThreadPoolExecutor(world_size) as pool:
            formations = list(pool.map(Discovery.run, ranks))
        yield [Formed(*each) for each in zip(ranks, formations, strict=True)]
