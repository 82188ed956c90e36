"""Plants mistakes at named seams of the product, counts where they make a difference, and looks for schedules that
find them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeAlias

import pytest

Level: TypeAlias = Literal["quick", "all", "soak"]
Run: TypeAlias = Callable[[int], object]
"""Runs the schedule of a seed, and raises an AssertionError if a promise is broken."""


@dataclass(frozen=True)
class Seam:
    """A place of the product at which a mistake is planted: a method or property of a class, or a function."""

    owner: Any
    """The class, or the module of the function."""
    attribute: str

    def __str__(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.attribute}"

    def wrong(self, genuine: Callable[..., Any], reached: Callable[[], None]) -> Callable[..., Any]:
        """Return what takes the place of the genuine function; it says each time that the mistake is reached."""
        raise NotImplementedError

    def plant(self, patch: pytest.MonkeyPatch, reached: Counter[str]) -> None:
        """Plant the mistake, and count in ``reached`` how often it is reached."""
        genuine = inspect.getattr_static(self.owner, self.attribute)
        reached[str(self)] = 0

        def count() -> None:
            reached[str(self)] += 1

        if isinstance(genuine, property):
            assert genuine.fget is not None
            planted: Any = property(self.wrong(genuine.fget, count), genuine.fset)
        elif isinstance(genuine, staticmethod):
            planted = staticmethod(self.wrong(genuine.__func__, count))
        else:
            planted = functools.wraps(genuine)(self.wrong(genuine, count))
        for place in self._places(genuine):
            patch.setattr(place, self.attribute, planted)

    def _places(self, genuine: object) -> list[Any]:
        """Return what holds the seam: for a function each module that has imported it."""
        if not isinstance(self.owner, ModuleType):
            return [self.owner]
        package = self.owner.__name__.partition(".")[0]
        modules = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] == package]
        return [each for each in modules if vars(each).get(self.attribute) is genuine]


@dataclass(frozen=True)
class Rule(Seam):
    """A wrong answer of a rule, which has no effect but its answer. It is reached where the right one differs."""

    answer: Callable[..., Any]
    """Returns it. Called with the right answer, and then with the arguments of the rule."""

    def wrong(self, genuine: Callable[..., Any], reached: Callable[[], None]) -> Callable[..., Any]:
        """Return the rule with the wrong answer."""

        def rule(*arguments: Any, **named: Any) -> Any:
            right = genuine(*arguments, **named)
            answer = self.answer(right, *arguments, **named)
            if answer != right:
                reached()
            return answer

        return rule


@dataclass(frozen=True)
class Act(Seam):
    """Something else that is done in place of an action, in some situation. It is reached in each such situation."""

    instead: Callable[..., Any]
    """Does it. Called with the genuine action, and then with the arguments of that."""
    when: Callable[..., bool] = lambda *_, **__: True
    """Returns whether this is the situation. Called with the arguments of the action."""

    def wrong(self, genuine: Callable[..., Any], reached: Callable[[], None]) -> Callable[..., Any]:
        """Return the wrong action."""

        def act(*arguments: Any, **named: Any) -> Any:
            if not self.when(*arguments, **named):
                return genuine(*arguments, **named)
            reached()
            return self.instead(genuine, *arguments, **named)

        return act


def nothing(*_: object, **__: object) -> None:
    """Do nothing instead."""


def always(answer: object) -> Callable[..., Any]:
    """Return the wrong answer that is always the same."""
    return lambda *_, **__: answer


@contextlib.contextmanager
def planted(*seams: Seam) -> Iterator[Counter[str]]:
    """Plant one mistake, at one seam or at several together; yields how often it is reached at each."""
    reached: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for seam in seams:
            seam.plant(patch, reached)
        yield reached


@dataclass(frozen=True)
class Search:
    """What came of a search for a planted mistake."""

    name: str
    reached: Counter[str]
    """How often the mistake made a difference, by its seams."""
    looked: str
    """Where it was looked for."""
    found_by: int | None = None
    """The seed of the schedule that found it."""

    @property
    def problem(self) -> str:
        """Why the mistake proves nothing; empty if it was found."""
        if missed := [seam for seam, times in self.reached.items() if not times]:
            return f"{self.name} was not reached at {', '.join(missed)}"
        if self.found_by is None:
            times = " and ".join(f"{times} times at {seam}" for seam, times in self.reached.items())
            return f"{self.name} was reached {times}, and not found by {self.looked}"
        return ""


def look_for(name: str, seams: Iterable[Seam], run: Run, seeds: range, finding: str) -> Search:
    """Plant a mistake, and run schedules until one of them finds it.

    Args:
        name: of the mistake.
        seams: where it is planted.
        run: runs the schedule of a seed.
        seeds: of the schedules.
        finding: what the AssertionError says that finds it.
    """
    looked = f"seed {seeds.start}" if len(seeds) == 1 else f"seeds {seeds.start} to {seeds.stop - 1}"
    with planted(*seams) as reached:
        for seed in seeds:
            try:
                run(seed)
            except AssertionError as problem:
                if re.search(finding, str(problem)):
                    return Search(name, reached, looked, seed)
    return Search(name, reached, looked)


def expect_found(name: str, *seams: Seam, run: Callable[[], object], finding: str = "") -> None:
    """Demand that one directed scenario finds a mistake."""
    problem = look_for(name, seams, lambda _: run(), range(1), finding).problem
    assert not problem, problem


@dataclass(frozen=True)
class Mistake:
    """A mistake that random schedules find."""

    name: str
    """What the mistake does."""
    family: str
    """Which schedules look for it (:data:`tests.lan.planted.FAMILIES`)."""
    seams: tuple[Seam, ...]
    finding: str
    """What the AssertionError says that finds it."""
    seeds: int = 200
    """How many schedules are run at most: three times as many as a search from the first seed on takes, or more."""
    first: int = 0
    """The seed of the first: near the first that finds it. ``make soak`` begins with 0 all the same."""
    level: Level = "quick"
    """From which level of the suite on it is looked for (:mod:`tests.support.levels`)."""
