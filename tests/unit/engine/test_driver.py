"""What the driver does, whatever machine it drives: shown with a machine that only notes what it is told."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_interface
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.engine.driver import Driver, listening_addresses
from mingle.network import interfaces, local_relay, transport
from mingle.network.folders import Folders, storages
from mingle.network.interfaces import Interface
from mingle.network.transport import Received
from mingle.protocol.effects import Answer, Dial, Effect, Hangup, Multicast, Write
from mingle.protocol.events import (
    Accepted,
    AddressesChanged,
    BytesReceived,
    Connected,
    Disconnected,
    Event,
    FoldersListed,
    Heard,
    HeardUnverified,
    InterfacesChanged,
    Source,
    TimerDue,
)
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, List, Offer, Seek
from tests.support.bystanders import free_udp_port

MEMBER, SESSION = b"m" * 16, b"s" * 16
KEY = JobKey(b"secret", "a job")
SEEK = Seek(job="a job", member=MEMBER, world_size=2)


class Notes:
    """A machine without rules."""

    def __init__(self) -> None:
        self.to_do: list[Effect] = []
        self.told: list[Event] = []
        self.due: float | None = None
        self.says: Datagram | None = None
        self.shows: Seek | Offer | None = None
        self.instead: dict[type[Event], Callable[[], object]] = {}
        """What it does when it is told of events of a kind."""

    def handle(self, event: Event, now: float) -> None:
        self.instead.get(type(event), lambda: None)()
        if isinstance(event, TimerDue):
            self.due = None
        self.told.append(event)

    def effects(self) -> list[Effect]:
        done, self.to_do = self.to_do, []
        return done

    def next_timer(self) -> float | None:
        return self.due

    def calling(self) -> Datagram | None:
        return self.says

    def showing(self) -> Seek | Offer | None:
        return self.shows

    def owns(self, conn: int) -> bool:
        return conn < 1000

    def heard(self) -> list[Datagram]:
        """The datagrams that it was told of."""
        return [event.message for event in self.told if isinstance(event, Heard)]


E = TypeVar("E", bound=Event)


class Noting(Driver):
    """A driver of that machine."""

    def __init__(
        self, network: Network, stack: contextlib.ExitStack, job: str = "a job", key: JobKey | None = None
    ) -> None:
        super().__init__(network, job, key, stack, storages=storages(network.folders, job))
        self.notes = Notes()
        self.drive(self.notes, verifies=True)

    def turn_until(self, kind: type[E]) -> E:
        """Turns until the machine was told of an event of this kind."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for told in self.notes.told:
                if isinstance(told, kind):
                    return told
            self.notes.due = self.notes.due or time.monotonic() + 0.2  # no turn lasts longer
            self.carry_out()
            self.turn()
        raise AssertionError(f"never told of {kind.__name__}: {self.notes.told}")

    def hear(self) -> tuple[Any, Source]:
        """Turns until the machine has heard a datagram."""
        heard = self.turn_until(Heard)
        return heard.message, heard.source


@pytest.fixture
def driver() -> Iterator[Noting]:
    with contextlib.ExitStack() as stack:
        yield Noting(Network(interfaces=("lo",), port=free_udp_port()), stack)


def test_own_multicast_comes_back_with_its_source(driver: Noting) -> None:
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    driver.notes.to_do.append(Multicast(seek))
    message, source = driver.hear()
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
    assert driver.hear()[0].member == MEMBER
    assert len(driver.notes.heard()) == 1
    assert driver.facts().rejected == {"broadcast": 1}


def test_an_offer_names_the_address_of_the_interface_it_leaves_by_first(driver: Noting) -> None:
    addresses = ("192.0.2.1", "127.0.0.1", "192.0.2.2")
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=addresses, port=9, world_size=2)
    driver.notes.to_do.append(Multicast(offer))
    message, _ = driver.hear()
    assert message.addresses == ("127.0.0.1", "192.0.2.1", "192.0.2.2")


def test_call_of_another_thread_wakes_the_driver(driver: Noting) -> None:
    thread = threading.Thread(target=driver.call, args=(lambda: driver.tell(InterfacesChanged()),))
    thread.start()
    driver.turn_until(InterfacesChanged)
    thread.join()


