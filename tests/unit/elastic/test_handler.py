"""The handler against a gathering without a network: all agents are threads of this process."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from mingle.distributed import gloo
from mingle.elastic import handler as agent_handler
from mingle.elastic import round_store, worker_store
from mingle.elastic import settings as agent_settings
from mingle.elastic.handler import NEVER, MingleRendezvousHandler, first_line
from mingle.errors import ConfigurationError, DiscoveryTimeoutError, MingleError
from mingle.protocol.machine import Formation
from mingle.wire.frames import Begin
from tests.support.fixed_gathering import FixedGathering, Place

SECONDS = 30


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    for handler in made.handlers:
        handler.shutdown()
    made.close()


def make(
    place: Place, minimum: int = 2, maximum: int = 2, **given: Any
) -> tuple[MingleRendezvousHandler, FixedGathering]:
    """Make one of MIN to MAX agents; a round of fewer than MAX waits a second for the others."""
    wanted = agent_settings.resolve(
        {"MINGLE_PROGRESS": "off"},
        run_id="handled",
        endpoint="",
        minimum=minimum,
        maximum=maximum,
        config={"last_call_timeout": "1", **given.pop("config", {})},
        **given,
    )
    gathering = FixedGathering(place, wanted)
    handler = MingleRendezvousHandler(wanted, gathering)  # type: ignore[arg-type]
    place.handlers.append(handler)
    return handler, gathering


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def together(pool: ThreadPoolExecutor, handlers: list[MingleRendezvousHandler]) -> list[RendezvousInfo]:
    futures = [pool.submit(handler.next_rendezvous) for handler in handlers]
    return [future.result(SECONDS) for future in futures]


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def bootstrap(info: RendezvousInfo) -> tuple[str, int]:
    place = info.bootstrap_store_info
    assert place is not None
    return place.master_addr, place.master_port


def test_two_agents_meet_and_part(place: Place, pool: ThreadPoolExecutor) -> None:
    (first, _), (second, gathering) = make(place), make(place)
    infos = together(pool, [first, second])
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    assert bootstrap(infos[0]) == bootstrap(infos[1])
    address, port = bootstrap(infos[0])
    assert address == "127.0.0.1"
    # Its server is there already, in an agent: workers are clients.
    assert first.use_agent_store
    TCPStore(address, port, is_master=False, wait_for_workers=False).set("a worker", "was here")
    assert (first.get_backend(), first.get_run_id()) == ("mingle", "handled")
    assert [handler.num_nodes_waiting() for handler in (first, second)] == [0, 0]
    assert not first.is_closed()
    assert first.shutdown()
    assert second.is_closed()
    with pytest.raises(RendezvousClosedError, match="'handled' has been closed by one of its agents"):
        second.next_rendezvous()
    assert second.shutdown()
    assert gathering.closed == "closed"


def test_each_round_has_a_store_of_its_own(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers = [make(place)[0] for _ in range(2)]
    first = bootstrap(together(pool, handlers)[0])
    TCPStore(*first, is_master=False, wait_for_workers=False).set("key", "of the first round")
    second = bootstrap(together(pool, handlers)[0])
    assert not TCPStore(*second, is_master=False, wait_for_workers=False).check(["key"])


def test_the_workers_are_told_their_round_and_a_later_one_sorts_after_it(place: Place) -> None:
    """A node that was left out of a round of the same session can still have workers of the last one."""
    handler, gathering = make(place, 1, 1)
    told = []
    for session in range(2):
        for number in range(2):
            handler.next_rendezvous()
            told.append(os.environ["MINGLE_GENERATION"])
            assert told[-1].startswith(f"{session:010d}-{number:06d}-")
        place.lose()
    assert told == sorted(told)
    assert [each.rpartition("-")[2] for each in (told[0], told[2])] == [told[1][-8:], told[3][-8:]]
    assert told[0][-8:] != told[2][-8:], "sessions that do not know each other can have the same number"
    assert gathering.asked == [NEVER, (0, 0), (0, 0), (0, 0)]
    handler.shutdown()
    assert "MINGLE_GENERATION" not in os.environ


def test_the_name_of_a_round_sorts_after_thousands_of_earlier_ones(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that crashes every minute for a week makes as many."""
    handler, gathering = make(place, 1, 1)
    told = []
    for number in (9_999, 10_000):
        begun = Begin(number=number, rank=0, size=1)
        monkeypatch.setattr(gathering, "next_round", lambda *_, begun=begun: begun)
        handler.next_rendezvous()
        told.append(os.environ["MINGLE_GENERATION"])
    assert told == sorted(told)


