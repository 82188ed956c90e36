"""Which of two halves of a job of agents may go on: majorities of views, which two halves never both have.

A *view* is the list of who was in a session at one time. The theory is dynamic linear voting (Jajodia and Mutchler,
"Dynamic voting algorithms for maintaining the consistency of a replicated database", ACM TODS 15(2), 1990):

* A group may act if it holds more than half of the latest view, or exactly half with the host in it. Two disjoint
  groups can't both do so.
* A new view replaces the old one only when a group that may act knows of it. Until then whoever has heard of it needs
  a majority of both, as in the joint consensus of Raft.
* Whoever has left on purpose counts in no half; nor does who is proved dead, if that is certain: a process that was
  lost may have helped others to a majority before it died. So members are *bound* to their host for
  :data:`LEASE_SECONDS` after they have last heard it. While they are, they help nobody else, unless their host is dead
  or has given up; and their host takes them out of no view. A death that is proved in that time is certain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from mingle.errors import ConfigurationError
from mingle.wire import frames

LEASE_SECONDS = 10.0
"""How long a member is bound to its host after it has last heard it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How many nodes a job may have: torchrun's ``--nnodes=MIN:MAX``.

    Raises:
        ConfigurationError: the numbers make no sense.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum <= frames.MAX_NODES:
            raise ConfigurationError.explain(
                f"a job can't have {self.minimum} to {self.maximum} nodes",
                cause="the two numbers of --nnodes=MIN:MAX are mixed up, or one of them is mistyped",
                remedy=f"give 1 <= MIN <= MAX <= {frames.MAX_NODES}",
            )

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum} to {self.maximum}"

    @property
    def at_once(self) -> int:
        """With how many the first gathering is sealed at once: with so many seated, no other half has as many."""
        return max(self.minimum, self.maximum // 2 + 1)


def members_of(view: frames.View) -> frozenset[bytes]:
    """The member ids in a view."""
    return frozenset(node.member for node in view.nodes)


def holds(view: frames.View, present: AbstractSet[bytes], gone: AbstractSet[bytes]) -> bool:
    """Tells whether a group may act for a view.

    Args:
        view: the view.
        present: the member ids of the group.
        gone: who has left on purpose or has certainly died as a member of that session.
    """
    rest = members_of(view) - (gone - present)
    held = len(rest & present)
    return 2 * held > len(rest) or (2 * held == len(rest) and view.host in present) or not rest


def survives(
    view: frames.View,
    present: AbstractSet[bytes],
    *,
    bound_until: Mapping[bytes, float],
    dead: Mapping[bytes, float],
    now: float,
) -> bool:
    """Tells whether a new gathering may go on for a view.

    Args:
        view: who was in the session before.
        present: the member ids of the gathering.
        bound_until: until when those present are bound to the host of that session.
        dead: who is proved dead, and since when.
        now: the present time.
    """
    here = members_of(view) & present
    if view.host in present:
        return holds(view, present, frozenset())
    died_at = dead.get(view.host)
    if died_at is not None and all(bound_until.get(member, died_at) > died_at for member in here):
        return 2 * len(here) > len(view.nodes) - 1 or len(view.nodes) == 1
    return 2 * len(here) > len(view.nodes) and all(bound_until.get(member, now) <= now for member in here)


def may_survive(view: frames.View, present: AbstractSet[bytes], dead: AbstractSet[bytes]) -> bool:
    """Tells whether a gathering may go on for a view when nobody else was heard for long.

    The dead count for nothing, and one of them must be the host: that it refuses shows that we are not cut off from
    it. What this can't exclude is that it had gone on without us, with others that live and from which we are cut off.
    """
    rest = members_of(view) - (dead - present)
    held = len(rest & present)
    chair = held > 0 and min(rest) in present
    enough = 2 * held > len(rest) or (2 * held == len(rest) and chair) or not rest
    return enough and (view.host in dead or view.host in present)


def machine_of(node: str) -> bytes:
    """Returns the mark of a machine in a view: the beginning of a hash of its node key."""
    return hashlib.sha256(node.encode("utf-8", "replace")).digest()[:8]


@dataclass(slots=True)
class Standing:
    """What one agent knows of views: the last one that was in force, and a later one that may be."""

    settled: frames.View | None = None
    proposed: frames.View | None = None
    bound_until: float = float("-inf")
    """Until when it is bound to the host of that session."""
    reached: int = -1
    """The generation of the last session that it was in: it may be higher than that of the views it has seen."""
    _bound_before: float = float("-inf")

    def heard(self, now: float) -> None:
        """That host has spoken."""
        self.bound_until = self._bound_before = now + LEASE_SECONDS

    def acknowledged(self, now: float) -> None:
        """The host of a session that may form hears that it can count on us."""
        self.bound_until = max(self.bound_until, now + LEASE_SECONDS)

    def release(self) -> None:
        """That host has given its session up."""
        self.bound_until = self._bound_before = float("-inf")

    @property
    def generation(self) -> int:
        """The highest generation that it was in or knows of; -1: none."""
        views = [view.generation for view in (self.settled, self.proposed) if view is not None]
        return max([self.reached, *views])

    def learn(self, view: frames.View, *, settled: bool) -> None:
        """The host of the session we are in says who is."""
        if settled:
            self.settled, self.proposed = view, None
        else:
            self.proposed = view

    def go(self, session: bytes) -> None:
        """The session has formed with us in it: its view is in force."""
        if self.proposed is not None and self.proposed.session == session:
            self.settled, self.proposed = self.proposed, None

    def withdraw(self, session: bytes) -> None:
        """The host of a session that has not formed says that it will not with this view."""
        if self.proposed is not None and self.proposed.session == session:
            self.proposed = None
            self.bound_until = self._bound_before


def in_force(settled: Iterable[frames.View], proposed: Iterable[frames.View]) -> list[frames.View]:
    """Returns the views of which a group needs the majority: those that no later one has certainly replaced.

    Of the settled ones these are the latest of each session of the highest generation (two sessions of one
    generation: a job that began in two halves). Proposed ones count unless a settled one is later.
    """
    settled = list(settled)
    top = max((view.generation for view in settled), default=-1)
    kept: dict[bytes, frames.View] = {}
    for view in settled:
        if view.generation == top and (view.session not in kept or view.number > kept[view.session].number):
            kept[view.session] = view
    open_questions: dict[tuple[bytes, int], frames.View] = {}
    for view in proposed:
        known = kept.get(view.session)
        if view.generation >= top and (known is None or view.number > known.number):
            open_questions[view.session, view.number] = view
    return [*kept.values(), *open_questions.values()]
