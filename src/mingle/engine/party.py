"""A party: one process's part in a job. It is a machine, the loop that drives it in a thread, and what callers read.

A rank's `Discovery` and an agent's `Gathering` are parties. A caller waits for what the loop publishes, and hands the
loop functions to run (`Party.call`, `Party.ask`); what it sets itself, such as that the loop is to end, the loop only
reads. Four rules keep them apart:

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

The loop replaces each value that it publishes as a whole, so a caller reads it without a lock, which would stay locked
if Ctrl-C came between its acquire and the ``try``.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from msgspec import structs

from mingle import detached, records
from mingle._version import __version__
from mingle.config import placement, values
from mingle.config.order import order_of
from mingle.config.settings import Settings, gloo_problem
from mingle.engine import progress
from mingle.engine.driver import Driver, explained
from mingle.engine.progress import Progress
from mingle.engine.store import StoreKeeper
from mingle.errors import MingleError, counted, opening
from mingle.network import folders
from mingle.network.folder import FolderStorage
from mingle.network.interfaces import file_limit
from mingle.network.transport import NothingOpenedError
from mingle.protocol.effects import CloseStore, Effect, Inspect
from mingle.protocol.events import Inspected, InterfacesChanged
from mingle.protocol.explain import deadline, ladder
from mingle.protocol.explain.observations import Cause, NetworkFacts, Situation
from mingle.protocol.machine import Context, Endpoints, Identity
from mingle.protocol.node import Node
from mingle.records import logger
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import truncate_utf8
from mingle.wire.frames import MAX_NODE_KEY_BYTES, ProcessInfo, Unit

if sys.platform != "win32":
    import resource

INSPECTION_SECONDS = 1.0
"""The least time between two looks at the firewall: without a secret, any process on the network can ask for them."""
ANSWER_SECONDS = 10.0
"""How long a call waits for the loop, which only a process starved of CPU keeps from answering."""
STOP_SECONDS = 5.0
"""How long the end of a loop is waited for: milliseconds, unless the process is starved of CPU."""

FILES_PER_RANK = 3
"""The files that a rank costs its host: a control connection and two store clients."""
FILES_PER_NODE = 3 + 16
"""The files that a node costs the agent that hosts and is agent 0: a control connection, two clients of the agents'
store, and one of the workers' store for each of its workers, of which it rarely has more."""
FILES_BESIDE = 128
_OWN_FILES = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")

FailedCall: TypeAlias = Callable[[MingleError], object]
_T = TypeVar("_T")

_FATAL = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
"""Signals that tell of a fault in the thread itself: blocked, they would end the process without a traceback."""


# --- what a process brings to its job ------------------------------------------------------------------------------


def process_identity(
    settings: Settings,
    *,
    minimum: int | None = None,
    unit: Unit = "rank",
    addresses: Callable[[], Collection[str]] = tuple,
    program_port: int = 0,
) -> Identity:
    """Return this process's identity in its job, with a new member id.

    Args:
        settings: how to discover.
        minimum: an agent's: how many nodes there must be. A rank has none.
        unit: what the ranks of the job count.
        addresses: returns all addresses of this machine, which tell machines with the same key apart. Launchers name
            nodes on all machines at once, so their keys need none.
        program_port: a port that is free on this machine for the program of ``mingle-run``; 0: there is no program.
    """
    torch = sys.modules.get("torch")
    asked = settings.placement
    node = placement.this_node() if asked.node is None else f"launcher {asked.node}"
    return Identity(
        job=settings.job_id,
        attempt=truncate_utf8(asked.attempt or ""),
        member=os.urandom(16),
        rank=asked.rank,
        world_size=asked.world_size,
        node=truncate_utf8(node, MAX_NODE_KEY_BYTES),
        who=ProcessInfo(hostname=truncate_utf8(socket.gethostname()), pid=os.getpid(), rank=asked.rank, unit=unit),
        local_rank=asked.local_rank,
        local_world_size=asked.local_world_size,
        node_rank=asked.node_rank,
        node_rank_from=asked.node_rank_from,
        kind="ranks" if minimum is None else "agents",
        versions={
            "mingle": __version__,
            "torch": str(getattr(torch, "__version__", "not imported"))[:64],
            "python": sys.version.split(maxsplit=1)[0][:64],
        },
        addresses=addresses if asked.node is None else tuple,
        minimum=minimum,
        program_port=program_port,
    )


