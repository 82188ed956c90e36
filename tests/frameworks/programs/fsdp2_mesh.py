"""FSDP2 on a two-dimensional `DeviceMesh` (replicated one way, sharded the other), on top of `mingle.init`."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mingle


def trained(sharded: bool, rank: int, world_size: int) -> list[float]:
    """Train three steps on this rank's share of the batch, or on all of it, and return the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    if sharded:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    share = batch.chunk(world_size)[rank] if sharded else batch
    for _ in range(3):
        optimizer.zero_grad()
        model(share).square().mean().backward()
        optimizer.step()
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole]).tolist()


with mingle.init(os.environ["JOB"], backend="gloo") as job:
    mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("rows", "columns"))
    column = torch.tensor([float(job.rank)])
    dist.all_reduce(column, group=mesh["rows"].get_group())
    ours, alone = trained(True, job.rank, job.world_size), trained(False, job.rank, job.world_size)
    record = {
        "rank": job.rank,
        "coordinate": mesh.get_coordinate(),
        "column": column.item(),
        "parameters": len(ours),
        "difference": max(abs(a - b) for a, b in zip(ours, alone, strict=True)),
    }
    print(json.dumps(record), flush=True)
