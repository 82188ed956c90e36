"""What a test holds of a process that runs in a host of the lab."""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, TypeVar

from .errors import EndedError, LabError, LabTimeoutError, RankFailedError
from .messages import Signal
from .rank import STACK_SIGNAL, Event, RaisedError, Returned
from .zygote_client import ZygoteClient

T = TypeVar("T")

DEFAULT_TIMEOUT = 30.0
_STACK_SECONDS = 0.5
_OUTPUT_CHARACTERS = 4000


class Process:
    """A command, started by `Host.run`."""

    def __init__(self, zygote: ZygoteClient, title: str, pid: int, stdout: Path, stderr: Path) -> None:
        self._zygote = zygote
        self._title = title
        self._stdout = stdout
        self._stderr = stderr
        self._exit_code: int | None = None
        self.pid = pid
        zygote.on_exit(pid, self._ended)

    def __repr__(self) -> str:
        return f"<{self._title}, process {self.pid}>"

    @property
    def exit_code(self) -> int | None:
        """The exit status, the negative number of the signal that ended it, or None while it runs."""
        if self._exit_code is None:
            self._zygote.pump()
        return self._exit_code

    @property
    def stdout(self) -> str:
        """What it has written to standard output so far."""
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has written to standard error so far."""
        return self._stderr.read_text(errors="replace")

    @property
    def output(self) -> str:
        """`stdout`, then `stderr`."""
        return self.stdout + self.stderr

    def wait(self, timeout: float = DEFAULT_TIMEOUT) -> int:
        """Wait for its end and return the exit code (see `exit_code`)."""
        self._wait(lambda: self._exit_code is not None, timeout, "to end", self._has_ended)
        assert self._exit_code is not None
        return self._exit_code

    def wait_for_output(self, text: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait until ``text`` is in `output`; a file gives no notice, so this looks every 20 ms."""
        self._wait(lambda: text in self.output, timeout, f"to write {text!r}", self._has_ended, poll=0.02)

    def kill(self) -> None:
        """End it with SIGKILL and wait until the kernel has closed its sockets; what it forked lives on."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """Freeze it with SIGSTOP; it has stopped when this returns."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `stop`."""
        self.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self.send_signal(signal.SIGINT)

    def send_signal(self, number: int) -> None:
        """Send any signal.

        Raises:
            EndedError: it has ended.
        """
        try:
            self._zygote.command(Signal(self.pid, number))
        except LabError as error:
            if self.exit_code is None:
                raise
            raise EndedError(f"{self!r} has ended") from error

    def describe(self) -> str:
        """Its state and the end of its output, for the message of a failed test."""
        code = self.exit_code
        state = "running" if code is None else _ending(code)
        return f"{self!r}: {state}\n{self._tail('stdout', self.stdout)}{self._tail('stderr', self.stderr)}"

    def _ended(self, code: int) -> None:
        self._exit_code = code

    def _sources(self) -> list[int]:
        """The descriptors on which news about it comes."""
        return [self._zygote.fileno()]

    def _take(self) -> None:
        self._zygote.pump()

    def _has_ended(self) -> bool:
        return self._exit_code is not None

    def _wait(
        self,
        done: Callable[[], bool],
        timeout: float,
        purpose: str,
        in_vain: Callable[[], bool],
        poll: float | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout
        self._take()
        while not done():
            if in_vain():
                raise self._failure(purpose)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                observed = f"{self!r} was expected {purpose} and did not in {timeout:g} s"
                raise LabTimeoutError(f"{observed}\n{self._stacks()}{self.describe()}")
            wait(self._sources(), remaining if poll is None else min(poll, remaining))
            self._take()

    def _failure(self, purpose: str) -> LabError:
        return LabError(f"{self!r} was expected {purpose} and ended instead\n{self.describe()}")

    def _stacks(self) -> str:
        """Have it write the stacks of its threads, if it can; they show with its stderr."""
        return ""

    @staticmethod
    def _tail(name: str, text: str) -> str:
        if not text:
            return ""
        left_out = "…" if len(text) > _OUTPUT_CHARACTERS else ""
        return f"--- {name} {left_out}\n{text[-_OUTPUT_CHARACTERS:]}\n"


class Rank(Process, Generic[T]):
    """A function that runs in a process forked from the zygote, started by `Host.start`."""

    def __init__(
        self, zygote: ZygoteClient, title: str, pid: int, stdout: Path, stderr: Path, channel: Connection
    ) -> None:
        super().__init__(zygote, title, pid, stdout, stderr)
        self._channel = channel
        self._outcome: Returned | RaisedError | None = None
        self._events: list[Event] = []
        self._consumed: dict[str, int] = {}

    @property
    def events(self) -> tuple[Event, ...]:
        """What it has reported so far, in order."""
        self._take()
        return tuple(self._events)

    def wait_for(self, name: str, timeout: float = DEFAULT_TIMEOUT) -> Event:
        """Return the next event ``name`` that no earlier call returned, waiting for it if need be.

        Raises:
            RankFailedError: the function ended without reporting it. LabTimeoutError: it did neither in
            ``timeout`` seconds; the stacks of its threads are in the message.
        """
        index = self._consumed.get(name, 0)
        self._wait(lambda: len(self._named(name)) > index, timeout, f"to report {name!r}", self._has_finished)
        self._consumed[name] = index + 1
        return self._named(name)[index]

    def result(self, timeout: float = DEFAULT_TIMEOUT) -> T:
        """Return what the function returns, waiting for it if need be; the process may still be about to end.

        Raises:
            RankFailedError: it raised, with its traceback, or the process ended first.
            LabTimeoutError: as `wait_for`.
        """
        self._wait(lambda: isinstance(self._outcome, Returned), timeout, "to return", self._has_finished)
        assert isinstance(self._outcome, Returned)
        value: T = self._outcome.value
        return value

    def error(self, timeout: float = DEFAULT_TIMEOUT) -> RaisedError:
        """Return what the function raises, waiting for it if need be.

        Raises:
            RankFailedError: it returned, or the process ended first.
            LabTimeoutError: as `wait_for`.
        """
        self._wait(lambda: isinstance(self._outcome, RaisedError), timeout, "to raise", self._has_finished)
        assert isinstance(self._outcome, RaisedError)
        return self._outcome

    def close(self) -> None:
        """Let go of the channel; what was reported before stays."""
        self._take()
        self._channel.close()

    def _named(self, name: str) -> list[Event]:
        return [event for event in self._events if event.name == name]

    def _sources(self) -> list[int]:
        ended = self._channel.closed
        return super()._sources() if ended else [*super()._sources(), self._channel.fileno()]

    def _take(self) -> None:
        super()._take()
        try:
            while not self._channel.closed and self._channel.poll():
                record = pickle.loads(self._channel.recv_bytes())
                if isinstance(record, Event):
                    self._events.append(record)
                else:
                    self._outcome = record
        except (EOFError, ConnectionResetError):
            self._channel.close()

    def _has_finished(self) -> bool:
        # The channel of a dead rank is empty by now: the notice of its end was taken before what it had sent.
        return self._outcome is not None or self._exit_code is not None

    def _failure(self, purpose: str) -> LabError:
        observed = f"{self!r} was expected {purpose}"
        if isinstance(self._outcome, RaisedError):
            return RankFailedError(f"{observed} and raised {self._outcome.name} instead\n{self.describe()}")
        if isinstance(self._outcome, Returned):
            return RankFailedError(f"{observed} and returned {self._outcome.value!r} instead\n{self.describe()}")
        return RankFailedError(f"{observed} and its process ended first\n{self.describe()}")

    def _stacks(self) -> str:
        before = len(self.stderr)
        try:
            self.send_signal(STACK_SIGNAL)
        except LabError:  # it ended this moment; its output shows how
            return ""
        deadline = time.monotonic() + _STACK_SECONDS
        while len(self.stderr) == before and time.monotonic() < deadline:
            wait(super()._sources(), 0.05)  # a file gives no notice
        return "its threads are at the end of stderr:\n" if len(self.stderr) > before else ""

    def describe(self) -> str:
        """As of any process, and the events."""
        reported = "".join(f"    {event.name} {dict(event.data)}\n" for event in self.events)
        raised = self._outcome.traceback if isinstance(self._outcome, RaisedError) else ""
        return super().describe() + self._tail("events", reported) + self._tail("raised", raised)


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
