"""What of an OFFER is believed before anything is proved, and how many connections it can cause."""

from __future__ import annotations

import pytest

from mingle.protocol.links import claims
from mingle.protocol.links.claims import SENDER_DIALS_AT_ONCE, SENDER_DIALS_PER_SECOND, DialBudget, without_traps
from mingle.wire.datagrams import Offer


def offer(*addresses: str) -> Offer:
    return Offer(job="job", session=b"S" * 16, host=b"H" * 16, addresses=addresses, port=1, world_size=2)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "::",
        "::ffff:0.0.0.0",
        "224.0.0.1",
        "239.192.0.1",
        "ff02::1",
        "::ffff:224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::ffff:255.255.255.255",
        "::127.0.0.1",
        "::10.0.0.1",
    ],
)
@pytest.mark.parametrize("on_loopback", [False, True])
def test_addresses_that_no_host_has(address: str, on_loopback: bool) -> None:
    assert without_traps(offer(address), on_loopback=on_loopback) is None
    kept = without_traps(offer(address, "10.0.0.1"), on_loopback=on_loopback)
    assert kept == offer("10.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1"])
def test_loopback_counts_only_from_loopback(address: str) -> None:
    assert without_traps(offer(address), on_loopback=True) == offer(address)
    assert without_traps(offer(address), on_loopback=False) is None


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.1.1", "192.0.2.1", "fe80::1", "fd00::1", "2001:db8::1"])
def test_every_other_address_may_be_a_host(address: str) -> None:
    for on_loopback in (False, True):
        assert without_traps(offer(address), on_loopback=on_loopback) == offer(address)


def dials(budget: DialBudget, *, seconds: float, per_second: int, target: str, sender: str) -> int:
    """How many connections come of so many attempts."""
    attempts = int(seconds * per_second)
    return sum(budget.take(target, sender, number / per_second) == 0 for number in range(attempts))


def test_one_sender_does_not_exhaust_a_target() -> None:
    budget = DialBudget()
    made = dials(budget, seconds=10, per_second=50, target="10.0.0.9", sender="10.0.0.66")
    assert made <= claims.SENDER_DIALS_AT_ONCE + 10 * claims.SENDER_DIALS_PER_SECOND + 1
    assert budget.take("10.0.0.9", "10.0.0.1", 10.0) == 0, "the true host's own OFFER"


@pytest.mark.parametrize(
    "spellings",
    [
        ["10.0.0.9", "::ffff:10.0.0.9", "::ffff:a00:9", "::FFFF:A00:9", "0::ffff:10.0.0.9"],
        ["2001:db8::9", "2001:DB8::9", "2001:db8:0::9", "2001:0db8::0009"],
    ],
)
def test_many_senders_share_the_budget_of_a_target_however_they_write_its_address(spellings: list[str]) -> None:
    budget, made = DialBudget(), 0
    for number in range(500):
        made += budget.take(spellings[number % len(spellings)], f"10.1.{number % 250}.1", number / 50) == 0
    assert made <= claims.TARGET_DIALS_AT_ONCE + 10 * claims.TARGET_DIALS_PER_SECOND + 1


def test_targets_that_are_named_and_not_dialed_do_not_renew_the_budget_of_another() -> None:
    """One OFFER names twelve addresses: a moment's flood names more than are remembered."""
    budget, made = DialBudget(), 0
    for second in range(10):
        made += sum(budget.take("10.0.0.9", f"10.1.{number}.1", second) == 0 for number in range(40))
        for number in range(2 * claims.REMEMBERED):
            budget.take(f"10.{2 + number // 250}.{number % 250}.1", "10.1.0.2", second)
    assert made <= claims.TARGET_DIALS_AT_ONCE + 10 * claims.TARGET_DIALS_PER_SECOND + 1


def test_own_address_of_a_sender_has_a_budget_of_its_own() -> None:
    budget = DialBudget()
    for number in range(200):
        budget.take(f"10.0.{number}.1", f"10.1.{number}.1", 100.0)
        budget.take("10.0.0.9", f"10.1.{number}.1", 100.0)
    assert budget.take("10.0.0.9", "10.0.0.8", 100.0) > 0
    own = [budget.take("10.0.0.9", "10.0.0.9", 100.0) for _ in range(int(SENDER_DIALS_AT_ONCE) + 1)]
    assert own[:-1] == [0.0] * int(SENDER_DIALS_AT_ONCE)
    assert own[-1] == 1 / SENDER_DIALS_PER_SECOND
    budget.give_back("10.0.0.9", "10.0.0.9")
    assert budget.take("10.0.0.9", "10.0.0.8", 100.0) > 0, "it gives back what it took"
    assert budget.take("10.0.0.9", "10.0.0.9", 100.0) == 0.0


def test_many_senders_and_targets_share_one_budget() -> None:
    budget = DialBudget()
    made = sum(budget.take(f"t{number}", f"s{number}", number / 500) == 0 for number in range(5_000))
    assert made <= claims.DIALS_AT_ONCE + 10 * claims.DIALS_PER_SECOND + 1


def test_only_the_sender_that_was_silent_for_longest_is_forgotten() -> None:
    budget = DialBudget()
    for _ in range(int(SENDER_DIALS_AT_ONCE) - 1):
        assert budget.take("10.0.0.9", "10.0.0.9", 0.0) == 0
    for number in range(claims.REMEMBERED // 2):
        budget.take(f"t{number}", f"t{number}", 0.0)
    assert budget.take("10.0.0.9", "10.0.0.9", 0.0) == 0
    for number in range(claims.REMEMBERED - 1):
        budget.take(f"u{number}", f"u{number}", 0.0)
    assert budget.take("10.0.0.9", "10.0.0.9", 0.0) > 0
    budget.take("one more", "one more", 0.0)
    assert budget.take("10.0.0.9", "10.0.0.9", 0.0) == 0, "it has a budget as if it had never been heard"


def test_proved_session_costs_nothing() -> None:
    budget = DialBudget()
    for _ in range(1_000):
        assert budget.take("10.0.0.1", "10.0.0.1", 0.0) == 0
        budget.give_back("10.0.0.1", "10.0.0.1")


def test_after_the_wait_there_is_budget() -> None:
    budget, now = DialBudget(), 0.0
    while (wait := budget.take("10.0.0.1", "10.0.0.66", now)) == 0:
        pass
    assert budget.take("10.0.0.1", "10.0.0.66", now + wait / 2) > 0
    assert budget.take("10.0.0.1", "10.0.0.66", now + wait) == 0
