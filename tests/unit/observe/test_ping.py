"""Pings between pure machines, on a network in memory that loses what it is told to, and on a clock of its own."""

from __future__ import annotations

import pytest
from msgspec import structs

from mingle.observe.ping import ANSWERS_PER_SECOND, MAX_ACCEPTED, MAX_ADDRESSES, MAX_PEERS, Figures, PingMachine, Reply
from mingle.protocol.effects import Dial, Hangup
from mingle.protocol.events import Accepted, BytesReceived, Connected, TimerDue
from mingle.wire import echo
from mingle.wire.authentication import JobKey
from mingle.wire.echo import EchoEnd, EchoRequest, Way
from tests.support.ping_lan import PORT, Lan, echo_heard


@pytest.fixture
def lan() -> Lan:
    return Lan()


def figures(machine: PingMachine) -> dict[str, dict[Way, tuple[int, int, int]]]:
    return {
        peer.address: {way: (row.sent, row.received, row.arrived) for way, row in peer.figures.items()}
        for peer in machine.peers.values()
    }


def test_three_that_hear_each_other(lan: Lan) -> None:
    machines = [lan.add(f"10.0.0.{number}") for number in (1, 2, 3)]
    lan.run(8)
    for machine in machines:
        assert machine.done
        assert machine.rounds == 5
        assert len(machine.peers) == 2
        for rows in figures(machine).values():
            for sent, received, arrived in rows.values():
                assert sent == received
                assert sent >= 4
                assert arrived >= 4


def test_multicast_lost_and_unicast_fine(lan: Lan) -> None:
    lan.lost = lambda sender, receiver, way: way in {"multicast", "link"}
    one, other = lan.add("10.0.0.1"), lan.add("10.0.0.2")
    one.learn([("10.0.0.2", PORT)])
    lan.run(8)
    (rows,) = figures(one).values()
    assert rows["multicast"][:2] == (rows["multicast"][0], 0)
    assert rows["multicast"][0] >= 3
    assert rows["unicast"][0] == rows["unicast"][1] >= 3
    assert rows["tcp"][0] == rows["tcp"][1]
    assert one.asked == {("10.0.0.2", PORT): True}
    # The other one has learnt of us by our unicast.
    assert len(other.peers) == 1


def test_tcp_lost_one_way(lan: Lan) -> None:
    lan.lost = lambda sender, receiver, way: way == "tcp" and sender == "10.0.0.1"
    one, other = lan.add("10.0.0.1"), lan.add("10.0.0.2")
    lan.run(9)
    assert figures(one)["10.0.0.2"]["tcp"][1] == 0
    assert figures(one)["10.0.0.2"]["tcp"][2] > 0
    assert figures(other)["10.0.0.1"]["tcp"][1] > 0
    assert figures(other)["10.0.0.1"]["tcp"][2] == 0


def test_one_that_ends_is_not_counted_as_loss(lan: Lan) -> None:
    one, other = lan.add("10.0.0.1", count=20), lan.add("10.0.0.2", count=None)
    lan.run(2)
    other.close()
    lan.settle()
    del lan.machines["10.0.0.2"]
    lan.run(10)
    (peer,) = one.peers.values()
    assert peer.gone
    for row in peer.figures.values():
        assert row.sent == row.received > 0


def test_a_named_host_whose_ping_was_started_again_is_found_again_without_multicast(lan: Lan) -> None:
    lan.lost = lambda _sender, _receiver, way: way in ("multicast", "link")
    one, other = lan.add("10.0.0.1", count=None), lan.add("10.0.0.2", count=None)
    one.learn([("10.0.0.2", PORT)])
    lan.run(2)
    other.close()
    lan.settle()
    lan.add("10.0.0.2", count=None)
    lan.run(3)
    assert [(peer.hostname, peer.gone) for peer in one.peers.values()] == [("node2", True), ("node3", False)]


def test_a_secret_that_is_not_ours(lan: Lan) -> None:
    one = lan.add("10.0.0.1", key=JobKey(b"a", ""))
    other = lan.add("10.0.0.2")
    lan.run(4)
    assert one.peers == {}
    assert one.strangers == {"10.0.0.2": "node2 (10.0.0.2), pid 2"}
    assert "10.0.0.1" in other.strangers


@pytest.mark.parametrize("signed", [True, False])
def test_only_an_answer_with_our_secret_counts_as_one_by_tcp(lan: Lan, signed: bool) -> None:
    key = JobKey(b"a", "")
    one = lan.add("10.0.0.1", key=key)
    lan.add("10.0.0.2", key=key)
    lan.run(0.1)
    (peer,) = one.peers.values()
    before = peer.figures["tcp"].received
    one.handle(TimerDue(), lan.now + 0.5)
    (dialed,) = (each for each in one.effects() if isinstance(each, Dial))
    one.handle(Connected(dialed.conn, "10.0.0.1", "eth0"), lan.now + 0.5)
    pong = echo.EchoReply(pinger=b"\x02" * 16, asker=b"\x01" * 16, number=one.rounds, way="tcp")
    framed = echo.framed(echo.encode(pong, key) if signed else echo.encode(pong))
    one.handle(BytesReceived(dialed.conn, framed), lan.now + 0.5)
    assert peer.figures["tcp"].received == before + signed


def test_another_job(lan: Lan) -> None:
    one, _ = lan.add("10.0.0.1", job="a"), lan.add("10.0.0.2", job="b")
    lan.run(4)
    assert one.peers == {}
    assert one.other_jobs == {"b": "10.0.0.2"}


def stranger(number: int, way: Way = "multicast", pinger: int = 9) -> EchoRequest:
    return EchoRequest(pinger=pinger.to_bytes(16, "big"), number=number, way=way, hostname="stranger")


