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
from mingle.elastic import rounds as agent_rounds
from mingle.elastic import settings as agent_settings
from mingle.elastic.handler import AgentHandler, first_line
from mingle.elastic.rounds import Rounds
from mingle.errors import DiscoveryTimeoutError
from tests.support.fixed_gathering import FixedGathering, Place, set_last_call

SECONDS = 30


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    for handler in made.handlers:
        handler.shutdown()
    made.close()


def make(place: Place, minimum: int = 2, maximum: int = 2, **given: Any) -> tuple[AgentHandler, FixedGathering]:
    gathering = FixedGathering(place)
    wanted = agent_settings.resolve(
        {"MINGLE_PROGRESS": "off"},
        run_id="handled",
        endpoint="",
        minimum=minimum,
        maximum=maximum,
        config={"last_call_timeout": "60", "keep_alive_interval": "1", **given.pop("config", {})},
        **given,
    )
    handler = AgentHandler(wanted, gathering)  # type: ignore[arg-type]
    place.handlers.append(handler)
    return handler, gathering


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def together(pool: ThreadPoolExecutor, handlers: list[AgentHandler]) -> list[RendezvousInfo]:
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
    until(second.is_closed)  # torch looks at most once a second
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


def test_the_workers_are_told_their_session_and_a_later_one_sorts_after_it(
    place: Place, pool: ThreadPoolExecutor
) -> None:
    handler, _ = make(place, 1, 1)
    handler.next_rendezvous()
    first = os.environ["MINGLE_GENERATION"]
    handler.next_rendezvous()
    assert os.environ["MINGLE_GENERATION"] == first, "another round of the same session"
    place.lose()
    handler.next_rendezvous()
    assert os.environ["MINGLE_GENERATION"] > first
    handler.shutdown()
    assert "MINGLE_GENERATION" not in os.environ


