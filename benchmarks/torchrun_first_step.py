"""Torchrun's start: from the command to the first training step, with mingle and with stock c10d, in alternation.

    python -m benchmarks.torchrun_first_step [--hosts 3] [--workers 1] [--rounds 5]

Each host is a network namespace of its own; the line is the same but for the rendezvous. Stock c10d is told the first
host's address as its endpoint; mingle is told nothing. All hosts are started at once, in fresh interpreters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab import Host, Lab

SCRIPT = Path(__file__).parents[1] / "tests" / "lab" / "training.py"
STOCK_PORT = 29400


def first_step(hosts: Sequence[Host], rendezvous: Sequence[str], workers: int, stop: Path) -> float:
    """Return the seconds from the start of the commands until every worker has made a step."""
    line = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nnodes={len(hosts)}"]
    line += [f"--nproc-per-node={workers}", str(SCRIPT), f"--until={stop}"]
    started = time.monotonic()
    processes = [host.run(line, env={"MINGLE_PROGRESS": "off"}) for host in hosts]
    for process in processes:
        process.wait_for_output('"event": "step"', 120)
    stop.touch()
    for process in processes:
        if process.wait(120) != 0:
            raise SystemExit(process.describe())
    stop.unlink()
    firsts: list[float] = []
    for process in processes:
        steps: dict[int, float] = {}
        for said in (json.loads(text) for text in process.stdout.splitlines() if text.startswith("{")):
            if said["event"] == "step":
                steps.setdefault(said["rank"], said["at"])
        firsts += steps.values()
    return max(firsts) - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    measured: dict[str, list[float]] = {"c10d": [], "mingle": []}
    with Lab() as lab, tempfile.TemporaryDirectory() as directory:
        network = lab.network()
        hosts = [lab.host(network) for _ in range(arguments.hosts)]
        # Stock c10d needs every node's name to lead to it from everywhere; in the lab that must be arranged.
        names = "".join(f"{host.address()} {host.name}\n" for host in hosts)
        for host in hosts:
            host.hosts_file.write_text(f"127.0.0.1 localhost\n{names}")
        for round_ in range(-1, arguments.rounds):  # the first one warms the file caches, and does not count
            lines = {
                "c10d": [f"--rdzv-endpoint={hosts[0].address()}:{STOCK_PORT + round_ + 1}", "--rdzv-backend=c10d"],
                "mingle": ["--rdzv-backend=mingle"],
            }
            for name in sorted(lines, reverse=bool(round_ % 2)):
                line = [*lines[name], f"--rdzv-id=bench-{round_ + 1}"]
                seconds = first_step(hosts, line, arguments.workers, Path(directory, "stop"))
                if round_ >= 0:
                    measured[name].append(seconds)
    print(f"{arguments.hosts} hosts, {arguments.workers} workers each, {arguments.rounds} rounds by turns, seconds")
    for name, seconds_ in measured.items():
        print(f"  {name:<8} median {statistics.median(seconds_):6.2f}   {min(seconds_):6.2f} … {max(seconds_):6.2f}")
    ratio = statistics.median(measured["mingle"]) / statistics.median(measured["c10d"])
    print(f"  mingle / c10d: {ratio:.2f}")


if __name__ == "__main__":
    main()
