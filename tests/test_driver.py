"""What the driver does, whatever machine it drives: shown with a machine that only notes what it is told."""

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
from mingle.engine.driver import Driver
from mingle.engine.reception import LOOKED_AT_UNVERIFIED
from mingle.network import interfaces, local_relay, transport
from mingle.network.transport import Received
from mingle.protocol.machine import Address, Answer, Dial, Effect, Hangup, Multicast, Source, Write
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, List, Offer, Seek
from tests.bystanders import free_udp_port

MEMBER, SESSION = b"m" * 16, b"s" * 16
KEY = JobKey(b"secret", "a job")


class Notes:
    """A machine without rules."""

    def __init__(self) -> None:
        self.to_do: list[Effect] = []
        self.told: list[tuple[Any, ...]] = []
        self.due: float | None = None
        self.says: Datagram | None = None
        self.unverified: list[Datagram] = []

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

    def accepted(self, conn: int, address: str, now: float) -> None:
        self.told.append(("accepted", conn))

    def received(self, conn: int, untrusted: bytes, now: float) -> None:
        self.told.append(("received", untrusted))

    def disconnected(self, conn: int, reason: str, now: float) -> None:
        self.told.append(("ended", reason))


class Noting(Driver):
    """A driver of that machine."""

    def __init__(
        self, network: Network, stack: contextlib.ExitStack, job: str = "a job", key: JobKey | None = None
    ) -> None:
        super().__init__(network, job, key, stack)
        self.notes = Notes()
        self.drive(self.notes, unverified=None if key is None else self.notes.unverified.append)

    def turn_until(self, what: str) -> tuple[Any, ...]:
        """Turns until the machine was told this."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for told in self.notes.told:
                if told[0] == what:
                    return told
            self.notes.due = self.notes.due or time.monotonic() + 0.2  # no turn lasts longer
            self.carry_out()
            self.turn()
        raise AssertionError(f"never told of {what!r}: {self.notes.told}")


@pytest.fixture
def driver() -> Iterator[Noting]:
    with contextlib.ExitStack() as stack:
        yield Noting(Network(interfaces=("lo",), port=free_udp_port()), stack)


def test_what_is_multicast_comes_back_with_its_source(driver: Noting) -> None:
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    driver.notes.to_do.append(Multicast(seek))
    _, message, source = driver.turn_until("heard")
    assert message == seek
    assert (source.interface, source.multicast, source.address) == ("lo", True, "127.0.0.1")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell a broadcast from a unicast")
def test_a_broadcast_is_dropped(driver: Noting) -> None:
    """A unicast of the same bytes is heard."""
    question = datagrams.padded(List(member=MEMBER), datagrams.MAX_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for destination in ("127.255.255.255", "127.0.0.9"):
            stranger.sendto(question, (destination, driver.network.port))
    assert driver.turn_until("heard")[1].member == MEMBER
    assert [told[0] for told in driver.notes.told].count("heard") == 1
    assert driver.facts().rejected == {"broadcast": 1}


def test_an_offer_names_the_address_of_the_interface_it_leaves_by_first(driver: Noting) -> None:
    addresses = ("192.0.2.1", "127.0.0.1", "192.0.2.2")
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=addresses, port=9, world_size=2)
    driver.notes.to_do.append(Multicast(offer))
    _, message, _ = driver.turn_until("heard")
    assert message.addresses == ("127.0.0.1", "192.0.2.1", "192.0.2.2")


def test_another_thread_wakes_it(driver: Noting) -> None:
    threads = [threading.Thread(target=driver.call, args=(lambda: driver.notes.told.append(("called",)),))]
    threads[0].start()
    driver.turn_until("called")
    threads[0].join()


def test_a_connection_from_dial_to_end(driver: Noting) -> None:
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
    assert driver.turn_until("connected") == ("connected", "127.0.0.1", "lo")
    driver.notes.to_do.append(Write(999, b"hello"))
    assert driver.turn_until("received") == ("received", b"hello")
    driver.notes.to_do.append(Hangup(driver.turn_until("accepted")[1]))
    driver.turn_until("ended")


def test_peers_are_asked_with_a_padded_question() -> None:
    port = free_udp_port()
    with contextlib.ExitStack() as stack:
        driver = Noting(Network(interfaces=("lo",), port=port, peers=(Peer("127.0.0.1", None),)), stack)
        driver.notes.says = Seek(job="a job", member=MEMBER, world_size=2)
        _, message, source = driver.turn_until("heard")
        assert source.multicast is False
        assert len(message.padding) > 800
        driver.notes.told.clear()
        driver.notes.says = Bye(job="a job", session=SESSION)
        while driver.turn_until("heard")[1] != driver.notes.says:
            driver.notes.told.clear()


@pytest.mark.parametrize("padded", [True, False])
def test_a_question_to_the_group_is_answered_by_unicast_only_if_it_is_long_enough(driver: Noting, padded: bool) -> None:
    driver.notes.to_do.append(Multicast(SEEK, padded=padded))
    _, question, source = driver.turn_until("heard")
    assert source.multicast
    assert len(question.padding) == (0 if not padded else datagrams.MAX_BYTES - len(datagrams.encode(SEEK)) - 11)
    driver.notes.told.clear()
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    driver.notes.to_do += [Answer(source, offer), *([] if padded else [Multicast(offer)])]
    _, answer, source = driver.turn_until("heard")
    assert (answer, source.multicast) == (offer, not padded)
    assert driver.facts().rejected["unpadded"] == (not padded)


# --- processes that share a port ------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
@pytest.mark.parametrize("hosted_by", ["first", "last", "nobody"])
def test_a_unicast_question_reaches_every_process_of_the_host_and_is_answered_once(hosted_by: str) -> None:
    network = Network(interfaces=("lo",), port=free_udp_port())
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("192.0.2.1", "127.0.0.1"), port=9, world_size=2)
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    with contextlib.ExitStack() as stack:
        drivers = {name: Noting(network, stack) for name in ("first", "middle", "last")}
        asker = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        asker.bind(("127.0.0.1", 0))
        asker.settimeout(5)
        if hosted_by in drivers:
            drivers[hosted_by].notes.says = offer
        asker.sendto(datagrams.padded(seek, datagrams.MAX_BYTES), ("127.0.0.1", network.port))
        told = drivers["last"].turn_until("heard")  # who opened the port last receives it
        if hosted_by == "last":
            for name in ("first", "middle"):  # it will be answered: nobody else is asked
                assert drivers[name]._relay.receive() == []
            return
        for name in ("first", "middle"):
            told = drivers[name].turn_until("heard")
            _, message, source = told
            assert msgspec.structs.replace(message, padding=b"") == seek
            assert (source.multicast, source.address) == (False, "127.0.0.1")
        assert drivers["last"]._relay.receive() == []
        drivers["middle"].notes.to_do.append(Answer(told[2], offer))
        drivers["middle"].carry_out()
        data, answerer = asker.recvfrom(2048)
        assert answerer == ("127.0.0.1", network.port), "from where it was asked: a firewall lets nothing else in"
        answer = datagrams.decode(data)
        assert isinstance(answer, Offer)
        assert answer.addresses == ("127.0.0.1", "192.0.2.1"), "the address that the asker has reached comes first"


def test_connections_through_interfaces_that_were_not_named_are_not_used(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.interfaces, "owner", lambda local, dialed: "eth7")
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
    _, reason = driver.turn_until("ended")
    assert "eth7" in reason
    assert not any(told[0] == "connected" for told in driver.notes.told)


def test_a_question_shorter_than_its_answer_gets_none() -> None:
    """Whoever forges the sender of a question makes us send no more bytes there than it sends itself."""
    port = free_udp_port()
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    with contextlib.ExitStack() as stack:
        driver = Noting(Network(interfaces=("lo",), port=port, family="4"), stack)
        asking = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        asking.bind(("127.0.0.1", 0))
        seek, answer = Seek(job="a job", member=MEMBER, world_size=2), datagrams.encode(offer)
        for length in (len(answer) - 1, len(answer) + 20):
            asking.sendto(datagrams.padded(seek, length), ("127.0.0.1", port))
            _, message, source = driver.turn_until("heard")
            driver.notes.told.clear()
            assert message.member == MEMBER
            driver.notes.to_do.append(Answer(source, offer))
            driver.carry_out()
        asking.settimeout(10)
        assert asking.recv(2000) == answer
        asking.setblocking(False)
        with pytest.raises(BlockingIOError):
            asking.recv(2000)
        assert driver.facts().rejected["unpadded"] == 1


def test_interfaces_that_can_not_be_scanned_stay_as_they_were(driver: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors for a while: that is no reason to give up the job."""

    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = driver.facts().interfaces
    monkeypatch.setattr(interfaces, "scan", fail)
    driver.interfaces.scan_due = 0.0
    driver.notes.due = time.monotonic()
    driver.turn_until("timer")
    assert driver.interfaces.scan_due > 0.0
    assert driver.facts().interfaces == before != []


