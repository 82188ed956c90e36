#!/usr/bin/env python3
"""Run ddp_train.py on four ranks of this machine, rank 0 last, with no address anywhere.

The four are processes of their own, as on four machines; `MINGLE_INTERFACE=lo` keeps their multicast on this
one. It needs neither a network nor root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

RANKS = 4
HEAD_START = 3.0  # seconds by which the others precede rank 0
DEADLINE = 300.0  # seconds; the training takes a few

# What the shell may hold from another job, and would place these ranks elsewhere or give them other ranks.
FOREIGN = (
    "GLOO_SOCKET_IFNAME",
    "GROUP_",
    "LOCAL_",
    "MASTER_",
    "MINGLE_",
    "NODE_RANK",
    "OMPI_",
    "PMI",
    "SLURM_",
    "TORCHELASTIC_",
    "TP_SOCKET_IFNAME",
)


def main() -> int:
    """Start the ranks, wait for them, and return 0 if all of them succeeded."""
    script = Path(__file__).with_name("ddp_train.py")
    job_id = f"demo-{secrets.token_hex(3)}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: by way of `finally`
    try:
        for rank in reversed(range(RANKS)):
            if rank == 0:
                print(f"... {HEAD_START:.0f} s later, the rank that all others look for:", flush=True)
                time.sleep(HEAD_START)
            settings = {"MINGLE_INTERFACE": "lo", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            shown = " ".join(f"{name}={value}" for name, value in settings.items())
            # On the CPU even where there is a GPU: NCCL lets no two ranks share one.
            line = [near(sys.executable), near(script), "--job-id", job_id, "--device", "cpu"]
            print(f"$ {shown} {shlex.join(line)}", flush=True)
            ranks[rank] = subprocess.Popen(line, env=inherited | settings)
        return report(wait(ranks))
    except KeyboardInterrupt:
        return 130
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()


def near(path: str | Path) -> str:
    """Return a path as one would type it in this directory."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def wait(ranks: dict[int, subprocess.Popen[bytes]]) -> dict[int, int | None]:
    """Return each rank's exit status, None where it had none by the deadline.

    After the first failure the others get ten seconds to say what they saw of it.
    """
    deadline = time.monotonic() + DEADLINE
    statuses = {rank: process.poll() for rank, process in ranks.items()}
    while None in statuses.values() and time.monotonic() < deadline:
        if any(statuses.values()):
            deadline = min(deadline, time.monotonic() + 10)
        running = next(rank for rank, status in statuses.items() if status is None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[running].wait(timeout=0.2)
        statuses = {rank: process.poll() for rank, process in ranks.items()}
    return statuses


def report(statuses: dict[int, int | None]) -> int:
    """Say which ranks failed, if any; return the demo's exit status."""
    for rank, status in sorted(statuses.items()):
        if status != 0:
            how = "was still running" if status is None else f"ended with status {status}"
            print(f"rank {rank} {how}; its own message is above", file=sys.stderr)
    return 1 if any(status != 0 for status in statuses.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
