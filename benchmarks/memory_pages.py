"""Gives a forked process memory of its own, as a process that had imported torch itself would have.

A fork shares its parent's pages until it writes there, and its first write to each costs a fault and a copy. A rank
that is forked from a process with torch in it would pay for thousands of them while the clock runs, and the more so the
more of it is Python, where to look at an object is to write its reference count.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Fault pages in, for reading or writing: madvise(2), since Linux 5.14."""
LARGEST_CODE_BYTES = 64 << 20
"""Code beyond this is torch's own, of which an import runs a small part only."""


def own_pages() -> None:
    """Fault in every page that this process may write, and the code of all but the largest libraries.

    Raises:
        OSError: the kernel does not know how.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        where, access, _, _, inode, *name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in where.split("-"))
        if access == "rw-p":
            advice = MADV_POPULATE_WRITE
        elif access == "r-xp" and inode != "0" and last - first <= LARGEST_CODE_BYTES:
            advice = MADV_POPULATE_READ
        else:
            continue
        if madvise(first, last - first, advice) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"madvise of {' '.join(name) or where}: {os.strerror(error)}")
