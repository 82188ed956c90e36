"""Single rules of an election; whole elections run in tests/lan/test_election*.py."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from msgspec import structs

from mingle.errors import DiscoveryTimeoutError
from mingle.protocol.connection_race import ADDRESS_SECONDS
from mingle.protocol.election import NOTIFY_AGAIN_SECONDS, STAND_SECONDS, Elector
from mingle.protocol.handshake import Call, HostConversation, MemberConversation
from mingle.protocol.host import Host
from mingle.protocol.machine import (
    Address,
    Context,
    Dial,
    Effect,
    Endpoints,
    Hangup,
    Identity,
    Multicast,
    NetworkFacts,
    Source,
    Write,
)
from mingle.protocol.member import Joiner
from mingle.wire import frames
from mingle.wire.datagrams import Offer

JOB, LOW, HIGH = "job", bytes(16), b"\xff" * 16
HERE = Source(interface="eth0", address="10.0.0.9")


def elector(member: bytes = HIGH, *, timeout: float = 30.0, world_size: int = 3) -> Elector:
    identity = Identity(
        job=JOB,
        attempt="",
        member=member,
        rank=None,
        world_size=world_size,
        node="here",
        who=frames.ProcessInfo(hostname="here", pid=1),
    )
    return Elector(
        identity,
        Endpoints(addresses=(Address("10.0.0.1", "eth0", 24),), port=4000),
        Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(1), timeout=timeout),
        0.0,
    )


def run(machine: Elector, until: float) -> list[tuple[float, Effect]]:
    """Let the clock run; return what was done when."""
    done: list[tuple[float, Effect]] = []
    now = 0.0
    while (due := machine.next_timer()) is not None and due <= until:
        now = max(now, due)
        machine.handle_timer(now)
        done += [(now, effect) for effect in machine.effects()]
    return done


def offer(host: bytes, **more: Any) -> Offer:
    fields: dict[str, Any] = {
        "session": b"other session 16",
        "addresses": ("10.0.0.9",),
        "port": 4001,
        "world_size": 3,
        "assigned": True,
    }
    return Offer(job=JOB, host=host, **{**fields, **more})


def offers(done: list[tuple[float, Effect]]) -> list[float]:
    return [now for now, effect in done if isinstance(effect, Multicast) and isinstance(effect.message, Offer)]


def test_who_hears_of_no_host_becomes_one_and_the_lower_id_sooner() -> None:
    low, high = elector(LOW), elector(HIGH)
    first = {name: offers(run(machine, 3.0))[0] for name, machine in (("low", low), ("high", high))}
    assert 0.1 < first["low"] < first["high"] < 1.0
    assert isinstance(low.acting, Host)
    assert not low.finished


def test_a_host_in_sight_is_joined_and_nobody_else_becomes_one() -> None:
    machine = elector(LOW)
    machine.heard(offer(HIGH), HERE, 0.05)
    assert any(isinstance(effect, Dial) for effect in machine.effects())
    assert offers(run(machine, 1.0)) == []
    assert isinstance(machine.acting, Joiner)


def test_a_host_with_the_higher_id_makes_way_and_one_with_the_lower_tells() -> None:
    for member, other in ((HIGH, LOW), (LOW, HIGH)):
        machine = elector(member)
        run(machine, 1.0)
        machine.heard(offer(other), HERE, 1.5)
        dialed = [effect for effect in machine.effects() if isinstance(effect, Dial)]
        assert [(effect.address, effect.port) for effect in dialed] == [("10.0.0.9", 4001)]
        assert machine.stage().startswith("stepping down") is (member == HIGH)


def test_a_sealed_session_wins_nobody_over() -> None:
    machine = elector(HIGH)
    run(machine, 1.0)
    machine.heard(offer(LOW, state="sealed"), HERE, 1.5)
    assert not machine.stage().startswith("stepping down")


def test_before_it_hosts_it_hangs_up_on_callers() -> None:
    machine = elector()
    machine.accepted(7, "10.0.0.9", 0.01)
    assert Hangup(7) in machine.effects()


def test_it_ends_at_its_deadline_and_leaves_quietly() -> None:
    machine = elector(timeout=2.0)
    run(machine, 1.9)
    assert not machine.expired(1.9)
    assert machine.expired(2.0)
    machine.close("interrupted")
    assert not isinstance(machine.acting, Host)


def test_its_own_offers_mean_nothing_to_it() -> None:
    machine = elector(HIGH)
    machine.heard(offer(HIGH), HERE, 0.01)
    run(machine, 1.0)
    machine.heard(offer(HIGH), HERE, 1.5)
    assert not any(isinstance(effect, Dial) for effect in machine.effects())


def test_a_host_that_was_given_its_rank_is_followed_whatever_its_id() -> None:
    machine = elector(LOW)
    run(machine, 1.0)
    machine.heard(offer(HIGH, assigned=False), HERE, 1.5)
    assert machine.stage().startswith("stepping down")


def test_while_it_makes_way_it_takes_and_decides_nothing() -> None:
    machine = elector(HIGH)
    run(machine, 1.0)
    machine.heard(offer(LOW), HERE, 1.5)
    assert offers(run(machine, 2.4)) == []
    assert machine.calling() is None
    assert machine.host is not None
    assert machine.host.registrar.held


def test_a_winner_that_is_not_reached_does_not_beat_it_for_a_while() -> None:
    machine = elector(HIGH)
    run(machine, 1.0)
    machine.heard(offer(LOW), HERE, 1.5)
    (call,) = [effect for effect in machine.effects() if isinstance(effect, Dial)]
    machine.disconnected(call.conn, "Connection refused", 1.6)
    assert machine.host is not None
    assert not machine.host.registrar.held
    for later, makes_way in ((1.7, False), (1.7 + STAND_SECONDS, True)):
        machine.heard(offer(LOW), HERE, later)
        assert machine.stage().startswith("stepping down") is makes_way


def test_the_error_of_its_session_stays_when_that_is_gone() -> None:
    machine = elector(timeout=5.0)
    run(machine, 4.9)
    machine.give_up(NetworkFacts())
    failure = machine.failure
    assert isinstance(failure, DiscoveryTimeoutError)
    assert "within 5 s" in str(failure)
    machine.close("failed")
    assert machine.failure is failure


def test_addresses_that_come_later_are_those_of_its_session() -> None:
    machine = elector()
    first, second = (Address(address, "eth1", 24) for address in ("10.1.0.1", "10.2.0.1"))
    machine.readdress((first,), 0.0)
    run(machine, 3.0)
    assert machine.host is not None
    assert machine.host.offer().addresses == ("10.1.0.1",)
    machine.readdress((first, second), 4.0)
    assert machine.endpoints.addresses == machine.host.endpoints.addresses == (first, second)
    assert machine.host.offer().addresses == ("10.1.0.1", "10.2.0.1")
    machine.rewired(4.0)
    assert not machine.finished


# --- notifying the hosts that have to step down --------------------------------------------------------------------


class Winner:
    """A host with the lowest id, and another one, which has to step down."""

    def __init__(self) -> None:
        self.machine = elector(LOW)
        run(self.machine, 1.0)

    def dialed(self, now: float) -> list[int]:
        self.machine.heard(offer(HIGH), HERE, now)
        return [effect.conn for effect in self.machine.effects() if isinstance(effect, Dial)]

    def answer(self, conn: int, now: float) -> tuple[HostConversation, list[frames.AnyFrame], list[Effect]]:
        """The other host proves itself; returns what it hears then, and what else is done."""
        host = HostConversation(job=JOB, attempt="", session=b"other session 16", addresses=("10.0.0.9",), port=4001)
        heard: list[frames.AnyFrame] = []
        done: list[Effect] = []
        self.machine.connected(conn, "10.0.0.1", "eth0", now)
        for _ in range(2):
            for effect in self.machine.effects():
                if isinstance(effect, Write):
                    heard += host.receive_data(effect.data)
                else:
                    done.append(effect)
            if data := host.data_to_send():
                self.machine.received(conn, data, now)
        return host, heard, done


def test_the_loser_hears_of_the_winner_again_and_again_on_one_connection() -> None:
    winner = Winner()
    (conn,) = winner.dialed(1.5)
    host, heard, done = winner.answer(conn, 1.6)
    assert host.hello is not None
    assert (host.hello.member, host.hello.purpose) == (LOW, "conflict")
    (said,) = heard
    assert isinstance(said, frames.HostSeen)
    assert (said.offer.host, said.stays) == (LOW, False)
    assert Hangup(conn) not in done
    for later, again in ((1.4, False), (1.5, True), (1.6, False), (2.5, True)):
        winner.machine.heard(offer(HIGH), HERE, later + NOTIFY_AGAIN_SECONDS)
        written = [each for each in winner.machine.effects() if isinstance(each, Write)]
        assert [host.receive_data(each.data) for each in written] == [[said]] * again


def test_a_host_that_was_given_its_rank_is_hung_up_on() -> None:
    winner = Winner()
    winner.machine._candidacy.stand_against(HIGH, 1.5)
    winner.machine.heard(offer(HIGH, assigned=False), HERE, 1.5)
    (conn,) = [effect.conn for effect in winner.machine.effects() if isinstance(effect, Dial)]
    _, heard, done = winner.answer(conn, 1.6)
    assert [each.stays for each in heard if isinstance(each, frames.HostSeen)] == [True]
    assert Hangup(conn) in done, "it would take every connection that lasts for a second rank 0"


@pytest.mark.parametrize(
    ("answer", "steps_down"),
    [
        pytest.param({"stays": True}, True, id="it stands"),
        pytest.param({"stays": False}, False, id="it does not"),
        pytest.param({"stays": True, "session": b"a third session."}, False, id="another session"),
        pytest.param({"stays": True, "state": "sealed"}, False, id="a sealed one"),
        pytest.param({"stays": True, "job": "another"}, False, id="another job"),
    ],
)
def test_a_winner_steps_down_for_a_loser_that_answers_that_it_stands(answer: dict[str, Any], steps_down: bool) -> None:
    winner = Winner()
    (conn,) = winner.dialed(1.5)
    host, _, _ = winner.answer(conn, 1.6)
    stays = answer.pop("stays")
    host.send(frames.HostSeen(offer=structs.replace(offer(HIGH), **answer), stays=stays))
    winner.machine.received(conn, host.data_to_send(), 1.7)
    assert winner.machine.stage().startswith("stepping down") is steps_down
    effects = winner.machine.effects()
    assert [each.port for each in effects if isinstance(each, Dial)] == [4001] * steps_down
    assert (Hangup(conn) in effects) is steps_down


@pytest.mark.parametrize(
    ("caller", "purpose", "answered"), [(LOW, "conflict", True), (LOW, "join", False), (b"m" * 16, "conflict", False)]
)
def test_a_host_that_stands_says_so_to_a_host_that_calls(
    caller: bytes, purpose: frames.Purpose, answered: bool
) -> None:
    """Where the other host's firewall drops the calls of this one, no other connection leads there."""
    machine = elector(HIGH)
    run(machine, 1.0)
    assert machine.host is not None
    machine._candidacy.stand_against(LOW, 1.0)
    call = Call(job=JOB, member=caller, session=machine.host.session, purpose=purpose)
    conversation = MemberConversation(call, ("10.0.0.1", 4000))
    machine.accepted(9, "10.0.0.9", 1.5)
    heard: list[frames.AnyFrame] = []
    for step in range(2):
        if step:
            conversation.send(frames.HostSeen(offer=offer(LOW)))
        machine.received(9, conversation.data_to_send(), 1.5)
        effects = machine.effects()
        for effect in effects:
            if isinstance(effect, Write):
                heard += conversation.receive_data(effect.data)
    assert [(each.offer.host, each.stays) for each in heard if isinstance(each, frames.HostSeen)] == (
        [(HIGH, True)] * answered
    )
    # A member only reports: the other host itself is told where it listens.
    assert [each.port for each in effects if isinstance(each, Dial)] == [4001] * (not answered)


