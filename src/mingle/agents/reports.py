"""What is said of a gathering of agents when it did not work, or went another way than people expect. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mingle.agents.quorum import Nodes
from mingle.errors import DiscoveryTimeoutError, MingleError
from mingle.rules.machine import Identity
from mingle.wire.frames import Status, View


@dataclass(slots=True)
class Attendance:
    """When the most were there: deadlines pass one after another, and whoever is last should name the others, too."""

    best: Status | None = None

    @property
    def joined(self) -> int:
        """How many there were."""
        return 0 if self.best is None else self.best.joined

    def note(self, status: Status) -> None:
        """Keeps it, unless more were there before."""
        if status.joined >= self.joined:
            self.best = status


def incomplete(identity: Identity, nodes: Nodes, status: Status, seconds: float, attendance: Attendance) -> MingleError:
    """Returns the error of an agent whose time is up before its session had what it needs."""
    attendance.note(status)
    most = attendance.best or status
    were = "; ".join(most.present) or str(identity.who)
    observation = (
        f"job {identity.job!r} did not start within {seconds:g} s: {most.joined} of {nodes} nodes were there ({were})"
    )
    if most.joined > status.joined:
        observation += f", {status.joined} at the end"
    observation += f", and it lacks {status.lacks}." if status.lacks else f", {status.phase}."
    if status.left:
        observation += f"\n  came and went: {'; '.join(status.left[:8])}"
    if status.refused:
        observation += f"\n  refused: {'; '.join(status.refused[:8])}"
    if "majority" in status.lacks:
        cause = "the network is in parts, or the machines of the missing nodes are gone without a word"
        remedy = (
            "look at the network between the nodes; if you know that no other part of the job lives, start again with "
            "--rdzv-conf allow_minority=1."
        )
    else:
        cause = "the other nodes were not started, or with another --rdzv-id, or no network leads from them to here"
        remedy = "run the same line on every node; `mingle-discover list` shows which jobs the network knows."
    return DiscoveryTimeoutError.explain(observation, cause=cause, remedy=remedy)


def small(identity: Identity, nodes: Nodes, joined: int) -> str:
    """A warning: the job starts with so few that another half of a split network could start it, too."""
    return (
        f"job {identity.job!r} starts with {joined} of {nodes.maximum} nodes, since nobody else came. Were the network "
        "split, the other nodes could start it a second time; the two would become one as soon as they meet."
    )


def unsure(identity: Identity, joined: int) -> str:
    """A warning: the job goes on without the majority that was in it before."""
    return (
        f"job {identity.job!r} goes on with {joined} node(s), less than half of those before, since nobody else came. "
        "Should the others have gone on as well, the two become one as soon as they meet."
    )


def minority(identity: Identity, view: View, present: int) -> str:
    """Why a host gives its session up: the others may go on without it."""
    return (
        f"job {identity.job!r}: only {present} of {len(view.nodes)} nodes are reached; the others may be the majority, "
        "so this part of the job stops and looks for them"
    )


def superseded(identity: Identity, host: str) -> str:
    """Why a host gives its session up: the job runs elsewhere."""
    return f"job {identity.job!r} runs also on host {host}; this part of it stops and joins that one"


def ended(identity: Identity, reason: str) -> MingleError:
    """Returns the error for gathering again when the job has ended."""
    return MingleError.explain(
        f"job {identity.job!r} has ended: {reason}.",
        cause="the node that hosts it has finished, or has failed for good",
        remedy="look at the output of that node; start the job again on all nodes if it is to go on.",
    )
