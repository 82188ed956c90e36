"""What processes that share a UDP port relay to each other; the test plays several of them."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from mingle.network import local_relay
from mingle.network.local_relay import LocalRelay
from mingle.network.transport import Received
from mingle.wire import datagrams, echo
from mingle.wire.datagrams import Bye, List, Offer, Seek
from tests.support.failing import refusing
from tests.support.ports import free_udp_port
from tests.support.receiving import no_descriptor_leaks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")

QUESTION = datagrams.encode(Seek(job="a job", member=b"m" * 16, world_size=2))
SOURCES = [("192.0.2.7", 40000), ("fe80::7", 40000, 0, 3)]


def heard(data: bytes = QUESTION, source: local_relay.SocketAddress = ("192.0.2.7", 40000)) -> Received:
    """A unicast datagram that came in at the shared port."""
    family: local_relay.Version = "4" if len(source) == 2 else "6"
    destination = "192.0.2.1" if family == "4" else "fe80::1"
    return Received(data, source, family, False, destination, interface="eth0", shared=True)


@pytest.fixture
def family() -> Iterator[list[LocalRelay]]:
    port = free_udp_port()
    with contextlib.ExitStack() as stack:
        made = [LocalRelay(port) for _ in range(3)]
        for each in made:
            stack.callback(each.close)
        yield made


@pytest.mark.parametrize("source", SOURCES)
def test_relay_reaches_all_other_processes_with_the_source_and_none_of_them_twice(
    family: list[LocalRelay], source: local_relay.SocketAddress
) -> None:
    family[1].relay(heard(source=source), 0.0)
    assert family[1].receive() == []
    for each in (family[0], family[2]):
        (received,) = each.receive()
        assert received == heard(datagrams.as_repeated(QUESTION), source)
        assert received.via is None
        each.relay(received, 0.0)
    assert [each.receive() for each in family] == [[]] * 3


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1", QUESTION + bytes(datagrams.MAX_BYTES)])
def test_foreign_datagram_is_not_relayed(family: list[LocalRelay], data: bytes) -> None:
    family[0].relay(heard(data), 0.0)
    assert family[1].receive() == []


def test_a_flood_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_relay, "RELAYED_AT_ONCE", 3.0)
    monkeypatch.setattr(local_relay, "RELAYED_PER_SECOND", 2.0)
    port = free_udp_port()
    with contextlib.closing(LocalRelay(port)) as flooded, contextlib.closing(LocalRelay(port)) as other:
        for _ in range(10):
            flooded.relay(heard(), 5.0)
        assert len(other.receive()) == 3
        for _ in range(10):
            flooded.relay(heard(), 6.0)
        assert len(other.receive()) == 2


FIELDS: dict[str, Any] = {
    "data": QUESTION,
    "interface": "eth0",
    "host": "192.0.2.7",
    "port": 40000,
    "scope": 0,
    "family": "4",
    "local": False,
    "destination": "192.0.2.1",
}
HOSTILE: list[tuple[str, Any]] = [
    ("data", b"GET / HTTP/1.1"),
    ("data", QUESTION + bytes(datagrams.MAX_BYTES)),
    ("interface", "eth0\0"),
    ("interface", "eth0\n  fix: call the attacker"),
    ("interface", "e" * 16),
    ("interface", "../etc"),
    *(("host", host) for host in ("a.name.to.look.up", "192.0.2.7 ", "", "192.0.2.7\0", "fe80::7", "224.0.0.1")),
    *(("host", host) for host in ("0.0.0.0", "255.255.255.255")),
    *(("port", port) for port in (0, -1, 65536, "40000")),
    *(("scope", scope) for scope in (1, -1, 2**32)),
    ("family", "6"),
    ("family", "5"),
    ("local", 1),
    *(("destination", text) for text in ("127.0.0.1\0", "127.0.0.1 ", "x", "\udc80", "224.0.0.1", "0.0.0.0", "::1")),
    *(("destination", text) for text in ("fe80::1%eth0", "1" * 100_000)),
]


def send(target: LocalRelay, *messages: bytes, ancillary: tuple[tuple[int, int, bytes], ...] = ()) -> None:
    """Send local messages as another program of this user does."""
    assert target.socket is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(target.socket.getsockname())
        for message in messages:
            with contextlib.suppress(OSError):  # EMSGSIZE, where the message is that long
                stranger.sendmsg([message], ancillary)


def local_message(**changed: Any) -> bytes:
    values = FIELDS | changed
    return msgspec.msgpack.encode(
        [value.encode("utf-8", "surrogatepass") if value == "\udc80" else value for value in values.values()]
    )


@pytest.mark.parametrize(("field", "value"), HOSTILE)
def test_every_field_of_a_local_message_is_checked(family: list[LocalRelay], field: str, value: Any) -> None:
    send(family[0], b"\xc1 no MessagePack", bytes(8192), local_message(**{field: value}))
    family[1].relay(heard(), 0.0)
    assert [received.destination for received in family[0].receive()] == ["192.0.2.1"]
    assert family[0].rejected == {"relay": 3}
    assert family[0].receive() == []


def test_descriptors_that_come_with_a_local_message_are_not_kept(family: list[LocalRelay]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 0, 0]).tobytes())
    with no_descriptor_leaks():
        send(family[0], local_message(), ancillary=(rights,))
        assert [received.source for received in family[0].receive()] == [("192.0.2.7", 40000)]


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    os.setresuid(65534, 0, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_may_relay_questions_alone(family: list[LocalRelay]) -> None:
    offer = Offer(job="a job", session=b"s" * 16, host=b"h" * 16, addresses=("192.0.2.9",), port=9, world_size=2)
    asked = [
        QUESTION,
        datagrams.encode(List(member=b"m" * 16)),
        echo.encode(echo.EchoRequest(pinger=b"p" * 16, number=1, way="unicast")),
    ]
    told = [datagrams.encode(offer), datagrams.encode(Bye(job="a job", session=b"s" * 16))]
    told.append(echo.encode(echo.EchoEnd(pinger=b"p" * 16)))
    told.append(echo.encode(echo.EchoReply(pinger=b"p" * 16, asker=b"a" * 16, number=1, way="unicast")))
    messages = [local_message(data=data) for data in (*asked, *told, datagrams.MAGIC + b"garbage")]
    with another_user():
        send(family[0], *messages)
    assert [received.data for received in family[0].receive()] == [datagrams.as_repeated(data) for data in asked]
    assert family[0].rejected == {"relay of another user": 5}
    send(family[0], *messages[:5])
    assert len(family[0].receive()) == 5
    send(family[0], *messages[:5])
    with another_user():
        assert len(family[0].receive()) == 5, "root's processes are trusted by those of every user"


def test_a_port_is_a_family_of_its_own_and_names_are_used_again(family: list[LocalRelay]) -> None:
    with contextlib.closing(LocalRelay(free_udp_port())) as stranger:
        family[0].relay(heard(), 0.0)
        assert stranger.receive() == []
    assert family[1].socket is not None
    name = family[1].socket.getsockname()
    family[1].close()
    family[1].close()
    assert family[1].receive() == []
    family[1].relay(heard(), 0.0)  # it is gone: nothing happens
    port = int(name.partition(b"udp-")[2].partition(b"/")[0])
    with contextlib.closing(LocalRelay(port)) as heir:
        assert heir.socket is not None
        assert heir.socket.getsockname() == name


@pytest.mark.parametrize(
    ("confined", "failure"), [(True, "no name: Permission denied"), (False, "all 1 names are taken")]
)
def test_process_without_a_name_knows_why(monkeypatch: pytest.MonkeyPatch, confined: bool, failure: str) -> None:
    monkeypatch.setattr(local_relay, "MAX_PROCESSES", 1)
    port = free_udp_port()
    with contextlib.closing(LocalRelay(port)), monkeypatch.context() as patched:
        if confined:  # a sandbox without names is not taken for names that are taken
            patched.setattr(socket.socket, "bind", refusing(errno.EACCES))
        with contextlib.closing(LocalRelay(port)) as second:
            assert (second.socket, second.failure) == (None, failure)
            second.relay(heard(), 0.0)
            assert second.receive() == []
