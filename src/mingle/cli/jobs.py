"""``mingle-discover list`` and ``find``: which jobs there are, and where one of them is."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import click

from mingle.cli import output, overview
from mingle.cli.options import FAILED, HELP, Shared, shared_options

if TYPE_CHECKING:
    from mingle.configuration.settings import Network
    from mingle.rules.machine import NetworkFacts

LIST_SECONDS = 2.0
"""How long a look round takes: hosts answer within a tenth of a second, at most twice a second, and an
address that does not answer costs a second."""
FIND_SECONDS = 5.0


@click.command("list", context_settings=HELP)
@shared_options
def list_command(shared: Shared) -> None:
    """Look round once: every job, its host, who has joined, who is missing.

    One line per job, and one for each further host of it. It takes 2 seconds, or what --timeout says. How a
    job with a secret stands is known only with --secret-file.
    """
    from mingle.observing.lookup import look_round

    finder, facts = look_round(shared.network(LIST_SECONDS))
    jobs = overview.records(finder.sessions, finder.seekers.values())
    _tell_facts(shared, facts)
    if shared.json:
        output.answer_json("list", {"jobs": jobs})
    elif jobs:
        output.table(overview.COLUMNS, [overview.row(record) for record in jobs])
    for version in (reason for reason in facts.rejected if reason.startswith("version ")):
        output.say(f"somebody here speaks {version} of the protocol: an incompatible mingle, whose jobs are not shown")
    if not jobs:
        cause = f"none is there, or no multicast passes ({', '.join(facts.interfaces)}; UDP port {facts.port})"
        remedy = "name hosts with --peers, or another interface with -i; `mingle-discover doctor` looks for the reason"
        if facts.findings:
            cause, remedy = facts.findings[0].observation, facts.findings[0].remedy
        output.say(f"mingle-discover list: no job answered.\n  likely cause: {cause}\n  way out: {remedy}.")
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
    from mingle.configuration import settings
    from mingle.observing import lookup

    if export and shared.json:
        raise click.UsageError("--export and --json are two forms of the answer; give one of them.")
    job = settings.check_job_id(job, "JOB")
    sighting, facts = lookup.find(job, _network_to_find(shared), with_store=export)
    target = sighting.target()
    _tell_facts(shared, facts)
    if shared.json:
        output.answer_json("find", overview.record(sighting))
    elif export:
        output.answer(f"export MASTER_ADDR={shlex.quote(target.address)} MASTER_PORT={shlex.quote(str(target.port))}")
    else:
        if target.kind == "control":
            output.say(f"job {job!r} is still gathering: this is rank 0's control port, its store is not open yet")
        output.answer(str(target))


def _network_to_find(shared: Shared) -> Network:
    return shared.network(None if os.environ.get("MINGLE_TIMEOUT", "").strip() else FIND_SECONDS)


def _tell_facts(shared: Shared, facts: NetworkFacts) -> None:
    if shared.verbose:
        output.say(
            f"used {', '.join(facts.interfaces)}; groups {', '.join(facts.groups)}, UDP port {facts.port}: "
            f"{facts.sent} datagrams sent, {facts.received} heard, {facts.rejected.total()} rejected"
        )
