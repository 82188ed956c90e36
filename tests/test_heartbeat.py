"""Who is asked when, who is silent for too long, and for how long a member is bound."""

from __future__ import annotations

from mingle.agents.heartbeat import LEASE_MARGIN_SECONDS, MEMBER_SILENT_SECONDS, PING_SECONDS, Heartbeat, Leases
from mingle.agents.quorum import LEASE_SECONDS
from tests.views import member

A, B = member("A"), member("B")


def test_connections_are_asked_together_and_regularly() -> None:
    heartbeat = Heartbeat(MEMBER_SILENT_SECONDS)
    assert heartbeat.next_timer(pings=True) is None
    assert heartbeat.due(0.0) == []
    heartbeat.watch(1, 0.0)
    heartbeat.watch(2, 0.0)
    assert heartbeat.due(0.0) == [1, 2]
    assert heartbeat.due(PING_SECONDS / 2) == []
    assert heartbeat.next_timer(pings=True) == PING_SECONDS
    assert heartbeat.due(PING_SECONDS) == [1, 2]


def test_silence_is_noticed() -> None:
    heartbeat = Heartbeat(MEMBER_SILENT_SECONDS)
    heartbeat.watch(1, 0.0)
    heartbeat.watch(2, 0.0)
    heartbeat.heard(1, 3.0)
    heartbeat.heard(3, 3.0)
    assert heartbeat.next_timer(pings=False) == MEMBER_SILENT_SECONDS
    assert heartbeat.silent(MEMBER_SILENT_SECONDS - 0.1) == []
    assert heartbeat.silent(MEMBER_SILENT_SECONDS) == [2]
    heartbeat.watch(1, 9.0)  # again: it does not count as heard
    assert heartbeat.silent(MEMBER_SILENT_SECONDS + 3.0) == [1, 2]
    heartbeat.forget(2)
    assert heartbeat.watches(1)
    assert not heartbeat.watches(2)


def test_a_host_hears_a_cut_before_its_members_choose_another() -> None:
    from mingle.agents.hosting import MINORITY_SECONDS

    last_ping_before_the_cut = -PING_SECONDS
    assert last_ping_before_the_cut + LEASE_SECONDS > MEMBER_SILENT_SECONDS + MINORITY_SECONDS


def test_a_member_is_bound_from_the_last_word_that_it_may_have_heard() -> None:
    leases = Leases()
    assert not leases.bound(A, 0.0)
    assert A not in leases
    leases.begin(A, 0.0)
    leases.asked(A, 5.0)
    end = 5.0 + LEASE_SECONDS + LEASE_MARGIN_SECONDS
    assert leases.bound(A, end - 0.1)
    assert not leases.bound(A, end)
    assert leases.next_timer([A, B], 0.0) == end
    assert leases.next_timer([A], end) is None


def test_a_death_is_certain_within_the_lease_of_a_question_that_was_answered() -> None:
    leases = Leases()
    leases.begin(A, 0.0)
    leases.asked(A, 1.0)
    leases.asked(A, 2.0)
    assert leases.died_bound(A, LEASE_SECONDS - 0.1)
    assert not leases.died_bound(A, LEASE_SECONDS + 0.5), "nobody knows that it has heard the question"
    leases.answered(A)
    assert leases.died_bound(A, LEASE_SECONDS + 0.5)
    assert not leases.died_bound(A, LEASE_SECONDS + 1.5)
    leases.answered(A)
    leases.answered(A)  # to nothing that was asked
    assert leases.died_bound(A, LEASE_SECONDS + 1.5)
    assert not leases.died_bound(B, 0.0)


def test_who_counts_no_more_is_forgotten() -> None:
    leases = Leases()
    for name in (b"a", b"b"):
        leases.begin(name, 0.0)
        leases.asked(name, 1.0)
    leases.forget_all_but({b"b"})
    assert b"a" not in leases
    assert not leases.died_bound(b"a", 0.0)
    leases.answered(b"a")
    leases.answered(b"b")
    assert leases.bound(b"b", 1.0)
