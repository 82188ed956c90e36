"""Schedules by their seeds: which command runs one again, and which of many do not hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from tests.lan.agent_schedules import AgentSchedule, CrowdedAgentSchedule
from tests.lan.election_schedules import ElectionSchedule
from tests.lan.meshes import AgentMeshSchedule, MeshElectionSchedule, MeshSchedule
from tests.lan.round_schedules import RoundSchedule
from tests.lan.schedules import Schedule

AnySchedule: TypeAlias = Schedule | AgentSchedule | RoundSchedule

KINDS: dict[str, type[AnySchedule]] = {
    "ranks": Schedule,
    "election": ElectionSchedule,
    "mesh": MeshSchedule,
    "mesh of elections": MeshElectionSchedule,
    "agents": AgentSchedule,
    "mesh of agents": AgentMeshSchedule,
    "rounds": RoundSchedule,
}

REPLAY: dict[type[AnySchedule], str] = {
    Schedule: "replay",
    ElectionSchedule: "elect --replay",
    MeshSchedule: "mesh --replay",
    MeshElectionSchedule: "mesh --electing --replay",
    AgentSchedule: "agents --replay",
    CrowdedAgentSchedule: "agents --crowded --replay",
    AgentMeshSchedule: "mesh --agents --replay",
    RoundSchedule: "rounds --replay",
}
"""What `python -m tests.lan` is given, with a seed, to run one again."""


def failures(kind: type[AnySchedule], seeds: Iterable[int]) -> Iterator[str]:
    """Run schedules; tell what is wrong with each that does not hold, and how to run it again."""
    for seed in seeds:
        try:
            kind(seed).run()
        except Exception as problem:
            what = str(problem).partition("\n")[0]
            yield f"python -m tests.lan {REPLAY[kind]} {seed}: {type(problem).__name__}: {what}"
