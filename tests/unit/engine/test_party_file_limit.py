"""The limit of open files: raised where the job may not fit, and said where that is not enough."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from mingle.engine import party, progress
from mingle.engine.party import FILES_PER_RANK, free_files, make_room


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize(
    ("limits", "allowed", "ranks", "raised_to", "too_few"),
    [
        ((1024, 4096), 10_000, 64, None, None),
        ((1024, 4096), 10_000, 1000, 4096, None),
        ((1024, 2048), 10_000, 1000, 2048, 2048),
        ((1024, resource.RLIM_INFINITY), 10_000, 1000, 3128, None),
        ((1024, resource.RLIM_INFINITY), 3_000, 1000, None, 1024),  # the system's own limit is lower
        ((1024, 4096), 3_000, 1000, None, 1024),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10_000, 100_000, None, None),
        ((1024, 1024), 10_000, 1000, 1024, 1024),
    ],
)
def test_room_for_the_connections_of_a_large_job(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    allowed: int,
    ranks: int,
    raised_to: int | None,
    too_few: int | None,
    quiet: bool,
) -> None:
    new_limits: list[tuple[int, int]] = []
    said: list[tuple[str, bool]] = []

    def limit(_what: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > allowed:
            raise ValueError("not allowed to raise maximum limit")
        new_limits.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", limit)
    monkeypatch.setattr(progress, "say", lambda level, text, *, quiet: said.append((text, quiet)))
    make_room(ranks, FILES_PER_RANK, what="rank", quiet=quiet)
    assert new_limits == ([] if raised_to is None else [(raised_to, limits[1])])
    if too_few is None:
        assert not said
    else:
        assert f"{too_few} files and needs about 3128 for 1000 ranks" in said[0][0]
        assert said[0][1] is quiet


@pytest.mark.parametrize("counts", [True, False])
def test_how_many_files_can_still_be_opened(monkeypatch: pytest.MonkeyPatch, counts: bool) -> None:
    if not counts:  # a kernel that does not say how many there are
        monkeypatch.setattr(party, "_OWN_FILES", Path("/dev/fd/"))
    before = free_files()
    with Path(os.devnull).open() as one, Path(os.devnull).open() as other:
        assert (before - free_files(), one.closed, other.closed) == (2, False, False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert free_files() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert free_files() == sys.maxsize
