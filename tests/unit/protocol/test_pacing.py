"""The timers on a virtual clock: what a network of many would hear."""

from __future__ import annotations

import bisect
import heapq
import itertools
import random

import pytest

from mingle.protocol.pacing import (
    ANSWER_CREDIT,
    ANSWER_GAP_SECONDS,
    ANSWER_SPACING_SECONDS,
    BURST_SECONDS,
    COUNTED_RANKS,
    COUNTED_SECONDS,
    FIRST_SEEK_FREE_RANKS,
    FIRST_SEEK_MAX_SECONDS,
    OFFER_PERIOD_SECONDS,
    SEALED_ANSWER_CREDIT,
    SEALED_ANSWER_GAP_SECONDS,
    SEEK_INTERVAL_MAX_SECONDS,
    SEEK_INTERVAL_SECONDS,
    SEEK_INTERVAL_SECONDS_PER_RANK,
    Announcer,
    Seeker,
)

MINUTE = 60.0
# A switched network carries a datagram to everybody in less than this.
LAN_DELAY_SECONDS = 0.0002


def due(seeker: Seeker) -> float:
    """When a seeker without a host asks next."""
    timer = seeker.next_timer()
    assert timer is not None
    return timer


def seeks(
    count: int, *, hearing: bool, delay: float = LAN_DELAY_SECONDS, until: float = MINUTE, counted: bool = False
) -> list[float]:
    """Let so many seekers start together and return when somebody asked."""
    rng = random.Random(count)
    seekers = [Seeker(count, 0.0, rng, counted=counted) for _ in range(count)]
    asked = []
    events = [(seeker.next_timer() or 0.0, number, True) for number, seeker in enumerate(seekers)]
    heapq.heapify(events)
    while events and events[0][0] < until:
        now, number, is_timer = heapq.heappop(events)
        if not is_timer:
            for other, seeker in enumerate(seekers):
                if other != number:
                    seeker.heard_seek(now)
            continue
        if seekers[number].should_ask(now):
            asked.append(now)
            if hearing:
                heapq.heappush(events, (now + delay, number, False))
        assert due(seekers[number]) > now
        heapq.heappush(events, (due(seekers[number]), number, True))
    return asked


def busiest(times: list[float], window: float) -> int:
    """The largest number of times within a window."""
    first = 0
    most = 0
    for last, time in enumerate(times):
        while times[first] <= time - window:
            first += 1
        most = max(most, last - first + 1)
    return most


# --- those who seek -----------------------------------------------------------------------------------------


def test_one_seeker_asks_often_at_first_and_then_rarely() -> None:
    asked = seeks(1, hearing=False)
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert asked[0] == 0.0
    assert 0.75 * SEEK_INTERVAL_SECONDS <= gaps[0] <= 1.25 * SEEK_INTERVAL_SECONDS
    assert all(0.75 * SEEK_INTERVAL_MAX_SECONDS <= gap <= 1.25 * SEEK_INTERVAL_MAX_SECONDS for gap in gaps[10:])
    assert len([at for at in asked if at < 1]) in range(5, 9)
    assert len(asked) in range(26, 38)


