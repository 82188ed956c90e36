"""Trains a small model with DeepSpeed's ZeRO stage 1; with DISCOVER set, mingle finds the other ranks."""

import hashlib
import json
import os
import socket
import sys

if "DISCOVER" in os.environ:
    import mingle

    mingle.discover(os.environ["DISCOVER"])

import deepspeed
import torch

deepspeed.ops.__compatible_ops__.clear()  # an op for shared memory would be compiled at the first use
torch.manual_seed(int(os.environ["RANK"]))  # the weights differ until the ranks have met
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    },
)
for _ in range(4):
    loss = engine(torch.randn(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
weights = torch.cat([each.detach().flatten() for each in engine.module.parameters()])
record = {
    "rank": os.environ["RANK"],
    "host": socket.gethostname(),
    "master": os.environ["MASTER_ADDR"],
    "world_size": torch.distributed.get_world_size(),
    "stage": engine.zero_optimization_stage(),
    "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
}
sys.stdout.write(json.dumps(record) + "\n")  # in one write: the lines of two workers end in one file
sys.stdout.flush()
os._exit(0)  # a model in DistributedDataParallel keeps Gloo's threads until the interpreter goes down
