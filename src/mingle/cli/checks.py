"""``mingle-discover doctor`` and ``ping``: what is wrong with this machine, and with the paths to other hosts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
from msgspec import structs

from mingle.cli import output
from mingle.cli.options import Shared, fail, shared_options
from mingle.cli.output import Table
from mingle.config import placement, settings, values
from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.diagnostics import CheckStatus, Finding, diagnosis, worst
from mingle.diagnostics.diagnosis import Facts
from mingle.errors import ConfigurationError, InterfaceError, MingleError, counted
from mingle.network import folders, inspection
from mingle.network.folders import Examined
from mingle.network.peers import with_a_route
from mingle.observe import path_checks
from mingle.observe.ping import Figures, PingMachine, PingPeer
from mingle.observe.pinger import Pinger, refuses
from mingle.wire.echo import WAYS

DOCTOR_ROUNDS = 4
DOCTOR_INTERVAL_SECONDS = 0.2
CHECK_ROUNDS = 14
SERVE_INTERVAL_SECONDS = 0.5
"""A serving host pings several times during one --check, so that the check can judge the return path."""
SHORTEST_INTERVAL_SECONDS = 0.05
"""Peers answer one address at most 40 times a second for each path."""

FINDING_COLUMNS = ("STATUS", "CHECK", "OBSERVATION", "FIX")
PING_COLUMNS = ("PEER", "WAY", "SENT", "ANSWERED", "LOSS", "MIN ms", "AVG ms", "MAX ms", "FROM PEER")
_FINDING = "OBSERVATION AND FIX"
_FIX = "→ "
_STATUS_STYLES = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red"}
_LOSS_STYLES = {"-": "", "0%": "green", "100%": "red"}
_WAY_NAMES = {"multicast": "multicast", "link": "224.0.0.x", "unicast": "unicast", "tcp": "TCP"}


@click.command("doctor", epilog="Example: mingle-discover doctor --check node-2")
@click.option(
    "--check",
    "hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="Check the paths to and from this host as well, where `mingle-discover doctor --serve` runs; can be repeated.",
)
@click.option("--all", "every", is_flag=True, help="Show the checks that passed as well.")
@click.option("--serve", is_flag=True, help="After the checks, answer the --check of other hosts until --timeout.")
@shared_options(timeout="Time limit of --serve. Default: none.", table=True)
def doctor(shared: Shared, hosts: tuple[str, ...], every: bool, serve: bool) -> None:
    """Check this machine and its network, and suggest fixes.

    Each check is PASS, WARN or FAIL, with what was observed and a fix; without --all those that passed are only
    counted. The exit status is 1 if a check failed; a warning leaves it 0. As root, doctor also reads the firewall's
    rules and finds the process that holds a port. It takes a second or two. --serve ends with Ctrl-C or --timeout.
    """
    network = shared.network(1.0)
    findings, peers = examine(network, hosts)
    fields = {"checks": [finding_record(finding) for finding in findings], "peers": peers}
    shown = findings if every else [each for each in findings if each.status is not CheckStatus.PASS]
    shared.answer(fields, findings_table(shown), finding_lines(shown))
    if not (every or shared.json):
        output.say(f"{len(findings) - len(shown)} of {len(findings)} checks passed; --all shows them")
    if serve:
        try:
            _serve(shared, network)
        except MingleError as error:  # not raised: with --json it would become a second answer
            output.say(f"mingle-discover doctor: {error}")
            fail()
    if worst(findings) is CheckStatus.FAIL:
        fail()


def _serve(shared: Shared, network: Network) -> None:
    with (
        Pinger(structs.replace(network, peers=()), interval=SERVE_INTERVAL_SECONDS) as pinger,
        folders.examined(network.folders, placement.this_node()),
    ):
        output.say(
            f"serving `mingle-discover doctor --check` of other hosts on {', '.join(pinger.interfaces)}, "
            f"UDP port {network.port}; Ctrl-C ends it"
        )
        with contextlib.suppress(KeyboardInterrupt):
            pinger.run(until=shared.deadline())


def _seen(url: str, examined: Examined) -> str:
    """Return what a folder shows of other hosts, as the end of a sentence."""
    if not examined.others:
        return (
            f"; no other host has written there just now, as `mingle-discover doctor --serve --peers {url}` on "
            "another host does"
        )
    age = "" if examined.age is None else f"; the newest is {examined.age:.0f} s old"
    return f", and reads what {counted(examined.others, 'other host')} wrote{age}"


def examine(network: Network, hosts: tuple[str, ...]) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Return the findings, and the JSON records of the peers."""
    try:
        job = settings.check_job_id(os.environ.get("MINGLE_JOB_ID"), "MINGLE_JOB_ID")
    except ConfigurationError:  # the check of the environment names it, if it is set
        job = ""
    asked, named, unresolved = _resolve(network, hosts)
    looked = folders.examine(network.folders, placement.this_node())
    in_folders = {
        url: ("", "") if each.problem is None else (each.problem.what, each.problem.fix) for url, each in looked.items()
    }
    known: dict[str, Any] = {
        "environ": os.environ,
        "unresolved": unresolved,
        "folders": in_folders,
        "seen_in_folders": {url: _seen(url, each) for url, each in looked.items()},
    }
    try:
        with Pinger(
            structs.replace(network, peers=asked),
            interval=DOCTOR_INTERVAL_SECONDS,
            count=CHECK_ROUNDS if asked else DOCTOR_ROUNDS,
            overheard=job,
        ) as pinger:
            pinger.run()
            here = pinger.driver.interfaces.addresses()
            itself = bool(named) and not (asked or network.folders) and {*named} <= {*here}
            facts = pinger.inspect(peers=named, names_itself=itself, **known)
    except InterfaceError as error:
        facts = inspection.collect_facts(network.port, interface_problem=error, **known)
        return diagnosis.examine(facts), []
    silent = [each for each, answered in pinger.pings.asked.items() if not answered]
    with ThreadPoolExecutor(max_workers=inspection.LOOK_UPS_AT_ONCE) as pool:  # each can take 2.5 s
        refused = list(pool.map(lambda each: refuses(*each), silent))
    closed = [address for (address, _), answer in zip(silent, refused, strict=True) if answer]
    findings = diagnosis.examine(facts) + path_checks.judge(pinger.pings, facts, closed=closed)
    heard = {peer.address for peer in pinger.pings.peers.values()}
    findings += [
        Finding(
            each.host,
            CheckStatus.WARN,
            f"{each.host} is an address of this host: no path to another host was checked",
            "name another host in --check, one on which `mingle-discover doctor --serve` runs",
        )
        for each in asked
        if each.host in pinger.pings.own and each.host not in heard
    ]
    return findings, [peer_record(peer) for peer in pinger.pings.peers.values()]


