"""``mingle-discover watch``: which jobs come, go and change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from mingle.cli import output, overview
from mingle.cli.options import HELP, Shared, shared_options

if TYPE_CHECKING:
    from mingle.observe.finding import Finder

REFRESH_SECONDS = 1.0
"""How often each job is asked how it stands."""
_Key = tuple[str, str | None]
_SIGNS = {"new": "+", "gone": "-", "changed": "="}
_MOVING = ("seconds",)
"""Fields that change all the time: no news."""


@click.command("watch", context_settings=HELP)
@shared_options
def watch(shared: Shared) -> None:
    """Look on: the same as `list`, live.

    A table on a terminal; in a pipe a line for each job that comes (+), goes (-) or changes (=). With --json each
    line is an object with `event` (new, gone, changed) and `job`. It goes on until Ctrl-C or --timeout.
    """
    from mingle.observe.lookup import make_finder
    from mingle.observe.observer import Observer

    network = shared.network(1.0)
    with Observer(network) as observer:
        now = time.monotonic()
        finder = make_finder(observer, network, None, now, refresh=REFRESH_SECONDS, forgets=True)
        until = None if shared.timeout is None else now + shared.timeout
        with _shown(shared, finder) as update, contextlib.suppress(KeyboardInterrupt):

            def done() -> bool:
                update()
                return False

            observer.run(finder, until=until, done=done)


def changes(before: Mapping[_Key, dict[str, Any]], now: Mapping[_Key, dict[str, Any]]) -> Iterator[tuple[str, _Key]]:
    """Yields what is new, gone or changed between two looks."""
    yield from (("gone", key) for key in before if key not in now)
    for key, record in now.items():
        if key not in before:
            yield "new", key
        elif _settled(record) != _settled(before[key]):
            yield "changed", key


def _settled(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _MOVING}


def _records(finder: Finder) -> dict[_Key, dict[str, Any]]:
    # What was heard a moment ago and is being asked for the first time is shown once it has answered, or has not.
    tried = [sighting for sighting in finder.sessions if sighting.tried or sighting.alive]
    return {(record["job"], record["session"]): record for record in overview.records(tried, finder.seekers.values())}


@contextlib.contextmanager
def _shown(shared: Shared, finder: Finder) -> Iterator[Callable[[], None]]:
    """Gives what is called after each turn of the loop."""
    if output.is_terminal() and not shared.json:
        from rich.live import Live

        with Live(console=output.console(), refresh_per_second=4) as live:
            yield lambda: live.update(overview.jobs_sheet(_records(finder).values(), wide=shared.wide))
    else:
        before: dict[_Key, dict[str, Any]] = {}

        def tell() -> None:
            now = _records(finder)
            for event, key in changes(before, now):
                record = now.get(key) or before[key]
                if shared.json:
                    output.answer_json("watch", {"event": event, "job": record})
                else:
                    output.line((_SIGNS[event], *overview.row(record)))
            before.clear()
            before.update(now)

        yield tell
