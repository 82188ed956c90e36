"""A bucket: the helper process that makes fsspec's calls, its replies, its failures and its end.

fsspec's own file system for local files stands for a bucket here; `tests/lab/test_bucket.py` has a server of S3.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mingle.network import bucket
from mingle.network.bucket import Bucket, Helper
from mingle.network.folder import FolderProblem
from tests.support.fresh_calls import files_run_by
from tests.support.loopback import until
from tests.support.run_nodes import has_ended

JOB = "d" * 32


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Bucket]:
    made = Bucket(Helper(f"file://{tmp_path}"), JOB)
    yield made
    made.close()
    made.reap()


def test_no_type_is_looked_at_when_the_first_answer_comes(tmp_path: Path) -> None:
    """Each folder has a thread: two of them that did so at once could crash in msgspec."""
    made = f"from mingle.network.bucket import Bucket, Helper; place = Bucket(Helper('file://{tmp_path}'), 'job')"
    ran = files_run_by("place.list()", after=made)
    assert any("bucket" in file for file in ran)
    assert not [file for file in ran if "msgspec" in file]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "s3fs.py").write_text("raise ImportError('there is no s3fs')")
    monkeypatch.syspath_prepend(tmp_path)
    made = Bucket(Helper("s3://bucket/mingle"), JOB)
    try:
        with pytest.raises(FolderProblem, match="a package that is not installed here") as caught:
            made.list()
        assert caught.value.fix == "pip install s3fs"
    finally:
        made.close()
        made.reap()


def test_the_helper_ends_with_the_connection(place: Bucket) -> None:
    place.list()
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
    place.list()
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


def test_ctrl_c_is_not_for_the_helper(place: Bucket) -> None:
    assert place.helper.pid is not None
    assert os.getpgid(place.helper.pid) != os.getpgrp()


def test_the_helper_finds_the_modules_that_this_process_finds_and_none_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    # Python looks only at the texts among them.
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), tmp_path])
    made = Bucket(Helper(f"file://{tmp_path}"), JOB)
    try:
        with made.open(create=True) as opened:
            assert opened.list() == []
    finally:
        made.close()
        made.reap()


def test_a_helper_that_was_killed_is_a_problem_and_not_a_hang(place: Bucket) -> None:
    place.list()
    assert place.helper.pid is not None
    os.kill(place.helper.pid, signal.SIGKILL)
    with pytest.raises(FolderProblem, match=r"its helper process has ended \(exit status -9"):
        place.list()


def test_a_helper_that_can_not_be_started_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    made = Bucket(Helper("s3://bucket/mingle"), JOB)
    with pytest.raises(FolderProblem, match="needs a helper process, which can't be started"):
        made.list()
    made.close()
    made.reap()


def test_a_thread_that_waits_goes_on_when_the_helper_is_killed() -> None:
    """The storage accepts the connection and says nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = Bucket(Helper(f"ftp://127.0.0.1:{silent.getsockname()[1]}/mingle"), JOB)
        problems: list[FolderProblem] = []

        def ask() -> None:
            try:
                made.list()
            except FolderProblem as problem:
                problems.append(problem)

        thread = threading.Thread(target=ask)
        thread.start()
        connection, _ = silent.accept()
        with connection:
            assert thread.is_alive()
            made.abort()
            thread.join(30)
        assert "helper process has ended" in problems[0].what
        made.close()
        made.reap()


def test_stopped_helper_is_not_waited_for(place: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "REAP_SECONDS", 0.1)
    place.list()
    assert place.helper.pid is not None
    os.kill(place.helper.pid, signal.SIGSTOP)
    place.close()
    place.reap()
    assert place.helper.ended()
