"""How the report of a check looks: tables on a terminal, tab-separated lines in a pipe, and the verdict in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mingle.check.control import Record
from mingle.check.verdicts import SLOW_FACTOR, reference
from mingle.cli import output
from mingle.cli.output import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

SIZES = ("DEVICE", "BYTES", "TIME us", "ALGBW GB/s", "BUSBW GB/s")
BROKEN = "broken"


def size_rows(report: Record) -> list[tuple[str, ...]]:
    """Return a row for each size of all_reduce."""
    return [
        (
            each["device"],
            str(each["size"]),
            f"{each['seconds'] * 1e6:.0f}",
            f"{each['algbw'] / 1e9:.3f}",
            f"{each['busbw'] / 1e9:.3f}",
        )
        for each in report["all_reduce"]
    ]


def pair_rows(report: Record) -> list[tuple[str, ...]]:
    """Return a row for each directed pair."""
    names = [place["name"] for place in report["places"]]
    return [
        (
            names[each["from"]],
            names[each["to"]],
            "-" if each["rtt"] is None else f"{each['rtt'] * 1e6:.0f}",
            _rate(each),
        )
        for each in report["pairs"]
    ]


def matrix(report: Record) -> Table:
    """Return the rates of all directed pairs in MB/s: a row sends, a column receives."""
    names = [place["name"] for place in report["places"]]
    cells = {(each["from"], each["to"]): _rate(each) for each in report["pairs"]}
    usual = reference({(each["from"], each["to"]): each["rate"] for each in report["pairs"] if each["rate"]}) / 1e6

    def style(cell: str) -> str:
        rate = 0.0 if cell == BROKEN else usual if cell in ("-", *names) else float(cell)
        return "bold red" if rate < usual / SLOW_FACTOR else "yellow" if rate < usual / 2 else "green"

    rows = [[name, *(cells.get((row, column), "-") for column in range(len(names)))] for row, name in enumerate(names)]
    return Table(("MB/s from ↓ to →", *names), rows, wide=True, styles=dict.fromkeys(names, style))


def _rate(pair: Record) -> str:
    return BROKEN if pair["fault"] else "-" if pair["rate"] is None else f"{pair['rate'] / 1e6:.0f}"


def verdict_lines(report: Record) -> Iterator[str]:
    """Yield the verdict, as every error of mingle is laid out."""
    if report["healthy"]:
        yield "healthy: all collectives are right, every pair answers, and no link and no rank is far below the others"
    for verdict in report["verdicts"]:
        yield f"FAULT: {verdict['observation']}"
        yield f"  likely cause: {verdict['cause']}"
        yield f"  fix: {verdict['fix']}"


def tables(report: Record) -> Iterator[RenderableType]:
    """Yield what a terminal shows above the verdict."""
    if report["all_reduce"]:
        yield Table(SIZES, size_rows(report))
    if report["pairs"]:
        yield matrix(report)


def show(report: Record) -> None:
    """Print the report on stdout."""
    if output.is_terminal():
        for table in tables(report):
            output.console().print(table)
    else:
        for name, rows in (("all_reduce", size_rows(report)), ("pair", pair_rows(report))):
            for row in rows:
                output.line((name, *row))
    for line in verdict_lines(report):
        output.answer(line)
