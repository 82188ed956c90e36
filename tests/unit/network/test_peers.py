"""Who is asked when, on a clock of the test's own; and names that resolve late, or never."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mingle import detached
from mingle.config.values import Peer
from mingle.errors import MingleError
from mingle.network import peers
from mingle.network.peers import PER_ROUND, Peers
from tests.support.failing import no_descriptor_left
from tests.support.loopback import until

Make = Callable[..., Peers]
A, B = ("10.0.0.1", 29499), ("10.0.0.2", 29499)


def peers_of(*addresses: tuple[str, int], seed: int = 0) -> Peers:
    return Peers([Peer(*each) for each in addresses], 29499, "auto", random.Random(seed))


def asked_until(asked: Peers, end: float, now: float = 0.0) -> list[tuple[float, tuple[str, int]]]:
    """Ask whenever the schedule wants it; when and whom."""
    found = [(now, address) for address in asked.turn(silent=False, now=now)]
    while (timer := asked.next_timer(now)) is not None and timer <= end:
        assert timer > now
        now = timer
        found += [(now, address) for address in asked.turn(silent=False, now=now)]
    return found


# --- the schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_an_address_is_asked_at_once_then_ever_more_rarely(seed: int) -> None:
    times = [when for when, _ in asked_until(peers_of(A, seed=seed), 160.0, 100.0)]
    assert times[0] == 100.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    for number, gap in enumerate(gaps):
        interval = min(0.1 * 1.6**number, 2.0)
        assert 0.75 * interval <= gap <= 1.25 * interval
    # For half an hour of waiting that is one small datagram every two seconds.
    assert 60 / (2.0 * 1.25) <= len(times) <= 60 / (2.0 * 0.75) + 10


def test_two_ranks_do_not_stay_in_step() -> None:
    first, second = (asked_until(peers_of(A, seed=seed), 10.0) for seed in (1, 2))
    assert first[1:] != second[1:]


def test_few_are_asked_per_round_and_all_have_their_turn() -> None:
    many = [(f"10.0.1.{number}", 29499) for number in range(20)]
    asked = peers_of(*many)
    first = asked.turn(silent=False, now=0.0)
    assert len(first) == PER_ROUND
    assert asked.turn(silent=False, now=0.01) == [], "the next round is not yet due"
    assert asked.next_timer(0.01) == 0.02
    second = asked.turn(silent=False, now=0.02)
    third = asked.turn(silent=False, now=0.04)
    assert len(second) == PER_ROUND
    assert sorted(first + second + third) == sorted(many)
    # However many there are, what is sent in a second is bounded.
    rate = len(asked_until(asked, 1.04, 0.04))
    assert rate <= PER_ROUND * 51


def test_the_longest_overdue_comes_first() -> None:
    many = [(f"10.0.1.{number}", 29499) for number in range(PER_ROUND + 1)]
    asked = peers_of(*many)
    (left_out,) = set(many) - set(asked.turn(silent=False, now=0.0))
    assert asked.turn(silent=False, now=0.5)[0] == left_out


def test_each_address_has_a_timer_of_its_own(names: NameServer, made: Make) -> None:
    names.answers["node7"] = [B]
    asked = made(Peer(*A), Peer("node7"))
    asked_until(asked, 20.0)
    names.answer("node7")
    until(lambda: asked.some() == [A, B])
    later = [address for _, address in asked_until(asked, 21.0, 20.0)]
    # The newcomer is asked quickly; the one known already is not asked anew.
    assert later.count(B) >= 3
    assert later.count(A) <= 1


def test_hostile_resolver_costs_bounded_memory(names: NameServer, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_ADDRESSES", 10)
    names.answers["workers"] = [(f"10.0.0.{number}", 1) for number in range(200)]
    asked = made(Peer("workers"))
    names.answer("workers")
    until(asked.some)
    assert len({address for _, address in asked_until(asked, 10.0)}) == 10
    assert sum(asked.knows(f"10.0.0.{number}") for number in range(200)) == 10


# --- the resolver ---------------------------------------------------------------------------------------------------


class NameServer:
    """Stands for ``getaddrinfo``: each look-up waits for the test to give its answer, or the error to raise."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any] | Exception] = {}
        self.asked: list[tuple[str, int, int]] = []
        # One for each name: every name has a thread of its own, and none may take what was meant for another.
        self._turns: dict[str, threading.Semaphore] = {}

    def getaddrinfo(self, host: str, port: int, family: int = 0, kind: int = 0) -> list[Any]:
        assert self._turns_of(host).acquire(timeout=60)
        assert kind == socket.SOCK_DGRAM
        self.asked.append((host, port, family))
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET6 if ":" in each[0] else socket.AF_INET, kind, 17, "", each) for each in answer]

    def answer(self, *hosts: str, times: int = 1) -> None:
        """Let so many look-ups of each of these names through."""
        for host in hosts:
            self._turns_of(host).release(times)

    def _turns_of(self, host: str) -> threading.Semaphore:
        return self._turns.setdefault(host, threading.Semaphore(0))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    monkeypatch.setattr(peers, "has_route", lambda _address: True)
    monkeypatch.setattr(peers, "RESOLVE_SECONDS", 0.001)
    return server


