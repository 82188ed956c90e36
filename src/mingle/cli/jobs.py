"""``mingle-discover list``, ``watch`` and ``find``: the jobs on this network."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import click

from mingle.cli import output
from mingle.cli.options import Shared, fail, shared_options
from mingle.cli.output import Table
from mingle.config import settings
from mingle.errors import MingleError, counted
from mingle.observe.finder import Finder, FoundSession, Seeking, ranks_seeking
from mingle.observe.lookup import find_job, list_jobs, make_finder
from mingle.observe.observer import Observer
from mingle.protocol.explain import ladder
from mingle.protocol.explain.observations import Diagnostics, NetworkFacts, Situation
from mingle.text import endpoint_text, ranks_text

LIST_SECONDS = 2.0
"""The default time limit of ``list``: hosts answer within 0.1 s, and an address that does not answer costs 1 s."""
FIND_SECONDS = 5.0
WATCH_SECONDS = 1.0
"""How often ``watch`` asks each job for its state."""
COLUMNS = ("JOB", "STATE", "HOST", "ADDRESS", "JOINED", "MISSING", "SEEKING", "SECRET")

_Key: TypeAlias = "tuple[str, str | None]"
_SIGNS = {"new": "+", "gone": "-", "changed": "="}


@click.command("list", epilog="Example: mingle-discover list --fail-if-empty --timeout 5")
@click.option("--fail-if-empty", is_flag=True, help="Exit with status 1 if no job was found.")
@shared_options(timeout=f"Time to wait for answers. Default: {LIST_SECONDS:g}.", table=True)
def list_(shared: Shared, fail_if_empty: bool) -> None:
    """List the jobs on this network.

    Each job is a line: its host, how many ranks have joined, which are missing, and which still look for their host. A
    further host of a job is a line of its own. It takes 2 seconds, or as long as --timeout says; with shared folders
    in --peers at least until they have been listed. The state of a job with a secret needs --secret-file.
    """
    finder, facts = list_jobs(shared.network(LIST_SECONDS))
    jobs = records(finder.sessions, finder.seekers.values())
    _log_facts(shared, facts)
    shared.answer({"jobs": jobs}, jobs_table(jobs, wide=shared.wide), Table(COLUMNS, [*map(row, jobs)]))
    for version in ladder.versions(facts):
        output.say(f"a host speaks {version} of the protocol: an incompatible mingle, whose jobs are not listed")
    if not jobs:
        cause, fix = why_no_job(facts)
        output.say(f"mingle-discover list: no job answered.\n  likely cause: {cause}\n  fix: {fix}")
        if fail_if_empty:
            fail()


def why_no_job(facts: NetworkFacts) -> tuple[str, str]:
    """Return the first likely cause that applies, with its fix."""
    otherwise = (
        f"no job runs here, or no multicast passes ({', '.join(facts.interfaces)}; UDP port {facts.port})",
        "name hosts with --peers, or another interface with -i; `mingle-discover doctor` looks for the reason.",
    )
    return ladder.climb(Situation(diagnostics=Diagnostics(), facts=facts, final=True)) or otherwise


@click.command("watch", epilog="Example: mingle-discover watch --json | jq .job.missing")
@shared_options(timeout="Time limit. Default: none.", table=True)
def watch(shared: Shared) -> None:
    """Show the jobs on this network, live.

    On a terminal it is the table of `list`, kept up to date. In a pipe it is a line for each job that comes (+), goes
    (-) or changes (=). With --json each line is an object with `event` (new, gone, changed) and `job`. It ends with
    Ctrl-C or --timeout.
    """
    network = shared.network(1.0)
    with Observer(network, folders=True) as observer:
        finder = make_finder(observer, network, None, time.monotonic(), refresh=WATCH_SECONDS, forgets=True)
        before: dict[_Key, dict[str, Any]] = {}

        def print_changes() -> None:
            now = _records_by_session(finder)
            for event, key in changes(before, now):
                record = now.get(key) or before[key]
                if shared.json:
                    output.answer_json("watch", {"event": event, "job": record})
                else:
                    output.line((_SIGNS[event], *row(record)))
            before.clear()
            before.update(now)

        def table() -> Table:
            return jobs_table(_records_by_session(finder).values(), wide=shared.wide)

        def done() -> bool:
            update()
            return False

        live = shared.following(COLUMNS, table, print_changes, transient=False)
        with live as update, contextlib.suppress(KeyboardInterrupt):
            observer.run(finder, until=shared.deadline(), done=done)


def changes(before: Mapping[_Key, dict[str, Any]], now: Mapping[_Key, dict[str, Any]]) -> Iterator[tuple[str, _Key]]:
    """Yield the sessions that are new, gone or changed; a change of their age alone does not count."""
    yield from (("gone", key) for key in before if key not in now)
    for key, record in now.items():
        if key not in before:
            yield "new", key
        elif {**record, "seconds": None} != {**before[key], "seconds": None}:
            yield "changed", key


def _records_by_session(finder: Finder) -> dict[_Key, dict[str, Any]]:
    # A session is shown once it has answered, or has not answered the first question.
    tried = [session for session in finder.sessions if session.tried or session.alive]
    return {(record["job"], record["session"]): record for record in records(tried, finder.seekers.values())}


@click.command("find", epilog='Example: eval "$(mingle-discover find $USER-resnet --export)"')
@click.argument("job")
@click.option("--export", is_flag=True, help="Print `export MASTER_ADDR=… MASTER_PORT=…`, quoted for a shell's eval.")
@shared_options(timeout=f"Time limit. Default: MINGLE_TIMEOUT, else {FIND_SECONDS:g}.")
def find(shared: Shared, job: str, export: bool) -> None:
    """Print the address and port of a job's store.

    It finds JOB as a rank does, and does not join it. Rank 0 opens its store once every rank has joined; find waits
    for that up to --timeout, else MINGLE_TIMEOUT, else 5 seconds.
    """
    if export and shared.json:
        raise click.UsageError("--export and --json can't be combined: --export prints the store for a shell.")
    job = settings.check_job_id(job, "JOB")
    network = shared.network(None if os.environ.get("MINGLE_TIMEOUT", "").strip() else FIND_SECONDS)
    try:
        session, facts = find_job(job, network)
    except MingleError:
        if export:
            output.answer("false")  # `eval ""` succeeds: a script would go on with an address of before
        raise
    _log_facts(shared, facts)
    if shared.json:
        output.answer_json("find", record(session))
    elif export:
        target = session.target()
        output.answer(f"export MASTER_ADDR={shlex.quote(target.address)} MASTER_PORT={shlex.quote(str(target.port))}")
    else:
        output.answer(str(session.target()))


def _log_facts(shared: Shared, facts: NetworkFacts) -> None:
    if shared.verbose:
        output.say(
            f"used {', '.join(facts.interfaces)}; groups {', '.join(facts.groups)}, UDP port {facts.port}: "
            f"{counted(facts.sent, 'datagram')} sent, {facts.received} heard, {facts.rejected.total()} rejected"
        )


# --- records and rows ------------------------------------------------------------------------------------------


def records(sessions: Iterable[FoundSession], seekers: Iterable[Seeking]) -> list[dict[str, Any]]:
    """Return one JSON record for each session, by job, and one for each job that only seekers speak of."""
    by_job: dict[str, list[FoundSession]] = {}
    seeking: dict[str, list[Seeking]] = {}
    for session in sessions:
        by_job.setdefault(session.offer.job, []).append(session)
    for seeker in seekers:
        seeking.setdefault(seeker.seek.job, []).append(seeker)
    found = []
    for job in sorted({*by_job, *seeking}):
        hosted, unseated = by_job.get(job, ()), seeking.get(job, ())
        hosts = [record(each) for each in hosted] or [_hostless(job, unseated)]
        ranks = [_seeker_record(each) for each in ranks_seeking(unseated, hosted)]
        # One rank answers for all, not always the same one: an order of coming would make changes of none.
        ranks.sort(key=lambda each: (each["rank"] is None, each["rank"] or 0, each["hostname"], each["pid"]))
        found += [{**host, "seeking": ranks} for host in hosts]
    return found


def record(session: FoundSession) -> dict[str, Any]:
    """Return a session's JSON record."""
    running, offer, host = session.running, session.offer, session.host()
    target = session.target() if session.alive else None
    return {
        "job": offer.job,
        "kind": offer.kind,
        "state": offer.state if running is None else running.state,
        "session": offer.session.hex(),
        "host": {"hostname": host.hostname, "pid": host.pid, "address": host.address, "rank": host.rank},
        "address": offer.addresses[0] if target is None else target.address,
        "port": offer.port if target is None else target.port,
        "endpoint": "control" if target is None else target.kind,
        "world_size": offer.world_size if running is None else running.world_size,
        "joined": session.joined,
        "missing": [] if running is None else list(running.missing),
        "secret": session.signed,
        "proved": session.alive,
        "problem": session.problem or None,
        "seconds": None if running is None else round(running.seconds, 3),
    }


