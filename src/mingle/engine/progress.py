"""The progress of a discovery: a live line on a terminal, an occasional line in a log, nothing if it ends quickly.

One process per node shows the line: the one that holds a certain name among the abstract Unix sockets (unix(7)). Those
belong to the network namespace, as a node does here, and the kernel frees the name when its holder dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from mingle import forksafe, records
from mingle.config import settings
from mingle.errors import suppressed
from mingle.protocol.explain.ladder import brief
from mingle.protocol.explain.observations import Cause, NetworkFacts, Situation
from mingle.text import printable, ranks_text

if TYPE_CHECKING:
    from rich.status import Status

logger = logging.getLogger("mingle")

TERMINAL_AFTER_SECONDS = 2.0
TERMINAL_EVERY_SECONDS = 0.5
LOG_AFTER_SECONDS = 10.0
LOG_EVERY_SECONDS = 30.0
CAUSE_AFTER_SECONDS = 10.0
"""When the line names the best cause so far: before that, ranks that come late and slow machines look like faults."""
LOOK_SECONDS = 3.0
"""How often a cause is looked for. It is named when two looks find the same one: the status of the job and the packets
of a rank that is just joining contradict each other for a moment."""
LOOK_OFTEN_SECONDS = 60.0
LATER_LOOK_SECONDS = 10.0
"""The same after a minute: a large job has many nodes, and each look asks the host."""
CHANGE_GAP_SECONDS = 10.0
"""The least time between two causes in a log. A cause that was named before waits for the next regular line."""
NAMED_CAUSES = 64
"""How many causes are remembered as named; bounded against a stranger who invents some."""
SPEAKER_NAMES = 8
"""The number of names of which the process that shows the line holds one."""
_CREDENTIALS = struct.Struct("3i")
"""The process, user and group of SO_PEERCRED (unix(7))."""


def line(job: str, s: Situation | None, seconds: float) -> str:
    """Return the progress line, such as ``job resnet: 5/8 joined, waiting for ranks 3, 7 · 12 s``."""
    return printable(f"job {job}: {_state(s)} · {seconds:.0f} s")


def _state(s: Situation | None) -> str:
    if s is not None and s.running:
        return f"the job is already running, hosted by {s.running}"
    if s is None or not s.connected:
        return f"looking for {'a host' if s is None else s.host}"
    if (status := s.status) is None:
        return f"{s.unit} 0 found, joining"
    state = f"{status.joined}/{status.world_size} joined"
    awaited = status.awaited or status.unconfirmed
    if status.joined < status.world_size:
        if awaited:
            return f"{state}, waiting for {_named(s.unit, awaited)}"
        return f"{state} ({status.hosts})" if status.hosts else state
    state += f", {status.phase}"
    return f"{state}, no answer yet from {_named(s.unit, awaited)}" if awaited else state


def _named(unit: str, ranks: tuple[int, ...]) -> str:
    return f"{unit}{'' if len(ranks) == 1 else 's'} {ranks_text(ranks)}"


def say(level: int, text: str, *, quiet: bool = False, error: BaseException | None = None) -> None:
    """Show a message to people: by logging where the application has set it up, else on stderr.

    The library adds no handler, so without this a script that never configured logging would wait in silence.
    ``quiet`` (``MINGLE_PROGRESS=off``) keeps it to logging. The traceback of an ``error`` follows the text.
    """
    records.run(partial(_say, level, printable(text, keep="\n"), quiet=quiet, error=error))


def _say(level: int, text: str, *, quiet: bool, error: BaseException | None) -> None:
    if quiet or any(records.handlers(logger, level)):
        logger.log(level, text, exc_info=error)
    elif sys.stderr is not None:
        lines = traceback.format_exception(error) if error is not None else []
        # The reader is gone (EPIPE, EIO), the application has closed it, or its replacement can't be flushed.
        with suppressed(OSError, ValueError, AttributeError):
            missed = records.take_dropped()
            before = f"mingle: {records.dropped_text(missed)}\n" if missed else ""
            if not records.write(sys.stderr, f"{before}mingle: {text}\n{''.join(lines)}"):
                records.drop(missed + 1)


def point_out_mistyped(environ: Mapping[str, str]) -> None:
    """Warn of unknown variables that look like one of mingle's; any other can belong to another program."""
    quiet = environ.get("MINGLE_PROGRESS", "").strip() == "off"
    for name, meant in settings.unknown_variables(environ).items():
        if meant is not None:
            say(logging.WARNING, settings.unknown_variable_text(name, meant), quiet=quiet)


