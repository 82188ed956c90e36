"""Which place each member gets, and which address of the host all of them use."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mingle.protocol.session import seating
from mingle.protocol.session.seating import common_address, contiguous, reach_matrix
from mingle.protocol.session.seats import HostSeat
from mingle.wire.frames import Join, Path, Place

EXAMPLES = settings(derandomize=True, database=None, deadline=None)


def on(node: str, rank: int | None = None, **told: int | None) -> Join:
    return Join(world_size=1, node=node, rank=rank, **told)


def way(host: str, local: str = "", interface: str = "eth0") -> Path:
    return Path(host_address=host, local_address=local or host, interface=interface)


def place(applicants: list[Join]) -> list[Place]:
    return seating.place(applicants, len(applicants))


def rows(places: list[Place]) -> list[tuple[int, int, int, int, int]]:
    """(rank, local rank, local world size, node rank, nodes) of each."""
    return [(at.rank, at.local_rank, at.local_world_size, at.node_rank, at.num_nodes) for at in places]


# --- ranks are assigned -------------------------------------------------------------------------------------


def test_assigned_ranks_begin_with_the_hosts_node_and_follow_the_arrival_of_the_others() -> None:
    places = place([on(node) for node in "bcabc"])
    assert rows(places) == [(0, 0, 2, 0, 3), (2, 0, 2, 1, 3), (4, 0, 1, 2, 3), (1, 1, 2, 0, 3), (3, 1, 2, 1, 3)]


@EXAMPLES
@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=40))
def test_assigned_ranks_are_one_block_per_node_and_the_host_is_0(nodes: list[str]) -> None:
    places = place([on(node) for node in nodes])
    assert places[0] == Place(
        rank=0,
        world_size=len(nodes),
        local_rank=0,
        local_world_size=nodes.count(nodes[0]),
        node_rank=0,
        num_nodes=len(set(nodes)),
    )
    assert sorted(at.rank for at in places) == list(range(len(nodes)))
    assert contiguous(places)
    _check_nodes(nodes, places)
    for node in set(nodes):
        here = [at.rank for at, where in zip(places, nodes, strict=True) if where == node]
        assert here == list(range(here[0], here[0] + len(here))), "in the order of arrival"


# --- ranks are given ----------------------------------------------------------------------------------------


def test_given_ranks_are_kept_and_nodes_are_counted_by_their_lowest_rank() -> None:
    places = place([on("a", 0), on("b", 3), on("b", 1), on("a", 2)])
    assert rows(places) == [(0, 0, 2, 0, 2), (3, 1, 2, 1, 2), (1, 0, 2, 1, 2), (2, 1, 2, 0, 2)]


@st.composite
def applicants_with_ranks(draw: st.DrawFn) -> list[Join]:
    """Ranks in any order on any nodes, the host first; launchers that say anything or nothing."""
    nodes = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20))
    ranks = [0, *draw(st.permutations(range(1, len(nodes))))]
    told = st.none() | st.integers(0, 4)
    return [
        Join(
            world_size=1,
            node=node,
            rank=rank,
            local_rank=draw(told),
            local_world_size=draw(st.none() | st.integers(1, 5)),
            node_rank=draw(told),
        )
        for node, rank in zip(nodes, ranks, strict=True)
    ]


@EXAMPLES
@given(applicants_with_ranks())
def test_given_ranks_are_kept_whatever_launchers_say(applicants: list[Join]) -> None:
    places = place(applicants)
    assert [at.rank for at in places] == [applicant.rank for applicant in applicants]
    _check_nodes([applicant.node for applicant in applicants], places)


def _check_nodes(nodes: list[str], places: list[Place]) -> None:
    """What holds however the ranks came about."""
    sizes = Counter(nodes)
    number_of: dict[str, set[int]] = {}
    for node, at in zip(nodes, places, strict=True):
        assert at.local_world_size == sizes[node]
        assert at.num_nodes == len(sizes)
        number_of.setdefault(node, set()).add(at.node_rank)
    assert sorted(map(sorted, number_of.values())) == [[number] for number in range(len(sizes))]
    for node, size in sizes.items():
        local = [at.local_rank for at, where in zip(places, nodes, strict=True) if where == node]
        assert sorted(local) == list(range(size))


# --- what launchers say -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "told", "size", "expected"),
    [
        pytest.param("aa", (1, 0), None, [1, 0], id="kept, in another order than the ranks"),
        pytest.param("aa", (1, 0), 2, [1, 0], id="kept with a fitting size"),
        pytest.param("aa", (1, 0), 4, [0, 1], id="a size that does not fit"),
        pytest.param("aa", (1, None), None, [0, 1], id="one of two says nothing"),
        pytest.param("aa", (0, 0), None, [0, 1], id="twice the same"),
        pytest.param("aa", (2, 1), None, [0, 1], id="counted from 1"),
        pytest.param("aabb", (1, 0, None, None), None, [0, 1, 0, 1], id="one node of two says nothing"),
    ],
)
def test_local_ranks_are_the_launchers_only_where_they_fit(
    nodes: str, told: tuple[int | None, ...], size: int | None, expected: list[int]
) -> None:
    applicants = [
        on(node, rank, local_rank=local, local_world_size=size)
        for rank, (node, local) in enumerate(zip(nodes, told, strict=True))
    ]
    assert [at.local_rank for at in place(applicants)] == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param((1, 1, 0), [1, 1, 0], id="kept"),
        pytest.param((1, 1, None), [0, 0, 1], id="one node says nothing"),
        pytest.param((1, 0, 0), [0, 0, 1], id="one node says two things"),
        pytest.param((1, 1, 1), [0, 0, 1], id="two nodes say the same"),
        pytest.param((2, 2, 1), [0, 0, 1], id="counted from 1"),
        pytest.param((None, None, None), [0, 0, 1], id="nothing said"),
    ],
)
def test_node_ranks_are_the_launchers_only_where_they_fit(told: tuple[int | None, ...], expected: list[int]) -> None:
    applicants = [on(node, rank, node_rank=at) for rank, (node, at) in enumerate(zip("aab", told, strict=True))]
    assert [at.node_rank for at in place(applicants)] == expected


# --- which members are one node ---------------------------------------------------------------------------------------

A, B = "192.0.2.1", "192.0.2.2"
BRIDGE = "172.17.0.1"
"""An address that each of these machines has, on a bridge of its own."""


def clone(*used: str, own: tuple[str, ...] = (), **told: int) -> Join:
    """One rank on a machine whose boot id others have as well: its addresses, and those by which it is on the path."""
    paths = tuple(way("192.0.2.99", local) for local in used)
    return Join(world_size=1, node="boot:a", paths=paths, addresses=("127.0.0.1", *used, *own), **told)


def containers(*told: tuple[int | None, int | None], machines: str = "") -> list[Join]:
    """One rank in each container, with the local and the node rank that it was told; on one machine, or not."""
    return [
        on(f"boot:{machine}/net:{number}/pid:{number}", local_rank=local, node_rank=node)
        for number, ((local, node), machine) in enumerate(zip(told, machines or "a" * len(told), strict=True))
    ]


@pytest.mark.parametrize(
    ("applicants", "expected"),
    [
        pytest.param([clone(A), clone(B)], [(0, 0), (0, 1)], id="two clones of a machine"),
        pytest.param(
            [clone(A, BRIDGE), clone(B, own=(BRIDGE,)), clone(A, own=(BRIDGE,))],
            [(0, 0), (0, 1), (1, 0)],
            id="two clones with the same bridge, on which the first one is the host",
        ),
        pytest.param(
            [clone(A, own=("2001:db8::1",)), clone("2001:db8::1", own=(A,))],
            [(0, 0), (1, 0)],
            id="one machine, each rank on another interface or family",
        ),
        pytest.param([clone("127.0.0.1")] * 2, [(0, 0), (1, 0)], id="one machine on lo"),
        pytest.param([clone(A), on("boot:a"), clone(A)], [(0, 0), (1, 0), (2, 0)], id="one says no addresses"),
        pytest.param(
            [replace(clone(A), addresses=(B,)), clone(A)], [(0, 0), (1, 0)], id="an address is newer than the list"
        ),
        pytest.param(
            [clone(A, local_rank=0), clone(B, local_rank=0)], [(0, 0), (0, 1)], id="two clones, of local rank 0 each"
        ),
        pytest.param(
            [clone(A, local_rank=0, node_rank=0), clone(B, local_rank=1, node_rank=0)],
            [(0, 0), (1, 0)],
            id="one node by its launcher's word",
        ),
        pytest.param(
            [on("boot:a", local_rank=0, node_rank=0), on("boot:a", local_rank=0, node_rank=1)],
            [(0, 0), (0, 1)],
            id="two nodes by their launcher's word, though no addresses are known",
        ),
        # Containers of one machine that see all its devices: one that says so is one node with the others.
        pytest.param(containers((0, 0), (1, 0)), [(0, 0), (1, 0)], id="containers that are told so"),
        pytest.param(
            containers((0, 0), (1, 0), (0, 1), (1, 1)),
            [(0, 0), (1, 0), (0, 1), (1, 1)],
            id="two nodes of two containers",
        ),
        pytest.param(containers((0, 0), (1, None)), [(0, 0), (0, 1)], id="containers, told by halves"),
        pytest.param(containers((0, 0), (0, 0)), [(0, 0), (0, 1)], id="containers of local rank 0 each"),
        pytest.param(containers((0, 0), (1, 0), machines="ab"), [(0, 0), (0, 1)], id="containers of two machines"),
    ],
)
def test_members_are_one_node_by_key_addresses_and_launcher(
    applicants: list[Join], expected: list[tuple[int, int]]
) -> None:
    ranked = [replace(each, rank=rank) for rank, each in enumerate(applicants)]
    assert [(each.local_rank, each.node_rank) for each in place(ranked)] == expected


@pytest.mark.parametrize(("nodes", "expected"), [("a", True), ("abbb", True), ("abab", False), ("abba", False)])
def test_each_node_holds_one_block_of_ranks_or_it_is_said(nodes: str, expected: bool) -> None:
    assert contiguous(place([on(node, rank) for rank, node in enumerate(nodes)])) is expected


# --- the network for all ------------------------------------------------------------------------------------


LAN, FAST, GLOBAL, LINK = "192.0.2.1", "198.51.100.1", "2001:db8::1", "fe80::1"
PREFIXES = {LAN: 24, FAST: 24, GLOBAL: 64, LINK: 64}
ON_LAN, ON_FAST = way(LAN, "192.0.2.2"), way(FAST, "198.51.100.2")
ON_GLOBAL, ON_LINK = way(GLOBAL, "2001:db8::2"), way(LINK, "fe80::2")
ROUTED = way(LAN, "203.0.113.2")


def host(own: list[str], prefixes: dict[str, int] = PREFIXES, **more: Any) -> HostSeat:
    applicant = Join(world_size=1, node="a", paths=tuple(map(way, own)))
    return HostSeat(member=b"H" * 16, applicant=applicant, prefix_lengths=prefixes, **more)


@pytest.mark.parametrize(
    ("own", "members", "expected"),
    [
        pytest.param([], [], None, id="no address"),
        pytest.param([LAN, FAST], [], LAN, id="nobody else: the preferred one"),
        pytest.param([LAN, FAST], [[ON_FAST, ON_LAN]], LAN, id="equal: the host's preference, not the member's order"),
        pytest.param([LAN], [[ON_LAN, way("203.0.113.9")]], LAN, id="a way to an address that is not ours"),
        pytest.param([LAN, FAST], [[ROUTED, ON_FAST], [ON_LAN, ON_FAST]], FAST, id="the subnet of most, by no router"),
        pytest.param([LINK, GLOBAL], [[ON_LINK, ON_GLOBAL]], GLOBAL, id="a global address before a link-local one"),
        pytest.param([LINK, LAN], [[ON_LINK, ROUTED]], LAN, id="one behind routers before a link-local one"),
        pytest.param([LINK], [[ON_LINK]], LINK, id="link-local when there is no other"),
        pytest.param(
            [LAN, GLOBAL], [[way(LAN, "2001:db8::2"), ON_GLOBAL]], GLOBAL, id="the other family is no neighbor"
        ),
    ],
)
def test_common_address(own: list[str], members: list[list[Path]], expected: str | None) -> None:
    assert common_address(host(own), members) == expected


def test_an_address_without_a_known_subnet_has_no_neighbors() -> None:
    members = [[way("203.0.113.7", "10.0.0.2"), ON_LAN]]
    for prefixes in ({LAN: 24}, {LAN: 24, "203.0.113.7": 0}):
        assert common_address(host(["203.0.113.7", LAN], prefixes), members) == LAN


ADDRESSES = ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "fe80::1"]


@EXAMPLES
@given(
    st.permutations(ADDRESSES),
    st.lists(st.lists(st.builds(way, st.sampled_from(ADDRESSES), st.ip_addresses().map(str)), max_size=5), max_size=5),
    st.dictionaries(st.sampled_from(ADDRESSES), st.integers(0, 32)),
)
def test_common_address_was_reached_by_all_and_is_none_only_if_there_is_none(
    own: list[str], members: list[list[Path]], prefixes: dict[str, int]
) -> None:
    reached = [{path.host_address for path in paths} for paths in members]
    common = set(own).intersection(*reached)
    seat = host(own, prefixes)
    chosen = common_address(seat, members)
    assert (chosen in common) if common else (chosen is None)
    assert common_address(seat, [list(reversed(paths)) for paths in reversed(members)]) == chosen


def weakly(local: str) -> Path:
    """A path to FAST that says nothing about the network of the member."""
    return replace(way(FAST, local), weak=True)


STRAY = weakly("192.0.2.9")
"""A member on LAN, to which rank 0 answers for its address on FAST as well."""


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param([[ON_LAN, STRAY], [ON_FAST]], None, id="a star is no mesh"),
        pytest.param([[ON_LAN, STRAY], [ON_LAN]], LAN, id="the one that is common"),
        pytest.param([[way(FAST, "203.0.113.9")], [ON_FAST]], FAST, id="behind a router is no other network"),
        pytest.param([[weakly("203.0.113.9")]], FAST, id="one that is on no other network of the host"),
        pytest.param([[weakly("198.51.100.9")]], FAST, id="one that is on this network by what the host knows"),
    ],
)
def test_a_way_over_another_network_counts_for_nothing(members: list[list[Path]], expected: str | None) -> None:
    assert common_address(host([LAN, FAST]), members) == expected
    assert common_address(host([FAST, LAN]), members) == expected


BOTH = [[ON_LAN, ON_FAST], [ROUTED, ON_FAST]]
LOCAL = [[ON_LAN, ON_LINK]]


@pytest.mark.parametrize(
    ("members", "last_resort", "named", "expected"),
    [
        pytest.param(BOTH, {FAST}, False, LAN, id="a tunnel comes last, though all are on its subnet"),
        pytest.param(BOTH, {LAN, FAST}, False, FAST, id="nothing but tunnels"),
        pytest.param(LOCAL, {LAN}, False, LINK, id="a tunnel also after a link-local address"),
        pytest.param([[way(FAST)]], {FAST}, False, FAST, id="a tunnel where there is nothing else"),
        pytest.param(BOTH, set(), False, FAST, id="the subnet of most"),
        pytest.param(BOTH, set(), True, LAN, id="but the user's order where there is one"),
        pytest.param([[way(FAST)]], set(), True, FAST, id="as far as all reach it"),
        pytest.param([[]], set(), True, None, id="which nobody does here"),
    ],
)
def test_the_order_of_preference(
    members: list[list[Path]], last_resort: set[str], named: bool, expected: str | None
) -> None:
    own = host([LAN, FAST, LINK], last_resort=frozenset(last_resort), named=named)
    assert common_address(own, members) == expected


def test_reach_matrix_says_who_reached_what() -> None:
    reached = [("rank 1 on host b", [way(LAN, "192.0.2.9", "eth1"), STRAY]), ("rank 2 on host c", [])]
    own, first, second = reach_matrix(host([LAN, FAST]), reached).splitlines()
    assert f"{LAN}, {FAST}" in own
    assert first.startswith(f"  rank 1 on host b: {LAN} through eth1, not {FAST} but through eth0, ")
    assert second == f"  rank 2 on host c: not {LAN}, not {FAST}"
