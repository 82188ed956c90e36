"""Whatever a peer says after a valid handshake, no machine breaks, waits for ever or spins."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
from msgspec import structs

from mingle.errors import ConflictError
from mingle.protocol.sightings import SILENT_SECONDS
from mingle.wire.datagrams import Failed, Offer, Seek, State, encode
from tests.lan.agents import AgentGathering
from tests.lan.gathering import Gathering, failure_of
from tests.lan.impostors import a_job_with_impostors, agents_with_impostors
from tests.lan.network import Packet
from tests.lan.process import Process
from tests.lan.strangers import Babbler, Caller
from tests.support.levels import batches, repeated


def _has_begun(process: Process) -> bool:
    return process.core is not None


def everybody(gathering: Gathering, *, given: bool) -> list[Process]:
    """Plan the start of four ranks within three seconds."""
    starts = [gathering.rng.uniform(0, 3) for _ in range(4)]
    if given:
        return gathering.everybody(starts)
    return [gathering.elector(f"m{number}", at=at) for number, at in enumerate(starts)]


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(4, 32, soak=250, size=10))
def test_callers_that_say_anything(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, timeout=15, checked=False)
        ranks = everybody(gathering, given=True)
        host = ranks[0]
        gathering.world.run(3.1, until=functools.partial(_has_begun, host))
        machine = gathering.machine("m9")
        for _ in range(25):
            member = gathering.rng.choice(
                [process.identity.member for process in ranks] + [gathering.world.identifier()] * 3
            )
            gathering.world.run(gathering.rng.uniform(0, 0.2))
            if host.alive:
                Caller(gathering.network, machine, host, member)
        gathering.world.run(60.0)
        assert gathering.settled(), f"seed {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(4, 32, soak=250, size=10))
def test_callers_of_elected_hosts_that_say_anything(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, timeout=15, checked=False)
        electors = everybody(gathering, given=False)
        machine = gathering.machine("m9")
        for _ in range(50):
            gathering.world.run(gathering.rng.uniform(0, 0.2))
            hosts = [each for each in electors if each.alive and each.hosts]
            for host in hosts:
                member = gathering.rng.choice(
                    [each.identity.member for each in electors] + [gathering.world.identifier()] * 3
                )
                Caller(gathering.network, machine, host, member)
        gathering.world.run(60.0)
        assert gathering.settled(), f"seed {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("given", [True, False], ids=["given", "assigned"])
@pytest.mark.parametrize("seeds", batches(4, 32, soak=250, size=10))
def test_hosts_that_say_anything(seeds: range, given: bool) -> None:
    for seed in seeds:
        gathering = Gathering(seed, timeout=15, checked=False)
        everybody(gathering, given=given)
        machine = gathering.machine("m9")
        for number in range(3):
            session = gathering.world.identifier()
            Babbler(gathering.network, machine, 4000 + number, "job", session)
            offer = Offer(
                job="job",
                session=session,
                host=gathering.world.identifier(),
                addresses=(machine.nics[0].address,),
                port=4000 + number,
                world_size=4,
                state="open" if gathering.rng.random() < 0.7 else "sealed",
                assigned=not given,
                hostname="m9",
            )
            for tick in range(60):
                gathering.world.after(tick / 4, functools.partial(gathering.say, "m9", offer))
        gathering.world.run(60.0)
        assert gathering.settled(), f"seed {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(4, 24, soak=250, size=10))
def test_hosts_that_say_anything_to_agents(seeds: range) -> None:
    for seed in seeds:
        gathering = AgentGathering(seed, (2, 4), timeout=15.0)
        world, (nic,) = gathering.world, gathering.network.machine("m9").nics
        world.watchers.clear()  # what strangers say is no promise of ours
        agents = gathering.everybody(4)
        for number in range(3):
            session = world.identifier()
            Babbler(gathering.network, nic.machine, 4000 + number, "job", session)
            offer = Offer(
                job="job",
                session=session,
                host=world.identifier(),
                addresses=(nic.address,),
                port=4000 + number,
                world_size=4,
                state="open" if world.rng.random() < 0.7 else "sealed",
                kind="agents",
                assigned=True,
            )
            speak = functools.partial(gathering.network.multicast, "job", nic, Packet(encode(offer)), browse=False)
            for tick in range(60):
                world.after(tick / 4, speak)
        world.run(60.0)
        assert all(agent.finished for agent in agents), f"seed {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("given", [True, False], ids=["given", "assigned"])
@pytest.mark.parametrize("seeds", batches(4, 24, soak=250, size=10))
def test_an_overheard_member_id_takes_no_seat(seeds: range, given: bool) -> None:
    for seed in seeds:
        a_job_with_impostors(seed, given=given)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(4, 24, soak=250, size=10))
def test_an_overheard_member_id_takes_no_seat_of_an_agent(seeds: range) -> None:
    for seed in seeds:
        agents_with_impostors(seed)


CLAIMS_PER_SECOND = 100


def invent(gathering: Gathering, address: str, state: State) -> None:
    """Have a machine that belongs to nobody offer a new session of the job, and another one soon after."""
    world = gathering.world
    offer = Offer(
        job="job",
        session=world.identifier(),
        host=bytes(16),  # the lowest id there is: in an election it would win
        addresses=(address,),
        port=4321,
        world_size=4,
        state=state,
        assigned=gathering.rng.random() < 0.5,
        hostname="m9",
    )
    gathering.say("m9", offer)
    world.after(1 / CLAIMS_PER_SECOND, functools.partial(invent, gathering, address, state))


def expect_soon_formed(gathering: Gathering, *, given: bool) -> None:
    """Start four ranks within 3 s, given or assigned, and demand that strangers delay them by one silence at most."""
    starts = [gathering.rng.uniform(0, 3) for _ in range(4)]
    if given:
        gathering.everybody(starts)
    else:
        for number, at in enumerate(starts):
            gathering.elector(f"m{number}", at=at)
    gathering.run()
    gathering.expect_formed(within=SILENT_SECONDS + 3)


@pytest.mark.parametrize("given", [True, False], ids=["given", "assigned"])
@pytest.mark.parametrize(
    "silent", [pytest.param(False, id="refused", marks=pytest.mark.slow), pytest.param(True, id="silent")]
)
@pytest.mark.parametrize("state", ["open", "sealed"])
@pytest.mark.parametrize("seed", repeated(2, soak=2))
def test_sessions_that_somebody_invents_hold_nobody_up_for_long(
    seed: int, state: State, silent: bool, given: bool
) -> None:
    """What is only said in datagrams gives way to those who have all proved that they are there."""
    gathering = Gathering(seed, timeout=120)
    (nic,) = gathering.machine("m9").nics
    if silent:
        nic.machine.filtered.add(nic.address)
    invent(gathering, nic.address, state)
    expect_soon_formed(gathering, given=given)


def gossip(gathering: Gathering) -> Seek | Failed:
    """Return what a stranger says of a process, or in its name: it looks for a host, reaches none, or has failed."""
    rng, world = gathering.rng, gathering.world
    members = [world.identifier(), *(each.identity.member for each in gathering.processes)]
    sessions = [None, world.identifier(), *(each.host.session for each in gathering.processes if each.hosts)]
    member, rank, hostname = rng.choice(members), rng.choice((None, 0, 1, 3)), rng.choice(("m0", "m3", "m9"))
    if rng.random() < 0.5:
        return Failed(job="job", member=member, rank=rank, hostname=hostname, reason="forged")
    unreached = rng.choice(sessions)
    return Seek(job="job", member=member, world_size=4, rank=rank, hostname=hostname, unreached=unreached, how="forged")


@pytest.mark.parametrize("given", [True, False], ids=["given", "assigned"])
@pytest.mark.parametrize("seed", repeated(2, soak=20))
def test_what_somebody_says_of_processes_delays_no_job(seed: int, given: bool) -> None:
    gathering = Gathering(seed, timeout=60)
    gathering.machine("m9")
    everybody(gathering, given=given)

    def tell() -> None:
        gathering.say("m9", gossip(gathering))
        gathering.world.after(1 / CLAIMS_PER_SECOND, tell)

    tell()
    gathering.run()
    gathering.expect_formed(within=2)


@pytest.mark.parametrize("given", [True, False], ids=["given", "assigned"])
@pytest.mark.parametrize(
    "silent", [pytest.param(False, id="refused", marks=pytest.mark.slow), pytest.param(True, id="silent")]
)
@pytest.mark.parametrize("apart", [0.02, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.4, 1.5)), 3.0])
def test_a_session_that_is_said_to_be_now_open_and_now_sealed_holds_nobody_up_for_long(
    apart: float, silent: bool, given: bool
) -> None:
    """What is recorded of an earlier run and played again says both, too."""
    gathering = Gathering(1, timeout=120)
    (nic,) = gathering.machine("m9").nics
    if silent:
        nic.machine.filtered.add(nic.address)
    offer = Offer(
        job="job",
        session=gathering.world.identifier(),
        host=bytes(16),
        addresses=(nic.address,),
        port=4321,
        world_size=4,
        assigned=not given,
        hostname="m9",
    )
    sealed = structs.replace(offer, state="sealed", joined=4)

    def alternate(now: Offer, then: Offer) -> None:
        for tick in range(math.ceil(apart * CLAIMS_PER_SECOND)):
            gathering.world.after(tick / CLAIMS_PER_SECOND, functools.partial(gathering.say, "m9", now))
        gathering.world.after(apart, functools.partial(alternate, then, now))

    alternate(offer, sealed)
    expect_soon_formed(gathering, given=given)


@pytest.mark.parametrize("given", [True, False], ids=["given", "assigned"])
def test_an_open_session_that_is_said_to_be_sealed_is_joined(given: bool) -> None:
    """Whoever hears an OFFER can repeat it with another state, or play an older one again; the host knows better."""
    gathering = Gathering(1, timeout=60)
    gathering.machine("m9")

    def forge() -> None:
        for process in gathering.processes:
            if process.alive and process.hosts and not process.finished:
                gathering.say("m9", structs.replace(process.host.offer(), state="sealed", joined=4))
        gathering.world.after(1 / 1000, forge)

    forge()
    if given:
        gathering.everybody([0.0, 2.0, 2.5, 3.0])
    else:
        for number in range(4):
            gathering.elector(f"m{number}", at=number)
    gathering.run()
    gathering.expect_formed(within=2)


def test_a_job_that_runs_is_not_forgotten_for_an_offer_of_before() -> None:
    """Only the members of a second run can reach the host of the first; an OFFER of its start is played again."""
    for seed in range(3):
        gathering = Gathering(seed, timeout=60, checked=False)
        first = gathering.everybody()
        gathering.run(5)
        gathering.expect_formed(first)
        old = structs.replace(first[0].host.offer(), state="open", joined=1)
        second = [gathering.host("y0"), *(gathering.member(rank, f"y{rank}") for rank in range(1, 4))]
        gathering.network.part(gathering.lan, gathering.machine(first[0]), gathering.machine("y0"))
        gathering.machine("m9")
        for tick in range(300):
            gathering.world.after(3.0 + tick / CLAIMS_PER_SECOND, functools.partial(gathering.say, "m9", old))
        gathering.run()
        assert all(isinstance(failure_of(each), ConflictError) for each in second[1:])


@pytest.mark.slow
@pytest.mark.parametrize("aimed", [True, False], ids=["at the host", "at nobody"])
def test_many_senders_that_spend_every_dial_budget_do_not_hide_the_host(aimed: bool) -> None:
    """Their sessions wait for budgets that the host, which names its own address, does not need."""
    gathering = Gathering(1, timeout=60)
    world, numbers = gathering.world, itertools.count()
    own = gathering.machine("m0").nics[0].address

    def forge() -> None:
        number = next(numbers)
        many = tuple(f"10.9.{number % 250}.{last}" for last in range(1, 13))
        offer = Offer(
            job="job",
            session=world.identifier(),
            host=bytes(16),
            addresses=(own,) if aimed else many,
            port=4000 + number % 1000,
            world_size=4,
            hostname="m9",
        )
        gathering.say(f"x{number % 40}", offer)
        world.after(1 / 400, forge)

    forge()
    gathering.everybody([5.0, 0.0, 0.5, 1.0])
    gathering.run()
    gathering.expect_formed(within=2)


@pytest.mark.parametrize("apart", [0.0, 3.0], ids=["one host", "four hosts"])
def test_hosts_that_forged_offers_lead_to_their_own_sessions_go_on(apart: float) -> None:
    """Any process can repeat an OFFER with the lowest host id: its host must not close for its own session."""
    for seed in range(4):
        gathering = Gathering(seed, timeout=60)
        electors = [gathering.elector(f"m{number}", at=(2.0 - apart / 2) * number) for number in range(4)]
        gathering.machine("m9")
        gathering.lan.multicast = not apart
        gathering.world.after(apart, functools.partial(setattr, gathering.lan, "multicast", True))

        def forge(electors: list[Process] = electors, gathering: Gathering = gathering) -> None:
            for elector in electors:
                if elector.alive and elector.hosts and not elector.finished:
                    gathering.say("m9", structs.replace(elector.host.offer(), host=bytes(16)))

        for tick in range(1000):
            gathering.world.after(tick / CLAIMS_PER_SECOND, forge)
        gathering.run()
        gathering.expect_formed(within=apart + 3)
