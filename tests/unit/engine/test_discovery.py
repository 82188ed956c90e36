"""A rank's loop with its real sockets, on `lo`: it forms, it ends in time, and it leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from mingle import records
from mingle.config import values
from mingle.engine import driver, progress, store, udp_endpoint
from mingle.engine.discovery import Discovery
from mingle.engine.store import StoreServer
from mingle.errors import DiscoveryTimeoutError, MingleError
from mingle.network.local_relay import LocalRelay
from mingle.network.transport import Change
from mingle.protocol.effects import CloseStore
from mingle.protocol.events import Heard, Source
from mingle.protocol.host import Host
from mingle.protocol.machine import Formation
from mingle.protocol.node import Node
from mingle.protocol.session import registrar
from mingle.protocol.session.phases import Sealing
from mingle.wire import datagrams
from tests.support.alarms import alarm_is_passed_on
from tests.support.failing import no_descriptor_left, raising
from tests.support.in_process import Formed, discovery_of, formed, opened, settings_of
from tests.support.leaks import leak_check
from tests.support.loopback import answers, job_name, until
from tests.support.noting_driver import fail
from tests.support.ports import free_tcp_port, free_udp_port


def alone(rank: int | None, **more: Any) -> Discovery:
    """A rank of a job of two whose other rank never comes."""
    return discovery_of(settings_of(job_name("alone"), rank, 2, free_udp_port(), **more))  # type: ignore[arg-type]


def pair(**more: Any) -> list[Discovery]:
    job_id, port = job_name("pair"), free_udp_port()
    return [discovery_of(settings_of(job_id, rank, 2, port, **more)) for rank in range(2)]


def outcomes(ranks: list[Discovery]) -> list[Formation | MingleError]:
    """Run all of them at once; what they return or raise."""

    def run(rank: Discovery) -> Formation | MingleError:
        try:
            return rank.run()
        except MingleError as error:
            return error
        finally:
            rank.close("the test is over")

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def failure_of(ranks: list[Discovery], number: int) -> tuple[BaseException | None, BaseException | None]:
    """Run a pair until one of the two fails, and close both; its error, and the error of the other."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        running = [pool.submit(rank.run) for rank in ranks]
        try:
            first = running[number].exception(60)
        finally:
            for rank in ranks:
                rank.close("the test is over")
        return first, running[1 - number].exception(60)


@pytest.fixture
def ranks() -> Iterator[list[Formed]]:
    with formed(2) as ranks:
        yield ranks


@pytest.fixture
def server(ranks: list[Formed]) -> StoreServer:
    """The store of those ranks."""
    server = ranks[0].discovery.stores.server
    assert server is not None
    return server


# --- forming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, b"s3cret"])
def test_ranks_form_and_hold_one_store(secret: bytes | None) -> None:
    with formed(3, secret=secret) as ranks:
        found = [formation for _, formation in ranks]
        assert [each.place.rank for each in found] == [0, 1, 2]
        assert len({(each.session, each.store_address, each.store_port, each.roster_digest) for each in found}) == 1
        assert {(each.address, each.interface, each.place.local_world_size) for each in found} == {
            ("127.0.0.1", "lo", 3)
        }
        server = ranks[0].discovery.stores.server
        assert server is not None
        assert (server.address, server.port, server.held) == ("127.0.0.1", found[0].store_port, True)
        store.prove(server.address, server.port, found[0].session, server.token)
    assert not server.held
    until(lambda: not answers(server.port))


def test_the_store_is_on_the_fixed_port_and_a_member_that_has_formed_takes_no_calls_any_more() -> None:
    port = free_tcp_port()
    with formed(2, master_port=port, mesh="on") as ranks:
        assert {formation.store_port for _, formation in ranks} == {port}
        assert not ranks[1].discovery.driver.connections.is_listening


def test_a_member_that_has_formed_hears_no_datagrams_any_more(ranks: list[Formed]) -> None:
    host, member = (discovery for discovery, _ in ranks)
    until(lambda: member.driver.udp.transport is None)
    assert host.driver.udp.transport is not None
    assert member.driver.evidence.facts().sent == 0
    assert host.driver.evidence.facts().sent > 0


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "step"), [(driver, "Connections"), (udp_endpoint, "LocalRelay"), (udp_endpoint, "Peers")]
)
def test_sockets_are_closed_when_an_opening_fails(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str
) -> None:
    monkeypatch.setattr(module, step, fail)
    with pytest.raises(MingleError, match="a riddle"):
        alone(0).run()


