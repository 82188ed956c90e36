"""Lightning without any plug-in: what `mingle.discover` has exported is all that it reads."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

import mingle

with mingle.discover(os.environ["JOB"]) as job:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=job.local_world_size, num_nodes=job.num_nodes)
    fabric.launch()
    total = fabric.all_reduce(torch.tensor(float(fabric.global_rank + 1)), reduce_op="sum")
    model, _ = fabric.setup(layer := torch.nn.Linear(2, 1), torch.optim.SGD(layer.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum() * fabric.global_rank)
    record = {
        "rank": fabric.global_rank,
        "job": job.rank,
        "world_size": fabric.world_size,
        "total": total.item(),
        "gradient": layer.weight.grad[0, 0].item() if layer.weight.grad is not None else None,
    }
    print(json.dumps(record), flush=True)
    dist.destroy_process_group()
