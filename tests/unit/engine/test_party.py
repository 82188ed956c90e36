"""A party: what its loop must not do, and that nothing of the application reaches it."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mingle
from mingle.engine import store
from mingle.engine.party import INSPECTION_SECONDS, FailedCall, Party
from mingle.errors import MingleError
from mingle.network import inspection
from mingle.protocol.effects import Inspect
from mingle.protocol.events import Inspected
from mingle.wire.frames import Blocked
from tests.support.alarms import alarm_after
from tests.support.failing import raising
from tests.support.in_process import Formed, discovery_of, formed, settings_of
from tests.support.leaks import leak_check
from tests.support.loopback import job_name
from tests.support.ports import free_udp_port

IMPORTS = """
import sys, threading, time

import mingle
import torch.distributed
from concurrent.futures import ThreadPoolExecutor
from mingle.config.values import Peer
from mingle.elastic.gathering import Gathering
from mingle.elastic.quorum import Nodes, Policy
from mingle.engine.discovery import Discovery
from mingle.errors import MingleError
from tests.support.failing import raising
from tests.support.in_process import settings_of

imported = []

class Watch:
    def find_spec(self, name, path, target=None):
        thread = threading.current_thread().name
        if thread.startswith("mingle-"):
            imported.append((thread, name))

sys.meta_path.insert(0, Watch())
PORT = {port}

def run(ranks):
    def one(rank):
        try:
            rank.run()
        except MingleError:
            pass
    with ThreadPoolExecutor() as pool:
        list(pool.map(one, ranks))
    for rank in reversed(ranks):
        rank.close("it is done")

def settings(job, rank, timeout, **more):
    return settings_of(job, rank, 2, PORT, timeout=timeout, **more)

peers = (Peer("localhost", PORT),)
run([Discovery(settings("ranks", rank, 60.0, peers=peers), enters=True) for rank in (0, 1)])
run([Discovery(settings("assigned", None, 60.0, secret=b"a long enough secret")) for _ in range(2)])
for rank in (0, 1, None):
    run([Discovery(settings("alone", rank, 0.3))])
run([Discovery(settings("twice", 0, 2.0)) for _ in range(2)])
run([Discovery(settings("nowhere", 1, 2.0, interfaces=("nosuch0",)))])
agents = [Gathering(settings("agents", None, 60.0), Policy(nodes=Nodes(minimum=2, maximum=2), last_call=0.5))
          for _ in range(2)]
with ThreadPoolExecutor() as pool:
    list(pool.map(Gathering.gather, agents))
for agent in agents:
    agent.close("it is done")