def test_a_connection_from_dial_to_end(driver: Noting) -> None:
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
    assert driver.turn_until(Connected) == Connected(999, "127.0.0.1", "lo")
    driver.notes.to_do.append(Write(999, b"hello"))
    accepted = driver.turn_until(Accepted)
    assert driver.turn_until(BytesReceived) == BytesReceived(accepted.conn, b"hello")
    driver.notes.to_do.append(Hangup(accepted.conn))
    driver.turn_until(Disconnected)


def test_peers_are_asked_with_a_padded_question() -> None:
    port = free_udp_port()
    with contextlib.ExitStack() as stack:
        driver = Noting(Network(interfaces=("lo",), port=port, peers=(Peer("127.0.0.1", None),)), stack)
        driver.notes.says = Seek(job="a job", member=MEMBER, world_size=2)
        message, source = driver.hear()
        assert source.multicast is False
        assert len(message.padding) > 800
        driver.notes.told.clear()
        driver.notes.says = Bye(job="a job", session=SESSION)
        while driver.hear()[0] != driver.notes.says:
            driver.notes.told.clear()


@pytest.mark.parametrize("padded", [True, False])
def test_a_question_to_the_group_is_answered_by_unicast_only_if_it_is_long_enough(driver: Noting, padded: bool) -> None:
    driver.notes.to_do.append(Multicast(SEEK, padded=padded))
    question, source = driver.hear()
    assert source.multicast
    assert len(question.padding) == (0 if not padded else datagrams.MAX_BYTES - len(datagrams.encode(SEEK)) - 11)
    driver.notes.told.clear()
    offer = Offer(job="a job", session=SESSION, host=MEMBER, addresses=("127.0.0.1",), port=9, world_size=2)
    driver.notes.to_do += [Answer(source, offer), *([] if padded else [Multicast(offer)])]
    answer, source = driver.hear()
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
        asker.settimeout(30)
        if hosted_by in drivers:
            drivers[hosted_by].notes.says = offer
        asker.sendto(datagrams.padded(seek, datagrams.MAX_BYTES), ("127.0.0.1", network.port))
        drivers["last"].turn_until(Heard)  # who opened the port last receives it
        if hosted_by == "last":
            for name in ("first", "middle"):  # it will be answered: nobody else is asked
                assert drivers[name]._relay.receive() == []
            return
        for name in ("first", "middle"):
            message, source = drivers[name].hear()
            assert msgspec.structs.replace(message, padding=b"") == seek
            assert (source.multicast, source.address) == (False, "127.0.0.1")
        assert drivers["last"]._relay.receive() == []
        drivers["middle"].notes.to_do.append(Answer(source, offer))
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
    assert "eth7" in driver.turn_until(Disconnected).reason
    assert not any(isinstance(told, Connected) for told in driver.notes.told)


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
            message, source = driver.hear()
            driver.notes.told.clear()
            assert message.member == MEMBER
            driver.notes.to_do.append(Answer(source, offer))
            driver.carry_out()
        asking.settimeout(30)
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
    driver.turn_until(TimerDue)
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
        driver.turn_until(TimerDue)
        assert list(driver.transport.failures) == ["lo IPv4"]
    driver.notes.told.clear()
    driver.interfaces.scan_due = 0.0
    driver.notes.due = time.monotonic()
    driver.turn_until(TimerDue)
    assert not driver.transport.failures
    driver.notes.to_do.append(Multicast(Seek(job="a job", member=MEMBER, world_size=2)))
    driver.turn_until(Heard)


