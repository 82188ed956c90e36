"""The order of nodes: explicit ranks, then names in natural order, then addresses as numbers."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingle.config.launchers import Placement
from mingle.config.order import MAX_ORDER_BYTES, order_key, order_of

EXAMPLES = settings(derandomize=True, database=None, deadline=None, max_examples=400)
NAMES = st.text(alphabet="ab-.0129", max_size=12)
ADDRESSES = st.ip_addresses().map(str)
ODD_TEXT = st.text(st.characters() | st.sampled_from("\0\n\x1b\ud800\u0660²"), max_size=300)


def by_the_book(name: str) -> list[tuple[int, str | int]]:
    """Return a name as a list that sorts naturally: a number by its value, before any character in its place."""
    parts = re.findall(r"[0-9]+|[^0-9]", name)
    return [(0, int(part)) if part[0].isdigit() else (1, part) for part in parts]


@pytest.mark.parametrize(
    "names",
    [
        ["node1", "node2", "node10"],
        ["node2", "Node3", "node10"],
        ["", "node", "node0", "node" + "9" * 50, "node-1", "node.a"],
        ["rack1-node12", "rack2-node3", "rack10-node1"],
        ["gpu-0009", "gpu-10", "gpu-011"],
        ["node9.example", "node10", "node10.example"],
        ["n" + "9" * 30, "n1" + "0" * 30],
        ["a", "ä", "日本1", "日本2", "日本10"],
    ],
)
def test_names_sort_naturally(names: list[str]) -> None:
    keys = [order_key(None, name, "10.0.0.1") for name in names]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_equal_names_sort_by_address_as_a_number() -> None:
    addresses = ["10.0.0.2", "10.0.0.9", "10.0.0.10", "10.0.1.1", "fe80::2", "fe80::9%eth0", "fe80::10"]
    keys = [order_key(None, "node", address) for address in addresses]
    assert keys == sorted(keys)
    assert order_key(None, "node", "fe80::9") == keys[5], "a zone is not part of an address"
    assert keys[-1] < order_key(None, "node1", "10.0.0.1"), "a name counts before any address"


def test_explicit_ranks_come_first_as_numbers() -> None:
    ranks = [0, 1, 2, 9, 10, 255, 256, 999_999]
    keys = [order_key(rank, "z", "10.0.0.1") for rank in ranks]
    assert keys == sorted(keys)
    assert keys[-1] < order_key(None, "", "")
    assert order_key(7, "a", "10.0.0.1") == order_key(7, "b", "10.0.0.2")


@pytest.mark.parametrize("rank", [-1, 2**32])
def test_a_rank_that_does_not_fit_is_an_error(rank: int) -> None:
    with pytest.raises(OverflowError):
        order_key(rank, "node", "10.0.0.1")


def test_a_number_of_a_launcher_is_no_claim() -> None:
    """Two Jobs of one JobSet number their pods alike: their order is that of the numbers, then of the names."""
    places = [Placement(rank=None, world_size=4, node_rank=number, node_rank_launched=True) for number in (0, 0, 1, 10)]
    keys = [order_of(place, name, "10.0.0.1") for place, name in zip(places, ("a", "b", "a", "a"), strict=True)]
    assert keys == sorted(set(keys))
    claim = order_of(Placement(rank=None, world_size=4, node_rank=0), "a", "10.0.0.1")
    assert claim == order_key(0, "", "")
    assert claim < keys[0]
    assert keys[-1] < order_of(Placement(rank=None, world_size=4), "a", "10.0.0.1")
    assert len(order_of(places[0], "n" * 100, "fe80::1")) == MAX_ORDER_BYTES


@EXAMPLES
@given(NAMES, NAMES)
def test_names_sort_as_by_the_book(first: str, second: str) -> None:
    keys = [order_key(None, name, "10.0.0.1") for name in (first, second)]
    books = [by_the_book(name) for name in (first, second)]
    assert (keys[0] < keys[1]) == (books[0] < books[1])
    assert (keys[0] == keys[1]) == (books[0] == books[1])


@EXAMPLES
@given(ADDRESSES, ADDRESSES)
def test_addresses_sort_as_numbers(first: str, second: str) -> None:
    numbers = [(ip.version, int(ip)) for ip in map(ipaddress.ip_address, (first, second))]
    assert (order_key(None, "node", first) < order_key(None, "node", second)) == (numbers[0] < numbers[1])


@EXAMPLES
@given(st.none() | st.integers(0, 2**32 - 1), ODD_TEXT, ODD_TEXT | ADDRESSES)
def test_any_text_has_a_short_key(rank: int | None, name: str, address: str) -> None:
    key = order_key(rank, name, address)
    assert len(key) <= MAX_ORDER_BYTES
    assert key[:1] == (b"\x01" if rank is None else b"\x00")
    assert key == order_key(rank, name, address)


@pytest.mark.parametrize("odd", ["node\0", "node\ud800", "node\n", "\x1b[2J", "n\u0660", "n²", " ", "\0" * 5000])
def test_an_odd_name_has_a_key_of_its_own(odd: str) -> None:
    keys = {order_key(None, name, odd) for name in (odd, "node", "")}
    assert len(keys) == 3


def test_a_long_name_still_leaves_room_for_the_address() -> None:
    long = "worker-" * 40
    keys = [order_key(None, long, address) for address in ("10.0.0.9", "10.0.0.10", "fe80::1")]
    assert keys == sorted(set(keys))
    assert len(keys[2]) == MAX_ORDER_BYTES


def test_the_longest_name_of_a_kernel_is_not_cut() -> None:
    # Linux: 64 bytes (uname(2)); a Kubernetes pod's number is at the end of its name.
    names = [f"{'a-very-long-name-of-a-training-job-in-a-cluster'}-worker-{number}" for number in (2, 10)]
    assert order_key(None, names[0], "fe80::9") < order_key(None, names[1], "fe80::1")
