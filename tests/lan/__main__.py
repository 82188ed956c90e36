"""Runs the simulated network by hand.

``python -m tests.lan start --ranks 1000 --loss 0.3 --seed 7 [--mesh on]``
    a whole job, its ranks started within three seconds, and its figures;
``python -m tests.lan replay SEED``
    one random schedule, step by step; with ``--events-of m2`` before it, all that the processes on m2 were told;
``python -m tests.lan soak --seeds 20000 [--first 0]``
    many of them; prints the seeds that fail;
``python -m tests.lan elect --seeds 10000 [--first 0]``, ``elect --replay SEED``, ``elect --ranks 1000 [--spread 1]``
    the same for processes without a rank: many schedules, one of them, or a whole job and its figures (``--order``:
    on machines that have an order);
``python -m tests.lan agents --seeds 10000 [--first 0]``, ``agents --replay SEED``
    the same for agents: many schedules, or one of them (``--crowded``: of more agents than the job can have);
``python -m tests.lan rounds --seeds 10000 [--first 0]``, ``rounds --replay SEED``
    the same for the rounds of agents;
``python -m tests.lan mesh --seeds 10000 [--first 0]``, ``mesh --replay SEED``, with ``--electing`` without ranks,
    with ``--agents`` of agents
    the same for jobs that need a mesh: many schedules, or one of them;
``python -m tests.lan planted [--family ranks] [--level quick]``
    look for each planted mistake, in all levels of the suite or up to this one: whether it is still reached, and which
    schedule finds it;
``python -m tests.lan late --ranks 10000 --loss 0.3 --waiting 60``
    all ranks wait so long for rank 0: what that sends, and how soon they know it then;
``python -m tests.lan crowd --ranks 1024 --cores 2``, ``crowd --ranks 1024 --loss 0.3``
    all start at one moment on so many cores, or each on its own, and only rank 0's work takes time;
``python -m tests.lan nodes --nodes 128 --ranks-on-each 8 --loss 0.3``
    the same on so many nodes, on each of which the ranks share its cores and work takes what was measured of it.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback

from mingle.protocol.machine import Mesh
from tests.lan.agent_schedules import AgentSchedule, CrowdedAgentSchedule
from tests.lan.crowd import crowd, nodes
from tests.lan.election_schedules import ElectionSchedule
from tests.lan.gathering import Gathering
from tests.lan.meshes import AgentMeshSchedule, MeshElectionSchedule, MeshSchedule
from tests.lan.planted import FAMILIES, LEVELS, MISTAKES, search
from tests.lan.planting import Level
from tests.lan.round_schedules import RoundSchedule
from tests.lan.scale import late_host
from tests.lan.schedules import Schedule
from tests.lan.seeds import AnySchedule, failures


def start(ranks: int, loss: float, seed: int, spread: float, mesh: Mesh) -> None:
    """Start a job and print what it cost."""
    gathering = Gathering(seed, size=ranks, loss=loss, timeout=300, mesh=mesh)
    began = time.perf_counter()
    gathering.everybody([gathering.rng.uniform(0, spread) for _ in range(ranks)])
    gathering.run()
    gathering.expect_formed()
    last_start = max(process.started_at for process in gathering.processes)
    last_go = max(process.formed_at or 0.0 for process in gathering.processes)
    counts = gathering.world.counts
    print(f"ranks {ranks}, loss {loss:.0%}, seed {seed}, mesh {mesh}, started within {spread:g} s")
    print(f"  GO everywhere {last_go - last_start:.3f} s after the last start")
    print(
        f"  {counts['datagrams']} datagrams sent, {counts['connections']} connections, {counts['bytes']} bytes on them"
    )
    print(f"  {gathering.world.steps} steps in {time.perf_counter() - began:.1f} s of real time")


def late(ranks: int, loss: float, waiting: float, seed: int) -> None:
    """Have everybody wait for rank 0 and print what it cost."""
    began = time.perf_counter()
    figures = late_host(ranks, loss=loss, waiting=waiting, seed=seed)
    print(f"ranks {ranks}, loss {loss:.0%}, seed {seed}, rank 0 starts {waiting:g} s after the others have settled")
    print(f"  waiting: {figures.waiting_per_minute:.0f} datagrams per minute from all of them together")
    shares = ", ".join(f"{share:.0%} {figures.percentile(share):.3f}" for share in (0.5, 0.99, 1.0))
    print(f"  seconds from its OFFER until they know it: {shares}; GO everywhere: {figures.formed:.3f}")
    print(f"  {figures.datagrams} datagrams from its OFFER to GO; {time.perf_counter() - began:.0f} s of real time")


def start_at_once(ranks: int, cores: int | None, loss: float, seed: int) -> None:
    """Start a job on processors for which it is work, and print what it cost."""
    figures = crowd(ranks, cores=cores, loss=loss, seed=seed)
    where = "each on its own, rank 0's work takes time" if cores is None else f"all on {cores} cores"
    print(f"ranks {ranks}, {where}, loss {loss:.0%}, seed {seed}, all start at one moment")
    print(f"  GO everywhere {figures.formed:.3f} s after that, {1000 * figures.formed / ranks:.1f} ms a rank")
    print(f"  {figures.datagrams} datagrams sent, {figures.connections} connections, {figures.epochs} confirmations")


def start_on_nodes(count: int, ranks_on_each: int, loss: float, seed: int) -> None:
    """Start a job on nodes of so many ranks, and print what it cost."""
    figures = nodes(count, ranks_on_each, loss=loss, seed=seed)
    print(f"{count} nodes with {ranks_on_each} ranks each, loss {loss:.0%}, seed {seed}, all start at one moment")
    print(f"  GO everywhere {figures.formed:.3f} s after that")
    print(f"  {figures.datagrams} datagrams sent, {figures.connections} connections, {figures.epochs} confirmations")


STARTS = ("random", "rising", "falling")
"""The orders of machines, by the moments of their starts."""


def elect(ranks: int, loss: float, seed: int, spread: float, order: str | None) -> None:
    """Start a job without ranks and print what it cost."""
    gathering = Gathering(seed, size=ranks, loss=loss, timeout=300)
    starts = sorted(gathering.rng.uniform(0, spread) for _ in range(ranks))
    if order is not None:
        places = random.Random(seed).sample(range(ranks), ranks) if order == "random" else list(range(ranks))
        for number, place in enumerate(reversed(places) if order == "falling" else places):
            gathering.orders[f"m{number}"] = b"\x01" + place.to_bytes(4, "big")
    hosted: set[bytes] = set()
    gathering.world.watchers.append(lambda process: hosted.add(process.host.session) if process.hosts else None)
    for number, at in enumerate(starts):
        gathering.elector(f"m{number}", at=at)
    began = time.perf_counter()
    gathering.run()
    gathering.expect_formed()
    last_start = max(process.started_at for process in gathering.processes)
    last_go = max(process.formed_at or 0.0 for process in gathering.processes)
    counts = gathering.world.counts
    print(f"{ranks} processes without a rank, loss {loss:.0%}, seed {seed}, started within {spread:g} s")
    print(f"  {len(hosted)} opened a session; GO everywhere {last_go - last_start:.3f} s after the last start")
    print(f"  {counts['datagrams']} datagrams sent, {counts['connections']} connections")
    print(f"  {gathering.world.steps} steps in {time.perf_counter() - began:.1f} s of real time")


def replay(kind: type[AnySchedule], seed: int, of: str | None) -> bool:
    """Run one schedule and print its steps, or all that the processes of a name were told; tell whether it held."""
    schedule = kind(seed, tracing=True)
    problem = ""
    try:
        schedule.run()
    except Exception:
        problem = traceback.format_exc()
    world = schedule.gathering.world
    for process in world.processes:
        if of is not None and of in process.name:
            print(f"{process.name} was told\n{process.recording}")
    if of is None:
        print("\n".join(world.trace))
    print(problem or f"seed {seed} holds")
    return not problem


def soak(kind: type[AnySchedule], first: int, seeds: int) -> bool:
    """Run many schedules; tell whether all held."""
    failed = 0
    for failure in failures(kind, range(first, first + seeds)):
        failed += 1
        print(failure)
    print(f"{seeds} schedules from seed {first}, {failed} failed")
    return not failed


def look_for_planted(family: str | None, level: Level) -> bool:
    """Look for the planted mistakes, and print which are reached and found; tell whether all are."""
    chosen = [
        each for each in MISTAKES if family in (None, each.family) and LEVELS.index(each.level) <= LEVELS.index(level)
    ]
    widths = [max((len(getattr(each, column)) for each in chosen), default=0) for column in ("name", "family")]
    reached = found = 0
    for each in chosen:
        result = search(each)
        reached += all(result.reached.values())
        found += result.found_by is not None
        times = ", ".join(f"{seam} {times}" for seam, times in result.reached.items())
        seed = f"found by seed {result.found_by}" if result.found_by is not None else f"NOT FOUND by {result.looked}"
        print(f"{each.name:{widths[0]}}  {each.family:{widths[1]}}  {seed}; reached: {times}", flush=True)
    print(f"planted {len(chosen)}, reached {reached}, found {found}")
    return len(chosen) == reached == found


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.lan")
    parser.add_argument("--events-of", metavar="PROCESS", help="of a replay: show what these processes were told")
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("start")
    starting.add_argument("--ranks", type=int, default=8)
    starting.add_argument("--loss", type=float, default=0.0)
    starting.add_argument("--seed", type=int, default=0)
    starting.add_argument("--spread", type=float, default=3.0)
    starting.add_argument("--mesh", choices=["on", "warn", "off"], default="off")
    being_late = commands.add_parser("late")
    being_late.add_argument("--ranks", type=int, default=1000)
    being_late.add_argument("--loss", type=float, default=0.3)
    being_late.add_argument("--waiting", type=float, default=60.0)
    being_late.add_argument("--seed", type=int, default=0)
    crowding = commands.add_parser("crowd")
    crowding.add_argument("--ranks", type=int, default=1024)
    crowding.add_argument("--cores", type=int)
    crowding.add_argument("--loss", type=float, default=0.0)
    crowding.add_argument("--seed", type=int, default=1)
    on_nodes = commands.add_parser("nodes")
    on_nodes.add_argument("--nodes", type=int, default=128)
    on_nodes.add_argument("--ranks-on-each", type=int, default=8)
    on_nodes.add_argument("--loss", type=float, default=0.3)
    on_nodes.add_argument("--seed", type=int, default=1)
    planting = commands.add_parser("planted")
    planting.add_argument("--family", choices=FAMILIES, help="of the schedules that look for them")
    planting.add_argument("--level", choices=LEVELS, default="soak")
    replaying = commands.add_parser("replay")
    replaying.add_argument("seed", type=int)
    soaking = commands.add_parser("soak")
    soaking.add_argument("--seeds", type=int, default=1000)
    soaking.add_argument("--first", type=int, default=0)
    electing = commands.add_parser("elect")
    what = electing.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", type=int)
    what.add_argument("--replay", type=int, metavar="SEED")
    what.add_argument("--ranks", type=int)
    electing.add_argument("--first", type=int, default=0)
    electing.add_argument("--loss", type=float, default=0.0)
    electing.add_argument("--seed", type=int, default=0)
    electing.add_argument("--spread", type=float, default=1.0)
    electing.add_argument("--order", choices=STARTS, help="of the machines, by the moments of their starts")
    for name in ("agents", "rounds", "mesh"):
        gathering = commands.add_parser(name)
        which = gathering.add_mutually_exclusive_group(required=True)
        which.add_argument("--seeds", type=int)
        which.add_argument("--replay", type=int, metavar="SEED")
        gathering.add_argument("--first", type=int, default=0)
        if name == "agents":
            gathering.add_argument("--crowded", action="store_true", help="of more agents than the job can have")
        if name == "mesh":
            gathering.add_argument("--electing", action="store_true", help="of processes without ranks")
            gathering.add_argument("--agents", action="store_true", help="of agents of torchrun")
    arguments = parser.parse_args()
    if arguments.command == "start":
        start(arguments.ranks, arguments.loss, arguments.seed, arguments.spread, arguments.mesh)
        return 0
    if arguments.command == "late":
        late(arguments.ranks, arguments.loss, arguments.waiting, arguments.seed)
        return 0
    if arguments.command == "crowd":
        start_at_once(arguments.ranks, arguments.cores, arguments.loss, arguments.seed)
        return 0
    if arguments.command == "nodes":
        start_on_nodes(arguments.nodes, arguments.ranks_on_each, arguments.loss, arguments.seed)
        return 0
    if arguments.command == "planted":
        held = look_for_planted(arguments.family, arguments.level)
    elif arguments.command == "replay":
        held = replay(Schedule, arguments.seed, arguments.events_of)
    elif arguments.command == "soak":
        held = soak(Schedule, arguments.first, arguments.seeds)
    elif arguments.command in ("agents", "rounds", "mesh"):
        kind: type[AnySchedule] = AgentSchedule if arguments.command == "agents" else RoundSchedule
        if arguments.command == "agents" and arguments.crowded:
            kind = CrowdedAgentSchedule
        if arguments.command == "mesh":
            kind = AgentMeshSchedule if arguments.agents else MeshSchedule
            kind = MeshElectionSchedule if arguments.electing else kind
        if arguments.replay is None:
            held = soak(kind, arguments.first, arguments.seeds)
        else:
            held = replay(kind, arguments.replay, arguments.events_of)
    elif arguments.replay is not None:
        held = replay(ElectionSchedule, arguments.replay, arguments.events_of)
    elif arguments.seeds is not None:
        held = soak(ElectionSchedule, arguments.first, arguments.seeds)
    else:
        elect(arguments.ranks, arguments.loss, arguments.seed, arguments.spread, arguments.order)
        held = True
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
