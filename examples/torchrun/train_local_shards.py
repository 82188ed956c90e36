"""A script that torchrun starts: each rank keeps its shard of the model on the disk of its own machine.

The same line on every machine, in any order:

    torchrun --rdzv-backend=mingle --rdzv-id=table --nnodes=3 --nproc-per-node=2 --max-restarts=3 train_local_shards.py

A new start of all machines gives each machine the ranks that it had (docs/torchrun.md), so each rank reads its shard
from its own disk. After the loss of a machine ranks can move: then the shards that are elsewhere are sent once.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

ROWS, COLUMNS = 8, 16
"""The size of a shard: each rank holds as many rows of the table."""


class Checkpoint(NamedTuple):
    """What the shards of one checkpoint have in common. Checkpoints sort by their step."""

    step: int
    generation: str
    """The session that wrote it: two sessions can have come to the same step in different ways."""
    ranks: int

    def shard(self, directory: Path, rank: int) -> Path:
        """Return the file of a rank's shard."""
        return directory / f"step-{self.step:08d}-{self.generation}-shard-{rank}-of-{self.ranks}.pt"


def on_disk(directory: Path) -> list[str]:
    """Return the names of the files on this machine's disk that can be shards."""
    return [path.name for path in directory.glob("step-*.pt")]


def shards(names: list[str]) -> set[tuple[Checkpoint, int]]:
    """Return the shards with these names."""
    matches = [re.fullmatch(r"step-(\d+)-(.+)-shard-(\d+)-of-(\d+)\.pt", name) for name in names]
    return {(Checkpoint(int(m[1]), m[2], int(m[4])), int(m[3])) for m in matches if m is not None}


def all_gather_text(text: str) -> list[str]:
    """Return the texts of all ranks. They are sent as tensors: for `all_gather_object` torch needs numpy."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    lengths[dist.get_rank()] = len(mine)
    dist.all_reduce(lengths)
    sent = torch.zeros(int(lengths.max()) + 1, dtype=torch.uint8)
    sent[: len(mine)] = mine
    everyones = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(everyones, sent)
    return [bytes(each[:length].tolist()).decode() for each, length in zip(everyones, lengths, strict=True)]


def load(directory: Path) -> tuple[int, torch.Tensor | None]:
    """Return the step of the newest checkpoint of which some machine has each shard, and this rank's shard of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    disks = [shards(names.split("\n")) for names in all_gather_text("\n".join(on_disk(directory)))]
    found = set().union(*disks)
    complete = [
        each for each, _ in found if each.ranks == size and all((each, shard) in found for shard in range(size))
    ]
    if not complete:
        return 0, None
    newest = max(complete)
    own = torch.load(newest.shard(directory, rank)) if (newest, rank) in disks[rank] else None
    source = "its own disk"
    for shard in range(size):
        if (newest, shard) not in disks[shard]:
            holder = next(each for each in range(size) if (newest, shard) in disks[each])
            sent = torch.load(newest.shard(directory, shard)) if rank == holder else torch.empty(ROWS, COLUMNS)
            dist.broadcast(sent, src=holder)
            if rank == shard:
                own, source = sent, f"rank {holder}"
    print(f"rank {rank} continues at step {newest.step} with its shard from {source}", flush=True)
    return newest.step, own


def save(directory: Path, step: int, shard: torch.Tensor) -> None:
    """Save this rank's shard, whole or not at all; keep those of the two newest steps."""
    directory.mkdir(parents=True, exist_ok=True)
    generation = os.environ.get("MINGLE_GENERATION", "0")
    path = Checkpoint(step, generation, dist.get_world_size()).shard(directory, dist.get_rank())
    unfinished = directory / f"unfinished-{os.getpid()}"
    torch.save(shard, unfinished)
    unfinished.replace(path)
    dist.barrier()  # each rank has its shard of this step now, so older ones can go
    saved = shards(on_disk(directory))
    steps = sorted({checkpoint.step for checkpoint, _ in saved})
    for checkpoint, rank in saved:
        if checkpoint.step not in steps[-2:]:
            checkpoint.shard(directory, rank).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a table whose rows are spread over all ranks.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", type=Path, default=Path("table"), help="on a disk of this machine")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    target = torch.full((ROWS, COLUMNS), float(rank))  # what this rank's rows are to become
    done, saved = load(arguments.directory)
    table = torch.zeros(ROWS, COLUMNS) if saved is None else saved
    for step in range(done + 1, arguments.steps + 1):
        table += 0.1 * (target - table)
        loss = (target - table).square().mean()
        dist.all_reduce(loss)
        if step % 10 == 0:
            save(arguments.directory, step, table)
            if rank == 0:
                print(f"step {step}, loss {loss.item():.4f}", flush=True)
    print(f"rank {rank} has learned {table.mean().item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
