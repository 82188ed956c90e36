"""A shared folder that is a directory: the file operations. Each of them can block for as long as a server is silent.

Whatever another user can have put into the directory is harmless: nothing follows a symbolic link, no file is opened
that is not regular, and no more than a datagram is read. Nothing stays open between two turns, because a handle becomes
stale when an NFS server has been exchanged (ESTALE), and because opening the directory has an NFS client ask the server
whether it has changed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator

from mingle.network.folder import MAX_ENTRIES, Entry, FolderProblem
from mingle.wire.datagrams import MAX_BYTES

SILENT_SECONDS = 3.0
"""How long a turn can take until the directory counts as one that does not answer."""
LEAVE_SECONDS = 0.5
"""How long the end of a process waits until its files are deleted."""
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
FIXES = {
    errno.EACCES: "make it writable for the user that runs the job, on every machine",
    errno.EROFS: "mount it writable on every machine, or name another directory",
    errno.ENOSPC: "free space there, or name a directory on another file system",
    errno.EDQUOT: "free some of this user's quota there, or name a directory on another file system",
    errno.ESTALE: "its server has been exchanged: mount the file system again",
    errno.ENOTDIR: "name a directory that every machine of the job mounts",
    errno.ELOOP: "name a directory that every machine of the job mounts",
    errno.EMFILE: "raise `ulimit -n` of this process",
    errno.ENFILE: "raise `fs.file-max` of this machine",
}
FIXES[errno.EPERM] = FIXES[errno.EACCES]
OTHER_FIX = "look at the file system and its server with `ls` and `dmesg` on this machine"


class Directory:
    """The objects of one job in a directory that all machines mount.

    Args:
        path: the directory. It must exist: to create it would hide that its file system is not mounted.
        job: the name of the job's own directory in it.
    """

    bucket = False
    patience = SILENT_SECONDS
    leave_seconds = LEAVE_SECONDS

    def __init__(self, path: str, job: str) -> None:
        self._path = path
        self._job = job

    def jobs(self) -> list[str]:
        """Return the names of all directories beside the job's: those first in which something was written last.

        A rank that was killed leaves its directory, so there can be thousands of them.
        """
        try:
            with os.scandir(self._path) as entries:
                jobs = [each for each in itertools.islice(entries, MAX_ENTRIES) if each.is_dir(follow_symlinks=False)]
                return [each.name for each in sorted(jobs, key=_written_at, reverse=True)]
        except FileNotFoundError:
            raise _missing() from None
        except OSError as error:
            raise problem("can't be listed", error) from error

    def of(self, job: str) -> Directory:
        """Return the objects of another job."""
        return Directory(self._path, job)

    def close(self) -> None:
        """Nothing stays open between two turns."""

    def reap(self) -> None:
        """There is no helper process."""

    def abort(self) -> None:
        """Nothing ends a system call that is blocked."""

    @contextlib.contextmanager
    def open(self, *, create: bool) -> Iterator[OpenDirectory]:
        """Open the job's directory for a turn; create it if this process will write there."""
        try:
            parent = os.open(self._path, _DIRECTORY)
        except FileNotFoundError:
            raise _missing() from None
        except OSError as error:
            raise problem("can't be opened", error) from error
        opened = OpenDirectory(parent, self._job)
        try:
            opened.open_job(create=create)
            yield opened
        finally:
            opened.close()


class OpenDirectory:
    """The job's directory, while it is open.

    Args:
        parent: a descriptor of the directory that the user named; closed with this object.
        job: the name of the job's directory in it.
    """

    def __init__(self, parent: int, job: str) -> None:
        self._parent = parent
        self._job = job
        self._opened: int | None = None
        """A descriptor of the job's directory; None: it does not exist."""

    def open_job(self, *, create: bool) -> None:
        """Open the job's directory, and create it if it is to be there.

        Raises:
            FolderProblem: it can't be opened.
        """
        self._close_job()
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._job, dir_fd=self._parent)
            self._opened = os.open(self._job, _DIRECTORY | _NO_LINK, dir_fd=self._parent)
        except FileNotFoundError:
            pass  # not created, or deleted again by another process that has left it empty
        except OSError as error:
            raise problem("holds a directory for this job that can't be opened", error) from error

    def close(self) -> None:
        """Close the descriptors."""
        self._close_job()
        os.close(self._parent)

    def _close_job(self) -> None:
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

    def write(self, name: str, data: bytes) -> None:
        """Create a file under a temporary name and rename it, so that readers see all of it or nothing."""
        try:
            self._write(name, data)
        except FileNotFoundError:
            # Another process has left the directory empty and deleted it since it was opened.
            self.open_job(create=True)
            try:
                self._write(name, data)
            except OSError as error:
                raise problem("can't be written", error) from error
        except OSError as error:
            raise problem("can't be written", error) from error

    def _write(self, name: str, data: bytes) -> None:
        if self._opened is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        temporary = f"t{name[1:]}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o644, dir_fd=self._opened)
        try:
            try:
                written = os.write(descriptor, data)
            finally:
                os.close(descriptor)  # NFS reports here that the disk is full
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(temporary, name, src_dir_fd=self._opened, dst_dir_fd=self._opened)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._opened)
            raise

    def list(self) -> list[Entry]:
        """Return the regular files that are no longer than a datagram."""
        if self._opened is None:
            return []
        try:
            with os.scandir(self._opened) as entries:
                return [each for entry in itertools.islice(entries, MAX_ENTRIES) if (each := _regular(entry))]
        except OSError as error:
            raise problem("can't be listed", error) from error

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is no such file, or gone."""
        try:
            descriptor = os.open(name, os.O_RDONLY | _NO_LINK, dir_fd=self._opened)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            data = os.read(descriptor, MAX_BYTES + 1)
        except OSError:  # a stale handle: the next turn opens it anew
            return None
        finally:
            os.close(descriptor)
        return data if len(data) <= MAX_BYTES else None

    def delete(self, name: str) -> None:
        """Delete a file, if it is still there."""
        if self._opened is None:
            return
        try:
            os.unlink(name, dir_fd=self._opened)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise problem(f"holds the file {name}, which can't be deleted", error) from error

    def tidy(self) -> None:
        """Delete the job's directory if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self._job, dir_fd=self._parent)


def _written_at(directory: os.DirEntry[str]) -> float:
    """Return when a directory has got or lost a file."""
    try:
        return directory.stat(follow_symlinks=False).st_mtime
    except OSError:  # gone
        return 0.0


def _regular(entry: os.DirEntry[str]) -> Entry | None:
    if entry.name[:2] not in ("h-", "s-", "t-"):
        return None  # no look at what is certainly not ours
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # gone
        return None
    is_object = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES
    return Entry(entry.name, status.st_mtime) if is_object else None


def _missing() -> FolderProblem:
    return FolderProblem(
        "does not exist", "mount its file system on this machine, or create the directory on one machine"
    )


def problem(what: str, error: OSError) -> FolderProblem:
    """Return what a failed operation means, and what to do."""
    why = error.strerror or str(error)
    return FolderProblem(f"{what}: {why}", FIXES.get(error.errno or 0, OTHER_FIX))
