"""Torch's threads: they must have let go of the last tensors before their group, or Python itself, is taken down.

A thread of Gloo drops its tensors only after it has told the waiting Python thread that the work is done. Whoever drops
a tensor last has to take the interpreter's lock, from C++.

* **A group's end.** Torch before 2.8 waits in the group's destructor for these threads without letting go of the lock
  (pytorch/pytorch#154976 mended it): where one of them wants it just then, the process hangs for ever.
* **The interpreter's exit.** CPython before 3.14 ends a thread that wants the lock then by unwinding its stack; the
  stack has destructors that may not be unwound, so the C++ library calls ``std::terminate`` and the process, whose work
  was done and right, ends with SIGABRT (status 134 in a shell). ``destroy_process_group`` does not save it: a model in
  DistributedDataParallel keeps its group, and with it these threads, until the process is gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from mingle.engine.store import torch_version

SETTLE_CPU_SECONDS = 1.0
"""Threads that compute for longer than this hold no tensor of a finished work. Of CPU, since a machine may be busy."""
SETTLE_SECONDS = 20.0
"""The longest wait, however little of the CPU this process gets."""
_LOOK_SECONDS = 0.002
_QUIET_LOOKS = 2
_NAME = "pt_gloo_runloop"
"""What torch calls the threads that carry out Gloo's works; in 2.6 they have no name of their own yet."""
_TASKS = Path("/proc/self/task")


def settle() -> None:
    """Waits, with the interpreter's lock let go of, until no thread of Gloo is at work; a second of CPU at most.

    A thread that wants the lock is runnable while this thread is in a system call, so it counts as one at work. Where
    there is no proc(5) this does nothing.
    """
    deadline, cpu_deadline = time.monotonic() + SETTLE_SECONDS, time.process_time() + SETTLE_CPU_SECONDS
    quiet = 0
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline and time.process_time() < cpu_deadline:
        states = _states()
        if not states:
            return
        quiet = 0 if "R" in states or "D" in states else quiet + 1
        time.sleep(_LOOK_SECONDS)


def _states() -> set[str]:
    """The states of Gloo's threads, by the letters of proc(5).

    Where torch is so old that they may have no name, and none has it: of all threads that are not Python's.
    """
    named, others = set[str](), set[str]()
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return named
    nameless = "torch" in sys.modules and torch_version() < (2, 8)
    pythons = {str(thread.native_id) for thread in threading.enumerate()} if nameless else ()
    for task in tasks:
        with contextlib.suppress(OSError):  # it has just ended
            # One read(2), whose time the kernel gives to whoever waits for the interpreter's lock.
            name, _, rest = _read(task / "stat").partition("(")[2].rpartition(")")
            if name == _NAME:
                named.add(rest.split()[0])
            elif nameless and task.name not in pythons:
                others.add(rest.split()[0])
    return named or others


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)
