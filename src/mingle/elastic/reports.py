"""The errors and warnings about sessions of agents: observation, likely cause and fix. Pure."""

from __future__ import annotations

from datetime import timedelta

from mingle.elastic.quorum import Memory, Policy
from mingle.errors import ConnectivityError, DiscoveryTimeoutError, MingleError, counted
from mingle.protocol import mesh_report, reports
from mingle.protocol.machine import Identity
from mingle.protocol.member import LEFT_OUT_SECONDS
from mingle.protocol.observations import Diagnostics, NetworkFacts
from mingle.wire.frames import ProcessInfo, Refused, Status

_EVERYWHERE = "run the same line on every node; `mingle-discover list` shows which jobs the network knows."
_TOO_LATE = "a place"
"""What a surplus agent lacks."""
_AGENTS = reports.Words(
    unproved="the other nodes",
    unproved_fix="give every node the same secret_file, MINGLE_SECRET_FILE or MINGLE_SECRET; a stranger can be "
    "ignored.",
    mistyped="a mistyped --rdzv-id",
    mistyped_fix=_EVERYWHERE,
)
_OTHERWISE = (
    "the other nodes were not started, have another --rdzv-id, or can't reach this node",
    _EVERYWHERE,
)
_MESH = "its own message has the likely cause and a command; `mingle-discover ping` on all nodes shows every pair."


def surplus(identity: Identity, memory: Memory) -> Status:
    """Return the status of an agent that waits for the end of a run that had no place for it."""
    maximum = memory.policy.nodes.maximum
    taken = "the only place was" if maximum == 1 else f"all {maximum} places were"
    lacks = f"{_TOO_LATE}: {taken} taken when this node came"
    return Status(joined=1, world_size=maximum, lacks=lacks, present=(str(identity.who),))


def incomplete(
    identity: Identity, memory: Memory, status: Status, seconds: float, diagnostics: Diagnostics, facts: NetworkFacts
) -> MingleError:
    """Return the error of an agent whose time is up before its session had what it needs."""
    memory.note_status(status)
    most = memory.best_status or status
    were = "; ".join(most.present) or str(identity.who)
    nodes = memory.policy.nodes
    places = "node was" if nodes.maximum == 1 else "nodes were"
    observation = (
        f"job {identity.job!r} did not start within {seconds:g} s: {most.joined} of {nodes} {places} there ({were})"
    )
    if most.joined > status.joined:
        observation += f", {status.joined} at the end"
    observation += f", and it lacks {status.lacks}." if status.lacks else f", {status.phase}."
    observation += _wanted(memory, status)
    observation += reports.history(status, diagnostics)
    alone = most.joined <= 1 and not status.left
    why = _why_incomplete(identity, memory, status, most, diagnostics, facts, alone=alone)
    otherwise = _OTHERWISE
    if alone and diagnostics.empty and not facts.peers:
        otherwise = reports.silence(
            "the other nodes were not started, ", "the output of the other nodes", "all nodes", facts
        )
    cause, remedy = why or otherwise
    lines = [
        observation,
        reports.heard(diagnostics, alone=not (status.left or status.refused)),
        reports.tried(facts, cause),
    ]
    return DiscoveryTimeoutError.explain("\n".join(filter(None, lines)), cause=cause, remedy=remedy)


def _wanted(memory: Memory, status: Status) -> str:
    """Return how many nodes the job needs, and which nodes of the last session are missing."""
    nodes = memory.policy.nodes
    text = f"\n  a job of --nnodes={nodes.minimum}:{nodes.maximum} begins with {counted(nodes.founders, 'node')}"
    if nodes.minimum < nodes.founders:
        text += f" (with {nodes.minimum} if --rdzv-conf allow_minority=1 is given)"
    if "missed: " in status.lacks:
        return text
    missed = [who for who in memory.missed(()) if who not in status.present]
    return f"{text}\n  missed since the last session: {reports.few(missed, '; ')}" if missed else text


def waiting(
    identity: Identity, memory: Memory, status: Status, diagnostics: Diagnostics, facts: NetworkFacts
) -> reports.Cause | None:
    """Return the best cause so far why an agent waits, for the progress line; None if nothing was observed."""
    if not (status.lacks or status.refused):
        return None
    why = _why_incomplete(identity, memory, status, status, diagnostics, facts, alone=False)
    return why or (reports.unheard(diagnostics, facts) if status.joined <= 1 and not status.left else None)


