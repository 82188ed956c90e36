"""A host among datagrams: whom it answers, and what it does not take at its word."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mingle.protocol.introduction import Introduction
from mingle.protocol.lobby import UNICAST_ANSWERS_AT_ONCE
from mingle.protocol.machine import Address, Answer, Diagnostics, Effect, Endpoints, Identity, Multicast, Source
from mingle.protocol.presence import Presence
from mingle.wire.datagrams import Bye, List, Offer, Seek
from mingle.wire.frames import ProcessInfo

OWN, OTHER = b"H" * 16, b"T" * 16
IDENTITY = Identity(
    job="job", attempt="", member=OWN, rank=0, world_size=2, node="n", who=ProcessInfo(hostname="h", pid=1)
)
HERE = Source(interface="eth0", address="10.0.0.9")
BY_UNICAST = Source(interface="eth0", address="10.0.0.9", multicast=False)


def offer(**more: Any) -> Offer:
    fields = {"job": "job", "session": OTHER, "host": OTHER, "addresses": ("10.0.0.9",), "port": 1, "world_size": 2}
    return Offer(**{**fields, **more})


OURS = offer(session=OWN, host=OWN)


class Alone:
    """A presence whose first burst is over."""

    def __init__(self, *, secured: bool = False) -> None:
        self.diagnostics = Diagnostics()
        self.effects: list[Effect] = []
        self.presence = Presence(
            Introduction(
                identity=IDENTITY,
                session=OWN,
                endpoints=Endpoints(addresses=(Address("10.0.0.1", "eth0", 24),), port=4000),
                started=0.0,
            ),
            lambda: OURS,
            secured=secured,
            diagnostics=self.diagnostics,
            effects=self.effects,
            rng=random.Random(1),
            deadline=60.0,
        )

    def seal(self) -> None:
        self.presence.seal()
        self.effects.clear()

    def due(self, *, mute: bool = False) -> list[Effect]:
        """What it says at its next timer; nothing if it has none."""
        at = self.presence.next_timer(finished=True)
        if at is not None:
            self.presence.handle_timer(at, finished=True, mute=mute)
        done = list(self.effects)
        self.effects.clear()
        return done


def test_it_offers_at_once_and_again_when_it_takes_members_again() -> None:
    alone = Alone()
    assert alone.due() == [Multicast(OURS)]
    alone.seal()
    assert alone.due() == [], "sealed it speaks when asked only"
    alone.presence.reopen(50.0)
    assert alone.presence.next_timer(finished=True) == 50.0
    assert alone.due() == [Multicast(OURS)]


def test_making_way_it_offers_nothing() -> None:
    assert Alone().due(mute=True) == []


def test_a_question_by_unicast_is_answered_to_the_asker_also_when_sealed() -> None:
    alone = Alone()
    alone.seal()
    seek = Seek(job="job", member=b"M" * 16, world_size=2, rank=1, hostname="h1")
    alone.presence.heard(seek, BY_UNICAST, 1.0)
    assert alone.effects == [Answer(BY_UNICAST, OURS)]
    assert list(alone.diagnostics.seekers) == [b"M" * 16]


@pytest.mark.parametrize(
    ("message", "lobby"),
    [(Seek(job="job", member=b"M" * 16, world_size=2), False), (List(job="jbo", member=b"M" * 16), True)],
)
def test_a_question_by_multicast_is_answered_where_it_was_asked(message: Seek | List, lobby: bool) -> None:
    alone = Alone()
    alone.seal()
    alone.presence.heard(message, HERE, 1.0)
    assert alone.due() == [Multicast(OURS, lobby=lobby)]


def test_a_flood_of_questions_to_the_lobby_by_unicast_is_answered_rarely() -> None:
    alone = Alone()
    alone.seal()
    for _ in range(1000):
        alone.presence.heard(List(job="jbo", member=b"M" * 16), BY_UNICAST, 1.0)
    assert alone.effects == [Answer(BY_UNICAST, OURS)] * int(UNICAST_ANSWERS_AT_ONCE)


def test_its_own_question_from_before_it_was_a_host_is_no_other_seeker() -> None:
    alone = Alone()
    alone.presence.heard(IDENTITY.seek(), HERE, 1.0)
    assert alone.diagnostics.seekers == {}


def test_its_own_question_to_the_lobby_is_not_answered() -> None:
    alone = Alone()
    alone.seal()
    alone.presence.heard(IDENTITY.list(), HERE, 1.0)
    assert alone.due() == []


def test_only_an_offer_of_another_session_of_this_job_is_handed_out() -> None:
    alone = Alone()
    assert alone.presence.heard(offer(), HERE, 1.0) == offer()
    for message in (
        OURS,
        offer(job="jbo"),
        offer(attempt="2"),
        offer(kind="announcement", hostname="h9"),
        Bye(job="job", session=OTHER),
    ):
        assert alone.presence.heard(message, HERE, 1.0) is None
    assert "jbo" in alone.diagnostics.other_jobs
    assert alone.diagnostics.other_attempts == {"2": "10.0.0.9"}
    assert any("h9" in name for name in alone.diagnostics.announcements)


@pytest.mark.parametrize(("state", "answers"), [("open", [Multicast(OURS)]), ("sealed", [])])
def test_sealed_it_lets_an_open_host_know_and_no_sealed_one(state: str, answers: list[Effect]) -> None:
    alone = Alone()
    alone.seal()
    assert alone.presence.heard(offer(state=state), HERE, 1.0) == offer(state=state)
    assert alone.due() == answers


@pytest.mark.parametrize(("secured", "counted"), [(False, 1), (True, 0)])
def test_a_signature_is_a_hint_for_who_has_no_secret(secured: bool, counted: int) -> None:
    alone = Alone(secured=secured)
    source = Source(interface="eth0", signed=True)
    alone.presence.heard(Seek(job="job", member=b"M" * 16, world_size=2), source, 1.0)
    assert alone.diagnostics.signed_without_secret == counted


def test_what_is_not_verified_counts_if_it_is_of_this_job_and_a_ranks() -> None:
    alone = Alone()
    for message in (offer(), offer(job="jbo"), offer(attempt="2")):
        alone.presence.heard_unverified(message)
    onlooker = Seek(job="job", member=b"M" * 16, world_size=2, kind="announcement")
    alone.presence.heard_unverified(onlooker)
    assert alone.diagnostics.secret_signs == 1


def test_once_finished_the_lobby_is_not_asked() -> None:
    asked: dict[bool, bool] = {}
    for finished in (False, True):
        alone = Alone()
        for tenths in range(100):
            alone.presence.handle_timer(tenths / 10, finished=finished, mute=True)
        asked[finished] = Multicast(IDENTITY.list(), lobby=True) in alone.effects
    assert asked == {False: True, True: False}
