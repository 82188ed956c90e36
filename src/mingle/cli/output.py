"""How answers look: JSON with a schema number, tables on a terminal, tab-separated lines in a pipe.

The answer goes to stdout, everything else to stderr. Much of the text comes from the network, where anybody
may put anything into it: nothing reaches a terminal that is not printable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from mingle.errors import MingleError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA = 1
"""The number of the JSON schema: raised when a field is taken away or changes its meaning."""


def printable(text: str) -> str:
    """Returns text with escapes in place of what moves a cursor, changes a colour or turns the direction."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def say(text: str) -> None:
    """Prints a message, of one or more lines, on stderr."""
    for line in text.split("\n"):
        click.echo(_encodable(printable(line), sys.stderr), err=True)


def answer(text: str) -> None:
    """Prints a line of the answer on stdout; who reads a pipe has it at once."""
    click.echo(_encodable(printable(text), sys.stdout))


def answer_json(command: str, fields: Mapping[str, Any]) -> None:
    """Prints the answer as one line of JSON, in ASCII."""
    click.echo(json.dumps({"schema": SCHEMA, "command": command, **fields}))


def _encodable(text: str, stream: TextIO) -> str:
    """Returns text with escapes in place of the characters that the stream's encoding lacks."""
    encoding = stream.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def error_record(error: MingleError) -> dict[str, str | None]:
    """Returns an error as it stands in JSON."""
    return {
        "type": type(error).__name__,
        "observation": error.observation,
        "cause": error.cause,
        "remedy": error.remedy,
    }


def complain(error: MingleError, command: str, *, as_json: bool) -> None:
    """Prints an error on stderr, and with JSON also as the answer: a script reads one stream."""
    if as_json:
        answer_json(command, {"error": error_record(error)})
    say(f"mingle-discover {command}: {error}")


def is_terminal() -> bool:
    """Tells whether people read the answer on a terminal; else a pipe or a file takes it."""
    return sys.stdout.isatty()


def line(cells: Sequence[str]) -> None:
    """Prints one line of an answer for a pipe: tabs between its cells."""
    click.echo(_encodable("\t".join(map(printable, cells)), sys.stdout))


def console() -> Console:
    """Returns what draws on a terminal; it respects ``NO_COLOR`` (no-color.org)."""
    from rich.console import Console

    return Console(highlight=False)


def new_table(columns: Sequence[str]) -> Table:
    """Returns an empty table in the style of all our tables."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    return drawn


def drawn(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Returns rows as a table for a terminal."""
    from rich.text import Text

    filled = new_table(columns)
    for row in rows:
        # As Text, so that brackets in a job id are no markup.
        filled.add_row(*(Text(printable(cell)) for cell in row))
    return filled


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows: as a table on a terminal, else one line each, with tabs between and no heading."""
    if is_terminal():
        console().print(drawn(columns, rows))
    else:
        for row in rows:
            line(row)
