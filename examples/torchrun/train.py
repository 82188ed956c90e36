"""A script that torchrun starts; it is plain torch, and knows neither an address nor mingle.

The same line on every machine, in any order:

    torchrun --rdzv-backend=mingle --rdzv-id=line-fit --nnodes=2:4 --nproc-per-node=2 --max-restarts=3 train.py

It fits a line to points, and keeps checkpoints on each machine, from which a restart continues, as an elastic job must.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def newest(checkpoints: Path) -> Path | None:
    """Return the checkpoint of the last step: names begin with the step."""
    return max(checkpoints.glob("step-*.pt"), default=None)


def save(checkpoints: Path, step: int, state: object) -> None:
    """Save a checkpoint, whole or not at all; keep the two newest."""
    # A worker of an earlier round can still run: the generation gives each round files of its own.
    generation = os.environ.get("MINGLE_GENERATION", "0")
    checkpoints.mkdir(parents=True, exist_ok=True)
    unfinished = checkpoints / f"unfinished-{os.uname().nodename}-{os.getpid()}"
    torch.save(state, unfinished)
    unfinished.replace(checkpoints / f"step-{step:08d}-{generation}.pt")
    for old in sorted(checkpoints.glob("step-*.pt"))[:-2]:
        old.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a line on all ranks.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoints", type=Path, default=Path("line-fit"), help="a directory, shared or not")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(1, 1).to(device)
    done = 0
    checkpoint = newest(arguments.checkpoints)
    if checkpoint is not None:
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        done = saved["done"]
    # Every rank begins where the one that has come furthest stood: a new machine has no checkpoint.
    progress = torch.zeros(size, dtype=torch.int64, device=device)
    progress[rank] = done
    dist.all_reduce(progress)  # a tensor: for `all_gather_object` torch needs numpy
    done, furthest = int(progress.max()), int(progress.argmax())
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=furthest)
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)

    torch.manual_seed(rank)  # every rank sees points of its own
    for step in range(done, arguments.steps):
        inputs = torch.rand(64, 1, device=device)
        loss = torch.nn.functional.mse_loss(trained(inputs), 3 * inputs + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if int(os.environ["LOCAL_RANK"]) == 0 and step % 10 == 9:
            save(arguments.checkpoints, step + 1, {"model": model.state_dict(), "done": step + 1})
    slope, offset = (parameter.item() for parameter in model.parameters())
    print(f"rank {rank} of {size} at {os.environ['MASTER_ADDR']}: slope {slope:.2f}, offset {offset:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
