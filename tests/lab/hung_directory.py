"""A directory whose server does not answer: a FUSE file system that accepts the mount and replies to nothing else.

The kernel blocks each system call on it, as it does on an NFS mount whose server has gone, and only a signal that ends
the process ends the call. So what is shown here holds for calls that Python can't interrupt.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from .errors import LabError

_FUSE_INIT = 26
_MNT_DETACH = 2
# linux/fuse.h: length, opcode, unique, node, uid, gid, pid; and length, error, unique.
_QUESTION, _ANSWER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
# Of the protocol 7.31: major, minor, readahead, flags, background, congestion, write, time, pages, padding.
_INIT = struct.Struct("<IIIIHHIIHHI7I")


class HungDirectory:
    """The file system, while it is mounted."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.asked = threading.Event()
        """Set when a process is blocked in a call."""
        self._descriptor = descriptor
        question = os.read(descriptor, 1 << 18)
        _, opcode, unique, *_ = _QUESTION.unpack_from(question)
        if opcode != _FUSE_INIT:
            raise LabError(f"the kernel began with operation {opcode}")
        reply = _INIT.pack(7, 31, 0, 0, 1, 1, 1 << 16, 1, 0, 0, 0, *[0] * 7)
        os.write(descriptor, _ANSWER.pack(_ANSWER.size + len(reply), 0, unique) + reply)
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        # The question is not read: the kernel would then wait for its answer also in a process that is killed.
        ready, _, _ = select.select([self._descriptor, self._stop_reader], [], [])
        if self._descriptor in ready:
            self.asked.set()

    def close(self) -> None:
        """Unmount it; each call that is blocked fails."""
        os.write(self._stop_writer, b"x")
        self._thread.join()
        _call("umount2", os.fsencode(self.path), _MNT_DETACH)
        for each in (self._descriptor, self._stop_reader, self._stop_writer):
            os.close(each)


@contextlib.contextmanager
def hung_directory(path: Path) -> Iterator[HungDirectory]:
    """Mount it on a directory that exists. It needs root and /dev/fuse."""
    descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0".encode()
    _call("mount", b"hung", os.fsencode(path), b"fuse", 0, options)
    made = HungDirectory(path, descriptor)
    try:
        yield made
    finally:
        made.close()


def _call(name: str, *arguments: bytes | int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise LabError(f"{name}: {os.strerror(ctypes.get_errno())}")
