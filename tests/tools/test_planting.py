"""A planted mistake is looked for: whether it makes a difference, and whether a schedule notices that."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.lan.planting import Act, Rule, always, expect_found, look_for, nothing, planted


class Door:
    def __init__(self) -> None:
        self.opened = 0

    def may_open(self, key: str) -> bool:
        return key == "right"

    @property
    def limit(self) -> int:
        return 3

    @staticmethod
    def weight() -> int:
        return 80

    def open(self, key: str) -> None:
        if self.may_open(key) and self.opened < self.limit:
            self.opened += 1


ANY_KEY = Rule(Door, "may_open", always(True))


def scenario(*keys: str) -> None:
    door = Door()
    for key in keys:
        door.open(key)
    assert door.opened == keys.count("right"), "another number of times than keys were right"


def test_rule_is_reached_where_its_answer_differs() -> None:
    with planted(ANY_KEY, Rule(Door, "limit", always(1)), Rule(Door, "weight", always(80))) as reached:
        assert Door().may_open("wrong")
        assert Door().may_open("right")
        assert Door().limit == 1
        assert Door.weight() == 80
    assert reached == {"Door.may_open": 1, "Door.limit": 1, "Door.weight": 0}
    assert not Door().may_open("wrong")


def test_act_is_reached_in_its_situation() -> None:
    door = Door()
    with planted(Act(Door, "open", nothing, when=lambda _, key: key == "right")) as reached:
        door.open("right")
        door.open("wrong")
    assert (door.opened, reached["Door.open"]) == (0, 1)


def test_function_is_planted_where_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user = ModuleType("home_of.rule"), ModuleType("home_of.user")
    home.is_right = user.is_right = lambda: False  # type: ignore[attr-defined]
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with planted(Rule(home, "is_right", always(True))) as reached:
        assert user.is_right()
    assert reached == {"rule.is_right": 1}
    assert not user.is_right()


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["right"], "any_key was not reached at Door.may_open"),
        (["wrong"], ""),
        (["right", "right", "right", "wrong"], "any_key was reached 1 times at Door.may_open, and not found by seed 0"),
    ],
)
def test_search_says_whether_a_mistake_was_reached_and_found(keys: list[str], problem: str) -> None:
    assert look_for("any_key", [ANY_KEY], lambda _: scenario(*keys), range(1), "another number").problem == problem


def test_other_finding_is_none() -> None:
    assert "not found" in look_for("any_key", [ANY_KEY], lambda _: scenario("wrong"), range(2), "too late").problem


def test_mistake_of_a_directed_scenario_must_be_found() -> None:
    expect_found("any_key", ANY_KEY, run=lambda: scenario("wrong"), finding="another number")
    with pytest.raises(AssertionError, match="any_key was not reached"):
        expect_found("any_key", ANY_KEY, run=lambda: scenario("right"))


def test_seam_that_is_gone_is_an_error() -> None:
    with pytest.raises(AttributeError), planted(Rule(Door, "may_close", always(True))):
        pass
