"""The one ladder from what was observed to the likely cause that is named, with its fix. Pure.

`LADDER` is an ordered table. Each rung takes the :class:`~mingle.protocol.explain.observations.Situation` and returns a
cause or None, and holds in some stages of a job. Ranks, agents and ``mingle-discover`` climb the same one, for the
progress line, for the error at the deadline and for ``--json``.

A check of this machine that fails is certain to break things. A check that only warns is named last, and only if no
process was heard. The texts call a member by its `ProcessInfo.unit`: a rank, or a node where ``mingle-run`` numbers
machines.
"""

from __future__ import annotations

import difflib
import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec.structs import replace

from mingle.diagnostics import CheckStatus
from mingle.errors import DiscoveryTimeoutError
from mingle.protocol.explain.addresses import astray, finding, known_of, shared_address, unreached
from mingle.protocol.explain.observations import Agents, Cause, NetworkFacts, Situation
from mingle.text import few, joined_lines
from mingle.wire.frames import Status

_RESEMBLING = 0.7
"""The similarity (difflib's ratio) from which on a job id can be a misspelling of another one."""
_MISSPELT = 2
"""The most characters in which it differs then, unless one id contains the other: ada-resnet and bob-resnet are two
people's."""
LINE_JOB_ID = "mingle-run-line-"
"""How a job id begins that ``mingle-run`` has made of its command line. Its user has never seen it."""
_NO_PLACE = "a place"
_SHORT_FIX = 100
"""The longest fix that stands in the progress line, in characters."""
_SILENT: Cause = (
    "the host's process is stopped or hangs, or its network was cut",
    "look at the output of the host; end it if it hangs, and start the job again.",
)
_EVERYWHERE = "run the same line on every node; `mingle-discover list` shows which jobs the network knows."


class Stage(enum.Flag):
    """How far a process has come."""

    LOOKS = enum.auto()
    """It has no host."""
    HANGS = enum.auto()
    """Its host has accepted its connection, and has said nothing."""
    GATHERS = enum.auto()
    """Ranks are missing, or the time is up."""
    FORMS = enum.auto()
    """All ranks have joined."""
    AGENTS = enum.auto()
    """A session of agents lacks some."""
    SETTLED = enum.auto()
    """A session of agents lacks nothing."""
    FINDS = enum.auto()
    """An observer looks for one job."""
    LISTS = enum.auto()
    """An observer looks for any job."""


def _stage(s: Situation) -> Stage:
    status = s.status
    if not s.job or s.observer is not None:
        return Stage.FINDS if s.job else Stage.LISTS
    if status is None:
        return Stage.HANGS if s.connected else Stage.LOOKS
    if s.agents is not None:
        return Stage.AGENTS if status.lacks or status.refused or not s.early else Stage.SETTLED
    return Stage.FORMS if s.early and status.joined >= status.world_size else Stage.GATHERS


def climb(s: Situation) -> Cause | None:
    """Return the likely cause and its fix: the first rung of the ladder that applies; None if nothing was observed."""
    stage = _stage(s)
    found = (rung(s) for stages, rung in LADDER if stage & stages)
    return next((cause for cause in found if cause is not None), None)


def waiting(s: Situation | None, facts: NetworkFacts, now: float) -> Cause | None:
    """Return the best cause so far why a process waits, for the progress line; None if nothing was observed."""
    if s is None:
        return None
    heard, status = s.diagnostics.lately(now), surplus_status(s.agents) or (s.status if s.connected else None)
    if status is not None and (status.joined < status.world_size or not heard.store_failures):
        status = replace(status, unconfirmed=())
    return climb(replace(s, facts=facts, diagnostics=heard, status=status, early=True))


def surplus_status(agents: Agents | None) -> Status | None:
    """Return what an agent lacks that waits for the end of a run that had no place for it; None for any other."""
    if agents is None or not agents.surplus:
        return None
    taken = "the only place was" if agents.maximum == 1 else f"all {agents.maximum} places were"
    lacks = f"{_NO_PLACE}: {taken} taken when this node came"
    return Status(joined=1, world_size=agents.maximum, lacks=lacks, present=(agents.who,))


def brief(cause: Cause) -> str:
    """Return a cause on one line, with its fix if that is short."""
    what, fix = joined_lines(cause[0]), joined_lines(cause[1]).removesuffix(".")
    return f"{what}; fix: {fix}" if len(fix) <= _SHORT_FIX else what