def _hostless(job: str, seekers: Sequence[Seeking]) -> dict[str, Any]:
    """Return the record of a job that has no host; its fields are those of :func:`record`."""
    sizes = {each.seek.world_size for each in seekers}
    unknown = dict.fromkeys(("session", "host", "address", "port", "endpoint"))
    return {
        "job": job,
        "kind": "ranks",
        "state": "seeking",
        **unknown,
        "world_size": sizes.pop() if len(sizes) == 1 else None,
        "joined": 0,
        "missing": [],
        "secret": any(each.signed for each in seekers),
        "proved": False,
        "problem": None,
        "seconds": None,
    }


def _seeker_record(seeker: Seeking) -> dict[str, Any]:
    seek = seeker.seek
    return {
        "rank": seek.rank,
        "hostname": seek.hostname,
        "pid": seek.pid,
        # A sign in a folder does not say from which address it was written.
        "address": None if seeker.in_folder else seeker.address,
        "folder": seeker.address if seeker.in_folder else None,
    }


def row(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a record, by :data:`COLUMNS`."""
    state = record["state"]
    if not record["proved"] and record["host"] is not None:
        state += ", not proved"
    size = "?" if record["world_size"] is None else record["world_size"]
    return (
        record["job"],
        state,
        "-" if record["host"] is None else f"{record['host']['hostname'] or 'unknown'} pid {record['host']['pid']}",
        "-" if record["address"] is None else endpoint_text(record["address"], record["port"]),
        f"{record['joined']}/{size}",
        ranks_text(record["missing"]) if record["missing"] else "-",
        "; ".join(map(_seeker_text, record["seeking"])) or "-",
        "secret" if record["secret"] else "-",
    )


def _seeker_text(seeker: Mapping[str, Any]) -> str:
    who = "a process" if seeker["rank"] is None else f"rank {seeker['rank']}"
    return f"{who} on {seeker['hostname'] or 'unknown'} pid {seeker['pid']}"


def jobs_table(records: Iterable[Mapping[str, Any]], *, wide: bool = False) -> Table:
    """Return the table for a terminal: in color, and a job that waits says which other id resembles its own."""
    records = list(records)
    waiting = [record for record in records if record["state"] == "seeking" or record["missing"]]
    rows: list[output.Row] = []
    for record in records:
        job, *cells = row(record)
        others = {each["job"] for each in records} - {job} if record in waiting else set()
        near = sorted(other for other in others if ladder.resembles(job, other))
        rows.append(((job, *(f"{_RESEMBLES} {other}" for other in near)), *cells))
    return Table(COLUMNS, rows, prose="SEEKING", wide=wide, styles=_STYLES)


def _state_style(state: str) -> str:
    return "red" if "not proved" in state else "green" if state == "running" else "yellow"


_RESEMBLES = "resembles"
_STYLES = {
    "JOB": lambda line: "bold red" if line.startswith(f"{_RESEMBLES} ") else "bold",
    "STATE": _state_style,
    "MISSING": lambda _: "yellow",
    "SEEKING": lambda _: "yellow",
}
