"""The program of a machine: it is started, gets the signals of ``mingle-run``, and is ended with all its processes.

A program that succeeds can leave daemons behind. What a program leaves behind that fails, or is ended, is ended, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from mingle.cli.options import FAILED
from mingle.errors import ConfigurationError, MingleError, refused

GRACE_SECONDS = 10.0
"""How long a program and its processes have between SIGTERM and SIGKILL."""
_KILLED_SECONDS = 2.0
_LOOK_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_FORWARDED = (*_ENDING, "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
logger = logging.getLogger("mingle")

Handler: TypeAlias = Callable[[int, "FrameType | None"], None]


class Interrupted(BaseException):
    """A signal asks this process to end, and there is no program to which it could go."""

    def __init__(self, number: int) -> None:
        super().__init__(_signal_name(number))
        self.number = number


class Program:
    """The program of this machine, in a session and a process group of its own.

    Without a controlling terminal of its own it can read from ours, which a background process group can't.
    """

    def __init__(self) -> None:
        self.interrupted_by: int | None = None
        """The last signal that asked this process to end."""
        self._process: subprocess.Popen[bytes] | None = None
        self._inherited: set[int] = set()
        """The children that are not the program's: those before a shell's `exec`, and this process's own helpers."""
        self._pending: list[int] | None = None
        """The signals that are held back; None: they are handled at once."""
        self._refusal_shown = False
        """Whether the user has been told that the program takes no signal."""

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle the signals of this process: before the program's start they end the wait, then the program has them.

        A signal that is ignored (nohup, a background job of a script) stays ignored.
        """
        before: dict[signal.Signals, Any] = {}
        for name in (*_FORWARDED, "SIGTSTP", "SIGCHLD"):
            number = getattr(signal, name)
            handler: Handler = {"SIGTSTP": self._suspend, "SIGCHLD": self._reap}.get(name, self._forward)
            if name == "SIGCHLD" or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Hold back the signals that come while something is made, which must end with this process."""
        pending: list[int] = []
        self._pending = pending
        try:
            yield
        finally:
            self._pending = None
        for number in pending:
            (self._suspend if number == signal.SIGTSTP else self._forward)(number, None)

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the program.

        Files that this process has inherited are inherited on; none of its own are.

        Raises:
            MingleError: the system refuses, or a placeholder made the name of a program that is not there.
        """
        check_exists(words[0])
        if sys.platform == "linux":
            _adopt_orphans()
        self._inherited = _children()
        with self.held_back():  # an exception between fork and exec would leave the program to itself
            try:
                self._process = subprocess.Popen(
                    words,
                    env=environment,
                    close_fds=False,
                    start_new_session=True,
                    preexec_fn=_end_with(os.getpid()) if sys.platform == "linux" else None,  # noqa: PLW1509 - no lock
                )
            except OSError as error:
                raise _not_started(words[0], error) from error

    @property
    def status(self) -> int | None:
        """The exit status as a shell gives it (128 and the signal's number); None while the program runs."""
        assert self._process is not None
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self) -> int:
        """Wait for the end of the program and return its status."""
        assert self._process is not None
        self._process.wait()
        assert self.status is not None
        return self.status

    def how_ended(self) -> str:
        """Return how the program ended, as the end of a sentence."""
        assert self._process is not None
        code = self._process.returncode
        how = f"ended with status {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
        return how if self.interrupted_by in (None, -code) else f"{how} after {_signal_name(self.interrupted_by)}"

    def end(self) -> int:
        """End the program and what it has left behind; return its status, or FAILED if it takes no signal."""
        assert self._process is not None
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, _KILLED_SECONDS)):
            with contextlib.suppress(Interrupted):  # a second signal ends the patience
                if self._gone_within(seconds, number):
                    break
        if self.status is None and not self._send(0):
            return FAILED
        return self.wait()

    def _gone_within(self, seconds: float, number: int) -> bool:
        """Send a signal to the processes of the program; return whether all have ended in time."""
        told: set[int] = set()
        self._send(number)
        self._send(signal.SIGCONT)  # a stopped process takes no other signal
        deadline = time.monotonic() + seconds
        while True:
            running, orphans = self.status is None, self._orphans()
            for pid in orphans - told:
                with contextlib.suppress(ProcessLookupError):
                    try:
                        os.kill(pid, number)
                    except PermissionError as error:
                        self._point_out_refusal(pid, error)
            told |= orphans
            if not (running or orphans or self._send(0)):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)

    def _orphans(self) -> set[int]:
        """Return the processes that the program has left behind, in whatever session; reap those that have ended."""
        assert self._process is not None
        orphans = _children() - self._inherited - {self._process.pid}
        for pid in list(orphans):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    orphans.discard(pid)
        return orphans

    def _send(self, number: int) -> bool:
        """Send a signal to the process group; return whether there is one that takes it."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError as error:
            if self.status is None and number != signal.SIGWINCH:
                self._point_out_refusal(self._process.pid, error)
            return False
        return True

    def _point_out_refusal(self, pid: int, error: PermissionError) -> None:
        """Say once that a process can't be signaled."""
        if self._refusal_shown:
            return
        refusal = MingleError.explain(
            f"process {pid} of the command takes no signal from mingle-run: {error.strerror}.",
            cause="it runs as another user, such as under sudo",
            remedy=f"end it on this machine, such as by `sudo kill {pid}`; next time, start mingle-run as that user.",
        )
        with contextlib.suppress(RuntimeError):  # the signal came while stderr was written, which is not reentrant
            logger.warning("%s", refusal)
            self._refusal_shown = True

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        ending = signal.Signals(number).name in _ENDING
        running = self._process is not None and self._process.returncode is None
        if ending and (running or self._pending is not None):
            self.interrupted_by = number
        if self._pending is not None:
            self._pending.append(number)
        elif running:
            self._send(number)
        elif ending:
            raise Interrupted(number)

    def _reap(self, _number: int, _frame: FrameType | None) -> None:
        """Reap orphans that have ended, while the program runs. SIGCHLD also ends a wait."""
        if self._process is not None:
            self._orphans()

    def _suspend(self, number: int, _frame: FrameType | None) -> None:
        """Stop the program and this process (Ctrl-Z); SIGCONT, which is forwarded, continues both."""
        if self._pending is not None:
            self._pending.append(number)
            return
        if self._process is not None:
            self._send(signal.SIGSTOP)  # SIGTSTP has no effect on a process group without a terminal
        os.kill(os.getpid(), signal.SIGSTOP)


