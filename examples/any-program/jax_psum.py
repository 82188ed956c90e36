"""Sum a number over all machines with JAX on the CPU: ``mingle-run --nnodes 3 -- python jax_psum.py``."""

from __future__ import annotations

import os

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    num_processes=int(os.environ["NNODES"]),
    process_id=int(os.environ["NODE_RANK"]),
)
mine = jax.numpy.full(jax.local_device_count(), jax.process_index() + 1.0)
total = jax.pmap(lambda value: jax.lax.psum(value, "machines"), axis_name="machines")(mine)
print(f"process {jax.process_index()} of {jax.process_count()}: the sum is {float(total[0]):g}", flush=True)
