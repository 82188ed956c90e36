"""What every loop does, whatever machine it drives: shown with a machine that only notes what it is told."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.engine.loop import Loop
from mingle.network import interfaces
from mingle.network.transport import Received
from mingle.protocol.machine import Answer, Dial, Effect, Hangup, Multicast, Source, Write
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, Offer, Seek
from tests.bystanders import free_udp_port

MEMBER, SESSION = b"m" * 16, b"s" * 16


class Notes:
    """A machine without rules."""

    def __init__(self) -> None:
        self.to_do: list[Effect] = []
        self.told: list[tuple[Any, ...]] = []
        self.due: float | None = None
        self.says: Datagram | None = None

    def effects(self) -> list[Effect]:
        done, self.to_do = self.to_do, []
        return done

    def next_timer(self) -> float | None:
        return self.due

    def handle_timer(self, now: float) -> None:
        self.due = None
        self.told.append(("timer",))

    def calling(self) -> Datagram | None:
        return self.says

    def heard(self, message: Datagram, source: Source, now: float) -> None:
        self.told.append(("heard", message, source))

    def owns(self, conn: int) -> bool:
        return conn < 1000

    def connected(self, conn: int, local_address: str, interface: str, now: float, *, weak: bool = False) -> None:
        self.told.append(("connected", local_address, interface))

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        self.told.append(("received", untrusted))


class Noting(Loop):
    """A loop that drives it."""

    def __init__(self, network: Network, stack: contextlib.ExitStack) -> None:
        self._machine = self.notes = Notes()
        super().__init__(network, "a job", None, stack)

    def _decode(self, untrusted: bytes) -> Datagram | None:
        return datagrams.decode(untrusted)

    def _ended(self, conn: int, reason: str, now: float) -> None:
        self.notes.told.append(("ended", reason))

    def turn_until(self, what: str) -> tuple[Any, ...]:
        """Turns until the machine was told this."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for told in self.notes.told:
                if told[0] == what:
                    return told
            self.notes.due = self.notes.due or time.monotonic() + 0.2  # no turn lasts longer
            self._carry_out()
            self._turn()
        raise AssertionError(f"never told of {what!r}: {self.notes.told}")


@pytest.fixture
def loop() -> Iterator[Noting]:
    with contextlib.ExitStack() as stack:
        yield Noting(Network(interfaces=("lo",), port=free_udp_port()), stack)


def test_what_is_multicast_comes_back_with_its_source(loop: Noting) -> None:
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    loop.notes.to_do.append(Multicast(seek))
    _, message, source = loop.turn_until("heard")
    assert message == seek
    assert (source.interface, source.multicast, source.address) == ("lo", True, "127.0.0.1")


def test_an_offer_names_the_address_of_the_interface_it_leaves_by_first(loop: Noting) -> None:
    addresses = ("192.0.2.1", "127.0.0.1", "192.0.2.2")
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=addresses, port=9, world_size=2)
    loop.notes.to_do.append(Multicast(offer))
    _, message, _ = loop.turn_until("heard")
    assert message.addresses == ("127.0.0.1", "192.0.2.1", "192.0.2.2")


def test_another_thread_wakes_it(loop: Noting) -> None:
    threads = [threading.Thread(target=loop.call, args=(lambda: loop.notes.told.append(("called",)),))]
    threads[0].start()
    loop.turn_until("called")
    threads[0].join()


def test_a_connection_from_dial_to_end(loop: Noting) -> None:
    loop._connections.listen([("127.0.0.1", 0)])
    accepted: list[int] = []
    loop._accepted = lambda conn, address, now: accepted.append(conn)  # type: ignore[method-assign]
    loop.notes.to_do.append(Dial(999, "127.0.0.1", loop._connections.port, "lo"))
    assert loop.turn_until("connected") == ("connected", "127.0.0.1", "lo")
    loop.notes.to_do.append(Write(999, b"hello"))
    assert loop.turn_until("received") == ("received", b"hello")
    loop.notes.to_do.append(Hangup(accepted[0]))
    loop.turn_until("ended")


