"""The Linux calls that Python 3.10 does not offer: namespaces, mounts and two process attributes.

Each function raises :class:`OSError` with the kernel's errno. Flag values are those of the kernel's UAPI
headers ``linux/sched.h``, ``linux/mount.h`` and ``linux/prctl.h``; they are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY = 0x1
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x4_0000

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


def _check(status: int, call: str) -> None:
    if status != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{call}: {os.strerror(errno)}")


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces of the kinds in ``flags`` (unshare(2))."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(descriptor: int, kind: int) -> None:
    """Move the calling thread into the namespace behind ``descriptor`` (setns(2)).

    For a mount namespace the process must have one thread, and its working directory becomes the root.
    """
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), f"setns({descriptor}, {kind:#x})")


def mount(source: str, target: str, filesystem: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2); ``data`` holds the options of the file system."""
    encoded, options = (None if text is None else text.encode() for text in (filesystem, data))
    status = _libc.mount(os.fsencode(source), os.fsencode(target), encoded, flags, options)
    _check(status, f"mount({source!r}, {target!r}, {filesystem!r}, {flags:#x})")


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send ``signal_number`` to this process when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, in place of the machine's init process."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")
