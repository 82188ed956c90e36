"""Runs the simulated network by hand.

``python -m tests.lan start --ranks 1000 --loss 0.3 --seed 7``
    a whole job, its ranks started within three seconds, and its figures;
``python -m tests.lan replay SEED``
    one random schedule, step by step;
``python -m tests.lan soak --seeds 20000 [--first 0]``
    many of them; prints the seeds that fail.
"""

from __future__ import annotations

import argparse
import time
import traceback

from tests.lan.gathering import Gathering
from tests.lan.schedules import Schedule


def start(ranks: int, loss: float, seed: int, spread: float) -> None:
    """Starts a job and prints what it cost."""
    gathering = Gathering(seed, size=ranks, loss=loss, timeout=300)
    began = time.perf_counter()
    gathering.everybody([gathering.rng.uniform(0, spread) for _ in range(ranks)])
    gathering.run()
    gathering.expect_formed()
    last_start = max(process.started_at for process in gathering.processes)
    last_go = max(process.formed_at or 0.0 for process in gathering.processes)
    counts = gathering.world.counts
    print(f"ranks {ranks}, loss {loss:.0%}, seed {seed}, started within {spread:g} s")
    print(f"  GO everywhere {last_go - last_start:.3f} s after the last start")
    print(
        f"  {counts['datagrams']} datagrams sent, {counts['connections']} connections, {counts['bytes']} bytes on them"
    )
    print(f"  {gathering.world.steps} steps in {time.perf_counter() - began:.1f} s of real time")


def replay(seed: int) -> bool:
    """Runs one schedule and prints its steps; tells whether it held."""
    schedule = Schedule(seed, tracing=True)
    problem = ""
    try:
        schedule.run()
    except Exception:
        problem = traceback.format_exc()
    print("\n".join(schedule.gathering.world.trace))
    print(problem or f"seed {seed} holds")
    return not problem


def soak(first: int, seeds: int) -> bool:
    """Runs many schedules; tells whether all held."""
    failed = []
    for seed in range(first, first + seeds):
        try:
            Schedule(seed).run()
        except Exception as problem:
            failed.append(seed)
            print(f"seed {seed}: {type(problem).__name__}: {problem}  (python -m tests.lan replay {seed})")
    print(f"{seeds} schedules from seed {first}, {len(failed)} failed")
    return not failed


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.lan")
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("start")
    starting.add_argument("--ranks", type=int, default=8)
    starting.add_argument("--loss", type=float, default=0.0)
    starting.add_argument("--seed", type=int, default=0)
    starting.add_argument("--spread", type=float, default=3.0)
    replaying = commands.add_parser("replay")
    replaying.add_argument("seed", type=int)
    soaking = commands.add_parser("soak")
    soaking.add_argument("--seeds", type=int, default=1000)
    soaking.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "start":
        start(arguments.ranks, arguments.loss, arguments.seed, arguments.spread)
        return 0
    held = replay(arguments.seed) if arguments.command == "replay" else soak(arguments.first, arguments.seeds)
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