# --- known: what the host or its connection has shown ----------------------------------------------------------------


def kept_apart(s: Situation) -> Cause | None:
    """Return the cause if other processes of this job have another secret, or none, or this one has none."""
    heard = s.diagnostics
    if s.proved or not (heard.signed_without_secret or heard.secret_failures or heard.secret_signs):
        return None
    if s.secured:
        cause = f"the other {s.unit}s have no secret, or another one"
    else:
        cause = f"MINGLE_SECRET or MINGLE_SECRET_FILE is set for the other {s.unit}s only"
    return cause, f"give every {s.unit} the same MINGLE_SECRET or MINGLE_SECRET_FILE, or none."


def _left_out(s: Situation) -> Cause | None:
    refusal = None if s.agents is None else s.agents.left_out
    return None if refusal is None else (refusal.detail, refusal.remedy)


def _lost_host(s: Situation) -> Cause | None:
    return climb(replace(s, status=None, connected=False, final=False)) if s.gone else None


def _failed(s: Situation) -> Cause | None:
    """Return the cause if a process that is awaited has said that it failed: one of some ranks, or one without."""
    awaited = (0,) if s.status is None else () if s.agents is not None else s.status.awaited
    gone = [each.text for each in s.diagnostics.failed.values() if each.rank is None or each.rank in awaited]
    return (few(gone, "; "), "look at its output, and start it again.") if gone else None


def _unreached_host(s: Situation) -> Cause | None:
    heard = s.diagnostics
    if not heard.hosts or any(heard.member in pair for pair in heard.unreached):
        return None
    if (known := known_of(heard.hosts, s)) is not None and astray(s.facts) is None:
        return f"{s.host} was heard but could not be reached over TCP: {known[0]}", known[1]
    gone = heard.hosts.keys() <= heard.proved.keys()
    return (gone and _gave_up(s)) or unreachable_host(s.host, s.facts, gone=gone)


def unreachable_host(host: str, facts: NetworkFacts, *, gone: bool) -> Cause:
    """Return the cause if a host was heard and no connection to it stands.

    Args:
        host: what it is called.
        facts: what was tried.
        gone: whether a connection to it stood before.
    """
    if gone:
        return finding(facts, lambda each: each.status is CheckStatus.FAIL and each.explains_silence) or (
            f"{host} was reached and has gone since: its process has ended, or its network was cut",
            f"look at the output of {host}; start the job again.",
        )
    return astray(facts) or (
        f"{host} was heard but could not be reached over TCP: a firewall, or an address of another network",
        "allow TCP between the hosts, or name the right network with MINGLE_INTERFACE; `mingle-discover doctor` "
        "on its host shows the rule.",
    )


def _cut_off(s: Situation) -> Cause | None:
    if s.agents is None or not s.agents.had_quorum or s.told.joined >= s.agents.founders:
        return None
    return (
        "the missing nodes have ended or are cut off; if they are cut off, they may run the job without this one",
        "start the missing nodes again, or repair the network; where two parts of the job may run together, give "
        "every node --rdzv-conf allow_minority=1.",
    )


def _surplus(s: Situation) -> Cause | None:
    if s.agents is None or not s.told.lacks.startswith(_NO_PLACE):
        return None
    others = f" ({s.agents.others})" if s.agents.others else ""
    return (
        f"nodes came while the job ran on others{others}, and wait for its end. "
        "Its host has gone without a good-bye: it was ended by a signal, or its network was cut",
        "if that run has ended, start the nodes of this one again; else give this one another --rdzv-id.",
    )


def _refused(s: Situation) -> Cause | None:
    if not s.told.refused:
        return None
    last, contradict = s.told.refused[-1], "was started with settings that contradict the others"
    if s.agents is not None:
        if ": mesh (" not in last:
            return f"a node {contradict}: {last}", _EVERYWHERE
        return (
            f"a node and another one can't reach each other: {last}",
            "its own message has the likely cause and a command; `mingle-discover ping` on all nodes shows every pair.",
        )
    if s.told.joined >= s.told.world_size:
        return None
    if ": rank taken (" in last:
        return f"a {s.unit} was started twice: {last}", "give every process its own rank."
    return f"a {s.unit} {contradict}: {last}", _look(s.unit)