def test_a_socket_that_could_not_be_opened_is_opened_with_a_later_scan(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of IPv6's duplicate check, or of a shortage of memory, changes nothing that a scan finds."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    assert driver.transport is not None
    with monkeypatch.context() as patched:
        patched.setattr(transport, "rejoin", refuse)
        patched.setattr(transport, "open_receiver", refuse)
        driver._refresh_due = 0.0
        driver.notes.due = time.monotonic()
        driver.turn_until("timer")
        assert list(driver.transport.failures) == ["lo IPv4"]
    driver.notes.told.clear()
    driver.interfaces.scan_due = 0.0
    driver.notes.due = time.monotonic()
    driver.turn_until("timer")
    assert not driver.transport.failures
    driver.notes.to_do.append(Multicast(Seek(job="a job", member=MEMBER, world_size=2)))
    driver.turn_until("heard")


def test_a_host_that_keeps_its_addresses_while_it_is_sealed_is_told_when_they_are_back(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the newest ones once its session takes members again."""

    class Sealed:
        newest: tuple[Address, ...] = ()

        def readdress(self, addresses: tuple[Address, ...], now: float) -> None:
            self.newest = addresses

    driver.listen()
    host, before = Sealed(), driver.addresses
    for addresses in ((msgspec.structs.replace(before[0], address="127.0.0.2"),), before):
        monkeypatch.setattr(Driver, "addresses", addresses)
        driver.relisten(host, 1.0)
        assert host.newest == addresses


# --- input that could not be handled --------------------------------------------------------------------------------


def fail(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a riddle")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
def test_an_answer_that_can_not_be_sent_ends_no_loop(driver: Noting, caplog: pytest.LogCaptureFixture) -> None:
    """A local message, for example, may name a destination that is no address."""
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    question = datagrams.padded(Seek(job="a job", member=MEMBER, world_size=2), datagrams.MAX_BYTES)
    received = Received(question, ("127.0.0.1", 9), "4", False, "127.0.0.1\0", interface="lo", shared=True)
    source = Source(interface="lo", multicast=False, signed=False, address="127.0.0.1", reply_to=received)
    for _ in range(3):
        driver.notes.to_do += [Answer(source, offer), Multicast(offer)]
        driver.turn_until("heard")
        driver.notes.told.clear()
    assert driver.facts().rejected["fault"] == 3
    assert len(caplog.records) == 1, "each fault is logged once"
    assert "embedded null" in caplog.text


def test_a_datagram_that_a_machine_can_not_handle_is_dropped(
    driver: Noting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard, seek = driver.notes.heard, Seek(job="a job", member=MEMBER, world_size=2)
    monkeypatch.setattr(driver.notes, "heard", fail)
    driver.notes.to_do += [Multicast(seek)] * 3
    deadline = time.monotonic() + 10
    while driver.facts().rejected["fault"] < 3:
        assert time.monotonic() < deadline
        driver.notes.due = time.monotonic()
        driver.carry_out()
        driver.turn()
    assert [record.exc_info is not None for record in caplog.records] == [True]
    monkeypatch.setattr(driver.notes, "heard", heard)
    driver.notes.to_do.append(Multicast(seek))
    assert driver.turn_until("heard")[1] == seek


@pytest.mark.parametrize("step", ["connected", "received", "accepted"])
def test_a_connection_that_a_machine_can_not_handle_is_closed(
    driver: Noting, monkeypatch: pytest.MonkeyPatch, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver.connections.listen([("127.0.0.1", 0)])
    monkeypatch.setattr(driver.notes, step, fail)
    with socket.create_connection(("127.0.0.1", driver.connections.port)) as caller:
        caller.settimeout(0.01)
        caller.sendall(b"hello")
        if step == "connected":
            driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
        driver.turn_until("ended") if step != "accepted" else None
        deadline = time.monotonic() + 10
        while step != "connected":
            driver.notes.due = time.monotonic()
            driver.turn()
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                assert caller.recv(1) == b""
                break
            assert time.monotonic() < deadline
    assert driver.facts().rejected["fault"] == 1
    assert "a riddle" in caplog.text


def test_the_end_of_a_connection_that_can_not_be_handled_ends_no_loop(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.connections.listen([("127.0.0.1", 0)])
    monkeypatch.setattr(driver.notes, "disconnected", fail)
    with socket.create_connection(("127.0.0.1", driver.connections.port)):
        driver.notes.due = time.monotonic() + 0.1
        driver.turn_until("timer")
        driver.notes.told.clear()
    deadline = time.monotonic() + 10
    while driver.facts().rejected["fault"] == 0:
        assert time.monotonic() < deadline
        driver.notes.due = time.monotonic() + 0.1
        driver.turn()
    before = driver.facts().rejected["fault"]
    driver.notes.told.clear()
    driver.turn_until("timer")
    assert driver.facts().rejected["fault"] == before, "the connection is gone for good"


def test_what_a_signal_handler_raises_is_no_fault_of_the_input(driver: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual recipe for a deadline: an alarm whose handler raises, wherever the program is."""

    def alarmed(*_: object) -> None:
        raise ZeroDivisionError("the alarm")

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(driver.notes, "heard", interrupted)
    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        driver.notes.to_do.append(Multicast(Seek(job="a job", member=MEMBER, world_size=2)))
        with pytest.raises(ZeroDivisionError, match="the alarm"):
            driver.turn_until("heard")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("call", ["sendto", "recvmsg", "send", "recv", "accept", "connect"])
def test_a_timeout_error_of_a_signal_handler_is_no_error_of_a_socket(
    driver: Noting, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is an OSError; a signal that comes during a system call is handled when the call returns."""

    def alarmed(*_: object) -> None:
        raise TimeoutError("the alarm")

    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
    driver.turn_until("accepted")
    driver.turn_until("connected")
    driver.notes.to_do += [Multicast(Seek(job="a job", member=MEMBER, world_size=2)), Write(999, b"hello")]
    before = signal.signal(signal.SIGALRM, alarmed)
    caller = socket.create_connection(("127.0.0.1", driver.connections.port)) if call == "accept" else None
    if call == "connect":
        driver.notes.to_do.append(Dial(1000, "127.0.0.1", driver.connections.port, "lo"))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, call, lambda *_: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(TimeoutError, match="the alarm"):
                driver.turn_until("never")
    finally:
        signal.signal(signal.SIGALRM, before)
        if caller is not None:
            caller.close()


def test_a_timeout_error_of_a_signal_handler_that_comes_with_a_call_is_not_lost(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alarmed(*_: object) -> None:
        raise TimeoutError("the alarm")

    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        for method in ("send", "recv"):
            with monkeypatch.context() as patched:
                patched.setattr(socket.socket, method, lambda *_: signal.raise_signal(signal.SIGALRM))
                with pytest.raises(TimeoutError, match="the alarm"):
                    driver.call(list) if method == "send" else driver.run_calls()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_timer_that_can_not_be_handled_ends_the_loop(driver: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sent it, so there is nothing to drop: a machine without its timers would wait for ever."""
    monkeypatch.setattr(driver.notes, "handle_timer", fail)
    driver.notes.due = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        driver.turn()


def heard_offer(
    driver: Noting,
    *addresses: str,
    source: str,
    interface: str = "eth0",
    multicast: bool = False,
    local: bool = False,
    key: JobKey | None = None,
) -> list[str]:
    """Where the machine is told that a session is, when an OFFER comes from that source."""
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=addresses, port=9, world_size=2)
    driver.on_datagram(
        Received(
            data=datagrams.encode(offer, key),
            interface=interface,
            source=(source, 29499),
            family="4",
            multicast=multicast,
            local=local,
            destination="192.0.2.1",
        ),
        time.monotonic(),
    )
    return [address for told in driver.notes.told if told[0] == "heard" for address in told[1].addresses]


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
        driver = Noting(network, stack)
        driver.peers.turn(silent=False, now=time.monotonic())
        assert heard_offer(driver, "192.0.2.7", **how) == (["192.0.2.7"] if followed else [])
        assert driver.facts().rejected["unsolicited"] == (not followed)


@pytest.fixture
def keyed() -> Iterator[Noting]:
    """A driver of a job with a secret."""
    with contextlib.ExitStack() as stack:
        yield Noting(Network(interfaces=("lo",), port=free_udp_port()), stack, key=KEY)


def test_a_signed_offer_by_unicast_counts_from_everywhere(keyed: Noting) -> None:
    assert heard_offer(keyed, "192.0.2.7", source="203.0.113.66", key=KEY) == ["192.0.2.7"]


def test_an_offer_aims_nobody_at_its_own_loopback(driver: Noting) -> None:
    traps = ("127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1", "239.0.0.1")
    assert heard_offer(driver, *traps, source="192.0.2.66", multicast=True) == []
    assert driver.facts().rejected["addresses"] == 1
    assert heard_offer(driver, *traps, "192.0.2.7", source="192.0.2.66", multicast=True) == ["192.0.2.7"]
    driver.notes.told.clear()
    assert heard_offer(driver, "127.0.0.1", source="127.0.0.1", interface="lo", multicast=True) == ["127.0.0.1"]


# --- signatures -----------------------------------------------------------------------------------------------------

SEEK = Seek(job="a job", member=MEMBER, world_size=2)


def heard(driver: Noting, data: bytes) -> Datagram | None:
    """The message that the driver finds in a datagram from this machine."""
    received = Received(data, ("127.0.0.1", 29499), "4", True, "239.0.0.1", interface="lo", local=True)
    return driver.on_datagram(received, time.monotonic())


def test_a_datagram_without_our_signature_is_shown_and_not_believed(keyed: Noting) -> None:
    assert heard(keyed, datagrams.encode(SEEK, KEY)) == SEEK
    assert heard(keyed, datagrams.encode(SEEK)) is None
    assert heard(keyed, datagrams.encode(SEEK, JobKey(b"another", "a job"))) is None
    assert heard(keyed, b"noise of another program") is None
    assert keyed.notes.unverified == [SEEK, SEEK]
    assert [told[1] for told in keyed.notes.told] == [SEEK]
    assert keyed.rejected == {"unsigned": 1, "signature": 1, "magic": 1}


def test_a_question_to_the_browse_group_needs_no_signature(keyed: Noting) -> None:
    """`watch` asks every two seconds: its questions are not counted against those that are forged."""
    question = List(member=bytes(16))
    for data in [datagrams.encode(question)] * (LOOKED_AT_UNVERIFIED + 10):
        assert heard(keyed, data) == question
    assert not keyed.rejected
    for _ in range(LOOKED_AT_UNVERIFIED + 10):
        heard(keyed, datagrams.encode(SEEK))
    assert heard(keyed, datagrams.encode(question)) == question


def test_a_flood_without_our_signature_is_not_looked_at(keyed: Noting) -> None:
    for _ in range(LOOKED_AT_UNVERIFIED + 10):
        heard(keyed, datagrams.encode(SEEK))
    assert len(keyed.notes.unverified) == LOOKED_AT_UNVERIFIED


# --- reports --------------------------------------------------------------------------------------------------------


def test_what_a_report_says_of_the_network() -> None:
    port = free_udp_port()
    network = Network(
        interfaces=("lo",), interfaces_from="MINGLE_INTERFACE", port=port, peers=(Peer("no-such-host.invalid"),)
    )
    with contextlib.ExitStack() as stack:
        driver = Noting(network, stack, job="resnet")
        deadline = time.monotonic() + 10
        while not driver.peers.failures:
            assert time.monotonic() < deadline
            driver.notes.due = time.monotonic() + 0.01
            driver.turn()
        driver.rejected["magic"] += 2
        facts = driver.facts()
        assert facts.groups[0] == "239.192.180.44"
        assert facts.port == port
        assert facts.peers == ["no-such-host.invalid"]
        assert facts.rejected == {"magic": 2}
        (failure,) = facts.failures
        assert failure.startswith("no-such-host.invalid did not resolve: ")
        assert facts.findings == ()
        observed = driver.inspect(versions={"version 2": "10.0.0.1"})
        assert observed.group == "239.192.180.44"
        assert observed.named_by == "MINGLE_INTERFACE"
        assert observed.multicasts_on is None, "nothing was sent, so nothing can have come back"
        assert observed.versions == {"version 2": "10.0.0.1"}
        found = [finding.observation for finding in driver.facts(diagnosed=True).findings]
        assert any("'no-such-host.invalid' in MINGLE_PEERS does not resolve" in each for each in found)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
def test_a_process_without_a_place_in_the_relay_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can take all the names: that costs the relay of unicast datagrams, and nothing else."""
    monkeypatch.setattr(local_relay, "MAX_PROCESSES", 1)
    network = Network(interfaces=("lo",), port=free_udp_port())
    with contextlib.ExitStack() as stack:
        stack.callback(local_relay.LocalRelay(network.port).close)
        driver = Noting(network, stack)
        driver.notes.to_do.append(Multicast(SEEK))
        assert driver.turn_until("heard")[1] == SEEK
        assert driver.facts().failures == ["local relay: all 1 names are taken"]
        assert driver.inspect().relay_failure == "all 1 names are taken"