def _stderr_is_terminal() -> bool:
    isatty = getattr(sys.stderr, "isatty", None)  # an application can put any object with write() in its place
    try:
        return isatty is not None and bool(isatty())
    except ValueError:  # closed
        return False


def _without_figures(cause: str) -> str:
    """Return a cause without the counts in it, which change while it stays the same."""
    return re.sub(r"[0-9]+ (datagrams|packets)", r"\1", cause)


class Shown(Protocol):
    """A machine whose progress is shown."""

    def ask_status(self) -> None:
        """Ask the host for the job's status."""

    def situation(self) -> Situation | None:
        """Return the job's status as this machine knows it, with what explains it; None if it does not wait."""

    def cause(self, facts: NetworkFacts, now: float) -> Cause | None:
        """Return the best cause so far why this machine waits; None if nothing was observed."""


class Progress:
    """The progress of a discovery, shown to people by the caller that waits for it."""

    def __init__(self, job: str, *, off: bool, now: float) -> None:
        self._job = job
        self._off = off
        self._quiet = off
        self._started = now
        self._terminal = not off and _stderr_is_terminal()
        self._due = now + (TERMINAL_AFTER_SECONDS if self._terminal else LOG_AFTER_SECONDS)
        self._ask_due = self._due - 1.0
        self._look_due = now + CAUSE_AFTER_SECONDS - 2 * LOOK_SECONDS - 0.5  # the third one is in time for the line
        self._seen = self._cause = ""
        """The cause that the last look has found, and the one that two looks have found."""
        self._named: set[str] = set()
        """The causes that a line of the log has named, without their figures."""
        self._named_at = float("-inf")
        self._speaker: socket.socket | None = None
        self._shown_by: int | None = None
        """The process that shows the line in place of this one, until that was said."""
        self._found = False
        """Whether this process has a host."""
        self._status: Status | None = None

    def next_timer(self) -> float | None:
        """Return when to call :meth:`show`."""
        return None if self._off else min(self._due, self._ask_due, self._look_due)

    def show(self, machine: Shown, now: float, facts: Callable[[], NetworkFacts]) -> None:
        """Show the state of a machine, when that is due.

        The process that shows the line asks its host before: once a second for a terminal, else for each look and line.

        Args:
            machine: the machine.
            now: the time.
            facts: returns what the sockets have shown, for a cause.
        """
        if self._off or now < min(self._due, self._ask_due, self._look_due):
            return
        situation = machine.situation()
        found = situation is not None and situation.connected
        if found != self._found:
            self._found, self._seen, self._cause = found, "", ""
            self._stop_speaking()
        speaks = self._speaks()
        looks, asks = now >= self._look_due, now >= self._ask_due
        if looks:
            self._look_due = now + (LOOK_SECONDS if now - self._started < LOOK_OFTEN_SECONDS else LATER_LOOK_SECONDS)
            if speaks:
                self._look(machine.cause(facts(), now), now)
        if asks:
            self._ask_due = now + 1.0 if self._terminal else max(now, self._due) + LOG_EVERY_SECONDS - 1.0
        if speaks and (asks or (looks and not self._terminal)):
            machine.ask_status()  # the answer is here when it is needed
        if now >= self._due:
            self._due = now + (TERMINAL_EVERY_SECONDS if self._terminal else LOG_EVERY_SECONDS)
            if speaks:
                self._show(self._line(situation, now))
            elif self._terminal and self._shown_by:
                self._point_to(self._shown_by)

    def _point_to(self, process: int) -> None:
        """Say once which process shows the line, unless that is on the same terminal."""
        self._shown_by = 0
        with contextlib.suppress(OSError):  # the process has ended, or is in another pid namespace
            where = Path(f"/proc/{process}/fd/2").readlink()
            if where != Path("/proc/self/fd/2").readlink():
                say(logging.INFO, f"job {self._job}: process {process} shows the progress of this node, on {where}")

    def _look(self, cause: Cause | None, now: float) -> None:
        """Take note of what a look has found; a new cause has the log's next line come sooner."""
        before, self._seen = self._seen, "" if cause is None else brief(cause)
        if self._seen and _without_figures(self._seen) != _without_figures(before):
            return
        self._cause = self._seen
        new = self._cause and _without_figures(self._cause) not in self._named and len(self._named) < NAMED_CAUSES
        if new and not self._terminal:
            soonest = max(self._started + CAUSE_AFTER_SECONDS, self._named_at + CHANGE_GAP_SECONDS)
            self._due = min(self._due, max(now, soonest))

    def _line(self, situation: Situation | None, now: float) -> str:
        seconds = now - self._started
        text = line(self._job, situation, seconds)
        if not self._cause or seconds < CAUSE_AFTER_SECONDS or (situation is not None and situation.running):
            return text
        self._named.add(_without_figures(self._cause))
        self._named_at = now
        return printable(f"{text} · likely cause: {self._cause}")

    def interrupted(self, situation: Callable[[], Situation | None], now: float) -> None:
        """Say how far this discovery has come, since Ctrl-C or a signal handler of the application ends it."""
        state = "interrupted"
        # Between two lines a machine can contradict itself, and nothing may take the place of what ends the wait.
        with contextlib.suppress(Exception):
            state += f": {_state(situation())}"
        self._end_line()
        cause = f" · likely cause: {self._cause}" if self._cause else ""
        say(logging.WARNING, f"job {self._job}: {state} · {now - self._started:.0f} s{cause}", quiet=self._quiet)

    def _show(self, text: str) -> None:
        if not self._terminal:
            say(logging.INFO, text)
            return
        # EMFILE: rich can't be loaded now. EIO: the terminal is gone. ValueError: the application has closed stderr.
        with suppressed(OSError, ImportError, ValueError):
            from rich.console import Console
            from rich.text import Text

            if self._status is None:
                self._status = Console(file=cast("TextIO", records.ConsoleFile(sys.stderr))).status(Text(text))
                self._status.start()
            self._status.update(Text(text))

    def _end_line(self) -> None:
        if self._status is not None:
            with suppressed(OSError, ValueError):  # as above
                self._status.stop()
            self._status = None

    def close(self) -> None:
        """Remove the line."""
        self._stop_speaking()
        self._off = True

    def _stop_speaking(self) -> None:
        self._end_line()
        if self._speaker is not None:
            self._speaker.close()
            self._speaker = None

    def _speaks(self) -> bool:
        """Return whether this process shows the line of its node.

        A process without a host does not know what the others wait for, nor do they know what keeps it out: one of
        these shows a line as well. Any user can take a name before us. Such a name is passed over, for otherwise the
        job would be silent; where all are taken, each process shows the line.
        """
        if self._speaker is not None:
            _drain(self._speaker)
            return True
        if sys.platform != "linux":
            return True
        digest = hashlib.sha256(f"{os.geteuid()}\0{self._job}\0{self._found}".encode()).hexdigest()
        for suffix in ("", *(f"-{number}" for number in range(1, SPEAKER_NAMES))):
            name = f"\0mingle-progress-{digest[:32]}{suffix}"
            try:
                speaker = forksafe.register(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            except OSError:  # EMFILE: no line is shown until there is a descriptor
                return False
            speaker.setblocking(False)
            try:
                speaker.bind(name)
                speaker.listen(socket.SOMAXCONN)  # every other process of the node calls between two turns of this one
            except OSError:
                holder = _our_holder(speaker, name)
                speaker.close()
                if holder is not None:
                    self._shown_by = holder if self._shown_by is None else self._shown_by
                    return False
            else:
                self._speaker = speaker
                return True
        return True


def _drain(speaker: socket.socket) -> None:
    """Take the calls of the others, of which the kernel keeps a limited number."""
    with suppressed(OSError):
        for _ in range(socket.SOMAXCONN):
            speaker.accept()[0].close()


def _our_holder(caller: socket.socket, name: str) -> int | None:
    """Return the process of this user that opened the socket of this name; None if another user's did."""
    try:
        caller.connect(name)
        credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:  # it does not listen, or its queue is full
        return None
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return process if user == os.geteuid() else None
