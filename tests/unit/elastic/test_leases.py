"""Leases: the host counts from what it sent, the member is bound from what it processed."""

from __future__ import annotations

import random

import pytest

from mingle.elastic.leases import (
    ANSWER_SECONDS,
    BINDING_SECONDS,
    GROWN_SECONDS,
    LEASE_SECONDS,
    Binding,
    Leases,
    latest_common,
)

A, B = b"a" * 16, b"b" * 16
S, T = b"s" * 16, b"t" * 16
NEVER = float("-inf")


def acknowledged(at: float) -> Leases:
    leases = Leases()
    leases.sealed(A, at)
    leases.acknowledged(A)
    return leases


def test_a_lease_begins_with_the_sending_of_what_was_acknowledged() -> None:
    leases = Leases()
    leases.sealed(A, 5.0)
    assert leases.until(A) == NEVER
    leases.acknowledged(A)
    leases.acknowledged(B)
    assert leases.until(A) == 5.0 + LEASE_SECONDS
    assert leases.until(B) == NEVER, "whom SEALED was not sent has answered nothing"


def test_an_answer_counts_from_the_sending_of_its_question() -> None:
    leases = acknowledged(0.0)
    leases.answered(A, 2.0)
    assert (leases.until(A), leases.answered_at(A)) == (2.0 + LEASE_SECONDS, 2.0)
    leases.answered(A, 1.0)
    assert leases.until(A) == 2.0 + LEASE_SECONDS, "a question of before SEALED shortens nothing"
    leases.answered(B, 3.0)
    assert leases.until(B) == NEVER, "it has acknowledged nothing"


def test_a_lease_ends_with_the_next_seal_and_when_it_is_forgotten() -> None:
    leases = acknowledged(0.0)
    leases.sealed(A, 2.0)
    leases.answered(A, 1.0)
    assert leases.until(A) == NEVER, "SEALED has not been acknowledged"
    leases.acknowledged(A)
    leases.answered(A, 1.0)
    assert leases.until(A) == 2.0 + LEASE_SECONDS
    leases.forget(A)
    leases.answered(A, 3.0)
    leases.acknowledged(A)
    assert (leases.until(A), leases.answered_at(A)) == (NEVER, NEVER)


def test_a_binding_is_to_one_session_and_ends_by_itself_or_by_its_host() -> None:
    binding = Binding()
    assert not binding.elsewhere(S, 0.0)
    binding.renew(S, 0.0)
    assert binding.holds(BINDING_SECONDS - 0.1)
    assert not binding.holds(BINDING_SECONDS)
    assert (binding.elsewhere(S, 1.0), binding.elsewhere(T, 1.0)) == (False, True)
    binding.release(T)
    assert binding.elsewhere(T, 1.0)
    binding.release(S)
    assert not binding.elsewhere(T, 1.0)


@pytest.mark.parametrize(
    ("sooner", "later"),
    [
        pytest.param(ANSWER_SECONDS, GROWN_SECONDS, id="answers are too old before the agent in its place counts"),
        pytest.param(LEASE_SECONDS, BINDING_SECONDS, id="the host stops counting before the member is free"),
    ],
)
def test_what_must_end_first_does_so_on_clocks_that_differ(sooner: float, later: float) -> None:
    assert sooner * 1.01 < later * 0.99


@pytest.mark.parametrize(
    ("spans", "needed", "moment"),
    [
        ([], 0, float("inf")),
        ([], 1, NEVER),
        ([(0.0, 5.0), (1.0, 4.0), (2.0, 3.0)], 1, 5.0),
        ([(0.0, 5.0), (1.0, 4.0), (2.0, 3.0)], 3, 3.0),
        ([(0.0, 1.0), (2.0, 3.0)], 2, NEVER),
        ([(0.0, 2.0), (2.0, 3.0)], 2, 2.0),
        ([(0.0, 1.0), (2.0, 3.0), (0.5, 2.5)], 2, 2.5),
        ([(4.0, 1.0), (0.0, 9.0)], 2, NEVER),
    ],
    ids=["none needed", "nobody", "one", "all", "one after the other", "touch", "the later two", "unanswered"],
)
def test_the_latest_moment_at_which_enough_were_there(
    spans: list[tuple[float, float]], needed: int, moment: float
) -> None:
    assert latest_common(spans, needed) == moment


def test_a_member_was_certainly_there_from_its_seal_to_the_last_question_that_it_answered() -> None:
    leases = acknowledged(1.0)
    begin, end = leases.alive(A)
    assert begin > end, "it has acknowledged at a moment that the host does not know"
    leases.answered(A, 3.0)
    assert leases.alive(A) == (1.0, 3.0)
    leases.forget(A)
    begin, end = leases.alive(A)
    assert begin > end


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_anew_only_after_enough_answers_is_always_right(seed: int) -> None:
    rng, leases, now = random.Random(seed), Leases(), 0.0
    everybody = [bytes((number,)) for number in range(8)]
    members, needed = list(everybody), 3
    for _ in range(400):
        now += rng.choice((0.0, 0.1, 1.0))
        member = rng.choice(everybody)
        match rng.randrange(20):
            case 0:
                leases.forget(member)
                members = [each for each in members if each != member]
            case 1 | 2:
                leases.sealed(member, now)
                leases.acknowledged(member)
                members = [*(each for each in members if each != member), member]
            case 3:
                needed = rng.randrange(9)
            case _:
                leases.answered(member, now - rng.choice((0.0, 0.1, 2.0)))
        until = latest_common([(NEVER, leases.until(each)) for each in members], needed)
        assert leases.kept_until(members, needed) == until
        together = latest_common([leases.alive(each) for each in members], needed)
        assert leases.together_at(members, needed) == together
