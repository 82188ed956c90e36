"""The host's views: one change at a time, settled by those of the view before."""

from __future__ import annotations

from mingle.agents.roll import Roll
from tests.views import member, members, node, view


def nodes(letters: str) -> list:  # type: ignore[type-arg]
    return [node(letter) for letter in letters]


def test_a_change_is_proposed_once_and_settled_by_a_majority_that_knows() -> None:
    roll = Roll(view("HABC"))
    assert not roll.change(nodes("HABC"), 0)
    assert roll.change(nodes("HABCD"), 0)
    assert roll.latest.number == 2
    assert not roll.change(nodes("HABCDE"), 0), "one change at a time"
    present, none = members("HABCD"), set[bytes]()
    assert not roll.settle(present, none, none)
    roll.acknowledged(member("A"), 1)
    roll.acknowledged(member("D"), 2)
    assert not roll.settle(present, none, members("BC")), "a newcomer does not count"
    roll.acknowledged(member("A"), 2)
    roll.acknowledged(member("B"), 2)
    assert roll.settle(present, none, none)
    assert roll.settled == view("HABCD", number=2)
    assert not roll.settle(present, none, none)


def test_half_with_the_host_settles_only_what_nobody_who_is_bound_could_outvote() -> None:
    roll = Roll(view("HABC"))
    roll.change(nodes("HA"), 0)
    roll.acknowledged(member("A"), 2)
    assert not roll.settle(members("HA"), set(), members("BC"))
    assert not roll.settle(members("HA"), set(), members("C"))
    assert roll.settle(members("HA"), set(), set())


def test_until_it_is_settled_both_views_count() -> None:
    roll = Roll(view("HAB"))
    roll.change(nodes("HABCDE"), 3)
    assert roll.latest.generation == 3
    assert roll.counted == members("HABCDE")
    assert not roll.holds(members("HA"), set())
    assert not roll.holds(members("HCDE"), set()), "one of the three that were before"
    assert roll.holds(members("HAC"), set())
    assert {each.member for each in roll.absent(members("HAC"))} == members("BDE")


def test_who_is_gone_counts_in_no_half() -> None:
    roll = Roll(view("HAB"))
    assert not roll.holds(members("H"), set())
    assert roll.holds(members("H"), members("A"))
    roll.change(nodes("H"), 0)
    assert roll.settle(members("H"), members("AB"), set())
    assert roll.holds(members("H"), set())
