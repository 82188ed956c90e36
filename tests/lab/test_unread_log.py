"""A rank whose log nobody reads holds up no job."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import pytest

import mingle
from mingle.engine import progress

from . import Lab, report


def with_a_full_log(job_id: str, rank: int, logs: bool) -> int:
    """Join a job while stderr is a full pipe; log to it if ``logs``. Reports ``line`` when it has something to show."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    os.dup2(writer, 2)
    if logs:
        logging.basicConfig(level=logging.INFO)
    say, progress.LOG_AFTER_SECONDS = progress.say, 0.5

    def reported(*arguments: Any, **more: Any) -> None:
        report("line")
        say(*arguments, **more)

    progress.say = reported
    with mingle.discover(job_id, rank=rank, world_size=2, family=4, discovery_timeout=90) as job:
        os.close(reader)  # what ends this process can write to stderr again
        return job.rank


def joins(job_id: str, rank: int) -> int:
    """Join the same job."""
    with mingle.discover(job_id, rank=rank, world_size=2, family=4, discovery_timeout=90) as job:
        return job.rank


@pytest.mark.parametrize("logs", [False, True], ids=["stderr", "logging"])
def test_a_rank_whose_log_is_full_joins_a_job_that_forms_after_its_progress_line(lab: Lab, logs: bool) -> None:
    first, last = lab.lan(2)
    # Where a name can't be looked up, torch writes a warning to stderr itself, and waits there for room.
    names = [f"{form}{host.address()} {host.name}\n" for host in (first, last) for form in ("", "::ffff:")]
    for host in (first, last):
        host.hosts_file.write_text("".join(["127.0.0.1 localhost\n", *names]))
    waiting = first.start(with_a_full_log, "unread", 1, logs)
    waiting.wait_for("line")
    ranks = [last.start(joins, "unread", 0), waiting]
    assert [rank.result(60) for rank in ranks] == [0, 1]
