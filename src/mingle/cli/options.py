"""The options that all commands share, and the handling of their errors and log lines."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mingle._version import __version__
from mingle.cli import output
from mingle.cli.output import Table
from mingle.errors import ConfigurationError, MingleError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mingle.config.settings import Arguments, Network

FAILED = 1
"""The exit status when nothing was found, the time ran out, or a check failed."""
WRONG_USAGE = 2
"""The exit status when an option, an argument or a variable can't be used, as in click."""


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"{context.find_root().info_name} {__version__}")
        context.exit()


version_option = click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The options that all commands share, as given.

    Attributes:
        arguments: those that concern the network, without the time limit: what that bounds differs by command.
        timeout: ``--timeout``; None: not given.
        verbose: how often ``--verbose`` was given.
        json: whether the answer is printed as JSON.
        wide: whether a table keeps its empty columns.
        header: whether a table in a pipe has its heading.
    """

    arguments: Arguments
    timeout: float | None
    verbose: int
    json: bool = False
    wide: bool = False
    header: bool = False

    def network(self, timeout: float | None = None) -> Network:
        """Return the network settings: the options, else the variables that the ranks read. Show warnings about them.

        Args:
            timeout: the command's default timeout, in seconds; None: ``MINGLE_TIMEOUT``.

        Raises:
            ConfigurationError: a value can't be used.
        """
        from msgspec import structs

        from mingle.config import settings, values

        settings.refuse_windows()
        limit = timeout if self.timeout is None else self.timeout
        network = settings.resolve_network(os.environ, structs.replace(self.arguments, discovery_timeout=limit))
        for remark in values.remarks(network.secret):
            output.say(f"warning: {remark}")
        return network

    def deadline(self) -> float | None:
        """Return the monotonic time at which --timeout ends a command that otherwise does not end; None: never."""
        return None if self.timeout is None else time.monotonic() + self.timeout

    @contextlib.contextmanager
    def following(
        self, columns: Sequence[str], table: Callable[[], Table], print_changes: Callable[[], None], *, transient: bool
    ) -> Iterator[Callable[[], None]]:
        """Yield the function that shows the present state: as a table that is drawn anew, else what has changed.

        Args:
            columns: the headings of what has changed, after that of the event.
            table: returns the table of the moment, for a terminal.
            print_changes: prints what has changed.
            transient: whether the table is erased at the end.
        """
        if output.redraws() and not self.json:
            with output.live(table, transient=transient) as draw:
                yield draw
            return
        if self.header and not self.json and not output.is_terminal():
            output.line(("EVENT", *columns))
        yield print_changes

    def answer(self, fields: Mapping[str, Any], table: Table, lines: Table | None = None) -> None:
        """Print an answer: as JSON if wanted, else the table, which a pipe gets as its rows or as these lines."""
        if self.json:
            output.answer_json(click.get_current_context().info_name or "", fields)
        else:
            output.show(table, lines, header=self.header)


def fail() -> NoReturn:
    """End the command with the status of a failure."""
    click.get_current_context().exit(FAILED)


def _complete_interface(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return what a shell proposes: this machine's interfaces whose names begin with a text, with their addresses."""
    from click.shell_completion import CompletionItem

    from mingle.network import interfaces

    return [
        CompletionItem(each.name, help=", ".join(map(str, each.addresses)))
        for each in interfaces.scan()
        if each.name.startswith(incomplete)
    ]


def _network_fields() -> list[str]:
    """Return the arguments that are options of all commands."""
    from mingle.config.settings import SETTINGS

    return [name for name, each in SETTINGS.items() if each.flags and each.section == "Network"]


def _arguments(given: Mapping[str, Any]) -> Arguments:
    """Return the options that concern the network."""
    from mingle.config.settings import SETTINGS, Arguments, Spelling

    names = {name: f"--{name.replace('_', '-')}" for name in SETTINGS} | {"discovery_timeout": "--timeout"}
    network: dict[str, Any] = {name: given.get(name) for name in _network_fields()}
    return Arguments(**network, spelling=Spelling(names=names))


def setting_option(name: str, default: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option of a setting, for a command with another default perhaps."""
    from mingle.config.settings import SETTINGS

    setting = SETTINGS[name]
    more = "; can be repeated" if setting.repeated else ""
    fallback = f"{setting.variable}, else {default}" if default else setting.fallback
    kind: Any = click.IntRange(*setting.limits) if setting.limits else None
    return click.option(
        *setting.flags,
        type=click.Choice(setting.values) if setting.values else kind,
        multiple=setting.repeated,
        metavar=setting.metavar,
        shell_complete=_complete_interface if name == "interface" else None,
        help=f"{setting.meaning[0].upper()}{setting.meaning[1:]}{more}. Default: {fallback}.",
    )


_ANSWER_OPTIONS = (click.option("--json", is_flag=True, help="Print one JSON object instead of text."),)
_LOGGING_OPTIONS = (
    click.option("-v", "--verbose", count=True, help="Log more to stderr; given twice, log everything."),
    version_option,
)
_TABLE_OPTIONS = (
    click.option("--header", is_flag=True, help="In a pipe, print the names of the columns first."),
    click.option("--wide", is_flag=True, help="On a terminal, keep the columns that are empty on every row."),
)


def shared_options(
    *, timeout: str, table: bool = False, answers: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the shared options to a command, which gets them as one :class:`Shared`.

    Args:
        timeout: the help of ``--timeout``, which differs from command to command.
        table: whether the command prints a table.
        answers: whether the command prints an answer, which can be JSON.
    """
    fields = _network_fields()
    options = (
        *map(setting_option, fields),
        click.option("-t", "--timeout", type=float, metavar="SECONDS", help=timeout),
        *(_TABLE_OPTIONS if table else ()),
        *(_ANSWER_OPTIONS if answers else ()),
        *_LOGGING_OPTIONS,
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            shown = {name: given.pop(name) for name in Shared.__slots__ if name in given}
            shared = Shared(arguments=_arguments(given), **shown)
            own = {name: value for name, value in given.items() if name not in fields}
            with _logging(shared.verbose):
                try:
                    function(shared, **own)
                except MingleError as error:
                    context = click.get_current_context()
                    output.complain(error, context.info_name or "", as_json=shared.json)
                    context.exit(WRONG_USAGE if isinstance(error, ConfigurationError) else FAILED)

        return functools.reduce(lambda inner, option: option(inner), reversed(options), command)

    return decorate


class _ToStderr(logging.Handler):
    """Write log lines to stderr; text from the network is made safe for a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        output.say(f"{record.levelname.lower()}: {record.getMessage()}")
        if record.exc_info:
            output.say(logging.Formatter().formatException(record.exc_info))


@contextlib.contextmanager
def _logging(verbose: int) -> Iterator[None]:
    logger = logging.getLogger("mingle")
    handler, level = _ToStderr(), logger.level
    logger.addHandler(handler)
    logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
