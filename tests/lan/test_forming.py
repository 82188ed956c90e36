"""Jobs form in any order of starts, through loss, and after whatever struck while they formed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest

from mingle.errors import ConflictError
from mingle.protocol.membership import RETURN_SECONDS, Membership
from mingle.protocol.session.phases import Acknowledging, Committed, Confirming, Open, Sealing, State
from mingle.protocol.session.registrar import Registrar
from tests.lan import process as lan_process
from tests.lan.gathering import Gathering, failure_of, outcome_of
from tests.lan.planting import Rule, always, expect_found
from tests.lan.process import Endpoint, Process
from tests.lan.strikes import mark

FORMING = (Open, Confirming, Sealing, Acknowledging)


def when_in(gathering: Gathering, host: Process, phase: type[State], action: Callable[[], None]) -> None:
    """Does something as soon as the host's session has reached a phase (and half of the ranks are in)."""

    def there() -> bool:
        return host.alive and host.phase is phase and len(host.host.registrar.seats) >= gathering.size // 2

    gathering.world.when(there, action)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_every_order_of_starts(order: tuple[int, ...]) -> None:
    for seed in range(2):
        gathering = Gathering(seed)
        gap = gathering.rng.uniform(0, 3)
        gathering.everybody([gap * order.index(rank) for rank in range(4)])
        gathering.run()
        gathering.expect_formed(within=0.2)
        assert [outcome_of(process).place.rank for process in gathering.processes] == [0, 1, 2, 3]


