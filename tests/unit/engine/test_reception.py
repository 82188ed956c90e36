"""Which datagrams, and which objects of shared folders, a machine hears, and with what source."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from mingle.config.values import Peer, Secret
from mingle.engine.reception import LOOKED_AT_UNVERIFIED, Reception
from mingle.network import interfaces
from mingle.network.interface_monitor import InterfaceMonitor
from mingle.network.peers import Peers
from mingle.network.transport import Received
from mingle.protocol.effects import Answer, Multicast
from mingle.protocol.events import Heard, HeardUnverified, Source
from mingle.wire import datagrams, echo
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Datagram, List, Offer, Seek
from tests.support.nics import nic
from tests.support.noting_driver import Noting

JOB = "a job"
MEMBER, SESSION = b"m" * 16, b"s" * 16
SECRET, ANOTHER = b"secret", b"another"
KEY = JobKey(SECRET, JOB)
SEEK = Seek(job=JOB, member=MEMBER, world_size=2)
NEIGHBOR, PEER, STRANGER = "10.0.0.7", "203.0.113.7", "203.0.113.66"
TRAPS = ("127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1", "239.0.0.1")
FOLDER = "dir:/shared"


def offer(*addresses: str, job: str = JOB) -> Offer:
    return Offer(job=job, session=SESSION, host=MEMBER, addresses=addresses or (NEIGHBOR,), port=9, world_size=2)


class Machine:
    """A machine on 10.0.0.0/24, with one named peer beyond a router."""

    def __init__(self, monitor: InterfaceMonitor) -> None:
        self.monitor = monitor
        self.rejected: Counter[str] = Counter()
        self.peers = Peers([Peer(PEER, None)], 29499, "auto", random.Random(1))
        self.peers.turn(silent=False, now=0.0)

    def reception(self, key: JobKey | None = None, secret: Secret | None = None, *, verifies: bool = True) -> Reception:
        made = Reception(key, secret, self.peers, self.monitor, self.rejected, routed=False)
        made.verifies = verifies
        return made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = [nic("eth0", 2, "10.0.0.2/24", "fe80::2/64"), nic("lo", 1, "127.0.0.1/8")]
    monkeypatch.setattr(interfaces, "scan", lambda: found)
    with contextlib.ExitStack() as stack:
        yield Machine(InterfaceMonitor((), "", "auto", 0.0, stack))


def received(
    data: bytes, source: str = NEIGHBOR, *, interface: str = "eth0", multicast: bool = True, local: bool = False
) -> Received:
    return Received(data, (source, 29499), "4", multicast, interface=interface, local=local)


def heard(event: Heard | HeardUnverified | None) -> Datagram | None:
    """The message, if the machine believes it."""
    return event.message if isinstance(event, Heard) else None


def addresses(event: Heard | HeardUnverified | None) -> tuple[str, ...]:
    """Where the machine is told that a session is."""
    message = heard(event)
    return message.addresses if isinstance(message, Offer) else ()


def source(event: Heard | HeardUnverified | None) -> Source:
    assert isinstance(event, Heard)
    return event.source


# --- datagrams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multicast", [True, False])
def test_source_says_where_a_datagram_came_from(machine: Machine, multicast: bool) -> None:
    came = received(datagrams.encode(SEEK), "fe80::7%eth0", multicast=multicast)
    event = machine.reception().admit(came)
    assert heard(event) == SEEK
    assert source(event) == Source(interface="eth0", multicast=multicast, address="fe80::7", reply_to=came)


@pytest.mark.parametrize(
    ("data", "counted"),
    [
        pytest.param(echo.encode(echo.EchoEnd(job=JOB, pinger=MEMBER)), {}, id="a ping, which is for another process"),
        pytest.param(b"noise of another program", {"magic": 1}, id="noise"),
    ],
)
@pytest.mark.parametrize("verifies", [False, True])
def test_what_is_of_no_discovery_is_not_heard(
    machine: Machine, data: bytes, counted: dict[str, int], verifies: bool
) -> None:
    assert machine.reception(None, Secret(SECRET), verifies=verifies).admit(received(data)) is None
    assert machine.rejected == counted


@pytest.mark.parametrize(
    ("came", "signs", "followed"),
    [
        pytest.param({"source": STRANGER}, False, False, id="from beyond a router"),
        pytest.param({"source": STRANGER}, True, True, id="with our signature"),
        pytest.param({"source": STRANGER, "multicast": True}, False, True, id="by multicast"),
        pytest.param({"source": STRANGER, "local": True}, False, True, id="from this machine"),
        pytest.param({"source": NEIGHBOR}, False, True, id="on link"),
        pytest.param({"source": PEER}, False, True, id="from a peer"),
    ],
)
def test_offer_by_unicast_counts_from_a_peer_or_a_neighbor_and_a_question_from_everywhere(
    machine: Machine, came: dict[str, Any], signs: bool, followed: bool
) -> None:
    key = KEY if signs else None
    offered, asked = (
        machine.reception(key).admit(received(datagrams.encode(each, key), **{"multicast": False, **came}))
        for each in (offer(), SEEK)
    )
    assert addresses(offered) == ((NEIGHBOR,) if followed else ())
    assert offered is None or (source(offered).signed, source(offered).verified) == (signs, signs)
    assert machine.rejected["unsolicited"] == (not followed)
    assert heard(asked) == SEEK


def test_offer_aims_nobody_at_its_own_loopback(machine: Machine) -> None:
    reception = machine.reception()
    assert reception.admit(received(datagrams.encode(offer(*TRAPS)))) is None
    assert machine.rejected == {"addresses": 1}
    assert addresses(reception.admit(received(datagrams.encode(offer(*TRAPS, NEIGHBOR))))) == (NEIGHBOR,)
    here = received(datagrams.encode(offer("127.0.0.1")), "127.0.0.1", interface="lo")
    assert addresses(reception.admit(here)) == ("127.0.0.1",)
    assert machine.rejected == {"addresses": 1}


# --- signatures -------------------------------------------------------------------------------------------------------


def test_datagram_without_our_signature_is_shown_and_not_believed(machine: Machine) -> None:
    reception = machine.reception(KEY)
    assert heard(reception.admit(received(datagrams.encode(SEEK, KEY)))) == SEEK
    for data in (datagrams.encode(SEEK), datagrams.encode(SEEK, JobKey(ANOTHER, JOB))):
        assert reception.admit(received(data)) == HeardUnverified(SEEK)
    assert reception.admit(received(b"noise of another program")) is None
    assert machine.rejected == {"unsigned": 1, "signature": 1, "magic": 1}


def test_question_to_the_browse_group_needs_no_signature(machine: Machine) -> None:
    """`watch` asks every two seconds: its questions are not counted against those that are forged."""
    reception = machine.reception(KEY)
    question = List(member=bytes(16))
    for _ in range(LOOKED_AT_UNVERIFIED + 1):
        assert heard(reception.admit(received(datagrams.encode(question)))) == question
    assert not machine.rejected
    for _ in range(LOOKED_AT_UNVERIFIED + 1):
        reception.admit(received(datagrams.encode(SEEK)))
    assert heard(reception.admit(received(datagrams.encode(question)))) == question


@pytest.mark.parametrize("key", [None, JobKey(ANOTHER, JOB)], ids=["unsigned", "wrong signature"])
def test_flood_without_our_signature_is_not_looked_at(machine: Machine, key: JobKey | None) -> None:
    reception = machine.reception(KEY)
    machine.rejected["unsigned"] = machine.rejected["signature"] = LOOKED_AT_UNVERIFIED // 2 - 1
    shown = [reception.admit(received(datagrams.encode(SEEK, key))) for _ in range(4)]
    assert shown == [HeardUnverified(SEEK)] * 2 + [None] * 2


def test_machine_that_verifies_nothing_hears_all_and_knows_its_own_jobs(machine: Machine) -> None:
    """Such as an observer, which looks for the jobs of one secret among others."""
    reception = machine.reception(KEY, Secret(SECRET), verifies=False)
    for job in (JOB, "another job"):
        for secret in (None, SECRET, ANOTHER):
            key = None if secret is None else JobKey(secret, job)
            event = reception.admit(received(datagrams.encode(offer(job=job), key)))
            assert heard(event) == offer(job=job)
            assert (source(event).signed, source(event).verified) == (secret is not None, secret == SECRET)
    assert not machine.rejected


def test_nothing_is_verified_without_a_secret(machine: Machine) -> None:
    signed = received(datagrams.encode(offer(), KEY))
    for verifies in (False, True):
        event = machine.reception(verifies=verifies).admit(signed)
        assert (source(event).signed, source(event).verified) == (True, False)


# --- objects in shared folders ----------------------------------------------------------------------------------------


def test_object_of_a_host_comes_from_its_folder_and_needs_our_signature(machine: Machine) -> None:
    event = machine.reception(KEY).admit_found(datagrams.encode(offer(), KEY), FOLDER, same_node=False)
    assert addresses(event) == (NEIGHBOR,)
    expected = Source(interface="", multicast=False, signed=True, verified=True, address=FOLDER, folder=True)
    assert source(event) == expected
    event = machine.reception(KEY).admit_found(datagrams.encode(offer()), FOLDER, same_node=True)
    assert event == HeardUnverified(offer())


@pytest.mark.parametrize("same_node", [False, True])
def test_loopback_addresses_in_a_folder_are_those_of_the_writers_node(machine: Machine, same_node: bool) -> None:
    reception = machine.reception()
    both, lonely = (datagrams.encode(offer("127.0.0.1", *more)) for more in ((NEIGHBOR,), ()))
    expected = ("127.0.0.1", NEIGHBOR) if same_node else (NEIGHBOR,)
    assert addresses(reception.admit_found(both, FOLDER, same_node=same_node)) == expected
    assert addresses(reception.admit_found(lonely, FOLDER, same_node=same_node)) == expected[:-1]
    assert machine.rejected["addresses"] == (not same_node)


@pytest.mark.parametrize("seeks", [False, True])
def test_only_an_observer_hears_in_a_folder_of_those_that_look_for_a_host(machine: Machine, seeks: bool) -> None:
    reception = machine.reception(KEY)
    event = reception.admit_found(datagrams.encode(SEEK, KEY), FOLDER, same_node=False, seeks=seeks)
    if seeks:
        assert heard(event) == SEEK
        assert source(event) == Source(interface="", multicast=False, signed=True, address=FOLDER, folder=True)
    else:
        assert event is None
    question = datagrams.encode(List(member=MEMBER))
    assert reception.admit_found(question, FOLDER, same_node=True, seeks=seeks) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract Unix sockets")
def test_an_answer_that_can_not_be_sent_ends_no_loop(driver: Noting, caplog: pytest.LogCaptureFixture) -> None:
    """A local message, for example, may name a destination that is no address."""
    answer = offer("127.0.0.1")
    question = datagrams.padded(SEEK, datagrams.MAX_BYTES)
    received = Received(question, ("127.0.0.1", 9), "4", False, "127.0.0.1\0", interface="lo", shared=True)
    source = Source(interface="lo", multicast=False, signed=False, address="127.0.0.1", reply_to=received)
    for _ in range(3):
        driver.notes.to_do += [Answer(source, answer), Multicast(answer)]
        driver.turn_until(Heard)
        driver.notes.told.clear()
    assert driver.evidence.facts().rejected["fault"] == 3
    assert len(caplog.records) == 1, "each fault is logged once"
    assert "embedded null" in caplog.text
