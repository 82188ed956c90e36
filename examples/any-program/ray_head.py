"""Node 0 of a Ray cluster: start the head, wait for the workers, run a task on each node, and end."""

from __future__ import annotations

import subprocess
import sys
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def where() -> str:
    """Return the address of the node that runs this task."""
    return str(ray.util.get_node_ip_address())


address, port, nnodes = sys.argv[1], sys.argv[2], int(sys.argv[3])
head = subprocess.Popen(
    ["ray", "start", "--head", "--block", f"--node-ip-address={address}", f"--port={port}"],
    stdout=subprocess.DEVNULL,
)
try:
    while True:
        try:
            ray.init(address=f"{address}:{port}")
            break
        except ConnectionError:  # the head is starting
            if head.poll() is not None:  # it gives its own processes 30 s, and no setting gives them more
                sys.exit(f"`ray start --head` ended with status {head.returncode}; see its messages")
            time.sleep(0.5)
    while len(nodes := [node for node in ray.nodes() if node["Alive"]]) < nnodes:
        time.sleep(0.2)
    task = ray.remote(where)
    tasks = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in nodes
    ]
    print(f"tasks ran on {', '.join(sorted(ray.get(tasks)))}", flush=True)
finally:
    ray.shutdown()
    head.terminate()
    head.wait()
