"""Write answers: JSON with a schema number, tables on a terminal, tab-separated lines in a pipe.

The answer goes to stdout, everything else to stderr. Much of the text comes from the network, where any host can choose
it, so only printable characters reach a terminal.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import click

from mingle import records
from mingle.errors import MingleError
from mingle.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as Drawing
    from rich.text import Text

Cell: TypeAlias = "str | tuple[str, ...]"
"""A text, or several that a terminal shows below each other and a pipe separated by commas."""
Row: TypeAlias = Sequence[Cell]

SCHEMA = 1
"""The version of the JSON schema: raised when a field is removed or changes its meaning."""
_EMPTY = ("", "-")
_UNLIMITED_WIDTH = 100_000
_PROSE_WIDTH = 24
"""The width of the narrowest column in which prose is readable."""


def say(text: str) -> None:
    """Print a message of one or more lines on stderr.

    If its reader is gone, the command continues without it. A line that would have to wait for the reader is dropped:
    ``mingle-run`` must end its command, and rank 0 of ``mingle-check`` go on, whatever reads their log.
    """
    for line in text.split("\n"):
        try:
            if not records.takes_text(sys.stderr):
                records.drop()
                continue
            click.echo(_encodable(printable(line), sys.stderr), err=True)
        except OSError as error:  # a full disk or pipe can have room again for the next line
            if error.errno in (errno.EPIPE, errno.EIO):
                _discard(sys.stderr)


def answer(text: str) -> None:
    """Print a line of the answer on stdout; a pipe gets it at once."""
    _write(printable(text))


def answer_json(command: str, fields: Mapping[str, Any]) -> None:
    """Print the answer as one line of JSON, in ASCII."""
    _write(json_line(command, fields))


def _write(text: str) -> None:
    """Print a line on stdout.

    Raises:
        click.ClickException: the line can't be written, as on a full disk.
        BrokenPipeError: the reader is gone; click ends the command with status 1.
    """
    try:
        click.echo(_encodable(text, sys.stdout))
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        _discard(sys.stdout)
        raise click.ClickException(f"the answer can't be written: {error.strerror}") from error


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds to nowhere: flushed again at the exit it would make the status 120."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def json_line(command: str, fields: Mapping[str, Any]) -> str:
    """Return the answer as one line of JSON (RFC 8259), in ASCII.

    Raises:
        ValueError: a number is infinite or NaN, which JSON cannot express.
    """
    line = json.dumps({"schema": SCHEMA, "command": command, **fields}, allow_nan=False)
    if "\\ud" in line:
        # Replace lone surrogates (PEP 383: a variable in another encoding), which strict JSON parsers reject.
        whole = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        line = json.dumps(json.loads(whole))
    return line


def _encodable(text: str, stream: TextIO | None) -> str:
    """Return text with escapes in place of the characters that the stream's encoding lacks; None: it is closed."""
    encoding = "ascii" if stream is None else stream.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def error_record(error: MingleError) -> dict[str, str | None]:
    """Return the JSON record of an error."""
    return {
        "type": type(error).__name__,
        "observation": error.observation,
        "cause": error.cause,
        "remedy": error.remedy,
    }


def complain(error: MingleError, command: str, *, as_json: bool) -> None:
    """Print an error on stderr; with JSON also as the answer, since a script reads one stream."""
    say(f"{command if command.startswith('mingle-') else f'mingle-discover {command}'}: {error}")
    if as_json:
        answer_json(command.removeprefix("mingle-"), {"error": error_record(error)})


def leave_with(command: click.Command, name: str) -> None:
    """Run a command and exit with its status, also if its output can't be written or a call that was given up runs."""
    try:
        command(prog_name=name)
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):  # its reader can be gone
                    stream.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


def is_terminal() -> bool:
    """Tell whether stdout is a terminal; otherwise it is a pipe or a file."""
    return sys.stdout is not None and sys.stdout.isatty()


def redraws() -> bool:
    """Tell whether stdout is a terminal on which a table can be replaced; ``TERM=dumb`` (terminfo(5)) is none."""
    return is_terminal() and console().is_interactive


def line(cells: Row) -> None:
    """Print one line of an answer for a pipe, with tabs between its cells."""
    texts = (cell if isinstance(cell, str) else ", ".join(cell) or "-" for cell in cells)
    _write("\t".join(map(printable, texts)))


def console() -> Console:
    """Return the console of the terminal; it respects ``NO_COLOR`` (no-color.org)."""
    from rich.console import Console

    return Console(highlight=False)


