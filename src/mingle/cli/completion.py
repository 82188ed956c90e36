"""``mingle-discover completion``, and what a shell shows while a job id or an interface is typed.

A completion never writes to the terminal and never fails: where the network can't be asked, there are no proposals.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from mingle import detached
from mingle.cli.output import printable

if TYPE_CHECKING:
    from mingle.config.settings import Network

SECONDS = 0.5
"""The bound on one completion, imports included."""
ASK_SECONDS = 0.3
"""How long the network is asked: hosts answer within 0.1 s."""
_MARGIN_SECONDS = 0.05


@click.command("completion", epilog='Example: eval "$(mingle-discover completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes this command in a shell.

    It completes commands, options, the names of this machine's interfaces, and JOB with the jobs that answer on the
    network within half a second. For every new shell put the line of the example into ~/.bashrc or ~/.zshrc; for fish
    write the script to ~/.config/fish/completions/mingle-discover.fish.
    """
    main = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "mingle-discover", "_MINGLE_DISCOVER_COMPLETE").source())


def job_ids(settings: Callable[[], Network], incomplete: str) -> list[CompletionItem]:
    """Return the ids of the jobs on the network that begin with a text.

    Args:
        settings: returns how to ask the network.
        incomplete: the text.
    """
    deadline = time.monotonic() + SECONDS
    return _proposals(lambda: _jobs(settings(), deadline - _MARGIN_SECONDS), incomplete, deadline)


def _jobs(network: Network, deadline: float) -> list[CompletionItem]:
    from mingle.observe.finder import make_finder
    from mingle.observe.observer import Observer

    with Observer(network) as observer:
        now = time.monotonic()
        finder = make_finder(observer, network, None, now)
        observer.run(finder, until=min(now + ASK_SECONDS, deadline))
    hosts = {each.offer.job: f"hosted by {printable(str(each.host()))}" for each in finder.sessions}
    jobs = {each.seek.job: "ranks look for their host" for each in finder.seekers.values()} | hosts
    return [CompletionItem(job, help=what) for job, what in sorted(jobs.items())]


def interface_names(incomplete: str) -> list[CompletionItem]:
    """Return the names of this machine's interfaces, with their addresses."""
    return _proposals(_interfaces, incomplete, time.monotonic() + SECONDS)


def _interfaces() -> list[CompletionItem]:
    from mingle.network import interfaces

    return [CompletionItem(each.name, help=", ".join(map(str, each.addresses))) for each in interfaces.scan()]


def _proposals(found: Callable[[], Iterable[CompletionItem]], incomplete: str, deadline: float) -> list[CompletionItem]:
    """Return what was found by the deadline and continues the word; a failure counts as nothing found."""
    try:
        items = detached.run(found, "completion", given_up=lambda: time.monotonic() >= deadline)
    except Exception:
        return []
    return [item for item in items if item.value.startswith(incomplete) and _is_plain(item.value)]


def _is_plain(word: str) -> bool:
    # A shell inserts a proposal as it is: an id such as `$(…)`, which any host can announce, would run when the user
    # presses Enter, and one that starts with a dash would be an option.
    return shlex.quote(word) == word and not word.startswith("-")
