"""Find the other processes that hold the UDP port, from the sockets in /proc.

It works on Linux alone; elsewhere it finds none. proc(5) and proc_net(5) describe the formats.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, structs

# A process that uses mingle has both of these libraries in memory.
_MINGLE_LIBRARIES = ("netifaces", "msgspec")

LOOK_SECONDS = 1.0
"""How long to search /proc. All ranks of a machine time out at once, and each one waits for its own search."""


class Holder(Struct, frozen=True):
    """A process that has opened the port, or a socket whose process this one can't see."""

    pid: int | None
    """None if it belongs to another user or to a container."""
    command: str = ""
    user: int | None = None
    mingle: bool = False
    """Whether the process uses mingle: such processes share the port."""
    cut_short: bool = False
    """Whether the search for the holder's process ran out of time."""

    def __str__(self) -> str:
        if self.cut_short:
            return f"a process of user {self.user} that was not found in time among those of this machine"
        if self.pid is None:
            return f"a process of user {self.user} that may not be seen from here (root may)"
        return f"pid {self.pid} ({self.command or 'unknown'})"


def sockets_on(port: int, *tables: str) -> dict[int, int]:
    """Return the sockets bound to a port in tables like /proc/net/udp: inode to user id."""
    found: dict[int, int] = {}
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and int(fields[1].rpartition(":")[2], 16) == port:
                found[int(fields[9])] = int(fields[7])
    return found


def holders(port: int, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> tuple[Holder, ...]:
    """Return the other processes that hold a UDP port in this network namespace.

    The search ends after `LOOK_SECONDS` and returns what it has found so far.
    """
    if sys.platform != "linux":
        return ()
    inodes = _sockets(port, proc)
    if not inodes:
        return ()
    deadline = clock() + LOOK_SECONDS

    def late() -> bool:
        return clock() >= deadline

    owners, cut_short = _owners(frozenset(inodes), proc, late)
    # The sockets of a process that has ended meanwhile are gone from the table as well.
    inodes = {inode: user for inode, user in _sockets(port, proc).items() if inode in inodes}
    siblings = _siblings(port, proc)
    found: dict[int | None, Holder] = {}
    for inode, user in inodes.items():
        pids = owners.get(inode, ())
        for pid in pids:
            # The search names at least one holder, even after the deadline.
            if pid != os.getpid() and pid not in found and not (found and late()):
                found[pid] = Holder(pid, _command(proc / str(pid)), user, _discovers(proc / str(pid)))
        if not pids:
            found.setdefault(None, Holder(None, user=user, cut_short=cut_short))
    known = sum(holder.mingle for holder in found.values()) + any(os.getpid() in pids for pids in owners.values())
    if None in found and siblings > known:
        # Ranks of another user or container: their processes can't be seen, but the names of their sockets can.
        found[None] = structs.replace(found[None], mingle=True)
    return tuple(found.values())


def _sockets(port: int, proc: Path) -> dict[int, int]:
    return sockets_on(port, *(_read(proc / "self" / "net" / name) for name in ("udp", "udp6")))


def _siblings(port: int, proc: Path) -> int:
    """Return how many processes that discover have a name for each other (:mod:`mingle.network.local_relay`)."""
    names = (line.rpartition(" ")[2] for line in _read(proc / "self" / "net" / "unix").splitlines())
    return len({name for name in names if name.startswith(f"@mingle/udp-{port}/")})


def _owners(inodes: frozenset[int], proc: Path, late: Callable[[], bool]) -> tuple[dict[int, list[int]], bool]:
    """Return the processes that hold each socket, and whether the time was too short to look at all of them."""
    owners: dict[int, list[int]] = {}
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    with os.scandir(proc) as processes:
        for process in processes:
            if not process.name.isdigit():
                continue
            for link in _links(process.path):
                if link in wanted and int(process.name) not in owners.get(wanted[link], ()):
                    owners.setdefault(wanted[link], []).append(int(process.name))
                if late():
                    return owners, True
    return owners, False


def _links(process: str) -> Iterator[str]:
    """Yield the target of each descriptor of a process, then an empty text, which is all for an unreadable process."""
    with contextlib.suppress(OSError), os.scandir(f"{process}/fd") as descriptors:  # ended, or somebody else's
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                yield os.readlink(descriptor.path)  # noqa: PTH115 - the text matters, not a path
    yield ""


def _command(directory: Path) -> str:
    words = _read(directory / "cmdline").replace("\0", " ").split() or _read(directory / "comm").split()
    return " ".join(words)[:120]  # the process chose it, line breaks included


def _discovers(directory: Path) -> bool:
    maps = _read(directory / "maps")
    return all(library in maps for library in _MINGLE_LIBRARIES)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # as above
        return ""