assert imported == [], imported
"""
ROOT = Path(__file__).parents[3]


def test_no_thread_of_a_loop_imports_anything() -> None:
    code = IMPORTS.format(port=free_udp_port())
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="this system has no signal masks")
def test_the_loop_and_its_workers_block_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: dict[str, set[int]] = {}
    prove = store.prove

    def noting(*arguments: Any, **others: Any) -> store.StoreClient:
        masks[threading.current_thread().name] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return prove(*arguments, **others)

    monkeypatch.setattr(store, "prove", noting)
    with formed(2) as ranks:
        masks["loop"] = ranks[0].discovery.ask(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    assert set(masks) == {"loop", "mingle-abandoned-store-proof"}
    for mask in masks.values():
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGALRM} <= mask
        assert signal.SIGSEGV not in mask, "a fault would have no traceback"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@contextlib.contextmanager
def on_alarm(handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_control_c_ends_a_wait_within_a_fifth_of_a_second(rank: int) -> None:
    took, pressed = list[float](), [0.0]

    def press(*_: object) -> None:
        pressed[0] = time.monotonic()
        raise KeyboardInterrupt

    deadline = time.monotonic() + 60
    while sum(each < 0.2 for each in took[-5:]) < 3:  # the machine can be busy with something else
        assert time.monotonic() < deadline, took
        with on_alarm(press), leak_check(), pytest.raises(KeyboardInterrupt), alarm_after(0.3):
            mingle.discover(job_name("stopped"), rank=rank, world_size=2, port=free_udp_port())
        took.append(time.monotonic() - pressed[0])


@pytest.fixture
def ranks() -> Iterator[list[Formed]]:
    with formed(2) as made:
        yield made


def test_end_of_a_blocked_loop_is_waited_for_within_a_bound(
    ranks: list[Formed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingle.engine.party.STOP_SECONDS", 0.1)
    free, started = threading.Event(), time.monotonic()
    ranks[1].discovery.call(lambda: free.wait(120) and None)
    ranks[1].discovery.close("at the exit")
    assert time.monotonic() - started < 60  # its call blocks for longer
    free.set()


def test_a_loop_that_has_ended_fails_a_late_call(ranks: list[Formed]) -> None:
    ranks[1].discovery.close("it is done")
    errors = []
    for _ in range(2):
        with pytest.raises(MingleError, match="its loop has ended in this process") as caught:
            ranks[1].discovery.ask(lambda: None)
        errors.append(caught.value)
    assert errors[0] is not errors[1], "each shows where its own call was made"


# --- signals at random times -----------------------------------------------------------------------------------------


class AlarmError(TimeoutError):
    """What a handler of the application raises: also an OSError, which every error of a socket is."""


STEPS = ("discover", "members", "close")


def interrupted_call(rank: int, armed: str, after: float) -> tuple[str, dict[str, float]]:
    """Make a job of two, read its members and close it; a signal handler raises some seconds after a step's begin.

    With 0 seconds there is no exception. Return the step that the exception ended, empty if none, and the seconds that
    each whole step took.
    """

    def begin(name: str) -> None:
        nonlocal step, began
        now = time.monotonic()
        seconds[step], step, began = now - began, name, now
        if name == armed:
            signal.setitimer(signal.ITIMER_REAL, after)

    job_id, port = job_name("fuzz"), free_udp_port()
    other = discovery_of(settings_of(job_id, 1 - rank, 2, port))
    step, began, seconds = "", time.monotonic(), {}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(other.run)
        try:
            with contextlib.suppress(AlarmError), on_alarm(raising(AlarmError())):
                begin("discover")
                job = mingle.discover(job_id, rank=rank, world_size=2, port=port, discovery_timeout=60)
                try:
                    begin("members")
                    assert len(job.members) == 2
                    begin("close")
                finally:
                    job.close()
                begin("")
        finally:
            other.close("the round is over")
            running.exception(30)
            mingle.discover(job_name("next"), rank=0, world_size=1).close()  # ends what an interrupted close has left
    return step, seconds


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file, between `open` and `with`
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("rounds", [12, pytest.param(120, marks=pytest.mark.slow)])
def test_signal_handlers_exception_at_any_time_reaches_the_caller_without_a_leak(rank: int, rounds: int) -> None:
    rng, ended = random.Random(rank), set[str]()
    wanted = {"discover"} if rounds < 100 else set(STEPS)
    step, seconds = interrupted_call(rank, "discover", 0.0)
    assert step == ""
    for number in range(10 * rounds):
        if number >= rounds and ended >= wanted:
            break
        armed = STEPS[number % len(STEPS)]
        with leak_check():
            # Each step is aimed at by itself and over its own length: a close is over in a hundredth of a call.
            step, whole = interrupted_call(rank, armed, rng.uniform(0.0001, 0.0002 + seconds[armed]))
        ended.add(step)
        seconds |= whole
    assert ended >= wanted


class Served(Party):
    """A party whose calls are run at once, by whoever makes them."""

    def call(self, function: Callable[[], None], failed: FailedCall | None = None) -> None:
        function()


def test_this_machine_is_looked_at_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host names the peers, and without a secret any process on the network can be one."""
    blocked, told, times = Blocked(address="10.0.0.2", chain="inet a b"), list[Inspected](), [100.0]
    monkeypatch.setattr(inspection, "blocked_connection", lambda *_: blocked)
    party = Served(settings_of("job", 0, 2, 1), clock=lambda: times[-1])
    party.driver = SimpleNamespace(tell=told.append)  # type: ignore[assignment]
    for number, seconds in enumerate((0.0, INSPECTION_SECONDS / 2, INSPECTION_SECONDS)):
        times.append(100.0 + seconds)
        party.inspect(Inspect(number, "eth0", "10.0.0.1", 4000, ()))
    assert told == [Inspected(0, blocked), Inspected(1, None), Inspected(2, blocked)]
