"""``mingle-discover ping``: who hears whom, by which way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from mingle.cli import output
from mingle.cli.options import FAILED, HELP, Shared, shared_options

if TYPE_CHECKING:
    from mingle.diagnostics.diagnosis import Facts
    from mingle.diagnostics.findings import Finding
    from mingle.observe.pinger import Pinger
    from mingle.observe.pinging import Pinging

SHORTEST_INTERVAL_SECONDS = 0.05
"""Peers answer no one address more than 40 times a second and way."""


@click.command("ping", context_settings=HELP)
@click.argument("job", required=False, default="")
@click.option("--count", type=click.IntRange(1, 1_000_000), metavar="N", help="Rounds. Default: until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(SHORTEST_INTERVAL_SECONDS, 60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two rounds.",
)
@shared_options
def ping(shared: Shared, job: str, count: int | None, interval: float) -> None:
    """Who hears whom: run the same command on every host, at the same time.

    For each other host it shows what was sent, answered and lost, and the round-trip times: by multicast, by the
    multicast that no switch may filter (224.0.0.x), by unicast and by TCP. ARRIVED counts the other's own. What
    that means is said in words. Give all hosts the same JOB, or none.

    It goes on until --count rounds are over, --timeout has passed, or Ctrl-C. The exit status is 1 if nobody
    answered or a way is broken.
    """
    from mingle.config import settings
    from mingle.observe.pinger import Pinger

    job = settings.check_job_id(job, "JOB") if job else ""
    network = shared.network(1.0)
    until = None if shared.timeout is None else time.monotonic() + shared.timeout
    with Pinger(network, job, interval=interval, count=count, overheard=job) as pinger:
        output.say(f"pinging on {', '.join(pinger.interfaces)}, UDP port {network.port}; the same command elsewhere?")
        with _live(shared, pinger) as update, contextlib.suppress(KeyboardInterrupt):
            pinger.run(until=until, each=update)
        findings = findings_of(pinger)
    _show(shared, pinger, job, findings)


def findings_of(pinger: Pinger) -> list[Finding]:
    """Returns what the figures mean, and where something is lost what is wrong with this machine."""
    from mingle.engine.network_facts import observed
    from mingle.network import inspection

    return findings_from(pinger.pinging, inspection.gather(observed(pinger.seen, pinger.versions)))


def findings_from(pinging: Pinging, facts: Facts) -> list[Finding]:
    """Judge the figures with what is known of this machine."""
    from mingle.diagnostics import diagnosis
    from mingle.diagnostics.findings import Status
    from mingle.observe import pathways

    found = pathways.judge(pinging, facts)
    if not pinging.peers or any(finding.status is not Status.PASS for finding in found):
        found += diagnosis.troubles(facts)
    return found + [finding for finding in diagnosis.examine(facts) if finding.name == "version"]


def why_nobody(findings: list[Finding]) -> tuple[str, str]:
    """Return the first likely cause that applies, with its fix. docs/troubleshooting.md lists all causes."""
    from mingle.diagnostics.findings import Status

    for finding in findings:
        # A ping about another job shows that this machine hears others, so no check's warning explains the silence.
        if finding.status is Status.FAIL or finding.name in ("job", "version"):
            return finding.observation, finding.remedy
    for finding in findings:
        if finding.explains_silence:
            return finding.observation, finding.remedy
    return (
        "the command does not run on another host, or no multicast passes",
        "start it on every host at the same time; without multicast name one with --peers",
    )


def _show(shared: Shared, pinger: Pinger, job: str, findings: list[Finding]) -> None:
    from mingle.cli import verdicts
    from mingle.diagnostics.findings import Status, worst

    peers = list(pinger.pinging.peers.values())
    if shared.json:
        fields = {
            "job": job or None,
            "rounds": pinger.pinging.cast,
            "peers": [verdicts.peer_record(peer) for peer in peers],
            "findings": [verdicts.finding_record(finding) for finding in findings],
        }
        output.answer_json("ping", fields)
    else:
        rows = (("=", *row) for peer in peers for row in verdicts.ping_rows(peer))
        output.show(lambda: verdicts.PingSheet(peers, wide=shared.wide), rows)
        verdicts.show_findings(findings)
    if not peers:
        cause, remedy = why_nobody(findings)
        output.say(f"mingle-discover ping: nobody answered.\n  likely cause: {cause}\n  fix: {remedy}.")
    if not peers or worst(findings) is Status.FAIL:
        click.get_current_context().exit(FAILED)


@contextlib.contextmanager
def _live(shared: Shared, pinger: Pinger) -> Iterator[Callable[[], None]]:
    """Gives what is called while it goes on: a table that changes, or a line for each that comes and goes."""
    if shared.json:
        yield lambda: None
    elif output.is_terminal():
        from rich.live import Live

        from mingle.cli import verdicts

        def draw() -> None:
            live.update(verdicts.PingSheet(list(pinger.pinging.peers.values()), wide=shared.wide))

        with Live(console=output.console(), transient=True, refresh_per_second=4) as live:
            yield draw
    else:
        shown: dict[bytes, bool] = {}

        def tell() -> None:
            for name, peer in pinger.pinging.peers.items():
                if shown.get(name) != peer.gone:
                    shown[name] = peer.gone
                    output.line(("-" if peer.gone else "+", str(peer), f"pid {peer.pid}"))

        yield tell
        tell()