def _shared_with_one_that_left(s: Situation) -> Cause | None:
    complete = s.agents is None and s.told.joined >= s.told.world_size
    return None if complete else shared_address(s.told.left, s)


def _crashed(s: Situation) -> Cause | None:
    left = s.told.left
    crashed = [text for text in left if not text.endswith(f": {DiscoveryTimeoutError.__name__}")]
    if not crashed or s.told.missing or s.told.joined >= s.told.world_size:
        return None
    # The kernel of a process that has ended closes its connection, or resets it.
    if all("ETIMEDOUT" in text for text in left):
        return (
            f"the connection to a {s.unit} timed out while it waited for the others: its machine is down, or its "
            "network was cut or loses packets",
            _look_and_ping(s.unit),
        )
    return f"a {s.unit} crashed or was stopped while it waited for the others", _look(s.unit)


def _stopped(s: Situation) -> Cause | None:
    if not s.told.unanswered:
        return None
    return (
        s.told.unanswered,
        "look at that process: `ps` shows state T if it is stopped, and `kill -CONT` continues it.",
    )


def _unreached_store(s: Situation) -> Cause | None:
    failures, unconfirmed = s.diagnostics.store_failures, s.told.unconfirmed
    if not (unconfirmed and failures) or s.rank not in (None, *unconfirmed):
        return None
    stores = (f"{where} is not reached from this host ({why})" for where, why in failures.items())
    return (
        f"the store at {few(stores, '; ')}: a firewall, or an address of another network",
        f"allow TCP from this host to {s.unit} 0's, or fix the store's port with MINGLE_MASTER_PORT and open that one.",
    )


def _slow_names(s: Situation) -> Cause | None:
    """Return the name servers that do not answer, if torch waits for them."""
    sealed = s.told.phase in ("sealing", "sealed")
    return finding(s.facts, lambda each: each.name == "names") if sealed else None


def _unconfirmed(s: Situation) -> Cause | None:
    if not s.told.unconfirmed:
        return None
    return (
        "those processes are stopped, or their network was cut, or loses packets, while the job formed",
        _look_and_ping(s.unit),
    )


# --- observed: what was heard, and what the local checks find --------------------------------------------------------


def _failing(s: Situation) -> Cause | None:
    return finding(s.facts, lambda each: each.status is CheckStatus.FAIL)


def _another_secret(s: Situation) -> Cause | None:
    if s.diagnostics.secret_failures or s.diagnostics.secret_signs:
        how = "without a secret or with another one (a process that lacks our secret speaks of this job)"
    elif s.diagnostics.signed_without_secret:
        how = "with a secret, and this process has none"
    else:
        return None
    if s.observer is not None:
        who, fix = "the job's ranks", s.observer.unproved_fix
    elif _stage(s) is Stage.AGENTS:
        who = "the other nodes"
        fix = "give every node the same secret_file, MINGLE_SECRET_FILE or MINGLE_SECRET; a stranger can be ignored."
    else:
        who = f"the missing {s.unit}s"
        fix = f"give every {s.unit} the same MINGLE_SECRET or MINGLE_SECRET_FILE; a stranger can be ignored."
    return f"{who} were started {how}, or were never started", fix


def versions(facts: NetworkFacts) -> list[str]:
    """Return the other versions of the protocol that were heard."""
    return [reason for reason in facts.rejected if reason.startswith("version ")]


def _incompatible(s: Situation) -> Cause | None:
    if not (spoken := versions(s.facts)):
        return None
    return (
        f"another protocol {few(spoken)} is spoken on this network: an incompatible mingle",
        "install the same version of multinode-mingle on every host.",
    )


def _another_attempt(s: Situation) -> Cause | None:
    if not (others := s.diagnostics.other_attempts):
        return None
    return (
        f"the launcher's attempt differs: {few(repr(attempt) for attempt in sorted(others))} {_is(others)} on this "
        "network, so the job was restarted on some nodes only, or processes of its last attempt still run",
        "end what is left of the last attempt, and start the job again on all nodes.",
    )


