"""Records what one machine is told, so that a fresh machine can be told the same without anything else of its world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeVar

from mingle.wire import authentication

T = TypeVar("T")
CALLS = (*("handle", "effects", "ask_status", "next_round", "ask_round", "stop_electing", "give_up", "close"),)
"""What a driver does with a machine that changes it."""
CALLS_AFTER_GO = ("ready", "leave", "ask_roster")
"""What an application does with the membership of a machine that has formed."""


class Recording:
    """All that one machine was told, in order, and what it drew from its world: ids, dice and nonces.

    Args:
        build: makes the machine. It draws what differs from one run to the next by the function that it is given.
        keeps: whether anything is recorded; a large world has no room for that.
    """

    def __init__(self, build: Callable[[Recording, float], Any], *, keeps: bool = True) -> None:
        self.steps: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        """Each call of the machine, with its arguments and its result."""
        self._build = build
        self._keeps = keeps
        self._drawn: list[Any] = []
        self._played: Iterator[Any] | None = None
        self._began = 0.0
        self._busy = False
        self._chance: Any = SimpleNamespace(urandom=self._bytes)

    # --- recording -------------------------------------------------------------------------------------------------

    def draw(self, function: Callable[[], T]) -> T:
        """Return what the world says, or what it said when this was recorded."""
        if self._played is not None:
            return next(self._played)  # type: ignore[no-any-return]
        drawn = function()
        if self._keeps and self._busy:
            self._drawn.append(drawn)
        return drawn

    def begin(self, now: float) -> Any:
        """Return a new machine whose steps are recorded."""
        self._began = now
        machine = self._run(self._build, self, now)
        return self._watched(machine)

    def membership(self, membership: Any) -> Any:
        """Return the membership of a machine that has formed; its steps are recorded from now on."""
        for name in CALLS_AFTER_GO if self._keeps else ():
            setattr(membership, name, self._recorded(f"joiner.membership.{name}", getattr(membership, name)))
        return membership

    def _watched(self, machine: Any) -> Any:
        for name in CALLS if self._keeps else ():
            if hasattr(machine, name):
                setattr(machine, name, self._recorded(name, getattr(machine, name)))
        return machine

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._busy:  # the machine calls itself
                return method(*arguments, **options)
            self.steps.append((name, arguments, options, None))
            result = self._run(method, *arguments, **options)
            self.steps[-1] = name, arguments, options, result
            return result

        return call

    def _run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call what can draw: nonces and tokens are drawn as well."""
        names = vars(authentication)
        genuine = names["os"]
        names["os"] = self._chance
        self._busy = True
        try:
            return function(*arguments, **options)
        finally:
            self._busy = False
            names["os"] = genuine

    def _bytes(self, count: int) -> bytes:
        return self.draw(lambda: os.urandom(count))

    # --- what was recorded -----------------------------------------------------------------------------------------

    def __str__(self) -> str:
        told = [arguments for name, arguments, *_ in self.steps if name == "handle"]
        return "\n".join(f"{now:12.4f}  {event}" for event, now in told)

    def replay(self) -> Any:
        """Tell a fresh machine all the same, and return it.

        Raises:
            AssertionError: it wants another thing done than the recorded one.
        """
        again = Recording(self._build, keeps=False)
        again._played = iter(self._drawn)
        machine = again._run(self._build, again, self._began)
        for number, (name, arguments, options, result) in enumerate(self.steps):
            told = again._run(attrgetter(name)(machine), *arguments, **options)
            assert told == result, f"step {number}, {name}{arguments}: {told}, and not {result}"
        return machine
