"""The namespaces that make a host, held open by file descriptors alone.

They have no name in /run/netns and no process of their own, so the kernel takes them down, with their
interfaces and mounts, as soon as the zygote that holds the descriptors ends, however it ends: there is
nothing to sweep afterwards.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .messages import MakeNamespace
from .syscalls import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUTS,
    MS_BIND,
    MS_PRIVATE,
    MS_REC,
    mount,
    setns,
    unshare,
)


@dataclass(frozen=True)
class Namespaces:
    """Descriptors of a network, a host name (UTS) and a mount namespace."""

    net: int
    uts: int
    mnt: int

    @classmethod
    def of_this_process(cls) -> Namespaces:
        """Open the namespaces that this process is in."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        return cls(*(os.open(f"/proc/self/ns/{kind}", flags) for kind in ("net", "uts", "mnt")))

    @property
    def inode(self) -> int:
        """The number by which the kernel tells network namespaces apart."""
        return os.fstat(self.net).st_ino

    def enter(self) -> None:
        """Move this (single-threaded) process in; the working directory stays the one it was."""
        directory = Path.cwd()
        setns(self.net, CLONE_NEWNET)
        setns(self.uts, CLONE_NEWUTS)
        setns(self.mnt, CLONE_NEWNS)  # sets the working directory to the root
        os.chdir(directory)

    def close(self) -> None:
        """Let go; the kernel removes what nobody else holds."""
        for descriptor in (self.net, self.uts, self.mnt):
            os.close(descriptor)


def make_namespaces(request: MakeNamespace, home: Namespaces) -> Namespaces:
    """Make a host's namespaces; the process, which has a single thread, is back in ``home`` afterwards."""
    try:
        unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS)
        mount("none", "/", None, MS_REC | MS_PRIVATE)  # nothing mounted from here on shows outside
        mount("sysfs", "/sys", "sysfs", 0)  # /sys/class/net shows the namespace that mounted it
        for seen, source in request.files.items():
            mount(source, seen, None, MS_BIND)
        socket.sethostname(request.hostname)
        for name, value in request.sysctls.items():
            Path("/proc/sys", name).write_text(value)
        return Namespaces.of_this_process()
    finally:
        home.enter()


def processes_in(inodes: Iterable[int]) -> Iterator[int]:
    """Yield the processes whose network namespace is one of ``inodes``; those that have ended are in none."""
    wanted = frozenset(inodes)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                inode = Path(entry.path, "ns/net").stat().st_ino
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended meanwhile, or is a zombie
            if inode in wanted:
                yield int(entry.name)


def kill_processes_in(inodes: Iterable[int]) -> int:
    """Send SIGKILL to all of `processes_in` and return how many there were."""
    killed = 0
    for pid in processes_in(inodes):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed += 1
    return killed
