"""Fork handlers: a forked child closes this package's sockets and unlocks its locks.

A DataLoader worker is a fork of its rank. Were it to inherit the rank's sockets, the port of a killed rank 0
would go on accepting connections for as long as the worker lives, and the connections of the dead rank would
never see end-of-file. Every socket that a job keeps open is therefore registered here, and the child closes its
copies before any other code runs in it. A program started with `exec` needs none of this: Python's
descriptors are close-on-exec (PEP 446).

A lock that another thread of the parent held at the fork would stay locked in the child for ever, because that thread
does not exist there. Every lock that code in a child may take is registered here too, and is unlocked in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol, TypeVar, cast


class Closable(Protocol):
    """A holder of a file descriptor, such as a socket or a selector."""

    def close(self) -> object:
        """Release it; a second call does nothing."""


class Lock(Protocol):
    """A lock of the ``threading`` module."""

    def _at_fork_reinit(self) -> None: ...


_C = TypeVar("_C", bound=Closable)
_L = TypeVar("_L")

_closables: weakref.WeakSet[Closable] = weakref.WeakSet()

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()

# Descriptor -> device and inode at registration.
_foreign: dict[int, tuple[int, int]] = {}


def register(closable: _C) -> _C:
    """Have `closable` closed in every forked child, for as long as this process keeps it; returns it."""
    _closables.add(closable)
    return closable


def register_lock(lock: _L) -> _L:
    """Register `lock`, a `threading` lock or condition, to be unlocked in every forked child; return it.

    A wrapper class with a lock inside would not do: a signal that comes between its `__enter__` and the `with` block
    would leave it locked, which cannot happen to a lock of the interpreter's own.
    """
    _locks.add(cast("Lock", lock))
    return lock


def register_fd(fd: int) -> None:
    """Have the bare descriptor `fd`, which another library owns, emptied in every forked child.

    The child puts `/dev/null` over it and does not close it: the number stays taken, so that a close by the
    owner's copy in the child cannot hit a file opened later. Nothing happens when the number meanwhile stands
    for another file: the owner has closed it.

    Raises:
        OSError: `fd` is not open.
    """
    identity = _identity(fd)
    for known, registered in list(_foreign.items()):  # a copy: other threads register while fstat(2) runs
        if not _is_open_as(known, registered) and _foreign.get(known) == registered:
            _foreign.pop(known, None)
    _foreign[fd] = identity


def _identity(fd: int) -> tuple[int, int]:
    """Device and inode: the same for two descriptors only when they are the same socket."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _is_open_as(fd: int, identity: tuple[int, int]) -> bool:
    try:
        return _identity(fd) == identity
    except OSError:  # EBADF: the owner has closed it
        return False


def _release_in_child() -> None:
    # The child has this one thread only, and fork held the interpreter lock: no other thread was half-way
    # through a change of these collections. Taking a lock here could wait for a thread that does not exist
    # any more.
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its own locks (logging, concurrent.futures)
    for closable in list(_closables):
        closable.close()
    for fd, identity in _foreign.items():
        if _is_open_as(fd, identity):
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, fd, inheritable=False)
            os.close(null)
    _foreign.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_release_in_child)