@pytest.mark.parametrize("rank", [0, 1, None])
def test_time_runs_out(rank: int | None) -> None:
    waiting = alone(rank, timeout=0.3)
    started = time.monotonic()
    with pytest.raises(DiscoveryTimeoutError) as caught:
        waiting.run()
    assert 0.2 < time.monotonic() - started < 60  # not five minutes
    assert f"UDP port {waiting.settings.port}" in str(caught.value)
    assert "lo 127.0.0.1/8" in str(caught.value)
    assert caught.value.__cause__ is None
    waiting.close("a second time")


def test_a_proof_of_the_store_that_blocks_holds_nobody_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(store, "prove", lambda *_, **__: release.wait(300))
    started = time.monotonic()
    results = outcomes(pair(timeout=1.0))
    assert time.monotonic() - started < 120  # the proof blocks for longer
    assert all(isinstance(each, DiscoveryTimeoutError) for each in results)
    release.set()
    until(lambda: not [each for each in threading.enumerate() if each.name == "mingle-abandoned-store-proof"])


def test_a_store_that_is_not_reached_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prove, failures = store.prove, [ConnectionRefusedError(111, "Connection refused")]

    def refused_at_first(*arguments: Any, **others: Any) -> store.StoreClient:
        if failures:
            raise failures.pop()
        return prove(*arguments, **others)

    monkeypatch.setattr(store, "prove", refused_at_first)
    assert [each.place.rank for each in outcomes(pair()) if isinstance(each, Formation)] == [0, 1]
    assert not failures


# --- interrupted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("farewell", ["said", "fails"])
@pytest.mark.parametrize("rank", [0, 1, None])
def test_an_unforeseen_exception_while_waiting_is_an_error_with_its_cause(
    rank: int | None, farewell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = alone(rank)
    if farewell == "fails":
        monkeypatch.setattr(Node, "close", fail)
    waiting.call(fail)
    with leak_check(), pytest.raises(MingleError, match="ended by an unforeseen ZeroDivisionError: a r") as caught:
        waiting.run()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert waiting.driver.udp.transport is None
    waiting.close("a second time")


def test_signal_handlers_exception_while_sockets_open_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = udp_endpoint.LocalRelay

    def slow(*arguments: Any) -> LocalRelay:
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.1)
        return relay(*arguments)

    monkeypatch.setattr(udp_endpoint, "LocalRelay", slow)
    with alarm_is_passed_on():
        alone(1).run()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_serving_thread_that_dies_closes_store_and_sockets_and_tells_who_waits(
    rank: int, ranks: list[Formed], server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    discovery = ranks[rank].discovery
    client = socket.create_connection((server.address, server.port))
    told: list[MingleError] = []

    def fail_in_between() -> None:
        discovery.call(lambda: told.append(MingleError("it was run")), told.append)  # too late: it waits
        fail()

    discovery.call(fail_in_between)
    until(lambda: told)
    discovery.call(lambda: told.append(MingleError("it was run")), told.append)
    assert len(told) == 2
    for error in told:
        assert "ended by an unforeseen ZeroDivisionError: a riddle" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)
    assert str(discovery.failure) == str(told[0])
    with client:
        client.settimeout(30)
        if rank == 0:
            with contextlib.suppress(ConnectionResetError):  # torch had not accepted it yet
                assert client.recv(1) == b"", "who uses the store fails now, and not at torch's timeout"
            assert not server.held
        else:
            until(lambda: not server.held)  # a member is lost: the other ranks fail now
    until(lambda: [record for record in caplog.records if "riddle" in record.message])  # it is said last
    (record,) = [record for record in caplog.records if "riddle" in record.message]
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    assert discovery.driver.udp.transport is None


def test_a_member_whose_thread_dies_cuts_its_own_connections_to_the_store(
    ranks: list[Formed], server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar, "RETURN_SECONDS", 60.0)  # until then rank 0 keeps the store open
    with socket.create_connection((server.address, server.port)) as client:
        client.settimeout(30)
        ranks[1].discovery.call(fail)
        assert client.recv(1) == b"", "a call that waits there fails now, and not at torch's timeout"
        assert server.held


@pytest.mark.parametrize("rank", [0, 1])
def test_connections_of_a_process_group_outlive_the_loop(rank: int, ranks: list[Formed], server: StoreServer) -> None:
    """The job trains: its store is torch's, and nobody waits for mingle."""
    discovery, held = ranks[rank].discovery, server.handle
    with socket.create_connection((server.address, server.port)) as client:
        if rank == 0:
            server.release()
        else:
            discovery.group_stands = True
        discovery.call(fail)
        until(lambda: discovery.failure is not None and discovery.driver.udp.transport is None)
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    assert held is not None


