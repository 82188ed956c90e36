"""``mingle-discover completion``, and the interfaces that a shell proposes while a name is typed."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class


@click.command("completion", epilog='Example: eval "$(mingle-discover completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes this command in a shell.

    It completes commands, options and the names of this machine's interfaces. For every new shell put the line of the
    example into ~/.bashrc or ~/.zshrc; for fish write the script to ~/.config/fish/completions/mingle-discover.fish.
    """
    main = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "mingle-discover", "_MINGLE_DISCOVER_COMPLETE").source())


def interface_names(incomplete: str) -> list[CompletionItem]:
    """Return the names of this machine's interfaces that begin with a text, with their addresses."""
    from mingle.network import interfaces

    return [
        CompletionItem(each.name, help=", ".join(map(str, each.addresses)))
        for each in interfaces.scan()
        if each.name.startswith(incomplete)
    ]
