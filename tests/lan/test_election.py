"""No ranks given: one host, every rank once, whatever the network does; and errors that say what is wrong."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from mingle.errors import AuthenticationError, ConflictError, DiscoveryTimeoutError, MingleError
from mingle.protocol.election import ELECT_AFTER_SECONDS
from mingle.protocol.events import Event, Heard
from mingle.protocol.member import Joiner
from mingle.protocol.membership import RETURN_SECONDS
from mingle.protocol.node import Node
from mingle.protocol.pacing import COUNTED_RANKS
from mingle.protocol.participant import Participant
from mingle.protocol.session.phases import Acknowledging, Confirming, Open, Sealing, State
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from mingle.wire.datagrams import Offer
from tests.lan.electing import ElectionGathering
from tests.lan.gathering import Gathering, failure_of, outcome_of
from tests.lan.planting import Act, Rule, always, expect_found
from tests.lan.process import Process

PHASES = (Open, Confirming, Sealing, Acknowledging)


def gather(seed: int, size: int = 4, **settings: Any) -> ElectionGathering:
    """A gathering that is watched by what must hold of elections."""
    return ElectionGathering(seed, size=size, **settings)


def everybody(gathering: Gathering, *, longest: float = 3.0, machines: int = 9) -> list[Process]:
    """The same command as often as there are ranks."""
    return [
        gathering.elector(f"m{number % machines}", at=gathering.rng.uniform(0, longest))
        for number in range(gathering.size)
    ]


def by_id(processes: Sequence[Process]) -> list[Process]:
    """The processes, the one that wins elections first."""
    return sorted(processes, key=lambda process: process.identity.member)


def expect(process: Process, error: type[MingleError], *words: str) -> None:
    """Demands this failure with these words in its text."""
    failure = failure_of(process)
    assert type(failure) is error, f"{process.name}: {failure!r}"
    for word in words:
        assert word in str(failure), f"{word!r} is not in {failure}"


# --- it forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("size", [2, 4, 9])
def test_any_order_of_starts(size: int, loss: float, seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, size, loss=loss)
        gathering.lan.duplicates = 0.2
        everybody(gathering, longest=gathering.rng.choice((0.0, 0.05, 3.0)))
        gathering.run()
        gathering.expect_formed(within=1.0 if not loss else 5.0)


@pytest.mark.parametrize(
    ("size", "loss", "longest"),
    [
        (2, 0.0, 0.3),
        (8, 0.0, 0.3),
        (48, 0.0, 0.35),
        pytest.param(COUNTED_RANKS, 0.0, 0.35, marks=pytest.mark.slow),
        (8, 0.3, 0.6),
    ],
)
def test_complete_job_does_not_wait_for_the_end_of_the_patience(
    size: int, loss: float, longest: float, seeds: range
) -> None:
    """Half of the jobs form before the patience of the first is over, and one session is opened."""
    elapsed = []
    for seed in seeds[: 1 if size == COUNTED_RANKS else None]:
        gathering = gather(seed, size, loss=loss)
        processes = everybody(gathering, longest=0.02, machines=size)
        gathering.run()
        gathering.expect_formed()
        elapsed.append(max(process.elapsed for process in processes))
        assert len(gathering.election.hosted) == 1 or loss, "more than one became a host"
    assert statistics.median(elapsed) < longest < ELECT_AFTER_SECONDS + 0.1, elapsed


@pytest.mark.parametrize("machines", [1, 2, 3])
def test_ranks_are_contiguous_per_machine(machines: int, seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, 8)
        processes = everybody(gathering, machines=machines)
        gathering.run()
        gathering.expect_formed()
        ranked = sorted(processes, key=lambda process: outcome_of(process).place.rank)
        nodes = [process.machine.name for process in ranked]
        assert nodes == sorted(nodes, key=nodes.index)
        for process in ranked:
            place, here = outcome_of(process), [each for each in ranked if each.machine is process.machine]
            assert (place.place.local_rank, place.place.local_world_size) == (here.index(process), len(here))
            assert place.place.num_nodes == machines


def test_the_lowest_id_hosts_when_all_start_at_once(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        processes = everybody(gathering, longest=0.0)
        gathering.run()
        gathering.expect_formed()
        assert outcome_of(by_id(processes)[0]).place.rank == 0


def test_halves_that_are_joined_later(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, 6)
        processes = everybody(gathering, longest=1.0)
        halves = processes[::2], processes[1::2]
        part(gathering, *halves)
        gathering.world.run(5.0)
        assert not gathering.formed()
        assert all(sum(process.hosts for process in half) == 1 for half in halves)
        part(gathering, *halves, parted=False)
        gathering.run()
        gathering.expect_formed(within=9.0)
        assert gathering.world.now - 1000.0 < 5.0 + 3.0, "the next OFFER joins them"


def part(gathering: Gathering, left: Sequence[Process], right: Sequence[Process], *, parted: bool = True) -> None:
    """Cuts the network in two, or mends it."""
    for one in left:
        for other in right:
            gathering.network.part(gathering.lan, one.machine, other.machine, parted=parted)


@pytest.mark.parametrize("hears", [True, False])
def test_one_that_hears_and_is_not_heard_and_the_reverse(hears: bool, seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        one, *others = everybody(gathering)
        for other in others:
            pair = (other.machine.name, one.machine.name)
            gathering.lan.deaf.add(pair[::-1] if hears else pair)
        gathering.run()
        gathering.expect_formed(within=5.0)


def test_no_multicast_at_all_and_peers_by_name(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        gathering.lan.multicast = False
        processes = everybody(gathering)
        for process in processes:
            process.peers = [each.machine for each in processes if each is not process]
        gathering.run()
        gathering.expect_formed(within=3.0)


def test_two_jobs_side_by_side(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        jobs = {name: [gathering.elector(f"m{n}", job=name) for n in range(4)] for name in ("one", "other")}
        gathering.run()
        for processes in jobs.values():
            gathering.expect_formed(processes)


# --- who can't reach whom ------------------------------------------------------------------------------------------


def two_sessions(gathering: Gathering) -> tuple[Process, Process, Process, Process]:
    """Return a winner with its member and a loser with its member, which don't know of each other yet."""
    winner, loser, one, other = by_id(everybody(gathering, longest=0.0))
    part(gathering, [winner, one], [loser, other])
    gathering.world.run(2.0)
    assert winner.hosts
    assert loser.hosts
    part(gathering, [winner, one], [loser, other], parted=False)
    return winner, one, loser, other