def job_key(settings: Settings) -> JobKey | None:
    """Return the key of a job's secret, and show the warnings about the secret, the job id and Gloo's variable."""
    remarks = values.remarks(settings.secret)
    if (problem := gloo_problem(os.environ)) is not None:  # no error: the program may not use Gloo
        remarks.append(f"{problem.observation}; likely cause: {problem.cause}; fix: {problem.remedy}")
    for remark in remarks:
        progress.say(logging.WARNING, remark, quiet=settings.progress == "off")
    return JobKey(settings.secret, settings.job_id) if settings.secret is not None else None


def free_files() -> int:
    """Return the number of files that this process can still open."""
    limit = file_limit()
    if limit == sys.maxsize:
        return limit
    try:
        # Since Linux 6.2 st_size is the number of descriptors (proc(5)), in 2 µs; counting a few thousand takes 1 ms.
        opened = _OWN_FILES.stat().st_size if sys.platform == "linux" else 0
        return max(0, limit - (opened or len(list(_OWN_FILES.iterdir()))))
    except OSError:  # EMFILE: the directory cannot be opened either
        return 0


def make_room(members: int, files_per_member: int, *, what: str, quiet: bool) -> None:
    """Raise the soft limit of open files to the hard one if it may be too low; warn if that is not enough.

    Args:
        members: the number of members.
        files_per_member: the files that each of them costs.
        what: what a member is called in the warning.
        quiet: whether to write the warning to the log only.
    """
    if sys.platform == "win32":  # for the type checker: no caller comes here on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_per_member * members + FILES_BESIDE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = hard if hard != resource.RLIM_INFINITY else needed
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):  # beyond the system's own limit: fs.nr_open, or kern.maxfilesperproc on macOS
        limit = soft
    if limit < needed:
        progress.say(
            logging.WARNING,
            f"the host of a job may open {limit} files and needs about {needed} for {counted(members, what)}: raise "
            "the hard limit (ulimit -Hn), and that of the system if it is lower (fs.nr_open, kern.maxfilesperproc)",
            quiet=quiet,
        )


