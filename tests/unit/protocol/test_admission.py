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
    ("applicant", "assigned", "reason", "named"),
    [
        (join(1, size=4), False, "world size", ("world_size=3", "world_size=4")),
        (join(None, size=2, unit="node"), True, "world size", ("--nnodes=3", "--nnodes=2")),
        (join(None), False, "ranks mixed", ()),
        (join(1), True, "ranks mixed", ("rank 1",)),
        (join(3), False, "rank out of range", ("rank 3 of 3",)),
        (join(1, kind="agents"), False, "kind", ("ranks", "agents")),
    ],
)
def test_a_newcomer_that_can_never_fit_is_told_why(
    applicant: Join, assigned: bool, reason: str, named: tuple[str, ...]
) -> None:
    misfit = Admission(3).misfit(applicant, assigned=assigned)
    assert misfit is not None
    assert misfit[0] == reason
    assert all(word in misfit[1] for word in named), misfit


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
