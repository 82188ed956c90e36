"""The command ``mingle-discover``: what is happening on the network, for people and for scripts.

One module per family of commands, imported when one of its commands runs: ``--help`` answers at once.
``docs/cli.md`` is the contract.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from mingle.cli.options import version_option

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells: 128 and the number of SIGINT."""
COMMANDS = {
    "doctor": ("mingle.cli.checks:doctor", "Check this machine and its network, and suggest fixes."),
    "env": ("mingle.cli.local:env", "Show what a rank started in this environment would read."),
    "find": ("mingle.cli.jobs:find", "Print the address and port of a job's store."),
    "interfaces": ("mingle.cli.local:interfaces", "Show the network interfaces, and which of them are used."),
    "list": ("mingle.cli.jobs:list_", "List the jobs on this network."),
    "ping": ("mingle.cli.checks:ping", "Show which hosts reach each other, and over which paths."),
    "watch": ("mingle.cli.jobs:watch", "Show the jobs on this network, live."),
}
"""For each command, where it is and its one-line summary, which its own help begins with."""
FIRST_SCREEN = """\
mingle-discover shows the torch.distributed jobs on this network. Type one of:

  mingle-discover list         the jobs, and the ranks that are missing
  mingle-discover watch        the same, live
  mingle-discover doctor       why ranks do not find each other: check this machine and its network
  mingle-discover ping         which machines reach each other; type it on each of them
  mingle-discover --help       all commands and options

To start a job, type one of these on every machine:

  torchrun --rdzv-backend=mingle --rdzv-id=$USER-resnet --nnodes=4 --nproc-per-node=8 train.py
  mingle-run --nnodes 3 -- PROGRAM {master_addr}:{master_port}
  mingle-check --nnodes 4      no training: test torch between the machines"""
"""What a command without arguments prints on stderr, with the status of wrong usage."""


def documentation_url() -> str | None:
    """Return the address of the documentation, if the installed distribution names it."""
    # Reading the file takes a tenth of the time of importing importlib.metadata.
    for metadata in Path(__file__).parents[2].glob("multinode_mingle-*.dist-info/METADATA"):
        found = re.search(r"^Project-URL: Documentation, (\S+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return None


def terminate(number: int, _frame: FrameType | None) -> NoReturn:
    """End the command on a signal: by an exception, so that good-byes are sent and the cursor is shown again."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM in the block: the kernel gives the first process of a container only signals that it handles."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Main(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(FIRST_SCREEN, err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            with _ended_by_sigterm():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except click.NoSuchOption as error:
            takes_job = error.ctx is not None and any(each.name == "job" for each in error.ctx.command.params)
            if takes_job and not error.option_name.startswith("--"):
                text = "In a job id that begins with '-', a variable is probably unset, as USER in $USER-resnet can be."
                raise click.UsageError(f"{error.format_message()} {text}", error.ctx) from error
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if url := documentation_url():
            formatter.write_text(f"Documentation: {url}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    "mingle-discover",
    cls=_Main,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: mingle-discover list\n\nExit status: 0 done, also if `list` shows no job; "
    "1 nothing found or a check failed; 2 wrong usage.",
)
@version_option
def main() -> None:
    """Show the torch.distributed jobs on this network, and why ranks do not find each other.

    All commands take --json and the network options (-i, -p, --peers, --family, --ttl, --secret-file).
    Their defaults come from the MINGLE_* variables that ranks read.
    """
