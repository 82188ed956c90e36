"""The proof of a mesh: who takes part and dials whom, and who has to look at its own machine."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec import structs

from mingle.protocol.session import mesh_proof
from mingle.protocol.session.mesh_proof import Pair, Proof, begin, targets_of
from mingle.protocol.session.seats import HostSeat, Seated, Seats
from mingle.wire.frames import Failure, Join, Path, ProcessInfo
from tests.support.mesh_proofs import member, proof


def applicant(number: int, *, seen: str = "", node: str = "", port: int = 4000, local: str = "") -> Join:
    address = local or f"10.0.0.{number + 1}"
    return Join(
        world_size=4,
        rank=number,
        node=node or f"node{number}",
        who=ProcessInfo(hostname=f"w{number}", pid=number, address=seen or address),
        paths=(Path(host_address="10.0.0.1", local_address=address, interface="eth0"),),
        mesh_port=port,
    )


def begun(*applicants: Join, length: int = 24, is_mesh: bool = True, first: int | None = None) -> Proof:
    host = HostSeat(member=member(0), applicant=applicants[0], prefix_lengths={"10.0.0.1": length})
    seats = Seats(host, 4)
    for number, each in enumerate(applicants[1:], start=1):
        seats.take(Seated(member(number), number, each, each.paths))
    leader = None if first is None else member(first)
    return begin("10.0.0.1", host, seats.values(), seconds=6.0, last=False, is_mesh=is_mesh, first=leader)


def addresses(made: Proof, number: int) -> list[str]:
    return [each.address for each in made.targets(member(number))]


@pytest.mark.parametrize("nodes", [2, 3, 128, mesh_proof.FULL_MESH])
def test_every_pair_is_dialed_in_both_directions_and_the_successor_first(nodes: int) -> None:
    assert {(one, other) for one in range(nodes) for other in targets_of(one, nodes)} == {
        (one, other) for one in range(nodes) for other in range(nodes) if one != other
    }
    assert [targets_of(one, nodes)[0] for one in range(nodes)] == [(one + 1) % nodes for one in range(nodes)]


@pytest.mark.parametrize("nodes", [mesh_proof.FULL_MESH + 1, 1000, 1024])
def test_of_more_nodes_each_dials_a_sample_and_is_dialed_by_as_many(nodes: int) -> None:
    dialed = [other for one in range(nodes) for other in targets_of(one, nodes)]
    assert all(one not in targets_of(one, nodes) for one in range(nodes))
    assert {dialed.count(each) for each in range(0, nodes, 97)} == {mesh_proof.SAMPLE}


def test_each_node_dials_the_others_on_the_network_that_was_chosen() -> None:
    made = begun(*map(applicant, range(4)))
    assert addresses(made, 0) == ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert addresses(made, 3) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert made.subnet == "10.0.0.0/24"


def failed(made: Proof, one: int, other: int) -> None:
    made.add(member(one), [Failure(member=member(other), how="no answer")])


def test_all_dial_the_first_in_order_alone_where_no_mesh_is_asked_for() -> None:
    made = begun(*map(applicant, range(4)), is_mesh=False, first=2)
    assert [addresses(made, number) for number in range(4)] == [["10.0.0.3"], ["10.0.0.3"], [], ["10.0.0.3"]]
    assert [made.can_lead(member(number)) for number in (1, 2)] == [False, True]
    failed(made, 3, 2)
    assert not made.can_lead(member(2))


def test_all_dial_the_first_in_order_also_where_the_pairs_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingle.protocol.session.mesh_proof.FULL_MESH", 3)
    monkeypatch.setattr("mingle.protocol.session.mesh_proof.SAMPLE", 1)
    made = begun(*map(applicant, range(4)), first=3)
    assert [addresses(made, number) for number in range(2)] == [["10.0.0.2", "10.0.0.4"], ["10.0.0.3", "10.0.0.4"]]
    assert [made.can_lead(member(number)) for number in (1, 3)] == [False, True]


def test_nodes_that_are_reached_by_all_can_lead() -> None:
    shared = structs.replace(applicant(2, node="node1", local="10.0.0.2"), mesh_port=0)
    made = begun(applicant(0), applicant(1), shared, applicant(3), first=1)
    failed(made, 3, 1)
    assert [made.can_lead(member(number)) for number in (1, 2, 3)] == [False, False, True]


def test_node_that_nobody_dials_counts_as_reached() -> None:
    made = begun(applicant(0), applicant(1), applicant(2, seen="203.0.113.7"), is_mesh=False, first=2)
    assert not made.is_needed
    assert made.can_lead(member(2))


def test_one_process_of_each_node_takes_part() -> None:
    made = begun(applicant(0, node="a"), applicant(1, node="a", local="10.0.0.1"), applicant(2), applicant(3))
    assert addresses(made, 0) == ["10.0.0.3", "10.0.0.4"]
    assert not addresses(made, 1)


CONTAINERS = [
    structs.replace(
        applicant(number),
        node=f"container{number}",
        addresses=(f"10.0.0.{number + 1}",),
        local_rank=number % 2,
        local_world_size=2,
        node_rank=number // 2,
    )
    for number in range(4)
]


@pytest.mark.parametrize(
    ("members", "nodes"),
    [
        pytest.param(CONTAINERS, [0, 1, 2, 3], id="containers that a launcher counts as two machines"),
        pytest.param(
            [structs.replace(applicant(n), node=f"boot:a/net:{n // 2}/pid:{n}") for n in range(4)],
            [0, 2],
            id="containers, of which two share a network namespace",
        ),
        pytest.param(
            [structs.replace(applicant(n), node="boot:a", node_rank=n) for n in range(4)],
            [0, 1, 2, 3],
            id="clones of whose addresses nothing is known, told apart by their launcher",
        ),
        pytest.param([applicant(n, node="a", local="10.0.0.1") for n in range(4)], [], id="processes of one machine"),
    ],
)
def test_each_machine_with_an_address_of_its_own_is_a_node(members: list[Join], nodes: list[int]) -> None:
    made = begun(*members)
    assert [number for number in range(4) if addresses(made, number)] == nodes
    assert made.is_needed is bool(nodes)


def test_member_that_takes_no_part_is_left_out() -> None:
    made = begun(applicant(0), applicant(1), applicant(2, port=0), applicant(3))
    assert addresses(made, 1) == ["10.0.0.4", "10.0.0.1"]
    assert not addresses(made, 2)


def test_member_behind_address_translation_dials_and_is_not_dialed() -> None:
    made = begun(applicant(0), applicant(1), applicant(2, seen="203.0.113.7"), applicant(3))
    assert addresses(made, 2) == ["10.0.0.4", "10.0.0.1", "10.0.0.2"]
    assert all("10.0.0.3" not in addresses(made, each) for each in (0, 1, 3))


@pytest.mark.parametrize(
    ("seen", "node", "dialed"),
    [
        pytest.param("127.0.0.6", "", True, id="loopback: a sidecar"),
        pytest.param("10.0.0.1", "", True, id="the host's address: a sidecar"),
        pytest.param("10.0.0.1", "node0/net:7", False, id="the same, of the host's machine: a rootless container"),
    ],
)
def test_member_whose_connection_a_proxy_of_the_hosts_machine_has_made_is_dialed(
    seen: str, node: str, dialed: bool
) -> None:
    made = begun(applicant(0), applicant(1), applicant(2, seen=seen, node=node), applicant(3))
    assert [("10.0.0.3" in addresses(made, each)) for each in (0, 1, 3)] == [dialed] * 3
    assert [each.who.rank for each in made.hidden] == ([] if dialed else [2])


def test_host_on_an_address_that_it_only_advertises_dials_nobody() -> None:
    made = begun(*map(applicant, range(4)), length=0)
    assert not addresses(made, 0)
    assert "10.0.0.1" in addresses(made, 1)


def test_failures_that_name_no_node_are_ignored() -> None:
    made = begun(*map(applicant, range(4)))
    made.add(member(9), [Failure(member=member(1), how="refused")])
    made.add(member(1), [Failure(member=member(9), how="refused"), Failure(member=member(1), how="refused")])
    assert not made.failures


# --- who looks at itself ----------------------------------------------------------------------------------------------


def suspects(size: int, pairs: Iterable[Pair]) -> dict[int, list[int]]:
    def number(name: bytes) -> int:
        return int.from_bytes(name, "big")

    found = mesh_proof.suspects(proof(size, pairs))
    return {number(one): [number(each.member) for each in others] for one, others in found.items()}


def test_both_nodes_of_a_pair_look_at_themselves() -> None:
    assert suspects(128, [(1, 3)]) == {1: [3], 3: [1]}


def test_node_that_nobody_reaches_and_three_others_look_at_themselves() -> None:
    assert suspects(128, [(n, 9) for n in range(128) if n != 9]) == {9: [0, 1, 2, 3], 0: [9], 1: [9], 2: [9]}
