"""The smallest job: each rank prints who it is. README has the line to type in two terminals.

The script does not use mingle: torchrun sets rank, size and address.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {total.item():g}")
dist.destroy_process_group()
