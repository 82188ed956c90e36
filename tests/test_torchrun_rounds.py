from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from mingle.abandonable import AbandonedError
from mingle.elastic import rounds as agent_rounds
from mingle.elastic import settings as agent_settings
from mingle.elastic.c10d_backend import BACKEND
from mingle.elastic.rounds import Rounds, Watch, first_line

from .fixed_gathering import FixedGathering, Place


@pytest.fixture(autouse=True)
def _no_store_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the handler sets it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


@pytest.fixture
def rounds(place: Place) -> Iterator[Rounds]:
    made = make(place, last_call_timeout="1")
    yield made
    made.end()


def make(place: Place, **config: str) -> Rounds:
    wanted = agent_settings.resolve({}, run_id="rounds", endpoint="", minimum=1, maximum=2, config=config)
    gathering = FixedGathering(place)
    return Rounds(wanted, gathering, gathering.gather())  # type: ignore[arg-type]


def test_the_backend_has_the_name_that_torch_compares(rounds: Rounds) -> None:
    rounds.next()
    inner = rounds._inner
    assert inner is not None
    assert inner.get_backend() == BACKEND == "mingle"


def test_torch_is_told_its_own_settings_and_our_address(place: Place) -> None:
    made = make(place, last_call_timeout="1", join_timeout="7", keep_alive_interval="3", keep_alive_max_attempt="4")
    made.next()
    inner = made._inner
    assert inner is not None
    told = inner.settings
    assert (told.run_id, told.min_nodes, told.max_nodes) == ("rounds", 1, 2)
    assert (told.timeout.join.seconds, told.timeout.last_call.seconds, told.timeout.close.seconds) == (7, 1, 30)
    if "keep_alive_interval" in inspect.signature(DynamicRendezvousHandler.from_backend).parameters:
        assert (told.keep_alive_interval.seconds, told.keep_alive_max_attempt) == (3, 4)
    else:  # torch 2.6 to 2.8 have them fixed
        assert (told.keep_alive_interval.seconds, told.keep_alive_max_attempt) == (5, 3)
    assert inner._this_node.addr == "127.0.0.1"
    made.end()


def test_a_round_that_loses_its_rank_zero_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(place, last_call_timeout="1")
    real, failures = made._join, [RuntimeError("wait timeout\nC++ frames"), None]

    def join(inner: Any) -> Any:
        failure = failures.pop(0)
        if failure is not None:
            raise failure
        return real(inner)

    monkeypatch.setattr(made, "_join", join)
    assert made.next().size == 1
    assert "joining the next one: wait timeout" in caplog.text
    made.end()


def test_a_round_that_breaks_again_and_again_is_an_error(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def join(inner: Any) -> Any:
        attempts.append(1)
        raise RuntimeError("wait timeout")

    monkeypatch.setattr(rounds, "_join", join)
    with pytest.raises(RuntimeError, match="wait timeout"):
        rounds.next()
    assert len(attempts) == agent_rounds.BROKEN_ROUNDS


def test_who_was_left_out_of_a_later_round_joins_the_next(rounds: Rounds) -> None:
    completed = rounds.next()
    inner = rounds._inner
    assert inner is not None
    assert rounds._look(inner, completed) == 0
    inner._state_holder.state.round += 1
    assert rounds._look(inner, completed) == 1


def test_an_abandoned_rendezvous_is_not_entered(place: Place) -> None:
    made = make(place)
    made.abandon()
    with pytest.raises(AbandonedError):
        made.next()


def test_an_abandoned_rendezvous_sends_no_more_heartbeats(place: Place) -> None:
    made = make(place, last_call_timeout="1", keep_alive_interval="1")
    made.next()
    inner = made._inner
    assert inner is not None
    timer: Any = inner._keep_alive_timer
    made.abandon()
    timer._thread.join(10)
    assert not timer._thread.is_alive()
    with pytest.raises(RendezvousConnectionError):
        inner.set_closed()


def test_a_watch_looks_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_rounds, "LOOK_SECONDS", 0.01)
    looked = threading.Event()

    def look() -> int:
        looked.set()
        return 3

    watch = Watch(look)
    assert looked.wait(5)
    watch.stop()
    looked.clear()
    assert watch.waiting == 3
    assert watch.failing_since is None
    assert not looked.wait(0.1)


@pytest.mark.parametrize("failure", [RendezvousConnectionError("gone"), KeyError("a state that nobody foresaw")])
def test_a_watch_keeps_the_time_of_the_first_failure_in_a_row(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_rounds, "LOOK_SECONDS", 0.01)
    failing, looks = threading.Event(), threading.Semaphore(0)
    failing.set()

    def look() -> int:
        looks.release()
        if failing.is_set():
            raise failure
        return 0

    started = time.monotonic()
    watch = Watch(look)
    for _ in range(3):
        assert looks.acquire(timeout=5)
    since = watch.failing_since
    assert since is not None
    assert since >= started
    assert watch.error is failure
    failing.clear()
    for _ in range(3):
        assert looks.acquire(timeout=5)
    watch.stop()
    assert watch.failing_since is None


def test_the_first_line_of_an_error() -> None:
    assert first_line(RuntimeError("broken pipe\nframe #0")) == "broken pipe"
    assert first_line(RuntimeError()) == "RuntimeError"
