"""A control port that refuses proves that its agent is dead; nothing else does."""

from __future__ import annotations

import errno
import itertools
import os

import pytest

from mingle.agents.obituaries import ANSWER_SECONDS, ASK_SECONDS, REFUSED, Obituaries
from mingle.agents.quorum import machine_of
from mingle.network.connections import _in_words
from mingle.rules.machine import Dial, Effect, Hangup
from tests.views import member, node

REASON = _in_words(OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)))


@pytest.fixture
def effects() -> list[Effect]:
    return []


@pytest.fixture
def obituaries(effects: list[Effect]) -> Obituaries:
    return Obituaries(itertools.count(1).__next__, effects, frozenset({"10.0.0.8"}), machine_of("H"))


def dialled(effects: list[Effect]) -> dict[str, int]:
    return {effect.address: effect.conn for effect in effects if isinstance(effect, Dial)}


def test_a_refusal_is_a_death(obituaries: Obituaries, effects: list[Effect]) -> None:
    assert REFUSED in REASON
    obituaries.inquire([node("A"), node("B")], 0.0)
    conns = dialled(effects)
    assert conns.keys() == {node("A").address, node("B").address}
    assert obituaries.owns(conns[node("A").address])
    obituaries.closed(conns[node("A").address], REASON, 0.5)
    obituaries.closed(conns[node("B").address], "No route to host (EHOSTUNREACH)", 0.6)
    assert obituaries.dead == {member("A"): 0.5}


def test_whoever_answers_lives_and_is_asked_again_later(obituaries: Obituaries, effects: list[Effect]) -> None:
    obituaries.inquire([node("A")], 0.0)
    conn = dialled(effects)[node("A").address]
    obituaries.connected(conn)
    assert effects[-1] == Hangup(conn)
    assert not obituaries.owns(conn)
    assert obituaries.next_timer() == ASK_SECONDS
    effects.clear()
    obituaries.handle_timer(ASK_SECONDS)
    assert dialled(effects)
    assert obituaries.dead == {}


def test_silence_proves_nothing(obituaries: Obituaries, effects: list[Effect]) -> None:
    obituaries.inquire([node("A")], 0.0)
    assert obituaries.next_timer() == ANSWER_SECONDS
    obituaries.handle_timer(ANSWER_SECONDS)
    assert isinstance(effects[-1], Hangup)
    assert obituaries.dead == {}


def test_who_is_missed_no_more_is_asked_no_more(obituaries: Obituaries, effects: list[Effect]) -> None:
    obituaries.inquire([node("A")], 0.0)
    conn = dialled(effects)[node("A").address]
    obituaries.inquire([], 0.1)
    assert effects[-1] == Hangup(conn)
    assert obituaries.next_timer() is None
    obituaries.closed(conn, REASON, 0.2)
    obituaries.connected(conn)
    assert obituaries.dead == {}


def test_a_refusal_at_an_address_of_ours_says_nothing_of_another_machine(
    obituaries: Obituaries, effects: list[Effect]
) -> None:
    assert node("H").address == "10.0.0.8"
    elsewhere = type(node("H"))(member("X"), "10.0.0.8", 4000, machine_of("X"))
    without_port = type(node("A"))(member("A"), "10.0.0.9", 0, machine_of("A"))
    obituaries.inquire([elsewhere, without_port], 0.0)
    assert effects == []
    obituaries.inquire([node("H")], 0.0)
    assert list(dialled(effects)) == ["10.0.0.8"]


def test_nothing_is_left(obituaries: Obituaries, effects: list[Effect]) -> None:
    obituaries.inquire([node("A"), node("B")], 0.0)
    effects.clear()
    obituaries.abandon()
    assert len(effects) == 2
    assert all(isinstance(effect, Hangup) for effect in effects)