def test_a_loop_without_a_control_port_hangs_up_on_callers(loop: Noting) -> None:
    loop._connections.listen([("127.0.0.1", 0)])
    loop.notes.to_do.append(Dial(999, "127.0.0.1", loop._connections.port, "lo"))
    assert loop.turn_until("ended") == ("ended", "the other side closed it")


def test_peers_are_asked_with_a_padded_question() -> None:
    port = free_udp_port()
    with contextlib.ExitStack() as stack:
        loop = Noting(Network(interfaces=("lo",), port=port, peers=(Peer("127.0.0.1", None),)), stack)
        loop.notes.says = Seek(job="a job", member=MEMBER, world_size=2)
        _, message, source = loop.turn_until("heard")
        assert source.multicast is False
        assert len(message.padding) > 800
        loop.notes.told.clear()
        loop.notes.says = Bye(job="a job", session=SESSION)
        while loop.turn_until("heard")[1] != loop.notes.says:
            loop.notes.told.clear()


# --- processes that share a port ------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
@pytest.mark.parametrize("hosted_by", ["first", "last", "nobody"])
def test_a_unicast_question_reaches_every_process_of_the_host_and_is_answered_once(hosted_by: str) -> None:
    network = Network(interfaces=("lo",), port=free_udp_port())
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("192.0.2.1", "127.0.0.1"), port=9, world_size=2)
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    with contextlib.ExitStack() as stack:
        loops = {name: Noting(network, stack) for name in ("first", "middle", "last")}
        asker = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        asker.bind(("127.0.0.1", 0))
        asker.settimeout(5)
        if hosted_by in loops:
            loops[hosted_by].notes.says = offer
        asker.sendto(datagrams.padded(seek, datagrams.MAX_BYTES), ("127.0.0.1", network.port))
        told = loops["last"].turn_until("heard")  # who opened the port last receives it
        if hosted_by == "last":
            for name in ("first", "middle"):  # it will be answered: nobody else is asked
                assert loops[name]._relay.receive() == []
            return
        for name in ("first", "middle"):
            told = loops[name].turn_until("heard")
            _, message, source = told
            assert msgspec.structs.replace(message, padding=b"") == seek
            assert (source.multicast, source.address) == (False, "127.0.0.1")
        assert loops["last"]._relay.receive() == []
        loops["middle"].notes.to_do.append(Answer(told[2], offer))
        loops["middle"]._carry_out()
        data, answerer = asker.recvfrom(2048)
        assert answerer == ("127.0.0.1", network.port), "from where it was asked: a firewall lets nothing else in"
        answer = datagrams.decode(data)
        assert isinstance(answer, Offer)
        assert answer.addresses == ("127.0.0.1", "192.0.2.1"), "the address that the asker has reached comes first"


def test_connections_through_interfaces_that_were_not_named_are_not_used(
    loop: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop._nics, "owner", lambda local, dialled: "eth7")
    loop._connections.listen([("127.0.0.1", 0)])
    loop.notes.to_do.append(Dial(999, "127.0.0.1", loop._connections.port, "lo"))
    _, reason = loop.turn_until("ended")
    assert "eth7" in reason
    assert not any(told[0] == "connected" for told in loop.notes.told)


def test_a_question_shorter_than_its_answer_gets_none() -> None:
    """Whoever forges the sender of a question makes us send no more bytes there than it sends itself."""
    port = free_udp_port()
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    with contextlib.ExitStack() as stack:
        loop = Noting(Network(interfaces=("lo",), port=port, family="4"), stack)
        asking = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        asking.bind(("127.0.0.1", 0))
        seek, answer = Seek(job="a job", member=MEMBER, world_size=2), datagrams.encode(offer)
        for length in (len(answer) - 1, len(answer) + 20):
            asking.sendto(datagrams.padded(seek, length), ("127.0.0.1", port))
            _, message, source = loop.turn_until("heard")
            loop.notes.told.clear()
            assert message.member == MEMBER
            loop.notes.to_do.append(Answer(source, offer))
            loop._carry_out()
        asking.settimeout(10)
        assert asking.recv(2000) == answer
        asking.setblocking(False)
        with pytest.raises(BlockingIOError):
            asking.recv(2000)
        assert loop.facts().rejected["unpadded"] == 1


