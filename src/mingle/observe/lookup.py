"""Look for one job, or list all of them, with a finder on this machine's sockets; and say why nothing was found."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mingle.config.settings import Network
from mingle.errors import AuthenticationError, ConflictError, DiscoveryTimeoutError, MingleError
from mingle.observe.finder import Finder, FoundSession
from mingle.observe.observer import Observer, new_name, this_process
from mingle.protocol.explain.deadline import other_jobs, tried
from mingle.protocol.explain.ladder import climb, unreachable_host
from mingle.protocol.explain.observations import Cause, NetworkFacts, Observing, Situation
from mingle.text import few, ranks_text
from mingle.wire.authentication import JobKey

REFRESH_SECONDS = 0.5
"""How often a job that has not formed is asked for its state, while `find` waits for its store."""
_SHOWN = 8
_UNPROVED_FIX = "give the job's secret with --secret-file, MINGLE_SECRET_FILE or MINGLE_SECRET."
PROOF_SECONDS = 1.0
"""How long a host that was found in a shared folder has to prove itself."""
LOOK_SECONDS = 0.1
"""How often `list` looks whether the shared folders have been listed."""


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
        new_id=observer.driver.new_id,
        rng=observer.driver.rng,
        now=now,
        refresh=refresh,
        forgets=forgets,
    )


def list_jobs(network: Network) -> tuple[Finder, NetworkFacts]:
    """Ask for all jobs, for ``network.discovery_timeout`` seconds, or until the shared folders have been listed.

    Raises:
        InterfaceError: no interface can be used.
    """
    with Observer(network, folders=True) as observer:
        now = time.monotonic()
        finder = make_finder(observer, network, None, now)
        folders, end = observer.driver.folders, now + network.discovery_timeout
        listed_at = None if network.folders else now

        def done() -> bool:
            nonlocal listed_at
            if listed_at is None and folders.looked:
                listed_at = time.monotonic()
            return listed_at is not None and time.monotonic() >= max(end, listed_at + PROOF_SECONDS)

        observer.run(finder, until=end + folders.first_look_seconds, done=done, every=LOOK_SECONDS)
        return finder, observer.facts(diagnosed=not finder.sessions and not finder.seekers)


def find_job(job: str, network: Network) -> tuple[FoundSession, NetworkFacts]:
    """Find a job's host as a rank does, let it prove itself, and wait for its store, without joining the job.

    Args:
        job: the job id.
        network: the network settings; the search ends after ``discovery_timeout`` seconds.

    Raises:
        DiscoveryTimeoutError: there is no host, none that can be reached, or no store yet.
        ConflictError: several hosts of this job are alive.
        AuthenticationError: the host's secret differs from ours, or only one side has a secret.
        InterfaceError: no interface can be used.
    """
    key = None if network.secret is None else JobKey(network.secret, job)
    with Observer(network, job, key, folders=True) as observer:
        now = time.monotonic()
        finder = make_finder(observer, network, job, now, refresh=REFRESH_SECONDS)

        def done() -> bool:
            if not finder.settled:
                return False
            alive = finder.alive
            return len(alive) > 1 or alive[0].target().kind != "control"

        observer.run(finder, until=now + network.discovery_timeout, done=done)
        alive = finder.alive
        facts = observer.facts(diagnosed=not alive)
    if len(alive) > 1:
        raise several_hosts(job, alive)
    if not alive:
        raise not_found(job, finder, facts, network.discovery_timeout)
    if alive[0].target().kind == "control":
        raise not_formed(job, alive[0], network.discovery_timeout)
    return alive[0], facts


def several_hosts(job: str, alive: Sequence[FoundSession]) -> ConflictError:
    """Return the error for a job with more than one live host."""
    hosts = "; ".join(f"{each.host()} at {each.target()}" for each in alive)
    return ConflictError.explain(
        f"job {job!r} has {len(alive)} live hosts: {hosts}.",
        cause="rank 0 was started twice, or two jobs share one job id",
        remedy="end all of them but one, or give the jobs different ids.",
    )


def not_formed(job: str, session: FoundSession, seconds: float) -> DiscoveryTimeoutError:
    """Return the error for a job whose host was found and whose store is not open yet."""
    running = session.running
    assert running is not None
    missing = f", missing ranks: {ranks_text(running.missing)}" if running.missing else ""
    return DiscoveryTimeoutError.explain(
        f"job {job!r} is hosted by {running.host}, but has no store after {seconds:g} s: "
        f"{session.joined} of {running.world_size} ranks joined{missing}.",
        cause="rank 0 opens its store once all ranks have joined; some were not started or do not reach it",
        remedy="start the missing ranks, or wait longer (--timeout).",
    )


def not_found(job: str, finder: Finder, facts: NetworkFacts, seconds: float) -> MingleError:
    """Return the error for a job without a live host."""
    observation = f"job {job!r}: no live host was found within {seconds:g} s."
    if any(why.startswith("secret") for each in finder.sessions for why in each.failures.values()):
        cause = "only one of its host and this command has a secret, or their secrets differ"
        return AuthenticationError.explain(
            f"{observation}\n{_heard(finder)}\n{tried(facts, cause, silence=False)}",
            cause=cause,
            remedy=_UNPROVED_FIX,
        )
    cause, remedy = _why_not_found(job, finder, facts)
    detail = f"{_heard(finder)}\n{tried(facts, cause)}"
    return DiscoveryTimeoutError.explain(f"{observation}\n{detail}", cause=cause, remedy=remedy)


def _why_not_found(job: str, finder: Finder, facts: NetworkFacts) -> Cause:
    sessions = finder.sessions
    # A sign in a shared folder is no proof of multicast.
    works = "" if all(each.in_folder for each in finder.seekers.values()) else ", so multicast works here"
    searched = (
        f"ranks look for it{works}; its rank 0 was not started or does not hear us",
        "look at the output of rank 0.",
    )
    heard = (
        "the job does not run, or its multicast does not reach this network (other jobs are heard, so multicast works "
        "here)",
        "start rank 0; `mingle-discover list` shows all job ids.",
    )
    silence = (
        "the job does not run, or this network carries no multicast between the hosts, or a firewall drops UDP port "
        f"{facts.port}",
        "start rank 0; without multicast name its host with --peers.",
    )
    gone = all(each.was_alive for each in sessions)
    observer = Observing(
        unproved_fix=_UNPROVED_FIX,
        mistyped_fix="give the job id that the ranks were started with; `mingle-discover list` shows all.",
        unreached=unreachable_host("its host", facts, gone=gone) if sessions else None,
        sought=searched if finder.seekers else None,
    )
    cause = climb(Situation(job=job, diagnostics=finder.diagnostics, facts=facts, observer=observer, final=True))
    return cause or (heard if finder.diagnostics.other_jobs else silence)


def _heard(finder: Finder) -> str:
    lines = [f"  not proved: {each.host()}: {each.problem}" for each in finder.sessions[:_SHOWN]]
    if finder.seekers:
        lines.append(f"  looking for it: {few(finder.seekers.values(), '; ')}")
    if finder.diagnostics.other_jobs:
        lines.append(f"  other job ids heard on this network: {other_jobs(finder.diagnostics)}")
    return "\n".join(lines) or "  no process was heard, of this job or of another"
