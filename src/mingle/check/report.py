"""How the report of a check looks: tables on a terminal, tab-separated lines in a pipe, and the verdict in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mingle.check.control import Record
from mingle.check.verdicts import SLOW_FACTOR, reference
from mingle.cli import output
from mingle.cli.output import Sheet

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

SIZES = ("DEVICE", "BYTES", "TIME us", "ALGBW GB/s", "BUSBW GB/s")
PAIRS = ("FROM", "TO", "ROUND TRIP us", "MB/s")


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
            "-" if each["rate"] is None else f"{each['rate'] / 1e6:.0f}",
        )
        for each in report["pairs"]
    ]


def matrix(report: Record) -> Sheet:
    """Return the rates of all directed pairs in MB/s: a row sends, a column receives."""
    from rich.text import Text

    names = [place["name"] for place in report["places"]]
    rates = {(each["from"], each["to"]): each["rate"] for each in report["pairs"]}
    faults = {(each["from"], each["to"]): each["fault"] for each in report["pairs"]}
    usual = reference({pair: rate for pair, rate in rates.items() if rate is not None})

    def cell(pair: tuple[int, int]) -> Text:
        rate = rates.get(pair)
        if rate is None:
            return Text("broken" if faults.get(pair) else "-", style="bold red" if faults.get(pair) else "")
        style = "bold red" if rate < usual / SLOW_FACTOR else "yellow" if rate < usual / 2 else "green"
        return Text(f"{rate / 1e6:.0f}", style=style)

    rows = [[name, *(cell((row, column)) for column in range(len(names)))] for row, name in enumerate(names)]
    return Sheet(("MB/s from ↓ to →", *names), rows, wide=True)


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
        yield Sheet(SIZES, size_rows(report))
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
