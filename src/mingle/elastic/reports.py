"""The errors and warnings about sessions of agents: observation, likely cause and fix. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from mingle.elastic.quorum import Nodes, Policy
from mingle.errors import MingleError, counted
from mingle.protocol.machine import Identity
from mingle.protocol.member import LEFT_OUT_SECONDS
from mingle.text import few, nnodes_text
from mingle.wire.frames import Members, ProcessInfo, Refused


def left_out(identity: Identity, nodes: Nodes, refusal: Refused) -> str:
    """Return the warning of an agent that gets no seat, since it and a member can't reach each other."""
    job = "waits for it" if nodes.minimum == nodes.maximum else "goes on without it if enough nodes are left"
    return (
        f"job {identity.job!r}: this node gets no place: {refusal.detail}. Likely cause: {refusal.cause}. "
        f"Fix: {refusal.remedy.removesuffix('.')}. It asks again every {LEFT_OUT_SECONDS:.0f} s, and the job {job}"
    )


def nodes_lost(identity: Identity, policy: Policy, members: Members, lost: Sequence[str]) -> str:
    """Return the warning that names the nodes of a round that are lost, each with the reason if it is known."""
    here, least = len(members.present), policy.round_minimum(had_quorum=members.quorum)
    follows = "a new round begins without it" if len(lost) == 1 else "a new round begins without them"
    if here < least:
        follows = f"a new round takes {counted(least, 'node')}, and {here} {'is' if here == 1 else 'are'} here"
    return f"job {identity.job!r} has lost {few(lost, '; ')}; {follows}"


def small(identity: Identity, policy: Policy, joined: int) -> str:
    """Return the warning that another part of a split network could start the job as well."""
    nodes = policy.nodes
    safe = nnodes_text(nodes.founders, nodes.maximum)
    prevented = "" if policy.allow_minority else f" --nnodes={safe} would prevent it."
    return (
        f"job {identity.job!r} starts with {joined} of {nodes.maximum} nodes, since no other node came. In another "
        "part of a split network it could start a second time; the two would become one as soon as they meet."
        f"{prevented}"
    )


def shared_machine(identity: Identity, shared: str) -> str:
    """Return the warning that several agents of one machine are nodes of a job."""
    return (
        f"job {identity.job!r}: {shared}, and each counts as a node. Start one on each machine (under srun: "
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