def test_a_look_up_of_a_name_that_takes_half_a_minute_voids_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes one when it connects to the store."""
    monkeypatch.setattr(lan_process, "STORE_SECONDS", (25.0, 35.0))
    for seed in range(10):
        gathering = Gathering(seed)
        gathering.everybody([0.0, 0.1, 0.1, 2.0])
        gathering.run()
        gathering.expect_formed(within=36.0)
        assert gathering.processes[0].host.registrar.state.epoch == 1


def confirmed_that_comes_an_epoch_late(seed: int) -> None:
    """Rank 1 is stopped once it has sent CONFIRMED, whose packet is lost at first, and rank 2 loses its connection."""
    gathering = Gathering(seed, size=3)
    world, network = gathering.world, gathering.network
    host, stopped, other = gathering.everybody()

    def strike(sender: Process, receiver: Endpoint, data: bytes) -> None:
        if sender is stopped and mark("confirmed") in data:
            world.before_write.remove(strike)
            network.part(gathering.lan, host.machine, stopped.machine)
            world.after(0.0, stopped.stop)
            world.after(0.0, functools.partial(network.reset_connections, other.machine))

    world.before_write.append(strike)
    assert world.run(5.0, until=lambda: host.core is not None and host.host.registrar.state.epoch == 2)
    network.heal_all()
    world.run(2.0)
    stopped.cont()
    gathering.run()
    gathering.expect_formed()


def test_confirmed_of_an_epoch_before_does_not_count() -> None:
    for seed in range(5):
        confirmed_that_comes_an_epoch_late(seed)
    run = functools.partial(confirmed_that_comes_an_epoch_late, 0)
    seam = Rule(Registrar, "counts", always(True))
    expect_found("count_confirmed_of_an_earlier_epoch", seam, run=run, finding="has sealed without a word of")


@pytest.mark.parametrize(("loss", "within"), [(0.3, 15.0), (0.5, 30.0)])
def test_loss(loss: float, within: float) -> None:
    took = []
    for seed in range(40):
        gathering = Gathering(seed, loss=loss)
        gathering.lan.duplicates, gathering.lan.delay = 0.1, (0.0001, 0.02)
        gathering.everybody([gathering.rng.uniform(0, 3) for _ in range(4)])
        gathering.run()
        gathering.expect_formed(within=within)
        last = max(process.started_at for process in gathering.processes)
        took.append(max(process.formed_at or 0.0 for process in gathering.processes) - last)
    assert sorted(took)[len(took) // 2] < 0.5


def test_one_rank_alone_is_a_job() -> None:
    gathering = Gathering(1, size=1)
    host = gathering.host()
    gathering.run()
    assert outcome_of(host).place.num_nodes == 1


def test_several_ranks_per_machine_share_a_node() -> None:
    gathering = Gathering(1, size=6)
    gathering.host("m0")
    for rank in range(1, 6):
        gathering.member(rank, f"m{rank // 3}")
    gathering.run()
    gathering.expect_formed()
    places = [outcome_of(process) for process in gathering.processes]
    assert [(each.place.node_rank, each.place.local_rank, each.place.local_world_size) for each in places] == [
        (node, local, 3) for node in range(2) for local in range(3)
    ]


def test_assigned_ranks_are_contiguous_per_node() -> None:
    gathering = Gathering(3, size=6)
    gathering.elector("m1")
    for number in range(1, 6):
        gathering.elector(f"m{number % 2}", at=1.0 + 0.1 * number)
    gathering.run()
    gathering.expect_formed()
    assert outcome_of(gathering.processes[0]).place.rank == 0
    by_machine = {
        name: sorted(outcome_of(each).place.rank for each in gathering.processes if each.machine.name == name)
        for name in ("m0", "m1")
    }
    assert by_machine == {"m1": [0, 1, 2, 3], "m0": [4, 5]}


@pytest.mark.parametrize("phase", FORMING)
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_and_restarted(phase: type[State], victim: int, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        everybody = gathering.everybody([gathering.rng.uniform(0, 1) for _ in range(4)])

        def strike(gathering: Gathering = gathering, everybody: list[Process] = everybody) -> None:
            old = everybody[victim]
            if old.core is None:
                return
            old.kill()
            everybody[victim] = gathering.again(old, at=gathering.rng.choice((0.0, 0.5, 2.0)))

        when_in(gathering, everybody[0], phase, strike)
        gathering.run()
        gathering.expect_formed(everybody, within=8.0)


def test_a_host_that_is_killed_before_its_first_offer(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        everybody = gathering.everybody()
        gathering.world.at(gathering.now, everybody[0].kill)
        everybody[0] = gathering.again(everybody[0], at=1.0)
        gathering.run()
        gathering.expect_formed(everybody, within=8.0)


@pytest.mark.parametrize("phase", [*FORMING, Committed])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("seconds", [0.3, 5.0, 12.0])
def test_cut_and_healed(phase: type[State], victim: int, seconds: float, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        everybody = gathering.everybody([gathering.rng.uniform(0, 1) for _ in range(4)])

        def strike(gathering: Gathering = gathering) -> None:
            machine = gathering.network.machine(f"m{victim}")
            gathering.network.cut(machine)
            gathering.world.after(seconds, functools.partial(gathering.network.heal, machine))

        when_in(gathering, everybody[0], phase, strike)
        gathering.run()
        gathering.expect_formed(within=seconds + 20.0)


@pytest.mark.parametrize("phase", [*FORMING, Committed])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("seconds", [0.3, 5.0, 15.0])
def test_stopped_and_continued(phase: type[State], victim: int, seconds: float, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        everybody = gathering.everybody([gathering.rng.uniform(0, 1) for _ in range(4)])

        def strike(gathering: Gathering = gathering, process: Process = everybody[victim]) -> None:
            process.stop()
            gathering.world.after(seconds, process.cont)

        when_in(gathering, everybody[0], phase, strike)
        gathering.run()
        gathering.expect_formed(within=seconds + 10.0)


def test_go_that_is_lost_is_said_again(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        everybody = gathering.everybody()
        host, member = everybody[0], everybody[2]
        part = functools.partial(gathering.network.part, gathering.lan, host.machine, member.machine)
        when_in(gathering, host, Committed, part)
        gathering.world.run(1.0)
        assert member.outcome is None
        assert all(each.outcome is not None for each in everybody if each is not member)
        # Both ends have seen the connection time out after ten seconds; it comes back within five more.
        gathering.world.run(10.0 + RETURN_SECONDS - 3.0)
        part(parted=False)
        gathering.run()
        gathering.expect_formed()
        gathering.world.run(20.0)
        assert not host.closed_stores


def test_ready_that_is_lost_is_said_again(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        everybody = gathering.everybody(ready_after=1.0)
        gathering.run()
        gathering.expect_formed()
        host, member = everybody[0], everybody[2]
        gathering.network.part(gathering.lan, host.machine, member.machine)
        gathering.world.run(10.0 + RETURN_SECONDS - 3.0)
        gathering.network.part(gathering.lan, host.machine, member.machine, parted=False)
        gathering.world.run(20.0)
        assert not host.closed_stores, "its process group stands"


def test_a_member_that_is_lost_before_it_is_ready_closes_the_store(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        everybody = gathering.everybody(ready_after=1.0)
        gathering.run()
        gathering.expect_formed()
        everybody[3].kill()
        gathering.world.run(RETURN_SECONDS + 1.0)
        assert len(everybody[0].closed_stores) == 1
        assert "rank 3 on host m3 (10.0.0.4), pid 104" in everybody[0].closed_stores[0]


def test_a_member_that_is_lost_after_ready_is_torchs_affair() -> None:
    gathering = Gathering(5)
    everybody = gathering.everybody(ready_after=0.1)
    gathering.run()
    gathering.world.run(1.0)
    everybody[3].kill()
    gathering.world.run(20.0)
    assert not everybody[0].closed_stores


def say_good_bye(member: Process, *, failed: bool = False) -> Membership:
    membership = member.joiner.membership
    assert membership is not None
    member._event(lambda: membership.leave("its work is done", member.now, failed=failed))
    return membership


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 2.5, 7.0])
def test_a_good_bye_that_is_lost_is_said_again(seconds: float, failed: bool, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        host, *_, member = gathering.everybody(ready_after=None)
        gathering.run()
        gathering.expect_formed()
        gathering.network.part(gathering.lan, host.machine, member.machine, parted=seconds > 0)
        gathering.world.run(gathering.rng.uniform(0, seconds))
        membership = say_good_bye(member, failed=failed)
        assert membership.leaving
        gathering.world.run(seconds)
        gathering.network.part(gathering.lan, host.machine, member.machine, parted=False)
        gathering.world.run(8.0)
        assert membership.close_reason == "it has left"
        assert not membership.leaving
        seat = host.host.registrar.seats[member.identity.member]
        assert seat.done
        assert seat.conn is None
        assert ["its work is done" in said for said in host.closed_stores] == [True] * failed


def test_a_good_bye_to_a_host_that_is_gone_does_not_take_for_ever(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        host, *_, member = gathering.everybody(ready_after=None)
        gathering.run()
        host.kill()
        membership = say_good_bye(member)
        gathering.world.run(RETURN_SECONDS + 3.0)
        assert not membership.leaving
        assert not membership.close_reason


def test_a_member_that_leaves_on_purpose_after_go_is_no_loss() -> None:
    gathering = Gathering(5)
    everybody = gathering.everybody(ready_after=None)
    gathering.run()
    for process in everybody[1:]:
        process.close()
    gathering.world.run(20.0)
    assert not everybody[0].closed_stores


def test_a_rank_that_is_restarted_after_go_is_told_that_the_job_runs() -> None:
    gathering = Gathering(5)
    everybody = gathering.everybody()
    gathering.run()
    gathering.world.run(1.0)
    everybody[1].kill()
    again = gathering.again(everybody[1])
    gathering.run()
    assert isinstance(failure_of(again), ConflictError)
    assert "has been running for" in str(failure_of(again))


def test_without_multicast_the_peers_are_asked_by_name(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, loss=0.3)
        gathering.lan.multicast = False
        everybody = gathering.everybody([gathering.rng.uniform(0, 2) for _ in range(4)])
        for process in everybody[1:]:
            process.peers.append(everybody[0].machine)
        gathering.run()
        gathering.expect_formed(within=10.0)


def test_datagrams_that_pass_one_way_only(seeds: range) -> None:
    for away in (True, False):
        for seed in seeds:
            gathering = Gathering(seed)
            everybody = gathering.everybody([gathering.rng.uniform(0, 2) for _ in range(4)])
            for process in everybody[1:]:
                pair = everybody[0].machine.name, process.machine.name
                gathering.lan.deaf.add(pair if away else pair[::-1])
            gathering.run()
            if away:
                # No OFFER is ever heard: true, and said.
                assert all("was not found" in str(failure_of(each)) for each in everybody[1:])
            else:
                gathering.expect_formed(within=3.0)


@pytest.mark.parametrize("late", [0.0, 20.0])
@pytest.mark.parametrize("secret", [None, b"secret"])
@pytest.mark.parametrize("size", [2, 4, 30])
def test_a_host_whose_multicasts_nobody_hears(size: int, secret: bytes | None, late: float, seeds: range) -> None:
    """The ranks hear each other, so that one's question stands for those of all: its answer must reach them, too."""
    for seed in seeds:
        gathering = Gathering(seed, size=size, secret=secret)
        everybody = gathering.everybody([late, *(gathering.rng.uniform(0, 2) for _ in range(size - 1))])
        mute = everybody[0].machine.name
        gathering.lan.no_multicast |= {(mute, process.machine.name) for process in everybody[1:]}
        gathering.run()
        gathering.expect_formed(within=8.0)


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_multicast_that_passes_one_way_only(victim: int, hears: bool, seeds: range) -> None:
    """To a machine or from it, be it the host's or another one's."""
    for seed in seeds:
        gathering = Gathering(seed)
        everybody = gathering.everybody([gathering.rng.uniform(0, 2) for _ in range(4)])
        one = everybody[victim].machine.name
        pairs = {(process.machine.name, one) for process in everybody if process.machine.name != one}
        gathering.lan.no_multicast |= {pair[::-1] for pair in pairs} if hears else pairs
        gathering.run()
        gathering.expect_formed(within=8.0)