def test_a_survivor_comes_before_a_node_that_joins_after_the_loss_of_the_session(
    place: Place, pool: ThreadPoolExecutor
) -> None:
    old, _ = make(place, 1, 2, config={"node_rank": "1"})
    assert old.next_rendezvous().rank == 0
    place.lose()
    new, _ = make(place, 1, 2, config={"node_rank": "0"})
    assert [info.rank for info in together(pool, [old, new])] == [0, 1]


def test_agents_of_a_new_start_are_in_order(place: Place, pool: ThreadPoolExecutor) -> None:
    agents = [make(place, config={"node_rank": number})[0] for number in ("1", "0")]
    assert [info.rank for info in together(pool, agents)] == [1, 0]


def test_a_round_that_did_not_begin_makes_no_survivor(place: Place, pool: ThreadPoolExecutor) -> None:
    (began, _), (waits, gathering) = (make(place, config={"node_rank": number}) for number in ("1", "0"))
    gathering.held = False
    waiting = pool.submit(waits.next_rendezvous)
    assert began.next_rendezvous().rank == 1
    place.lose()
    gathering.held = True
    assert began.next_rendezvous().rank == 0
    assert waiting.result(SECONDS).rank == 1


def test_a_round_counts_only_while_the_lease_is_valid(place: Place, pool: ThreadPoolExecutor) -> None:
    handler, gathering = make(place, 1, 1)
    gathering.held = False
    waiting = pool.submit(handler.next_rendezvous)
    until(lambda: gathering.state.round is not None)
    threading.Event().wait(0.2)
    assert not waiting.done()
    # The loss comes first: a lease that is valid for a moment before it would let the first round count.
    place.lose("its lease has ended")
    gathering.held = True
    waiting.result(SECONDS)
    assert gathering.gathered == 2
    assert os.environ["MINGLE_GENERATION"].startswith("0000000001-")


def test_a_round_after_which_another_one_has_to_follow_is_not_returned(place: Place, pool: ThreadPoolExecutor) -> None:
    (_, gathering), (_, lost) = agents = [make(place, 1, 2) for _ in range(2)]
    gathering.held = lost.held = False
    waiting = [pool.submit(handler.next_rendezvous) for handler, _ in agents]
    until(lambda: gathering.state.round is not None)
    place.lose_node(lost)
    gathering.held = True
    assert waiting[0].result(SECONDS).world_size == 1
    assert gathering.asked == [NEVER, NEVER], "it has said NEXT again"
    assert gathering.gathered == 1, "in the same session"
    lost.held = True
    place.end()
    assert isinstance(waiting[1].exception(SECONDS), RendezvousClosedError)


def test_a_job_that_an_agent_has_ended_begins_no_round(place: Place) -> None:
    handler, _ = make(place, 1, 1)
    handler.next_rendezvous()
    place.ending()
    assert handler.num_nodes_waiting() == 0
    with pytest.raises(RendezvousClosedError, match="closed by one of its agents"):
        handler.next_rendezvous()


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_that_an_agent_ends_while_a_round_forms_begins_none(
    place: Place, pool: ThreadPoolExecutor, begun: bool
) -> None:
    handler, gathering = make(place, 1, 1) if begun else make(place)
    gathering.held = False
    forming = pool.submit(handler.next_rendezvous)
    until(lambda: gathering.state.round is not None if begun else bool(gathering.asked))
    place.ending()
    with pytest.raises(RendezvousClosedError, match="closed by one of its agents"):
        forming.result(SECONDS)


