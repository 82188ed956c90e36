"""The announcer, without sockets: what it says, to whom, and how often."""

from __future__ import annotations

import pytest

from mingle.observe.announcement import MAX_CALLERS, PROOF_SECONDS, Announcement
from mingle.protocol.handshake import Call, MemberConversation
from mingle.protocol.machine import Answer, Effect, Hangup, Multicast, Notice, Source, Write
from mingle.protocol.pacing import UNICAST_ANSWERS_AT_ONCE
from mingle.wire import frames
from mingle.wire.datagrams import Bye, List, Offer, Seek
from tests.bystanders import Wire, an_announcement

SEEK = Seek(job="resnet", member=b"M" * 16, world_size=2, rank=1, hostname="worker", pid=5)
MULTICAST = Source(interface="eth0", address="10.0.0.7")
UNICAST = Source(interface="eth0", address="10.0.0.7", multicast=False)


@pytest.fixture
def announcement() -> Announcement:
    return an_announcement(Wire(), "resnet", "10.0.0.1", world_size=4)


START = Wire().now


def run(announcement: Announcement, until: float) -> list[tuple[float, Effect]]:
    """What it does by itself up to a time."""
    done: list[tuple[float, Effect]] = []
    while (due := announcement.next_timer()) is not None and due <= until:
        announcement.handle_timer(due)
        done += [(due, effect) for effect in announcement.effects()]
    return done


def test_it_speaks_in_a_burst_and_then_only_when_asked(announcement: Announcement) -> None:
    spoken = run(announcement, START + 600)
    assert 4 <= len(spoken) <= 8
    assert spoken[-1][0] - START < 2
    announcement.heard(SEEK, MULTICAST, START + 600)
    announcement.handle_timer(START + 600)
    (effect,) = [each for each in announcement.effects() if isinstance(each, Multicast)]
    assert isinstance(effect.message, Offer)
    assert (effect.message.kind, effect.message.state, effect.message.world_size) == (
        "announcement",
        "sealed",
        4,
    )


def test_it_answers_everybody_together_twice_a_second_at_most(announcement: Announcement) -> None:
    run(announcement, START + 100)
    spoken = 0
    for step in range(1000):
        now = START + 100 + step / 100
        announcement.heard(SEEK, MULTICAST, now)
        announcement.heard(List(member=b"L" * 16), MULTICAST, now)
        announcement.handle_timer(now)
        spoken += sum(isinstance(each, Multicast) for each in announcement.effects())
    assert spoken <= 2 * 2 * 10 + 2


@pytest.mark.parametrize("question", [SEEK, List(member=b"L" * 16)], ids=["seek", "list"])
def test_who_asks_by_unicast_is_answered_by_unicast(announcement: Announcement, question: Seek | List) -> None:
    announcement.heard(question, UNICAST, START)
    assert Answer(UNICAST, announcement.offer) in announcement.effects()


def test_a_flood_of_questions_to_the_browse_group_by_unicast_is_answered_rarely(announcement: Announcement) -> None:
    for _ in range(1000):
        announcement.heard(List(member=b"L" * 16), UNICAST, START)
    answers = [each for each in announcement.effects() if isinstance(each, Answer)]
    assert len(answers) == UNICAST_ANSWERS_AT_ONCE


def test_another_job_is_none_of_its_business(announcement: Announcement) -> None:
    run(announcement, START + 100)
    announcement.heard(Seek(job="other", member=b"M" * 16, world_size=2), MULTICAST, START + 100)
    assert run(announcement, START + 200) == []


def test_it_says_once_that_ranks_look_for_it_and_that_somebody_else_speaks_for_the_job(
    announcement: Announcement,
) -> None:
    rival = Offer(
        job="resnet",
        session=b"R" * 16,
        host=b"R" * 16,
        addresses=("10.0.0.8",),
        port=1,
        world_size=2,
        hostname="h",
    )
    for _ in range(3):
        announcement.heard(SEEK, MULTICAST, START)
        announcement.heard(rival, MULTICAST, START)
        announcement.heard(announcement.offer, MULTICAST, START)
    texts = [effect.text for effect in announcement.effects() if isinstance(effect, Notice)]
    assert len(texts) == 2
    assert "rank 1 on host worker (10.0.0.7), pid 5" in texts[0]
    assert "also hosted by host h (10.0.0.8)" in texts[1]


def call(announcement: Announcement, purpose: frames.Purpose, *more: frames.AnyFrame) -> list[frames.AnyFrame]:
    """The frames it says to a caller after the handshake."""
    wanted = Call(
        job="resnet",
        member=b"M" * 16,
        session=announcement.offer.session,
        purpose=purpose,
    )
    caller = MemberConversation(wanted, ("10.0.0.1", 5000))
    announcement.accepted(1, "10.0.0.7", START)
    heard: list[frames.AnyFrame] = []
    said = False
    for _ in range(6):
        announcement.received(1, caller.data_to_send(), START) if announcement.owns(1) else None
        for effect in announcement.effects():
            if isinstance(effect, Write):
                heard += caller.receive_data(effect.data)
        if caller.welcome is not None and not said:
            said = True
            for frame in more:
                caller.send(frame)
    return heard


def test_who_probes_hears_what_is_announced(announcement: Announcement) -> None:
    (running,) = call(announcement, "probe")
    assert isinstance(running, frames.Running)
    assert (running.state, running.store_address, running.store_port) == ("running", "", 29500)


def test_nobody_joins_it(announcement: Announcement) -> None:
    (refused,) = call(announcement, "join", frames.Join(world_size=4, rank=1, node="n"))
    assert isinstance(refused, frames.Refused)
    assert refused.reason == "kind"
    assert not announcement.owns(1)


def test_it_is_alive_when_it_is_pinged(announcement: Announcement) -> None:
    assert call(announcement, "probe", frames.Ping(number=3))[-1] == frames.Pong(number=3)


def test_a_caller_that_says_nothing_or_nonsense_is_dropped(announcement: Announcement) -> None:
    announcement.accepted(1, "10.0.0.7", START)
    announcement.accepted(2, "10.0.0.7", START)
    announcement.received(2, b"GET / HTTP/1.1\r\n\r\n", START)
    assert not announcement.owns(2)
    run(announcement, START + PROOF_SECONDS)
    assert not announcement.owns(1)


def test_callers_are_bounded(announcement: Announcement) -> None:
    for conn in range(MAX_CALLERS + 10):
        announcement.accepted(conn, "10.0.0.7", START)
    hung_up = [effect.conn for effect in announcement.effects() if isinstance(effect, Hangup)]
    assert hung_up == list(range(10))


def test_it_says_good_bye(announcement: Announcement) -> None:
    call(announcement, "probe")
    announcement.close("interrupted")
    effects = announcement.effects()
    assert Multicast(Bye(job="resnet", session=announcement.offer.session)) in effects
    assert Hangup(1) in effects


def test_it_announces_addresses_that_are_new(announcement: Announcement) -> None:
    run(announcement, START + 100)
    announcement.readdress(("10.0.0.1",), START + 100)
    assert run(announcement, START + 110) == []
    announcement.readdress(("10.0.0.8", "fd00::8"), START + 110)
    ((_, effect),) = run(announcement, START + 120)
    assert isinstance(effect, Multicast)
    assert isinstance(effect.message, Offer)
    assert effect.message.addresses == ("10.0.0.8", "fd00::8")