def test_answers_are_limited_and_never_longer(lan: Lan) -> None:
    machine = lan.add("10.0.0.1", count=0)
    for second in range(3):
        for number in range(3 * ANSWERS_PER_SECOND):
            machine.handle(echo_heard(stranger(number), "10.0.0.9", size=echo.PING_BYTES), lan.now + second)
        assert len([each for each in machine.effects() if isinstance(each, Reply)]) == ANSWERS_PER_SECOND
    machine.handle(echo_heard(stranger(0), "10.0.0.8", size=echo.PING_BYTES - 1), lan.now)
    assert machine.effects() == []


def test_state_kept_for_strangers_is_bounded(lan: Lan) -> None:
    machine = lan.add("10.0.0.1", count=0)
    for number in range(MAX_PEERS + 50):
        ping = stranger(1, pinger=number + 100)
        machine.handle(echo_heard(ping, f"10.1.{number // 256}.{number % 256}", size=640), lan.now)
    assert len(machine.peers) == MAX_PEERS
    for conn in range(MAX_ACCEPTED + 10):
        machine.handle(Accepted(conn, "10.0.0.9"), lan.now)
    hung_up = [each for each in machine.effects() if isinstance(each, Hangup)]
    assert len(hung_up) == 10
    machine.handle(TimerDue(), lan.now + 2)
    assert len([each for each in machine.effects() if isinstance(each, Hangup)]) == MAX_ACCEPTED
    assert 0 not in machine.links


def test_answers_are_counted_for_so_many_addresses(lan: Lan) -> None:
    machine = lan.add("10.0.0.1", count=0)
    asking = ["10.0.0.9"] * ANSWERS_PER_SECOND + [
        f"10.1.{number // 256}.{number % 256}" for number in range(MAX_ADDRESSES)
    ]
    for number, address in enumerate(asking):
        machine.handle(echo_heard(stranger(number), address, size=echo.PING_BYTES), lan.now)
    machine.effects()
    machine.handle(echo_heard(stranger(0), "10.0.0.9", size=echo.PING_BYTES), lan.now)
    assert len(machine.effects()) == 1, "its count was dropped to make room"


def test_something_else_on_the_port(lan: Lan) -> None:
    one, other = lan.add("10.0.0.1"), lan.add("10.0.0.2")
    lan.run(0.1)
    (peer,) = one.peers.values()
    one.handle(TimerDue(), lan.now + 0.5)
    dialed = [each for each in one.effects() if isinstance(each, Dial)]
    one.handle(Connected(dialed[0].conn, "10.0.0.1", "eth0"), lan.now)
    one.handle(BytesReceived(dialed[0].conn, b"\xff\xffHTTP/1.1"), lan.now)
    assert "something else answers there" in peer.figures["tcp"].reason
    assert dialed[0].conn not in one.links
    assert other.done is False


def test_answers_to_others_do_not_count(lan: Lan) -> None:
    machine = lan.add("10.0.0.1", count=0)
    pong = echo.EchoReply(pinger=b"Z" * 16, asker=b"Y" * 16, number=1, way="multicast")
    machine.handle(echo_heard(pong, "10.0.0.9", size=100), lan.now)
    machine.handle(echo_heard(EchoEnd(pinger=b"V" * 16), "10.0.0.7", size=100), lan.now)
    (peer,) = machine.peers.values()
    assert peer.figures["multicast"].received == 0
    forged = structs.replace(pong, way="tcp", asker=b"\x01" * 16)
    machine.handle(echo_heard(forged, "10.0.0.9", size=100), lan.now)
    assert peer.figures["tcp"].received == 0


def test_a_ping_without_end_sees_whoever_comes_last(lan: Lan) -> None:
    """A ping that is started again has a new name; of those that have gone the oldest is forgotten."""
    watching = lan.add("10.0.0.1", count=None)
    for number in range(1, MAX_PEERS + 50):
        name = number.to_bytes(16, "big")
        for message in (EchoRequest(pinger=name, number=1, way="multicast"), EchoEnd(pinger=name)):
            watching.handle(echo_heard(message, "10.0.0.66", size=640), lan.now)
        assert len(watching.peers) <= MAX_PEERS
    lan.add("10.0.0.2", count=None)
    lan.run(3)
    (last,) = [peer for peer in watching.peers.values() if not peer.gone]
    assert (last.hostname, last.figures["multicast"].received > 0) == ("node2", True)


# --- figures ---


def test_figures() -> None:
    figures = Figures(pending={1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0})
    figures.answered(1, 10.25)
    figures.answered(1, 10.5)
    figures.answered(9, 10.5)
    assert (figures.sent, figures.received, figures.round_trips, figures.loss) == (1, 1, (0.25, 0.25, 0.25), 0.0)
    figures.expire(11.0)
    figures.failed(3, "refused")
    figures.failed(3, "refused twice")
    assert (figures.sent, figures.received, figures.reason) == (3, 1, "refused")
    assert round(figures.loss, 3) == 0.667
    assert figures.pending == {4: 13.0}
    figures.answered(4, 13.75)
    assert figures.round_trips == (0.25, 0.5, 0.75)
    assert (Figures().loss, Figures().round_trips) == (0, None)


def test_figures_grow_no_larger_however_long_it_goes_on() -> None:
    figures = Figures()
    for number in range(1000):
        figures.pending[number] = number
        figures.answered(number, number + 0.5)
    assert (figures.received, figures.round_trips) == (1000, (0.5, 0.5, 0.5))
    assert not [each for each in structs.asdict(figures).values() if isinstance(each, list | dict) and each]
