"""Random schedules of rounds. A failing seed is replayed by ``python -m tests.lan rounds --replay SEED``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mingle.elastic import host, leases, member, quorum
from mingle.elastic.leases import Hold
from mingle.elastic.member import AgentMember
from mingle.elastic.quorum import Quorum
from tests.lan.round_schedules import RoundSchedule
from tests.lan.seeds import failures, search
from tests.support.levels import batches

QUICK_SCHEDULES = 100


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(5, 60, soak=1_500, size=15))
def test_random_schedules(seeds: range) -> None:
    assert list(failures(RoundSchedule, seeds)) == []


# --- each rule left out ----------------------------------------------------------------------------------------------


def trust_the_lease_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hold, "allows", lambda hold, made, now: now < hold.until)


def take_answers_of_any_age(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hold, "allows", lambda hold, made, now: made <= hold.proved_at and now < hold.until)


def take_answers_of_the_last_five_seconds(patch: pytest.MonkeyPatch) -> None:
    for module in (leases, quorum, member, host):
        patch.setattr(module, "ANSWER_SECONDS", 5.0)


def admit_latecomers_without_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quorum, "admits", lambda *_: True)


def return_rounds_to_members_without_a_question(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentMember, "proved_at", property(lambda _: float("inf"), lambda *_: None), raising=False)


def let_the_young_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quorum, "_founders_among", lambda quorum, members, now: members)


# Each with three times as many schedules as the search for it took; the first of them is 0 unless FIRST says more.
FIRST = {"take_answers_of_the_last_five_seconds": 120}
PLANTED = [
    (trust_the_lease_alone, 12),
    (take_answers_of_any_age, 132),
    (take_answers_of_the_last_five_seconds, 126),
    (admit_latecomers_without_answers, 171),
    (return_rounds_to_members_without_a_question, 78),
    (let_the_young_found, 366),
]


@pytest.mark.soak
@pytest.mark.timeout(3600)  # hundreds of schedules, on a machine that has other tests to run
@pytest.mark.parametrize(
    ("plant", "schedules"),
    [
        pytest.param(*row, id=row[0].__name__, marks=[pytest.mark.slow] if row[1] > QUICK_SCHEDULES else [])
        for row in PLANTED
    ],
)
def test_a_planted_mistake_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], schedules: int
) -> None:
    plant(monkeypatch)
    finding = "gets a round although a later session has had one"
    first = FIRST.get(plant.__name__, 0)
    with pytest.raises(AssertionError, match=finding):
        search(RoundSchedule, range(first, first + schedules), finding)