def test_the_workers_inherit_the_interface_unless_the_user_chose(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_SOCKET_IFNAME", "mine")
    handler, _ = make(place, 1, 1)
    handler.next_rendezvous()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["TP_SOCKET_IFNAME"] == "mine"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    assert handler.shutdown()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("chosen", [None, "lo", "eth7"])
@pytest.mark.parametrize("by_itself", ["127.0.0.1", "10.0.0.1"])
def test_the_workers_gloo_is_told_the_address_where_it_would_take_another(
    place: Place, monkeypatch: pytest.MonkeyPatch, by_itself: str, chosen: str | None
) -> None:
    monkeypatch.setattr(gloo, "default_address", lambda _: by_itself)
    if chosen is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    before = dict(os.environ)
    handler, _ = make(place, 1, 1)
    handler.next_rendezvous()
    told = gloo.for_workers("127.0.0.1", before)
    inherited = {name: value for name, value in os.environ.items() if name in told}
    if by_itself == "10.0.0.1" and chosen != "eth7":
        assert inherited == told
    else:
        assert inherited == {name: value for name, value in before.items() if name in told}
    assert handler.shutdown()
    assert os.environ == before


def test_a_local_address_of_the_users_wins(place: Place) -> None:
    handler, _ = make(place, 1, 1, local_addr="localhost")
    address, port = bootstrap(handler.next_rendezvous())
    assert address == "localhost"
    TCPStore(address, port, is_master=False, wait_for_workers=False)


def test_a_node_that_comes_late_is_taken_into_another_round(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers = [make(place, 1, 2)[0] for _ in range(2)]
    assert handlers[0].next_rendezvous().world_size == 1
    late = pool.submit(handlers[1].next_rendezvous)
    until(lambda: handlers[0].num_nodes_waiting() == 1)
    assert handlers[0].next_rendezvous().world_size == 2
    assert late.result(SECONDS).world_size == 2


def test_a_node_that_vanishes_makes_a_new_round_necessary(place: Place, pool: ThreadPoolExecutor) -> None:
    """With torch alone the others' workers would wait in a collective until that times out."""
    (first, _), (second, lost) = make(place, 1, 2), make(place, 1, 2)
    together(pool, [first, second])
    place.lose_node(lost)
    assert first.num_nodes_waiting() == 1
    assert first.next_rendezvous().world_size == 1
    assert first.num_nodes_waiting() == 0


def test_a_node_that_ends_for_good_restarts_nobody(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers, gatherings = zip(*(make(place, 1, 2) for _ in range(2)), strict=True)
    together(pool, list(handlers))
    assert handlers[1].shutdown()
    assert (gatherings[1].closed, gatherings[1].failed) == ("closed", False)
    assert handlers[0].num_nodes_waiting() == 0
    assert handlers[0].is_closed()


def test_a_node_that_ends_before_its_first_round_ends_the_job_for_nobody(
    place: Place, pool: ThreadPoolExecutor
) -> None:
    (handler, _), (newcomer, gathering) = make(place, 1, 2), make(place, 1, 2)
    handler.next_rendezvous()
    waiting = pool.submit(newcomer.next_rendezvous)
    until(lambda: handler.num_nodes_waiting() == 1)
    assert newcomer.shutdown()
    assert (gathering.closed, gathering.failed) == ("closed", True)
    assert not handler.is_closed()
    assert handler.next_rendezvous().world_size == 1
    place.lose()
    assert isinstance(waiting.exception(SECONDS), RendezvousClosedError)


def test_a_node_that_gives_up_its_wait_for_a_round_ends_the_job_for_nobody(
    place: Place, pool: ThreadPoolExecutor
) -> None:
    (handler, _), (waits, gathering) = make(place), make(place, config={"join_timeout": "1"})
    together(pool, [handler, waits])
    with pytest.raises(RendezvousTimeoutError):
        waits.next_rendezvous()
    assert waits.shutdown()
    assert gathering.failed
    assert not handler.is_closed()


def test_a_node_that_waits_when_the_job_is_ended_ends_it_as_well(place: Place, pool: ThreadPoolExecutor) -> None:
    (handler, _), (waits, gathering) = make(place), make(place)
    together(pool, [handler, waits])
    assert handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        waits.next_rendezvous()
    assert waits.shutdown()
    assert not gathering.failed


def test_the_loss_of_the_store_is_survived(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers, gatherings = zip(*(make(place) for _ in range(2)), strict=True)
    before = bootstrap(together(pool, list(handlers))[0])
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    place.lose()
    assert [handler.num_nodes_waiting() for handler in handlers] == [1, 1]
    infos = together(pool, list(handlers))
    assert {info.world_size for info in infos} == {2}
    assert bootstrap(infos[0]) != before
    assert [gathering.gathered for gathering in gatherings] == [2, 2]
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]


ROLE = json.dumps({"role": "default", "rank": 0, "local_world_size": 2})


def test_the_store_is_lost_while_roles_are_exchanged(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers = [make(place)[0] for _ in range(2)]
    infos = together(pool, handlers)
    for info in infos:
        info.store.set(round_store.ROLE + str(info.rank), ROLE)
    waiting = [pool.submit(info.store.get, round_store.RANKS + str(info.rank)) for info in infos]
    threading.Event().wait(0.2)
    assert not any(each.done() for each in waiting)
    place.lose()
    for info, each in zip(infos, waiting, strict=True):
        # Ranks that will do for the moment until torchrun asks:
        assert json.loads(each.result(SECONDS)) == [2 * info.rank, 4] * 2
    assert [handler.num_nodes_waiting() for handler in handlers] == [1, 1]
    together(pool, handlers)
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]


def test_a_node_vanishes_while_roles_are_exchanged(place: Place, pool: ThreadPoolExecutor) -> None:
    (first, _), (second, lost) = make(place, 1, 2), make(place, 1, 2)
    info = together(pool, [first, second])[0]
    place.lose_node(lost)
    info.store.set(round_store.ROLE + str(info.rank), ROLE)
    assert json.loads(info.store.get(round_store.RANKS + str(info.rank))) == [2 * info.rank, 4] * 2
    assert first.num_nodes_waiting() == 1


def test_a_job_that_ends_while_roles_are_exchanged_has_ended(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers = [make(place)[0] for _ in range(2)]
    infos = together(pool, handlers)
    place.end("node-1 has finished")
    with pytest.raises(RendezvousConnectionError, match="node-1 has finished"):
        infos[0].store.multi_get([round_store.ROLE + "0"])


def test_store_that_fails_a_moment_before_the_gathering_notices_is_lost(place: Place) -> None:
    handler, gathering = make(place)
    gathering.gather()
    loss = threading.Timer(0.1, place.lose)
    loss.start()
    assert handler.is_lost()
    loss.join()


def test_the_store_is_lost_while_a_round_forms(place: Place, pool: ThreadPoolExecutor) -> None:
    first, gathering = make(place)
    forming = pool.submit(first.next_rendezvous)
    until(lambda: bool(gathering.asked))
    assert not forming.done()
    place.lose()
    second, _ = make(place)
    assert second.next_rendezvous().world_size == 2
    assert forming.result(SECONDS).world_size == 2
    assert gathering.gathered == 2


def test_an_end_on_purpose_restarts_nobody_and_starts_no_round(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers = [make(place)[0] for _ in range(2)]
    together(pool, handlers)
    place.end("node-1 has finished")
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    with pytest.raises(RendezvousClosedError, match="'handled' has ended: node-1 has finished"):
        handlers[0].next_rendezvous()
    assert handlers[0].is_closed()
    assert all(handler.shutdown() for handler in handlers)


@pytest.mark.parametrize("end", [Place.ending, Place.end])
def test_a_host_that_is_lost_after_the_end_of_the_job_restarts_nobody(
    place: Place, end: Callable[[Place], None]
) -> None:
    handler, gathering = make(place, 1, 1)
    handler.next_rendezvous()
    end(place)
    gathering.lost = "the host is gone"
    assert handler.num_nodes_waiting() == 0


def test_workers_with_stand_in_ranks_do_not_outlive_the_job(place: Place) -> None:
    handler, _ = make(place, 1, 1)
    handler.next_rendezvous()
    handler.round_is_void = True
    place.end("node-1 has finished")
    assert handler.num_nodes_waiting() == 1
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_an_end_on_purpose_while_a_round_forms(place: Place, pool: ThreadPoolExecutor) -> None:
    handler, gathering = make(place)
    forming: Future[RendezvousInfo] = pool.submit(handler.next_rendezvous)
    until(lambda: gathering.gathered == 1)
    place.end()
    with pytest.raises(RendezvousClosedError, match="has ended"):
        forming.result(SECONDS)


def test_too_few_nodes_are_a_timeout_that_says_who_was_there() -> None:
    wanted = agent_settings.resolve({}, run_id="few", endpoint="", minimum=2, maximum=2)
    handler = MingleRendezvousHandler(wanted, FixedGathering(Place(), wanted, timeout=True))  # type: ignore[arg-type]
    with pytest.raises(RendezvousTimeoutError, match="1 of 2 nodes") as error:
        handler.next_rendezvous()
    assert isinstance(error.value.__context__, DiscoveryTimeoutError)
    assert error.value.__cause__ is None, "torchrun would print the same message twice"
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()


def test_a_round_that_does_not_begin_in_time_is_a_timeout(place: Place) -> None:
    handler, _ = make(place, 1, 3, config={"join_timeout": "1"})
    with pytest.raises(RendezvousTimeoutError, match="no round of the job began within 1 s") as error:
        handler.next_rendezvous()
    assert "fewer than 2 nodes are there" in str(error.value), "MIN is less, and they could not keep the session"


def test_a_long_wait_for_a_round_is_explained(
    place: Place, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    handlers, gatherings = zip(*(make(place, 2, 3, config={"last_call_timeout": "1"}) for _ in range(2)), strict=True)
    gatherings[0].waits_long = True
    together(pool, list(handlers))
    text = "job handled: waiting for a round; it takes 2 nodes or more whose workers have ended"
    first = f"{text}, and the first one waits 1 s (last_call_timeout) for more, unless all 3 are there"
    assert [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()] == [first]
    caplog.clear()
    together(pool, list(handlers))
    assert [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()] == [text]


def test_a_round_that_too_few_nodes_answer_is_a_timeout(place: Place) -> None:
    handler, gathering = make(place, 1, 1, config={"join_timeout": "1"})
    gathering.held = False
    with pytest.raises(RendezvousTimeoutError, match="a round was complete, and too few nodes answered within 2 s"):
        handler.next_rendezvous()


def test_a_failure_of_the_gathering_is_an_error_that_says_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, gathering = make(place, 1, 1)

    def fail(*_: object) -> None:
        raise MingleError.explain("its loop has failed", cause="a bug", remedy="report it")

    monkeypatch.setattr(gathering, "next_round", fail)
    with pytest.raises(RendezvousError, match="its loop has failed") as error:
        handler.next_rendezvous()
    assert error.value.__cause__ is None, "torchrun would print the same message twice"


def test_a_handler_that_is_closed_before_it_gathered_starts_nothing(place: Place) -> None:
    handler, gathering = make(place)
    handler.set_closed()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    assert gathering.gathered == 0


def test_the_reason_of_an_end_reaches_the_gathering(place: Place) -> None:
    handler, gathering = make(place)
    with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
        stack.callback(handler.shutdown)
        raise KeyError
    assert gathering.closed == "ended by KeyError"


def test_the_exit_barrier_says_that_the_workers_are_done(place: Place) -> None:
    from torch.distributed.elastic.utils.store import barrier

    handler, gathering = make(place, 1, 1)
    store = handler.next_rendezvous().store
    store.set("other", "key")
    assert not gathering.done
    barrier(store, 1, "torchelastic/agent/terminal_state", barrier_timeout=60)
    assert gathering.done


def test_the_exit_barrier_ends_with_the_gathering(place: Place, pool: ThreadPoolExecutor) -> None:
    from torch.distributed.elastic.utils.store import barrier

    handlers = [make(place)[0] for _ in range(2)]
    info = together(pool, handlers)[0]
    waiting = pool.submit(barrier, info.store, 2, "torchelastic/agent/terminal_state", 60)
    threading.Event().wait(0.3)
    assert not waiting.done()
    place.lose("the host is gone")
    with pytest.raises((RendezvousConnectionError, RuntimeError)):
        waiting.result(30)


def test_the_exit_barrier_ends_for_all_once_nobody_else_can_come(place: Place, pool: ThreadPoolExecutor) -> None:
    from torch.distributed.elastic.utils.store import barrier

    handlers, gatherings = zip(*(make(place, 3, 3) for _ in range(3)), strict=True)
    infos = together(pool, list(handlers))
    waiting = [pool.submit(barrier, info.store, 3, "torchelastic/agent/terminal_state", 60) for info in infos[:2]]
    until(lambda: gatherings[0].done and gatherings[1].done)
    threading.Event().wait(0.3)
    assert not any(each.done() for each in waiting)
    gatherings[0].round_over = True  # as on the host
    for each in waiting:
        each.result(SECONDS)


def test_stores_that_fail_while_their_host_lives_are_an_error(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_handler, "LOSS_SECONDS", 0.1)
    handler, gathering = make(place, 1, 1)
    handler.next_rendezvous()
    place.close()  # and nobody says so
    with pytest.raises(RendezvousConnectionError, match="the agents' store can't be reached"):
        handler.next_rendezvous()
    assert len(gathering.asked) == 1 + agent_handler.BROKEN_ROUNDS
    said = [record.getMessage() for record in caplog.records if "joining the next one" in record.getMessage()]
    assert len(said) == agent_handler.BROKEN_ROUNDS - 1


class BrokenStores:
    """Has the stores of the first rounds fail; notes the session of each attempt, counted from 1."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, gathering: FixedGathering, *failures: Callable[[], Exception]
    ) -> None:
        self.attempts: list[int] = []
        self._failures = list(failures)
        self._gathering = gathering
        self._meet = worker_store.meet
        monkeypatch.setattr(agent_handler, "LOSS_SECONDS", 0.1)
        monkeypatch.setattr(worker_store, "meet", self.meet)

    def meet(self, *arguments: Any, **options: Any) -> worker_store.Stores:
        self.attempts.append(self._gathering.gathered)
        if self._failures:
            failure = self._failures.pop(0)()
            raise failure
        return self._meet(*arguments, **options)


def broken() -> Exception:
    return RuntimeError("wait timeout\nC++ frames")


def test_a_round_that_loses_its_agent_zero_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler, gathering = make(place, 1, 1)
    stores = BrokenStores(monkeypatch, gathering, broken, lambda: RendezvousConnectionError("reset"))
    assert handler.next_rendezvous().world_size == 1
    assert stores.attempts == [1, 1, 1]
    assert "joining the next one: wait timeout" in caplog.text
    assert "joining the next one: reset" in caplog.text
    assert "C++" not in caplog.text


def test_rounds_that_broke_in_an_earlier_session_do_not_count(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Exception:
        place.lose()
        return RendezvousConnectionError("reset")

    handler, gathering = make(place, 1, 1)
    stores = BrokenStores(monkeypatch, gathering, broken, broken, lost, broken, broken)
    assert handler.next_rendezvous().world_size == 1
    assert stores.attempts == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("lost", ["session", "node"])
def test_a_workers_store_that_agent_zero_never_opens_is_given_up_with_the_round(
    place: Place, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    real, entered, ends = worker_store.meet, threading.Event(), threading.Event()

    def meet(formation: Formation, begun: Begin, **options: Any) -> worker_store.Stores:
        if begun.rank == 0 and not entered.is_set():
            entered.set()
            ends.wait(SECONDS)
        return real(formation, begun, **options)

    (handler, gathering), (other, gone) = make(place, 1, 2), make(place, 1, 2)
    together(pool, [handler, other])
    monkeypatch.setattr(worker_store, "meet", meet)
    waiting = [pool.submit(each.next_rendezvous) for each in (other, handler)]
    assert entered.wait(SECONDS)
    if lost == "session":
        place.lose()
        assert {each.result(SECONDS).world_size for each in waiting} == {2}
    else:
        place.lose_node(gone)
        assert waiting[1].result(SECONDS).world_size == 1
    assert gathering.gathered == (2 if lost == "session" else 1)
    place.end()
    ends.set()


def test_a_workers_store_that_cannot_be_opened_is_an_error_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken() -> Exception:
        return ConfigurationError.explain("port 29400 is taken", cause="another process", remedy="stop it")

    handler, gathering = make(place, 1, 1)
    stores = BrokenStores(monkeypatch, gathering, taken)
    with pytest.raises(RendezvousError, match="port 29400 is taken"):
        handler.next_rendezvous()
    assert stores.attempts == [1]


def test_doubtful_node_ranks_are_pointed_out_once(
    place: Place, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    agents = [make(place, config=config)[0] for config in ({"node_rank": "0"}, {})]
    for _ in range(2):
        assert [info.rank for info in together(pool, agents)] == [0, 1]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2, "by each agent"
    assert all(text.startswith("job handled: some nodes ask for a node rank") for text in said)


def test_the_first_line_of_an_error() -> None:
    assert first_line(RuntimeError("broken pipe\nframe #0")) == "broken pipe"
    assert first_line(RuntimeError()) == "RuntimeError"
