"""A shared folder that is a bucket: the requests to the helper process that makes fsspec's calls.

The back ends of fsspec bring hundreds of modules, event loops and HTTPS sockets. In a process of their own, they stay
out of this one's forks and of the interpreter's lock. The helper (`bucket_helper`) ends with its connection, so at the
latest with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from mingle import forksafe
from mingle.network.folder import Entry, FolderProblem
from mingle.text import one_line
from mingle.wire.datagrams import MAX_BYTES

SILENT_SECONDS = 6.0
"""How long a turn can take until the bucket counts as one that does not answer: the helper first loads its back end."""
LEAVE_SECONDS = 1.0
"""How long the end of a process waits until its objects are deleted."""
REAP_SECONDS = 10.0
"""How long the end of the helper is waited for: it first carries out what it was asked."""
MAX_TEXT_CHARACTERS = 300
"""How much of an error's text is shown."""
# `python -c` searches the current directory first, where the program may not: anybody can have put modules there.
_STARTED = "import sys; sys.path[:] = filter(None, sys.path); from mingle.network.bucket_helper import main; main()"


class BucketRequest(Struct, frozen=True, omit_defaults=True):
    """What the helper is asked to do. The first one names the folder."""

    operation: str
    name: str = ""
    data: bytes = b""


class BucketReply(Struct, frozen=True, omit_defaults=True):
    """What became of a request."""

    entries: list[Entry] = msgspec.field(default_factory=list)
    names: list[str] = msgspec.field(default_factory=list)
    data: bytes | None = None
    what: str = ""
    """What has failed; empty: nothing."""
    fix: str = ""


# Made here, and not by the first call: each folder has a thread (see `mingle.check.control`).
_decoder = msgspec.json.Decoder(BucketReply)


class Bucket:
    """The objects of one job below a URL that fsspec opens.

    Args:
        helper: the process that opens it.
        job: the name of the job's own folder in it.
    """

    bucket = True
    patience = SILENT_SECONDS
    leave_seconds = LEAVE_SECONDS

    def __init__(self, helper: Helper, job: str) -> None:
        self.helper = helper
        self._job = job
        self.close, self.reap, self.abort = helper.close, helper.reap, helper.abort

    def jobs(self) -> list[str]:
        """Return the names of all folders that lie beside the job's."""
        return self.helper.ask("jobs").names

    def of(self, job: str) -> Bucket:
        """Return the objects of another job."""
        return Bucket(self.helper, job)

    @contextlib.contextmanager
    def open(self, *, create: bool) -> Iterator[Bucket]:
        """Return this object for a turn: nothing has to be opened, and no folder to be created."""
        yield self

    def write(self, name: str, data: bytes) -> None:
        """Create an object. Storage of this kind shows all of an object or nothing."""
        self.helper.ask("write", self._path(name), data)

    def list(self) -> list[Entry]:
        """Return the objects that are no longer than a datagram."""
        return self.helper.ask("list", self._job).entries

    def read(self, name: str) -> bytes | None:
        """Return the content of an object; None: it is gone, or too long."""
        data = self.helper.ask("read", self._path(name)).data
        return data if data is not None and len(data) <= MAX_BYTES else None

    def delete(self, name: str) -> None:
        """Delete an object, if it is still there."""
        self.helper.ask("delete", self._path(name))

    def tidy(self) -> None:
        """Delete the job's folder if the helper had to create it."""
        self.helper.ask("tidy", self._job)

    def _path(self, name: str) -> str:
        return f"{self._job}/{name}"


class Helper:
    """The helper process, which starts at once.

    Make it in a thread of the application: a child of the loop's thread would inherit its blocked signals.

    Args:
        url: the folder, as the user has named it.
    """

    def __init__(self, url: str) -> None:
        self._received = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: FolderProblem | None = None
        """Why there is no helper."""
        self._socket, theirs = socket.socketpair()
        forksafe.register(self._socket)
        with theirs:
            try:
                self._process = _start(theirs)
            except OSError as error:
                self._failure = FolderProblem(
                    f"needs a helper process, which can't be started: {error.strerror or error}",
                    "look at `ulimit -u` and at the pids limit of the container",
                )
        self._ask_ahead(BucketRequest("open", url))

    def _ask_ahead(self, request: BucketRequest) -> None:
        with contextlib.suppress(OSError):  # the next request tells
            self._socket.sendall(_line(request))

    @property
    def pid(self) -> int | None:
        """The helper's process id; None: it was not started."""
        return None if self._process is None else self._process.pid

    def ended(self) -> bool:
        """Return whether the helper has ended."""
        return self._process is None or self._process.poll() is not None

    def ask(self, operation: str, name: str = "", data: bytes = b"") -> BucketReply:
        """Have the helper do something, for as long as it takes: `close` and `abort` end the wait."""
        if self._failure is not None:
            raise self._failure
        try:
            self._socket.sendall(_line(BucketRequest(operation, name, data)))
            reply = _decoder.decode(self._receive_line())
        except (OSError, msgspec.DecodeError) as error:
            raise self._ended(error) from None
        if reply.what:
            raise FolderProblem(one_line(reply.what)[:MAX_TEXT_CHARACTERS], one_line(reply.fix)[:MAX_TEXT_CHARACTERS])
        return reply

    def _receive_line(self) -> bytes:
        # Not by a file object: it would keep the socket open in a forked child.
        while (end := self._received.find(b"\n")) < 0:
            more = self._socket.recv(1 << 16)
            if not more:
                raise ConnectionResetError
            self._received += more
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _ended(self, error: Exception) -> FolderProblem:
        status = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(1.0)
        return FolderProblem(
            f"can't be used any more: its helper process has ended (exit status {status}; {type(error).__name__})",
            "look in `dmesg` whether the system has killed it for memory; else report this as a defect",
        )

    def close(self) -> None:
        """Have the helper end. It does not block; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def reap(self) -> None:
        """Wait for the helper's end, which `close` has begun."""
        if self._process is None:
            return
        try:
            self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def abort(self) -> None:
        """Kill the helper, whatever it does: a thread that waits for its answer goes on."""
        if self._process is not None:
            self._process.kill()


def _line(request: BucketRequest) -> bytes:
    return msgspec.json.encode(request) + b"\n"


def _start(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start the helper, with the modules that this process finds, in a session of its own: Ctrl-C is not for it."""
    if not sys.executable:
        raise OSError("this process does not know its Python interpreter (sys.executable)")
    path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path if isinstance(each, str))  # type: ignore[redundant-expr]
    return subprocess.Popen(
        [sys.executable, "-c", _STARTED],
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )
