"""Which newcomers fit in a session of ranks, how many form it, and for how long their ACK is awaited."""

from __future__ import annotations

from typing import Any

import pytest

from mingle.protocol.session.admission import ACKNOWLEDGE_SECONDS, Admission
from mingle.protocol.session.seats import Seated
from mingle.wire.frames import Join, ProcessInfo, Unit


def join(rank: int | None, *, size: int = 3, unit: Unit = "rank", **more: Any) -> Join:
    return Join(world_size=size, rank=rank, node="n1", who=ProcessInfo(hostname="h1", unit=unit), **more)


@pytest.mark.parametrize(
    ("applicant", "assigned", "reason", "detail"),
    [
        (
            join(1, size=4),
            False,
            "world size",
            "the host was started with world_size=3, the newcomer with world_size=4",
        ),
        (
            join(None, size=2, unit="node"),
            True,
            "world size",
            "the host was started with --nnodes=3, the newcomer with --nnodes=2",
        ),
        (join(None), False, "ranks mixed", "the newcomer has no rank while the host was given one"),
        (join(1), True, "ranks mixed", "the newcomer was given rank 1 while the host was given none"),
        (join(3), False, "rank out of range", "rank 3 of 3"),
        (join(1, kind="agents"), False, "kind", "this session is one of ranks, the newcomer is one of agents"),
    ],
)
def test_a_newcomer_that_can_never_fit_is_told_why(applicant: Join, assigned: bool, reason: str, detail: str) -> None:
    assert Admission(3).misfit(applicant, assigned=assigned) == (reason, detail)


@pytest.mark.parametrize(("rank", "assigned"), [(None, True), (0, False), (2, False)])
def test_a_newcomer_with_the_settings_of_the_host_fits(rank: int | None, assigned: bool) -> None:
    assert Admission(3).misfit(join(rank), assigned=assigned) is None


def test_a_session_of_ranks_forms_with_all_of_them_and_no_fewer() -> None:
    rules = Admission(3)
    names = [bytes([number]) * 16 for number in range(3)]
    for count in range(4):
        rules.seats = {name: Seated(name, 1, join(1)) for name in names[:count]}
        assert rules.complete(now=1e9) is rules.enough(count) is (count == 3)


def test_a_large_job_has_more_time_to_acknowledge() -> None:
    few, many = (Admission(size).acknowledge_seconds for size in (2, 5000))
    assert few == ACKNOWLEDGE_SECONDS < many
