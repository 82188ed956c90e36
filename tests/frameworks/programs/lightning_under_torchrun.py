"""Lightning's Trainer as torchrun starts it, on two nodes with two workers each; nothing here knows of mingle."""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Line(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        points, values = batch
        self.seen += points.flatten().tolist()
        return torch.nn.functional.mse_loss(self.layer(points), values)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = Trainer(
    strategy="ddp",
    accelerator="cpu",
    devices=2,
    num_nodes=2,
    max_epochs=120,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=tempfile.gettempdir(),
)
torch.manual_seed(trainer.global_rank)  # DDP starts all ranks from rank 0's weights
points = torch.linspace(-1, 1, 16).unsqueeze(1)
model = Line()
trainer.fit(model, DataLoader(TensorDataset(points, 3 * points + 1), batch_size=4))
record = {
    "rank": trainer.global_rank,
    "local_rank": trainer.local_rank,
    "node_rank": trainer.node_rank,
    "world_size": trainer.world_size,
    "host": os.uname().nodename,
    "master": os.environ["MASTER_ADDR"],
    "first epoch": model.seen[: 16 // trainer.world_size],
    "weights": [round(parameter.item(), 6) for parameter in model.parameters()],
    "backend": torch.distributed.get_backend(),
    "environment": type(trainer.strategy.cluster_environment).__name__,
}
sys.stdout.write(json.dumps(record) + "\n")  # in one write: the lines of two workers end in one file
torch.distributed.destroy_process_group()
sys.stdout.flush()
# Not by Python's own end: a model in DistributedDataParallel keeps Gloo's threads until then, and one that drops its
# last tensor while the interpreter goes down ends the process by SIGABRT: one time in ten on a loaded machine.
os._exit(0)
