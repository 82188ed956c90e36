"""How findings and the figures of a ping look: as records of JSON, as lines in a pipe, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mingle.cli import output
from mingle.cli.output import Sheet
from mingle.diagnostics.findings import Finding, Status
from mingle.wire.echo import WAYS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from mingle.observe.figures import Peer, Row

PING_COLUMNS = ("PEER", "WAY", "SENT", "RECEIVED", "LOSS", "MIN ms", "AVG ms", "MAX ms", "ARRIVED")
_FINDING = "OBSERVATION AND FIX"
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


class PingSheet:
    """The table for a terminal, with losses in color. On a narrow terminal each peer's name stands above its rows."""

    def __init__(self, peers: Sequence[Peer], *, wide: bool) -> None:
        self._peers, self._wide = peers, wide

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table; rich calls this method."""
        from rich.text import Text

        rows = [row for peer in self._peers for row in _ping_cells(peer)]
        whole = Sheet(PING_COLUMNS, rows, wide=self._wide, sections=len(WAYS))
        if whole.fits(console, options):
            yield whole
            return
        for peer in self._peers:
            yield Text(f"\n{output.printable(str(peer))}", overflow="fold")
            yield Sheet(PING_COLUMNS[1:], [row[1:] for row in _ping_cells(peer)], wide=self._wide)


def _ping_cells(peer: Peer) -> Iterator[list[str | Text]]:
    """Yield the rows of a peer for a terminal: its name once, losses in color."""
    from rich.text import Text

    for number, (way, cells) in enumerate(zip(WAYS, ping_rows(peer), strict=True)):
        row = peer.rows[way]
        style = "" if not row.sent else "red" if not row.received else "yellow" if row.loss else "green"
        loss = PING_COLUMNS.index("LOSS")
        yield ["" if number else cells[0], *cells[1:loss], Text(cells[loss], style=style), *cells[loss + 1 :]]


def findings_sheet(findings: Sequence[Finding]) -> Sheet:
    """Returns the table of a terminal: what was seen, and under it what to do."""
    from rich.text import Text

    rows = []
    for finding in findings:
        words = Text(output.printable(finding.observation))
        if finding.remedy:
            words.append(f"\n→ {output.printable(finding.remedy)}", style="cyan")
        rows.append((finding.name, Text(finding.status.name, style=_STYLES[finding.status]), words))
    return Sheet(("CHECK", "STATUS", _FINDING), rows, prose=_FINDING)


def show_findings(findings: Sequence[Finding]) -> None:
    """Prints findings on stdout."""
    rows = ((each.status.name, each.name, each.observation, each.remedy) for each in findings)
    output.show(lambda: findings_sheet(findings), (row if row[-1] else row[:-1] for row in rows))
