"""Majorities of views: who may go on, and never two halves of one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingle.agents.quorum import LEASE_SECONDS, Nodes, Standing, holds, in_force, machine_of, may_survive, survives
from mingle.errors import ConfigurationError
from tests.views import member, members, view

EXAMPLES = settings(derandomize=True, database=None, deadline=None)


@pytest.mark.parametrize(("minimum", "maximum", "at_once"), [(1, 1, 1), (1, 4, 3), (2, 3, 2), (4, 4, 4), (2, 5, 3)])
def test_the_first_gathering_is_sealed_at_once_when_no_other_part_has_as_many(
    minimum: int, maximum: int, at_once: int
) -> None:
    assert Nodes(minimum=minimum, maximum=maximum).at_once == at_once


def test_numbers_of_nodes_as_people_write_them() -> None:
    assert [str(Nodes(minimum=2, maximum=each)) for each in (2, 4)] == ["2", "2 to 4"]


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 2), (3, 2), (1, 1025)])
def test_numbers_that_make_no_sense(minimum: int, maximum: int) -> None:
    with pytest.raises(ConfigurationError, match="--nnodes=MIN:MAX"):
        Nodes(minimum=minimum, maximum=maximum)


@pytest.mark.parametrize(
    ("present", "gone", "held"),
    [
        ("HA", "", True),  # half, with the host
        ("BC", "", False),
        ("ABC", "", True),
        ("H", "", False),
        ("H", "AB", True),  # the two that are left, and it is the host
        ("H", "ABC", True),
        ("HX", "", False),  # a newcomer counts for nothing
    ],
)
def test_a_host_goes_on_with_half_of_its_view(present: str, gone: str, held: bool) -> None:
    assert holds(view("HABC"), members(present), members(gone)) is held


def may_go_on(present: str, *, dead_at: float | None, bound: float = 0.0, now: float = 0.0, of: str = "HABC") -> bool:
    dead = {} if dead_at is None else {member("H"): dead_at}
    return survives(view(of), members(present), bound_until=dict.fromkeys(members(present), bound), dead=dead, now=now)


def test_survivors_need_more_than_half() -> None:
    assert may_go_on("ABC", dead_at=None)
    assert not may_go_on("AB", dead_at=None)
    assert not may_go_on("ABX", dead_at=None)


def test_survivors_that_are_bound_to_a_host_that_may_live_wait() -> None:
    assert not may_go_on("ABC", dead_at=None, bound=5.0, now=4.9)
    assert may_go_on("ABC", dead_at=None, bound=5.0, now=5.0)


def test_a_host_that_died_while_they_were_bound_does_not_count() -> None:
    assert may_go_on("AB", dead_at=3.0, bound=5.0, now=4.0)
    assert not may_go_on("A", dead_at=3.0, bound=5.0, now=4.0)
    assert may_go_on("A", dead_at=3.0, bound=5.0, now=4.0, of="HA")
    assert may_go_on("X", dead_at=3.0, bound=5.0, now=4.0, of="H")


def test_a_host_that_may_have_gone_on_without_them_before_it_died_counts() -> None:
    assert not may_go_on("AB", dead_at=6.0, bound=5.0, now=7.0)
    assert may_go_on("ABC", dead_at=6.0, bound=5.0, now=7.0)


def test_the_old_host_among_them_breaks_the_tie() -> None:
    assert may_go_on("HA", dead_at=None, bound=5.0, now=1.0)
    assert not may_go_on("H", dead_at=None, now=9.0)


@pytest.mark.parametrize(
    ("present", "dead", "may"),
    [
        ("AB", "H", True),
        ("A", "HB", True),
        ("C", "HA", False),
        ("AB", "C", False),
        ("AB", "", False),
        ("B", "HAC", True),
    ],
)
def test_after_a_last_call_the_dead_count_for_nothing_if_the_host_is_one(present: str, dead: str, may: bool) -> None:
    assert may_survive(view("HABC"), members(present), members(dead)) is may


@EXAMPLES
@given(
    size=st.integers(1, 7),
    sides=st.lists(st.sampled_from("LRD"), min_size=7, max_size=7),
    died_at=st.floats(0, 20),
    bounds=st.lists(st.floats(0, 20), min_size=7, max_size=7),
    now=st.floats(0, 40),
)
def test_two_halves_never_both_go_on(
    size: int, sides: list[str], died_at: float, bounds: list[float], now: float
) -> None:
    letters = "HABCDEF"[:size]
    whole = view(letters)
    left, right, gone = (
        members("".join(c for c, s in zip(letters, sides, strict=False) if s == side)) for side in "LRD"
    )
    dead = dict.fromkeys(gone, died_at)
    bound = {member(letter): until for letter, until in zip(letters, bounds, strict=False)}
    halves = [
        holds(whole, side, gone)
        if member("H") in side
        else survives(whole, side, bound_until=bound, dead=dead, now=now) and bool(side)
        for side in (left, right)
    ]
    # What the host's side counts out has died as a member of its session: see mingle.agents.heartbeat.Leases.
    assert not all(halves) or not (left and right)


def test_what_must_be_held_are_the_latest_views_of_the_highest_generation() -> None:
    old, new = view("HA", number=1), view("HAB", number=2)
    other = view("XY", host="X", session="T")
    later = view("AB", host="A", generation=1, session="U")
    assert in_force([old, new], []) == [new]
    assert in_force([old, other], []) == [old, other]
    assert in_force([new, other, later], []) == [later]
    assert in_force([later], [old]) == [later]
    assert in_force([new], [later]) == [new, later]
    assert in_force([old], [new, new]) == [old, new]
    assert in_force([new], [old]) == [new]
    assert in_force([], []) == []


def test_what_an_agent_knows_of_views() -> None:
    standing, first, second = Standing(), view("HA"), view("AB", host="A", generation=1, session="T")
    assert standing.generation == -1
    standing.learn(first, settled=False)
    standing.go(member("X"))
    assert standing.settled is None
    standing.go(first.session)
    assert (standing.settled, standing.proposed) == (first, None)
    standing.learn(second, settled=False)
    assert standing.generation == 1
    standing.withdraw(member("X"))
    assert standing.proposed == second
    standing.withdraw(second.session)
    assert (standing.settled, standing.proposed) == (first, None)
    standing.learn(second, settled=True)
    assert (standing.settled, standing.proposed) == (second, None)


def test_a_promise_that_is_withdrawn_binds_no_more() -> None:
    standing, later = Standing(), view("AB", host="A", generation=1, session="T")
    standing.heard(100.0)
    standing.learn(later, settled=False)
    standing.acknowledged(105.0)
    assert standing.bound_until == 105.0 + LEASE_SECONDS
    standing.withdraw(later.session)
    assert standing.bound_until == 100.0 + LEASE_SECONDS
    standing.release()
    assert standing.bound_until == float("-inf")


def test_machines_have_different_marks() -> None:
    marks = {machine_of(each) for each in ("boot:1/net:2", "boot:1/net:3", "host:\udcff")}
    assert len(marks) == 3
    assert all(one[:8] == one for one in marks)
    assert all(one != other for one, other in itertools.combinations(marks, 2))
