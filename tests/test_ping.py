"""Pings between pure machines, on a network in memory that loses what it is told to, and on a clock of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from mingle.observe.ping import (
    ANSWERS_PER_SECOND,
    MAX_ACCEPTED,
    MAX_PEERS,
    Cast,
    Figures,
    PingMachine,
    PingPeer,
    Post,
    Reply,
)
from mingle.protocol.machine import Dial, Hangup, Write
from mingle.wire import echo
from mingle.wire.authentication import JobKey
from mingle.wire.echo import WAYS, EchoEnd, EchoMessage, EchoRequest, Way
from mingle.wire.frames import ProcessInfo

PORT = 29499
Lost = Callable[[str, str, Way], bool]


class Lan:
    """Carries what the machines send, in no time; `lost(sender, receiver, way)` says what it loses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.machines: dict[str, PingMachine] = {}
        self.lost: Lost = lambda *_: False
        self.sent: list[tuple[str, object]] = []
        self._ids = itertools.count(1)
        self._ends: dict[tuple[str, int], tuple[str, int]] = {}

    def add(self, address: str, *, count: int | None = 5, key: JobKey | None = None, job: str = "") -> PingMachine:
        number = len(self.machines) + 1
        machine = PingMachine(
            job,
            pinger=bytes([number]) * 16,
            who=ProcessInfo(hostname=f"node{number}", pid=number),
            port=4000 + number,
            shared_port=PORT,
            interval=0.5,
            count=count,
            new_id=self._ids.__next__,
            now=self.now,
            key=key,
            own=[address],
        )
        self.machines[address] = machine
        return machine

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = min((machine.next_timer() or end, address) for address, machine in self.machines.items())
            if due[0] > end:
                break
            self.now = max(self.now, due[0])
            self.machines[due[1]].handle_timer(self.now)
            self.settle()
        self.now = end

    def settle(self) -> None:
        busy = True
        while busy:
            busy = False
            for address, machine in list(self.machines.items()):
                for effect in machine.effects():
                    busy = True
                    self.sent.append((address, effect))
                    self.carry(address, effect)

    def carry(self, sender: str, effect: object) -> None:
        match effect:
            case Cast(message, link):
                for receiver in self.machines:
                    self.deliver(sender, receiver, message, "link" if link else "multicast")
            case Post(address, port, message):
                assert port == PORT
                self.deliver(sender, address, message, "unicast")
            case Reply(handle, message):
                assert isinstance(handle, str)
                self.deliver(sender, handle, message, "unicast", reply=True)
            case Dial(conn, address, _, _):
                if self.lost(sender, address, "tcp"):
                    return
                far = next(self._ids)
                self._ends |= {(sender, conn): (address, far), (address, far): (sender, conn)}
                self.machines[address].accepted(far, sender, self.now)
                self.machines[sender].connected(conn, sender, "eth0", self.now)
            case Write(conn, data):
                other, far = self._ends[sender, conn]
                if self.machines[other].owns(far):
                    self.machines[other].received(far, data, self.now)
            case Hangup(conn):
                other, far = self._ends.pop((sender, conn), ("", 0))
                if other and self.machines[other].owns(far):
                    self.machines[other].disconnected(far, "closed", self.now)

    def deliver(self, sender: str, receiver: str, message: EchoMessage, way: Way, *, reply: bool = False) -> None:
        if receiver not in self.machines or (sender != receiver and not reply and self.lost(sender, receiver, way)):
            return
        machine = self.machines[receiver]
        data = echo.encode(message, self.machines[sender]._key)
        machine.heard(
            echo.decode(data),
            sender,
            "eth0",
            self.now,
            trusted=echo.is_trusted(data, machine._key),
            size=len(data),
            handle=sender,
        )


def figures(machine: PingMachine) -> dict[str, dict[Way, tuple[int, int, int]]]:
    return {
        peer.address: {way: (row.sent, row.received, row.arrived) for way, row in peer.figures.items()}
        for peer in machine.peers.values()
    }


def test_three_that_hear_each_other() -> None:
    lan = Lan()
    machines = [lan.add(f"10.0.0.{number}") for number in (1, 2, 3)]
    lan.run(8)
    for machine in machines:
        assert machine.done
        assert len(machine.peers) == 2
        for rows in figures(machine).values():
            for sent, received, arrived in rows.values():
                assert sent == received
                assert sent >= 4
                assert arrived >= 4


def test_multicast_lost_and_unicast_fine() -> None:
    lan = Lan()
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


def test_tcp_lost_one_way() -> None:
    lan = Lan()
    lan.lost = lambda sender, receiver, way: way == "tcp" and sender == "10.0.0.1"
    one, other = lan.add("10.0.0.1"), lan.add("10.0.0.2")
    lan.run(9)
    assert figures(one)["10.0.0.2"]["tcp"][1] == 0
    assert figures(one)["10.0.0.2"]["tcp"][2] > 0
    assert figures(other)["10.0.0.1"]["tcp"][1] > 0
    assert figures(other)["10.0.0.1"]["tcp"][2] == 0


def test_one_that_ends_is_not_counted_as_loss() -> None:
    lan = Lan()
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


