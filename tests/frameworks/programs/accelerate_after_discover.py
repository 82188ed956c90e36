"""Accelerate: it makes the process group itself, from what `mingle.discover` has exported."""

from __future__ import annotations

import json
import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import mingle

with mingle.discover(os.environ["JOB"]) as job:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    network = torch.nn.Linear(1, 1)
    points = torch.linspace(-1, 1, 16).unsqueeze(1)
    model, optimizer, loader = accelerator.prepare(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1),
        DataLoader(TensorDataset(points, 3 * points + 1), batch_size=4),
    )
    for _ in range(60):
        for inputs, values in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), values)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    weights = accelerator.gather(torch.cat([parameter.detach().flatten() for parameter in network.parameters()]))
    record = {
        "rank": accelerator.process_index,
        "local_rank": accelerator.local_process_index,
        "world_size": accelerator.num_processes,
        "job": job.rank,
        "type": str(accelerator.distributed_type),
        "wrapped": type(model).__name__,
        "batches": len(loader),
        "weights": [round(weight, 6) for weight in weights.tolist()],
    }
    print(json.dumps(record), flush=True)
    accelerator.end_training()  # ends the process group as well