def resolvers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "mingle-abandoned-resolver"]


@pytest.fixture
def made(names: NameServer) -> Iterator[Make]:
    opened = []

    def make(*wanted: Peer, family: str = "auto") -> Peers:
        opened.append(Peers(wanted, 29499, family, random.Random(0)))
        return opened[-1]

    yield make
    for each in opened:
        each.stop()
    names.answer(*names.answers, times=100)
    until(lambda: not resolvers())


def taken(found: Peers, count: int) -> list[tuple[str, int]]:
    """Wait for so many addresses, and take them."""
    addresses: list[tuple[str, int]] = []
    until(lambda: addresses.extend(found.take()) or len(addresses) >= count)
    return addresses


def test_addresses_need_no_thread(made: Make) -> None:
    before = threading.active_count()
    found = made(Peer("10.0.0.1"), Peer("fe80::1%eth0", 5), Peer("::1"))
    assert threading.active_count() == before
    assert found.take() == [("10.0.0.1", 29499), ("fe80::1%eth0", 5), ("::1", 29499)]
    assert found.take() == [], "each is handed out once"


def test_a_name_that_does_not_resolve_yet_is_asked_for_again(names: NameServer, made: Make) -> None:
    names.answers["node7"] = socket.gaierror(-2, "Name or service not known")
    found = made(Peer("node7", 5000))
    names.answer("node7")
    until(lambda: found.failures)
    assert found.failures == {"node7": "Name or service not known"}
    assert found.take() == []
    names.answers["node7"] = [("10.0.0.7", 5000), ("fd00::7", 5000, 0, 0), ("fe80::7", 5000, 0, 3)]
    names.answer("node7")
    until(lambda: not found.failures)
    assert found.take() == [("10.0.0.7", 5000), ("fd00::7", 5000), ("fe80::7%3", 5000)]
    names.answers["node7"] = [("10.0.0.8", 5000)]
    names.answer("node7")
    assert taken(found, 1) == [("10.0.0.8", 5000)], "machines come up one after the other"


@pytest.mark.parametrize(
    ("family", "asked"), [("auto", socket.AF_UNSPEC), ("4", socket.AF_INET), ("6", socket.AF_INET6)]
)
def test_only_the_family_in_use_is_asked_for(names: NameServer, made: Make, family: str, asked: int) -> None:
    names.answers["node7"] = []
    made(Peer("node7"), family=family)
    names.answer("node7")
    until(lambda: names.asked)
    assert names.asked[0] == ("node7", 29499, asked)


@pytest.mark.parametrize(
    "problem",
    [
        socket.gaierror(-3, "Temporary failure in name resolution"),
        # What Python's own encoding of host names says of "a..b", before any resolver is asked.
        UnicodeError("encoding with 'idna' codec failed (UnicodeError: label empty or too long)"),
        ValueError("embedded null character"),
        None,
    ],
)
def test_one_bad_name_or_silent_server_does_not_keep_the_others_from_being_found(
    names: NameServer, made: Make, problem: Exception | None
) -> None:
    names.answers |= {"a..b": problem or [], "node7": [A]}
    found = made(Peer("a..b"), Peer("node7"))
    names.answer("node7")
    assert taken(found, 1) == [A]
    if problem is not None:
        names.answer("a..b")
        until(lambda: found.failures)
        assert list(found.failures) == ["a..b"]
        assert found.failures["a..b"] in str(problem)


def test_version_without_a_route_is_left_out(names: NameServer, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "has_route", lambda address: ":" not in address)
    names.answers |= {"dual": [("fd00::5", 29499, 0, 0), A], "six": [("fd00::6", 29499, 0, 0)]}
    found = made(Peer("dual"), Peer("six"))
    names.answer("dual", "six")
    assert sorted(taken(found, 2)) == [A, ("fd00::6", 29499)]


def test_a_route() -> None:
    assert peers.has_route("127.0.0.1")
    assert not peers.has_route("fe80::1%999999")
    # The kernel refuses this socket a connection to the broadcast, and there is no such interface.
    nowhere = ["255.255.255.255", "fe80::1%999999"]
    assert peers.with_a_route(nowhere) == nowhere, "a route can come"
    with no_descriptor_left():
        possible = peers.has_route("127.0.0.1")
    assert possible, "it is not known"


