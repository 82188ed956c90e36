"""The limit of open files: raised where the job may not fit, and said where that is not enough."""

from __future__ import annotations

import resource

import pytest

from mingle.engine import file_limit, progress
from mingle.engine.file_limit import FILES_PER_RANK


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize(
    ("limits", "ranks", "raised_to", "warned"),
    [
        ((1024, 4096), 64, None, False),
        ((1024, 4096), 1000, 4096, False),
        ((1024, 2048), 1000, 2048, True),
        ((1024, resource.RLIM_INFINITY), 1000, 3128, False),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 100_000, None, False),
        ((1024, 1024), 1000, 1024, True),
    ],
)
def test_room_for_the_connections_of_a_large_job(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    ranks: int,
    raised_to: int | None,
    warned: bool,
    quiet: bool,
) -> None:
    new_limits: list[tuple[int, int]] = []
    said: list[tuple[str, bool]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: new_limits.append(new))
    monkeypatch.setattr(progress, "say", lambda level, text, *, quiet: said.append((text, quiet)))
    file_limit.make_room(ranks, FILES_PER_RANK, what="ranks", quiet=quiet)
    assert new_limits == ([] if raised_to is None else [(raised_to, limits[1])])
    assert bool(said) is warned
    if warned:
        assert f"{limits[1]} files and needs about 3128 for 1000 ranks" in said[0][0]
        assert said[0][1] is quiet
