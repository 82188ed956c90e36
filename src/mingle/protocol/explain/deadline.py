"""The error of a process whose time is up: how far its job came, the likely cause, what was heard and tried. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from mingle.errors import AuthenticationError, ConnectivityError, DiscoveryTimeoutError, MingleError, counted
from mingle.protocol.explain import mesh_report
from mingle.protocol.explain.ladder import climb, kept_apart, surplus_status
from mingle.protocol.explain.observations import Agents, Diagnostics, NetworkFacts, Situation
from mingle.text import few, ranks_text
from mingle.wire.frames import Status


def timeout(situation: Situation, facts: NetworkFacts) -> MingleError:
    """Return the error of a process whose time is up."""
    heard = situation.diagnostics.without_mended(situation.deadline)
    s = replace(situation, diagnostics=heard, facts=facts, final=True)
    if (apart := kept_apart(s)) is not None:
        return AuthenticationError.explain(
            f"{_apart(s)}.\n{tried(facts, apart[0], silence=False)}", cause=apart[0], remedy=apart[1]
        )
    agents = s.agents
    if agents is not None and (refusal := agents.left_out) is not None:
        return ConnectivityError.explain(
            f"job {s.job!r}: this node got no place within {s.seconds:g} s: {refusal.detail}.",
            cause=refusal.cause,
            remedy=mesh_report.to_paste(refusal.remedy),
        )
    if agents is not None:
        s = replace(s, status=surplus_status(agents) or s.status or agents.best)
    status = s.status
    if status is None:
        text = _without_status(s)
    else:
        text = f"{_few_ranks(s, status) if agents is None else _few_nodes(s, status, agents)}{_history(s, status)}"
    cause, remedy = climb(s) or ("", "")
    unheard = status is None or not (status.refused or status.left or (agents is None and status.joined > 1))
    others = s.most is not None and s.most.joined > 1
    besides = "besides those that joined" if others else "of this job or of another"
    silence = f"no process was heard, {besides}" if unheard else ""
    lines = filter(None, (text, told_of(heard, silence), tried(facts, cause)))
    return DiscoveryTimeoutError.explain("\n".join(lines), cause=cause, remedy=remedy)


def _apart(s: Situation) -> str:
    signs, failures = s.diagnostics.secret_signs, s.diagnostics.secret_failures
    if s.secured:
        rejected = (
            f"{signs} of its datagrams were rejected because their signature is missing or wrong" if signs else ""
        )
        return f"job {s.job!r}: {few(filter(None, (rejected, *failures)), '; ')}"
    addresses = few(failure.partition(": ")[0] for failure in failures)
    return f"job {s.job!r} is hosted with a secret{f' at {addresses}' if failures else ''}, and {s.me} has none"


def _without_status(s: Situation) -> str:
    if s.connected:
        return (
            f"job {s.job!r} did not form within {s.seconds:g} s: its host accepted the connection of {s.me} "
            "and does not answer."
        )
    return f"job {s.job!r}: {s.host} was not found within {s.seconds:g} s by {s.me}."


def _few_ranks(s: Situation, status: Status) -> str:
    units = f"{s.unit}s"
    text = f"job {s.job!r} did not form within {s.seconds:g} s: {status.joined} of {status.world_size} {units} joined"
    if status.missing:
        text += f", missing {units}: {ranks_text(status.missing)}"
    elif status.hosts:
        text += f" ({status.hosts})"
    if status.departed:
        text += f", gone again: {units} {ranks_text(status.departed)}"
    if status.unconfirmed and not (status.missing or status.departed):
        text += f", no answer while {status.phase} from {units}: {ranks_text(status.unconfirmed)}"
    if not s.connected:
        text += f" (as last reported by {s.unit} 0, which can no longer be reached)"
    return f"{text}."


def _few_nodes(s: Situation, status: Status, agents: Agents) -> str:
    most = s.most or status
    there = f"{'node was' if agents.maximum == 1 else 'nodes were'} there ({'; '.join(most.present) or agents.who})"
    text = f"job {s.job!r} did not start within {s.seconds:g} s: {most.joined} of {agents.nodes} {there}"
    if most.joined > status.joined:
        text += f", {status.joined} at the end"
    text += f", and it lacks {status.lacks}." if status.lacks else f", {status.phase}."
    if agents.minimum < agents.maximum:
        founders = counted(agents.founders, "node")
        text += f"\n  a job of --nnodes={agents.minimum}:{agents.maximum} begins with {founders}"
    if agents.minimum < agents.founders:
        text += f" (with {agents.minimum} if --rdzv-conf allow_minority=1 is given)"
    missed = [who for who in agents.missed if who not in status.present and "missed: " not in status.lacks]
    return f"{text}\n  missed since the last session: {few(missed, '; ')}" if missed else text


def _history(s: Situation, status: Status) -> str:
    """Return the lines that say which processes left, or did not get in."""
    lines = (
        ("came and went", status.left),
        ("refused", status.refused),
        ("did not prove the secret", s.diagnostics.secret_failures),
    )
    return "".join(f"\n  {what}: {few(names, '; ')}" for what, names in lines if names)


def told_of(heard: Diagnostics, silence: str) -> str:
    """Return the lines that say which processes were heard, or else this one about silence.

    A rank that found its host at once has never asked, so silence of the other ranks is no sign of anything.
    """
    kinds = (
        ("hosts of this job heard", "; ".join(f"{name}: {text}" for name, text in heard.hosts.items())),
        ("the host's store", "; ".join(f"{name}: {text}" for name, text in heard.store_failures.items())),
        ("said of themselves", few((each.text for each in heard.failed.values()), "; ")),
        ("others that look for the same job", few(sorted(heard.seekers.values()), "; ")),
        ("the same job in other attempts", few((f"{a!r} by {who}" for a, who in heard.other_attempts.items()), "; ")),
        ("other job ids heard on this network", other_jobs(heard)),
    )
    lines = [f"  {what}: {text}" for what, text in kinds if text]
    return "\n".join(lines) or (silence and f"  {silence}")


def other_jobs(heard: Diagnostics) -> str:
    """Return which other jobs were heard."""
    return few((f"{job!r} by {who}" for job, who in sorted(heard.other_jobs.items())), "; ")


def tried(facts: NetworkFacts, cause: str, *, silence: bool = True) -> str:
    """Return the lines that say what was tried: interfaces, groups, port, datagrams, and what else is wrong here.

    Args:
        facts: what was tried.
        cause: what the same error names as the cause.
        silence: whether what explains that no process is heard belongs there.
    """
    lines = [
        f"  interfaces: {', '.join(facts.interfaces) or 'none'}; "
        f"groups {', '.join(facts.groups)} and UDP port {facts.port}"
    ]
    if facts.peers:
        lines.append(f"  peers: {few(facts.peers)}")
    rejected = ", ".join(f"{count} {reason}" for reason, count in sorted(facts.rejected.items()))
    lines.append(
        f"  datagrams: {facts.sent} sent, {facts.received} heard, "
        f"{facts.rejected.total()} rejected{f' ({rejected})' if rejected else ''}"
    )
    if facts.send_errors:
        errors = ", ".join(f"{name} {counted(count, 'time')}" for name, count in sorted(facts.send_errors.items()))
        lines.append(f"  sending failed: {errors}")
    lines += [f"  {failure}" for failure in facts.failures]
    lines += [
        f"  on this machine: {finding.observation}"
        for finding in facts.findings
        if finding.observation not in cause and (silence or not finding.explains_silence)
    ]
    return "\n".join(lines)