def test_a_winner_that_steps_down_itself_meanwhile_says_nothing() -> None:
    winner = Winner()
    (conn,) = winner.dialed(1.5)
    winner.machine.heard(offer(HIGH, assigned=False, session=b"a third session."), HERE, 1.5)
    assert winner.machine.stage().startswith("stepping down")
    _, heard, done = winner.answer(conn, 1.6)
    assert heard == []
    assert Hangup(conn) in done


def test_the_same_loser_is_not_called_again_at_once() -> None:
    winner = Winner()
    (conn,) = winner.dialed(1.5)
    assert winner.dialed(1.5 + 2 * NOTIFY_AGAIN_SECONDS) == [], "it is being called"
    winner.machine.disconnected(conn, "refused", 1.6)
    assert winner.dialed(1.4 + NOTIFY_AGAIN_SECONDS) == []
    assert len(winner.dialed(1.5 + NOTIFY_AGAIN_SECONDS)) == 1


def test_somebody_else_at_the_losers_address_hears_nothing() -> None:
    winner = Winner()
    (conn,) = winner.dialed(1.5)
    winner.machine.connected(conn, "10.0.0.1", "eth0", 1.6)
    winner.machine.effects()
    winner.machine.received(conn, b"SSH-2.0-OpenSSH_9.6\r\n", 1.6)
    assert [each for each in winner.machine.effects() if isinstance(each, Write | Hangup)] == [Hangup(conn)]


def test_a_loser_that_stays_silent_is_given_up() -> None:
    winner = Winner()
    (conn,) = winner.dialed(1.5)
    winner.machine.handle_timer(1.5 + ADDRESS_SECONDS)
    assert Hangup(conn) in winner.machine.effects()
