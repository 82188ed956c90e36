"""Torch's Gloo: the address that it binds, and its threads, which must have finished before Python ends.

**The address.** ``GLOO_SOCKET_IFNAME`` names an interface, and Gloo then takes the first address that getifaddrs(3)
lists for it: IPv4 before IPv6, and of several the one that was configured first (gloo/transport/tcp/device.cc). Where
that is not the address that all ranks have proved to each other, a group would hang although every rank has been found:
on hosts whose IPv4 address is unreachable, with a second address on the interface, and with IPv6, where the first one
is often link-local. No variable names an address, and ``init_process_group`` passes no options to Gloo. So `bind`
replaces the constructor of its class.

The workers of torchrun do not import mingle. Where they would use the wrong address, the agent has torch itself call
:func:`bind_as_told` in them: at the end of its import torch loads what it finds under the entry point group
``torch.backends`` (from 2.5 on, pytorch#122468), and an entry point is found wherever ``PYTHONPATH`` leads to.

**The threads.** A thread of Gloo drops its tensors only after it has told the waiting Python thread that the work is
done. Dropping the last reference to a tensor takes the interpreter's lock, from C++. So `settle` waits for these
threads before two moments:

* The end of a group. Torch before 2.8 waits in the group's destructor for these threads without releasing the lock
  (pytorch/pytorch#154976 fixed it): if one of them wants it at that moment, the process hangs for ever.
* The exit of the interpreter. CPython before 3.14 ends a thread that wants the lock then by unwinding its stack; the
  stack has destructors that must not be unwound, so the C++ library calls ``std::terminate`` and the process, whose
  work was done and right, ends with SIGABRT (status 134 in a shell). ``destroy_process_group`` does not prevent it: a
  model in DistributedDataParallel keeps its group, and with it these threads, until the process is gone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import netifaces

logger = logging.getLogger("mingle")

VARIABLE = "GLOO_SOCKET_IFNAME"
"""The variable that names an interface to Gloo."""

SETTLE_CPU_SECONDS = 1.0
"""CPU time: threads that compute for longer hold no tensor of a finished work."""
SETTLE_SECONDS = 20.0
"""The longest wait, however little of the CPU this process gets."""
_LOOK_SECONDS = 0.002
_QUIET_LOOKS = 2
_NAME = "pt_gloo_runloop"
"""What torch calls the threads that carry out Gloo's works; in 2.6 they have no name of their own yet."""
_TASKS = Path("/proc/self/task")

_ADDRESS = "_MINGLE_GLOO_ADDRESS"  # between an agent and its workers; it is not a setting


def default_address(interface: str) -> str | None:
    """Return the address that Gloo takes for an interface by itself, without its zone; None: it has none."""
    try:
        families = netifaces.ifaddresses(interface)
    except ValueError:  # it has gone; to list all names first would take as long again
        return None
    for family in (netifaces.AF_INET, netifaces.AF_INET6):
        for entry in families.get(family, ()):
            return str(entry["addr"].partition("%")[0])
    return None


def misses(interface: str, address: str, environ: Mapping[str, str]) -> bool:
    """Return whether Gloo would choose another address than this one on the interface that its variable names."""
    return environ.get(VARIABLE) == interface and default_address(interface) not in (address, None)


def for_workers(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which processes that don't call mingle use this address as well: see `bind_as_told`.

    Args:
        address: it, with its zone if it is a link-local one.
        environ: what they would inherit without.
    """
    ours = str(Path(__file__).with_name("for_workers"))
    return {_ADDRESS: address, "PYTHONPATH": os.pathsep.join(filter(None, (ours, environ.get("PYTHONPATH"))))}


def bind_as_told() -> None:
    """Torch calls this in every process that has inherited `for_workers`, before any code of the user's uses torch."""
    if address := os.environ.get(_ADDRESS):
        bind(address)


def bind(address: str) -> Callable[[], None]:
    """Make every Gloo group of this process, made from now on, use this address; return what undoes it.

    A group that is made with options of its own keeps them.
    """
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_gloo_available():
        return lambda: None
    gloo = distributed.ProcessGroupGloo
    made_before = gloo.__init__

    @functools.wraps(made_before)
    def initialize(self: Any, store: Any, rank: int, size: int, *more: Any, **named: Any) -> None:
        options = None
        if not any(isinstance(each, gloo._Options) for each in (*more, *named.values())):
            options = _as_options(gloo, more, named)
        if options is None:
            made_before(self, store, rank, size, *more, **named)
        else:
            options._devices = [gloo.create_device(hostname=address)]
            made_before(self, store, rank, size, options)

    def undo() -> None:
        if gloo.__init__ is initialize:
            gloo.__init__ = made_before

    gloo.__init__ = initialize
    return undo


def _as_options(gloo: Any, more: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return Gloo's options with what a group is made with; None where they have no room for it.

    Torch makes a group with the timeout; 2.15 also with ``enable_reconfigure``, an option of that name.
    """
    options = gloo._Options()
    given: dict[str, Any] = {**dict(zip(("timeout",), more, strict=False)), **named}
    unknown = [name for name in given if name != "timeout" and not hasattr(options, name)]
    if unknown or len(more) > 1:
        logger.warning(
            "a Gloo group is made with arguments that this version of mingle does not know (%s), so Gloo chooses its "
            "address by %s; likely cause: torch is newer than mingle; fix: update mingle",
            ", ".join(unknown) or "a positional one",
            VARIABLE,
        )
        return None
    for name, value in given.items():
        setattr(options, "_timeout" if name == "timeout" else name, value)
    return options


# --- the threads ------------------------------------------------------------------------------------------------------


def settle() -> None:
    """Wait, without the interpreter's lock, until no thread of Gloo is at work; at most for a second of CPU.

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
    """Return the states of Gloo's threads, by the letters of proc(5).

    Where torch is so old that they may have no name, and none has it: of all threads that are not Python's.
    """
    named, others = set[str](), set[str]()
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return named
    nameless = "torch" in sys.modules and _torch_version() < (2, 8)
    pythons = {str(thread.native_id) for thread in threading.enumerate()} if nameless else ()
    for task in tasks:
        with contextlib.suppress(OSError):  # it has just ended
            # One read(2), whose time the kernel gives to a thread that waits for the interpreter's lock.
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


def _torch_version() -> tuple[int, ...]:
    from mingle.engine.store import torch_version  # not above: the workers of torchrun import this module, too

    return torch_version()