def follow_seconds(seed: int) -> float:
    """Return how long after a host has closed for another one all are in that one's session."""
    gathering = gather(seed)
    winner, _, loser, member = two_sessions(gathering)
    gathering.lan.deaf.add((winner.machine.name, member.machine.name))
    gathering.world.run(10.0, until=lambda: not loser.hosts)
    closed_at = gathering.now
    gathering.run()
    gathering.expect_formed()
    assert outcome_of(winner).place.rank == 0
    return max(process.formed_at or 0.0 for process in gathering.processes) - closed_at


def test_members_that_do_not_hear_the_winner_go_where_their_host_says(seeds: range) -> None:
    assert max(map(follow_seconds, seeds)) < 0.2


def names_the_winner(_: Joiner, session: KnownSession, frame: frames.AnyFrame, now: float) -> bool:
    return isinstance(frame, frames.Closed) and frame.offer is not None


def ignore_the_winner(genuine: Any, joiner: Joiner, session: KnownSession, frame: frames.Closed, now: float) -> None:
    genuine(joiner, session, structs.replace(frame, offer=None), now)


def test_a_member_that_ignores_where_to_go_is_found(seeds: range) -> None:
    def scenario() -> None:
        assert max(map(follow_seconds, seeds)) < ELECT_AFTER_SECONDS, "it took too long"

    seam = Act(Joiner, "host_said", ignore_the_winner, when=names_the_winner)
    expect_found("ignore_where_to_go", seam, run=scenario, finding="it took too long")


