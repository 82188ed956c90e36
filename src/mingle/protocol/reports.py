"""The errors and notices of the protocol: each error gives the observation, the likely cause and a fix. Pure.

:func:`likely_cause` is the one ladder from what was observed to the cause that is named. Ranks, agents and
``mingle-discover find`` use it, each with sentences of its own.

The texts call a member by its `ProcessInfo.unit`: a rank, or a node where ``mingle-run`` numbers machines.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from mingle.diagnostics import CheckStatus, Detour
from mingle.errors import (
    AuthenticationError,
    ConflictError,
    DiscoveryTimeoutError,
    InterfaceError,
    MingleError,
    counted,
)
from mingle.protocol import mesh_report
from mingle.protocol.machine import Identity
from mingle.protocol.observations import Diagnostics, NetworkFacts
from mingle.wire.frames import Closed, ProcessInfo, Refused, Running, Status

Cause: TypeAlias = tuple[str, str]
"""A likely cause and its fix."""

_SHOWN = 8
_RESEMBLING = 0.7
"""The similarity (difflib's ratio) from which on a job id can be a misspelling of another one."""
_MISSPELT = 2
"""The most characters in which it differs then, unless one id contains the other: ada-resnet and bob-resnet are two
people's."""
LINE_JOB_ID = "mingle-run-line-"
"""How a job id begins that ``mingle-run`` has made of its command line. Its user has never seen it."""
_NO_NETWORK_CAUSE = "the hosts have several networks and share none of them, or a firewall closes the one they share"
_NO_NETWORK_REMEDY = "name the network they share with MINGLE_INTERFACE on every host, or open TCP between them."


_SILENT: Cause = (
    "the host's process is stopped or hangs, or its network was cut",
    "look at the output of the host; end it if it hangs, and start the job again.",
)
SHARED_MACHINE = "two torchruns of one machine are in this job"
"""What a host of agents says of its members, if it is so."""
_SHORT_FIX = 100
"""The longest fix that stands in the progress line, in characters."""


def few(names: Iterable[object], separator: str = ", ") -> str:
    """Return the first few of these names, and how many more there are."""
    every = [str(name) for name in names]
    shown = separator.join(every[:_SHOWN])
    return shown if len(every) <= _SHOWN else f"{shown} and {len(every) - _SHOWN} more"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as people write them: ``3, 7-9``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    # Two neighbors stay apart: "3, 4" is as short as "3-4" and easier to search for.
    words = [
        f"{first}-{last}" if last - first > 1 else ", ".join(str(rank) for rank in range(first, last + 1))
        for first, last in spans
    ]
    return few(words) if words else "none"


def _me(identity: Identity) -> str:
    return f"{identity.who.unit} {identity.rank}" if identity.rank is not None else "this process"


def _look(unit: str) -> str:
    return f"look at the output of the missing {unit}s; `mingle-discover list` shows who is there."


def _size(unit: str) -> str:
    return "--nnodes value" if unit == "node" else "world size"


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
        if finding.observation != cause and (silence or not finding.explains_silence)
    ]
    return "\n".join(lines)


def heard(diagnostics: Diagnostics, *, alone: bool = True) -> str:
    """Return the lines that say which processes were heard; that none was, only if ``alone``.

    A rank that found its host at once has never asked, so silence of the other ranks is no sign of anything.
    """
    lines = []
    if diagnostics.hosts:
        lines.append("  hosts of this job heard: " + "; ".join(f"{n}: {t}" for n, t in diagnostics.hosts.items()))
    if diagnostics.store_failures:
        lines.append("  the host's store: " + "; ".join(f"{n}: {t}" for n, t in diagnostics.store_failures.items()))
    if diagnostics.failed:
        lines.append(f"  said of themselves: {few((each.text for each in diagnostics.failed.values()), '; ')}")
    if diagnostics.seekers:
        lines.append(f"  others that look for the same job: {few(sorted(diagnostics.seekers.values()), '; ')}")
    if diagnostics.other_attempts:
        others = (f"{attempt!r} by {who}" for attempt, who in diagnostics.other_attempts.items())
        lines.append(f"  the same job in other attempts: {few(others, '; ')}")
    if diagnostics.other_jobs:
        others = (f"{job!r} by {who}" for job, who in sorted(diagnostics.other_jobs.items()))
        lines.append(f"  other job ids heard on this network: {few(others, '; ')}")
    if not lines and alone:
        lines.append("  no process was heard, of this job or of another")
    return "\n".join(lines)


# --- the ladder from what was observed to the likely cause ---------------------------------------------------------


class Words(Struct, frozen=True, kw_only=True):
    """The sentences of the ladder that differ between ranks, agents and ``mingle-discover find``."""

    unproved: str
    """The processes that can lack our secret."""
    unproved_fix: str
    mistyped: str = "a mistyped job id"
    mistyped_fix: str
    joins: bool = True
    """Whether a rank waits, which no formed job takes in: such a job is not the one that was meant."""


def _words(unit: str) -> Words:
    return Words(
        unproved=f"the missing {unit}s",
        unproved_fix=f"give every {unit} the same MINGLE_SECRET or MINGLE_SECRET_FILE; a stranger can be ignored.",
        mistyped_fix=f"start every {unit} with the same job id.",
    )


def likely_cause(
    job: str,
    diagnostics: Diagnostics,
    facts: NetworkFacts,
    words: Words,
    *,
    alone: bool,
    certain: Cause | None = None,
    heard: Cause | None = None,
) -> Cause | None:
    """Return the likely cause and the fix: the first rung of the ladder that applies; None if nothing was observed.

    A check of this machine that fails is certain to break things. A check that only warns is named last, and only if no
    process was heard. docs/causes.md has the table.

    Args:
        job: the job id.
        diagnostics: what was heard.
        facts: what was tried, and the findings of the local checks.
        words: the sentences for the reader.
        alone: whether no other process has joined.
        certain: the cause that the host or its connection has shown.
        heard: the cause if processes that look for the job were heard and have not joined it.
    """
    rungs = (
        certain,
        unreached(diagnostics, facts),
        failing(facts),
        _another_secret(diagnostics, words),
        incompatible(facts),
        _another_attempt(diagnostics) if diagnostics.other_attempts else None,
        heard,
        _mistyped_id(job, diagnostics, words),
        _kept_to_itself(facts),
        suspect(facts, diagnostics) if alone else None,
        unanswered(facts) if alone else None,
    )
    return next((rung for rung in rungs if rung is not None), None)


def unreached(diagnostics: Diagnostics, facts: NetworkFacts) -> Cause | None:
    """Return the cause if a process hears the host of a session and can't connect to it."""
    own = [pair for pair in diagnostics.unreached if diagnostics.member in pair]
    pairs = [*own, *(pair for pair in diagnostics.unreached if pair not in own)]
    if not pairs:
        return None
    lines = dict[frozenset[bytes], str]()
    for pair in pairs:
        each = diagnostics.unreached[pair]
        if pair[::-1] in diagnostics.unreached:
            text = f"{each.caller} and {each.host} hear each other and do not reach each other over TCP"
        else:
            text = f"{each.caller} hears {each.host} and does not reach it over TCP"
        lines.setdefault(frozenset(pair), f"{text} ({each.how})" if each.how else text)
    rules = [each for each in facts.findings if each.name == "tcp" and each.status is not CheckStatus.PASS]
    if own and (astray := _astray(facts)):
        return astray
    if any(Detour.MARK in diagnostics.unreached[pair].how for pair in pairs):
        return (
            f"{few(lines.values(), '; ')}: its kernel sends by another interface than the one that leads there, or by "
            "one without a carrier",
            "look at the likely cause there, which has the route to add.",
        )
    if any("EADDRNOTAVAIL" in diagnostics.unreached[pair].how for pair in pairs):
        return (
            f"{few(lines.values(), '; ')}: no port is free there for a connection to leave from "
            "(net.ipv4.ip_local_port_range)",
            "look there with `ss -tuan` at what holds them, or widen the range.",
        )
    if rules and own:
        return f"{few(lines.values(), '; ')}: {rules[0].observation}", rules[0].fix
    if (known := known_of(lines.values(), diagnostics, facts)) is not None:
        return f"{few(lines.values(), '; ')}: {known[0]}", known[1]
    if any("ENETUNREACH" in diagnostics.unreached[pair].how for pair in pairs):
        return (
            f"{few(lines.values(), '; ')}: it has no route to that address, since the netmasks or the subnets differ",
            "compare `ip address` and `ip route` on both machines, and give them addresses of one subnet or the route.",
        )
    return (
        f"{few(lines.values(), '; ')}: a firewall on one of them or between them, an address that two machines have, "
        "or one of another network",
        "allow TCP between them (`mingle-discover doctor` shows the rule), or set MINGLE_INTERFACE.",
    )


def failed(diagnostics: Diagnostics, awaited: Collection[int]) -> Cause | None:
    """Return the cause if a process that is awaited has said that it failed: one of these ranks, or one without."""
    gone = [each.text for each in diagnostics.failed.values() if each.rank is None or each.rank in awaited]
    return (few(gone, "; "), "look at its output, and start it again.") if gone else None


