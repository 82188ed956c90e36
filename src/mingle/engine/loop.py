"""The loop: the thread in which a driver runs, from the opening of its sockets to their end.

A rank's `Discovery` and an agent's `Gathering` are loops. A caller waits for a result, and hands the loop functions to
run (`Loop.call`, `Loop.ask`); what it sets itself, such as that the loop is to end, the loop only reads. Four rules
keep them apart:

- Python runs signal handlers in the main thread only, so no exception of the application reaches the loop. The loop's
  thread blocks all signals but those of a fault of its own (SIGSEGV, say): the kernel then delivers them to a thread of
  the application, and ends its wait.
- The loop and the threads that it starts load no module and start no process. Its caller can be inside an import (a
  module that calls ``mingle.init``), and the two would wait for each other; a child process would inherit the blocked
  signals. A caller that waits does what needs more: the progress line, and whatever looks at this machine.
- No line of the application runs in the loop: what it logs or shows, another thread hands to the application's handlers
  (:mod:`mingle.records`).
- The loop itself opens and closes all sockets, so a caller that is interrupted at any line only sets a flag. Only
  shared folders are opened by the caller, since a bucket needs a process; the loop closes them, or the caller if the
  loop never ran.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mingle import detached, records
from mingle.engine.driver import Driver, explained
from mingle.errors import MingleError, opening
from mingle.protocol.effects import Inspect
from mingle.protocol.events import Inspected
from mingle.protocol.observations import NetworkFacts, Snapshot
from mingle.records import logger

if TYPE_CHECKING:
    from mingle.engine.progress import Progress, Shown
    from mingle.protocol.reports import Cause

INSPECTION_SECONDS = 1.0
"""The least time between two looks at the firewall: without a secret, any process on the network can ask for them."""
ANSWER_SECONDS = 10.0
"""How long a call waits for the loop, which only a process starved of CPU keeps from answering."""
STOP_SECONDS = 5.0
"""How long the end of a loop is waited for: milliseconds, unless the process is starved of CPU."""

FailedCall: TypeAlias = Callable[[MingleError], object]
_T = TypeVar("_T")

_FATAL = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
"""Signals that tell of a fault in the thread itself: blocked, they would end the process without a traceback."""


class Loop:
    """A thread that owns a driver. A derived class opens it (`_open`), and says what a turn and the end consist of.

    Args:
        name: of the thread.
        job: the job, for errors.
        clock: the time.
    """

    driver: Driver

    def __init__(self, name: str, job: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure: MingleError | None = None
        """The error that ended the thread; else None."""
        self.clock = clock
        self._name = name
        self._job = job
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._over: MingleError | None = None
        """Why no call is run any more: the failure, or that the loop was stopped."""
        self._calls: SimpleQueue[tuple[Callable[[], None], FailedCall | None]] = SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._stage = ""
        self._inspect_from = float("-inf")
        """When this machine may be looked at again."""

    def _addresses(self) -> Collection[str]:
        """Return all addresses of this machine, once the driver is open."""
        return self.driver.interfaces.addresses()

    # --- what callers do -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread.

        Raises:
            MingleError: the system allows no more threads.
        """
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        detached.start_explained(self._thread)

    def stop(self) -> None:
        """Have the thread end, and wait for that; one that starts later ends at once. A later call changes nothing."""
        self._stopping = True
        self.call(lambda: None)
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)
        records.flush()

    def call(self, function: Callable[[], None], failed: FailedCall | None = None) -> None:
        """Run a function in the loop; callable from any thread.

        Args:
            function: what to run.
            failed: called instead of the function, in any thread, if the loop has ended.
        """
        self._calls.put((function, failed))
        if self._over is not None:
            self._fail_calls(self._over)
        self._wake()

    def ask(self, function: Callable[[], _T], *, patient: bool = False) -> _T:
        """Run a function in the loop and return its result.

        Args:
            function: what to run.
            patient: whether to wait until the loop answers or ends, however long its opening takes.

        Raises:
            MingleError: the loop has ended, or does not answer.
        """
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                answers.put((function(), None))
            except BaseException as error:
                answers.put((None, error))

        self.call(run, lambda failure: answers.put((None, failure)))
        try:
            result, error = answers.get(timeout=None if patient else ANSWER_SECONDS)
        except Empty:
            raise MingleError.explain(
                f"job {self._job!r}: its loop has not answered for {ANSWER_SECONDS:g} s.",
                cause="this process is starved of CPU, or stopped",
                remedy="look at the load of this machine.",
            ) from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    # --- what a caller that waits does -----------------------------------------------------------------------------

    def facts(self) -> NetworkFacts:
        """Return what a report says of the network, with a diagnosis of this machine, which takes a moment."""
        return self._diagnosed(self.driver.evidence.observed)

    def show(self, progress: Progress) -> None:
        """Show how far the loop has come, when that is due."""
        with contextlib.suppress(MingleError):  # the loop has ended, and its outcome says why
            progress.show(_Remote(self), self.clock(), lambda: self._diagnosed(self.driver.evidence.observed_since))

    def inspect(self, wanted: Inspect) -> None:
        """Find out what this machine's firewall blocks, and tell the machine. A caller that waits does this."""
        blocked = None
        if self.clock() >= self._inspect_from:
            self._inspect_from = self.clock() + INSPECTION_SECONDS
            with contextlib.suppress(OSError, ImportError):  # EMFILE: without a descriptor no module can be loaded
                from mingle.network import inspection

                peers = [(peer.address, peer.port) for peer in wanted.peers]
                blocked = inspection.blocked_connection(wanted.interface, (wanted.address, wanted.port), peers)
        self.call(lambda: self.driver.tell(Inspected(wanted.number, blocked)))

    def _diagnosed(self, observed: Callable[[], dict[str, Any]]) -> NetworkFacts:
        findings = self.ask(lambda: self.driver).evidence.diagnose(self.ask(observed))
        return self.ask(partial(self.driver.evidence.facts, findings))

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        records.defer_here()
        _block_signals()
        error: BaseException | None = None
        opened = False
        stack = contextlib.ExitStack()
        try:
            if not self._stopping:
                with opening("what a discovery needs"):
                    self._open(stack)
                opened, self._wake = True, partial(self.driver.call, self._run_calls)
                self._run_calls()
                self.driver.carry_out()
                self._run_turns()
                self._leave()
        except BaseException as caught:
            error = caught
            self.failure = explained(error, f"job {self._job!r}: its loop")
            if opened:
                self._finish(self._fail)
        self._finish(stack.close)
        if error is None and opened:
            self._finish(self._run_calls)
        over = self.failure or _ended_here(self._job)
        # Before any call fails: its caller looks at what a derived class knows of the end.
        self._finish(partial(self._ended, error, over))
        self._over = over
        self._finish(partial(self._fail_calls, over))

    def _run_turns(self) -> None:
        while not self._stopping:
            self._turn()

    def _run_calls(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                function, _ = self._calls.get_nowait()
                function()

    def _rest(self) -> None:
        """Wait for a call and run it; serve nothing else meanwhile."""
        function, _ = self._calls.get()
        function()
        self.driver.carry_out()

    def _fail_calls(self, over: MingleError) -> None:
        """Fail the calls that the ended loop will not run; only one thread takes each call out."""
        with contextlib.suppress(Empty):
            while True:
                _, failed = self._calls.get_nowait()
                if failed is not None:
                    failed(over.copied())

    def _log_stage(self) -> None:
        """Log the machine's step when it has changed."""
        if (stage := self._shown.stage()) != self._stage:
            self._stage = stage
            logger.debug("job %s: %s", self._job, stage)

    @property
    def _shown(self) -> Any:
        """The machine, for what is shown of it: its step, its status, and why it waits."""
        return self.driver.machine

    @staticmethod
    def _finish(ending: Callable[[], object]) -> None:
        """Carry out one step of the end; one that fails keeps no other from being carried out."""
        try:
            ending()
        except Exception as problem:
            logger.debug("ending the loop failed in part: %r", problem)

    # --- what a derived class says ---------------------------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Open the driver, which `stack` closes, and have it drive a machine."""
        raise NotImplementedError

    def _turn(self) -> None:
        """Wait for input or a timer, and serve it."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Say good-bye: the loop was stopped, and its sockets are open still."""

    def _fail(self) -> None:
        """Cut off those who use what this loop holds: it has failed, and its sockets are about to be closed."""

    def _ended(self, error: BaseException | None, over: MingleError) -> None:
        """Tell those who wait that the loop has ended.

        Args:
            error: the exception that has ended it, if any.
            over: why no call is run any more.
        """


class _Remote:
    """The machine of a loop, as a caller sees it: each question is answered in the loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def snapshot(self) -> Snapshot:
        return self._ask(lambda machine: machine.snapshot())

    def ask_status(self) -> None:
        self._ask(lambda machine: machine.ask_status())

    def cause(self, facts: NetworkFacts, now: float) -> Cause | None:
        return self._ask(lambda machine: machine.cause(facts, now))

    def _ask(self, question: Callable[[Shown], _T]) -> _T:
        return self._loop.ask(lambda: question(self._loop._shown))


def _ended_here(job: str) -> MingleError:
    return MingleError.explain(
        f"job {job!r}: its loop has ended in this process.",
        cause="the job was closed, here or in another thread",
        remedy="make the job anew.",
    )


def _block_signals() -> None:
    if hasattr(signal, "pthread_sigmask"):
        fatal = {getattr(signal, name) for name in _FATAL if hasattr(signal, name)}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - fatal)
