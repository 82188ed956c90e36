"""The schedule of the pairs, and what is blamed for which evidence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from msgspec import structs

from mingle.check.verdicts import KINDS, Evidence, Other, Verdict, judge, rounds
from tests.support.bystanders import ROOT
from tests.support.evidence import NAMES, healthy, slow

Blame: TypeAlias = "tuple[str, tuple[str, ...]]"


@pytest.mark.parametrize("count", range(1, 12))
def test_every_pair_meets_once_and_no_place_is_in_two_pairs_of_a_round(count: int) -> None:
    schedule = list(rounds(count))
    assert sorted(itertools.chain(*schedule)) == sorted(itertools.combinations(range(count), 2))
    for pairs in schedule:
        places = [place for pair in pairs for place in pair]
        assert len(places) == len(set(places))
    assert len(schedule) == (0 if count == 1 else count - 1 + count % 2)


def blamed(seen: Evidence) -> list[Blame]:
    return [(verdict.kind, verdict.where) for verdict in judge(seen)]


def verdict_on(seen: Evidence, **fields: Any) -> Verdict:
    """Return the only verdict on this evidence with other fields."""
    (verdict,) = judge(structs.replace(seen, **fields))
    return verdict


def having(*faults: Callable[[Evidence], None], **fields: Any) -> Callable[[Evidence], None]:
    """Return what gives evidence these faults and fields."""

    def make(seen: Evidence) -> None:
        for fault in faults:
            fault(seen)
        for name, value in fields.items():
            setattr(seen, name, value)

    return make


def at(place: int, count: int, direction: str) -> list[tuple[int, int]]:
    """Return the links of a place."""
    others = [other for other in range(count) if other != place]
    into, out = [(other, place) for other in others], [(place, other) for other in others]
    return {"in": into, "out": out, "both": into + out}[direction]


def busy(rank: int, cpu: float) -> Callable[[Evidence], None]:
    def make(seen: Evidence) -> None:
        seen.work[rank] = (0.2, cpu)
        # Its links look slow as well.
        seen.rates.update(dict.fromkeys(at(rank, len(seen.places), "both"), 0.05e9))

    return make


def faster_network(one: str = "eth1", other: str = "eth1") -> Callable[[Evidence], None]:
    faster = Other("10.1.0.0/24", (one, other), 9e9, 1e9)
    return lambda seen: seen.others.update({pair: [faster] for pair in itertools.combinations(range(4), 2)})


TORCH_LATE = "torch's messages fail (not finished at its deadline)"
FAULTS: dict[str, tuple[Callable[[Evidence], None], list[Blame]]] = {
    "none": (having(), []),
    "machine slow both ways": (slow(*at(2, 4, "both")), [("slow-machine", ("c",))]),
    "machine slow to receive": (slow(*at(0, 4, "in")), [("slow-machine", ("a",))]),
    "machine slow to send": (slow(*at(3, 4, "out")), [("slow-machine", ("d",))]),
    "pair slow both ways": (slow((1, 3), (3, 1)), [("slow-pair", ("b", "d"))]),
    "pair slow one way": (slow((3, 1)), [("slow-direction", ("d", "b"))]),
    "pair filtered": (having(broken={(1, 2): "no TCP connection"}), [("pair", ("b", "c"))]),
    "machine filtered": (having(broken={(0, 2): "no", (1, 2): "no", (2, 3): "no"}), [("machine", ("c",))]),
    "large lost": (having(broken={(0, 3): "large"}), [("mtu", ("a", "d"))]),
    "torch's messages late": (having(broken={(0, 3): TORCH_LATE}), [("messages", ("a", "d"))]),
    "rank killed": (having(lost={1: "ended"}), [("rank-ended", ("b",))]),
    "rank stopped": (having(lost={0: "silent"}), [("rank-silent", ("a",))]),
    "rank without descriptors": (having(lost={2: "descriptors"}), [("rank-descriptors", ("c",))]),
    "rank interrupted": (having(lost={3: "interrupted"}), [("rank-interrupted", ("d",))]),
    "rank 0 cut off": (having(lost={2: "cut"}), [("pair", ("a", "c"))]),
    "two ranks on one GPU": (having(same_gpu=[[2, 3]]), [("gpu-shared", ("c", "d"))]),
    "a rank without a GPU": (having(without_gpu={2: "sees no GPU"}), [("gpu-missing", ("c",))]),
    "machine busy": (busy(1, 0.02), [("cpu-busy", ("b",))]),
    "clock slow": (busy(1, 0.19), [("cpu-slow", ("b",))]),
    "wrong network": (faster_network(), [("interface", ("a", "b", "c", "d"))]),
    "wrong result": (having(wrong=["all_reduce on cpu, rank 1: 3 of 8 numbers differ"]), [("wrong-result", ())]),
    "check's port filtered": (having(unreached={2: "c"}), [("control", ("c",))]),
    "error of the check": (having(defect="KeyError: 'rank'"), [("defect", ())]),
    "collective hangs": (having(failed=["broadcast on cpu: not finished"]), [("collective", ())]),
    "nearly nothing, multiplied": (
        having(work={rank: (0.018 if rank == 1 else 0.002, 0.002) for rank in range(4)}),
        [],
    ),
    "a lost rank breaks pairs and collectives": (
        having(
            lost={2: "silent"},
            broken={(0, 2): "no answer", (1, 2): "no answer"},
            failed=["broadcast on cpu: not finished at its deadline"],
        ),
        [("rank-silent", ("c",))],
    ),
    "a busy machine breaks pairs": (
        having(busy(3, 0.02), broken={(0, 3): "large", (1, 3): TORCH_LATE}),
        [("cpu-busy", ("d",))],
    ),
    "a busy machine is silent": (having(busy(3, 0.02), lost={3: "silent"}), [("cpu-busy", ("d",))]),
    "a busy machine is cut off": (having(busy(3, 0.02), lost={3: "cut"}), [("cpu-busy", ("d",))]),
    "rank killed on a busy machine": (
        having(busy(3, 0.02), lost={3: "ended"}),
        [("rank-ended", ("d",)), ("cpu-busy", ("d",))],
    ),
    "the ends of a filtered pair are slow": (
        having(slow((1, 3), (0, 2)), broken={(1, 2): "no TCP connection"}),
        [("pair", ("b", "c"))],
    ),
    "rank killed in the wrong network": (having(faster_network(), lost={1: "ended"}), [("rank-ended", ("b",))]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_blamed_on_what_has_it(name: str) -> None:
    make, expected = FAULTS[name]
    seen = healthy()
    make(seen)
    assert blamed(seen) == expected
    for verdict in judge(seen):
        assert all(name in verdict.observation for name in verdict.where)
        assert verdict.cause
        assert verdict.fix


def test_each_kind_of_fault_is_tried_and_is_on_the_page() -> None:
    assert {kind for _, expected in FAULTS.values() for kind, _ in expected} == KINDS
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_small_healthy_job_raises_no_alarm(count: int) -> None:
    assert judge(healthy(count)) == []


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (slow((1, 0)), ("slow-direction", ("b", "a"))),
        (having(broken={(0, 1): "no TCP connection"}), ("pair", ("a", "b"))),
    ],
)
def test_of_two_machines_none_is_blamed_alone(make: Callable[[Evidence], None], expected: Blame) -> None:
    seen = healthy(2)
    make(seen)
    assert blamed(seen) == [expected]


@pytest.mark.parametrize("direction", ["in", "out", "both"])
@pytest.mark.parametrize("place", range(3))
def test_one_slow_machine_of_three_is_named(place: int, direction: str) -> None:
    seen = healthy(3)
    slow(*at(place, 3, direction))(seen)
    assert blamed(seen) == [("slow-machine", (NAMES[place],))]


@pytest.mark.parametrize(("slowest", "expected"), [(66, []), (5, [("slow-direction", ("b", "c"))])])
def test_rates_that_load_has_spread_are_no_fault(slowest: float, expected: list[Blame]) -> None:
    """These were measured on two cores with a load of 24: no link is slow but the one that is."""
    seen = healthy()
    spread = iter((72, 101, 109, 150, 169, 233, 248, 322, 390, 559, 911))
    seen.rates = {pair: 1e6 * next(spread) for pair in itertools.permutations(range(4), 2) if pair != (1, 2)}
    seen.rates[1, 2] = 1e6 * slowest
    assert blamed(seen) == expected


def test_ranks_of_one_gpu_are_named_with_their_machine() -> None:
    verdict = verdict_on(healthy(2), place_of={0: 0, 1: 1, 2: 1}, same_gpu=[[1, 2]])
    assert verdict.observation.startswith("ranks 1 and 2 on b use")


@pytest.mark.parametrize(("backend", "by"), [("gloo", False), ("nccl", True), ("cpu:gloo,cuda:nccl", True)])
def test_a_collective_that_fails_alone_tells_what_showed_the_pairs(backend: str, by: bool) -> None:
    verdict = verdict_on(healthy(), backend=backend, failed=["broadcast: not finished"])
    assert ("over Gloo" in verdict.observation) is by


def test_the_fix_of_lost_large_messages_fills_a_packet() -> None:
    seen = healthy()
    headers = 28  # of IP and ICMP
    assert f"-s {1500 - headers} ADDRESS`" in verdict_on(seen, broken={(0, 3): "large"}).fix
    places = [structs.replace(each, address="fd00::1") for each in seen.places]
    assert "-s 1452 ADDRESS`" in verdict_on(seen, broken={(0, 3): "large"}, places=places).fix


@pytest.mark.parametrize(
    ("interfaces", "words"),
    [
        (("eth1", "eth1"), "MINGLE_INTERFACE=eth1 on every machine"),
        (("eth1", "ens5"), "MINGLE_INTERFACE on each machine to its own of ens5, eth1"),
    ],
)
def test_the_fix_of_a_slower_network_names_the_interface_of_each_machine(
    interfaces: tuple[str, str], words: str
) -> None:
    seen = healthy()
    faster_network(*interfaces)(seen)
    assert words in verdict_on(seen).fix


def test_the_verdict_shows_interface_address_and_mtu_of_both_ends() -> None:
    verdict = verdict_on(healthy(), broken={(1, 2): "no TCP connection (timed out)"})
    assert "b (eth0 10.0.0.2, MTU 1500) and c (eth0 10.0.0.3, MTU 1500)" in verdict.observation
