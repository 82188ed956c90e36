"""What is said of a gathering of agents when it did not work, or went another way than people expect. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mingle.agents.quorum import Nodes
from mingle.errors import DiscoveryTimeoutError, MingleError
from mingle.rules import reports
from mingle.rules.machine import Evidence, Identity, NetworkFacts
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


def incomplete(
    identity: Identity,
    nodes: Nodes,
    status: Status,
    seconds: float,
    attendance: Attendance,
    evidence: Evidence,
    facts: NetworkFacts,
) -> MingleError:
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
        observation += f"\n  came and went: {reports.few(status.left, '; ')}"
    if status.refused:
        observation += f"\n  refused: {reports.few(status.refused, '; ')}"
    if evidence.secret_failures:
        observation += f"\n  did not prove the secret: {reports.few(evidence.secret_failures, '; ')}"
    cause, remedy = _why_incomplete(status, most, evidence, facts)
    return DiscoveryTimeoutError.explain(
        f"{observation}\n{reports.heard(evidence)}\n{reports.tried(facts)}", cause=cause, remedy=remedy
    )


def _why_incomplete(status: Status, most: Status, evidence: Evidence, facts: NetworkFacts) -> tuple[str, str]:
    """Returns the likely cause and the way out; what is surely so comes before what may be."""
    everywhere = "run the same line on every node; `mingle-discover list` shows which jobs the network knows."
    if "majority" in status.lacks:
        return (
            "the network is in parts, or the machines of the missing nodes are gone without a word",
            "look at the network between the nodes; if you know that no other part of the job lives, start again with "
            "--rdzv-conf allow_minority=1.",
        )
    if status.refused:
        return "a node was started with settings that contradict the others (see what was refused)", everywhere
    if sure := reports.failing(facts):
        return sure.observation, f"{sure.remedy}."
    if evidence.secret_failures or evidence.secret_signs:
        return (
            "the other nodes were started without a secret or with another one (somebody speaks of this job and has "
            "not ours), or were never started",
            "give every node the same secret_file, MINGLE_SECRET_FILE or MINGLE_SECRET; a stranger can be ignored.",
        )
    if spoken := reports.versions(facts):
        return (
            f"another protocol {reports.few(spoken)} is spoken on this network: an incompatible mingle",
            "install the same version of multinode-mingle on every node.",
        )
    if len(evidence.seekers) >= most.joined and not status.left:
        # All that were there, but for us, may be among those heard: of this many at least one was not.
        return (
            "not all that were heard to look for the job have joined it. Their firewall drops what comes from here, "
            "or ours drops their TCP connections",
            "run `mingle-discover doctor` on both nodes, or `mingle-discover ping` on all of them at once.",
        )
    if evidence.other_jobs:
        others = reports.few(repr(job) for job in sorted(evidence.other_jobs))
        return (
            f"the other nodes were not started, or with another --rdzv-id: {others} is on this network",
            everywhere,
        )
    if facts.findings:
        return facts.findings[0].observation, f"{facts.findings[0].remedy}."
    return (
        "the other nodes were not started, or with another --rdzv-id, or no network leads from them to here",
        everywhere,
    )


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