def known_of(processes: Iterable[str], diagnostics: Diagnostics, facts: NetworkFacts) -> Cause | None:
    """Return what is known of the addresses of processes that keeps connections with them from working.

    Args:
        processes: as reports name them, with their addresses.
        diagnostics: what was heard.
        facts: what is known of the network.
    """
    named = dict.fromkeys(_machines(processes))
    for name, address in named:
        if (source := diagnostics.translated.get(address)) is not None:
            return (
                f"host {name} announces {address}, and its datagrams come from {source}: address translation (NAT) "
                "hides it",
                "set MINGLE_ADVERTISE there to an address that leads to it from here, and forward the ports.",
            )
    for name, address in named:
        if (shared := _shared(name, address, diagnostics, facts)) is not None:
            return shared
    for _, address in named:
        machines, hardware = diagnostics.machines.get(address, {}), facts.neighbors.get(address)
        if address in diagnostics.off_link and not _also_on_link(machines, diagnostics):
            return (
                f"{address} is on this network and in none of the subnets here ({few(facts.interfaces)}), so the "
                "netmasks or the subnets differ",
                "compare `ip address` on both machines, and give them addresses and netmasks of one subnet.",
            )
        if machines and hardware is not None and not hardware:
            return (
                f"{address} is heard and does not answer ARP, so no packet from here reaches it: its link carries "
                "packets in one direction only, or another machine has its hardware address",
                "look at the switch port and at `ip link` on both machines; no rule for TCP or UDP is the reason.",
            )
    return None


def shared_address(processes: Iterable[str], diagnostics: Diagnostics, facts: NetworkFacts) -> Cause | None:
    """Return the cause if another machine has the address, or the hardware address, of one of these processes."""
    shared = (_shared(name, address, diagnostics, facts) for name, address in _machines(processes))
    return next((each for each in shared if each is not None), None)


def _shared(name: str, address: str, diagnostics: Diagnostics, facts: NetworkFacts) -> Cause | None:
    machines, hardware = diagnostics.machines.get(address, {}), facts.neighbors.get(address, ())
    what = ""
    if address in facts.addresses and name != facts.hostname:
        return (
            f"the address {address} of host {name} is also an address of this one, {facts.hostname}",
            "give each an address of its own; rootless containers all have the same: use --network=host.",
        )
    if len(machines) > 1:
        what = f"{' and '.join(f'host {each}' for each in machines)} use the same address {address}"
    elif len(hardware) > 1:
        what = f"two machines use the address {address}: its hardware address is {' and '.join(hardware)} in turn"
    if what:
        return (
            what,
            f"give each machine an address of its own; `ip neigh show {address}` on a third one shows who answers.",
        )
    twins = [
        other
        for other, theirs in facts.neighbors.items()
        if hardware and theirs == hardware and diagnostics.machines.get(other, machines) != machines
    ]
    if not hardware or not (twins or hardware[0] in facts.hardware):
        return None
    same = twins[0] if twins else f"this machine's {facts.hardware[hardware[0]]}"
    return (
        f"{address} has the same hardware address as {same} ({hardware[0]}): a switch delivers to one of them",
        "give each machine a hardware address of its own: the clone of a virtual machine keeps the original's.",
    )


