"""Who else holds the UDP port: this host's sockets as /proc tells them, with their processes where permitted.

Linux alone; elsewhere nobody is found. proc(5) and proc_net(5) are the source of the formats.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, structs

# A process that discovers has both of these libraries in memory: so mingle's own are told from strangers.
_MINGLE_LIBRARIES = ("netifaces", "msgspec")
_MAX_PROCESSES = 100_000


class Holder(Struct, frozen=True):
    """A process that has opened the port, or a socket whose process may not be seen."""

    pid: int | None
    """None: it belongs to another user, or to a container."""
    command: str = ""
    user: int | None = None
    mingle: bool = False
    """Whether it is one that discovers, too: those share the port with each other."""

    def __str__(self) -> str:
        if self.pid is None:
            return f"a process of user {self.user} that may not be seen from here (root may)"
        return f"pid {self.pid} ({self.command or 'unknown'})"


def sockets_on(port: int, *tables: str) -> dict[int, int]:
    """Returns the sockets bound to a port in tables as /proc/net/udp is one: inode to user id."""
    found: dict[int, int] = {}
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and int(fields[1].rpartition(":")[2], 16) == port:
                found[int(fields[9])] = int(fields[7])
    return found


def holders(port: int, proc: Path = Path("/proc")) -> tuple[Holder, ...]:
    """Returns who else holds a UDP port in this network namespace; this process is left out."""
    if sys.platform != "linux":
        return ()
    inodes = _sockets(port, proc)
    if not inodes:
        return ()
    owners = _owners(frozenset(inodes), proc)
    # A process that ended meanwhile is no riddle: its sockets are gone from the table, too.
    inodes = {inode: user for inode, user in _sockets(port, proc).items() if inode in inodes}
    siblings = _siblings(port, proc)
    found: dict[int | None, Holder] = {}
    for inode, user in inodes.items():
        pids = owners.get(inode, ())
        for pid in pids:
            if pid != os.getpid():
                found.setdefault(pid, Holder(pid, _command(proc / str(pid)), user, _discovers(proc / str(pid))))
        if not pids:
            found.setdefault(None, Holder(None, user=user))
    known = sum(holder.mingle for holder in found.values()) + any(os.getpid() in pids for pids in owners.values())
    if None in found and siblings > known:
        # Another user's, or another container's, ranks: they may not be seen, but their names can.
        found[None] = structs.replace(found[None], mingle=True)
    return tuple(found.values())


def _sockets(port: int, proc: Path) -> dict[int, int]:
    return sockets_on(port, *(_read(proc / "self" / "net" / name) for name in ("udp", "udp6")))


def _siblings(port: int, proc: Path) -> int:
    """How many processes that discover have a name for each other (:mod:`mingle.network.siblings`)."""
    names = (line.rpartition(" ")[2] for line in _read(proc / "self" / "net" / "unix").splitlines())
    return len({name for name in names if name.startswith(f"@mingle/udp-{port}/")})


def _owners(inodes: frozenset[int], proc: Path) -> dict[int, list[int]]:
    owners: dict[int, list[int]] = {}
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for number, entry in enumerate(proc.iterdir()):
        if number > _MAX_PROCESSES:
            break
        if entry.name.isdigit():
            for link in _links(entry / "fd"):
                if link in wanted and int(entry.name) not in owners.get(wanted[link], ()):
                    owners.setdefault(wanted[link], []).append(int(entry.name))
    return owners


def _links(directory: Path) -> Iterable[str]:
    try:
        entries = list(directory.iterdir())
    except OSError:  # it ended meanwhile, or is somebody else's
        return
    for entry in entries:
        try:
            yield os.readlink(entry)  # noqa: PTH115 - the text matters, not a path
        except OSError:
            continue


def _command(directory: Path) -> str:
    words = " ".join(_read(directory / "cmdline").replace("\0", " ").split())
    return (words or _read(directory / "comm").strip())[:120]


def _discovers(directory: Path) -> bool:
    maps = _read(directory / "maps")
    return all(library in maps for library in _MINGLE_LIBRARIES)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # as above
        return ""