class Party:
    """One process's part in a job: a machine, the thread that drives it, and what callers read of it.

    A derived class makes the machine (`_make_machine`), and adds to a turn and to the end what only it needs.

    Args:
        settings: how to discover.
        minimum: an agent's: how many nodes there must be.
        clock: the time.
    """

    name: str
    """Of the thread."""
    unit: Unit = "rank"
    files_per_member = FILES_PER_RANK
    keeper: type[StoreKeeper] = StoreKeeper
    program_port = 0

    driver: Driver
    stores: StoreKeeper
    _machine: Node
    """Only the loop changes it."""

    def __init__(
        self, settings: Settings, *, minimum: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.failure: MingleError | None = None
        """The error that ended the thread; else None."""
        self.identity = process_identity(
            settings,
            minimum=minimum,
            unit=self.unit,
            addresses=self._addresses,
            program_port=self.program_port,
        )
        self._pid = os.getpid()
        self._quiet = settings.progress == "off"
        self._workers: int | None = None
        self._key: JobKey | None = None
        self._storages: Mapping[str, FolderStorage] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._farewell = ("its session has ended", False)
        """The reason that the machine gives for its end, and whether the others must take that for a loss."""
        self._refusal: MingleError | None = None
        """Why the machine itself has ended the loop."""
        self._unopened: NothingOpenedError | None = None
        """The failure that a caller has to diagnose."""
        self._over: MingleError | None = None
        """Why no call is run any more: a failure, a refusal, or that the loop was stopped."""
        self._calls: SimpleQueue[tuple[Callable[[], None], FailedCall | None]] = SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._news: SimpleQueue[None] = SimpleQueue()
        """Holds an item while the loop has published what its caller has not looked at."""
        self._inspections: deque[Inspect] = deque(maxlen=1)
        """What the caller has to find out about this machine: a machine waits for its last question only."""
        self._inspect_from = float("-inf")
        """When this machine may be looked at again."""
        self._time_is_up = False
        """Whether the machine's deadline has passed, so that the caller has to say what is known of this machine."""
        self._progress: Progress | None = None
        """Shown by the caller that waits; None while none does."""
        self._stage = ""

    def _addresses(self) -> Collection[str]:
        return self.driver.interfaces.addresses()  # the driver is open by then

    # --- what callers do -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open what the loop must not open itself, and start the thread.

        Raises:
            MingleError: the system allows no more threads, or no file descriptor is free. A later call starts anew.
        """
        try:
            with opening("what a discovery needs"):
                if self.settings.peers:
                    codecs.lookup("idna")  # of the names that the resolver's threads look up
                self._key = job_key(self.settings)
                self._storages = folders.storages(self.settings.folders, self.settings.job_id)
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            detached.start_explained(self._thread)
        except MingleError:
            self._thread = None
            folders.close(self._storages)
            raise
        except BaseException:  # the thread may have begun
            self.stop()
            raise

    def close(self, reason: str, *, failed: bool = False) -> None:
        """End this process's part: say good-bye, close every socket, end the thread.

        A call that is blocked in torch is left behind. A later call does nothing, nor does one in a fork.

        Args:
            reason: is told to the others.
            failed: whether the others must take this for a loss, since this rank will make no process group.
        """
        if os.getpid() != self._pid:
            return
        if not self._stopping:
            self._farewell = reason, failed
        self.stop()

    def stop(self) -> None:
        """Have the thread end, and wait for that; one that starts later ends at once. A later call changes nothing."""
        self._stopping = True
        self.call(lambda: None)
        self._notify()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)
        folders.close(self._storages)  # if the loop has never opened
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
                f"job {self.settings.job_id!r}: its loop has not answered for {ANSWER_SECONDS:g} s.",
                cause="this process is starved of CPU, or stopped",
                remedy="look at the load of this machine.",
            ) from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    # --- what a caller that waits does -----------------------------------------------------------------------------

    def _await(self, outcome: Callable[[], _T | None], begin: Callable[[], object] | None = None) -> _T:
        """Wait for an outcome that the loop publishes, and do meanwhile what only a caller can.

        Args:
            outcome: returns what has come of it, or None; it can raise.
            begin: run in the loop first.

        Raises:
            MingleError: the loop has ended without an outcome.
        """
        self._progress = progress = Progress(self.settings.job_id, off=self._quiet, now=self.clock())
        try:
            if begin is not None:
                with contextlib.suppress(MingleError):  # the loop has ended, and the wait says why
                    self.ask(begin, patient=True)
            while (found := outcome()) is None:
                if self._over is not None:
                    raise self._over.copied() if self._unopened is None else self._unopened.diagnosed()
                if self._inspections:
                    self.inspect(self._inspections.popleft())
                elif self._time_is_up:
                    with contextlib.suppress(MingleError):  # the loop is starved, or it has ended
                        self.ask(partial(self._give_up, self.facts()))
                elif not self.wait(progress.next_timer()):
                    self.show(progress)
            return found
        except MingleError:
            raise
        except BaseException:  # Ctrl-C, or what a signal handler of the application has raised
            progress.interrupted(self._situation, self.clock())
            raise
        finally:
            self._progress = None
            if self._time_is_up:
                self.call(lambda: None)  # the loop rests, and must not wait for this caller any more
            progress.close()
            records.flush()

    def wait(self, until: float | None = None) -> bool:
        """Wait for news of the loop, or for a signal, at most until a time; return whether there was any."""
        try:
            self._news.get(timeout=None if until is None else max(0.0, until - self.clock()))
        except Empty:
            return False
        return True

    def facts(self) -> NetworkFacts:
        """Return what a report says of the network, with a diagnosis of this machine, which takes a moment."""
        return self._diagnosed(self.driver.evidence.observed)

    def show(self, progress: Progress) -> None:
        """Show how far the loop has come, when that is due."""
        with contextlib.suppress(MingleError):  # the loop has ended, and its outcome says why
            progress.show(self, self.clock(), lambda: self._diagnosed(self.driver.evidence.observed_since))

    def situation(self) -> Situation | None:
        """Return the job's status as the machine knows it, with what explains it; None if it does not wait."""
        return self.ask(self._situation)

    def _situation(self) -> Situation | None:
        machine = self._machine
        return None if machine.finished or machine.closed else machine.situation()

    def ask_status(self) -> None:
        """Ask the host for the job's status."""
        self.ask(lambda: self._machine.ask_status())  # noqa: PLW0108 - it may not be there

    def cause(self, facts: NetworkFacts, now: float) -> Cause | None:
        """Return the best cause so far why the machine waits; None if nothing was observed."""
        return self.ask(lambda: ladder.waiting(self._machine.situation(), facts, now))

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
            self._unopened = error if isinstance(error, NothingOpenedError) else None
            self.failure = explained(error, f"job {self.settings.job_id!r}: its loop")
            if opened:
                self._finish(self._fail)
        self._finish(stack.close)
        if error is None and opened:
            self._finish(self._run_calls)
        # Before any call fails: its caller looks at what a derived class knows of the end.
        self._finish(partial(self._ended, error))
        self._over = self._refusal or self.failure or _ended_here(self.settings.job_id)
        self._finish(partial(self._fail_calls, self._over))
        self._notify()

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

    def _notify(self) -> None:
        """Wake the caller that waits: something was published."""
        if self._news.empty():
            self._news.put(None)

    @staticmethod
    def _finish(ending: Callable[[], object]) -> None:
        """Carry out one step of the end; one that fails keeps no other from being carried out."""
        try:
            ending()
        except Exception as problem:
            logger.debug("ending the loop failed in part: %r", problem)

    # --- the loop --------------------------------------------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Open the driver, which `stack` closes, and have it drive a machine."""
        settings = self.settings
        self.driver = driver = Driver(
            settings,
            settings.job_id,
            self._key,
            stack,
            storages=self._storages,
            clock=self.clock,
            perform=self._perform,
            scanned=self._scanned,
            say=self.say,
        )
        self.stores = self.keeper(driver, self.call, port=settings.master_port, workers=self._workers)
        stack.callback(self.stores.release)
        stack.callback(self.stores.close)
        # The time to answer begins when the sockets are open: on a starved machine that can take seconds.
        self._machine = self._make_machine(
            Context(
                key=self._key,
                new_id=driver.new_id,
                rng=driver.rng,
                timeout=settings.discovery_timeout,
                folder_seconds=driver.folders.first_look_seconds,
                mesh=settings.mesh,
                free_files=free_files,
                unsent=driver.connections.unsent,
                astray=driver.interfaces.astray,
            )
        )
        driver.drive(self._machine, verifies=True)

    def _make_machine(self, context: Context) -> Node:
        """Return the machine."""
        raise NotImplementedError

    def _listen(self) -> Endpoints:
        """Listen for members, as each process does that can become the host."""
        identity = self.identity
        make_room(identity.world_size, self.files_per_member, what=self.unit, quiet=self._quiet)
        endpoints = self.driver.control_port.listen(locally=self._listens_for_mesh)
        if identity.rank is None:
            # Computed once: an order that followed a change of addresses would let two hosts sort differently.
            order = order_of(self.settings.placement, identity.who.hostname, endpoints.addresses[0].address)
            self.identity = structs.replace(identity, order=order)
        return endpoints

    @property
    def _listens_for_mesh(self) -> bool:
        return self.settings.mesh != "off"

    @property
    def _can_host(self) -> bool:
        """Whether others can call this process as their host, now or later."""
        return self.identity.rank in (0, None)

    def _turn(self) -> None:
        """Wait for input or a timer, and serve it."""
        if not self._time_is_up:
            self.driver.turn()
        elif self._progress is not None:
            self._rest()  # the caller that waits says what is known of this machine
        else:
            self._give_up(self.driver.evidence.facts())
            self.driver.carry_out()
        machine = self._machine
        if (stage := machine.stage()) != self._stage:
            self._stage = stage
            logger.debug("job %s: %s", self.settings.job_id, stage)
        self._time_is_up = machine.expired(self.clock())
        if self._time_is_up:
            self._notify()

    def _give_up(self, facts: NetworkFacts) -> None:
        """Have the machine end with the error that explains why the time is up."""
        if self._machine.expired(self.clock()):
            self._machine.give_up(deadline.timeout(self._machine.situation(), facts))
        self._time_is_up = False

    def _leave(self) -> None:
        """Say good-bye: the loop was stopped, and its sockets are open still."""
        reason, failed = self._farewell
        self.driver.part(partial(self._machine.close, reason, failed=failed))

    def _fail(self) -> None:
        """Cut off those who use what this loop holds: it has failed, and its sockets are about to be closed."""

    def _ended(self, error: BaseException | None) -> None:
        """Publish that the loop has ended, and why.

        Args:
            error: the exception that has ended it, if any.
        """

    # --- what the driver calls -------------------------------------------------------------------------------------

    def _scanned(self, now: float, changed: bool) -> None:
        if changed:
            self._machine.handle(InterfacesChanged(), now)
        if self._listens_for_mesh or self._can_host:
            self.driver.relisten(now, locally=self._listens_for_mesh)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, CloseStore):
            self._close_store(effect)
        elif isinstance(effect, Inspect):
            self._inspections.append(effect)
            self._notify()
        else:
            self.stores.perform(effect)

    def _close_store(self, effect: CloseStore) -> None:
        """End the store that this process hosts, since the others can't go on."""
        raise NotImplementedError

    def say(self, level: int, text: str, error: BaseException | None = None) -> None:
        """Report a problem, also where the application has not configured logging."""
        progress.say(level, text, quiet=self._quiet, error=error)


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
