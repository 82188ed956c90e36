"""The discovery client: what a rank says and hears by datagrams."""

from __future__ import annotations

import itertools
import random

import pytest

from mingle.config.values import Secret
from mingle.protocol.effects import Answer, Effect, Multicast
from mingle.protocol.events import Source
from mingle.protocol.explain.observations import Diagnostics
from mingle.protocol.machine import Context, Identity
from mingle.protocol.pacing import LATE_SECONDS, SEEK_INTERVAL_MAX_SECONDS, DiscoveryClient
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Datagram, Kind, List, Offer, Seek
from mingle.wire.frames import ProcessInfo

HERE = Source(interface="eth0", address="10.0.0.9")
IDENTITY = Identity(
    job="job", attempt="2", member=b"M" * 16, rank=1, world_size=2, node="n", who=ProcessInfo(hostname="h", pid=1)
)


class Alone:
    def __init__(self, *, secured: bool = False) -> None:
        self.effects: list[Effect] = []
        self.diagnostics = Diagnostics()
        key = JobKey(Secret(b"a secret that is long enough"), "job") if secured else None
        context = Context(key=key, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=60.0)
        self.client = DiscoveryClient(IDENTITY, context, 0.0, diagnostics=self.diagnostics, effects=self.effects)

    def heard(self, message: Datagram, source: Source, now: float, *, seated: bool = False) -> Offer | None:
        return self.client.heard(message, source, now, seated=seated)


def offer(job: str = "job", attempt: str = "2", kind: Kind = "ranks") -> Offer:
    return Offer(
        job=job,
        attempt=attempt,
        session=b"S" * 16,
        host=b"H" * 16,
        addresses=("10.0.0.1",),
        port=4000,
        world_size=2,
        kind=kind,
    )


def seek(member: bytes = b"N" * 16) -> Seek:
    return Seek(job="job", attempt="2", member=member, world_size=2, rank=0, hostname="h2", pid=5)


def asked(job: str = "job", member: bytes = b"N" * 16) -> List:
    return List(job=job, attempt="2", member=member, rank=None, hostname="h2", pid=5)


def test_only_the_offers_of_its_own_job_are_handed_on() -> None:
    alone = Alone()
    assert alone.heard(offer(), HERE, 1.0) == offer()
    strangers: list[Datagram] = [offer(job="other"), offer(attempt="1"), seek(), asked()]
    assert [alone.heard(each, HERE, 1.0) for each in strangers] == [None] * len(strangers)
    diagnostics = alone.diagnostics
    assert list(diagnostics.other_jobs) == ["other"]
    assert list(diagnostics.other_attempts) == ["1"]
    assert list(diagnostics.seekers) == [b"N" * 16]


def test_its_own_words_are_nobodys() -> None:
    alone = Alone()
    alone.heard(seek(IDENTITY.member), HERE, 1.0)
    alone.heard(asked(member=IDENTITY.member), HERE, 1.0)
    assert not alone.diagnostics.seekers


@pytest.mark.parametrize("secured", [False, True])
def test_signature_is_a_sign_for_a_rank_without_a_secret(secured: bool) -> None:
    alone = Alone(secured=secured)
    alone.heard(seek(), Source(interface="eth0", signed=True), 1.0)
    assert alone.diagnostics.signed_without_secret == (0 if secured else 1)


def test_unverified_datagram_counts_if_it_is_of_this_job() -> None:
    alone = Alone(secured=True)
    for message in (seek(), offer(), offer(job="other"), offer(attempt="1")):
        alone.diagnostics.unverified(IDENTITY, message)
    assert alone.diagnostics.secret_signs == 2


def test_client_answers_on_the_browse_group_until_it_has_a_seat() -> None:
    alone = Alone()
    by_unicast = Source(interface="eth0", multicast=False)
    alone.heard(asked(), by_unicast, 1.0)
    assert alone.effects == [Answer(by_unicast, IDENTITY.seek())]
    alone.effects.clear()
    alone.heard(asked(), by_unicast, 2.0, seated=True)
    assert alone.effects == []


def test_client_asks_both_groups_when_due() -> None:
    alone = Alone()
    now = 0.0
    while now < 10.0:
        due = alone.client.next_timer()
        assert due is not None
        now = due
        alone.client.handle_timer(now)
    sent = [effect for effect in alone.effects if isinstance(effect, Multicast)]
    assert Multicast(IDENTITY.seek()) in sent
    assert Multicast(IDENTITY.list(), browse=True) in sent


BY_UNICAST = Source(interface="eth0", address="10.0.0.9", multicast=False)


def late(alone: Alone, now: float = 0.0) -> float:
    """Let it ask until a question is padded; return when."""
    while not any(isinstance(effect, Multicast) and effect.padded for effect in alone.effects):
        due = alone.client.seeker.next_timer()
        assert due is not None
        now = max(now, due)
        alone.client.handle_timer(now)
    return now


def test_client_pads_its_questions_after_hearing_no_host_for_a_while() -> None:
    alone = Alone()
    assert LATE_SECONDS <= late(alone) <= LATE_SECONDS + 2 * SEEK_INTERVAL_MAX_SECONDS
    assert Multicast(IDENTITY.seek()) in alone.effects, "the first ones were short"
    for now in (6.0, 7.0, 8.0):
        alone.heard(offer(), HERE, now)
    alone.effects.clear()
    assert late(alone, 8.0) >= 8.0 + LATE_SECONDS
    alone.client.seeker.resume(100.0)
    alone.effects.clear()
    assert late(alone, 100.0) >= 100.0 + LATE_SECONDS, "it looks for another host"


def test_client_passes_the_answer_to_a_padded_question_on_once() -> None:
    """The ranks that hear it, and not the host, have kept their questions back."""
    alone = Alone()
    assert alone.heard(offer(), BY_UNICAST, 0.1) == offer()
    assert Multicast(offer()) not in alone.effects, "nothing was padded yet"
    now = late(alone)
    for _ in range(3):
        alone.heard(offer(), BY_UNICAST, now + 0.001)
    assert alone.effects.count(Multicast(offer())) == 1
    alone.effects.clear()
    now = late(alone, now + 0.002)
    alone.heard(offer(), HERE, now)
    alone.heard(offer(), BY_UNICAST, now)
    assert Multicast(offer()) not in alone.effects, "the group has heard the host itself"
