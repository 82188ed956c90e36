"""Draws docs/pictures/*.svg from a lab run: ``python -m tests.lab.pictures [NAME …]`` (as root, a minute).

What they show is made by the command's own tables, of processes on hosts of the lab.
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from mingle.check import command
from mingle.check.verdicts import Report
from mingle.cli import checks, jobs
from mingle.config.settings import Network
from mingle.diagnostics import CheckStatus
from mingle.observe.lookup import list_jobs
from mingle.observe.pinger import Pinger

from . import Host, Lab
from .checks import SLOW, SLOW_SECONDS, check, hosts_of
from .faults import try_rank

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH = 118
# A page that shows a picture shall not ask another server for a font.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def picture(line: str, *shown: RenderableType) -> str:
    """A terminal in which a command was typed, as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(f"$ {line}", style="bold")
    for each in shown:
        console.print(each)
    return console.export_svg(title="mingle", theme=MONOKAI, code_format=_FORMAT, unique_id=line.split()[1].strip("-"))


def watch_picture() -> str:
    finder, _ = list_jobs(Network(discovery_timeout=8.0))
    records = jobs.records(finder.sessions, finder.seekers.values())
    return picture("mingle-discover watch", jobs.jobs_table(records))


def ping_picture(count: int = 12) -> str:
    with Pinger(Network(), "resnet", interval=0.2, count=count) as pinger:
        pinger.run(until=time.monotonic() + 20)
        findings = checks.judge(pinger.pings, pinger.inspect())
    peers = sorted(pinger.pings.peers.values(), key=str)
    table = checks.findings_table(findings)
    return picture("mingle-discover ping resnet", checks.ping_table(peers), table, *table.below)


def doctor_picture() -> str:
    findings, _ = checks.examine(Network(), ())
    table = checks.findings_table([each for each in findings if each.status is not CheckStatus.PASS])
    return picture("mingle-discover doctor", table, *table.below)


def check_picture() -> str:
    report = msgspec.json.decode(check(0, 4, seconds=SLOW_SECONDS)[1], type=Report)
    return picture("mingle-check --nnodes 4", command.matrix(report), "", *command.verdict_lines(report))


def slow_receiver(lab: Lab) -> Host:
    """One host of four receives less than a tenth of what the others do."""
    hosts = hosts_of(lab, 4)
    hosts[2].drop(SLOW)
    for rank, host in enumerate(hosts[1:], 1):
        host.start(check, rank, 4, seconds=SLOW_SECONDS)
    return hosts[0]


def watched(lab: Lab) -> Host:
    """A job that waits for two ranks, one that looks for its host, and one that has been mistyped."""
    lan = lab.network(link_local=False)
    hosts = [lab.host(lan, name=f"node{number}") for number in range(4)]
    for rank, host in enumerate(hosts[:2]):
        try_rank(host, rank, 4, discovery_timeout=24.0).wait_for("started")
    try_rank(hosts[2], 2, 4, job="resent", discovery_timeout=24.0).wait_for("started")
    try_rank(hosts[3], 0, 8, job="bert", discovery_timeout=24.0).wait_for("started")
    return hosts[3]


def pinged(lab: Lab) -> Host:
    """TCP between two workers is filtered, and a third host drops multicast."""
    lan = lab.network(link_local=False)
    hosts = [lab.host(lan, name=f"node{number}") for number in range(4)]
    hosts[2].drop(f"ip saddr {hosts[1].address()} meta l4proto tcp")
    hosts[3].drop("meta pkttype multicast udp dport 29499")
    for host in (hosts[0], hosts[2], hosts[3]):
        host.start(ping_picture, 14)
    return hosts[1]


def examined(lab: Lab) -> Host:
    """A firewall that drops the discovery, and a name that leads to loopback."""
    host = lab.host(lab.network("10.78.0.0/24", link_local=False), name="node7")
    host.drop("udp dport 29499")
    host.hosts_file.write_text("127.0.0.1 localhost\n127.0.1.1 node7\n")
    return host


def main() -> None:
    """Draw all of them."""
    PICTURES.mkdir(exist_ok=True)
    pictures: dict[str, tuple[Callable[[Lab], Host], Callable[[], str]]] = {
        "watch": (watched, watch_picture),
        "ping": (pinged, ping_picture),
        "doctor": (examined, doctor_picture),
        "check": (slow_receiver, check_picture),
    }
    for name in sys.argv[1:] or pictures:
        make, draw = pictures[name]
        with Lab() as lab:
            drawn = make(lab).start(draw).result(120)
        PICTURES.joinpath(f"{name}.svg").write_text(drawn + "\n", encoding="utf-8")
        print(PICTURES / f"{name}.svg")


if __name__ == "__main__":
    # By its real name: what runs on a host is imported there, and this module is `__main__` here alone.
    from tests.lab import pictures as this_module

    this_module.main()
