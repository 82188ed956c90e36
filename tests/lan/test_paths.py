"""Several networks per machine, addresses that lie, listeners that never speak, and datagrams out of the past."""

from __future__ import annotations

import functools

import pytest

from mingle.errors import InterfaceError
from mingle.protocol.links.race import ADDRESS_SECONDS
from mingle.wire.datagrams import Offer
from tests.lan.gathering import Gathering, failure_of, outcome_of
from tests.lan.process import Mute


def plug(gathering: Gathering, machine: str, *nics: tuple[str, str, str | None]) -> None:
    """Make a machine with these interfaces: name, address, segment."""
    gathering.network.bare_machine(machine)
    for name, address, segment in nics:
        gathering.network.plug(machine, name, address, segment)


def two_networks(gathering: Gathering) -> None:
    """Every machine is on a management network, its first interface, and on a fast one."""
    for number in range(gathering.size):
        plug(
            gathering,
            f"m{number}",
            ("mgmt0", f"10.1.0.{number + 1}", "management"),
            ("fast0", f"10.2.0.{number + 1}", "fast"),
        )


def test_the_first_address_is_filtered_and_the_second_is_found(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        two_networks(gathering)
        gathering.machine("m0").filtered.add("10.1.0.1")
        gathering.everybody([gathering.rng.uniform(0, 1) for _ in range(4)])
        gathering.run()
        gathering.expect_formed(within=2.0)
        assert {outcome_of(process).store_address for process in gathering.processes} == {"10.2.0.1"}
        assert {outcome_of(process).interface for process in gathering.processes} == {"fast0"}


def test_each_rank_names_its_own_interface_and_address() -> None:
    gathering = Gathering(2, size=3)
    plug(gathering, "m0", ("eth0", "10.1.0.1", "lan"))
    plug(gathering, "m1", ("enp3s0", "10.1.0.2", "lan"), ("docker0", "172.17.0.1", None))
    plug(gathering, "m2", ("docker0", "172.17.0.1", None), ("wlan0", "10.1.0.3", "lan"))
    gathering.everybody()
    gathering.run()
    gathering.expect_formed()
    places = [outcome_of(process) for process in gathering.processes]
    assert [(each.interface, each.address) for each in places] == [
        ("eth0", "10.1.0.1"),
        ("enp3s0", "10.1.0.2"),
        ("wlan0", "10.1.0.3"),
    ]


def test_an_address_that_every_machine_has_is_never_chosen(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3)
        for number in range(3):
            plug(
                gathering,
                f"m{number}",
                ("docker0", "172.17.0.1", None),
                ("eth0", f"10.1.0.{number + 1}", "lan"),
            )
        everybody = gathering.everybody()
        # Something of somebody else's listens at the host's very port on every other machine's docker0.
        gathering.world.run(0.0)
        port = everybody[0].host.endpoints.port
        for number, greeting in ((1, b""), (2, b"220 mail ready\r\n")):
            Mute(gathering.machine(f"m{number}"), port, greeting)
        gathering.run()
        gathering.expect_formed(within=2.0)
        assert outcome_of(everybody[1]).store_address == "10.1.0.1"


def test_hosts_that_share_no_network_are_shown_who_reaches_whom(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3)
        plug(gathering, "m0", ("left", "10.1.0.1", "one"), ("right", "10.2.0.1", "two"))
        plug(gathering, "m1", ("eth0", "10.1.0.2", "one"))
        plug(gathering, "m2", ("eth0", "10.2.0.3", "two"))
        everybody = gathering.everybody([gathering.rng.uniform(0, 1) for _ in range(3)])
        gathering.run()
        failure = failure_of(everybody[0])
        assert type(failure) is InterfaceError
        assert "rank 1 on host m1 (10.1.0.2), pid 102: 10.1.0.1 through eth0, not 10.2.0.1" in str(failure)
        assert "rank 2 on host m2 (10.2.0.3), pid 103: not 10.1.0.1, 10.2.0.1 through eth0" in str(failure)
        for member in everybody[1:]:
            assert type(failure_of(member)) is InterfaceError
            assert "10.1.0.1 through eth0" in str(member.failure)


def test_the_network_is_chosen_that_all_reach(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3)
        plug(gathering, "m0", ("a", "10.1.0.1", "one"), ("b", "10.2.0.1", "two"), ("c", "10.3.0.1", "three"))
        plug(gathering, "m1", ("a", "10.1.0.2", "one"), ("c", "10.3.0.2", "three"))
        plug(gathering, "m2", ("b", "10.2.0.3", "two"), ("c", "10.3.0.3", "three"))
        everybody = gathering.everybody()
        gathering.run()
        gathering.expect_formed(within=1.5)
        assert {outcome_of(process).store_address for process in everybody} == {"10.3.0.1"}


def test_a_cable_that_is_cut_while_another_network_stands(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        two_networks(gathering)
        everybody = gathering.everybody([0.0, 0.0, 0.0, 2.0])
        gathering.world.run(1.0)
        gathering.network.cut(gathering.machine("m1"), nic="mgmt0")
        gathering.run()
        # Its connection over that cable times out, it comes back over the other one, and that one is chosen.
        gathering.expect_formed(within=30.0)
        assert outcome_of(everybody[0]).store_address == "10.2.0.1"


def test_an_advertised_address_is_dialed_too() -> None:
    gathering = Gathering(1, size=2)
    gathering.host(advertised=("192.0.2.9",))
    gathering.member(1)
    gathering.run()
    gathering.expect_formed(within=1.5)
    assert outcome_of(gathering.processes[1]).store_address == "10.0.0.1"


def test_a_listener_that_accepts_and_never_speaks_costs_little(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=2)
        plug(gathering, "m0", ("old0", "10.9.0.1", "lan"), ("eth0", "10.0.0.1", "lan"))
        everybody = gathering.everybody([0.0, 0.5])
        gathering.world.run(0.2)
        # Who calls the first address gets somebody else.
        other = gathering.network.bare_machine("m8")
        gathering.network.plug("m8", "eth0", "10.9.0.1", "lan").segment = gathering.segment("lan")
        lan = gathering.segment("lan")
        lan.nics.sort(key=lambda nic: nic.machine is not other)
        mute = Mute(other, everybody[0].host.endpoints.port)
        gathering.run()
        assert mute.accepted > 0
        gathering.expect_formed(within=ADDRESS_SECONDS + 0.5)
        assert outcome_of(everybody[1]).store_address == "10.0.0.1"


@pytest.mark.parametrize("state", ["open", "sealed"])
@pytest.mark.parametrize("there", ["nobody", "mute", "silent"])
def test_offers_out_of_the_past(state: str, there: str, seeds: range) -> None:
    """Somebody plays back the OFFER of a session that is long dead, again and again."""
    for seed in seeds:
        gathering = Gathering(seed, size=3)
        ghost = gathering.machine("m9")
        stale = Offer(
            job="job",
            session=gathering.world.identifier(),
            host=gathering.world.identifier(),
            addresses=(ghost.nics[0].address,),
            port=4000,
            world_size=3,
            state="open" if state == "open" else "sealed",
            hostname="m9",
            pid=4,
        )
        if there == "mute":
            Mute(ghost, 4000)
        if there == "silent":
            ghost.filtered.add(ghost.nics[0].address)
        for tick in range(300):
            gathering.world.after(tick / 10, functools.partial(gathering.say, "m9", stale))
        gathering.everybody([gathering.rng.uniform(0, 2) for _ in range(3)])
        gathering.run()
        # A sealed one that is silent may be a job that runs, and is given ten seconds; nothing else costs anything.
        suspect = state == "sealed" and there != "nobody"
        gathering.expect_formed(within=14.0 if suspect else 1.0)


def test_offers_of_a_host_that_was_killed_are_played_back(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3)
        old = gathering.host("m0")
        early = gathering.member(1)
        gathering.world.run(1.0)
        old.kill()
        for tick in range(100):
            play = functools.partial(gathering.network.play_again, gathering.rng.getrandbits(16))
            gathering.world.after(tick / 20, play)
        rest = [gathering.again(old, at=0.5), gathering.member(2, at=1.0)]
        gathering.run()
        gathering.expect_formed([rest[0], early, rest[1]], within=3.0)
