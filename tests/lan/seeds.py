"""Schedules by their seeds: which command runs one again, which of many do not hold, which find a planted mistake."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from tests.lan.agent_schedules import AgentSchedule
from tests.lan.election_schedules import ElectionSchedule
from tests.lan.meshes import AgentMeshSchedule, MeshElectionSchedule, MeshSchedule
from tests.lan.round_schedules import RoundSchedule
from tests.lan.schedules import Schedule

AnySchedule: TypeAlias = Schedule | AgentSchedule | RoundSchedule

REPLAY: dict[type[AnySchedule], str] = {
    Schedule: "replay",
    ElectionSchedule: "elect --replay",
    MeshSchedule: "mesh --replay",
    MeshElectionSchedule: "mesh --electing --replay",
    AgentSchedule: "agents --replay",
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


def search(kind: type[AnySchedule], seeds: Iterable[int], finding: str) -> None:
    """Run schedules until one finds what is looked for, which it raises."""
    for seed in seeds:
        try:
            kind(seed).run()
        except AssertionError as problem:
            if re.search(finding, str(problem)):
                print(f"found by schedule {seed}")
                raise
