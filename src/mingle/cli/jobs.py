"""``mingle-discover list`` and ``find``: which jobs there are, and where one of them is."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import click

from mingle.cli import output, overview
from mingle.cli.options import FAILED, HELP, Shared, shared_options

if TYPE_CHECKING:
    from mingle.config.settings import Network
    from mingle.protocol.machine import NetworkFacts

LIST_SECONDS = 2.0
"""How long a look round takes: hosts answer within a tenth of a second, at most twice a second, and an
address that does not answer costs a second."""
FIND_SECONDS = 5.0


@click.command("list", context_settings=HELP)
@click.option("--fail-if-empty", is_flag=True, help="Exit with status 1 if no job was found.")
@shared_options
def list_command(shared: Shared, fail_if_empty: bool) -> None:
    """List the jobs on this network: each with its host, who has joined, who is missing.

    One line per job, and one for each further host of it. It takes 2 seconds, or what --timeout says. Pass
    --secret-file to see the state of a job that has a secret.
    """
    from mingle.observe.lookup import look_round

    finder, facts = look_round(shared.network(LIST_SECONDS))
    jobs = overview.records(finder.sessions, finder.seekers.values())
    _tell_facts(shared, facts)
    if shared.json:
        output.answer_json("list", {"jobs": jobs})
    elif jobs:
        output.show(lambda: overview.jobs_sheet(jobs, wide=shared.wide), map(overview.row, jobs))
    for version in (reason for reason in facts.rejected if reason.startswith("version ")):
        output.say(f"somebody here speaks {version} of the protocol: an incompatible mingle, whose jobs are not shown")
    if not jobs:
        cause, remedy = why_no_job(facts)
        output.say(f"mingle-discover list: no job answered.\n  likely cause: {cause}\n  fix: {remedy}")
        if fail_if_empty:
            click.get_current_context().exit(FAILED)


def why_no_job(facts: NetworkFacts) -> tuple[str, str]:
    """Return the first likely cause that applies, with its fix. docs/troubleshooting.md lists all causes."""
    from mingle.protocol import reports
    from mingle.protocol.machine import Diagnostics

    if sure := reports.failing(facts):
        return sure.observation, f"{sure.remedy}."
    if spoken := reports.versions(facts):
        return reports.incompatible(spoken)
    if doubt := reports.suspect(facts, Diagnostics(), alone=True):
        return doubt.observation, f"{doubt.remedy}."
    return (
        f"no job runs here, or no multicast passes ({', '.join(facts.interfaces)}; UDP port {facts.port})",
        "name hosts with --peers, or another interface with -i; `mingle-discover doctor` looks for the reason.",
    )


@click.command("find", context_settings=HELP)
@click.argument("job")
@click.option(
    "--export",
    is_flag=True,
    help="Print `export MASTER_ADDR=… MASTER_PORT=…`, quoted for a shell's eval.",
)
@click.option("--control", is_flag=True, help="Print rank 0's control port, which is open before the store is.")
@shared_options
def find_command(shared: Shared, job: str, export: bool, control: bool) -> None:
    """Resolve JOB as a rank would, without joining: print ADDRESS:PORT of rank 0's store.

    Rank 0 opens its store for all once every rank has joined; find waits for the store up to --timeout, else
    MINGLE_TIMEOUT, else 5 seconds. For a job that `mingle-discover announce` announces, find prints the announced
    address and port.
    """
    from mingle.config import settings
    from mingle.observe import lookup

    if export and (shared.json or control):
        other = "--json" if shared.json else "--control"
        raise click.UsageError(f"--export and {other} can't be combined: --export prints the store for a shell.")
    job = settings.check_job_id(job, "JOB")
    sighting, facts = lookup.find(job, _network_to_find(shared), control=control)
    target = sighting.control() if control else sighting.target()
    _tell_facts(shared, facts)
    if shared.json:
        output.answer_json("find", overview.record(sighting, target))
    elif export:
        output.answer(f"export MASTER_ADDR={shlex.quote(target.address)} MASTER_PORT={shlex.quote(str(target.port))}")
    else:
        output.answer(str(target))


def _network_to_find(shared: Shared) -> Network:
    return shared.network(None if os.environ.get("MINGLE_TIMEOUT", "").strip() else FIND_SECONDS)


def _tell_facts(shared: Shared, facts: NetworkFacts) -> None:
    if shared.verbose:
        output.say(
            f"used {', '.join(facts.interfaces)}; groups {', '.join(facts.groups)}, UDP port {facts.port}: "
            f"{facts.sent} datagrams sent, {facts.received} heard, {facts.rejected.total()} rejected"
        )
