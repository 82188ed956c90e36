"""How answers look: JSON with a schema number, tables on a terminal, tab-separated lines in a pipe.

The answer goes to stdout, everything else to stderr. Much of the text comes from the network, where anybody
may put anything into it: nothing reaches a terminal that is not printable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from mingle.errors import MingleError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

SCHEMA = 1
"""The number of the JSON schema: raised when a field is taken away or changes its meaning."""
_EMPTY = ("", "-")
_MAX_CELLS = 100_000
_PROSE_CELLS = 24
"""The narrowest column in which prose is readable."""


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
    click.echo(json_line(command, fields))


def json_line(command: str, fields: Mapping[str, Any]) -> str:
    """Returns the answer as one line of JSON (RFC 8259), in ASCII.

    Raises:
        ValueError: a number is infinite or NaN, which JSON cannot express.
    """
    line = json.dumps({"schema": SCHEMA, "command": command, **fields}, allow_nan=False)
    if "\\ud" in line:
        # Replace lone surrogates (PEP 383: a variable in another encoding), which strict JSON parsers reject.
        whole = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        line = json.dumps(json.loads(whole))
    return line


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


class Sheet:
    """A table for a terminal whose cells stay whole: only the prose column is folded, between words.

    The table fits itself to the terminal each time it is drawn. If the terminal is too narrow, each row becomes a block
    with one line for each column.

    Args:
        columns: the headings.
        rows: the cells, as text or as styled text.
        prose: the heading of the column that may be folded; empty for none.
        wide: whether columns that are empty on every row are shown.
        sections: the number of rows between two lines; 0 draws no line between rows.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        *,
        prose: str = "",
        wide: bool = False,
        sections: int = 0,
    ) -> None:
        from rich.text import Text

        # As Text, so that brackets in a job id are no markup.
        filled = [[Text(printable(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
        kept = [
            index
            for index in range(len(columns))
            if wide or not rows or any(row[index].plain not in _EMPTY for row in filled)
        ]
        self._columns = [columns[index] for index in kept]
        self._rows = [[row[index] for index in kept] for row in filled]
        self._prose = prose
        self._wide = wide
        self._sections = sections

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table; rich calls this method."""
        yield self._table() if self.fits(console, options) else self._blocks()

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Tell whether the terminal is wide enough for the table."""
        from rich.measure import Measurement

        return Measurement.get(console, options.update_width(_MAX_CELLS), self._table()).minimum <= options.max_width

    def _table(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for index, column in enumerate(self._columns):
            prose = column == self._prose
            lines = [line for row in self._rows for line in row[index].split("\n")]
            widest = max((line.cell_len for line in lines), default=0)
            widest = max(widest, len(column))
            drawn.add_column(column, no_wrap=not prose, min_width=min(_PROSE_CELLS, widest) if prose else widest)
        for number, row in enumerate(self._rows, 1):
            drawn.add_row(*row, end_section=bool(self._sections) and number % self._sections == 0)
        return drawn

    def _blocks(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        drawn = Table.grid(padding=(0, 2, 0, 0))
        drawn.add_column(no_wrap=True, style="bold")
        # Fold a word only if it is longer than a whole line.
        drawn.add_column(overflow="fold")
        for number, row in enumerate(self._rows):
            if number:
                drawn.add_row("", "")
            for column, cell in zip(self._columns, row, strict=True):
                if self._wide or cell.plain not in _EMPTY:
                    drawn.add_row(Text(column), cell)
        return drawn


def stacked(texts: Sequence[str]) -> Text:
    """Returns a cell with each text on a line of its own."""
    from rich.text import Text

    return Text("\n".join(map(printable, texts)) or "-")


def show(sheet: Callable[[], RenderableType], rows: Iterable[Sequence[str]]) -> None:
    """Print an answer: a table on a terminal, else one tab-separated line for each row and no heading."""
    if is_terminal():
        console().print(sheet())
    else:
        for row in rows:
            line(row)
