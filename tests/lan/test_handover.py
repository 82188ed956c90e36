"""No ranks given, and machines with an order: the first in order is rank 0, whoever came first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from mingle.errors import ConflictError
from mingle.protocol.machine import Mesh
from mingle.protocol.session.phases import HandingOver
from tests.lan.electing import ElectionGathering
from tests.lan.gathering import Gathering, failure_of, outcome_of
from tests.lan.process import Endpoint, Process
from tests.lan.strikes import mark

STARTS: dict[str, Callable[[Gathering, int], float]] = {
    "random": lambda gathering, _: gathering.rng.uniform(0, 3),
    "rising": lambda _, number: 0.2 * number,
    "falling": lambda gathering, number: 0.2 * (gathering.size - number),
    "at once": lambda *_: 0.0,
    "the first comes last": lambda gathering, number: gathering.rng.uniform(0, 1) if number else 4.0,
}


def gather(seed: int, size: int = 4, **settings: Any) -> ElectionGathering:
    """A gathering of machines whose names are their order."""
    gathering = ElectionGathering(seed, size=size, **settings)
    gathering.orders = {f"m{number}": bytes((1, number)) for number in range(size)}
    return gathering


def everybody(gathering: Gathering, start: str, *, ranks_on_each: int = 1) -> list[Process]:
    """One process on each machine, or several; returns them by machine."""
    return [
        gathering.elector(f"m{number}", at=STARTS[start](gathering, number))
        for number in range(gathering.size // ranks_on_each)
        for _ in range(ranks_on_each)
    ]


def expect_in_order(processes: list[Process]) -> None:
    """Demands that their ranks are those of this list."""
    assert [outcome_of(process).place.rank for process in processes] == list(range(len(processes)))
    assert processes[0].hosts


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("size", [2, 4, 9])
@pytest.mark.parametrize("start", STARTS)
def test_ranks_follow_the_order_of_the_machines(start: str, size: int, loss: float, seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, size, loss=loss)
        processes = everybody(gathering, start)
        gathering.run()
        gathering.expect_formed(within=1.5 if not loss else 6.0)
        expect_in_order(processes)


def test_ranks_on_a_machine_follow_their_process_ids_after_the_host(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, 8)
        processes = everybody(gathering, "random", ranks_on_each=2)
        gathering.run()
        gathering.expect_formed()
        first, second, *others = processes
        expect_in_order([first, second, *others] if first.hosts else [second, first, *others])


@pytest.mark.parametrize("start", STARTS)
def test_a_job_moves_once_at_most(start: str, seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, 9)
        asked: set[bytes] = set()

        def watch(_: Process, __: Endpoint, data: bytes, asked: set[bytes] = asked) -> None:
            if mark("lead") in data:
                asked.add(data)

        gathering.world.before_write.append(watch)
        everybody(gathering, start)
        gathering.run()
        gathering.expect_formed()
        assert len(asked) <= 1


@pytest.mark.parametrize("struck", ["sender", "receiver", "another member"])
@pytest.mark.parametrize("frame", ["lead", "host-seen", "closed"])
def test_one_dies_during_the_handover(frame: str, struck: str, seeds: range) -> None:
    """LEAD goes from the host to the first, HOST_SEEN back, CLOSED from the host to each member."""
    for seed in seeds:
        gathering = gather(seed)
        processes = everybody(gathering, "the first comes last")
        killed: list[Process] = []

        def kill(
            sender: Process,
            receiver: Endpoint,
            data: bytes,
            gathering: Gathering = gathering,
            processes: list[Process] = processes,
            killed: list[Process] = killed,
        ) -> None:
            if mark(frame) not in data or killed or not isinstance(receiver, Process):
                return
            others = [process for process in processes if process not in (sender, receiver)]
            victim = {"sender": sender, "receiver": receiver, "another member": others[-1]}[struck]
            killed.append(victim)
            victim.kill()
            processes[processes.index(victim)] = gathering.again(victim, at=gathering.rng.choice((0.0, 0.5, 2.0)))

        gathering.world.before_write.append(kill)
        gathering.run()
        gathering.run()
        assert killed
        gathering.expect_formed(processes)
        expect_in_order(processes)


def test_a_first_that_is_stopped_when_it_is_asked_leads_later(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        processes = everybody(gathering, "the first comes last")

        def stop(first: Process = processes[0], gathering: Gathering = gathering) -> None:
            first.stop()
            gathering.world.after(gathering.rng.choice((0.5, 5.0, 15.0)), first.cont)

        handing = functools.partial(hands_over, processes)
        gathering.world.when(handing, stop)
        gathering.run()
        gathering.expect_formed()
        expect_in_order(processes)


def hands_over(processes: list[Process]) -> bool:
    """Whether one of them has asked the first to lead."""
    return any(process.hosts and process.phase is HandingOver for process in processes)


def test_a_first_that_no_call_reaches_is_not_rank_0(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        processes = everybody(gathering, "random")
        processes[0].machine.takes_calls = False
        gathering.run()
        gathering.expect_formed(within=20.0)
        host = next(process for process in processes if process.hosts)
        assert outcome_of(host).place.rank == 0
        ranks = [outcome_of(process).place.rank for process in processes if process is not host]
        assert ranks == sorted(ranks)
        (notice,) = [each for each in host.notices if "comes first in order" in each]
        assert "host m0" in notice


@pytest.mark.parametrize("mesh", ["off", "warn"])
def test_a_first_that_a_member_does_not_reach_is_not_asked_to_lead(mesh: Mesh, seeds: range) -> None:
    """The host reaches both, so it keeps the job; with the first as its host it could not form."""
    for seed in seeds:
        gathering = gather(seed, mesh=mesh)
        first, host, apart = (gathering.network.machine(f"m{number}") for number in range(3))
        for one, other in ((first, apart), (apart, first)):
            gathering.network.close(gathering.lan, one, other)
        starts = (2.0, 0.0, 2.5, 3.0)
        processes = [gathering.elector(f"m{number}", at=at) for number, at in enumerate(starts)]
        gathering.run()
        gathering.expect_formed(within=15.0)
        assert processes[1].machine is host
        assert [outcome_of(process).place.rank for process in processes] == [1, 0, 2, 3]
        assert any("host m0" in each and "comes first in order" in each for each in processes[1].notices)


def test_the_next_in_order_leads_where_the_mesh_shows_that_all_reach_it(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, mesh="warn")
        first, _, apart, _ = (gathering.network.machine(f"m{number}") for number in range(4))
        gathering.network.close(gathering.lan, apart, first)
        processes = everybody(gathering, "falling")
        gathering.run()
        gathering.expect_formed(within=15.0)
        assert processes[1].hosts
        assert [outcome_of(process).place.rank for process in processes] == [1, 0, 2, 3]


def test_a_first_that_is_reached_by_a_later_call_leads(seeds: range) -> None:
    """A call is in vain where one SYN is lost."""
    for seed in seeds:
        gathering = gather(seed, mesh="on")
        processes = everybody(gathering, "falling")

        def lose(gathering: Gathering = gathering, first: Process = processes[0]) -> None:
            first.machine.takes_calls = False
            gathering.world.after(2.5, functools.partial(setattr, first.machine, "takes_calls", True))

        gathering.world.when(functools.partial(hands_over, processes), lose)
        gathering.run()
        gathering.expect_formed(within=8.0)
        expect_in_order(processes)


def test_a_broken_mesh_is_not_proved_anew_by_the_first(seeds: range) -> None:
    """It takes eight seconds to find out, and the first asks once more for two."""
    for seed in seeds:
        gathering = gather(seed, mesh="warn")
        first, _, apart, _ = (gathering.network.machine(f"m{number}") for number in range(4))
        gathering.network.close(gathering.lan, first, apart)
        processes = everybody(gathering, "falling")
        gathering.run()
        gathering.expect_formed(within=11.5)
        expect_in_order(processes)


def test_hosts_that_are_lost_with_all_that_they_know_leave_nobody_behind(seeds: range) -> None:
    """The first leads already, and the old host dies before it has closed."""
    for seed in seeds:
        gathering = gather(seed)
        processes = everybody(gathering, "falling")
        old: list[Process] = []

        def cut(
            processes: list[Process] = processes, gathering: Gathering = gathering, old: list[Process] = old
        ) -> None:
            old.append(next(process for process in processes if process.hosts and process.phase is HandingOver))
            gathering.network.cut(old[0].machine)
            gathering.world.after(6.0, functools.partial(gathering.network.heal, old[0].machine))

        gathering.world.when(functools.partial(hands_over, processes), cut)
        gathering.run()
        assert old
        gathering.expect_formed()
        expect_in_order(processes)


def test_equal_node_ranks_of_two_machines_are_named(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, timeout=8, duplicates=True)
        gathering.orders = {f"m{number}": bytes((0, 0, 0, 0, min(number, 2))) for number in range(4)}
        processes = everybody(gathering, "random")
        gathering.run()
        refused = [each for each in processes[2:] if isinstance(each.failure, ConflictError)]
        assert len(refused) == 1
        (other,) = set(processes[2:]) - set(refused)
        assert "node rank taken (node rank 2 is held" in str(failure_of(refused[0]))
        assert f"pid {other.identity.who.pid}" in str(failure_of(refused[0]))
        assert "the same node rank" in str(failure_of(refused[0]))
        assert any("node rank taken" in str(failure_of(each)) for each in [*processes[:2], other])


def test_machines_without_a_node_rank_follow_those_with_one_and_are_named(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        gathering.orders["m2"] = bytes((0, 0, 0, 0, 1))
        gathering.orders["m3"] = bytes((0, 0, 0, 0, 0))
        processes = everybody(gathering, "random")
        gathering.run()
        gathering.expect_formed()
        expect_in_order([processes[3], processes[2], processes[0], processes[1]])
        (notice,) = [each for each in processes[3].notices if "node rank" in each]
        assert "m0, m1" in notice