def test_a_survivor_comes_before_a_node_that_joins_after_the_loss_of_the_session(
    place: Place, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = make(place, 1, 2, config={"node_rank": "1"})
    set_last_call(monkeypatch, 1)
    assert old.next_rendezvous().rank == 0
    set_last_call(monkeypatch, 60)
    place.lose()
    new, _ = make(place, 1, 2, config={"node_rank": "0"})
    assert [info.rank for info in together(pool, [old, new])] == [0, 1]


def test_agents_of_a_new_start_are_in_order(place: Place, pool: ThreadPoolExecutor) -> None:
    for numbers in (("0", "1"), ("1", "0")):
        agents = [make(place, config={"node_rank": number})[0] for number in numbers]
        assert [str(info.rank) for info in together(pool, agents)] == list(numbers)
        for agent in agents:
            agent.shutdown()
        place.lose()


def test_a_round_that_did_not_begin_makes_no_survivor(
    place: Place, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_last_call(monkeypatch, 1)
    early, gathering = make(place, 1, 2, config={"node_rank": "1"})
    gathering.held = False
    waiting = pool.submit(early.next_rendezvous)
    until(lambda: early._rounds is not None and early._rounds._server is not None)
    set_last_call(monkeypatch, 60)
    place.lose()
    late, _ = make(place, 1, 2, config={"node_rank": "0"})
    gathering.held = True
    joined = pool.submit(late.next_rendezvous)
    assert [waiting.result(SECONDS).rank, joined.result(SECONDS).rank] == [1, 0]


def test_a_round_counts_only_while_the_lease_is_valid(place: Place, pool: ThreadPoolExecutor) -> None:
    handler, gathering = make(place, 1, 1)
    gathering.held = False
    waiting = pool.submit(handler.next_rendezvous)
    until(lambda: handler._rounds is not None and handler._rounds.number == 0 and handler._rounds._server is not None)
    assert not waiting.done()
    # The loss comes first: a lease that is valid for a moment before it would let the first round count.
    place.lose("its lease has ended")
    gathering.held = True
    waiting.result(SECONDS)
    assert gathering.gathered == 2
    assert os.environ["MINGLE_GENERATION"].startswith("0000000001-")


def test_a_job_that_an_agent_has_ended_begins_no_round(place: Place) -> None:
    handler, gathering = make(place, 1, 1)
    handler.next_rendezvous()
    gathering.ending = True
    with pytest.raises(RendezvousClosedError, match="closed by one of its agents"):
        handler.next_rendezvous()


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


def test_a_node_that_comes_late_is_waited_for(
    place: Place, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [make(place, 1, 2)[0] for _ in range(2)]
    set_last_call(monkeypatch, 1)
    assert handlers[0].next_rendezvous().world_size == 1
    set_last_call(monkeypatch, 60)
    late = pool.submit(handlers[1].next_rendezvous)
    until(lambda: handlers[0].num_nodes_waiting() == 1)
    assert handlers[0].next_rendezvous().world_size == 2
    assert late.result(SECONDS).world_size == 2


def test_a_node_that_vanishes_makes_a_new_round_necessary(
    place: Place, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch alone the others' workers would wait in a collective until that times out."""
    (first, gathering), (second, lost) = make(place, 1, 2), make(place, 1, 2)
    together(pool, [first, second])
    gathering.absent.add(lost.member)
    until(lambda: first.num_nodes_waiting() == 1)
    set_last_call(monkeypatch, 1)
    assert first.next_rendezvous().world_size == 1


def test_a_node_that_ends_for_good_restarts_nobody(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers = [make(place, 1, 2)[0] for _ in range(2)]
    together(pool, handlers)
    handlers[1].shutdown()
    rounds = handlers[0]._rounds
    assert rounds is not None
    until(lambda: rounds.closed)
    threading.Event().wait(4)  # by now its last heartbeat is too old
    assert handlers[0].num_nodes_waiting() == 0


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
        info.store.set(agent_handler.ROLE + str(info.rank), ROLE)
    waiting = [pool.submit(info.store.get, agent_handler.RANKS + str(info.rank)) for info in infos]
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
    (first, gathering), (second, lost) = make(place, 1, 2), make(place, 1, 2)
    info = together(pool, [first, second])[0]
    gathering.absent.add(lost.member)
    info.store.set(agent_handler.ROLE + str(info.rank), ROLE)
    assert json.loads(info.store.get(agent_handler.RANKS + str(info.rank))) == [2 * info.rank, 4] * 2
    assert first.num_nodes_waiting() == 1


def test_a_job_that_ends_while_roles_are_exchanged_has_ended(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers = [make(place)[0] for _ in range(2)]
    infos = together(pool, handlers)
    place.end("node-1 has finished")
    with pytest.raises(RendezvousConnectionError, match="node-1 has finished"):
        infos[0].store.multi_get([agent_handler.ROLE + "0"])


def test_store_that_fails_a_moment_before_the_gathering_notices_is_lost(place: Place) -> None:
    handler, _ = make(place)
    place.open()
    loss = threading.Timer(0.1, place.lose)
    loss.start()
    assert handler.is_lost()
    loss.join()


def test_the_store_is_lost_while_a_round_forms(place: Place, pool: ThreadPoolExecutor) -> None:
    first, gathering = make(place)
    forming = pool.submit(first.next_rendezvous)
    until(lambda: gathering.gathered == 1)
    threading.Event().wait(0.5)
    assert not forming.done()
    place.lose()
    second, _ = make(place)
    assert second.next_rendezvous().world_size == 2
    assert forming.result(SECONDS).world_size == 2
    assert gathering.gathered == 2


def test_an_end_on_purpose_restarts_nobody_and_starts_no_round(
    place: Place, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_rounds, "MONITOR_SECONDS", 0.05)
    monkeypatch.setattr(agent_rounds, "LOSS_SECONDS", 0.1)
    handlers = [make(place)[0] for _ in range(2)]
    together(pool, handlers)
    place.end("node-1 has finished")
    threading.Event().wait(0.5)  # by now the store has been gone for longer than a host may be silent
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    with pytest.raises(RendezvousClosedError, match="'handled' has ended: node-1 has finished"):
        handlers[0].next_rendezvous()
    assert handlers[0].is_closed()
    assert all(handler.shutdown() for handler in handlers)


def test_workers_with_stand_in_ranks_do_not_outlive_the_job(place: Place) -> None:
    handler, _ = make(place)
    handler._present_rounds()
    handler.void_round()
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
    place = Place()
    wanted = agent_settings.resolve({}, run_id="few", endpoint="", minimum=2, maximum=2)
    handler = AgentHandler(wanted, FixedGathering(place, timeout=True))  # type: ignore[arg-type]
    with pytest.raises(RendezvousTimeoutError, match="1 of 2 nodes") as error:
        handler.next_rendezvous()
    assert isinstance(error.value.__context__, DiscoveryTimeoutError)
    assert error.value.__cause__ is None, "torchrun would print the same message twice"
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()


def test_a_handler_that_is_closed_before_it_gathered_starts_nothing(place: Place) -> None:
    handler, gathering = make(place)
    handler.set_closed()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    assert gathering.gathered == 0


def test_closing_reaches_the_others(place: Place, pool: ThreadPoolExecutor) -> None:
    handlers = [make(place)[0] for _ in range(2)]
    together(pool, handlers)
    handlers[0].set_closed()
    until(handlers[1].is_closed)


def test_a_store_that_fails_while_its_host_lives_is_an_error(
    place: Place, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_rounds, "LOSS_SECONDS", 0.5)
    handlers = [make(place)[0] for _ in range(2)]
    together(pool, handlers)
    place.close()  # and nobody says so

    def raises() -> bool:
        try:
            return handlers[0].num_nodes_waiting() < 0
        except RendezvousError:
            return True

    until(raises)
    with pytest.raises(RendezvousConnectionError):
        handlers[0].next_rendezvous()
    for handler in handlers:
        assert not handler.shutdown()


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


def test_waiting_in_the_exit_barrier_stops_no_heartbeat(place: Place, pool: ThreadPoolExecutor) -> None:
    from torch.distributed.elastic.utils.store import barrier

    handlers = [make(place)[0] for _ in range(2)]
    infos = together(pool, handlers)
    early = pool.submit(barrier, infos[0].store, 2, "torchelastic/agent/terminal_state", 60)
    threading.Event().wait(4)  # three heartbeats, one second apart, would have been missed
    assert handlers[1].num_nodes_waiting() == 0
    barrier(infos[1].store, 2, "torchelastic/agent/terminal_state", 60)
    early.result(30)


def test_a_round_that_loses_its_agent_zero_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler, _ = make(place, 1, 1)
    real, failures = Rounds.next, [RuntimeError("wait timeout\nC++ frames")] * 2

    def join(rounds: Rounds) -> RendezvousInfo:
        if failures:
            raise failures.pop()
        return real(rounds)

    monkeypatch.setattr(Rounds, "next", join)
    assert handler.next_rendezvous().world_size == 1
    assert "joining the next one: wait timeout" in caplog.text
    assert "C++" not in caplog.text


def test_a_round_that_breaks_again_and_again_is_an_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_rounds, "LOSS_SECONDS", 0.1)
    handler, _ = make(place, 1, 1)
    attempts: list[int] = []

    def join(rounds: Rounds) -> RendezvousInfo:
        attempts.append(1)
        raise RuntimeError("wait timeout")

    monkeypatch.setattr(Rounds, "next", join)
    with pytest.raises(RuntimeError, match="wait timeout"):
        handler.next_rendezvous()
    assert len(attempts) == agent_handler.BROKEN_ROUNDS


@pytest.mark.parametrize("failures", [1, 2])
def test_broken_connection_to_the_store_is_opened_anew_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(agent_rounds, "LOSS_SECONDS", 0.1)
    handler, _ = make(place, 1, 1)
    real, attempts = Rounds.next, list[int]()

    def join(rounds: Rounds) -> RendezvousInfo:
        attempts.append(1)
        if len(attempts) <= failures:
            raise RendezvousConnectionError("reset")
        return real(rounds)

    monkeypatch.setattr(Rounds, "next", join)
    if failures == 1:
        assert handler.next_rendezvous().world_size == 1
    else:
        with pytest.raises(RendezvousConnectionError, match="reset"):
            handler.next_rendezvous()
    assert len(attempts) == 2


@pytest.mark.parametrize("kind", [RendezvousConnectionError, RuntimeError])
def test_lost_session_is_no_broken_connection(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    monkeypatch.setattr(agent_rounds, "LOSS_SECONDS", 0.1)
    handler, gathering = make(place, 1, 1)
    real, attempts = Rounds.next, list[int]()

    def join(rounds: Rounds) -> RendezvousInfo:
        attempts.append(gathering.gathered)
        if len(attempts) == 1:
            place.lose()
            raise kind("reset")
        if len(attempts) == 2:
            raise RendezvousConnectionError("reset")
        return real(rounds)

    monkeypatch.setattr(Rounds, "next", join)
    assert handler.next_rendezvous().world_size == 1
    assert attempts == [1, 2, 2], "the second session has its own second try"


def test_rounds_that_broke_in_an_earlier_session_do_not_count(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_rounds, "LOSS_SECONDS", 0.1)
    handler, gathering = make(place, 1, 1)
    real, attempts = Rounds.next, list[int]()

    def join(rounds: Rounds) -> RendezvousInfo:
        attempts.append(gathering.gathered)
        if len(attempts) == agent_handler.BROKEN_ROUNDS:
            place.lose()
        if len(attempts) < 2 * agent_handler.BROKEN_ROUNDS:
            raise RuntimeError("wait timeout")
        return real(rounds)

    monkeypatch.setattr(Rounds, "next", join)
    assert handler.next_rendezvous().world_size == 1
    assert attempts == [1, 1, 1, 2, 2, 2]


def test_the_first_line_of_an_error() -> None:
    assert first_line(RuntimeError("broken pipe\nframe #0")) == "broken pipe"
    assert first_line(RuntimeError()) == "RuntimeError"