def test_connection_to_another_store_serves_no_process_group() -> None:
    other = store.open_server("127.0.0.1", None, b"S" * 16)
    with formed(2, enters=True) as ranks:
        ranks[1].discovery.stores.client = store.connect(other.address, other.port)
        assert ranks[1].discovery.take_client() is None
    other.release()


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("open_server", RuntimeError("libuv is not here"), "torch could not open its store at 127.0.0.1: libuv is not"),
        ("open_server", ZeroDivisionError("a riddle"), "an unforeseen ZeroDivisionError: a riddle"),
        ("prove", ZeroDivisionError("a riddle"), "an unforeseen ZeroDivisionError: a riddle"),
    ],
)
def test_error_in_a_worker_thread_ends_the_discovery(
    monkeypatch: pytest.MonkeyPatch, step: str, error: Exception, words: str
) -> None:
    monkeypatch.setattr(store, step, raising(error))
    failed, other = failure_of(pair(), 0 if step == "open_server" else 1)
    assert words in str(failed)
    assert isinstance(other, MingleError)
    assert failed is not None
    assert failed.__cause__ is (error if "unforeseen" in words else None)


def test_errors_reach_stderr_where_logging_is_not_configured(
    ranks: list[Formed], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "handlers", lambda *_: iter(()))
    discovery = ranks[0].discovery
    monkeypatch.setattr(discovery, "_quiet", False)
    discovery.say(logging.ERROR, "the thread has failed", ZeroDivisionError("a riddle"))
    assert capfd.readouterr().err == "mingle: the thread has failed\nZeroDivisionError: a riddle\n"
    discovery.ask(lambda: discovery._perform(CloseStore("rank 1 was lost")))
    shown = ""

    def is_shown() -> bool:  # what the loop says is written by a thread of its own
        nonlocal shown
        shown += capfd.readouterr().err
        return "\n" in shown

    until(is_shown)
    assert shown.startswith("mingle: rank 1 was lost; its store is closed")


def test_a_host_whose_job_runs_renews_its_memberships(ranks: list[Formed], monkeypatch: pytest.MonkeyPatch) -> None:
    driver, renewed = ranks[0].discovery.driver, threading.Event()
    assert driver.udp.transport is not None
    monkeypatch.setattr(driver.udp.transport, "refresh", lambda: renewed.set() or Change([], []))
    ranks[0].discovery.call(lambda: driver.udp.handle_timer(driver.udp.next_timer() or 0.0))
    assert renewed.wait(30)


# --- going on -------------------------------------------------------------------------------------------------------


def test_calls_run_in_order_in_the_loop_and_the_watch_as_often_as_it_wants(
    ranks: list[Formed],
) -> None:
    discovery, ran, watched = ranks[0].discovery, list[tuple[int, str]](), list[float]()

    def note(number: int) -> Callable[[], None]:
        return lambda: ran.append((number, threading.current_thread().name))

    def watch() -> float:
        note(-1)()
        watched.append(time.monotonic())
        return 0.05 if len(watched) < 4 else 60.0

    discovery.watch = watch
    until(lambda: len(watched) == 4)
    assert watched[3] - watched[0] >= 0.1  # of 0.15: the first wait counts from before the call
    for number in range(200):
        discovery.call(note(number))
    until(lambda: len(ran) == 204)  # it is woken, and does not wait for a timer
    assert ran == [(number, "mingle-rank") for number in (-1, -1, -1, -1, *range(200))]


def test_closing_says_good_bye_and_is_done_once(ranks: list[Formed]) -> None:
    host, member = (discovery for discovery, _ in ranks)
    for _ in range(2):
        host.close("its job was closed")
    membership = member.membership
    assert membership is not None
    until(lambda: not membership.connected)
    assert host.driver.udp.transport is None
    host.call(lambda: None)  # from a thread that does not know yet


def test_closing_from_its_own_thread_does_not_wait_for_itself(ranks: list[Formed]) -> None:
    host = ranks[0].discovery
    host.call(lambda: host.close("from within"))
    until(lambda: host.driver.udp.transport is None)
    assert host.failure is None


