"""The errors and notices of a machine in the middle of its work. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mingle.errors import ConflictError, InterfaceError, MingleError, counted
from mingle.protocol.explain import mesh_report
from mingle.protocol.explain.observations import Cause, own_name, size_name
from mingle.protocol.machine import Identity
from mingle.text import few
from mingle.wire.frames import Closed, ProcessInfo, Refused, Running

SHARED_MACHINE = "several torchruns of one machine are in this job"
"""What a host of agents says of its members, if it is so."""
_NO_NETWORK: Cause = (
    "the hosts have several networks and share none of them, or a firewall closes the one they share",
    "name the network they share with MINGLE_INTERFACE on every host, or open TCP between them.",
)


def refusal_text(refusal: Refused, unit: str) -> str:
    """Return what a refusal says, with a number that differs named as its user typed it."""
    reason = "--nnodes" if refusal.reason == "world size" and unit == "node" else refusal.reason
    return f"{reason} ({refusal.detail})"


def refused(identity: Identity, refusal: Refused) -> MingleError:
    """Return the error of a rank that the host proved to have no place for."""
    who = f" by {refusal.who}" if refusal.who is not None else ""
    unit, size = identity.who.unit, size_name(identity.who.unit)
    by = f" (this one by {identity.node_rank_from})" if identity.node_rank_from else ""
    cause, remedy = {
        "rank taken": (f"the same {unit} was started twice", "give every process its own rank, or end the other one."),
        "node rank taken": (
            f"two machines were given the same node rank{by}, or this node was started twice",
            "give each machine its own node rank, or none of them; if this node was started twice, end the other one.",
        ),
        "rank out of range": (f"the ranks don't fit the {size}", f"give ranks 0 … {size} - 1."),
        "world size": (f"the {unit}s were started with different {size}s", f"start every {unit} with the same {size}."),
        "version": ("the nodes have different versions of mingle", "install the same version on every node."),
        "ranks mixed": (
            "some processes were given a rank and some were not",
            "give every process a rank, or none of them.",
        ),
        "kind": ("torchrun agents and plain ranks use the same job id", "give them different job ids."),
    }.get(refusal.reason, ("the host is in another state than this process expects", "start the job again."))
    taken = refusal.reason == "rank taken" and refusal.who is not None
    happened = f"is already taken{who}" if taken else f"was refused{who}: {refusal_text(refusal, unit)}"
    me = own_name(unit, identity.rank)
    return ConflictError.explain(f"job {identity.job!r}: {me} {happened}.", cause=cause, remedy=remedy)


def running(identity: Identity, running: Running, seconds: float) -> MingleError:
    """Return the error for a job that is already running under the same id."""
    cause, remedy = _why_full(identity, running) or (
        "the job was started twice, has one process too many, or its last run has not ended",
        "give this run another job id, or end the other one first.",
    )
    return ConflictError.explain(
        f"job {identity.job!r} has been running for {running.seconds + seconds:.0f} s, and is full with "
        f"{counted(running.world_size, identity.who.unit)}, hosted by {running.host}. It has: {running.roster}",
        cause=cause,
        remedy=remedy,
    )


def _why_full(identity: Identity, running: Running) -> Cause | None:
    """Return why a running job has no place for an agent, if what it says of itself shows that."""
    if identity.kind != "agents":
        return None
    if running.world_size == 1:
        return (
            "a job of 1 node runs there: was --nnodes forgotten? torchrun's default is 1",
            "give every node the same --nnodes, or give this job another --rdzv-id.",
        )
    if SHARED_MACHINE in running.roster:
        return (
            f"{SHARED_MACHINE}, and took the place of this one",
            "start one torchrun on each machine; under srun: --ntasks-per-node=1.",
        )
    return None


def running_notice(identity: Identity, running: Running, seconds: float) -> str:
    """Return the line that says, soon, that a job is already running."""
    why = _why_full(identity, running)
    advice = ". Use another job id if these are two jobs." if why is None else f"; likely cause: {'; fix: '.join(why)}"
    return (
        f"job {identity.job!r} has been running for {running.seconds + seconds:.0f} s, hosted by {running.host}; "
        f"waiting for it to end{advice}"
    )


def reopened(identity: Identity, reason: str) -> str:
    """Return the notice that an epoch was voided after all ranks had joined."""
    return f"job {identity.job!r}: its formation was interrupted and starts again: {reason}"


def member_lost(identity: Identity, who: ProcessInfo, how: str) -> str:
    """Return why the store is closed: no rank must wait there for one that is gone."""
    return f"job {identity.job!r}: {who} was lost before its process group existed ({how})"


def host_lost_error(identity: Identity, loss: str) -> MingleError:
    """Return the error of a member whose host is gone after GO and before the process group existed."""
    return MingleError.explain(
        f"job {identity.job!r}: rank 0 was lost after the job had formed and before its process group existed "
        f"({loss}).",
        cause="its process ended, its machine is down, or the network between the two is",
        remedy="look at rank 0's output; start the job again.",
    )


def not_contiguous(identity: Identity) -> str:
    """Return the warning that ranks are spread over the nodes: mingle allows it, some frameworks do not."""
    return (
        f"job {identity.job!r}: the given ranks are not contiguous per node. Frameworks that compute "
        "rank = node_rank * devices + local_rank (Lightning, for one) will be wrong; give each node one "
        "block of ranks."
    )


def first_not_reached(identity: Identity, first: ProcessInfo) -> str:
    """Return the warning that another process than the first in order is rank 0."""
    return (
        f"job {identity.job!r}: {first} comes first in order, but not every process could connect to it, and so "
        f"this one ({identity.who}) is {identity.who.unit} 0. Allow incoming TCP connections there."
    )


def some_node_ranks(identity: Identity, without: Sequence[str]) -> str:
    """Return the warning that only some machines were given a node rank."""
    return (
        f"job {identity.job!r}: some machines were given a node rank, and these were not: {few(without)}. They come "
        "after the others, in the order of their names. Give each machine a node rank, or none of them."
    )


def two_hosts(identity: Identity, others: Sequence[ProcessInfo]) -> MingleError:
    """Return the error for two live rank 0s."""
    unit = identity.who.unit
    return ConflictError.explain(
        f"job {identity.job!r} has more than one {unit} 0: this process ({identity.who}) and {few(others, '; ')}.",
        cause=f"{unit} 0 was started twice, or two jobs share one job id",
        remedy=f"start one {unit} 0 only, or give the jobs different ids.",
    )


def closed_by_host(identity: Identity, closed: Closed) -> MingleError:
    """Return the error of a member whose host ended the session because of a conflict, or for want of a network."""
    reason = closed.reason
    if closed.unconnected:
        return mesh_report.error(identity.job, reason, closed.unconnected, closed.cause, closed.remedy)
    if closed.network:
        return InterfaceError.explain(reason, cause=_NO_NETWORK[0], remedy=_NO_NETWORK[1])
    unit = identity.who.unit
    return ConflictError.explain(
        f"job {identity.job!r}: {unit} 0 stopped the job before it formed: {reason}",
        cause=f"the conflict concerns every {unit} of the job",
        remedy=f"see {unit} 0's error; start the job again when that is fixed.",
    )


def no_common_network(identity: Identity, matrix: str) -> MingleError:
    """Return the error for hosts that don't all meet on one network."""
    unit = identity.who.unit
    return InterfaceError.explain(
        f"job {identity.job!r}: no address of {unit} 0 was reached by every {unit}:\n{matrix}",
        cause=_NO_NETWORK[0],
        remedy=_NO_NETWORK[1],
    )
