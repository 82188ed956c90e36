"""A replica group of torchft, of one rank: it trains, and tells after each step how many groups took part and
what its weights are.

Its arguments are an address and a port of this machine, for the group's store, and a file whose existence ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

address, port, end = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
wait = timedelta(seconds=60)
store = TCPStore(address, port, is_master=True, wait_for_workers=False)
torch.manual_seed(os.getpid())
network = torch.nn.Linear(1, 1)
inner = torch.optim.SGD(network.parameters(), lr=0.1)


def load(state: dict[str, dict[str, torch.Tensor]]) -> None:
    network.load_state_dict(state["network"])
    inner.load_state_dict(state["inner"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    load_state_dict=load,
    state_dict=lambda: {"network": network.state_dict(), "inner": inner.state_dict()},
    min_replica_size=1,
    replica_id=f"group{os.environ['NODE_RANK']}",
    store_addr=address,
    store_port=port,
    hostname=address,
    rank=0,
    world_size=1,
    timeout=wait,
    quorum_timeout=wait,
)
model, optimizer = DistributedDataParallel(manager, network), Optimizer(manager, inner)
points = torch.linspace(-1, 1, 16).unsqueeze(1)
while not end.exists():
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(points), 3 * points + 1).backward()
    optimizer.step()
    record = {
        "pid": os.getpid(),
        "step": manager.current_step(),
        "groups": manager.num_participants(),
        "weights": [round(value.item(), 2) for value in network.parameters()],
    }
    print(json.dumps(record), flush=True)
    time.sleep(0.1)
manager.shutdown(wait=False)
os._exit(0)
