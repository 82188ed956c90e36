"""The test process's side of its zygote: start it, ask it, hear from it which processes ended."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from .errors import LabError
from .messages import MAX_MESSAGE, Done, Exited, Ready, Refused, Reply, Request

ReplyT = TypeVar("ReplyT", bound=Reply)

START_SECONDS = 180.0
"""A bound for the import of torch on a loaded machine, not an expectation."""
REPLY_SECONDS = 60.0

_PACKAGE = __name__.rpartition(".")[0]
ROOT = Path(__file__).parents[_PACKAGE.count(".") + 1]
"""The directory from which this package, and with it every test module beside it, is imported by its name."""

# Of the environment that the tests were started with, this would steer the ranks of a lab.
_UNWANTED_PREFIXES = (
    "MINGLE_",
    "PYTEST_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "GLOO_",
    "NCCL_",
    "TP_SOCKET",
    "TORCHELASTIC_",
    "KUBERNETES_",
)
_UNWANTED_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
_BOOTSTRAP = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {package}.zygote import main
main(int(sys.argv[2]), sys.argv[3])
"""


class ZygoteClient:
    """A running zygote; it ends, and all that it started with it, when this is closed or this process ends.

    Not for several threads.

    Attributes:
        directory: for the files of labs; the zygote removes it, also when this process is killed.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lab-"))
        self._log = tempfile.TemporaryFile("w+", prefix="lab-zygote-")  # noqa: SIM115 - open until close()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._on_exit: dict[int, Callable[[int], None]] = {}
        with theirs:
            # A session of its own: Ctrl-C is for the tests alone, which then end the zygote in good order.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _BOOTSTRAP.format(package=_PACKAGE),
                    json.dumps([str(ROOT), *sys.path]),
                    str(theirs.fileno()),
                    str(self.directory),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(),
                start_new_session=True,
            )
        self._ready = False

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def fileno(self) -> int:
        """Let a selector wait for what the zygote says; `pump` takes it."""
        return self._socket.fileno()

    def wait_ready(self) -> None:
        """Wait until torch is imported; the first request does so too.

        Raises:
            LabError: the zygote ended instead; its log is in the message.
        """
        if not self._ready:
            self._reply(Ready, START_SECONDS)
            self._ready = True

    def request(self, request: Request, expected: type[ReplyT], descriptors: Sequence[int] = ()) -> ReplyT:
        """Have a request carried out and return its answer.

        Raises:
            LabError: the zygote refused it, with the reason, or is dead.
        """
        self.wait_ready()
        message = pickle.dumps(request)
        if len(message) > MAX_MESSAGE:
            raise LabError(
                f"{type(request).__name__} takes {len(message)} bytes and {MAX_MESSAGE} fit: the arguments "
                "of a rank are too large; make large values in its function"
            )
        try:
            socket.send_fds(self._socket, [message], list(descriptors))
        except BrokenPipeError:
            raise self._dead() from None
        return self._reply(expected, REPLY_SECONDS)

    def command(self, request: Request) -> None:
        """`request` without a result."""
        self.request(request, Done)

    def on_exit(self, pid: int, callback: Callable[[int], None]) -> None:
        """Call back with the exit code once the spawned process ``pid`` has ended, during any later call."""
        self._on_exit[pid] = callback

    def pump(self) -> None:
        """Take what the zygote has said, without waiting."""
        while True:
            self._socket.settimeout(0)
            try:
                message = self._receive()
            except BlockingIOError:
                return
            raise LabError(f"the zygote answered {message} when nothing was asked")

    def close(self) -> None:
        """End the zygote and all that it started; idempotent."""
        self._socket.close()
        try:
            self._process.wait(REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.directory.exists():  # the zygote did not come to it
            shutil.rmtree(self.directory)
        self._log.close()

    def _reply(self, expected: type[ReplyT], seconds: float) -> ReplyT:
        deadline = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                message = self._receive()
            except TimeoutError:
                raise LabError(
                    f"the zygote (process {self._process.pid}) gave no {expected.__name__} in "
                    f"{seconds:.0f} s; its log:\n{self._read_log()}"
                ) from None
            if isinstance(message, Refused):
                raise LabError(message.reason)
            if not isinstance(message, expected):
                raise LabError(f"the zygote answered {message} instead of {expected.__name__}")
            return message

    def _receive(self) -> Reply:
        """The next message that is not about the end of a process; those are handed on."""
        while True:
            try:
                packet = self._socket.recv(MAX_MESSAGE)
            except ConnectionResetError:
                packet = b""
            if not packet:
                raise self._dead()
            message: Reply | Exited = pickle.loads(packet)
            if not isinstance(message, Exited):
                return message
            callback = self._on_exit.pop(message.pid, None)
            if callback is not None:
                callback(message.code)

    def _dead(self) -> LabError:
        status = self._process.wait(REPLY_SECONDS)
        return LabError(
            f"the zygote, from which all ranks are forked, ended with status {status}: no test of the lab "
            f"can run in this process any more. Its log:\n{self._read_log()}"
        )

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read()


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _UNWANTED_NAMES and not name.startswith(_UNWANTED_PREFIXES)
    }
    # One thread per rank: a pool would be shared badly by a fork, and the machine by all of a lab's ranks.
    return kept | {"OMP_NUM_THREADS": "1"}


_shared: ZygoteClient | None = None


def shared_zygote() -> ZygoteClient:
    """The one zygote of this process, started on the first call."""
    global _shared
    if _shared is None:
        _shared = ZygoteClient()
    return _shared


def close_shared_zygote() -> None:
    """End the shared zygote, if there is one; a later `shared_zygote` starts another."""
    global _shared
    if _shared is not None:
        _shared.close()
        _shared = None
