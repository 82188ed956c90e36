"""mingle with ranks that are assigned, as the function of a process."""

from __future__ import annotations

import threading
import time

import torch.distributed  # noqa: F401 - a training script has imported it before it calls mingle
from tests.lab import report

import mingle

TIMEOUT = 120.0


def discover(job: str, world_size: int) -> None:
    """Take part, and stay until the end of the round."""
    report("waiting")
    mingle.discover(job, world_size=world_size, discovery_timeout=TIMEOUT)
    report("done", at=time.monotonic())
    threading.Event().wait()
