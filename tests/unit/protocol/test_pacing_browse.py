"""The browse group: when a process asks there for other jobs, and when it answers."""

from __future__ import annotations

import itertools
import random

import pytest

from mingle.protocol.pacing import (
    ASK_AGAIN_SECONDS,
    ASK_JITTER_SECONDS,
    BROWSE_ANSWER_GAP_SECONDS,
    BROWSE_ANSWER_JITTER_SECONDS,
    EARLY_ASK_SECONDS,
    LAST_ASK_SECONDS,
    OVERHEARD_SECONDS,
    UNICAST_ANSWERS_AT_ONCE,
    UNICAST_ANSWERS_PER_SECOND,
    BrowseGroup,
)


def new_group(timeout: float = 300.0, seed: int = 1, now: float = 0.0) -> BrowseGroup:
    return BrowseGroup(now, now + timeout, random.Random(seed))


def asks(group: BrowseGroup, until: float) -> list[float]:
    """When it asks, driven by its own timer."""
    asked = []
    while (due := group.next_timer()) is not None and due < until:
        if group.should_ask(due):
            asked.append(due)
        group.should_answer(due)
    return asked


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_asks_early_then_now_and_then_and_before_its_deadline(seed: int) -> None:
    early, *further, last = asks(new_group(seed=seed, now=1000.0), 10_000.0)
    assert len(further) == 9
    for before, after in itertools.pairwise([early, *further]):
        assert before + ASK_AGAIN_SECONDS <= after <= before + ASK_AGAIN_SECONDS + ASK_JITTER_SECONDS
    assert 1000.0 + EARLY_ASK_SECONDS <= early <= 1000.0 + EARLY_ASK_SECONDS + ASK_JITTER_SECONDS
    assert 1300.0 - LAST_ASK_SECONDS - ASK_JITTER_SECONDS <= last <= 1300.0 - LAST_ASK_SECONDS


@pytest.mark.parametrize(
    ("timeout", "earliest", "latest"),
    [
        pytest.param(5.0, 2.5, 3.0, id="early would be no earlier"),
        pytest.param(1.0, 0.0, 0.0, id="less time than the last ask wants"),
    ],
)
def test_a_rank_with_little_time_asks_once(timeout: float, earliest: float, latest: float) -> None:
    (asked,) = asks(new_group(timeout), 100.0)
    assert earliest <= asked <= latest


def test_a_rank_that_was_stopped_over_both_times_asks_twice_and_no_more() -> None:
    group = new_group(10.0)
    assert [group.should_ask(20.0) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("seed", range(5))
def test_a_question_is_answered_once_after_a_random_moment(seed: int) -> None:
    group = new_group(seed=seed)
    assert group.answer_timer() is None
    group.asked(7.0)
    due = group.answer_timer()
    assert due is not None
    assert 7.0 <= due <= 7.0 + BROWSE_ANSWER_JITTER_SECONDS
    assert [group.should_answer(at) for at in (due - 1e-6, due, due)] == [False, True, False]


def test_an_endless_flood_of_questions_gets_two_answers_a_second() -> None:
    group = new_group()
    answered = []
    for tick in range(10_000):
        now = tick / 1000
        group.asked(now)
        if group.should_answer(now):
            answered.append(now)
    gaps = [after - before for before, after in itertools.pairwise(answered)]
    assert min(gaps) >= BROWSE_ANSWER_GAP_SECONDS - 1e-9
    assert max(gaps) <= BROWSE_ANSWER_GAP_SECONDS + BROWSE_ANSWER_JITTER_SECONDS + 0.002


def test_answer_of_another_process_suppresses_our_own() -> None:
    group = new_group()
    group.asked(7.0)
    group.answered()
    assert group.answer_timer() is None
    assert not group.should_answer(8.0)


def test_a_rank_of_the_same_job_that_asks_early_asks_for_all_of_it() -> None:
    group = new_group()
    group.overheard(1.0, seated=False)
    first, *_, last = asks(group, 1000.0)
    assert first >= 1.0 + ASK_AGAIN_SECONDS
    assert last >= 300.0 - LAST_ASK_SECONDS - ASK_JITTER_SECONDS


def test_process_that_heard_of_its_job_asks_the_browse_group_rarely() -> None:
    group = new_group()
    group.found()
    (last,) = asks(group, 1000.0)
    assert last >= 300.0 - LAST_ASK_SECONDS - ASK_JITTER_SECONDS, "whoever waits still wants to know why"


@pytest.mark.parametrize(
    ("before", "seated", "stands"),
    [(OVERHEARD_SECONDS - 0.01, True, True), (OVERHEARD_SECONDS + 0.01, True, False), (0.1, False, False)],
)
def test_a_question_a_moment_before_the_last_one_of_a_rank_with_a_seat_stands_for_it(
    before: float, seated: bool, stands: bool
) -> None:
    early, last = asks(new_group(30.0), 1000.0)
    group = new_group(30.0)
    assert group.should_ask(early)
    group.overheard(last - before, seated=seated)
    assert asks(group, 1000.0) == ([] if stands else [last])


def test_questions_by_unicast_are_answered_at_a_bounded_rate() -> None:
    group = new_group()
    at_once = [group.may_answer_by_unicast(1.0) for _ in range(50)]
    assert at_once == [True] * int(UNICAST_ANSWERS_AT_ONCE) + [False] * (50 - int(UNICAST_ANSWERS_AT_ONCE))
    flooded = sum(group.may_answer_by_unicast(1.0 + step / 100) for step in range(1, 1001))
    assert flooded == 10 * UNICAST_ANSWERS_PER_SECOND
    assert group.may_answer_by_unicast(60.0), "and again when it is over"