@dataclass(frozen=True)
class Table:
    """Rows that a pipe gets as lines and a terminal as a table whose cells stay whole, but for the prose column.

    On a terminal that is too narrow for the table, the groups get a table each, without their common first cell; where
    that is still too wide, each row becomes a block with one line for each column.

    Attributes:
        columns: the headings.
        rows: the cells.
        prose: the heading of the column that may be folded, between words; empty for none.
        wide: whether to keep the columns that are empty on every row.
        groups: how many consecutive rows share their first cell, which a terminal shows once, for each group.
        styles: for a heading, the function from a line of a cell to its style in rich's notation.
        below: lines that a terminal shows below the table as they are: a folded command can't be pasted.
    """

    columns: Sequence[str]
    rows: Sequence[Row]
    prose: str = ""
    wide: bool = False
    groups: Sequence[int] = ()
    styles: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
    below: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table; rich calls this method."""
        from rich.measure import Measurement
        from rich.text import Text

        texts = [[self._text(name, cell) for name, cell in zip(self.columns, row, strict=True)] for row in self.rows]
        kept = [
            index
            for index in range(len(self.columns))
            if self.wide or not texts or any(row[index].plain not in _EMPTY for row in texts)
        ]
        columns = [_encodable(self.columns[index], sys.stdout) for index in kept]
        texts = [[row[index] for index in kept] for row in texts]
        table = self._table(columns, texts)
        if Measurement.get(console, options.update_width(_UNLIMITED_WIDTH), table).minimum <= options.max_width:
            yield table
        elif self.groups:
            for end, count in zip(itertools.accumulate(self.groups), self.groups, strict=True):
                rows = self.rows[end - count : end]
                yield Text("\n").append(self._text("", rows[0][0]))
                yield replace(self, columns=self.columns[1:], rows=[row[1:] for row in rows], groups=())
        else:
            yield self._blocks(columns, texts)

    def _text(self, column: str, cell: Cell) -> Text:
        """Return a cell as text, so that brackets in a job id do not count as markup."""
        from rich.text import Text

        style = self.styles.get(column)
        lines = [cell] if isinstance(cell, str) else cell or ("-",)
        shown = [(_encodable(printable(each), sys.stdout), style(each) if style else "") for each in lines]
        return Text("\n").join(Text(text, style=each) for text, each in shown)

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> Drawing:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as Drawing

        drawn = Drawing(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for index, column in enumerate(columns):
            prose = column == self.prose
            lines = [line for row in rows for line in row[index].split("\n")]
            widest = max([len(column), *(line.cell_len for line in lines)])
            drawn.add_column(column, no_wrap=not prose, min_width=min(_PROSE_WIDTH, widest) if prose else widest)
        ends = [*itertools.accumulate(self.groups)]
        for number, row in enumerate(rows):
            continues = bool(self.groups) and number not in (0, *ends)
            drawn.add_row("" if continues else row[0], *row[1:], end_section=number + 1 in ends)
        return drawn

    def _blocks(self, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> Drawing:
        from rich.table import Table as Drawing
        from rich.text import Text

        drawn = Drawing.grid(padding=(0, 2, 0, 0))
        drawn.add_column(no_wrap=True, style="bold")
        # Fold a word only if it is longer than a whole line.
        drawn.add_column(overflow="fold")
        for number, row in enumerate(rows):
            if number:
                drawn.add_row("", "")
            for column, cell in zip(columns, row, strict=True):
                if self.wide or cell.plain not in _EMPTY:
                    drawn.add_row(Text(column), cell)
        return drawn


def show(table: Table, lines: Table | None = None, *, header: bool = False) -> None:
    """Print an answer: a table on a terminal, else its rows, or these lines.

    Args:
        table: the table.
        lines: what a pipe gets instead of it.
        header: whether a pipe gets the names of the columns first.
    """
    if is_terminal():
        if table.rows:
            console().print(table)
        for each in table.below:
            answer(each)
        return
    lines = lines or table
    for row in (*([lines.columns] if header else []), *lines.rows):
        line(row)


@contextlib.contextmanager
def live(table: Callable[[], Table], *, transient: bool) -> Iterator[Callable[[], None]]:
    """Yield the function that draws the table of the moment on the terminal; ``transient``: it is erased at the end."""
    from rich.live import Live

    drawing = Live(console=console(), transient=transient, refresh_per_second=4)
    try:
        with drawing:
            yield lambda: drawing.update(table())
    finally:
        drawing.console.show_cursor()  # also if the start of the drawing was interrupted