def _started_twice(s: Situation) -> Cause | None:
    """Return the cause if two processes with one given rank look for the host at the same time."""
    ranks: dict[str, list[tuple[float, float, str]]] = {}
    if s.rank is not None:
        ranks[s.me] = [(float("-inf"), float("inf"), "here")]
    for member, text in s.diagnostics.seekers.items():
        rank, _, where = text.partition(" on host ")
        ranks.setdefault(rank, []).append((*s.diagnostics.heard_at.get(member, (0.0, 0.0)), f"on host {where}"))
    for rank, found in ranks.items():
        for (first, last, where), (other_first, other_last, other) in itertools.combinations(found, 2):
            # A process that was started again is heard only after the one before it.
            if rank.startswith(f"{s.unit} ") and max(first, other_first) <= min(last, other_last):
                return (
                    f"{rank} was started twice, {where} and {other}, and {s.host} was not started",
                    "give every process its own rank, one of them rank 0.",
                )
    return None


def _not_joined(s: Situation) -> Cause | None:
    """Return the cause if processes that look for the job were heard and have not joined it."""
    if not (outside := _outsiders(s)):
        return None
    why = known_of(outside, s) or finding(s.facts, lambda each: each.name == "tcp") or _gave_up(s)
    if why is None and s.diagnostics.proved and (s.most or s.told).joined == 1:
        why = (
            f"{few(s.diagnostics.proved)} was reached over TCP, so the job may have formed without this process",
            f"look at the output of the others; start no more processes than the {s.size} says.",
        )
    what, fix = why or (
        "its host's firewall drops datagrams from here, or this host's firewall drops its TCP connections",
        "run `mingle-discover doctor` on both hosts, or `mingle-discover ping` on all of them together.",
    )
    return f"{few(outside, '; ')}: heard but not joined. {what[:1].upper()}{what[1:]}", fix


def _outsiders(s: Situation) -> list[str]:
    """Return the processes that look for the job and certainly have not joined it."""
    status = s.most or s.told
    seekers = [text for member, text in s.diagnostics.seekers.items() if not status.seats(member)]
    if s.rank is None:
        # All joined processes but this one can be among those heard; of a larger number at least one has not joined.
        certain = status.seated or (len(seekers) >= status.joined and not status.left)
        return seekers if certain else []
    return [text for text in seekers if any(text.startswith(f"{s.unit} {n} ") for n in status.missing)]


def _in_folders(s: Situation) -> Cause | None:
    """Return the cause if processes show themselves in a shared folder, were not heard, and have not joined."""
    for folder, members in s.facts.in_folders.items():
        outside = [each for each in members if s.told.seats(each) is False and each not in s.diagnostics.seekers]
        if outside:
            found = "one process that looks" if len(outside) == 1 else f"{len(outside)} processes that look"
            return (
                f"{folder} shows {found} for this job and can't connect to this host: a firewall between the machines "
                f"drops TCP, or they do not reach its addresses ({few(s.facts.interfaces)})",
                "look at their output, which names the address that does not answer; allow TCP between the machines.",
            )
    return None


def _mistyped_id(s: Situation) -> Cause | None:
    """Return the cause if a job id that resembles ours was heard; any other id only shows that the network works."""
    heard = s.diagnostics
    # No formed job takes in a rank that waits, so it is not the job that was meant.
    formed = [other for other, takes in heard.other_hosts.items() if s.observer is None and not takes]
    others = sorted(other for other in heard.other_jobs if other not in formed)
    if s.job.startswith(LINE_JOB_ID):
        return _another_line([heard.other_jobs[other] for other in others if other.startswith(LINE_JOB_ID)])
    near = [other for other in others if resembles(s.job, other)]
    if not near:
        return None
    what, fix = "a mistyped job id", f"start every {s.unit} with the same job id."
    if s.observer is not None:
        fix = s.observer.mistyped_fix
    elif _stage(s) is Stage.AGENTS:
        what, fix = "a mistyped --rdzv-id", _EVERYWHERE
    named = few(repr(other) for other in near)
    seekers = [member for other in near for member in heard.other_seekers.get(other, ())]
    if not seekers or any(other in heard.other_hosts for other in near):
        return f"{what}: {named} {_is(near)} on this network", fix
    who = (
        f"{len(seekers)} process{'' if len(seekers) == 1 else 'es'} with job id{'' if len(near) == 1 else 's'} {named}"
    )
    return f"{what}: {who} {_is(seekers)} looking for a host", fix


