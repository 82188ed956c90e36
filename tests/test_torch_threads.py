"""A process that has finished its work ends well, even when a thread of Gloo has not put its tensors down yet."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mingle.distributed import torch_threads

# The threads own the tensors of works that nobody waits for, and with this interval the interpreter's lock changes
# hands only where it must: without help the interpreter is down before any of them gets it.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
import mingle.distributed.rendezvous
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)
for _ in range(200):
    dist.all_gather([torch.empty(32)], torch.ones(32), async_op=True)
"""


def test_tensors_that_gloo_holds_at_the_end_do_not_abort_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},  # installed or not
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def _tasks(directory: Path, *stats: str) -> Path:
    for number, stat in enumerate(stats):
        task = directory / str(number)
        task.mkdir()
        (task / "stat").write_text(stat)
    return directory


def test_only_gloos_threads_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = _tasks(tmp_path, "1 (python) R 1", "2 (pt_gloo_runloop) S 1", "3 (a) (b) R 1")
    (tmp_path / "4").mkdir()  # one that ends while it is looked at
    monkeypatch.setattr(torch_threads, "_TASKS", tasks)
    assert torch_threads._states() == {"S"}


@pytest.mark.parametrize(("version", "states"), [((2, 6), {"S"}), ((2, 8), set())])
def test_only_where_torch_gives_them_no_name_all_are_looked_at_but_pythons(
    version: tuple[int, int], states: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_threads, "torch_version", lambda: version)
    monkeypatch.setitem(sys.modules, "torch", sys)  # whether or not somebody has imported it
    (tmp_path / str(threading.get_native_id())).mkdir()
    (tmp_path / str(threading.get_native_id()) / "stat").write_text("1 (python) R 1")
    monkeypatch.setattr(torch_threads, "_TASKS", _tasks(tmp_path, "1 (python) S 1", "2 (pt_tcpstore_uv) S 1"))
    assert torch_threads._states() == states


@pytest.mark.parametrize("state", ["R", "D"])
def test_a_thread_that_never_rests_is_left_behind(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_threads, "_TASKS", _tasks(tmp_path, f"1 (pt_gloo_runloop) {state} 1"))
    monkeypatch.setattr(torch_threads, "SETTLE_SECONDS", 0.05)
    started = time.monotonic()
    torch_threads.settle()
    assert 0.05 <= time.monotonic() - started < 2


def test_without_proc_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_threads, "_TASKS", tmp_path / "missing")
    monkeypatch.setattr(torch_threads, "SETTLE_SECONDS", 3600.0)
    torch_threads.settle()
