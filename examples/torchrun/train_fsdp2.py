"""A transformer whose parameters, gradients and optimizer state are sharded over all ranks (FSDP2); plain torch.

The same line on every machine, in any order:

    torchrun --rdzv-backend=mingle --rdzv-id=$USER-text --nnodes=2:4 --nproc-per-node=8 --max-restarts=3 train_fsdp2.py

It learns to predict the next byte of a text. Each rank saves its own shards, and a restart on another number of ranks
continues from the newest complete checkpoint. All machines must see the directory of the checkpoints.
`torch.distributed.checkpoint` sends objects between the ranks, for which torch needs numpy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONTEXT, WIDTH, HEADS, DEPTH, BYTES = 64, 64, 4, 2, 256


class Block(nn.Module):
    """Causal attention and a feed-forward network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the block makes of its inputs, in their shape."""
        heads = self.query_key_value(self.attention_norm(inputs)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.mix(attended.transpose(1, 2).flatten(2))
        outputs: torch.Tensor = inputs + self.feed_forward(self.forward_norm(inputs))
        return outputs


class Transformer(nn.Module):
    """Predict each next byte of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of all bytes for each next one."""
        hidden = self.byte(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores


def sharded_model(mesh: DeviceMesh) -> Transformer:
    """Build the model on no device, shard it, and only then fill it: no rank ever holds all parameters."""
    with torch.device("meta"):
        model = Transformer()
    # Compute and communicate parameters in bfloat16; keep, reduce and update them in float32.
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            whole = torch.ones(parameter.shape, device=mesh.device_type)
            if whole.dim() > 1:
                whole.normal_(std=0.02)
            parameter.copy_(distribute_tensor(whole, mesh, parameter.placements))
    return model


def complete(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that all ranks have finished, the newest last: .metadata is written at the end."""
    return sorted(found.parent for found in checkpoints.glob("step-*/.metadata"))


def save(checkpoints: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save every rank's shards; keep the two newest checkpoints."""
    # A worker of a lost session can still run: the generation gives each session directories of its own.
    generation = os.environ.get("MINGLE_GENERATION", "0")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=checkpoints / f"step-{step:08d}-{generation}")
    if dist.get_rank() == 0:
        for old in complete(checkpoints)[:-2]:
            shutil.rmtree(old, ignore_errors=True)


def resume(checkpoints: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint, saved by any number of ranks, and return how many steps it has seen."""
    newest = [max(complete(checkpoints), default=None)]
    dist.broadcast_object_list(newest, src=0)  # all ranks load the same one
    if newest[0] is None:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=newest[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step: int = state["step"]
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer on text, sharded over all ranks.")
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(DOCS.glob("*.md")), help="files to learn from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=48, help="sequences in a step, over all ranks")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="on a shared file system")
    arguments = parser.parse_args()
    if find_spec("numpy") is None:  # said before the training, not when it saves
        fix = f"{sys.executable} -m pip install numpy"
        sys.exit(f"torch.distributed.checkpoint needs numpy, which is not installed.\n  fix: {fix}")

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (size,))
    model = sharded_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = resume(arguments.checkpoints, model, optimizer)
    if rank == 0:
        print(f"{size} ranks begin after step {done}", flush=True)

    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in arguments.text)), dtype=torch.uint8)
    for step in range(done + 1, arguments.steps + 1):
        # The step alone decides the batch, of which each rank takes a part: any number of ranks trains alike.
        starts = torch.randint(len(text) - CONTEXT, (arguments.batch,), generator=torch.Generator().manual_seed(step))
        sequences = [text[start : start + CONTEXT + 1] for start in starts[rank::size].tolist()]
        batch = torch.stack(sequences).long().to(mesh.device_type)
        logits = model(batch[:, :-1]).float()
        total = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        loss = total / (arguments.batch * CONTEXT)  # this rank's part of the mean over all ranks
        optimizer.zero_grad()
        (loss * size).backward()  # FSDP takes the mean of the ranks' gradients
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % arguments.log_every == 0:
            dist.all_reduce(loss.detach_())
            if rank == 0:
                print(f"step {step} on {size} ranks: loss {loss.item():.3f}", flush=True)
        if step % arguments.save_every == 0 or step == arguments.steps:
            save(arguments.checkpoints, step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
