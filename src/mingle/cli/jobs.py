"""``mingle-discover list`` and ``find``: which jobs there are, and where one of them is."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from mingle.cli import output
from mingle.cli.options import FAILED, HELP, Shared, shared_options

if TYPE_CHECKING:
    from mingle.machine import NetworkFacts
    from mingle.settings import Network
    from mingle.sighting import Seeking, Sighting

LIST_SECONDS = 2.0
"""How long a look round takes: hosts answer within a tenth of a second, at most twice a second, and an
address that does not answer costs a second."""
FIND_SECONDS = 5.0
COLUMNS = ("JOB", "STATE", "HOST", "ADDRESS", "JOINED", "MISSING", "SEEKING", "SECRET")


@click.command("list", context_settings=HELP)
@shared_options
def list_command(shared: Shared) -> None:
    """Look round once: every job, its host, who has joined, who is missing.

    One line per job, and one for each further host of it. It takes 2 seconds, or what --timeout says. How a
    job with a secret stands is known only with --secret-file.
    """
    from mingle.lookup import look_round

    finder, facts = look_round(shared.network(LIST_SECONDS))
    seekers: dict[str, list[Seeking]] = {}
    for each in finder.seekers.values():
        seekers.setdefault(each.seek.job, []).append(each)
    sightings: dict[str, list[Sighting]] = {job: [] for job in seekers}
    for sighting in finder.sessions:
        sightings.setdefault(sighting.offer.job, []).append(sighting)
    jobs = [record for job in sorted(sightings) for record in _records(sightings[job], seekers.get(job, ()), job)]
    _tell_facts(shared, facts)
    if shared.json:
        output.answer_json("list", {"jobs": jobs})
    elif jobs:
        output.table(COLUMNS, [_row(record) for record in jobs])
    if not jobs:
        output.say(
            "mingle-discover list: no job answered.\n"
            f"  likely cause: none is there, or no multicast passes ({', '.join(facts.interfaces)}; "
            f"UDP port {facts.port})\n"
            "  way out: name hosts with --peers, or another interface with -i; "
            "`mingle-discover interfaces` shows them."
        )
        click.get_current_context().exit(FAILED)


@click.command("find", context_settings=HELP)
@click.argument("job")
@click.option(
    "--export",
    is_flag=True,
    help="Wait for rank 0's store and print `export MASTER_ADDR=… MASTER_PORT=…`, quoted for a shell's eval.",
)
@shared_options
def find_command(shared: Shared, job: str, export: bool) -> None:
    """Resolve JOB as a rank would, without joining: print ADDRESS:PORT of rank 0.

    The port is that of rank 0's store once every rank has joined; before, it is rank 0's control port (there
    is no store yet: --export waits for it). For a job that `mingle-discover announce` speaks for, address and
    port are the announced ones.

    It waits up to --timeout, else MINGLE_TIMEOUT, else 5 seconds for the job to appear.
    """
    from mingle import lookup, settings

    if export and shared.json:
        raise click.UsageError("--export and --json are two forms of the answer; give one of them.")
    job = settings.check_job_id(job, "JOB")
    sighting, facts = lookup.find(job, _network_to_find(shared), with_store=export)
    target = sighting.target()
    _tell_facts(shared, facts)
    if shared.json:
        output.answer_json("find", _record(sighting))
    elif export:
        output.answer(f"export MASTER_ADDR={shlex.quote(target.address)} MASTER_PORT={shlex.quote(str(target.port))}")
    else:
        if target.kind == "control":
            output.say(f"job {job!r} is still gathering: this is rank 0's control port, its store is not open yet")
        output.answer(str(target))


def _network_to_find(shared: Shared) -> Network:
    return shared.network(None if os.environ.get("MINGLE_TIMEOUT", "").strip() else FIND_SECONDS)


def _records(sightings: Sequence[Sighting], seekers: Sequence[Seeking], job: str) -> list[dict[str, Any]]:
    """Returns one record per session of a job; one without a host where there are only seekers."""
    from mingle.sighting import ranks_seeking

    seeking = [
        {
            "rank": each.seek.rank,
            "hostname": each.seek.hostname,
            "pid": each.seek.pid,
            "address": each.address,
        }
        for each in ranks_seeking(seekers, sightings)
    ]
    if not sightings:
        sizes = {each.seek.world_size for each in seekers}
        return [
            {
                "job": job,
                "kind": "ranks",
                "state": "seeking",
                "session": None,
                "host": None,
                "address": None,
                "port": None,
                "endpoint": None,
                "world_size": sizes.pop() if len(sizes) == 1 else None,
                "joined": 0,
                "missing": [],
                "seeking": seeking,
                "secret": any(each.signed for each in seekers),
                "proved": False,
                "problem": None,
                "seconds": None,
            }
        ]
    return [{**_record(sighting), "seeking": seeking} for sighting in sightings]


def _record(sighting: Sighting) -> dict[str, Any]:
    running, offer, host = sighting.running, sighting.offer, sighting.host()
    target = sighting.target() if sighting.alive else None
    announced = offer.kind == "announcement"
    world_size = offer.world_size if running is None else running.world_size
    return {
        "job": offer.job,
        "kind": offer.kind,
        "state": offer.state if running is None else running.state,
        "session": offer.session.hex(),
        "host": {"hostname": host.hostname, "pid": host.pid, "address": host.address, "rank": host.rank},
        "address": offer.addresses[0] if target is None else target.address,
        "port": offer.port if target is None else target.port,
        "endpoint": "control" if target is None else target.kind,
        # An announcement need not say how many ranks there are, and knows nothing of who has joined.
        "world_size": None if announced and world_size == 1 else world_size,
        "joined": None if announced else sighting.joined,
        "missing": [] if running is None else list(running.missing),
        "secret": sighting.signed,
        "proved": sighting.alive,
        "problem": sighting.problem or None,
        "seconds": None if running is None else round(running.seconds, 3),
    }


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    from mingle.reports import ranks_text
    from mingle.sighting import endpoint_text

    state = "announced" if record["kind"] == "announcement" else record["state"]
    if not record["proved"] and record["host"] is not None:
        state += ", not proved"
    size = "?" if record["world_size"] is None else record["world_size"]
    return (
        record["job"],
        state,
        "-" if record["host"] is None else f"{record['host']['hostname'] or 'unknown'} pid {record['host']['pid']}",
        "-" if record["address"] is None else endpoint_text(record["address"], record["port"]),
        "-" if record["joined"] is None else f"{record['joined']}/{size}",
        ranks_text(record["missing"]) if record["missing"] else "-",
        "; ".join(map(_seeking_text, record["seeking"])) or "-",
        "secret" if record["secret"] else "-",
    )


def _seeking_text(seeker: dict[str, Any]) -> str:
    who = "a process" if seeker["rank"] is None else f"rank {seeker['rank']}"
    return f"{who} on {seeker['hostname'] or 'unknown'} pid {seeker['pid']}"


def _tell_facts(shared: Shared, facts: NetworkFacts) -> None:
    if shared.verbose:
        output.say(
            f"used {', '.join(facts.interfaces)}; groups {', '.join(facts.groups)}, UDP port {facts.port}: "
            f"{facts.sent} datagrams sent, {facts.received} heard, {facts.rejected.total()} rejected"
        )
