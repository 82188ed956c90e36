"""The options that all commands share, and the handling of their errors and log lines."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mingle._version import __version__
from mingle.cli import output
from mingle.cli.output import Lines, Table
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
        """Return the network settings, and show the warnings about the values; see :meth:`settings`."""
        from mingle.config import values

        network = self.settings(timeout)
        for remark in values.remarks(network.secret):
            output.say(f"warning: {remark}")
        return network

    def settings(self, timeout: float | None = None) -> Network:
        """Return the network settings: the options, else the variables that the ranks read.

        Args:
            timeout: the command's default timeout, in seconds; None: ``MINGLE_TIMEOUT``.

        Raises:
            ConfigurationError: a value can't be used.
        """
        from msgspec import structs

        from mingle.config import settings

        settings.refuse_windows()
        limit = timeout if self.timeout is None else self.timeout
        return settings.resolve_network(os.environ, structs.replace(self.arguments, discovery_timeout=limit))

    def deadline(self) -> float | None:
        """Return the monotonic time at which --timeout ends a command that otherwise does not end; None: never."""
        return None if self.timeout is None else time.monotonic() + self.timeout

    def answer(self, fields: Mapping[str, Any], table: Table, lines: Lines | None = None) -> None:
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


_NETWORK_FIELDS = ("interface", "port", "peers", "family", "ttl", "secret_file")
_NAMES = {
    "discovery_timeout": "--timeout",
    "job_id": "--job-id",
    "master_port": "--master-port",
    "node_rank": "--node-rank",
    "mesh": "--mesh",
    **{field: f"--{field.replace('_', '-')}" for field in _NETWORK_FIELDS},
}
"""What an error calls an argument that is an option."""


def _arguments(given: Mapping[str, Any]) -> Arguments:
    """Return the options that concern the network."""
    from mingle.config.settings import Arguments, Spelling

    network: dict[str, Any] = {field: given.get(field) for field in _NETWORK_FIELDS}
    return Arguments(**network, spelling=Spelling(names=_NAMES))


_NETWORK_OPTIONS = (
    click.option(
        "-i",
        "--interface",
        multiple=True,
        metavar="NAME",
        shell_complete=_complete_interface,
        help="Interface to use, by name or address; can be repeated. Default: MINGLE_INTERFACE, else those that "
        "`mingle-discover interfaces` shows as used.",
    ),
    click.option(
        "-p",
        "--port",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        help="UDP port of the discovery. Default: MINGLE_PORT, else 29499.",
    ),
    click.option(
        "--peers",
        multiple=True,
        metavar="HOST[:PORT]",
        help="Host to ask by unicast as well; or, for networks without multicast, dir:/path, a directory that all "
        "machines mount, or s3://bucket/prefix, a bucket; can be repeated. Default: MINGLE_PEERS.",
    ),
    click.option(
        "--family",
        type=click.Choice(["auto", "4", "6"]),
        help="IP versions to use. Default: MINGLE_FAMILY, else auto.",
    ),
    click.option(
        "--ttl",
        type=click.IntRange(0, 255),
        metavar="HOPS",
        help="Multicast hop limit. Default: MINGLE_TTL, else 1: the local network.",
    ),
    click.option(
        "--secret-file",
        type=click.Path(),
        help="File with the job's secret. Default: MINGLE_SECRET or MINGLE_SECRET_FILE.",
    ),
)


def mesh_option(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option ``--mesh`` of a command that forms a job."""
    return click.option(
        "--mesh",
        type=click.Choice(["on", "warn", "off"]),
        help="Whether all machines must reach each other by TCP; warn: say so and start all the same. Default: "
        f"MINGLE_MESH, else {default}.",
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


node_rank_option = click.option(
    "--node-rank",
    type=click.IntRange(0),
    metavar="R",
    help="Node rank that this machine asks for. Default: MINGLE_NODE_RANK or the launcher's, else host names decide.",
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
    options = (
        *_NETWORK_OPTIONS,
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
            own = {name: value for name, value in given.items() if name not in _NETWORK_FIELDS}
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
