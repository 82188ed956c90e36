"""The command ``mingle-discover``: what goes on on the network, for people and for scripts.

One file per family of commands. Their modules import click and little else; what a command needs is imported
when it runs, so that ``--help`` and shell completion answer at once. ``docs/cli.md`` is the contract.
"""

from __future__ import annotations

import click

from mingle.cli.announce import announce
from mingle.cli.doctor import doctor
from mingle.cli.jobs import find_command, list_command
from mingle.cli.local import env_command, interfaces_command
from mingle.cli.options import HELP, version_option
from mingle.cli.ping import ping
from mingle.cli.watch import watch

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells give it: 128 and the number of SIGINT."""


class _Main(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


@click.group("mingle-discover", cls=_Main, context_settings=HELP)
@version_option
def main() -> None:
    """Show which torch.distributed jobs find each other on this network, and where.

    Every command takes --json, and the options of the network: -i, -p, --peers, --family, --ttl and
    --secret-file; their defaults come from the same MINGLE_* variables that the ranks read.

    Exit status: 0 done, 1 nothing found or a check failed, 2 wrong usage.
    """


for _command in (list_command, watch, find_command, announce, ping, interfaces_command, doctor, env_command):
    main.add_command(_command)

__all__ = ["main"]
