"""Lightning's Trainer with the plug-in: each rank fits a line to its own share of the points."""

from __future__ import annotations

import json
import os
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from mingle.lightning import MingleEnvironment


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


def trainer_in(environment: MingleEnvironment, **options: int) -> Trainer:
    return Trainer(
        plugins=[environment],
        strategy=os.environ.get("STRATEGY", "ddp"),
        accelerator="cpu",
        devices=int(os.environ["DEVICES"]),
        num_nodes=int(os.environ.get("NODES", "1")),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
        **options,
    )


environment = MingleEnvironment(job_id=os.environ["JOB"])
trainer = trainer_in(environment, max_epochs=60)
torch.manual_seed(trainer.global_rank)  # DDP starts all ranks from rank 0's weights
points = torch.linspace(-1, 1, 16).unsqueeze(1)
model = Line()
trainer.fit(model, DataLoader(TensorDataset(points, 3 * points + 1), batch_size=4))
weights = [round(parameter.item(), 6) for parameter in model.parameters()]
record = {
    "rank": trainer.global_rank,
    "local_rank": trainer.local_rank,
    "node_rank": trainer.node_rank,
    "world_size": trainer.world_size,
    "job": environment.job.rank,
    "first epoch": model.seen[: 16 // trainer.world_size],
    "weights": weights,
    "backend": torch.distributed.get_backend(),
}
print(json.dumps(record), flush=True)
trainer.fit_loop.max_epochs = 61  # a second fit goes on with the same process group
trainer.fit(model, DataLoader(TensorDataset(points, 3 * points + 1), batch_size=4))
again = MingleEnvironment(job_id=os.environ["JOB"])  # and so does a second Trainer, as when a cell is run again
trainer_in(again, max_epochs=1).fit(model, DataLoader(TensorDataset(points, 3 * points + 1), batch_size=4))
assert again.job is environment.job
torch.distributed.destroy_process_group()
