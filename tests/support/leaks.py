"""What code must not leave behind in its process: threads, sockets, children, environment variables."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ABANDONED_THREAD = "mingle-abandoned"
"""Prefix of the daemon threads that mingle may leave behind: calls of torch that cannot be ended."""

_DESCRIPTORS = Path("/dev/fd")  # Linux and macOS
# pytest's own; those that torch sets once, when a part of it is first imported
_EXPECTED_VARIABLES = frozenset(
    {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
)
# started once, they live as long as the interpreter by design: Python's own, and the one of `forked_ranks`
_EXPECTED_CHILDREN = ("multiprocessing.resource_tracker", "tests.support.forked_ranks")


class LeakError(AssertionError):
    """Something was left behind; each thing is named in the message."""


@dataclass(frozen=True)
class Snapshot:
    """What a process holds at one moment."""

    threads: frozenset[threading.Thread]
    sockets: Mapping[int, int]
    """Descriptor → inode, by which a descriptor number that is used again is told apart."""
    children: frozenset[int]
    environment: Mapping[str, str]

    @classmethod
    def take(cls) -> Snapshot:
        """Look at this process."""
        # CPython lists a thread for ever whose start an exception has ended before the system was asked for it.
        threads = frozenset(each for each in threading.enumerate() if each.ident is not None)
        return cls(threads, _sockets(), frozenset(_children()), dict(os.environ))

    def leaks(self) -> list[str]:
        """Describe what this process holds now and did not hold then, or holds changed."""
        now = Snapshot.take()
        return [
            *(
                f"thread {thread.name!r}"
                for thread in now.threads - self.threads
                if not (thread.daemon and thread.name.startswith(ABANDONED_THREAD))
            ),
            *(
                f"socket {_describe_socket(descriptor)}"
                for descriptor, inode in now.sockets.items()
                if self.sockets.get(descriptor) != inode
            ),
            *(f"child process {pid}: {_describe_process(pid)}" for pid in now.children - self.children),
            *(
                f"environment variable {name}: {self.environment.get(name)!r} became {now.environment.get(name)!r}"
                for name in sorted({*self.environment, *now.environment} - _EXPECTED_VARIABLES)
                if self.environment.get(name) != now.environment.get(name)
            ),
        ]

    def restore_environment(self) -> None:
        """Put the variables back, so that one leak is reported once."""
        for name in set(os.environ) - set(self.environment) - _EXPECTED_VARIABLES:
            del os.environ[name]
        for name, value in self.environment.items():
            if name not in _EXPECTED_VARIABLES and os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def leak_check(grace: float = 20.0) -> Iterator[None]:
    """Raise `LeakError` if the block leaves something behind; an exception of the block itself comes first.

    What is about to end is given ``grace`` seconds: a thread's last instructions, a killed process not yet
    reaped.
    """
    before = Snapshot.take()
    try:
        yield
    except BaseException:
        before.restore_environment()
        raise
    leaks = before.leaks()
    if leaks:
        gc.collect()  # not before there is a suspicion: with torch loaded a collection costs more than most tests
        leaks = before.leaks()
    if leaks:
        # What torch holds in a call that can't be ended ends with that call, which has a deadline of its own.
        for thread in threading.enumerate():
            if thread.name.startswith(ABANDONED_THREAD):
                thread.join(30)
    deadline = time.monotonic() + grace
    while leaks and time.monotonic() < deadline:
        time.sleep(0.02)  # the end of a native thread or of a child gives no notice that all of these share
        gc.collect()
        leaks = before.leaks()
    before.restore_environment()
    if leaks:
        raise LeakError("left behind:\n" + "\n".join(f"  {leak}" for leak in leaks))


def _sockets() -> dict[int, int]:
    found = {}
    for entry in list(_DESCRIPTORS.iterdir()):
        descriptor = int(entry.name)
        try:
            status = os.fstat(descriptor)
        except OSError:  # the descriptor of the listing itself, closed by now
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[descriptor] = status.st_ino
    return found


def _children() -> Iterator[int]:
    """The children of this process, zombies included; none where there is no /proc."""
    for listing in Path("/proc/self/task").glob("*/children"):  # proc(5): of each thread those that it has forked
        with contextlib.suppress(FileNotFoundError):  # the thread has ended, and its children are another's now
            for pid in listing.read_text().split():
                if not any(name in _describe_process(int(pid)) for name in _EXPECTED_CHILDREN):
                    yield int(pid)


def _describe_socket(descriptor: int) -> str:
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError as error:
        return f"{descriptor} ({error})"
    with copy:
        kind = f"{copy.family.name} {copy.type.name}"
        addresses = []
        for address in (copy.getsockname, copy.getpeername):
            with contextlib.suppress(OSError):  # not every socket has a peer
                addresses.append(str(address()))
        return f"{descriptor}: {kind} {' - '.join(addresses)}"


def _describe_process(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "has ended since"
    return command or "has ended and nobody waited for it"
