from __future__ import annotations

import pytest

from mingle.network.transport import Received
from mingle.network.twins import REMEMBERED, TOGETHER_SECONDS, Twins


def received(data: bytes = b"seek", version: str = "4", *, interface: str = "eth0", multicast: bool = True) -> Received:
    source = ("10.0.0.1", 5) if version == "4" else ("fe80::1", 5, 0, 2)
    return Received(data=data, interface=interface, source=source, family=version, multicast=multicast, local=False)  # type: ignore[arg-type]


def heard(*first: Received) -> Twins:
    twins = Twins()
    for each in first:
        assert not twins.is_second(each, 10.0)
        twins.note(each, 10.0)
    return twins


@pytest.mark.parametrize(("first", "second"), [("4", "6"), ("6", "4")])
def test_the_same_by_the_other_version_is_a_second(first: str, second: str) -> None:
    twins = heard(received(version=first))
    assert twins.is_second(received(version=second), 10.0 + TOGETHER_SECONDS / 2)


def test_several_may_come_by_one_version_before_they_come_by_the_other() -> None:
    twins = heard(received(b"a"), received(b"b"))
    assert twins.is_second(received(b"a", "6"), 10.0)
    assert twins.is_second(received(b"b", "6"), 10.0)


@pytest.mark.parametrize(
    ("other", "at"),
    [
        (received(version="4"), 10.001),  # said again: the answer to the first may be lost
        (received(version="6"), 10.001 + TOGETHER_SECONDS),
        (received(b"offer", "6"), 10.001),
        (received(version="6", interface="eth1"), 10.001),  # by that network its sender is reached as well
        (received(version="6", multicast=False), 10.001),
    ],
)
def test_anything_else_is_heard(other: Received, at: float) -> None:
    assert not heard(received()).is_second(other, at)


def test_a_unicast_is_not_remembered() -> None:
    assert not heard(received(multicast=False)).is_second(received(version="6"), 10.0)


def test_a_flood_takes_no_memory() -> None:
    twins = heard(*(received(str(number).encode()) for number in range(10 * REMEMBERED)))
    assert len(twins._heard) <= REMEMBERED
