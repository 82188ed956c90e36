"""Processors of their own for hosts that share this machine's: control groups with a quota, v1 or v2."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_SECONDS = 0.1
"""The kernel's default: within it a group gets its share, at full speed, and then waits."""
LEAST_QUOTA_SECONDS = 0.001
"""The kernel's lower limit for a share (sched-bwc)."""
_numbers = itertools.count()


@contextlib.contextmanager
def processor(cores: float, *, finely: bool = False) -> Iterator[Path]:
    """Yield the file that takes the processes of a machine with so many cores, which can be a fraction of one.

    Args:
        cores: the number of cores.
        finely: whether its time comes in portions of a millisecond, the smallest that the kernel can give: otherwise
            what takes less than a whole portion runs at the speed of a whole core.
    """
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    # Beside this process, where it is in a group: the cores are shared as between machines of one kind.
    own = re.search(r"^\d+:(?:\S*,)?cpu(?:,\S*)?:/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    name = f"mingle-lab-{os.getpid()}-{next(_numbers)}"
    group = (old / (own[1] if own else "") if old.is_dir() else new) / name
    quota = LEAST_QUOTA_SECONDS if finely else PERIOD_SECONDS * cores
    quota_text, period_text = f"{quota * 1e6:.0f}", f"{quota / cores * 1e6:.0f}"
    group.mkdir()
    try:
        if old.is_dir():
            group.joinpath("cpu.cfs_period_us").write_text(period_text)
            group.joinpath("cpu.cfs_quota_us").write_text(quota_text)
        else:
            group.joinpath("cpu.max").write_text(f"{quota_text} {period_text}")
        yield group / "cgroup.procs"
    finally:
        until = time.monotonic() + 10
        while group.exists():  # processes that have just been killed are in it for a moment
            try:
                for pid in group.joinpath("cgroup.procs").read_text().split():
                    group.parent.joinpath("cgroup.procs").write_text(pid)
                group.rmdir()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
