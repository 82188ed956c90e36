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

    from mingle.config.settings import Network

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
    """The options that all commands share, as given; None and () mean that an option was not given."""

    interface: tuple[str, ...]
    port: int | None
    timeout: float | None
    peers: tuple[str, ...]
    family: str | None
    ttl: int | None
    secret_file: str | None
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

        from mingle.config import settings, values

        settings.refuse_windows()
        secret = None
        if self.secret_file is not None:
            secret = values.read_secret_file(self.secret_file, "--secret-file")
        # Check these values here first, so that an error names the option and not the library's argument.
        if self.timeout is not None:
            values.seconds(self.timeout, "--timeout")
        if self.interface:
            values.words(self.interface, "--interface")
        if self.peers:
            values.peers(self.peers, "--peers")
        network = settings.resolve_network(
            os.environ,
            discovery_timeout=timeout if self.timeout is None else self.timeout,
            interface=self.interface,
            peers=self.peers,
            secret=secret,
            port=self.port,
            ttl=self.ttl,
            family=self.family,
        )
        return structs.replace(network, interfaces_from="--interface") if self.interface else network

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
    from mingle.cli import completion

    return completion.interface_names(incomplete)


def _complete_job(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from mingle.cli import completion

    given = context.params
    shared = Shared(
        interface=given.get("interface") or (),
        peers=given.get("peers") or (),
        port=given.get("port"),
        timeout=None,
        family=given.get("family"),
        ttl=given.get("ttl"),
        secret_file=given.get("secret_file"),
        json=False,
        verbose=0,
    )
    return completion.job_ids(shared.settings, incomplete)


def job_argument(**more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that adds the argument JOB, which a shell completes with the jobs on the network."""
    return click.argument("job", shell_complete=_complete_job, **more)


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
        help="Host to ask by unicast as well, for networks without multicast; can be repeated. Default: MINGLE_PEERS.",
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
            shared = Shared(**{name: given.pop(name) for name in Shared.__slots__ if name in given})
            with _logging(shared.verbose):
                try:
                    function(shared, **given)
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