@pytest.mark.parametrize(("count", "least", "most"), [(100, 26, 60), (10_000, 5, 100)])
def test_seekers_that_hear_each_other_ask_about_as_often_as_one(count: int, least: int, most: int) -> None:
    asked = seeks(count, hearing=True)
    assert least <= len(asked) <= most
    assert busiest(asked, 0.01) <= 40
    assert busiest(asked[len(asked) // 2 :], 1.0) <= 20


def test_seekers_that_hear_nobody_each_ask_for_themselves() -> None:
    count = 100
    asked = seeks(count, hearing=False)
    assert 26 * count <= len(asked) <= 38 * count
    # Jitter spreads them: in the steady state no tenth of a second holds much more than its share.
    late = [at for at in asked if at > MINUTE / 2]
    assert busiest(late, 0.1) <= 10 + 3 * count * 0.1 / SEEK_INTERVAL_MAX_SECONDS


@pytest.mark.parametrize(
    ("world_size", "limit"),
    [(1, 0.0), (FIRST_SEEK_FREE_RANKS, 0.0), (100, 0.0168), (10_000, 0.5), (1_000_000, FIRST_SEEK_MAX_SECONDS)],
)
def test_first_question_comes_within_a_window_that_grows_with_the_job(world_size: int, limit: float) -> None:
    rng = random.Random(3)
    first = [Seeker(world_size, 5.0, rng).next_timer() or 0.0 for _ in range(500)]
    assert min(first) >= 5.0
    assert 5.0 + 0.9 * limit <= max(first) <= 5.0 + limit


@pytest.mark.parametrize(
    ("world_size", "counted"),
    [(1000, False), pytest.param(COUNTED_RANKS + 1, True, id="in so large a job no process counts the others")],
)
def test_a_question_heard_stands_for_ones_own(world_size: int, counted: bool) -> None:
    seeker = Seeker(world_size, 0.0, random.Random(1), counted=counted)
    before = due(seeker)
    seeker.heard_seek(before)
    assert not seeker.should_ask(before)
    interval = SEEK_INTERVAL_SECONDS + SEEK_INTERVAL_SECONDS_PER_RANK * world_size
    assert 0.75 * interval <= due(seeker) - before <= 1.25 * interval


@pytest.mark.parametrize("count", [8, COUNTED_RANKS])
def test_processes_that_count_each_other_each_ask_for_themselves_at_first(count: int) -> None:
    asked = seeks(count, hearing=True, counted=True)
    early = [at for at in asked if at < COUNTED_SECONDS]
    assert 4 * count <= len(early) <= 7 * count
    assert len(asked) - len(early) <= 60  # from then on they ask about as often as one


def test_the_questions_of_ranks_that_start_together_do_not_silence_a_seeker_for_seconds() -> None:
    seeker = Seeker(1024, 0.0, random.Random(1))
    for number in range(50):
        seeker.heard_seek(0.02 + 0.0002 * number)
    assert due(seeker) < 1.0
    for second in range(1, 50):
        seeker.heard_seek(float(second))
    assert due(seeker) > 49.0 + SEEK_INTERVAL_MAX_SECONDS


def test_in_the_long_run_ipv4_and_ipv6_take_turns() -> None:
    seeker, turns = Seeker(2, 0.0, random.Random(1)), []
    for _ in range(14):
        assert seeker.should_ask(due(seeker))
        turns.append(seeker.turn())
    quick = turns.count(None)
    assert quick in range(6, 10)
    assert turns == [None] * quick + list(range(1, 15 - quick))
    seeker.resume(100.0)
    assert seeker.should_ask(100.0)
    assert seeker.turn() is None, "there is another host to look for"


def test_a_seeker_with_a_host_is_silent_whatever_it_hears_and_asks_quickly_once_it_has_lost_it() -> None:
    seeker = Seeker(1, 0.0, random.Random(1))
    for second in range(30):
        seeker.should_ask(float(second))
    seeker.pause()
    seeker.heard_seek(30.0)
    assert seeker.next_timer() is None
    assert not seeker.should_ask(100.0)
    seeker.resume(100.0)
    assert seeker.should_ask(100.0)
    assert due(seeker) <= 100.1


# --- the one who offers -------------------------------------------------------------------------------------


def offers(announcer: Announcer, until: float, *, asked: list[float] | None = None) -> list[float]:
    """Drive an announcer as its owner does: by its timer, and by the questions that come in."""
    questions = sorted(asked or [])
    spoken: list[float] = []
    while True:
        due = announcer.next_timer()
        question = questions[0] if questions else until
        now = min(until if due is None else max(due, 0.0), question)
        if now >= until:
            return spoken
        if questions and question <= now:
            announcer.asked()
            questions.pop(0)
        if announcer.should_speak(now):
            spoken.append(now)
            after = announcer.next_timer()
            assert after is None or after > now


def test_a_host_speaks_at_once_in_a_burst_then_periodically() -> None:
    spoken = offers(Announcer(10.0), 30.0)
    burst = [10.0 + offset for offset in BURST_SECONDS]
    assert spoken[: len(burst)] == burst
    later = [burst[-1], *spoken[len(burst) :]]
    assert {round(after - before, 6) for before, after in itertools.pairwise(later)} == {OFFER_PERIOD_SECONDS}


@pytest.mark.parametrize("rate", [10, 100, 10_000])
def test_an_open_host_answers_every_question_soon_and_never_more_often_than_its_limit(rate: int) -> None:
    rng = random.Random(rate)
    questions = [rng.uniform(0, 3) for _ in range(3 * rate)]
    spoken = offers(Announcer(0.0), 4.0, asked=questions)
    for question in questions:
        assert spoken[bisect.bisect_left(spoken, question)] <= question + ANSWER_GAP_SECONDS + 1e-9
    assert min(after - before for before, after in itertools.pairwise(spoken)) >= ANSWER_SPACING_SECONDS - 1e-9
    for seconds in (0.01, 0.1, 1.0, 3.0):
        assert busiest(spoken, seconds) <= ANSWER_CREDIT + seconds / ANSWER_GAP_SECONDS


def test_ranks_that_start_together_are_answered_as_soon_as_each_asks() -> None:
    questions = [0.003 * number for number in range(1, ANSWER_CREDIT)]
    assert offers(Announcer(0.0), 0.029, asked=questions) == pytest.approx([0.0, *questions])


def test_an_answer_serves_for_the_part_of_the_burst_that_was_due() -> None:
    assert offers(Announcer(0.0), 0.2, asked=[0.0295, 0.0301]) == pytest.approx([0.0, 0.0295, 0.0315, 0.1])


def sealed_host() -> Announcer:
    announcer = Announcer(0.0)
    announcer.should_speak(0.0)
    announcer.sealed = True
    return announcer


def test_a_sealed_host_says_nothing_unasked() -> None:
    assert offers(sealed_host(), MINUTE) == []


def test_a_sealed_host_answers_a_few_times_a_second_in_the_long_run() -> None:
    rng = random.Random(5)
    spoken = offers(sealed_host(), 20.0, asked=[rng.uniform(0, 20) for _ in range(10_000)])
    gaps = [after - before for before, after in itertools.pairwise(spoken)]
    assert min(gaps) >= ANSWER_SPACING_SECONDS - 1e-9
    steady = gaps[SEALED_ANSWER_CREDIT:]
    assert min(steady) >= SEALED_ANSWER_GAP_SECONDS - 1e-9
    for seconds in range(1, 20):
        assert busiest(spoken, seconds) <= SEALED_ANSWER_CREDIT + seconds / SEALED_ANSWER_GAP_SECONDS
    assert len(spoken) >= 20 / SEALED_ANSWER_GAP_SECONDS


def test_a_sealed_host_that_was_quiet_answers_several_askers_at_once() -> None:
    asked = [100.0, 100.01, 100.02, 100.03]
    fourth = 100.0 + SEALED_ANSWER_GAP_SECONDS
    assert offers(sealed_host(), 200.0, asked=asked) == pytest.approx([100.0, 100.01, 100.02, fourth])


@pytest.mark.parametrize("answers", [[], [49.9, 49.91, 49.92]], ids=["quiet", "its answers of before delay nothing"])
def test_a_session_that_opens_again_is_announced_in_a_fresh_burst(answers: list[float]) -> None:
    announcer = sealed_host()
    assert offers(announcer, 50.0, asked=answers) == answers
    announcer.sealed = False
    announcer.burst(50.0)
    assert offers(announcer, 51.5) == [50.0 + offset for offset in BURST_SECONDS]


def test_a_question_while_sealed_is_not_forgotten_when_the_session_opens() -> None:
    announcer = sealed_host()
    announcer.asked()
    announcer.sealed = False
    assert announcer.should_speak(ANSWER_SPACING_SECONDS)
