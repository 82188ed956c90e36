"""The loop of those who are no rank, with its sockets, on `lo`."""

from __future__ import annotations

import threading
import time

import pytest

from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.errors import InterfaceError, MingleError
from mingle.observe.finder import Finder
from mingle.observe.observer import Observer, new_name, this_process
from tests.bystanders import an_announcement, free_udp_port


class _Clock:
    """What `an_announcement` needs of a wire."""

    def __init__(self) -> None:
        self.now = time.monotonic()


def finder(observer: Observer, job: str | None, kind: type[Finder] = Finder) -> Finder:
    return kind(
        job,
        member=new_name(),
        who=this_process(),
        secret=None,
        new_id=observer.driver.new_id,
        rng=observer.driver.rng,
        now=time.monotonic(),
    )


@pytest.mark.parametrize(("job", "peers"), [("observed", ()), (None, ()), ("observed", ("127.0.0.1",))])
def test_an_announcement_is_found(job: str | None, peers: tuple[str, ...]) -> None:
    port, over = free_udp_port(), threading.Event()
    network = Network(interfaces=("lo",), port=port, peers=tuple(map(Peer, peers)))
    with Observer(network, "observed") as speaking, Observer(network, job) as looking:
        addresses, control = speaking.listen()
        announcement = an_announcement(_Clock(), "observed", addresses[0], port=control)  # type: ignore[arg-type]
        speaker = threading.Thread(
            target=speaking.run,
            args=(announcement,),
            kwargs={"until": time.monotonic() + 20, "done": over.is_set},
        )
        speaker.start()
        found = finder(looking, job)
        looking.run(found, until=time.monotonic() + 10, done=lambda: bool(found.alive))
        over.set()
        speaker.join()
        assert [str(each.target()) for each in found.alive] == ["127.0.0.1:29500"]
        facts = looking.driver.facts()
    assert facts.port == port
    assert facts.sent > 0
    assert facts.received > 0
    assert facts.interfaces[0].startswith("lo 127.0.0.1/8")


def test_what_could_be_sent_to_named_hosts_is_counted() -> None:
    network = Network(interfaces=("lo",), port=free_udp_port(), peers=(Peer("127.0.0.9"),))
    with Observer(network) as observer:
        looked_at: list[int] = []

        def done() -> bool:
            looked_at.append(observer.driver.inspect().unicasts_sent)
            return looked_at[-1] > 0

        observer.run(finder(observer, None), until=time.monotonic() + 10, done=done)
    assert looked_at[0] == 0
    assert looked_at[-1] > 0


def test_what_listens_learns_its_addresses_with_every_scan() -> None:
    class Listening(Finder):
        addresses: tuple[str, ...] = ()

        def readdress(self, addresses: tuple[str, ...], _now: float) -> None:
            self.addresses = addresses

    network = Network(interfaces=("lo",), port=free_udp_port(), advertise="203.0.113.7")
    with Observer(network) as observer:
        machine = finder(observer, None, Listening)
        assert isinstance(machine, Listening)
        observer.driver.drive(machine)
        observer.driver.interfaces.scan_due = 0.0
        observer.driver.turn(time.monotonic())
        assert machine.addresses == (), "nothing listens yet"
        listening, _ = observer.listen()
        observer.driver.interfaces.scan_due = 0.0
        observer.driver.turn(time.monotonic())
    assert machine.addresses == listening == ("203.0.113.7", "127.0.0.1", "::1")


def test_it_stops_at_its_deadline_and_leaves_nothing_open() -> None:
    with Observer(Network(interfaces=("lo",), port=free_udp_port())) as observer:
        started = time.monotonic()
        observer.run(finder(observer, None), until=started + 0.3)
        assert 0.3 <= time.monotonic() - started < 2


def test_a_machine_is_closed_also_when_it_is_interrupted() -> None:
    class Interrupted(Finder):
        closed_with = ""

        def handle_timer(self, now: float) -> None:
            raise KeyboardInterrupt

        def close(self, reason: str = "") -> None:
            self.closed_with = reason

    with Observer(Network(interfaces=("lo",), port=free_udp_port())) as observer:
        machine = Interrupted(
            None,
            member=new_name(),
            who=this_process(),
            secret=None,
            new_id=observer.driver.new_id,
            rng=observer.driver.rng,
            now=time.monotonic(),
        )
        with pytest.raises(KeyboardInterrupt):
            observer.run(machine, until=time.monotonic() + 10)
    assert machine.closed_with == "interrupted"


@pytest.mark.parametrize("farewell", ["said", "fails"])
def test_a_machine_that_fails_is_an_error_with_its_cause(farewell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a riddle")

    with Observer(Network(interfaces=("lo",), port=free_udp_port())) as observer:
        machine = finder(observer, None)
        monkeypatch.setattr(machine, "handle_timer", fail)
        if farewell == "fails":
            monkeypatch.setattr(machine, "close", fail)
        with pytest.raises(MingleError, match="ended by an unforeseen ZeroDivisionError: a riddle") as caught:
            observer.run(machine, until=time.monotonic() + 10)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_the_caller_raises_is_the_callers() -> None:
    def broken_pipe() -> bool:
        raise BrokenPipeError

    with Observer(Network(interfaces=("lo",), port=free_udp_port())) as observer, pytest.raises(BrokenPipeError):
        observer.run(finder(observer, None), until=time.monotonic() + 10, done=broken_pipe)


def test_an_interface_that_is_not_there_is_an_error_and_leaks_nothing() -> None:
    with pytest.raises(InterfaceError, match="nosuch0"):
        Observer(Network(interfaces=("nosuch0",), port=free_udp_port()))


def test_the_advertised_address_comes_first() -> None:
    network = Network(interfaces=("lo",), port=free_udp_port(), advertise="192.0.2.1")
    with Observer(network, "behind NAT") as observer:
        addresses, _ = observer.listen()
    assert addresses[0] == "192.0.2.1"
    assert "127.0.0.1" in addresses