def test_a_named_host_whose_ping_was_started_again_is_found_again_without_multicast() -> None:
    lan = Lan()
    lan.lost = lambda _sender, _receiver, way: way in ("multicast", "link")
    one, other = lan.add("10.0.0.1", count=None), lan.add("10.0.0.2", count=None)
    one.learn([("10.0.0.2", PORT)])
    lan.run(2)
    other.close()
    lan.settle()
    lan.add("10.0.0.2", count=None)
    lan.run(3)
    assert [(peer.hostname, peer.gone) for peer in one.peers.values()] == [("node2", True), ("node3", False)]


def test_a_secret_that_is_not_ours() -> None:
    lan = Lan()
    one = lan.add("10.0.0.1", key=JobKey(b"a", ""))
    other = lan.add("10.0.0.2")
    lan.run(4)
    assert one.peers == {}
    assert one.strangers == {"10.0.0.2": "node2 (10.0.0.2), pid 2"}
    assert "10.0.0.1" in other.strangers


def test_another_job() -> None:
    lan = Lan()
    one, _ = lan.add("10.0.0.1", job="a"), lan.add("10.0.0.2", job="b")
    lan.run(4)
    assert one.peers == {}
    assert one.other_jobs == {"b": "10.0.0.2"}


def stranger(number: int, way: Way = "multicast", pinger: int = 9) -> EchoRequest:
    return EchoRequest(pinger=pinger.to_bytes(16, "big"), number=number, way=way, hostname="stranger")


def test_answers_are_limited_and_never_longer() -> None:
    lan = Lan()
    machine = lan.add("10.0.0.1", count=0)
    for number in range(3 * ANSWERS_PER_SECOND):
        machine.heard(stranger(number), "10.0.0.9", "eth0", lan.now, trusted=True, size=echo.PING_BYTES, handle="x")
    assert len([each for each in machine.effects() if isinstance(each, Reply)]) == ANSWERS_PER_SECOND
    machine.heard(stranger(0), "10.0.0.8", "eth0", lan.now, trusted=True, size=echo.PING_BYTES - 1, handle="x")
    assert machine.effects() == []
    machine.heard(stranger(0), "10.0.0.9", "eth0", lan.now + 1, trusted=True, size=echo.PING_BYTES, handle="x")
    assert len(machine.effects()) == 1


def test_what_strangers_can_make_us_keep_is_bounded() -> None:
    lan = Lan()
    machine = lan.add("10.0.0.1", count=0)
    for number in range(MAX_PEERS + 50):
        ping = stranger(1, pinger=number + 100)
        machine.heard(ping, f"10.1.{number // 256}.{number % 256}", "eth0", lan.now, trusted=True, size=640, handle="x")
    assert len(machine.peers) == MAX_PEERS
    for conn in range(MAX_ACCEPTED + 10):
        machine.accepted(conn, "10.0.0.9", lan.now)
    hung_up = [each for each in machine.effects() if isinstance(each, Hangup)]
    assert len(hung_up) == 10
    machine.handle_timer(lan.now + 2)
    assert len([each for each in machine.effects() if isinstance(each, Hangup)]) == MAX_ACCEPTED
    assert not machine.owns(0)


def test_something_else_on_the_port() -> None:
    lan = Lan()
    one, other = lan.add("10.0.0.1"), lan.add("10.0.0.2")
    lan.run(0.1)
    (peer,) = one.peers.values()
    one.handle_timer(lan.now + 0.5)
    dialed = [each for each in one.effects() if isinstance(each, Dial)]
    one.connected(dialed[0].conn, "10.0.0.1", "eth0", lan.now)
    one.received(dialed[0].conn, b"\xff\xffHTTP/1.1", lan.now)
    assert "something else answers there" in peer.figures["tcp"].reason
    assert not one.owns(dialed[0].conn)
    assert other.done is False


def test_what_is_no_answer_to_us_counts_for_nothing() -> None:
    lan = Lan()
    machine = lan.add("10.0.0.1", count=0)
    pong = echo.EchoReply(pinger=b"Z" * 16, asker=b"Y" * 16, number=1, way="multicast")
    machine.heard(pong, "10.0.0.9", "eth0", lan.now, trusted=True, size=100, handle="x")
    machine.heard(EchoEnd(pinger=b"V" * 16), "10.0.0.7", "eth0", lan.now, trusted=True, size=100, handle="x")
    (peer,) = machine.peers.values()
    assert peer.figures["multicast"].received == 0
    forged = msgspec.structs.replace(pong, way="tcp", asker=b"\x01" * 16)
    machine.heard(forged, "10.0.0.9", "eth0", lan.now, trusted=True, size=100, handle="x")
    assert peer.figures["tcp"].received == 0


def test_a_ping_without_end_sees_whoever_comes_last() -> None:
    """A ping that is started again has a new name; of those that have gone the oldest is forgotten."""
    lan = Lan()
    watching = lan.add("10.0.0.1", count=None)
    for number in range(1, MAX_PEERS + 50):
        name = number.to_bytes(16, "big")
        for message in (EchoRequest(pinger=name, number=1, way="multicast"), EchoEnd(pinger=name)):
            watching.heard(message, "10.0.0.66", "eth0", lan.now, trusted=True, size=640, handle="10.0.0.66")
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
    assert not [each for each in vars_of(figures) if isinstance(each, list | dict) and each]


def vars_of(figures: Figures) -> list[object]:
    return [getattr(figures, name) for name in figures.__struct_fields__]


def test_a_peer() -> None:
    peer = PingPeer(b"P" * 16, "", 3, "10.0.0.1", "eth0", 4000)
    assert tuple(peer.figures) == WAYS
    assert str(peer) == "unknown (10.0.0.1)"