def _resolve(network: Network, hosts: tuple[str, ...]) -> tuple[tuple[Peer, ...], list[str], dict[str, str]]:
    """Return the addresses that --check names, all that are named, and the names in MINGLE_PEERS that do not resolve.

    Raises:
        ConfigurationError: a --check does not resolve, or to no address of the family, or names a shared folder.
    """
    for folder in values.folders(hosts, "--check"):
        raise ConfigurationError.explain(
            f"--check names {folder!r}, which is a shared folder and not a host",
            cause="--check is for the paths to another host",
            remedy=f"check the folder with `mingle-discover doctor --peers {folder}`.",
        )
    checked = values.peers(list(hosts), "--check")
    resolved = inspection.resolve_all(each.host for each in (*network.peers, *checked))
    problems = {each.host: resolved[each.host][1] for each in network.peers}
    asked: list[Peer] = []
    for each in checked:
        addresses, problem = resolved[each.host]
        if problem:
            raise ConfigurationError.explain(
                f"--check {each.host!r} does not resolve: {problem}",
                cause="a mistyped name, or one that this host's name server does not know",
                remedy=f"give its address, or look at `getent hosts {each.host}`.",
            )
        versions = ("4", "6") if network.family == "auto" else (network.family,)
        suitable = [host for host in addresses if ("6" if ":" in host else "4") in versions]
        if not suitable:
            raise ConfigurationError.explain(
                f"--check {each.host!r} has no IPv{network.family} address: {', '.join(addresses)}",
                cause="--family or MINGLE_FAMILY was set for another network than this host's",
                remedy=f"give an IPv{network.family} address of the host, or leave the family at auto.",
            )
        asked += [Peer(host, each.port) for host in with_a_route(suitable)]
    every = [address for addresses, _ in resolved.values() for address in addresses]
    return tuple(asked), every, {host: problem for host, problem in problems.items() if problem}


