"""A plain training script as torchrun starts it: nothing here knows of mingle. It reduces until it is told to stop.

Every line that it prints is one JSON object: what happened, when (monotonic), and which hosts took part.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def say(event: str, **data: Any) -> None:
    """Print one event, in one write: the lines of several workers end in one file."""
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **data}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True, help="stop when this file is there")
    parser.add_argument("--crash", type=int, default=0, help="so many attempts of rank 0's end in a crash")
    parser.add_argument("--fail", type=Path, help="the worker on the host that this file names fails")
    parser.add_argument("--alone", action="store_true", help="no collectives: no worker feels another one's end")
    parser.add_argument("--deaf", help="the workers on the host of this name ignore SIGTERM")
    parser.add_argument("--device", default="cpu", help="where the tensors are; on a GPU NCCL reduces them")
    arguments = parser.parse_args()
    here = os.uname().nodename
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if arguments.deaf == here:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[arguments.device])
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, here)
    names = (
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "TORCHELASTIC_RUN_ID",
        "MINGLE_GENERATION",
    )
    about = {"rank": rank, "size": size, "hosts": hosts, "attempt": attempt}
    say("started", pid=os.getpid(), environment={name: os.environ.get(name) for name in names}, **about)
    while True:
        # With the host's name appended the file is for one host alone.
        stop = arguments.until.exists() or arguments.until.with_suffix(f".{here}").exists()
        if not arguments.alone:
            numbers = torch.tensor([rank + 1, int(stop)], device=arguments.device)
            dist.all_reduce(numbers)
            assert numbers[0] == size * (size + 1) // 2
            stop = bool(numbers[1])
        say("step", **about)
        if attempt < arguments.crash and rank == 0:
            sys.exit(3)
        if arguments.fail is not None and arguments.fail.exists() and arguments.fail.read_text() == here:
            sys.exit(4)
        if stop:
            break
        time.sleep(0.1)
    if not arguments.alone:
        dist.destroy_process_group()
    say("done", **about)


if __name__ == "__main__":
    main()
