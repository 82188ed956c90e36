"""What a session says of its members: the roster, their names in texts, and those that have gone or were refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mingle.config.order import order_key
from mingle.protocol.session.roster import REMEMBERED_TEXT, History, described, hosts, rank_of, roster, whos
from mingle.protocol.session.seats import Seated
from mingle.wire import frames
from mingle.wire.frames import MAX_TEXT_CHARACTERS, Path, Place, ProcessInfo, RefusalReason, Unit

STORE = "10.1.0.1"


def member(number: int) -> bytes:
    return number.to_bytes(16, "big")


def join(rank: int | None, number: int, *, unit: Unit = "rank", **more: Any) -> frames.Join:
    """The JOIN of a process on node "node<number>", which is sorted by that name."""
    name, address = f"node{number}", f"10.0.0.{number + 1}"
    who = ProcessInfo(hostname=name, pid=70 + number, address=address, unit=unit)
    fields: dict[str, Any] = {"order": order_key(None, name, address), "who": who, **more}
    return frames.Join(world_size=4, rank=rank, node=name, **fields)


def seats(*applicants: frames.Join) -> list[Seated]:
    """The seats of these members, in the order in which they came."""
    return [Seated(member(number), number, each) for number, each in enumerate(applicants)]


def placed(*ranks: int) -> dict[bytes, Place]:
    """The places of the same members: two on each node."""
    return {
        member(number): Place(
            rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2, num_nodes=2
        )
        for number, rank in enumerate(ranks)
    }


# --- the members, in texts ------------------------------------------------------------------------------------------


def test_members_are_named_by_rank() -> None:
    members = whos(seats(join(2, 1), join(0, 0)), {})
    assert described(members) == "rank 0 on host node0 (10.0.0.1), pid 70; rank 2 on host node1 (10.0.0.2), pid 71"


def test_members_without_ranks_are_named_in_the_order_of_their_nodes() -> None:
    came = seats(join(None, 10), join(None, 2), join(None, 1))
    assert [who.hostname for who in whos(came, {})] == ["node1", "node2", "node10"]
    assert hosts(came) == "node1, node2, node10"


@pytest.mark.parametrize(
    ("places", "ranks"),
    [
        pytest.param({}, [None, None], id="none before the seal"),
        pytest.param(placed(1, 0), [0, 1], id="their places"),
        pytest.param({member(0): placed(1)[member(0)]}, [None, 1], id="a latecomer has none yet"),
    ],
)
def test_assigned_ranks_are_those_of_the_places(places: Mapping[bytes, Place], ranks: list[int | None]) -> None:
    assert [who.rank for who in whos(seats(join(None, 0), join(None, 1)), places)] == ranks


def test_rank_that_was_given_counts_until_there_is_a_place() -> None:
    (seat,) = seats(join(3, 0))
    assert rank_of(seat, {}) == 3
    assert rank_of(seat, placed(0)) == 0


def test_text_of_the_members_fits_into_a_frame() -> None:
    loud = [ProcessInfo(hostname="n" * 256, pid=number, rank=number) for number in range(9)]
    assert len(described(loud)) == MAX_TEXT_CHARACTERS


def test_node_with_several_members_is_named_once_and_one_without_a_name_is_unknown() -> None:
    nameless = join(3, 7, who=ProcessInfo(pid=1), order=b"\xff")
    assert hosts(seats(join(0, 0), join(1, 0), nameless)) == "node0, unknown"


def test_machines_of_one_name_are_told_apart_by_their_addresses() -> None:
    twins = [join(None, number, who=ProcessInfo(hostname="vm", pid=1, address=f"10.0.0.{number}")) for number in (1, 2)]
    assert hosts(seats(*twins)) == "vm (10.0.0.1), vm (10.0.0.2)"
    assert hosts(seats(*twins, join(None, 3))) == "vm (10.0.0.1), vm (10.0.0.2), node3"


# --- the roster -------------------------------------------------------------------------------------------------------


def paths(*host_addresses: str) -> tuple[Path, ...]:
    """Paths to these addresses of the host, from addresses that end in 9."""
    return tuple(
        Path(host_address=each, local_address=f"{each.removesuffix('1')}9", interface="eth0") for each in host_addresses
    )


def test_roster_has_each_member_with_its_place_in_order_of_rank() -> None:
    members = seats(join(None, 0, program_port=6000), join(None, 1), join(None, 2))
    listed = roster(members, placed(3, 0, 2), STORE)
    assert [(each.rank, each.local_rank, each.node_rank) for each in listed] == [(0, 0, 0), (2, 0, 1), (3, 1, 1)]
    assert [(each.hostname, each.pid) for each in listed] == [("node1", 71), ("node2", 72), ("node0", 70)]
    assert [each.program_port for each in listed] == [0, 0, 6000]


def test_roster_gives_the_addresses_on_the_network_of_the_store() -> None:
    members = seats(join(0, 0), join(1, 1), join(2, 2))
    host, both, other = members
    host.paths, both.paths, other.paths = paths(STORE), paths("10.2.0.1", STORE), paths("10.2.0.1")
    listed = roster(members, placed(0, 1, 2), STORE)
    # A member without a path there is named by the address by which it has joined.
    assert [each.address for each in listed] == ["10.1.0.9", "10.1.0.9", "10.0.0.3"]


# --- those that have gone or were refused ---------------------------------------------------------------------------


def refused(reason: RefusalReason, rank: int | None = 1, *, unit: Unit = "rank", detail: str = "") -> History:
    history = History()
    history.refused(join(rank, 1, unit=unit), frames.Refused(reason=reason, detail=detail))
    return history


@pytest.mark.parametrize("reason", ["running", "full", "surplus", "session"])
def test_refusal_that_blames_no_settings_is_not_remembered(reason: RefusalReason) -> None:
    assert not refused(reason).refusals


def test_refusal_names_the_newcomer_with_its_rank_and_what_differs() -> None:
    (text,) = refused("world size", detail="3 here, 2 there").refusals
    assert text == "rank 1 on host node1 (10.0.0.2), pid 71: world size (3 here, 2 there)"
    (text,) = refused("world size", None, unit="node", detail="3 here, 2 there").refusals
    assert text == "host node1 (10.0.0.2), pid 71: --nnodes (3 here, 2 there)"


def test_texts_are_cut() -> None:
    history = refused("world size", detail="x" * MAX_TEXT_CHARACTERS)
    history.gone(Seated(member(1), 1, join(1, 1)), "x" * MAX_TEXT_CHARACTERS)
    assert [len(each) for each in (*history.refusals, *history.departures)] == [REMEMBERED_TEXT] * 2


@pytest.mark.parametrize("unit", ["rank", "node"])
def test_all_refusals_of_a_rank_are_forgotten_when_it_has_its_seat(unit: Unit) -> None:
    history = refused("world size", unit=unit)
    history.refused(join(1, 2, unit=unit), frames.Refused(reason="kind"))
    history.came(join(1, 3, unit=unit))
    assert not history.refusals


@pytest.mark.parametrize("newcomer", [join(1, 1), join(10, 1, unit="node"), join(None, 1)])
def test_refusal_of_another_rank_stays(newcomer: frames.Join) -> None:
    history = refused("world size", 10)
    history.came(newcomer)
    assert len(history.refusals) == 1


def test_refused_claim_of_a_taken_rank_stays_when_its_holder_is_there() -> None:
    history = refused("world size")
    history.refused(join(1, 2), frames.Refused(reason="rank taken", detail="it lives"))
    history.came(join(1, 1))
    assert list(history.refusals) == ["rank 1 on host node2 (10.0.0.3), pid 72: rank taken (it lives)"]
