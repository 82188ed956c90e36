"""The memory of a rank that waits, over that of the same process with torch imported."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from benchmarks.hosts import field
from benchmarks.results import Comparison, Goal
from benchmarks.samples import median

WAITED_SECONDS = 2.0

TEXT = """\
The growth of a rank's resident memory (VmRSS) after two seconds in `mingle.discover`, in a fresh interpreter that has
imported torch."""


def run(rounds: int) -> Comparison:
    """Measure."""
    grown = []
    with field(1) as hosts:
        for _ in range(max(3, rounds // 4)):  # each imports torch, which takes seconds
            process = hosts.hosts[0].run([sys.executable, "-m", "benchmarks.memory"])
            if process.wait(120) != 0:
                raise RuntimeError(process.output)
            grown.append(float(process.stdout.split()[-1]) / 1024)
    return Comparison(
        name="memory",
        title="Memory of a waiting rank",
        text=TEXT,
        unit="MiB",
        samples={"mingle": grown},
        goals=(Goal("resident memory of a waiting rank, over torch's", median(grown), 4, "MiB"),),
    )


def _resident() -> int:
    """Return this process's resident memory in KiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0])


def _wait() -> None:
    import torch.distributed  # noqa: F401 - what it needs is no part of the figure

    before = _resident()
    timer = threading.Timer(WAITED_SECONDS, lambda: print(_resident() - before))
    timer.start()
    import mingle

    try:
        mingle.discover("nobody", rank=1, world_size=2, discovery_timeout=WAITED_SECONDS + 0.5)
    except mingle.DiscoveryTimeoutError:
        timer.join()


if __name__ == "__main__":
    _wait()
