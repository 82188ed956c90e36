"""What a process says and hears by datagrams until its job has formed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mingle.protocol.effects import Answer, Dial, Effect, Multicast
from mingle.protocol.events import Heard, Source, TimerDue
from mingle.protocol.pacing import LATE_SECONDS, SEEK_INTERVAL_MAX_SECONDS
from mingle.protocol.participant import AwaitingConfirm
from mingle.wire.datagrams import Datagram, List, Seek
from tests.support.scripted_host import HERE, IDENTITY, Alone, Member, offer

BY_UNICAST = replace(HERE, multicast=False)
OTHER = b"N" * 16
SEEK = Seek(job="job", member=OTHER, world_size=2, rank=0, hostname="h2", pid=5)
LIST = List(job="job", member=OTHER, rank=None, hostname="h2", pid=5)


def hear(alone: Alone, message: Datagram, source: Source = HERE, now: float = 1.0) -> list[Effect]:
    """Hear a datagram; return what is done for it."""
    alone.done()
    alone.node.handle(Heard(message, source), now)
    return alone.done()


def test_only_the_offers_of_its_own_job_are_handed_on() -> None:
    alone = Alone()
    for stranger in (offer(job="other"), offer(attempt="1"), SEEK, LIST):
        assert not any(isinstance(each, Dial) for each in hear(alone, stranger))
    diagnostics = alone.joiner.diagnostics
    assert list(diagnostics.other_jobs) == ["other"]
    assert list(diagnostics.other_attempts) == ["1"]
    assert list(diagnostics.seekers) == [OTHER]
    assert any(isinstance(each, Dial) for each in hear(alone, offer()))


@pytest.mark.parametrize("message", [SEEK, LIST], ids=["SEEK", "LIST"])
def test_its_own_words_are_nobodys(message: Seek | List) -> None:
    alone = Alone()
    hear(alone, replace(message, member=IDENTITY.member))
    assert not alone.joiner.diagnostics.seekers


@pytest.mark.parametrize("seated", [False, True])
def test_process_answers_on_the_browse_group_until_it_has_a_seat(seated: bool) -> None:
    alone = Member(AwaitingConfirm) if seated else Alone()
    assert hear(alone, LIST, BY_UNICAST) == ([] if seated else [Answer(BY_UNICAST, IDENTITY.seek())])


def wait(alone: Alone, since: float, seconds: float) -> list[tuple[float, Multicast]]:
    """Let time pass, and return what is said to all, and when."""
    said = []
    for now in (since + tick / 100 for tick in range(int(seconds * 100))):
        alone.node.handle(TimerDue(), now)
        said += [(now, each) for each in alone.done() if isinstance(each, Multicast)]
    return said


def late(alone: Alone, since: float) -> float:
    """Return when a question is padded first."""
    return min(at for at, each in wait(alone, since, LATE_SECONDS + 2 * SEEK_INTERVAL_MAX_SECONDS) if each.padded)


def test_process_asks_both_groups() -> None:
    said = [each for _, each in wait(Alone(), 0.0, 10.0)]
    assert Multicast(IDENTITY.seek()) in said
    assert Multicast(IDENTITY.list(), browse=True) in said


def test_questions_are_padded_after_hearing_no_host_for_a_while() -> None:
    alone = Alone()
    assert late(alone, 0.0) >= LATE_SECONDS
    hear(alone, offer(), now=9.0)
    assert late(alone, 9.0) >= 9.0 + LATE_SECONDS


def test_questions_for_another_host_are_short_at_first() -> None:
    member = Member(AwaitingConfirm)
    member.lose(5.0)
    assert late(member, 5.0) >= 5.0 + LATE_SECONDS


def test_answer_to_a_padded_question_is_passed_on_once() -> None:
    """The ranks that hear it, and not the host, have kept their questions back."""
    alone, passed_on = Alone(), Multicast(offer())
    assert passed_on not in hear(alone, offer(), BY_UNICAST, 0.1), "nothing was padded yet"
    late(alone, 0.1)
    assert [passed_on in hear(alone, offer(), BY_UNICAST, 9.0) for _ in range(3)] == [True, False, False]
    late(alone, 9.0)
    hear(alone, offer(), HERE, 18.0)
    assert passed_on not in hear(alone, offer(), BY_UNICAST, 18.0), "the group has heard the host itself"
