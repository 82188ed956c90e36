"""The loop of those who are no rank, with its sockets, on `lo`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from mingle.config import placement
from mingle.config.settings import Network
from mingle.config.values import Peer
from mingle.errors import DiscoveryTimeoutError, InterfaceError, MingleError
from mingle.network.folders import Folders, digest, storages
from mingle.observe.finder import Finder
from mingle.observe.lookup import find_job, list_jobs
from mingle.observe.observer import Observer
from mingle.protocol.events import Event
from mingle.wire import datagrams
from mingle.wire.datagrams import Offer, Seek
from tests.support.bystanders import finder_of, gathering
from tests.support.loopback import longer, until
from tests.support.ports import free_udp_port


@pytest.fixture
def network() -> Network:
    return Network(interfaces=("lo",), port=free_udp_port(), discovery_timeout=60)


@pytest.mark.parametrize(("job", "peers"), [("observed", ()), (None, ()), ("observed", ("127.0.0.1",))])
def test_a_job_is_found(job: str | None, peers: tuple[str, ...]) -> None:
    port = free_udp_port()
    network = Network(interfaces=("lo",), port=port, peers=tuple(map(Peer, peers)))
    with gathering("observed", port, (0,), world_size=1), Observer(network, job) as looking:
        found = finder_of(looking, job)
        looking.run(found, until=time.monotonic() + 30, done=lambda: bool(found.alive))
        assert [str(each.target()) for each in found.alive] == ["127.0.0.1:29500"]
        facts = looking.driver.evidence.facts()
    assert facts.port == port
    assert facts.sent > 0
    assert facts.received > 0
    assert facts.interfaces[0].startswith("lo 127.0.0.1/8")


def test_unicasts_to_named_hosts_are_counted(network: Network) -> None:
    network = replace(network, peers=(Peer("127.0.0.9"),))
    with Observer(network) as observer:
        looked_at: list[int] = []

        def done() -> bool:
            looked_at.append(observer.driver.evidence.inspect().unicasts_sent)
            return looked_at[-1] > 0

        observer.run(finder_of(observer), until=time.monotonic() + 30, done=done)
    assert looked_at[0] == 0
    assert looked_at[-1] > 0


def test_observer_stops_at_its_deadline_and_leaves_nothing_open(network: Network) -> None:
    with Observer(network) as observer:
        started = time.monotonic()
        observer.run(finder_of(observer), until=started + 0.3)
        assert 0.3 <= time.monotonic() - started < 50


def test_a_machine_is_closed_also_when_it_is_interrupted(network: Network) -> None:
    class Interrupted(Finder):
        closed_with = ""

        def handle(self, event: Event, now: float) -> None:
            raise KeyboardInterrupt

        def close(self, reason: str = "") -> None:
            self.closed_with = reason

    with Observer(network) as observer:
        machine = finder_of(observer, kind=Interrupted)
        with pytest.raises(KeyboardInterrupt):
            observer.run(machine, until=time.monotonic() + 30)
    assert isinstance(machine, Interrupted)
    assert machine.closed_with == "interrupted"


@pytest.mark.parametrize("farewell", ["said", "fails"])
def test_a_machine_that_fails_is_an_error_with_its_cause(
    network: Network, farewell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a riddle")

    with Observer(network) as observer:
        machine = finder_of(observer)
        monkeypatch.setattr(machine, "handle", fail)
        if farewell == "fails":
            monkeypatch.setattr(machine, "close", fail)
        with pytest.raises(MingleError, match="ended by an unforeseen ZeroDivisionError: a riddle") as caught:
            observer.run(machine, until=time.monotonic() + 30)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_exception_of_the_callback_reaches_the_caller(network: Network) -> None:
    def broken_pipe() -> bool:
        raise BrokenPipeError

    with Observer(network) as observer, pytest.raises(BrokenPipeError):
        observer.run(finder_of(observer), until=time.monotonic() + 30, done=broken_pipe)


def test_an_interface_that_is_not_there_is_an_error_and_leaks_nothing() -> None:
    with pytest.raises(InterfaceError, match="nosuch0"):
        Observer(Network(interfaces=("nosuch0",), port=free_udp_port()))


# --- shared folders -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shown(folder: Path, job: str, *messages: Seek | Offer) -> Iterator[None]:
    """Have processes of a job show these messages in a directory."""
    with contextlib.ExitStack() as stack:
        for message in messages:
            opened = storages([f"dir:{folder}"], job)
            each = Folders(opened, node=placement.this_node(), call=lambda _: None, found=lambda *_: None)
            stack.callback(each.close)
            each.show(message, datagrams.encode)
        until(lambda: len(list((folder / digest(job)[:32]).glob("[hs]-*"))) == len(messages))
        yield


def test_all_jobs_of_a_shared_directory_are_listed(network: Network, tmp_path: Path) -> None:
    port = free_udp_port()
    seek = Seek(job="other", member=b"s" * 16, world_size=2, rank=1, hostname="node1")
    with gathering("listed", port, (0,), world_size=1) as host, shown(tmp_path, "other", seek):
        assert host is not None
        with shown(tmp_path, "listed", host.offer()):
            # Another port: no datagram of the job arrives.
            network = replace(network, folders=(f"dir:{tmp_path}",))
            finder = longer(
                lambda seconds: list_jobs(replace(network, discovery_timeout=seconds))[0],
                lambda finder: finder.alive and finder.seekers,
            )
    assert [each.offer.job for each in finder.alive] == ["listed"]
    (seeker,) = finder.seekers.values()
    assert (seeker.seek, seeker.address, seeker.in_folder) == (seek, f"dir:{tmp_path}", True)


def test_a_job_is_found_through_a_shared_directory(network: Network, tmp_path: Path) -> None:
    with gathering("found", free_udp_port(), (0,), world_size=1) as host:
        assert host is not None
        with shown(tmp_path, "found", host.offer()):
            session, _ = find_job("found", replace(network, folders=(f"dir:{tmp_path}",)))
    assert str(session.target()) == "127.0.0.1:29500"


def test_a_rank_that_was_found_in_a_shared_directory_does_not_prove_multicast(network: Network, tmp_path: Path) -> None:
    seek = Seek(job="hostless", member=b"s" * 16, world_size=2, rank=1, hostname="node1", pid=7)
    network = replace(network, folders=(f"dir:{tmp_path}",))

    def look(seconds: float) -> str:
        with pytest.raises(DiscoveryTimeoutError) as raised:
            find_job("hostless", replace(network, discovery_timeout=seconds))
        return str(raised.value)

    with shown(tmp_path, "hostless", seek):
        text = longer(look, lambda text: "looking for it" in text)
    assert f"looking for it: rank 1 on host node1 (in dir:{tmp_path}), pid 7" in text
    assert "likely cause: ranks look for it; its rank 0 was not started" in text


def test_a_list_names_a_shared_directory_that_fails(network: Network, tmp_path: Path) -> None:
    missing = f"dir:{tmp_path}/missing"
    network = replace(network, folders=(missing,))
    facts = longer(
        lambda seconds: list_jobs(replace(network, discovery_timeout=seconds))[1], lambda facts: facts.failures
    )
    assert f"{missing} does not exist" in facts.failures
