#!/usr/bin/env python3
"""Train a small network on drawn digits with DDP, on ranks that were told no address.

One process per rank, on any machines of one network, started in any order::

    RANK=0 WORLD_SIZE=4 python ddp_train.py --job-id digits     # and RANK=1, 2, 3

or by a launcher, which gives each process its rank, the size and the job id::

    srun --ntasks=4 python ddp_train.py
    torchrun --nproc-per-node=4 ddp_train.py

`mingle.init` is the only distributed set-up. The rest is what a DDP script needs anyway: a shard of the data
for each rank, bf16 where the device has it, a snapshot to resume from, an exact accuracy, and the check that
all ranks hold one and the same network.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mingle

SEED = 20
IMAGES, TEST_IMAGES = 1800, 360
NOISE = 0.15  # of a dot's brightness
DIGITS = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71222", "75757", "75717"]
"""How 0 to 9 are drawn, 3 by 5 dots each: a figure is a row, and its bits are the row's dots."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a digit classifier on ranks that find each other.")
    parser.add_argument("--job-id", help="the same for all ranks (default: MINGLE_JOB_ID or the launcher's)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--bf16", choices=("auto", "on", "off"), default="auto", help="auto: if the GPU has it")
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="save to FILE; resume if rank 0 has it")
    parser.add_argument("--snapshot-every", type=int, default=5, metavar="EPOCHS")
    return parser.parse_args()


def main() -> None:
    """Join the job, train, and report."""
    args = parse_arguments()
    with mingle.init(job_id=args.job_id) as job:
        print_roster(job)
        train(args, job)


