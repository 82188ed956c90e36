"""torch with a known address, as the function of a rank."""

from __future__ import annotations

import os
import threading
import time

import torch.distributed as dist
from tests.lab import report

from benchmarks.hosts import Place

PORT = 29400


def init(place: Place) -> None:
    """Make the process group at an address that everybody was told; the rank stays until it is killed."""
    os.environ["MASTER_ADDR"] = place.address
    os.environ["MASTER_PORT"] = str(PORT)
    started, cpu = place.wait(), time.process_time()
    dist.init_process_group("gloo", rank=place.rank, world_size=place.world_size)
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
    threading.Event().wait()
