"""The options that all commands share, and what happens around each of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mingle._version import __version__
from mingle.cli import output
from mingle.errors import ConfigurationError, MingleError

if TYPE_CHECKING:
    from mingle.config.settings import Network

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

FAILED = 1
"""The exit status when nothing was found, the time was over, or a check failed."""
WRONG_USAGE = 2
"""The exit status when an option, an argument or a variable can't be used; click's own, too."""

version_option = click.version_option(
    __version__, "--version", prog_name="mingle-discover", message="%(prog)s %(version)s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The options that all commands share, as they were given; None and () mean: not given."""

    interface: tuple[str, ...]
    port: int | None
    timeout: float | None
    peers: tuple[str, ...]
    family: str | None
    ttl: int | None
    secret_file: str | None
    json: bool
    wide: bool
    verbose: int

    def network(self, timeout: float | None = None) -> Network:
        """Returns what concerns the network: the options, else the variables that the ranks read, too.

        Args:
            timeout: of this command, in seconds, where none is given; None: ``MINGLE_TIMEOUT`` counts.

        Raises:
            ConfigurationError: a value can't be used.
        """
        from mingle.cli import output
        from mingle.config import settings, values

        if sys.platform == "win32":
            raise ConfigurationError.explain(
                "mingle does not run on Windows.",
                cause="its sockets and process identities need Linux (macOS: best effort)",
                remedy="run it under WSL2 or in a Linux container.",
            )
        secret = None
        if self.secret_file is not None:
            secret = values.read_secret_file(self.secret_file, "--secret-file")
        # Check here first, so that an error names the option and not the library's argument.
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
        for remark in values.secret_remarks(network.secret):
            output.say(f"warning: {remark}")
        return network


_OPTIONS = (
    click.option(
        "-i",
        "--interface",
        multiple=True,
        metavar="NAME",
        help="Interface to use, by name or address; may be repeated. Default: MINGLE_INTERFACE, else what "
        "`mingle-discover interfaces` shows.",
    ),
    click.option(
        "-p",
        "--port",
        type=click.IntRange(1, 65535),
        metavar="PORT",
        help="UDP port of the discovery. Default: MINGLE_PORT, else 29499.",
    ),
    click.option("-t", "--timeout", type=float, metavar="SECONDS", help="How long it takes at most."),
    click.option(
        "--peers",
        multiple=True,
        metavar="HOST[:PORT]",
        help="Host to ask by unicast as well, for networks without multicast; may be repeated. Default: MINGLE_PEERS.",
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
    click.option("--json", is_flag=True, help="Print one JSON object (docs/cli.md has the schema)."),
    click.option("--wide", is_flag=True, help="On a terminal: keep the columns that are empty on every row."),
    click.option("-v", "--verbose", count=True, help="Say more on stderr; twice: still more."),
    version_option,
)


def shared_options(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the shared options; they reach it as one :class:`Shared`, its first argument."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        shared = Shared(**{name: given.pop(name) for name in Shared.__slots__})
        with _logging(shared.verbose):
            try:
                function(shared, **given)
            except MingleError as error:
                context = click.get_current_context()
                output.complain(error, context.info_name or "", as_json=shared.json)
                context.exit(WRONG_USAGE if isinstance(error, ConfigurationError) else FAILED)

    return functools.reduce(lambda inner, option: option(inner), reversed(_OPTIONS), command)


class _ToStderr(logging.Handler):
    """Writes what the library logs; what comes from the network is made safe for a terminal."""

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
