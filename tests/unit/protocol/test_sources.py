"""Connections by their source: in a flood the flood gives up its own."""

from __future__ import annotations

import itertools
import random
import timeit

import pytest

from mingle.protocol.links.sources import Sources


def come(sources: Sources, conn: int, source: str, most: int) -> list[int]:
    """Let a connection come; return those that went for it."""
    gone = sources.make_room(source, most)
    assert not any(sources.discard(each) for each in gone)
    sources.add(conn, source)
    return gone


def test_the_address_that_holds_the_most_gives_up_its_oldest() -> None:
    sources = Sources()
    assert [come(sources, conn, source, 4) for conn, source in enumerate("abbb")] == [[]] * 4
    assert come(sources, 4, "a", 4) == [1]
    assert come(sources, 5, "a", 4) == [0], "of both kinds there are two, and this would be a third"
    assert come(sources, 6, "c", 4) == [2], "b has held two for longer"


def test_of_addresses_that_hold_the_same_the_first_gives_up_one() -> None:
    sources = Sources()
    for conn, source in enumerate("abcd"):
        come(sources, conn, source, 4)
    assert come(sources, 4, "e", 4) == [0]
    assert come(sources, 5, "f", 4) == [1]


@pytest.mark.parametrize("most", [0, 1])
def test_the_coming_one_always_stays(most: int) -> None:
    sources = Sources()
    assert come(sources, 0, "a", most) == []
    assert come(sources, 1, "a", most) == [0]
    assert come(sources, 2, "b", most) == [1]
    assert len(sources) == 1


def test_with_less_room_than_before_several_go_at_once() -> None:
    sources = Sources()
    for conn, source in enumerate("aaaabbc"):
        come(sources, conn, source, 9)
    assert come(sources, 7, "d", 4) == [0, 1, 4, 2], "no address keeps more than one"


def test_a_flood_from_thousands_of_addresses_costs_no_search() -> None:
    def seconds(addresses: int) -> float:
        sources = Sources()
        for conn in range(addresses):
            sources.add(conn, f"10.0.{conn // 256}.{conn % 256}")
        conns = itertools.count(addresses)
        return min(timeit.repeat(lambda: come(sources, next(conns), "fe80::1", addresses), number=1, repeat=100))

    assert seconds(20_000) < 100 * seconds(20)


def test_what_is_forgotten_holds_no_place() -> None:
    sources = Sources()
    come(sources, 0, "a", 2)
    come(sources, 1, "a", 2)
    assert sources.discard(0)
    assert not sources.discard(0)
    assert come(sources, 2, "b", 2) == []
    assert len(sources) == 2


@pytest.mark.parametrize("seed", range(50))
def test_who_holds_no_more_than_its_share_is_never_displaced(seed: int) -> None:
    """Whatever the others do: with ``most`` places and N addresses, the share is ``most // N``."""
    rng = random.Random(seed)
    addresses = [f"10.0.0.{number}" for number in range(rng.randint(1, 6))]
    most = rng.randint(len(addresses), 30)
    share = most // len(addresses)
    sources = Sources()
    modest: list[int] = []
    for conn in range(300):
        source = rng.choice(addresses)
        if source == addresses[0] and len(modest) == share:
            assert sources.discard(modest.pop(0))  # served
        gone = come(sources, conn, source, most)
        if source == addresses[0]:
            modest.append(conn)
        assert not set(gone) & set(modest)
        assert len(sources) <= most
