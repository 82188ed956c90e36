"""``mingle-discover doctor``: what is wrong with this machine, and with the way to another."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import click

from mingle.cli import output
from mingle.cli.options import FAILED, HELP, Shared, shared_options
from mingle.errors import ConfigurationError, InterfaceError

if TYPE_CHECKING:
    from mingle.config.settings import Network
    from mingle.config.values import Peer
    from mingle.diagnostics.findings import Finding

ROUNDS = 4
INTERVAL_SECONDS = 0.2
ROUNDS_WITH_HOST = 14
SERVING_INTERVAL_SECONDS = 0.5
"""A serving host pings several times during one --check, so that the check can judge the return path."""


@click.command("doctor", context_settings=HELP)
@click.option(
    "--check",
    "hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Check the ways to this host, too, where `mingle-discover doctor --serve` runs; may be repeated.",
)
@click.option("--serve", is_flag=True, help="Then answer the --check of other hosts, until Ctrl-C or --timeout.")
@shared_options
def doctor(shared: Shared, hosts: tuple[str, ...], serve: bool) -> None:
    """Check this machine, and with --check the path to another; print what was observed and a fix.

    PASS, WARN or FAIL: the exit status is 1 if a check failed; a warning leaves it 0. As root, doctor also reads the
    firewall's rules and finds the process that holds a port. It takes a second or two.
    """
    from mingle.cli import verdicts
    from mingle.diagnostics.findings import Status, worst

    network = shared.network(1.0)
    findings, peers = examine(network, hosts)
    if shared.json:
        fields = {"checks": [verdicts.finding_record(finding) for finding in findings], "peers": peers}
        output.answer_json("doctor", fields)
    else:
        verdicts.show_findings(findings)
    if serve:
        _serve(network, shared.timeout)
    if worst(findings) is Status.FAIL:
        click.get_current_context().exit(FAILED)


def examine(network: Network, hosts: tuple[str, ...]) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Returns the findings, and the figures of the peers as they stand in JSON."""
    from msgspec import structs

    from mingle.cli import verdicts
    from mingle.diagnostics import diagnosis
    from mingle.engine.network_facts import observed
    from mingle.network import inspection
    from mingle.observe import pathways
    from mingle.observe.pinger import Pinger, refuses

    asked, unresolved = _peers(network, hosts)
    rounds = ROUNDS_WITH_HOST if asked else ROUNDS
    overheard = os.environ.get("MINGLE_JOB_ID", "")
    try:
        with Pinger(
            structs.replace(network, peers=asked), interval=INTERVAL_SECONDS, count=rounds, overheard=overheard
        ) as pinger:
            pinger.run()
            seen = structs.replace(observed(pinger.seen, pinger.versions), unresolved=unresolved)
    except InterfaceError as error:
        seen = inspection.Observed(port=network.port, interface_problem=error, unresolved=unresolved)
        return diagnosis.examine(inspection.gather(seen, os.environ)), []
    facts = inspection.gather(seen, os.environ)
    findings = diagnosis.examine(facts)
    silent = [each for each, answered in pinger.pinging.asked.items() if not answered]
    closed = [address for address, port in silent if refuses(address, port)]
    findings += pathways.judge(pinger.pinging, facts, closed=closed)
    return findings, [verdicts.peer_record(peer) for peer in pinger.pinging.peers.values()]


def _peers(network: Network, hosts: tuple[str, ...]) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """Return the addresses that --check names, and the names in MINGLE_PEERS that do not resolve.

    Raises:
        ConfigurationError: a --check does not resolve.
    """
    from mingle.config import values
    from mingle.config.values import Peer
    from mingle.network import inspection

    unresolved = {}
    for each in network.peers:
        _, problem = inspection.resolve(each.host)
        if problem:
            unresolved[each.host] = problem
    asked: list[Peer] = []
    for each in values.peers(list(hosts), "--check"):
        addresses, problem = inspection.resolve(each.host)
        if problem:
            raise ConfigurationError.explain(
                f"--check {each.host!r} does not resolve: {problem}",
                cause="a mistyped name, or one that this host's name server does not know",
                remedy=f"give its address, or look at `getent hosts {each.host}`.",
            )
        asked += [Peer(address, each.port) for address in addresses if network.family in ("auto", _version(address))]
    return tuple(asked), unresolved


def _version(address: str) -> str:
    return "6" if ":" in address else "4"


def _serve(network: Network, seconds: float | None) -> None:
    from msgspec import structs

    from mingle.observe.pinger import Pinger

    with Pinger(structs.replace(network, peers=()), interval=SERVING_INTERVAL_SECONDS) as pinger:
        output.say(
            f"serving `mingle-discover doctor --check` of others on {', '.join(pinger.interfaces)}, UDP port "
            f"{network.port}, until interrupted (Ctrl-C)"
        )
        with contextlib.suppress(KeyboardInterrupt):
            pinger.run(until=None if seconds is None else time.monotonic() + seconds)