def test_failures_can_be_read_while_names_are_looked_up(names: NameServer, made: Make) -> None:
    names.answers |= {name: socket.gaierror(-2, "Name or service not known") for name in ("a", "b", "c")}
    found = made(Peer("a"), Peer("b"), Peer("c"))
    names.answer("b")
    until(lambda: found.failures)
    reading = iter(found.failures.items())
    names.answer("a", "c")
    until(lambda: len(found.failures) == 3)
    assert len(list(reading)) == 1


def test_a_look_up_that_hangs_holds_nobody_up(names: NameServer, made: Make) -> None:
    names.answers["node7"] = [A]
    found = made(Peer("node7"))
    assert found.take() == []
    found.stop()
    (thread,) = resolvers()
    names.answer("node7")
    assert thread.daemon
    thread.join(30)
    assert not thread.is_alive()
    assert len(names.asked) == 1


# --- both together --------------------------------------------------------------------------------------------------


def test_peers_are_asked_quickly_again_after_a_silence_and_over_new_interfaces() -> None:
    asked = peers_of(A, seed=1)
    now = asked_until(asked, 10.0)[-1][0]
    assert asked.turn(silent=False, now=now + 0.3) == [], "it is asked ever more rarely"
    assert asked.turn(silent=True, now=now + 0.4) == []
    assert asked.turn(silent=False, now=now + 0.5) == [A], "there is something to say again"
    asked.restart(now + 0.6)
    assert asked.turn(silent=False, now=now + 0.6) == [A]


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("10.0.0.9", "10.0.0.9"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("FE80::1%7", "fe80::1"),
        ("::ffff:a00:9", "10.0.0.9"),
    ],
)
def test_a_peer_is_known_however_its_address_was_written(written: str, source: str) -> None:
    known = peers_of((written, 29499))
    known.turn(silent=False, now=0.0)
    assert known.knows(source)
    assert not known.knows("10.0.0.8")


def test_each_peer_is_shown_with_its_address_and_whether_anything_came(names: NameServer, made: Make) -> None:
    own, many = ("10.0.0.1", 29499), [("10.0.0.1", 29499), ("10.0.0.2", 29499), ("10.0.0.3", 29499)]
    names.answers = {"node0": [("10.0.0.9", 29499)], "many": many, "us": [own], "unknown": OSError("unknown")}
    asked = made(*(Peer(name) for name in (*names.answers, "10.0.0.7")))
    names.answer(*names.answers)
    lacks = "unknown: no address"
    until(lambda: asked.failures and [each for each in asked.answers(()) if "no add" in each] == [lacks])
    asked.turn(silent=True, now=0.0)
    for address in ("10.0.0.2", "10.0.0.7", "10.0.0.250"):
        asked.heard(address)
    assert asked.answers({"10.0.0.1"}) == {
        "node0 = 10.0.0.9: no answer": True,
        "many = 10.0.0.2, 10.0.0.3: 1 of 2 answer": False,
        "us: this machine": False,
        "unknown: no address": False,
        "10.0.0.7: answers": False,
    }


def test_without_peers_nobody_is_asked_and_nothing_is_waited_for() -> None:
    none = peers_of()
    assert none.next_timer(5.0) is None
    assert none.turn(silent=False, now=5.0) == []


@pytest.mark.parametrize(("silent", "most"), [(False, 72), (True, 10)])
def test_names_are_resolved_less_often_in_a_silence(monkeypatch: pytest.MonkeyPatch, silent: bool, most: int) -> None:
    """An agent of an elastic job has a host for days, a rank can wait for hours, and a name server has many of them."""

    class Clock:
        now = 0.0

        def is_set(self) -> bool:
            return self.now >= 300

        def wait(self, seconds: float) -> None:
            self.now += seconds

    looked_up: list[str] = []
    asked = Peers([], 29499, "auto", random.Random(1))
    asked.turn(silent=silent, now=0.0)
    monkeypatch.setattr(asked, "_stop", Clock())
    monkeypatch.setattr(asked, "_look_up", lambda host, _port: looked_up.append(host))
    asked._run([("node7", 29499)])
    assert len(looked_up) == most


def test_resolver_without_a_thread_leaves_none_behind(
    names: NameServer, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full cgroup refuses threads; a thread that is left behind would ask the name server once a second for good."""

    def start(thread: threading.Thread) -> None:
        if resolvers():
            raise MingleError("a thread of the discovery can't be started")
        thread.start()

    names.answers["node1"] = [A]
    monkeypatch.setattr(detached, "start_explained", start)
    with pytest.raises(MingleError):
        made(Peer("node1"), Peer("node2"))
    names.answer("node1", times=100)
    until(lambda: not resolvers())


def test_new_addresses_are_looked_for_while_there_is_nothing_to_say(names: NameServer, made: Make) -> None:
    names.answers["node7"] = [A]
    asked = made(Peer("node7"))
    assert asked.next_timer(1.0) == 1.0 + peers.RESOLVED_SECONDS
    names.answer("node7")
    until(lambda: asked.turn(silent=False, now=2.0) == [A])
