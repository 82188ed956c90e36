"""Finding one job, or looking round for all: observer and finder put together, and what they report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from mingle.checks.findings import Status
from mingle.configuration.settings import Network
from mingle.errors import AuthenticationError, ConflictError, DiscoveryTimeoutError, MingleError
from mingle.observing.finding import Finder
from mingle.observing.observer import Observer, new_name, this_process
from mingle.observing.sighting import Sighting
from mingle.rules.machine import NetworkFacts
from mingle.rules.reports import ranks_text
from mingle.wire.authentication import JobKey

REFRESH_SECONDS = 0.5
"""How often a job that has not formed is asked how it stands, while its store is waited for."""
_SHOWN = 8


def make_finder(
    observer: Observer, network: Network, job: str | None, now: float, *, refresh: float | None = None
) -> Finder:
    """Returns the machine that an observer runs to find a job, or with None all of them; ``refresh`` as it takes it."""
    return Finder(
        job,
        member=new_name(),
        who=this_process(),
        secret=network.secret,
        new_id=observer.new_id,
        rng=observer.rng,
        now=now,
        refresh=refresh,
    )


def look_round(network: Network) -> tuple[Finder, NetworkFacts]:
    """Asks everybody who is there, for ``network.discovery_timeout`` seconds.

    Raises:
        InterfaceError: no interface can be used.
    """
    with Observer(network) as observer:
        now = time.monotonic()
        finder = make_finder(observer, network, None, now)
        observer.run(finder, until=now + network.discovery_timeout)
        return finder, observer.facts(diagnosed=not finder.sessions and not finder.seekers)


def find(job: str, network: Network, *, with_store: bool = False) -> tuple[Sighting, NetworkFacts]:
    """Finds a job's host as a rank would, proves it, and joins nothing.

    Args:
        job: the job id.
        network: how to discover; it gives up after ``discovery_timeout`` seconds.
        with_store: whether to wait until rank 0's store is open, which it is once every rank has joined.

    Raises:
        DiscoveryTimeoutError: there is no host, none that can be reached, or (``with_store``) no store yet.
        ConflictError: several hosts of this job are alive.
        AuthenticationError: its host has a secret and we have none, or the other way round, or another one.
        InterfaceError: no interface can be used.
    """
    key = None if network.secret is None else JobKey(network.secret, job)
    with Observer(network, job, key) as observer:
        now = time.monotonic()
        finder = make_finder(observer, network, job, now, refresh=REFRESH_SECONDS)

        def done() -> bool:
            if not finder.settled:
                return False
            alive = finder.alive
            return len(alive) > 1 or not with_store or alive[0].target().kind != "control"

        observer.run(finder, until=now + network.discovery_timeout, done=done)
        alive = finder.alive
        facts = observer.facts(diagnosed=not alive)
    if len(alive) > 1:
        raise several_hosts(job, alive)
    if not alive:
        raise not_found(job, finder, facts, network.discovery_timeout)
    if with_store and alive[0].target().kind == "control":
        raise not_formed(job, alive[0], network.discovery_timeout)
    return alive[0], facts


def several_hosts(job: str, alive: Sequence[Sighting]) -> ConflictError:
    """Returns the error for a job that more than one live host speaks for."""
    hosts = "; ".join(f"{_what(each)} by {each.host()} at {each.target()}" for each in alive)
    return ConflictError.explain(
        f"job {job!r} has {len(alive)} live hosts: {hosts}.",
        cause="rank 0 was started twice, two jobs share one job id, or the job is both announced and hosted",
        remedy="end all of them but one, or give the jobs different ids.",
    )


def _what(sighting: Sighting) -> str:
    return "announced" if sighting.probed.kind == "announcement" else "hosted"


def not_formed(job: str, sighting: Sighting, seconds: float) -> DiscoveryTimeoutError:
    """Returns the error for a job whose host was found and whose store is not open yet."""
    running = sighting.running
    assert running is not None
    missing = f", missing ranks: {ranks_text(running.missing)}" if running.missing else ""
    return DiscoveryTimeoutError.explain(
        f"job {job!r} is hosted by {running.host}, but has no store after {seconds:g} s: "
        f"{sighting.joined} of {running.world_size} ranks joined{missing}.",
        cause="rank 0 opens its store when all ranks have joined; some were not started or do not reach it",
        remedy="start the missing ranks, or wait longer (--timeout).",
    )


def not_found(job: str, finder: Finder, facts: NetworkFacts, seconds: float) -> MingleError:
    """Returns the error for a job of which no live host was found."""
    observation = f"job {job!r}: no live host was found within {seconds:g} s."
    detail = f"{_heard(finder)}\n{_tried(facts)}"
    sightings = finder.sessions
    versions = [reason for reason in facts.rejected if reason.startswith("version ")]
    if any(why.startswith("secret") for each in sightings for why in each.failures.values()):
        return AuthenticationError.explain(
            f"{observation}\n{detail}",
            cause="its host has a secret and we have none, or the other way round, or the secrets differ",
            remedy="give the job's secret with --secret-file, MINGLE_SECRET_FILE or MINGLE_SECRET.",
        )
    if sightings:
        cause = "its host was heard, but not reached over TCP: a firewall, or an address of another network"
        remedy = "allow TCP between the hosts, or name the right network with --interface."
    elif versions:
        cause = f"another protocol {_few(versions)} is spoken on this network: an incompatible mingle"
        remedy = "install the same version of multinode-mingle on every host."
    elif facts.findings and facts.findings[0].status is Status.FAIL:
        cause, remedy = facts.findings[0].observation, f"{facts.findings[0].remedy}."
    elif finder.seekers:
        cause = "ranks look for it, so multicast works here; its rank 0 was not started or does not hear us"
        remedy = "look at the output of rank 0."
    elif finder.evidence.other_jobs:
        cause = f"a mistyped job id: {_few(map(repr, sorted(finder.evidence.other_jobs)))} is on this network"
        remedy = "give the job id that the ranks were started with; `mingle-discover list` shows all."
    elif facts.findings:
        cause, remedy = facts.findings[0].observation, f"{facts.findings[0].remedy}."
    else:
        cause = (
            "the job does not run, or this network carries no multicast between the hosts, or a firewall "
            f"drops UDP port {facts.port}"
        )
        remedy = "start rank 0; without multicast name its host with --peers."
    return DiscoveryTimeoutError.explain(f"{observation}\n{detail}", cause=cause, remedy=remedy)


def _heard(finder: Finder) -> str:
    lines = [f"  not proved: {each.host()}: {each.problem}" for each in finder.sessions[:_SHOWN]]
    if finder.seekers:
        lines.append(f"  looking for it: {_few((str(each) for each in finder.seekers.values()), '; ')}")
    if finder.evidence.other_jobs:
        others = (f"{job!r} by {who}" for job, who in sorted(finder.evidence.other_jobs.items()))
        lines.append(f"  other job ids heard on this network: {_few(others, '; ')}")
    return "\n".join(lines) or "  nothing of this job was heard, and no other job either"


def _tried(facts: NetworkFacts) -> str:
    """Returns what was tried on the network, for people."""
    rejected = ", ".join(f"{count} {reason}" for reason, count in sorted(facts.rejected.items()))
    groups = ", ".join(facts.groups)
    lines = [
        f"  interfaces: {', '.join(facts.interfaces)}; groups {groups}, UDP port {facts.port}",
        f"  datagrams: {facts.sent} sent, {facts.received} heard, {facts.rejected.total()} rejected"
        + (f" ({rejected})" if rejected else ""),
    ]
    if facts.peers:
        lines.append(f"  peers: {_few(facts.peers)}")
    if facts.send_errors:
        errors = (f"{name} {count} times" for name, count in sorted(facts.send_errors.items()))
        lines.append(f"  sending failed: {_few(errors)}")
    lines += [f"  {failure}" for failure in facts.failures]
    return "\n".join([*lines, *(f"  on this machine: {finding.observation}" for finding in facts.findings)])


def _few(names: Iterable[str], separator: str = ", ") -> str:
    every = list(names)
    shown = separator.join(every[:_SHOWN])
    return shown if len(every) <= _SHOWN else f"{shown} and {len(every) - _SHOWN} more"