class SlowOpening:
    """The opening of a store that goes on when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.ports: list[int] = []
        self._open = store.open_server
        monkeypatch.setattr(store, "open_server", self)

    def __call__(self, *arguments: Any) -> StoreServer:
        self.begun.set()
        assert self.go_on.wait(60)
        server = self._open(*arguments)
        self.ports.append(server.port)
        return server


def test_a_store_that_was_opened_too_late_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = SlowOpening(monkeypatch)
    for timeout in (1.0, 4.0, 16.0):  # on a busy machine a pair may not meet within the first
        assert [type(each) for each in outcomes(pair(timeout=timeout))] == [DiscoveryTimeoutError] * 2
        if opening.begun.is_set():
            break
    opening.go_on.set()
    until(lambda: opening.ports)
    until(lambda: gc.collect() >= 0 and not answers(opening.ports[0]))


def test_a_seal_that_is_called_off_while_its_store_is_opened_leaves_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, fixed = SlowOpening(monkeypatch), free_tcp_port()
    job_id, port = job_name("again"), free_udp_port()
    host, first, second = (
        discovery_of(settings_of(job_id, rank, 2, port, timeout=60.0, master_port=fixed)) for rank in (0, 1, 1)
    )
    with ThreadPoolExecutor(3) as pool:
        hosting, leaving = pool.submit(host.run), pool.submit(first.run)
        assert opening.begun.wait(30)
        first.close("interrupted")
        with pytest.raises(MingleError, match="its loop has ended"):
            leaving.result(30)
        joining = pool.submit(second.run)
        machine = host.host
        assert isinstance(machine, Host)
        until(lambda: (machine.registrar.state.epoch, type(machine.registrar.state)) == (2, Sealing))
        opening.go_on.set()
        assert hosting.result(30).store_port == joining.result(30).store_port == fixed
    server = host.stores.server
    assert server is not None
    store.prove(server.address, fixed, server.session, server.token)
    for each in (second, host):
        each.close("the test is over")


# --- the network changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_rank_without_a_descriptor_waits_on(
    rank: int | None, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that opens something comes due: the look at the interfaces, the progress line, a caller, a call."""
    for name in ("TERMINAL_AFTER_SECONDS", "LOG_AFTER_SECONDS", "TERMINAL_EVERY_SECONDS", "LOG_EVERY_SECONDS"):
        monkeypatch.setattr(progress, name, 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    waiting = opened(alone(rank, progress="auto"))
    driver, job = waiting.driver, waiting.settings.job_id
    shown = progress.Progress(job, off=False, now=time.monotonic())
    own = [each.address for each in driver.control_port.addresses]
    offer = datagrams.Offer(
        job=job, session=b"S" * 16, host=b"\0" * 16, addresses=("127.0.0.1",), port=9, world_size=2, state="sealed"
    )

    def fall_due() -> None:
        driver.interfaces.scan_due = 0.0
        driver.evidence.look(math.inf)
        driver.udp.handle_timer(time.monotonic() + udp_endpoint.REFRESH_SECONDS)
        driver.tell(Heard(offer, Source(interface="lo", address="127.0.0.1")))

    with contextlib.ExitStack() as stack:
        stack.callback(waiting.close, "the test is over")
        stack.callback(shown.close)
        callers = [stack.enter_context(socket.socket())] if driver.connections.port else []
        with no_descriptor_left():
            for caller in callers:
                caller.connect((own[0], driver.connections.port))
            for _ in range(5):
                waiting.ask(fall_due)
                waiting.show(shown)
            facts = waiting.facts()
            until(lambda: driver.connections.starved or not callers)
        assert facts.sent > 0
        assert [each.address for each in driver.control_port.addresses] == own
        until(lambda: not driver.connections.starved)
        for caller in callers:
            caller.settimeout(30)
            assert rank is None or caller.recv(4) == datagrams.MAGIC, "it waited, and is taken now"


@pytest.mark.parametrize("free", [0, 1, 2, 4, 6, 8, 10, 24])
@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_rank_that_starts_without_enough_descriptors_says_why(rank: int | None, free: int) -> None:
    """Each step of the start fails in its turn; what was opened before is closed."""
    waiting, error = alone(rank), None
    with contextlib.ExitStack() as stack:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in taken[free:]:
            stack.callback(os.close, descriptor)
        for descriptor in taken[:free]:
            os.close(descriptor)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(waiting.run)
            try:
                waiting.ask(lambda: None)
            except MingleError:
                error = running.exception()
            waiting.close("the test is over")
    assert error is None or isinstance(error, MingleError)
    # A bare OSError would name neither the cause nor the fix.
    assert error is None if free == 24 else error is None or "ulimit -n" in (error.remedy or "")
    assert free > 4 or error is not None


def test_a_rank_warns_of_a_short_secret(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(values, "_remarks", {})
    opened(alone(1, secret=b"short", progress="auto")).close("the test is over")
    assert "the secret has fewer than 16 characters" in caplog.text
