"""Accelerate as torchrun starts it; nothing here knows of mingle."""

from __future__ import annotations

import json
import os
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

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
    "world_size": accelerator.num_processes,
    "host": os.uname().nodename,
    "master": os.environ["MASTER_ADDR"],
    "type": str(accelerator.distributed_type),
    "batches": len(loader),
    "weights": [round(weight, 6) for weight in weights.tolist()],
}
sys.stdout.write(json.dumps(record) + "\n")
accelerator.end_training()
sys.stdout.flush()
# Not by Python's own end: a model in DistributedDataParallel keeps Gloo's threads until then, and one that drops its
# last tensor while the interpreter goes down ends the process by SIGABRT: one time in ten on a loaded machine.
os._exit(0)
