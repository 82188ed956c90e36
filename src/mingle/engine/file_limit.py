"""Room for the connections of a large job: the limit of open files (getrlimit(2)) of the process that may host it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from mingle.engine import progress

if sys.platform != "win32":
    import resource

FILES_PER_RANK = 3
"""The files that a rank costs its host: a control connection, two store clients, and room."""
FILES_PER_NODE = 3 + 16
"""The files that a node costs the agent that hosts and is agent 0: a control connection, two clients of the agents'
store, and one of the workers' store for each of its workers, of which it rarely has more."""
FILES_BESIDE = 128


_OWN_FILES = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")


def free_files() -> int:
    """Return the number of files that this process can still open."""
    if sys.platform == "win32":  # for the type checker
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        # Since Linux 6.2 st_size is the number of descriptors (proc(5)), in 2 µs; counting a few thousand takes 1 ms.
        opened = _OWN_FILES.stat().st_size if sys.platform == "linux" else 0
        return max(0, soft - (opened or len(list(_OWN_FILES.iterdir()))))
    except OSError:  # EMFILE: the directory cannot be opened either
        return 0


def make_room(members: int, files_per_member: int, *, what: str, quiet: bool) -> None:
    """Raise the soft limit of open files to the hard one if it may be too low; warn if that is not enough.

    Args:
        members: the number of members.
        files_per_member: the files that each of them costs.
        what: what the members are called in the warning.
        quiet: whether to write the warning to the log only.
    """
    if sys.platform == "win32":  # for the type checker: no caller comes here on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_per_member * members + FILES_BESIDE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = hard if hard != resource.RLIM_INFINITY else max(needed, soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        progress.say(
            logging.WARNING,
            f"the host of a job may open {limit} files and needs about {needed} for {members} {what}: raise the hard "
            "limit (ulimit -Hn)",
            quiet=quiet,
        )
