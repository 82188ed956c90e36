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
_numbers = itertools.count()


@contextlib.contextmanager
def processor(cores: float) -> Iterator[Path]:
    """Yield the file that takes the processes of a machine with so many cores, which can be a fraction of one."""
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    # Beside this process, where it is in a group: the cores are shared as between machines of one kind.
    own = re.search(r"^\d+:(?:\S*,)?cpu(?:,\S*)?:/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    name = f"mingle-lab-{os.getpid()}-{next(_numbers)}"
    group = (old / (own[1] if own else "") if old.is_dir() else new) / name
    quota_text, period_text = f"{PERIOD_SECONDS * cores * 1e6:.0f}", f"{PERIOD_SECONDS * 1e6:.0f}"
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