def a_job_beside_the_folder_of_an_earlier_run(seed: int) -> None:
    """The machine of the earlier host is gone, so no address of it refuses, and its OFFER is still in the folder."""
    gathering = gather(seed)
    (nic,) = gathering.machine("m9").nics
    nic.machine.filtered.add(nic.address)
    offer = Offer(
        job="job",
        session=gathering.world.identifier(),
        host=gathering.world.identifier(),
        addresses=(nic.address,),
        port=4321,
        world_size=4,
        state="sealed",
        assigned=True,
        hostname="m9",
    )

    def list_folder() -> None:
        for process in gathering.processes:
            process.find(offer)
        gathering.world.after(0.5, list_folder)

    everybody(gathering)
    list_folder()
    gathering.run()
    gathering.expect_formed(within=3.0)


def test_sealed_session_in_a_folder_delays_no_job_unless_it_answers(seeds: range) -> None:
    for seed in seeds:
        a_job_beside_the_folder_of_an_earlier_run(seed)


def take_it_for_a_datagram(genuine: Any, node: Node, event: Heard, now: float) -> None:
    genuine(node, structs.replace(event, source=structs.replace(event.source, folder=False)), now)


def test_offer_in_a_folder_that_counts_as_alive_is_found() -> None:
    def is_in_folder(_: Node, event: Event, now: float) -> bool:
        return isinstance(event, Heard) and event.source.folder

    seam = Act(Node, "handle", take_it_for_a_datagram, when=is_in_folder)
    run = functools.partial(a_job_beside_the_folder_of_an_earlier_run, 0)
    expect_found("count_an_offer_in_a_folder_as_alive", seam, run=run, finding="after the last start")


def test_two_hosts_that_reach_each_other_in_neither_direction_say_so(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, timeout=30)
        gathering.election.disturbed_at = math.inf
        winner, one, loser, stranded = two_sessions(gathering)
        part(gathering, [winner], [stranded])
        gathering.run()
        # The loser reached all of them. It has closed, and the one that it leaves behind hosts for itself.
        for process in (winner, one, loser):
            expect(process, DiscoveryTimeoutError, "of 4 ranks joined")
        expect(winner, DiscoveryTimeoutError, f"host {stranded.machine.name}", "not reached: ")
        expect(stranded, DiscoveryTimeoutError, "1 of 4 ranks joined", f"not reached: {winner.machine.nics[0].address}")