def test_a_host_that_keeps_its_addresses_while_it_is_sealed_is_told_when_they_are_back(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the newest ones once its session takes members again."""
    driver.listen()
    before = driver.addresses
    for addresses in ((msgspec.structs.replace(before[0], address="127.0.0.2"),), before):
        monkeypatch.setattr(Driver, "addresses", addresses)
        driver.relisten(1.0)
        assert driver.notes.told[-1] == AddressesChanged(addresses)


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
        driver.turn_until(Heard)
        driver.notes.told.clear()
    assert driver.facts().rejected["fault"] == 3
    assert len(caplog.records) == 1, "each fault is logged once"
    assert "embedded null" in caplog.text


def test_a_datagram_that_a_machine_can_not_handle_is_dropped(
    driver: Noting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seek = Seek(job="a job", member=MEMBER, world_size=2)
    driver.notes.instead[Heard] = fail
    driver.notes.to_do += [Multicast(seek)] * 3
    deadline = time.monotonic() + 30
    while driver.facts().rejected["fault"] < 3:
        assert time.monotonic() < deadline
        driver.notes.due = time.monotonic()
        driver.carry_out()
        driver.turn()
    assert [record.exc_info is not None for record in caplog.records] == [True]
    driver.notes.instead.clear()
    driver.notes.to_do.append(Multicast(seek))
    assert driver.hear()[0] == seek


@pytest.mark.parametrize("step", [Connected, BytesReceived, Accepted])
def test_a_connection_that_a_machine_can_not_handle_is_closed(
    driver: Noting, step: type[Event], caplog: pytest.LogCaptureFixture
) -> None:
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.instead[step] = fail
    with socket.create_connection(("127.0.0.1", driver.connections.port)) as caller:
        caller.settimeout(0.01)
        caller.sendall(b"hello")
        if step is Connected:
            driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
        driver.turn_until(Disconnected) if step is not Accepted else None
        deadline = time.monotonic() + 30
        while step is not Connected:
            driver.notes.due = time.monotonic()
            driver.turn()
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                assert caller.recv(1) == b""
                break
            assert time.monotonic() < deadline
    assert driver.facts().rejected["fault"] == 1
    assert "a riddle" in caplog.text


def test_the_end_of_a_connection_that_can_not_be_handled_ends_no_loop(driver: Noting) -> None:
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.instead[Disconnected] = fail
    with socket.create_connection(("127.0.0.1", driver.connections.port)):
        driver.notes.due = time.monotonic() + 0.1
        driver.turn_until(TimerDue)
        driver.notes.told.clear()
    deadline = time.monotonic() + 30
    while driver.facts().rejected["fault"] == 0:
        assert time.monotonic() < deadline
        driver.notes.due = time.monotonic() + 0.1
        driver.turn()
    before = driver.facts().rejected["fault"]
    driver.notes.told.clear()
    driver.turn_until(TimerDue)
    assert driver.facts().rejected["fault"] == before, "the connection is gone for good"


def test_a_timeout_error_of_a_signal_handler_that_comes_with_a_call_is_not_lost(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alarmed(*_: object) -> None:
        raise TimeoutError("the alarm")

    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "send", lambda *_: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(TimeoutError, match="the alarm"):
                driver.call(list)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_timer_that_can_not_be_handled_ends_the_loop(driver: Noting) -> None:
    """Nobody sent it, so there is nothing to drop: a machine without its timers would wait for ever."""
    driver.notes.instead[TimerDue] = fail
    driver.notes.due = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        driver.turn()


# --- shared folders -------------------------------------------------------------------------------------------------


def folder_driver(stack: contextlib.ExitStack, folder: Path, key: JobKey | None = None) -> Noting:
    """Return a driver that has one shared folder."""
    network = Network(interfaces=("lo",), port=free_udp_port(), folders=(f"dir:{folder}",))
    return Noting(network, stack, key=key)


def hosted_at(*addresses: str, host: bytes = b"h" * 16) -> Offer:
    return Offer(job="a job", session=SESSION, host=host, addresses=addresses, port=9, world_size=2)


def test_a_machine_hears_what_another_shows_in_a_folder(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        host, seeker = folder_driver(stack, tmp_path), folder_driver(stack, tmp_path)
        host.notes.shows = hosted_at("127.0.0.1")
        seeker.notes.shows = SEEK
        host.carry_out()
        message, source = seeker.hear()
        assert message == hosted_at("127.0.0.1")
        assert source.folder
        assert source.address == f"dir:{tmp_path}"
        assert not seeker.turn_until(FoldersListed).lower
    assert not list(tmp_path.iterdir())


def test_loopback_addresses_in_a_folder_are_those_of_the_writers_node(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        seeker = folder_driver(stack, tmp_path)
        seeker.notes.shows = SEEK
        elsewhere = Folders(
            storages([f"dir:{tmp_path}"], "a job"), node="elsewhere", call=lambda _: None, found=lambda *_: None
        )
        stack.callback(elsewhere.close)
        elsewhere.show(hosted_at("127.0.0.1", "192.0.2.7"), datagrams.encode)
        message, _ = seeker.hear()
        assert message.addresses == ("192.0.2.7",)


def test_an_object_without_our_signature_is_not_believed(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stranger, seeker = folder_driver(stack, tmp_path), folder_driver(stack, tmp_path, KEY)
        host = folder_driver(stack, tmp_path, KEY)
        stranger.notes.shows, host.notes.shows = hosted_at("192.0.2.6"), hosted_at("192.0.2.7", host=b"k" * 16)
        stranger.carry_out()
        host.carry_out()
        seeker.notes.shows = SEEK
        message, source = seeker.hear()
        assert message == host.notes.shows
        assert source.verified
        seeker.turn_until(HeardUnverified)
        assert seeker.notes.heard() == [host.notes.shows]


def test_a_folder_that_fails_is_named_and_the_election_does_not_wait_for_it(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        driver = folder_driver(stack, tmp_path / "missing")
        driver.notes.shows = SEEK
        driver.turn_until(FoldersListed)
        facts = driver.facts(driver.diagnose(driver.observed()))
        assert f"dir:{tmp_path}/missing does not exist" in facts.failures
        assert facts.peers == [f"dir:{tmp_path}/missing"]
        finding = next(each for each in facts.findings if each.name == "folder")
        assert "mount" in finding.remedy


def test_an_object_that_a_machine_can_not_handle_ends_no_loop(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        host, seeker = folder_driver(stack, tmp_path), folder_driver(stack, tmp_path)
        host.notes.shows, seeker.notes.shows = hosted_at("127.0.0.1"), SEEK
        seeker.notes.instead[Heard] = fail
        host.carry_out()
        seeker.turn_until(FoldersListed)
        deadline = time.monotonic() + 30
        while not seeker.rejected["fault"] and time.monotonic() < deadline:
            seeker.notes.due = time.monotonic() + 0.1
            seeker.turn()
        assert seeker.rejected["fault"] == 1


# --- reports --------------------------------------------------------------------------------------------------------


def test_facts_and_inspection_describe_the_network() -> None:
    port = free_udp_port()
    network = Network(
        interfaces=("lo",), interfaces_from="MINGLE_INTERFACE", port=port, peers=(Peer("no-such-host.invalid"),)
    )
    with contextlib.ExitStack() as stack:
        driver = Noting(network, stack, job="resnet")
        deadline = time.monotonic() + 30
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
        found = [finding.observation for finding in driver.diagnose(driver.observed())]
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
        assert driver.hear()[0] == SEEK
        assert driver.facts().failures == ["local relay: all 1 names are taken"]
        assert driver.inspect().relay_failure == "all 1 names are taken"


# --- the addresses to listen on ---------------------------------------------------------------------------------------


def nic(name: str, index: int, *addresses: str) -> Interface:
    return Interface(name, index, tuple(map(ip_interface, addresses)), loopback=name == "lo")


ETH0 = nic("eth0", 2, "10.0.0.1/24", "fd00::1/64", "fe80::1/64")


def test_the_addresses_to_listen_on() -> None:
    lonely = nic("eth1", 3, "fe80::2/64", "fe80::3/64")
    found = [(each.address, each.interface, each.index) for each in listening_addresses([ETH0, lonely], "auto")]
    assert found == [("10.0.0.1", "eth0", 2), ("fd00::1", "eth0", 2), ("fe80::2", "eth1", 3)]
    assert [each.address for each in listening_addresses([ETH0], "6")] == ["fd00::1"]
    many = nic("eth2", 4, *(f"10.0.1.{number}/24" for number in range(1, 40)))
    assert len(listening_addresses([many], "auto")) == datagrams.MAX_ADDRESSES


def test_tunnels_and_bridges_are_a_last_resort() -> None:
    usable = [
        nic("eth1", 3, "10.1.0.1/24"),
        nic("wg0", 4, "10.9.0.1/24"),
        nic("docker0", 5, "172.17.0.1/16"),
        nic("lo", 1, "127.0.0.1/8"),
    ]
    assert [each.last_resort for each in listening_addresses(usable, "auto")] == [False, True, True, False]