def _not_started(word: str, error: OSError) -> MingleError:
    causes = {
        errno.ENOEXEC: "this system can't execute the file: a script without `#!`, or one for another processor",
        errno.ENOENT: "the interpreter in its first line does not exist; a Windows line end is part of the name",
    }
    if error.errno not in causes:
        return refused(f"{word} can't be started", error)
    return MingleError.explain(
        f"{word} can't be started: {error.strerror}.",
        cause=causes[error.errno],
        remedy="start it by its interpreter, such as `python script.py`.",
    )


def check_exists(word: str) -> None:
    """Check that a program is there and can be executed.

    Raises:
        ConfigurationError: it is not.
    """
    if shutil.which(word) is not None:
        return
    there = os.path.dirname(word) and os.path.isfile(word)  # noqa: PTH113, PTH120 - "./x" must keep its "./"
    raise ConfigurationError.explain(
        f"the program {word!r} {'is not executable' if there else 'is not there'}.",
        cause="a file without the permission to execute it" if there else "a mistyped name, or a PATH without it",
        remedy=f"`chmod +x {word}`, or start it by its interpreter."
        if there
        else "install it on this machine, or give its whole path.",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _children() -> set[int]:
    """Return this process's children; none where the system does not list them."""
    children: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children |= {int(word) for word in file.read_text(encoding="ascii").split()}
    return children


def _end_with(parent: int) -> Callable[[], None]:
    """Return what has the kernel end the program if this process is killed."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # killed before the kernel was asked
            os._exit(1)

    return ask


def _adopt_orphans() -> None:
    """Have the kernel make this process the parent of what the program leaves behind, so that it can be ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