def train(args: argparse.Namespace, job: mingle.Job) -> None:
    """Train on this rank's shard, in step with all others; rank 0 shows the progress and the result."""
    device = choose_device(args.device, job)
    bf16 = choose_bf16(args.bf16, device)

    torch.manual_seed(SEED)
    network = build_network().to(device)
    optimizer = AdamW(network.parameters(), lr=args.learning_rate)
    first_epoch = load_snapshot(args.snapshot, network, optimizer, job, device) if args.snapshot else 0
    model = DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)

    train_set, test_set = load_data()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, job.world_size, job.rank, seed=SEED)
    # All ranks together always make up the same batch: the result hardly depends on how many they are.
    loader = DataLoader(train_set, batch_size=max(1, args.batch_size // job.world_size), sampler=sampler)

    with Progress(console=Console(stderr=True), disable=job.rank != 0) as progress:
        bar = progress.add_task("training", total=args.epochs, completed=first_epoch)
        for epoch in range(first_epoch, args.epochs):
            # An epoch's randomness follows from its number: a resumed run ends where an unbroken one does.
            sampler.set_epoch(epoch)
            torch.manual_seed(SEED + epoch * job.world_size + job.rank)
            loss = train_epoch(model, optimizer, loader, device, bf16=bf16)
            progress.update(bar, advance=1, description=f"epoch {epoch + 1}, loss {loss:.3f}")
            due = (epoch + 1) % args.snapshot_every == 0 or epoch + 1 == args.epochs
            if args.snapshot and due and job.rank == 0:
                save_snapshot(args.snapshot, network, optimizer, epoch + 1)

    accuracy = measure_accuracy(network, test_set, job, device)
    digest = check_identical(network, job, device)
    if job.rank == 0:
        say(f"final test accuracy: {accuracy:.3f}")
        say(f"parameters identical on {job.world_size} ranks (sha256 {digest[:12]})")


def say(text: str) -> None:
    """Print in a single write, so that ranks which share a terminal do not mix their lines."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_roster(job: mingle.Job) -> None:
    """Say on every rank how it met rank 0, and on rank 0 who all have come."""
    host = f"{job.master_addr}:{job.master_port}"
    met = f"is rank 0 of job {job.job_id!r}, met at" if job.rank == 0 else "found rank 0 at"
    lines = [f"rank {job.rank} on {socket.gethostname()} {met} {host} in {job.elapsed:.2f} s"]
    if job.rank == 0:
        # No members are known under torchrun, which had solved the addresses before this process began.
        lines += [
            f"  rank {member.rank}: {member.hostname} {member.address}, "
            f"node {member.node_rank}, local rank {member.local_rank}, pid {member.pid}"
            for member in job.members
        ]
    say("\n".join(lines))


def choose_device(wish: str, job: mingle.Job) -> torch.device:
    """Return this rank's own GPU, or the CPU where there is none."""
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        # So small a network gains nothing from more threads, and the ranks of a node share its cores.
        torch.set_num_threads(1)
        return torch.device("cpu")
    # Modulo, because some launchers show each rank its own GPU only, and that is then number 0 for all.
    device = torch.device("cuda", job.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_bf16(wish: str, device: torch.device) -> bool:
    """Return whether the forward pass computes in bfloat16, which needs no scaled loss as float16 does."""
    if wish == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return wish == "on"


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: digits in noise on 8 by 8 pixels, the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    font = torch.tensor([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in digit] for digit in DIGITS])
    labels = torch.randint(len(DIGITS), (IMAGES,), generator=generator)
    images = NOISE * torch.randn(IMAGES, 1, 8, 8, generator=generator)
    tops = torch.randint(1, 3, (IMAGES,), generator=generator).tolist()
    lefts = torch.randint(2, 4, (IMAGES,), generator=generator).tolist()
    for image, label, top, left in zip(images, labels, tops, lefts, strict=True):
        image[0, top : top + 5, left : left + 3] += font[label]
    order = torch.randperm(IMAGES, generator=generator)
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[test], labels[test])


def build_network() -> nn.Module:
    """Return a convolutional network of 9 930 parameters, and no buffers for the ranks to disagree on."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


def train_epoch(
    model: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], device: torch.device, *, bf16: bool
) -> float:
    """Go once over this rank's shard; return its mean loss."""
    model.train()
    losses = []
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients over all ranks here
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def save_snapshot(path: Path, network: nn.Module, optimizer: Optimizer, epoch: int) -> None:
    """Save the state after `epoch` epochs; a crash at any moment leaves the old file or the new one whole."""
    snapshot = {"epoch": epoch, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_snapshot(path: Path, network: nn.Module, optimizer: Optimizer, job: mingle.Job, device: torch.device) -> int:
    """Bring every rank to the state that rank 0 has saved; return after how many epochs, 0 if none was saved.

    Rank 0 alone reads the file and sends it on: the machines need not share a file system, and no two ranks
    can resume from different epochs.
    """
    content = bytearray(path.read_bytes() if job.rank == 0 and path.exists() else b"")
    size = torch.tensor(len(content), device=device)
    dist.broadcast(size, src=0)
    if size == 0:
        return 0
    if job.rank != 0:
        content = bytearray(int(size))
    # A tensor, because torch needs numpy to broadcast objects. It has the memory of `content`.
    as_tensor = torch.frombuffer(content, dtype=torch.uint8)
    sent = as_tensor.to(device)
    dist.broadcast(sent, src=0)
    as_tensor.copy_(sent)
    snapshot = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    network.load_state_dict(snapshot["network"])
    optimizer.load_state_dict(snapshot["optimizer"])
    if job.rank == 0:
        say(f"resumed from {path} after epoch {snapshot['epoch']}")
    return int(snapshot["epoch"])


@torch.no_grad()
def measure_accuracy(network: nn.Module, test_set: TensorDataset, job: mingle.Job, device: torch.device) -> float:
    """Return the share of test images that all ranks together got right.

    Each rank takes every world_size-th image: DistributedSampler would repeat some, to give all ranks equally
    many, and count those twice.
    """
    network.eval()
    images, labels = (part[job.rank :: job.world_size].to(device) for part in test_set.tensors)
    right = (network(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return int(right) / len(test_set)


@torch.no_grad()
def check_identical(network: nn.Module, job: mingle.Job, device: torch.device) -> str:
    """Return the SHA-256 of the parameters, having made sure that it is the same on every rank."""
    parameters = torch.cat([parameter.flatten() for parameter in network.parameters()])
    digest = hashlib.sha256(bytes(parameters.view(torch.uint8).tolist())).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    everyones = [torch.empty_like(mine) for _ in range(job.world_size)]
    dist.all_gather(everyones, mine)
    strays = [rank for rank, theirs in enumerate(everyones) if not torch.equal(theirs, everyones[0])]
    if strays:
        raise RuntimeError(f"the parameters on ranks {strays} differ from those on rank 0")
    return digest.hex()


if __name__ == "__main__":
    main()