def _another_line(others: Sequence[str]) -> Cause | None:
    if not others:
        return None
    return (
        f"the command lines differ: {few(others, '; ')} {'waits' if len(others) == 1 else 'wait'} with another one",
        "run the same command on every machine, with the same --nnodes; commands that must differ need one --job-id.",
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


def _kept_to_itself(s: Situation) -> Cause | None:
    """Return what has this host reach only itself, if anything does.

    A setting that does so is as it must be if the whole job runs on this machine.
    """
    found = next((each for each in s.facts.findings if each.keeps_to_itself), None)
    if found is None or found.name == "surroundings":
        return None if found is None else (found.observation, found.fix)
    stage = _stage(s)
    alone = stage is Stage.FINDS or (stage is Stage.LOOKS and s.rank is not None)
    if alone:
        missing = f"{'the job' if stage is Stage.FINDS else s.host} was not started, or is on another machine"
    else:
        missing = f"the missing {s.unit}s were not started, or are on other machines"
    return f"{missing}: {found.observation}", f"start {'it' if alone else 'them'} here, or, {found.fix}"


def _gave_up(s: Situation) -> Cause | None:
    """Return the cause that a host has named whose time was up before that of this process, if it says more."""
    named = s.diagnostics.gave_up if s.final else None
    guessed = _never_started(s)
    return None if named is None or (guessed is not None and named[0].endswith(f": {guessed[0]}")) else named


# --- guessed: why a process is not heard -----------------------------------------------------------------------------


def _suspect(s: Situation) -> Cause | None:
    """Return the warning that can explain why no process was heard, if none was."""
    if not (s.alone and s.diagnostics.empty) or versions(s.facts):
        return None
    return finding(s.facts, lambda each: each.explains_silence)


def _unanswered(s: Situation) -> Cause | None:
    """Return the named hosts from which nothing has come, if there are any."""
    return _no_answer(s.facts) if s.alone else None


def _no_answer(facts: NetworkFacts) -> Cause | None:
    if not facts.unanswered:
        return None
    ports = f"or with another MINGLE_PORT than {few(facts.asked_ports)}, " if facts.asked_ports else ""
    return (
        f"nothing has come from {few(facts.unanswered)}: no process was started there, {ports}the name "
        "leads to another machine (a stale line in /etc/hosts, a wildcard record, a Service with a cluster IP), or a "
        f"firewall drops UDP port {few(facts.asked_ports or [facts.port])}",
        "compare each name's address with that machine's own, and run `mingle-discover ping` on both hosts.",
    )


def _unheard(s: Situation) -> Cause | None:
    """Return the cause if named hosts are not heard, or no process is and what was set can differ elsewhere."""
    status, facts = s.status, s.facts
    if not s.early or (status is not None and (status.joined > 1 or status.left)):
        return None
    named = None
    if s.diagnostics.empty:
        named = finding(facts, lambda each: each.explains_silence and each.name in ("folder", "family", "peers"))
    if named is None and s.diagnostics.empty and facts.named_port:
        return (
            f"no process is heard on UDP port {facts.port}, which is not the default: a process with another "
            "MINGLE_PORT is not heard",
            "set the same MINGLE_PORT on every host, or on none.",
        )
    return named or _no_answer(facts)


def _unheard_host(s: Situation) -> Cause | None:
    """Return the cause if other machines are heard, and no host of the job."""
    heard = dict[str, Collection[str]]()
    if s.final or (s.early and s.rank is not None):
        heard[f"{s.unit}s"] = s.diagnostics.seekers.values()
    if s.final:
        heard["jobs"] = s.diagnostics.other_jobs.values()
    others = next((what for what, texts in heard.items() if _elsewhere(texts, s.facts)), None)
    if others is None:
        return None
    return (
        f"{s.host} was not started, {_or_alone(s)}, or its multicast does not reach this network (other {others} are "
        "heard, so multicast works here)",
        f"look at the output and the {s.size} of {s.host}; `mingle-discover list` on its host shows what it does.",
    )


def _never_started(s: Situation) -> Cause | None:
    """Return the cause at the deadline if nothing was observed."""
    stage = _stage(s)
    if not s.final:
        return None
    if stage is Stage.LOOKS:
        zero = f"{s.unit} 0"
        return _silence(s, f"{zero} was not started, {_or_alone(s)}, ", f"{zero}'s output", f"{zero}'s host")
    silent = s.alone and s.diagnostics.empty and not s.facts.peers
    if stage is Stage.AGENTS:
        missing = "the other nodes were not started, "
        if silent:
            return _silence(s, missing, "the output of the other nodes", "all nodes")
        return f"{missing}have another --rdzv-id, or can't reach this node", _EVERYWHERE
    runs_alone = f"run alone with a {s.size} of 1, " if s.rank is None else ""
    missing = f"the missing {s.unit}s were not started, {runs_alone}"
    if silent:
        return _silence(s, missing, f"the output of the missing {s.unit}s", "all hosts")
    return f"{missing}or can't reach {s.unit} 0", _look(s.unit)


def _silence(s: Situation, missing: str, output: str, peers: str) -> Cause:
    """Return the cause if no process was heard and nothing is wrong with this machine.

    Args:
        s: the situation.
        missing: who is missing, and why, as the first part of a list.
        output: what to look at first.
        peers: the hosts to name where there is no multicast.
    """
    port = f"or with another MINGLE_PORT than {s.facts.port}, " if s.facts.named_port else ""
    only_ipv6 = bool(s.facts.groups) and all(":" in group for group in s.facts.groups)
    family = "or with only IPv4 (this machine has only IPv6), " if only_ipv6 else ""
    return (
        f"{missing}{port}{family}the network carries no multicast (most clouds and "
        "Kubernetes networks don't), or a firewall or a switch with IGMP snooping drops it",
        f"check {output}; run `mingle-discover ping` on both hosts; then allow UDP port {s.facts.port}, or set "
        f"MINGLE_PEERS=<{peers}>.",
    )


# --- words -----------------------------------------------------------------------------------------------------------


def _look(unit: str) -> str:
    return f"look at the output of the missing {unit}s; `mingle-discover list` shows who is there."


def _look_and_ping(unit: str) -> str:
    return f"{_look(unit).removesuffix('.')}; `mingle-discover ping` on all hosts together shows lost packets."


def _or_alone(s: Situation) -> str:
    return f"has ended already, or runs alone with a {s.size} of 1"


def _is(names: Collection[object]) -> str:
    return "is" if len(names) == 1 else "are"


def _elsewhere(processes: Iterable[str], facts: NetworkFacts) -> bool:
    """Return whether one of these processes is on another machine: those of this one meet without a network."""
    return any(f"host {facts.hostname} (" not in text for text in processes)


# --- the table -------------------------------------------------------------------------------------------------------

_HOSTLESS = Stage.LOOKS | Stage.HANGS
_MEMBER = Stage.GATHERS | Stage.FORMS
_WAITS = Stage.LOOKS | Stage.GATHERS | Stage.AGENTS
_SEEKS = _WAITS | Stage.FINDS

LADDER: Sequence[tuple[Stage, Callable[[Situation], Cause | None]]] = (
    # known
    (_HOSTLESS | _MEMBER | Stage.AGENTS | Stage.SETTLED, kept_apart),
    (_HOSTLESS | Stage.AGENTS, _left_out),
    (Stage.HANGS, lambda _: _SILENT),
    (Stage.GATHERS, _lost_host),
    (_WAITS, _failed),
    (Stage.LOOKS, _unreached_host),
    (Stage.FINDS, lambda s: s.observer.unreached if s.observer else None),
    (Stage.AGENTS, _cut_off),
    (Stage.AGENTS, _surplus),
    (_MEMBER | Stage.AGENTS, _refused),
    (_MEMBER | Stage.AGENTS, _shared_with_one_that_left),
    (_MEMBER, _crashed),
    (_MEMBER, _stopped),
    (_MEMBER, _unreached_store),
    (_MEMBER, _slow_names),
    (_MEMBER, _unconfirmed),
    # observed
    (_SEEKS, unreached),
    (_SEEKS | Stage.LISTS, _failing),
    (_SEEKS, _another_secret),
    (_SEEKS | Stage.LISTS, _incompatible),
    (_SEEKS, _another_attempt),
    (Stage.LOOKS, _started_twice),
    (Stage.FINDS, lambda s: s.observer.sought if s.observer else None),
    (Stage.GATHERS | Stage.AGENTS, _not_joined),
    (Stage.GATHERS | Stage.AGENTS, _in_folders),
    (_SEEKS, _mistyped_id),
    (_SEEKS, _kept_to_itself),
    (_WAITS, _gave_up),
    # guessed
    (_SEEKS | Stage.LISTS, _suspect),
    (_SEEKS, _unanswered),
    (_WAITS, _unheard),
    (Stage.LOOKS, _unheard_host),
    (_WAITS, _never_started),
)
