"""Sum over all machines by MLX's ring: `mingle-run --nnodes 3 --mlx -- python mlx_all_sum.py`."""

from __future__ import annotations

import mlx.core as mx

group = mx.distributed.init(strict=True, backend="ring")
total = mx.distributed.all_sum(mx.array([group.rank() + 1]))
print(f"rank {group.rank()} of {group.size()}: the sum is {total.item()}", flush=True)