def _why_incomplete(
    identity: Identity,
    memory: Memory,
    status: Status,
    most: Status,
    diagnostics: Diagnostics,
    facts: NetworkFacts,
    *,
    alone: bool,
) -> reports.Cause | None:
    certain: reports.Cause | None = None
    if diagnostics.failed:
        certain = reports.failed(diagnostics, ())
    elif memory.had_quorum and status.joined < memory.policy.nodes.founders:
        certain = (
            "the missing nodes have ended or are cut off; if they are cut off, they may run the job without this one",
            "start the missing nodes again, or repair the network; where two parts of the job may run at once, give "
            "every node --rdzv-conf allow_minority=1.",
        )
    elif status.lacks.startswith(_TOO_LATE):
        _, others = memory.ran
        certain = (
            f"nodes came while the job ran on others{f' ({others})' if others else ''}, and wait for its end. "
            "Its host has gone without a good-bye: it was ended by a signal, or its network was cut",
            "if that run has ended, start the nodes of this one again; else give this one another --rdzv-id.",
        )
    elif status.refused and ": mesh (" in status.refused[-1]:
        certain = f"a node and another one can't reach each other: {status.refused[-1]}", _MESH
    elif status.refused:
        certain = f"a node was started with settings that contradict the others: {status.refused[-1]}", _EVERYWHERE
    else:
        certain = reports.shared_address(status.left, diagnostics, facts)
    return reports.likely_cause(
        identity.job,
        diagnostics,
        facts,
        _AGENTS,
        alone=alone,
        certain=certain,
        heard=reports.not_joined(reports.outsiders(identity, diagnostics, most), diagnostics, facts)
        or reports.in_folders(diagnostics, facts, status),
    )


def left_out(identity: Identity, refusal: Refused) -> str:
    """Return the warning of an agent that gets no seat, since it and a member can't reach each other."""
    return (
        f"job {identity.job!r}: this node gets no place: {refusal.detail}. Likely cause: {refusal.cause}. "
        f"Fix: {refusal.remedy.removesuffix('.')}. It asks again every {LEFT_OUT_SECONDS:.0f} s, and the job goes on "
        "without it"
    )


def stayed_left_out(identity: Identity, refusal: Refused, seconds: float) -> MingleError:
    """Return the error of such an agent whose time is up."""
    return ConnectivityError.explain(
        f"job {identity.job!r}: this node got no place within {seconds:g} s: {refusal.detail}.",
        cause=refusal.cause,
        remedy=mesh_report.to_paste(refusal.remedy),
    )


def small(identity: Identity, policy: Policy, joined: int) -> str:
    """Return the warning that another part of a split network could start the job as well."""
    nodes = policy.nodes
    prevented = "" if policy.allow_minority else f" --nnodes={nodes.founders}:{nodes.maximum} would prevent it."
    return (
        f"job {identity.job!r} starts with {joined} of {nodes.maximum} nodes, since no other node came. In another "
        "part of a split network it could start a second time; the two would become one as soon as they meet."
        f"{prevented}"
    )


def shared_machine(identity: Identity, doubts: str) -> str:
    """Return the warning that several agents of one machine are nodes of a job."""
    return (
        f"job {identity.job!r}: {doubts}, and each counts as a node. Start one on each machine (under srun: "
        "--ntasks-per-node=1), unless they are meant to share it"
    )


def clocks_apart(identity: Identity, behind: ProcessInfo, ahead: ProcessInfo, seconds: int) -> str:
    """Return the warning that the clocks of two nodes differ by more than a restart takes."""
    return (
        f"job {identity.job!r}: the clock of host {ahead.hostname} ({ahead.address}) is {timedelta(seconds=seconds)} "
        f"ahead of that of host {behind.hostname} ({behind.address}). MINGLE_GENERATION follows the highest clock, so "
        "after a restart without that node a newer session can have a lower number. fix: set the clocks of all nodes "
        "by NTP (`timedatectl` shows whether that works)"
    )


def address_gone(identity: Identity) -> str:
    """Return why a host gives up its session: no other agent can reach its store."""
    return f"job {identity.job!r}: the address of the store is gone from the machine of its host"


def too_few(identity: Identity, present: int, wanted: int) -> str:
    """Return why a host ends its session: other agents can have founded another one."""
    return (
        f"job {identity.job!r}: {counted(present, 'node')} can be reached, and it takes {wanted} to keep the session; "
        "this part of the job stops and looks for the others"
    )


def comes_second(identity: Identity, host: str) -> str:
    """Return why a host ends its session: the job also runs elsewhere."""
    return f"job {identity.job!r} also runs on {host}; this part of it stops and joins that one"


def closed_here(identity: Identity) -> MingleError:
    """Return the error for gathering in an agent that has closed its part in the job, or in a fork of it."""
    return MingleError.explain(
        f"this agent has closed its part in job {identity.job!r}.",
        cause="its shutdown() was called, its start was interrupted, or this process is a fork of the agent",
        remedy="start a new agent.",
    )


def ended(identity: Identity, reason: str) -> MingleError:
    """Return the error for gathering again when the job has ended."""
    return MingleError.explain(
        f"job {identity.job!r} has ended: {reason}.",
        cause="the node that hosts it has finished, or has failed for good",
        remedy="look at the output of that node; start the job again on all nodes if it has to continue.",
    )