def test_two_that_close_for_each_other_look_again(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        pairs = list(itertools.permutations(two_sessions(gathering)[::2]))
        offers = {process: process.host.offer() for process, _ in pairs}
        for process, other in pairs:
            assert process.core is not None
            gathering.election.proved.add((process, offers[other].session))
            process.core._end_host("it closes for the other one", offers[other])
            process.core.joiner.search.look_again(offers[other], "eth0", gathering.now)
        gathering.run()
        gathering.expect_formed()
        assert gathering.now - 1000.0 < 6.0


def test_no_host_reached_by_all_ends_at_the_timeout(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, timeout=30)
        gathering.election.disturbed_at = math.inf
        winner, one, loser, other = two_sessions(gathering)
        part(gathering, [winner, one], [other])
        part(gathering, [loser], [one])
        gathering.run()
        for process in (winner, loser, one, other):
            expect(process, DiscoveryTimeoutError, "of 4 ranks joined")
        expect(winner, DiscoveryTimeoutError, f"host {other.machine.name}", "not reached: ")
        expect(other, DiscoveryTimeoutError, f"not reached: {winner.machine.nics[0].address}")


def test_job_forms_once_a_host_is_reached_by_all(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        winner, one, loser, other = two_sessions(gathering)
        part(gathering, [winner, one], [other])
        part(gathering, [loser], [one])
        gathering.world.run(gathering.rng.uniform(3, 15))
        assert not gathering.formed()
        gathering.network.heal_all()
        healed_at = gathering.now
        gathering.run()
        gathering.expect_formed()
        assert gathering.now - healed_at < 20.0


@pytest.mark.parametrize("longest", [0.0, 3.0])
@pytest.mark.parametrize("places", [(0,), (1,), (3,), (0, 1), (0, 1, 2), (0, 3)])
def test_undialable_processes_keep_no_other_out(places: tuple[int, ...], longest: float, seeds: range) -> None:
    """By their place in the order of ids: the lowest wins elections, and can't be told by a call that it must not."""
    for seed in seeds:
        gathering = gather(seed, secret=b"secret" if seed % 3 == 0 else None)
        processes = by_id(everybody(gathering, longest=longest))
        filtered = [processes[place] for place in places]
        for process in filtered:
            process.machine.takes_calls = False
        gathering.run()
        gathering.expect_formed(within=2.0 + 2.0 * len(places))
        assert outcome_of(processes[0]).store_address not in {each.machine.nics[0].address for each in filtered}


def test_several_processes_of_a_machine_that_can_not_be_dialed(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, 8)
        processes = everybody(gathering, longest=gathering.rng.choice((0.0, 3.0)), machines=3)
        by_id(processes)[0].machine.takes_calls = False
        gathering.run()
        gathering.expect_formed(within=2.0 + 2.0 * 3)


def test_two_that_can_not_be_dialed_say_so(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, 2, timeout=30)
        gathering.election.disturbed_at = math.inf
        for process in everybody(gathering):
            process.machine.takes_calls = False
        gathering.run()
        one, other = gathering.processes
        for process, there in ((one, other), (other, one)):
            expect(process, DiscoveryTimeoutError, f"host {there.machine.name}", "firewall")


def test_a_winner_that_hangs_is_not_waited_for(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, 2)
        winner, loser = by_id(everybody(gathering, longest=0.0))
        part(gathering, [winner], [loser])
        gathering.world.run(2.0)
        part(gathering, [winner], [loser], parted=False)
        gathering.world.run(gathering.rng.uniform(0, 0.01))
        winner.stop()
        gathering.world.run(5.0)
        gathering.elector("m5")
        gathering.run(5.0)
        assert outcome_of(loser).place.world_size == 2


# --- death ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_the_host_is_killed_and_replaced(phase: type[State], seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, loss=gathering_loss(seed))
        processes = everybody(gathering)

        def kill_the_host(processes: list[Process] = processes, gathering: Gathering = gathering) -> None:
            host = next(process for process in processes if process.hosts)
            assert host.phase is phase
            host.kill()
            processes.remove(host)
            processes.append(gathering.elector("m4", at=gathering.rng.choice((0.0, 2.0))))

        struck = functools.partial(in_phase, processes, phase)
        gathering.world.when(struck, kill_the_host)
        gathering.run()
        gathering.run()
        gathering.expect_formed(processes)
        assert len(gathering.processes) == 5


def gathering_loss(seed: int) -> float:
    """A network that loses datagrams for every third seed."""
    return 0.3 if seed % 3 == 0 else 0.0


def in_phase(processes: list[Process], phase: type[State]) -> bool:
    """Whether one of them hosts a session that stands there, with a member already."""
    hosts = [process.host for process in processes if process.alive and process.hosts]
    return any(type(host.registrar.state) is phase and len(host.registrar.seats) > 1 for host in hosts)


def a_member_that_is_cut_off_after_confirmed(seed: int) -> None:
    """It calls its host for some seconds, and opens no session of its own meanwhile: the others wait for it."""
    gathering = gather(seed)
    processes = everybody(gathering)
    assert gathering.world.run(10.0, until=lambda: in_phase(processes, Sealing))
    member, *others = sorted(processes, key=lambda each: each.hosts)
    gathering.network.reset_connections(member.machine)
    part(gathering, [member], others)
    hosted = gathering.world.run(RETURN_SECONDS - 1.0, until=lambda: member.hosts)
    assert not hosted, "it hosts a session of its own"
    part(gathering, [member], others, parted=False)
    gathering.run()
    gathering.expect_formed()


def test_member_that_is_cut_off_after_confirmed_hosts_no_session(seeds: range) -> None:
    for seed in seeds:
        a_member_that_is_cut_off_after_confirmed(seed)


def test_member_that_goes_elsewhere_after_confirmed_is_found() -> None:
    seam = Rule(Participant, "is_bound", always(False))
    run = functools.partial(a_member_that_is_cut_off_after_confirmed, 0)
    expect_found("go_elsewhere_after_confirmed", seam, run=run, finding="it hosts a session of its own")


def test_rolling_restart_of_all_processes_forms_the_job(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed)
        old = everybody(gathering)
        gathering.run()
        new = []
        for number, process in enumerate(old):
            gathering.world.after(number * 0.7, process.kill)
            new.append(gathering.again(process, at=number * 0.7 + gathering.rng.uniform(0.1, 2.0)))
        gathering.run()
        gathering.expect_formed(new)


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [12.0, 60.0])
@pytest.mark.parametrize("late", [True, False])
def test_one_process_too_many(late: bool, timeout: float, seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, timeout=timeout)
        everybody(gathering, longest=2.0)
        gathering.elector("m7", at=4.0 if late else gathering.rng.uniform(0, 2))
        gathering.run()
        (surplus,) = [process for process in gathering.processes if process.outcome is None]
        gathering.expect_formed([process for process in gathering.processes if process is not surplus])
        expect(surplus, ConflictError, "has been running for", "full with 4 ranks", "one process too many")
        for process in gathering.formed():
            assert f"pid {process.identity.who.pid}" in str(surplus.failure)
        assert surplus.elapsed < min(30.0, timeout) + 3.0


def test_one_process_too_few(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, timeout=10)
        for number in range(3):
            gathering.elector(f"m{number}", at=gathering.rng.uniform(0, 1))
        gathering.run()
        first = min(gathering.processes, key=lambda process: process.started_at)
        expect(first, DiscoveryTimeoutError, "3 of 4 ranks joined", "within 10 s")
        for process in gathering.processes:
            expect(process, DiscoveryTimeoutError, "of 4 ranks joined")
            assert process.elapsed < 10.1


@pytest.mark.parametrize("given_first", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_some_with_a_rank_and_some_without(rank: int, given_first: bool, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, timeout=15, duplicates=True)
        at = (0.0, 2.0) if given_first else (2.0, 0.0)
        given = gathering.host("m9", at=at[0]) if rank == 0 else gathering.member(1, "m9", at=at[0])
        without = [gathering.elector(f"m{number}", at=at[1] + 0.1 * number) for number in range(3)]
        gathering.run()
        if rank == 0:
            for process in without:
                expect(process, ConflictError, "ranks mixed", "has no rank while the host was given one", "host m9")
            text = str(failure_of(given))
            assert "ranks mixed" in text, text
        else:
            expect(given, ConflictError, "ranks mixed", "was given rank 1 while the host was given none")
            for process in without:
                expect(process, DiscoveryTimeoutError, "of 4 ranks joined")
            refused = "rank 1 on host m9 (10.0.0.1), pid 101: ranks mixed"
            assert any(refused in str(process.failure) for process in without)


def test_different_world_sizes(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, timeout=15, duplicates=True)
        for number in range(4):
            gathering.elector(f"m{number}", size=3 if number == 3 else 4, at=gathering.rng.uniform(0, 2))
        gathering.run()
        conflicts = [each for each in gathering.processes if isinstance(each.failure, ConflictError)]
        assert conflicts
        for process in conflicts:
            expect(process, ConflictError, "world size", "world_size=3", "world_size=4")


@pytest.mark.parametrize("secret", [None, b"another"])
def test_one_without_the_secret(secret: bytes | None, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, timeout=10, secret=b"secret")
        others = [gathering.elector(f"m{number}", at=gathering.rng.uniform(0, 2)) for number in range(3)]
        stranger = gathering.elector("m3", at=gathering.rng.uniform(0, 2), secret=secret)
        gathering.run()
        expect(stranger, AuthenticationError)
        for process in others:
            assert isinstance(failure_of(process), DiscoveryTimeoutError | AuthenticationError)


def test_the_secret_is_proved(seeds: range) -> None:
    for seed in seeds:
        gathering = gather(seed, secret=b"secret", loss=0.3)
        everybody(gathering)
        gathering.run()
        gathering.expect_formed()
