"""What every loop does, whatever machine it drives: shown with a machine that only notes what it is told."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from mingle.configuration.settings import Network
from mingle.configuration.values import Peer
from mingle.engine.loop import Loop
from mingle.network import interfaces
from mingle.rules.machine import Answer, Dial, Effect, Hangup, Multicast, Source, Write
from mingle.wire import datagrams
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
                assert loops[name]._siblings.receive() == []
            return
        for name in ("first", "middle"):
            told = loops[name].turn_until("heard")
            _, message, source = told
            assert msgspec.structs.replace(message, padding=b"") == seek
            assert (source.multicast, source.address) == (False, "127.0.0.1")
        assert loops["last"]._siblings.receive() == []
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
    loop._nics.look_due = 0.0
    loop.notes.due = time.monotonic()
    loop.turn_until("timer")
    assert loop._nics.look_due > 0.0
    assert loop.facts().interfaces == before != []
