"""A bucket: the helper process that makes fsspec's calls, its replies, its failures and its end.

fsspec's own file system for local files stands for a bucket here; `tests/lab/test_bucket.py` has a server of S3.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mingle.network import bucket
from mingle.network.bucket import Bucket, Helper
from mingle.network.folder import FolderProblem
from tests.support.fresh_calls import files_run_by
from tests.support.loopback import until
from tests.support.run_nodes import has_ended

JOB = "d" * 32


@contextlib.contextmanager
def opened(url: str) -> Iterator[Bucket]:
    made = Bucket(Helper(url), JOB)
    try:
        yield made
    finally:
        made.close()
        made.reap()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Bucket]:
    """A bucket whose helper has answered once."""
    with opened(f"file://{tmp_path}") as made:
        made.list()
        yield made


def pid_of(place: Bucket) -> int:
    assert place.helper.pid is not None
    return place.helper.pid


def test_no_type_is_looked_at_when_the_first_answer_comes(tmp_path: Path) -> None:
    """Each folder has a thread: two of them that did so at once could crash in msgspec."""
    made = f"from mingle.network.bucket import Bucket, Helper; place = Bucket(Helper('file://{tmp_path}'), 'job')"
    ran = files_run_by("place.list()", after=made)
    assert any("bucket" in file for file in ran)
    assert not [file for file in ran if "msgspec" in file]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "s3fs.py").write_text("raise ImportError('there is no s3fs')")
    monkeypatch.syspath_prepend(tmp_path)
    with opened("s3://bucket/mingle") as made:
        with pytest.raises(FolderProblem, match="a package that is not installed here") as caught:
            made.list()
        assert caught.value.fix == "pip install s3fs"


def test_a_helper_that_can_not_be_started_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with (
        opened("s3://bucket/mingle") as made,
        pytest.raises(FolderProblem, match="needs a helper process, which can't be started"),
    ):
        made.list()


def test_the_helper_ends_with_the_connection_and_not_by_ctrl_c(place: Bucket) -> None:
    assert os.getpgid(pid_of(place)) != os.getpgrp()
    place.close()
    place.close()
    until(place.helper.ended)


def test_the_helper_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from mingle.network.bucket import Helper\n"
        f"made = Helper('file://{tmp_path}'); made.ask('jobs')\n"
        "print(made.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        os.kill(helper, 0)
        process.kill()
    until(lambda: has_ended(helper))


def test_a_fork_keeps_no_connection(place: Bucket) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        place.close()
        until(place.helper.ended)
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_the_helper_finds_the_modules_that_this_process_finds_and_none_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    # Python looks only at the texts among them.
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), tmp_path])
    with opened(f"file://{tmp_path}") as made:
        assert made.list() == []


def test_a_helper_that_was_killed_is_a_problem_and_not_a_hang(place: Bucket) -> None:
    os.kill(pid_of(place), signal.SIGKILL)
    with pytest.raises(FolderProblem, match=r"its helper process has ended \(exit status -9"):
        place.list()


def test_stopped_helper_is_not_waited_for(place: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "REAP_SECONDS", 0.1)
    os.kill(pid_of(place), signal.SIGSTOP)
    place.close()
    place.reap()
    assert place.helper.ended()


def test_a_thread_that_waits_goes_on_when_the_helper_is_killed() -> None:
    """The storage accepts the connection and says nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        with opened(f"ftp://127.0.0.1:{silent.getsockname()[1]}/mingle") as made:
            asking = pool.submit(made.list)
            connection, _ = silent.accept()
            with connection:
                assert not asking.done()
                made.abort()
                problem = asking.exception(30)
        assert isinstance(problem, FolderProblem)
        assert "helper process has ended" in problem.what