def _machines(processes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the host names and IP addresses of processes, as reports name them."""
    for text in processes:
        for match in re.finditer(r"host (\S+) \(([0-9a-f.:]+)(?: on [^)]*)?\)", text):
            # An IPv4 address can have a port.
            yield match[1], match[2].partition(":")[0] if "." in match[2] else match[2]


def _also_on_link(machines: Collection[str], diagnostics: Diagnostics) -> bool:
    """Return whether a machine was also heard under an address of our subnets: it has several networks."""
    return any(
        machines & names.keys()
        for address, names in diagnostics.machines.items()
        if address not in diagnostics.off_link
    )


def failing(facts: NetworkFacts) -> Cause | None:
    """Return the check of this machine that has failed, if any."""
    found = (finding for finding in facts.findings if finding.status is CheckStatus.FAIL)
    return next(((finding.observation, finding.fix) for finding in found), None)


def _kept_to_itself(facts: NetworkFacts) -> Cause | None:
    """Return the setting by which this host reaches only itself, if there is one."""
    found = (finding for finding in facts.findings if finding.keeps_to_itself)
    return next(((finding.observation, finding.fix) for finding in found), None)


def unanswered(facts: NetworkFacts) -> Cause | None:
    """Return the named hosts from which nothing has come, if there are any."""
    if not facts.unanswered:
        return None
    ports = f"or with another MINGLE_PORT than {few(facts.asked_ports)}, " if facts.asked_ports else ""
    return (
        f"nothing has come from {few(facts.unanswered)}: no process was started there, {ports}the name "
        "leads to another machine (a stale line in /etc/hosts, a wildcard record, a Service with a cluster IP), or a "
        f"firewall drops UDP port {few(facts.asked_ports or [facts.port])}",
        "compare each name's address with that machine's own, and run `mingle-discover ping` on both hosts.",
    )


def slow_names(facts: NetworkFacts) -> Cause | None:
    """Return the name servers that do not answer, if torch waits for them."""
    found = (finding for finding in facts.findings if finding.name == "names")
    return next(((finding.observation, finding.fix) for finding in found), None)


def suspect(facts: NetworkFacts, diagnostics: Diagnostics) -> Cause | None:
    """Return the warning that can explain why no process was heard, if none was."""
    if not diagnostics.empty or versions(facts):
        return None
    found = (finding for finding in facts.findings if finding.explains_silence)
    return next(((finding.observation, finding.fix) for finding in found), None)


def _astray(facts: NetworkFacts) -> Cause | None:
    """Return the warning that can explain why a process that was heard can't be reached."""
    found = (finding for finding in facts.findings if finding.explains_unreached)
    return next(((finding.observation, finding.fix) for finding in found), None)


def versions(facts: NetworkFacts) -> list[str]:
    """Return the other versions of the protocol that were heard."""
    return [reason for reason in facts.rejected if reason.startswith("version ")]


def incompatible(facts: NetworkFacts) -> Cause | None:
    """Return the cause if another version of the protocol was heard."""
    if not (spoken := versions(facts)):
        return None
    return (
        f"another protocol {few(spoken)} is spoken on this network: an incompatible mingle",
        "install the same version of multinode-mingle on every host.",
    )


def _another_secret(diagnostics: Diagnostics, words: Words) -> Cause | None:
    if diagnostics.secret_failures or diagnostics.secret_signs:
        how = "without a secret or with another one (a process that lacks our secret speaks of this job)"
    elif diagnostics.signed_without_secret:
        how = "with a secret, and this process has none"
    else:
        return None
    return f"{words.unproved} were started {how}, or were never started", words.unproved_fix


def _another_attempt(diagnostics: Diagnostics) -> Cause:
    attempts = few(repr(attempt) for attempt in sorted(diagnostics.other_attempts))
    return (
        f"the launcher's attempt differs: {attempts} {_is(diagnostics.other_attempts)} on this network, so the job was "
        "restarted on some nodes only, or processes of its last attempt still run",
        "end what is left of the last attempt, and start the job again on all nodes.",
    )


def _mistyped_id(job: str, diagnostics: Diagnostics, words: Words) -> Cause | None:
    """Return the cause if a job id that resembles ours was heard; any other id only shows that the network works."""
    formed = [other for other, takes in diagnostics.other_hosts.items() if words.joins and not takes]
    others = sorted(other for other in diagnostics.other_jobs if other not in formed)
    if job.startswith(LINE_JOB_ID):
        lines = [diagnostics.other_jobs[other] for other in others if other.startswith(LINE_JOB_ID)]
        return _another_line(lines) if lines else None
    near = [other for other in others if resembles(job, other)]
    if not near:
        return None
    named = few(repr(other) for other in near)
    seekers = [member for other in near for member in diagnostics.other_seekers.get(other, ())]
    if not seekers or any(other in diagnostics.other_hosts for other in near):
        return f"{words.mistyped}: {named} {_is(near)} on this network", words.mistyped_fix
    who = (
        f"{len(seekers)} process{'' if len(seekers) == 1 else 'es'} with job id{'' if len(near) == 1 else 's'} {named}"
    )
    return f"{words.mistyped}: {who} {_is(seekers)} looking for a host", words.mistyped_fix


def _another_line(others: Sequence[str]) -> Cause:
    return (
        f"the command lines differ: {few(others, '; ')} {'waits' if len(others) == 1 else 'wait'} with another one",
        "type the same line on every machine, with the same --nnodes; lines that have to differ need one --job-id.",
    )


def resembles(job: str, other: str) -> bool:
    """Return whether one job id can be a misspelling of the other."""
    job, other = job.lower(), other.lower()
    # $USER is root in a container: that is no other person's job.
    if any(one.startswith("root-") and another.endswith(one[4:]) for one, another in ((job, other), (other, job))):
        return True
    if sorted(job) == sorted(other):  # two letters changed places
        return True
    match = difflib.SequenceMatcher(None, job, other, autojunk=False)
    if min(match.real_quick_ratio(), match.quick_ratio()) < _RESEMBLING or match.ratio() < _RESEMBLING:
        return False
    differs = max(len(job), len(other)) - sum(block.size for block in match.get_matching_blocks())
    return differs <= _MISSPELT or job in other or other in job


def _is(names: Collection[object]) -> str:
    return "is" if len(names) == 1 else "are"


# --- errors --------------------------------------------------------------------------------------------------------


def authentication(
    identity: Identity, diagnostics: Diagnostics, facts: NetworkFacts, *, secured: bool
) -> MingleError | None:
    """Return the error for a job kept apart by its secret, or None where there is no sign of that."""
    if (apart := kept_apart(identity, diagnostics, secured=secured)) is None:
        return None
    if secured:
        signs = diagnostics.secret_signs
        rejected = (
            f"{signs} of its datagrams were rejected because their signature is missing or wrong" if signs else ""
        )
        observation = f"job {identity.job!r}: {few(filter(None, (rejected, *diagnostics.secret_failures)), '; ')}"
    else:
        addresses = few(failure.partition(": ")[0] for failure in diagnostics.secret_failures)
        hosted = f"hosted with a secret at {addresses}" if addresses else "hosted with a secret"
        observation = f"job {identity.job!r} is {hosted}, and {_me(identity)} has none"
    cause, remedy = apart
    return AuthenticationError.explain(
        f"{observation}.\n{tried(facts, cause, silence=False)}", cause=cause, remedy=remedy
    )


def kept_apart(identity: Identity, diagnostics: Diagnostics, *, secured: bool) -> Cause | None:
    """Return the cause if other processes of this job have another secret, or none, or this one has none."""
    if not (diagnostics.signed_without_secret or diagnostics.secret_failures or diagnostics.secret_signs):
        return None
    unit = identity.who.unit
    if secured:
        cause = f"the other {unit}s have no secret, or another one"
    else:
        cause = f"MINGLE_SECRET or MINGLE_SECRET_FILE is set for the other {unit}s only"
    return cause, f"give every {unit} the same MINGLE_SECRET or MINGLE_SECRET_FILE, or none."


def timeout(
    identity: Identity,
    diagnostics: Diagnostics,
    facts: NetworkFacts,
    *,
    seconds: float,
    status: Status | None,
    connected: bool,
    gone: bool = False,
) -> MingleError:
    """Return the error of a rank whose time is up.

    Args:
        identity: of the rank.
        diagnostics: what was heard.
        facts: what was tried.
        seconds: how long it has waited.
        status: the last status of the job, if its host has told one.
        connected: whether the rank is connected to the host, or is the host.
        gone: whether the host was lost long before the rank's own time was up, so that its status explains nothing.
    """
    if status is not None:
        observation, cause, remedy = _incomplete(identity, diagnostics, facts, status, seconds, connected)
        if gone:
            cause, remedy = _why_no_host(identity, diagnostics, facts, alone=False) or (cause, remedy)
    elif connected:
        observation, cause, remedy = _silent_host(identity, seconds)
    else:
        observation, cause, remedy = _no_host(identity, diagnostics, facts, seconds)
    joined = status is not None and status.joined > 1
    unheard = not (joined or (status is not None and (status.refused or status.left)))
    lines = [observation, heard(diagnostics, alone=unheard), tried(facts, cause)]
    return DiscoveryTimeoutError.explain("\n".join(filter(None, lines)), cause=cause, remedy=remedy)


def _incomplete(
    identity: Identity, diagnostics: Diagnostics, facts: NetworkFacts, status: Status, seconds: float, connected: bool
) -> tuple[str, str, str]:
    unit = identity.who.unit
    observation = (
        f"job {identity.job!r} did not form within {seconds:g} s: {status.joined} of {status.world_size} {unit}s joined"
    )
    if status.missing:
        observation += f", missing {unit}s: {ranks_text(status.missing)}"
    elif status.hosts:
        observation += f" ({status.hosts})"
    if status.departed:
        observation += f", gone again: {unit}s {ranks_text(status.departed)}"
    if status.unconfirmed and not (status.missing or status.departed):
        observation += f", no answer while {status.phase} from {unit}s: {ranks_text(status.unconfirmed)}"
    if not connected:
        observation += f" (as last reported by {unit} 0, which can no longer be reached)"
    observation += "."
    observation += history(status, diagnostics)
    alone = status.joined <= 1 and not status.left
    runs_alone = f"run alone with a {_size(unit)} of 1, " if identity.rank is None else ""
    otherwise = f"the missing {unit}s were not started, {runs_alone}or can't reach {unit} 0", _look(unit)
    if alone and diagnostics.empty and not facts.peers:
        missing = f"the missing {unit}s were not started, {runs_alone}"
        otherwise = silence(missing, f"the output of the missing {unit}s", "all hosts", facts)
    return observation, *(_why_incomplete(identity, diagnostics, facts, status, alone=alone) or otherwise)


def history(status: Status, diagnostics: Diagnostics) -> str:
    """Return the lines that say which processes left, or did not get in."""
    lines = (
        ("came and went", status.left),
        ("refused", status.refused),
        ("did not prove the secret", diagnostics.secret_failures),
    )
    return "".join(f"\n  {what}: {few(names, '; ')}" for what, names in lines if names)


def _why_incomplete(
    identity: Identity, diagnostics: Diagnostics, facts: NetworkFacts, status: Status, *, alone: bool
) -> Cause | None:
    return likely_cause(
        identity.job,
        diagnostics,
        facts,
        _words(identity.who.unit),
        alone=alone,
        certain=failed(diagnostics, status.awaited) or _as_the_host_says(identity, diagnostics, facts, status),
        heard=not_joined(outsiders(identity, diagnostics, status), diagnostics, facts)
        or in_folders(diagnostics, facts, status),
    )


def in_folders(diagnostics: Diagnostics, facts: NetworkFacts, status: Status) -> Cause | None:
    """Return the cause if processes show themselves in a shared folder, were not heard, and have not joined."""
    for folder, members in facts.in_folders.items():
        outside = [each for each in members if status.seats(each) is False and each not in diagnostics.seekers]
        if outside:
            found = "one process that looks" if len(outside) == 1 else f"{len(outside)} processes that look"
            return (
                f"{folder} shows {found} for this job and can't connect to this host: a firewall between the machines "
                f"drops TCP, or they do not reach its addresses ({few(facts.interfaces)})",
                "look at their output, which names the address that does not answer; allow TCP between the machines.",
            )
    return None


def not_joined(outside: Sequence[str], diagnostics: Diagnostics, facts: NetworkFacts) -> Cause | None:
    """Return the cause if processes that look for the job were heard and have not joined it."""
    if not outside:
        return None
    rules = [(each.observation, each.fix) for each in facts.findings if each.name == "tcp"]
    for what, fix in filter(None, (known_of(outside, diagnostics, facts), *rules)):
        return f"{few(outside, '; ')}: heard but not joined. {what[:1].upper()}{what[1:]}", fix
    return (
        f"{few(outside, '; ')}: heard but not joined. Its host's firewall drops datagrams from here, or this "
        "host's firewall drops its TCP connections",
        "run `mingle-discover doctor` on both hosts, or `mingle-discover ping` on all of them at once.",
    )


def _as_the_host_says(
    identity: Identity, diagnostics: Diagnostics, facts: NetworkFacts, status: Status
) -> Cause | None:
    unit = identity.who.unit
    if status.refused and status.joined < status.world_size:
        if ": rank taken (" in status.refused[-1]:
            return f"a {unit} was started twice: {status.refused[-1]}", "give every process its own rank."
        return f"a {unit} was started with settings that contradict the others: {status.refused[-1]}", _look(unit)
    shared = shared_address(status.left, diagnostics, facts)
    if shared is not None and status.joined < status.world_size:
        return shared
    crashed = [text for text in status.left if not text.endswith(f": {DiscoveryTimeoutError.__name__}")]
    if crashed and not status.missing and status.joined < status.world_size:
        # The kernel of a process that has ended closes its connection, or resets it.
        if all("ETIMEDOUT" in text for text in status.left):
            return (
                f"the connection to a {unit} timed out while it waited for the others: its machine is down, or its "
                "network was cut or loses packets",
                f"{_look(unit).removesuffix('.')}; `mingle-discover ping` on all hosts at once shows lost packets.",
            )
        return f"a {unit} crashed or was stopped while it waited for the others", _look(unit)
    if status.unanswered:
        return (
            status.unanswered,
            "look at that process: `ps` shows state T if it is stopped, and `kill -CONT` continues it.",
        )
    if status.unconfirmed and diagnostics.store_failures and identity.rank in (None, *status.unconfirmed):
        stores = (f"{where} is not reached from this host ({why})" for where, why in diagnostics.store_failures.items())
        return (
            f"the store at {few(stores, '; ')}: a firewall, or an address of another network",
            f"allow TCP from this host to {unit} 0's, or fix the store's port with MINGLE_MASTER_PORT and open that "
            "one.",
        )
    if status.phase in ("sealing", "sealed") and (slow := slow_names(facts)) is not None:
        return slow
    if status.unconfirmed:
        return (
            "those processes are stopped, or their network was cut, or loses packets, while the job formed",
            f"{_look(unit).removesuffix('.')}; `mingle-discover ping` on all hosts at once shows lost packets.",
        )
    return None


def outsiders(identity: Identity, diagnostics: Diagnostics, status: Status) -> list[str]:
    """Return the processes that look for the job and certainly have not joined it."""
    seekers = [text for member, text in diagnostics.seekers.items() if not status.seats(member)]
    if identity.rank is None:
        # All joined processes but this one can be among those heard; of a larger number at least one has not joined.
        certain = status.seated or (len(seekers) >= status.joined and not status.left)
        return seekers if certain else []
    return [text for text in seekers if any(text.startswith(f"{identity.who.unit} {n} ") for n in status.missing)]


def _silent_host(identity: Identity, seconds: float) -> tuple[str, str, str]:
    return (
        f"job {identity.job!r} did not form within {seconds:g} s: its host accepted the connection of {_me(identity)} "
        "and does not answer.",
        *_SILENT,
    )


def _no_host(identity: Identity, diagnostics: Diagnostics, facts: NetworkFacts, seconds: float) -> tuple[str, str, str]:
    unit, host = identity.who.unit, _host(identity)
    observation = f"job {identity.job!r}: {host} was not found within {seconds:g} s by {_me(identity)}."
    missing = f"{unit} 0 was not started, {_or_alone(unit)}, "
    otherwise = silence(missing, f"{unit} 0's output", f"{unit} 0's host", facts)
    for others, texts in ((f"{unit}s", diagnostics.seekers.values()), ("jobs", diagnostics.other_jobs.values())):
        if _elsewhere(texts, facts):
            otherwise = _host_unheard(identity, others)
            break
    return observation, *(_why_no_host(identity, diagnostics, facts, alone=True) or otherwise)


def _or_alone(unit: str) -> str:
    return f"has ended already, or runs alone with a {_size(unit)} of 1"


def _elsewhere(processes: Iterable[str], facts: NetworkFacts) -> bool:
    """Return whether one of these processes is on another machine: those of this one meet without a network."""
    return any(f"host {facts.hostname} (" not in text for text in processes)


def _host_unheard(identity: Identity, others: str) -> Cause:
    """Return the cause if other machines are heard, and no host of the job."""
    unit, host = identity.who.unit, _host(identity)
    return (
        f"{host} was not started, {_or_alone(unit)}, or its multicast does not reach this network (other {others} are "
        "heard, so multicast works here)",
        f"look at the output and the {_size(unit)} of {host}; `mingle-discover list` on its host shows what it does.",
    )


def _started_twice(identity: Identity, diagnostics: Diagnostics) -> Cause | None:
    """Return the cause if two processes with one given rank look for the host at the same time."""
    ranks: dict[str, list[tuple[float, float, str]]] = {}
    if identity.rank is not None:
        ranks[_me(identity)] = [(float("-inf"), float("inf"), "here")]
    for member, text in diagnostics.seekers.items():
        rank, _, where = text.partition(" on host ")
        ranks.setdefault(rank, []).append((*diagnostics.heard_at.get(member, (0.0, 0.0)), f"on host {where}"))
    for rank, found in ranks.items():
        for (first, last, where), (other_first, other_last, other) in itertools.combinations(found, 2):
            # A process that was started again is heard only after the one before it.
            if rank.startswith(f"{identity.who.unit} ") and max(first, other_first) <= min(last, other_last):
                return (
                    f"{rank} was started twice, {where} and {other}, and {_host(identity)} was not started",
                    "give every process its own rank, one of them rank 0.",
                )
    return None


def silence(missing: str, output: str, peers: str, facts: NetworkFacts) -> Cause:
    """Return the cause if no process was heard and nothing is wrong with this machine.

    Args:
        missing: who is missing, and why, as the first part of a list.
        output: what to look at first.
        peers: the hosts to name where there is no multicast.
        facts: what was tried.
    """
    return (
        f"{missing}{_unheard_here(facts)}the network carries no multicast (most clouds and "
        "Kubernetes networks don't), or a firewall or a switch with IGMP snooping drops it",
        f"check {output}; run `mingle-discover ping` on both hosts; then allow UDP port {facts.port}, or set "
        f"MINGLE_PEERS=<{peers}>.",
    )


def _unheard_here(facts: NetworkFacts) -> str:
    """Return with which settings a process is not heard here, as a part of a list; empty if with none."""
    port = f"or with another MINGLE_PORT than {facts.port}, " if facts.named_port else ""
    only_ipv6 = bool(facts.groups) and all(":" in group for group in facts.groups)
    return f"{port}or with only IPv4 (this machine has only IPv6), " if only_ipv6 else port


def _host(identity: Identity) -> str:
    return "a host" if identity.rank is None else f"{identity.who.unit} 0"


def _why_no_host(identity: Identity, diagnostics: Diagnostics, facts: NetworkFacts, *, alone: bool) -> Cause | None:
    host = _host(identity)
    certain = failed(diagnostics, (0,))
    if certain is None and diagnostics.hosts and not any(diagnostics.member in pair for pair in diagnostics.unreached):
        certain = unreachable_host(host, facts, gone=diagnostics.hosts.keys() <= diagnostics.proved.keys())
        known = known_of(diagnostics.hosts, diagnostics, facts)
        if known is not None and _astray(facts) is None:
            certain = f"{host} was heard but could not be reached over TCP: {known[0]}", known[1]
    words = _words(identity.who.unit)
    twice = _started_twice(identity, diagnostics)
    return likely_cause(identity.job, diagnostics, facts, words, alone=alone, certain=certain, heard=twice)


def unreachable_host(host: str, facts: NetworkFacts, *, gone: bool) -> Cause:
    """Return the cause if a host was heard and no connection to it stands.

    Args:
        host: what it is called.
        facts: what was tried.
        gone: whether a connection to it stood before.
    """
    if gone:
        offline = (each for each in facts.findings if each.status is CheckStatus.FAIL and each.explains_silence)
        if (finding := next(offline, None)) is not None:
            return finding.observation, finding.fix
        return (
            f"{host} was reached and has gone since: its process has ended, or its network was cut",
            f"look at the output of {host}; start the job again.",
        )
    return _astray(facts) or (
        f"{host} was heard but could not be reached over TCP: a firewall, or an address of another network",
        "allow TCP between the hosts, or name the right network with MINGLE_INTERFACE; `mingle-discover doctor` "
        "on its host shows the rule.",
    )


def refusal_text(refusal: Refused, unit: str) -> str:
    """Return what a refusal says, with a number that differs named as its user typed it."""
    reason = "--nnodes" if refusal.reason == "world size" and unit == "node" else refusal.reason
    return f"{reason} ({refusal.detail})"


def waiting(
    identity: Identity,
    diagnostics: Diagnostics,
    facts: NetworkFacts,
    *,
    status: Status | None,
    connected: bool,
) -> Cause | None:
    """Return the best cause so far why a rank waits, for the progress line; None if nothing was observed.

    The ladder is that of the timeout, without the rungs that only the deadline justifies: ranks that do not answer yet,
    and warnings of the local checks.

    Args:
        identity: of the rank.
        diagnostics: what was heard lately.
        facts: what was tried.
        status: the status of the job, if its host has told it.
        connected: whether the rank is connected to the host, or is the host.
    """
    if not connected:
        why = _why_no_host(identity, diagnostics, facts, alone=False) or unheard(diagnostics, facts)
        if why is None and identity.rank is not None and _elsewhere(diagnostics.seekers.values(), facts):
            why = _host_unheard(identity, f"{identity.who.unit}s")
        return why
    if status is None:
        return _SILENT
    if not diagnostics.store_failures:
        status = replace(status, unconfirmed=())
    if status.joined >= status.world_size:
        return _as_the_host_says(identity, diagnostics, facts, status)
    why = _why_incomplete(identity, diagnostics, facts, replace(status, unconfirmed=()), alone=False)
    return why or (unheard(diagnostics, facts) if status.joined <= 1 and not status.left else None)


def unheard(diagnostics: Diagnostics, facts: NetworkFacts) -> Cause | None:
    """Return the cause if named hosts are not heard, or no process is and what was set can differ elsewhere."""
    if not diagnostics.empty:
        return unanswered(facts)
    named = (each for each in facts.findings if each.name in ("folder", "family", "peers") and each.explains_silence)
    if (found := next(named, None)) is not None:
        return found.observation, found.fix
    if not facts.named_port:
        return unanswered(facts)
    return (
        f"no process is heard on UDP port {facts.port}, which is not the default: a process with another MINGLE_PORT "
        "is not heard",
        "set the same MINGLE_PORT on every host, or on none.",
    )


def brief(cause: Cause) -> str:
    """Return a cause on one line, with its fix if that is short."""
    what, fix = joined_lines(cause[0]), joined_lines(cause[1]).removesuffix(".")
    return f"{what}; fix: {fix}" if len(fix) <= _SHORT_FIX else what


def refused(identity: Identity, refusal: Refused) -> MingleError:
    """Return the error of a rank that the host proved to have no place for."""
    who = f" by {refusal.who}" if refusal.who is not None else ""
    unit, size = identity.who.unit, _size(identity.who.unit)
    by = f" (this one by {identity.node_rank_from})" if identity.node_rank_from else ""
    cause, remedy = {
        "rank taken": (
            f"the same {unit} was started twice",
            "give every process its own rank, or end the other one.",
        ),
        "node rank taken": (
            f"two machines were given the same node rank{by}, or this node was started twice",
            "give each machine its own node rank, or none of them; if this node was started twice, end the other one.",
        ),
        "rank out of range": (f"the ranks don't fit the {size}", f"give ranks 0 … {size} - 1."),
        "world size": (
            f"the {unit}s were started with different {size}s",
            f"start every {unit} with the same {size}.",
        ),
        "ranks mixed": (
            "some processes were given a rank and some were not",
            "give every process a rank, or none of them.",
        ),
        "kind": (
            "torchrun agents and plain ranks use the same job id",
            "give them different job ids.",
        ),
    }.get(refusal.reason, ("the host is in another state than this process expects", "start the job again."))
    taken = refusal.reason == "rank taken" and refusal.who is not None
    happened = f"is already taken{who}" if taken else f"was refused{who}: {refusal_text(refusal, unit)}"
    return ConflictError.explain(
        f"job {identity.job!r}: {_me(identity)} {happened}.",
        cause=cause,
        remedy=remedy,
    )


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
            "a job of 1 node runs there: was --nnodes forgotten? Torchrun's default is 1",
            "give every node the same --nnodes, or this run another --rdzv-id.",
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
    return (
        f"job {identity.job!r} has been running for {running.seconds + seconds:.0f} s, hosted by {running.host}; "
        f"waiting for it to end. {'Use another job id if these are two jobs.' if why is None else '; fix: '.join(why)}"
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


def joined_lines(text: str) -> str:
    """Return an observation as sent to the members, which accept no line breaks."""
    return "; ".join(line.strip() for line in text.split("\n")).replace(":; ", ": ")


def closed_by_host(identity: Identity, closed: Closed) -> MingleError:
    """Return the error of a member whose host ended the session because of a conflict, or for want of a network."""
    reason = closed.reason
    if closed.unconnected:
        return mesh_report.error(identity.job, reason, closed.unconnected, closed.cause, closed.remedy)
    if closed.network:
        return InterfaceError.explain(reason, cause=_NO_NETWORK_CAUSE, remedy=_NO_NETWORK_REMEDY)
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
        cause=_NO_NETWORK_CAUSE,
        remedy=_NO_NETWORK_REMEDY,
    )
