"""Single rules of an election; whole elections run in tests/lan/test_election*.py."""

from __future__ import annotations

import itertools
import random
from typing import Any

from mingle.errors import DiscoveryTimeoutError
from mingle.protocol.connection_race import ADDRESS_SECONDS
from mingle.protocol.election import NOTIFY_AGAIN_SECONDS, STAND_SECONDS, Elector
from mingle.protocol.handshake import HostConversation
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


def test_the_loser_hears_of_the_winner_once_and_is_hung_up_on() -> None:
    winner = Winner()
    (conn,) = winner.dialed(1.5)
    host, heard, done = winner.answer(conn, 1.6)
    assert host.hello is not None
    assert (host.hello.member, host.hello.purpose) == (LOW, "conflict")
    (said,) = heard
    assert isinstance(said, frames.HostSeen)
    assert (said.offer.host, said.stays) == (LOW, False)
    assert Hangup(conn) in done
    assert not winner.machine.owns(conn)


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
