"""How findings and the figures of a ping look: as records of JSON, as lines in a pipe, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mingle.checks.findings import Finding, Status
from mingle.cli import output
from mingle.wire.echo import WAYS

if TYPE_CHECKING:
    from rich.table import Table

    from mingle.pings.figures import Peer, Row

PING_COLUMNS = ("PEER", "WAY", "SENT", "RECEIVED", "LOSS", "MIN ms", "AVG ms", "MAX ms", "ARRIVED")
_STYLES = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
_WAY_WORDS = {"multicast": "multicast", "link": "224.0.0.x", "unicast": "unicast", "tcp": "TCP"}


def finding_record(finding: Finding) -> dict[str, str | None]:
    """Returns a finding as it stands in JSON."""
    return {
        "name": finding.name,
        "status": finding.status.name,
        "observation": finding.observation,
        "remedy": finding.remedy or None,
    }


def peer_record(peer: Peer) -> dict[str, Any]:
    """Returns a peer's figures as they stand in JSON; times are in seconds."""
    return {
        "hostname": peer.hostname,
        "address": peer.address,
        "pid": peer.pid,
        "interface": peer.interface or None,
        "gone": peer.gone,
        "ways": {way: _row_record(peer.rows[way]) for way in WAYS},
    }


def _row_record(row: Row) -> dict[str, Any]:
    shortest, mean, longest = row.figures or (None, None, None)
    return {
        "sent": row.sent,
        "received": row.received,
        "loss": round(row.loss, 4),
        "min": shortest,
        "avg": mean,
        "max": longest,
        "arrived": row.arrived,
        "reason": row.reason or None,
    }


def ping_rows(peer: Peer) -> list[tuple[str, ...]]:
    """Returns a row of text for each way."""
    return [(str(peer), _WAY_WORDS[way], *_cells(peer.rows[way])) for way in WAYS]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.sent),
        str(row.received),
        f"{row.loss:.0%}" if row.sent else "-",
        *([f"{figure * 1000:.2f}" for figure in row.figures] if row.figures else ("-", "-", "-")),
        str(row.arrived),
    )


def ping_table(peers: Sequence[Peer]) -> Table:
    """Returns the table of a terminal; what is lost stands out."""
    from rich.text import Text

    drawn = output.new_table(PING_COLUMNS)
    for peer in peers:
        for number, (way, cells) in enumerate(zip(WAYS, ping_rows(peer), strict=True)):
            row = peer.rows[way]
            style = "" if not row.sent else "red" if not row.received else "yellow" if row.loss else "green"
            name = cells[0] if number == 0 else ""
            drawn.add_row(
                Text(output.printable(name)),
                cells[1],
                *(Text(cell, style=style if column == 4 else "") for column, cell in enumerate(cells[2:], 2)),
                end_section=number == len(WAYS) - 1,
            )
    return drawn


def findings_table(findings: Sequence[Finding]) -> Table:
    """Returns the table of a terminal: what was seen, and under it what to do."""
    from rich.text import Text

    drawn = output.new_table(("CHECK", "STATUS", "OBSERVATION AND REMEDY"))
    for finding in findings:
        words = Text(output.printable(finding.observation))
        if finding.remedy:
            words.append(f"\n→ {output.printable(finding.remedy)}", style="cyan")
        drawn.add_row(
            Text(output.printable(finding.name)), Text(finding.status.name, style=_STYLES[finding.status]), words
        )
    return drawn


def show_findings(findings: Sequence[Finding]) -> None:
    """Prints findings on stdout."""
    if output.is_terminal():
        output.console().print(findings_table(findings))
        return
    for finding in findings:
        cells = (finding.status.name, finding.name, finding.observation, finding.remedy)
        output.line(cells[: 4 if finding.remedy else 3])
