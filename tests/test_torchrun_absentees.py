from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mingle.elastic import absentees as agent_absentees
from mingle.elastic import settings as agent_settings
from mingle.elastic.rounds import Rounds

from .fixed_gathering import FixedGathering, Place


@pytest.fixture(autouse=True)
def _no_store_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the handler sets it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Rounds, FixedGathering]]]:
    """Two agents in one round, the first of which hosts; heartbeats would run out after 15 s."""
    monkeypatch.setattr(agent_absentees, "LOOK_SECONDS", 0.1)
    place = Place()
    wanted = agent_settings.resolve(
        {}, run_id="absent", endpoint="", minimum=1, maximum=2, config={"last_call_timeout": "1"}
    )
    gatherings = [FixedGathering(place) for _ in range(2)]
    made = [(Rounds(wanted, each, each.gather()), each) for each in gatherings]  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        assert [each.size for each in pool.map(lambda pair: pair[0].next(), made)] == [2, 2]
    yield made
    for rounds, _ in made:
        rounds.end()
    place.close()


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def waiting(rounds: Rounds) -> int:
    assert rounds.watch is not None
    return rounds.watch.waiting


def test_a_node_that_the_gathering_lost_is_not_waited_for(pair: list[tuple[Rounds, FixedGathering]]) -> None:
    (host, gathering), (other, lost) = pair
    gathering.absent.add(lost.member)
    until(lambda: waiting(host) == 1, 5)
    assert host.next().size == 1
    # It was alive after all: it sees that the others have gone on, and joins them.
    until(lambda: waiting(other) == 1, 5)


def test_who_is_missing_for_a_moment_is_not_lost(
    pair: list[tuple[Rounds, FixedGathering]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (host, gathering), (_, other) = pair
    absentees = host._absentees
    assert absentees is not None
    for _ in range(3):
        before = absentees._missed.total()
        gathering.absent.add(other.member)
        until(lambda before=before: absentees._missed.total() > before, 5)  # type: ignore[misc]
        gathering.absent.clear()
        until(lambda: absentees._missed.total() == 0, 5)
    assert len(absentees._holder.state.participants) == 2
    assert waiting(host) == 0


def test_only_the_host_looks(pair: list[tuple[Rounds, FixedGathering]]) -> None:
    assert pair[0][0]._absentees is not None
    assert pair[1][0]._absentees is None


def test_while_nobody_knows_who_is_there_nobody_is_lost(
    pair: list[tuple[Rounds, FixedGathering]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (host, gathering), _ = pair
    gathering._hosts = False
    threading.Event().wait(1)
    assert waiting(host) == 0


def test_the_end_of_the_store_is_the_end_of_the_looking(pair: list[tuple[Rounds, FixedGathering]]) -> None:
    (_, gathering), _ = pair
    gathering._place.close()
    until(lambda: not [thread for thread in threading.enumerate() if "absentees" in thread.name], 5)