@click.command("ping", epilog="Example: mingle-discover ping $USER-resnet")
@click.argument("job", required=False, default="")
@click.option("--count", type=click.IntRange(1, 1_000_000), metavar="N", help="Number of rounds. Default: no limit.")
@click.option(
    "--interval",
    type=click.FloatRange(SHORTEST_INTERVAL_SECONDS, 60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two rounds.",
)
@shared_options(timeout="Time limit. Default: none.", table=True)
def ping(shared: Shared, job: str, count: int | None, interval: float) -> None:
    """Show which hosts reach each other, and over which paths.

    Run the same command on every host at the same time, with the same JOB or with none. For each other host it shows
    how many pings were sent, answered and lost, and the round-trip times: by multicast, by the multicast that no switch
    filters (224.0.0.x), by unicast and by TCP. FROM PEER counts the other host's own pings that arrived here; if
    it started earlier, they are more than SENT. Conclusions follow below the figures.

    It ends after --count rounds, with --timeout, or with Ctrl-C. The exit status is 1 if no host answered or a path is
    broken. Lost multicast is only a warning if unicast passes and --peers, or MINGLE_PEERS, names the host.
    """
    job = settings.check_job_id(job, "JOB") if job else ""
    network = shared.network(1.0)
    until = shared.deadline()
    with Pinger(network, job, interval=interval, count=count, overheard=job) as pinger:
        output.say(
            f"pinging on {', '.join(pinger.interfaces)}, UDP port {network.port}; run the same command on other hosts"
        )
        shown: dict[bytes, bool] = {}

        def table() -> Table:
            return ping_table(pinger.pings.peers.values(), wide=shared.wide)

        def print_changes() -> None:
            for name, peer in pinger.pings.peers.items():
                if not shared.json and shown.get(name) != peer.gone:
                    shown[name] = peer.gone
                    output.line(("-" if peer.gone else "+", str(peer), f"pid {peer.pid}"))

        with shared.following(PING_COLUMNS, table, print_changes, transient=True) as update:
            with contextlib.suppress(KeyboardInterrupt):
                pinger.run(until=until, each=update)
            update()
        findings = judge(pinger.pings, pinger.inspect())
    peers = list(pinger.pings.peers.values())
    fields = {
        "job": job or None,
        "rounds": pinger.pings.rounds,
        "peers": [peer_record(peer) for peer in peers],
        "findings": [finding_record(finding) for finding in findings],
    }
    rows = [("=", *row) for peer in peers for row in ping_rows(peer)]
    if shared.json:
        output.answer_json("ping", fields)
    else:
        output.show(ping_table(peers, wide=shared.wide), Table(("EVENT", *PING_COLUMNS), rows))
        output.show(findings_table(findings), finding_lines(findings), header=shared.header)
    if not peers:
        cause, fix = why_unheard(findings)
        error = MingleError.explain("no host answered.", cause=cause, remedy=fix)
        output.say(f"mingle-discover ping: {error}")
    if not peers or worst(findings) is CheckStatus.FAIL:
        fail()


def judge(pings: PingMachine, facts: Facts) -> list[Finding]:
    """Return the verdicts on the figures, and if pings are lost the troubles of this machine."""
    found = path_checks.judge(pings, facts, named={address for address, _ in pings.asked})
    if not pings.peers or any(finding.status is not CheckStatus.PASS for finding in found):
        found += diagnosis.troubles(facts)
    return found + [finding for finding in diagnosis.examine(facts) if finding.name == "version"]


def why_unheard(findings: list[Finding]) -> tuple[str, str]:
    """Return the first likely cause that applies, with its fix."""
    # A ping about another job shows that this machine hears others, so no check's warning explains the silence.
    sure = [each for each in findings if each.status is CheckStatus.FAIL or each.name in ("job", "version")]
    for finding in (*sure, *(each for each in findings if each.explains_silence)):
        return finding.observation, finding.fix
    return (
        "the command does not run on another host, or no multicast passes",
        "start it on every host at the same time; without multicast name one with --peers.",
    )


# --- records and rows ------------------------------------------------------------------------------------------


def finding_record(finding: Finding) -> dict[str, str | None]:
    """Return the JSON record of a finding."""
    return {
        "name": finding.name,
        "status": finding.status.name,
        "observation": finding.observation,
        "remedy": finding.remedy or None,
    }


def finding_lines(findings: Iterable[Finding]) -> Table:
    """Return the lines for a pipe; only a finding with a fix has the last cell."""
    return Table(
        FINDING_COLUMNS,
        [
            (each.status.name, each.name, each.observation, *([each.fix_in_one_line] if each.remedy else []))
            for each in findings
        ],
    )


def findings_table(findings: Iterable[Finding]) -> Table:
    """Return the table for a terminal, with the fix below the observation, and the commands below the table."""
    rows: list[tuple[str, str, tuple[str, ...]]] = []
    below: dict[str, list[str]] = {}
    for each in findings:
        words, *commands = each.remedy.split("\n")
        if commands:
            below[words] = commands
            words = f"{words.removesuffix(':')}, as below"
        rows.append((each.name, each.status.name, (each.observation, *([_FIX + words] if words else []))))
    pasted = [line for words, commands in below.items() for line in ("", words, *(f"  {each}" for each in commands))]
    styles = {"STATUS": _STATUS_STYLES.__getitem__, _FINDING: lambda text: "cyan" if text.startswith(_FIX) else ""}
    return Table(("CHECK", "STATUS", _FINDING), rows, prose=_FINDING, styles=styles, below=pasted)


def peer_record(peer: PingPeer) -> dict[str, Any]:
    """Return the JSON record of a peer's figures; times are in seconds."""
    return {
        "hostname": peer.hostname,
        "address": peer.address,
        "pid": peer.pid,
        "interface": peer.interface or None,
        "gone": peer.gone,
        "ways": {way: _figures_record(peer.figures[way]) for way in WAYS},
    }


def _figures_record(figures: Figures) -> dict[str, Any]:
    shortest, mean, longest = figures.round_trips or (None, None, None)
    return {
        "sent": figures.sent,
        "received": figures.received,
        "loss": round(figures.loss, 4),
        "min": shortest,
        "avg": mean,
        "max": longest,
        "arrived": figures.arrived,
        "reason": figures.reason or None,
    }


def ping_rows(peer: PingPeer) -> list[tuple[str, ...]]:
    """Return the cells of each path to a peer, by :data:`PING_COLUMNS`."""
    return [(str(peer), _WAY_NAMES[way], *_cells(peer.figures[way])) for way in WAYS]


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        str(figures.sent),
        str(figures.received),
        f"{figures.loss:.0%}" if figures.sent else "-",
        *([f"{each * 1000:.2f}" for each in figures.round_trips] if figures.round_trips else ("-", "-", "-")),
        str(figures.arrived),
    )


def ping_table(peers: Iterable[PingPeer], *, wide: bool = False) -> Table:
    """Return the table for a terminal: each peer's name once, losses in color."""
    rows = [row for peer in peers for row in ping_rows(peer)]
    styles = {"LOSS": lambda text: _LOSS_STYLES.get(text, "yellow")}
    return Table(PING_COLUMNS, rows, wide=wide, groups=[len(WAYS)] * (len(rows) // len(WAYS)), styles=styles)
