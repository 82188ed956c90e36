"""Trains a tiny language model with Hugging Face's Trainer; with DISCOVER set, mingle finds the other ranks."""

import hashlib
import json
import os
import socket
import sys
import tempfile

import torch

if "DISCOVER" in os.environ:
    import mingle

    mingle.discover(os.environ["DISCOVER"])

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(int(os.environ["RANK"]))  # the weights differ until the ranks have met
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
texts = [torch.arange(start, start + 8) % 32 for start in range(64)]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=4,
    per_device_train_batch_size=4,
    use_cpu=True,
    ddp_backend="gloo",
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": text, "labels": text} for text in texts])
result = trainer.train()
weights = torch.cat([each.detach().flatten() for each in model.parameters()])
record = {
    "rank": os.environ["RANK"],
    "local_rank": os.environ["LOCAL_RANK"],
    "host": socket.gethostname(),
    "master": os.environ["MASTER_ADDR"],
    "world_size": arguments.world_size,
    "steps": result.global_step,
    "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
}
sys.stdout.write(json.dumps(record) + "\n")  # in one write: the lines of two workers end in one file
sys.stdout.flush()
os._exit(0)  # a model in DistributedDataParallel keeps Gloo's threads until the interpreter goes down