def test_interfaces_that_can_not_be_looked_at_stay_as_they_were(loop: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors for a while: that is no reason to give up the job."""

    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = loop.facts().interfaces
    monkeypatch.setattr(interfaces, "scan", fail)
    loop._nics.scan_due = 0.0
    loop.notes.due = time.monotonic()
    loop.turn_until("timer")
    assert loop._nics.scan_due > 0.0
    assert loop.facts().interfaces == before != []


# --- input that could not be handled --------------------------------------------------------------------------------


def fail(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a riddle")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
def test_an_answer_that_can_not_be_sent_ends_no_loop(loop: Noting, caplog: pytest.LogCaptureFixture) -> None:
    """A local message, for example, may name a destination that is no address."""
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    question = datagrams.padded(Seek(job="a job", member=MEMBER, world_size=2), datagrams.MAX_BYTES)
    received = Received(question, "lo", ("127.0.0.1", 9), "4", False, False, "127.0.0.1\0", shared=True)
    source = Source(interface="lo", multicast=False, signed=False, address="127.0.0.1", reply_to=received)
    for _ in range(3):
        loop.notes.to_do += [Answer(source, offer), Multicast(offer)]
        loop.turn_until("heard")
        loop.notes.told.clear()
    assert loop.facts().rejected["fault"] == 3
    assert len(caplog.records) == 1, "each fault is logged once"
    assert "embedded null" in caplog.text


def test_a_datagram_that_a_machine_can_not_handle_is_dropped(
    loop: Noting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard, seek = loop.notes.heard, Seek(job="a job", member=MEMBER, world_size=2)
    monkeypatch.setattr(loop.notes, "heard", fail)
    loop.notes.to_do += [Multicast(seek)] * 3
    deadline = time.monotonic() + 10
    while loop.facts().rejected["fault"] < 3:
        assert time.monotonic() < deadline
        loop.notes.due = time.monotonic()
        loop._carry_out()
        loop._turn()
    assert [record.exc_info is not None for record in caplog.records] == [True]
    monkeypatch.setattr(loop.notes, "heard", heard)
    loop.notes.to_do.append(Multicast(seek))
    assert loop.turn_until("heard")[1] == seek


@pytest.mark.parametrize("step", ["connected", "received", "accepted"])
def test_a_connection_that_a_machine_can_not_handle_is_closed(
    loop: Noting, monkeypatch: pytest.MonkeyPatch, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop._connections.listen([("127.0.0.1", 0)])
    monkeypatch.setattr(loop, "_accepted", fail if step == "accepted" else lambda conn, address, now: None)
    if step != "accepted":
        monkeypatch.setattr(loop.notes, step, fail)
    with socket.create_connection(("127.0.0.1", loop._connections.port)) as caller:
        caller.settimeout(0.01)
        caller.sendall(b"hello")
        if step == "connected":
            loop.notes.to_do.append(Dial(999, "127.0.0.1", loop._connections.port, "lo"))
        loop.turn_until("ended") if step != "accepted" else None
        deadline = time.monotonic() + 10
        while step != "connected":
            loop.notes.due = time.monotonic()
            loop._turn()
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                assert caller.recv(1) == b""
                break
            assert time.monotonic() < deadline
    assert loop.facts().rejected["fault"] == 1
    assert "a riddle" in caplog.text


def test_the_end_of_a_connection_that_can_not_be_handled_ends_no_loop(
    loop: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop._connections.listen([("127.0.0.1", 0)])
    loop._accepted = lambda conn, address, now: None  # type: ignore[method-assign]
    monkeypatch.setattr(loop, "_ended", fail)
    with socket.create_connection(("127.0.0.1", loop._connections.port)):
        loop.notes.due = time.monotonic() + 0.1
        loop.turn_until("timer")
        loop.notes.told.clear()
    deadline = time.monotonic() + 10
    while loop.facts().rejected["fault"] == 0:
        assert time.monotonic() < deadline
        loop.notes.due = time.monotonic() + 0.1
        loop._turn()
    before = loop.facts().rejected["fault"]
    loop.notes.told.clear()
    loop.turn_until("timer")
    assert loop.facts().rejected["fault"] == before, "the connection is gone for good"


def test_what_a_signal_handler_raises_is_no_fault_of_the_input(loop: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual recipe for a deadline: an alarm whose handler raises, wherever the program is."""

    def alarmed(*_: object) -> None:
        raise ZeroDivisionError("the alarm")

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(loop.notes, "heard", interrupted)
    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        loop.notes.to_do.append(Multicast(Seek(job="a job", member=MEMBER, world_size=2)))
        with pytest.raises(ZeroDivisionError, match="the alarm"):
            loop.turn_until("heard")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_timer_that_can_not_be_handled_ends_the_loop(loop: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sent it, so there is nothing to drop: a machine without its timers would wait for ever."""
    monkeypatch.setattr(loop.notes, "handle_timer", fail)
    loop.notes.due = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        loop._turn()


def heard_offer(
    loop: Noting, *addresses: str, source: str, interface: str = "eth0", multicast: bool = False, local: bool = False
) -> list[str]:
    """Where the machine is told that a session is, when an OFFER comes from that source."""
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=addresses, port=9, world_size=2)
    loop._datagram(
        Received(
            data=datagrams.encode(offer),
            interface=interface,
            source=(source, 29499),
            family="4",
            multicast=multicast,
            local=local,
            destination="192.0.2.1",
        )
    )
    return [address for told in loop.notes.told if told[0] == "heard" for address in told[1].addresses]


@pytest.mark.parametrize(
    ("how", "followed"),
    [
        pytest.param({"source": "203.0.113.66"}, False, id="from beyond a router"),
        pytest.param({"source": "203.0.113.66", "multicast": True}, True, id="by multicast"),
        pytest.param({"source": "203.0.113.66", "local": True}, True, id="from this machine"),
        pytest.param({"source": "127.0.0.9"}, True, id="on link"),
        pytest.param({"source": "203.0.113.7"}, True, id="from a peer"),
    ],
)
def test_an_offer_by_unicast_counts_from_a_peer_or_a_neighbor(how: dict[str, Any], followed: bool) -> None:
    with contextlib.ExitStack() as stack:
        network = Network(interfaces=("lo",), port=free_udp_port(), peers=(Peer("203.0.113.7", None),))
        loop = Noting(network, stack)
        loop._peers.turn(silent=False, now=time.monotonic())
        assert heard_offer(loop, "192.0.2.7", **how) == (["192.0.2.7"] if followed else [])
        assert loop.facts().rejected["unsolicited"] == (not followed)


def test_a_signed_offer_by_unicast_counts_from_everywhere(loop: Noting) -> None:
    loop._key = JobKey(b"secret", "a job")
    assert heard_offer(loop, "192.0.2.7", source="203.0.113.66") == ["192.0.2.7"]


def test_an_offer_aims_nobody_at_its_own_loopback(loop: Noting) -> None:
    traps = ("127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1", "239.0.0.1")
    assert heard_offer(loop, *traps, source="192.0.2.66", multicast=True) == []
    assert loop.facts().rejected["addresses"] == 1
    assert heard_offer(loop, *traps, "192.0.2.7", source="192.0.2.66", multicast=True) == ["192.0.2.7"]
    loop.notes.told.clear()
    assert heard_offer(loop, "127.0.0.1", source="127.0.0.1", interface="lo", multicast=True) == ["127.0.0.1"]
