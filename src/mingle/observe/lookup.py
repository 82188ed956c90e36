"""Find one job, or list all jobs on the network: an observer that runs a finder, and the errors of `find`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mingle.config.settings import Network
from mingle.errors import AuthenticationError, ConflictError, DiscoveryTimeoutError, MingleError
from mingle.observe.finder import Finder, Sighting
from mingle.observe.observer import Observer, new_name, this_process
from mingle.protocol import reports
from mingle.protocol.machine import NetworkFacts
from mingle.wire.authentication import JobKey

REFRESH_SECONDS = 0.5
"""How often a job that has not formed is asked for its state, while `find` waits for its store."""
_SHOWN = 8


def make_finder(
    observer: Observer,
    network: Network,
    job: str | None,
    now: float,
    *,
    refresh: float | None = None,
    forgets: bool = False,
) -> Finder:
    """Return the machine with which an observer finds one job, or all jobs for None; other arguments as for Finder."""
    return Finder(
        job,
        member=new_name(),
        who=this_process(),
        secret=network.secret,
        new_id=observer.new_id,
        rng=observer.rng,
        now=now,
        refresh=refresh,
        forgets=forgets,
    )


def list_jobs(network: Network) -> tuple[Finder, NetworkFacts]:
    """Ask for all jobs, for ``network.discovery_timeout`` seconds.

    Raises:
        InterfaceError: no interface can be used.
    """
    with Observer(network) as observer:
        now = time.monotonic()
        finder = make_finder(observer, network, None, now)
        observer.run(finder, until=now + network.discovery_timeout)
        return finder, observer.facts(diagnosed=not finder.sessions and not finder.seekers)


def find(job: str, network: Network, *, control: bool = False) -> tuple[Sighting, NetworkFacts]:
    """Find a job's host as a rank does, let it prove itself, and wait for its store, without joining the job.

    Args:
        job: the job id.
        network: the network settings; the search ends after ``discovery_timeout`` seconds.
        control: whether to return rank 0's control port; else wait for rank 0's store, which opens once every rank has
            joined.

    Raises:
        DiscoveryTimeoutError: there is no host, none that can be reached, or no store yet.
        ConflictError: several hosts of this job are alive.
        AuthenticationError: the host's secret differs from ours, or only one side has a secret.
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
            return len(alive) > 1 or control or alive[0].target().kind != "control"

        observer.run(finder, until=now + network.discovery_timeout, done=done)
        alive = finder.alive
        facts = observer.facts(diagnosed=not alive)
    if len(alive) > 1:
        raise several_hosts(job, alive)
    if not alive:
        raise not_found(job, finder, facts, network.discovery_timeout)
    if not control and alive[0].target().kind == "control":
        raise not_formed(job, alive[0], network.discovery_timeout)
    return alive[0], facts


def several_hosts(job: str, alive: Sequence[Sighting]) -> ConflictError:
    """Return the error for a job with more than one live host."""
    hosts = "; ".join(f"{_what(each)} by {each.host()} at {each.target()}" for each in alive)
    return ConflictError.explain(
        f"job {job!r} has {len(alive)} live hosts: {hosts}.",
        cause="rank 0 was started twice, two jobs share one job id, or the job is both announced and hosted",
        remedy="end all of them but one, or give the jobs different ids.",
    )


def _what(sighting: Sighting) -> str:
    return "announced" if sighting.probed.kind == "announcement" else "hosted"


def not_formed(job: str, sighting: Sighting, seconds: float) -> DiscoveryTimeoutError:
    """Return the error for a job whose host was found and whose store is not open yet."""
    running = sighting.running
    assert running is not None
    missing = f", missing ranks: {reports.ranks_text(running.missing)}" if running.missing else ""
    return DiscoveryTimeoutError.explain(
        f"job {job!r} is hosted by {running.host}, but has no store after {seconds:g} s: "
        f"{sighting.joined} of {running.world_size} ranks joined{missing}.",
        cause="rank 0 opens its store once all ranks have joined; some were not started or do not reach it",
        remedy="start the missing ranks, or wait longer (--timeout); --control prints rank 0's control port meanwhile.",
    )


def not_found(job: str, finder: Finder, facts: NetworkFacts, seconds: float) -> MingleError:
    """Return the error for a job without a live host."""
    observation = f"job {job!r}: no live host was found within {seconds:g} s."
    detail = f"{_heard(finder)}\n{reports.tried(facts)}"
    if any(why.startswith("secret") for each in finder.sessions for why in each.failures.values()):
        return AuthenticationError.explain(
            f"{observation}\n{detail}",
            cause="only one of its host and this command has a secret, or their secrets differ",
            remedy="give the job's secret with --secret-file, MINGLE_SECRET_FILE or MINGLE_SECRET.",
        )
    cause, remedy = _why_not_found(job, finder, facts)
    return DiscoveryTimeoutError.explain(f"{observation}\n{detail}", cause=cause, remedy=remedy)


def _why_not_found(job: str, finder: Finder, facts: NetworkFacts) -> reports.Cause:
    sightings = finder.sessions
    searched = (
        "ranks look for it, so multicast works here; its rank 0 was not started or does not hear us",
        "look at the output of rank 0.",
    )
    words = reports.Words(
        unproved="the job's ranks",
        unproved_fix="give the job's secret with --secret-file, MINGLE_SECRET_FILE or MINGLE_SECRET.",
        other_id="the job does not run, or runs under another id",
        other_id_fix="give the job id that the ranks were started with; `mingle-discover list` shows all.",
        otherwise=(
            "the job does not run, or this network carries no multicast between the hosts, or a firewall "
            f"drops UDP port {facts.port}",
            "start rank 0; without multicast name its host with --peers.",
        ),
    )
    gone = all(each.was_alive for each in sightings)
    return reports.likely_cause(
        job,
        finder.diagnostics,
        facts,
        words,
        alone=True,
        certain=reports.unreachable_host("its host", gone=gone) if sightings else None,
        heard=searched if finder.seekers else None,
    )


def _heard(finder: Finder) -> str:
    lines = [f"  not proved: {each.host()}: {each.problem}" for each in finder.sessions[:_SHOWN]]
    if finder.seekers:
        lines.append(f"  looking for it: {reports.few(finder.seekers.values(), '; ')}")
    if finder.diagnostics.other_jobs:
        others = (f"{job!r} by {who}" for job, who in sorted(finder.diagnostics.other_jobs.items()))
        lines.append(f"  other job ids heard on this network: {reports.few(others, '; ')}")
    return "\n".join(lines) or "  nothing of this job was heard, and no other job either"
