"""A rank's discovery: it drives the rank's machine, opens and proves the store, and goes on after GO.

Until the job has formed it runs in the calling thread; afterwards it goes on in a daemon thread, which answers other
processes and notices when the process group is made and destroyed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from mingle._version import __version__
from mingle.config import placement, values
from mingle.config.settings import Settings
from mingle.detached import PreStartedWorker
from mingle.engine import progress, store
from mingle.engine.driver import Driver, FailedCall
from mingle.engine.progress import Progress
from mingle.engine.store import StoreClient, StoreKeeper, StoreServer
from mingle.errors import MingleError, comes_from_a_signal_handler
from mingle.protocol.machine import CloseStore, Context, Effect, Formation, Identity, scoped
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import truncate_utf8
from mingle.wire.frames import MAX_NODE_KEY_BYTES, ProcessInfo, Unit

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from mingle.protocol.election import Elector
    from mingle.protocol.host import Host
    from mingle.protocol.member import Joiner

Machine: TypeAlias = "Host | Joiner | Elector"

FIRST_WATCH_SECONDS = 0.05
"""How soon after GO the thread first looks for the process group."""
LINGER_SECONDS = 1.0
"""How long a member keeps its UDP sockets after GO. Closing them takes a tenth of a millisecond, but all ranks of the
machine compete for its cores at that moment, and this rank's caller for the interpreter."""


FILES_PER_RANK = 3
"""The files that a rank costs its host: a control connection, two store clients, and room."""
FILES_PER_NODE = 3 + 16
"""The files that a node costs the agent that hosts and is agent 0: a control connection, two clients of the agents'
store, and one of the workers' store for each of its workers, of which it rarely has more."""
FILES_BESIDE = 128
_OWN_FILES = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")


# --- the garbage collector -----------------------------------------------------------------------------------------

COLLECTOR_PAUSE_SECONDS = 1.0
"""For how long a discovery runs without garbage collection. A rank that waits longer collects while it waits."""
_collector_paused_by: threading.Thread | None = None


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, unless the program has switched it off; `Discovery.run` bounds the pause.

    A full collection is due soon after the import of torch. It walks over all objects of torch, which takes some 80 ms,
    and if it falls into the call on rank 0, all other ranks wait for it as well.
    """
    global _collector_paused_by
    try:
        if gc.isenabled():
            _collector_paused_by = threading.current_thread()
        gc.disable()
        yield
    finally:
        resume_collector()


def resume_collector() -> None:
    """End the pause of the garbage collector, if this thread began one: a call that is refused ends no other's."""
    if _collector_paused_by is threading.current_thread():
        _collect_again()


def _collect_again() -> None:
    global _collector_paused_by
    if _collector_paused_by is not None:
        gc.enable()
        _collector_paused_by = None


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_collect_again)


# --- what a process brings to its job ------------------------------------------------------------------------------


def process_identity(
    settings: Settings,
    *,
    minimum: int | None = None,
    unit: Unit = "rank",
    addresses: Callable[[], Collection[str]] = tuple,
) -> Identity:
    """Return this process's identity in its job, with a new member id.

    Args:
        settings: how to discover.
        minimum: an agent's: how many nodes there must be. A rank has none.
        unit: what the ranks of the job count.
        addresses: returns all addresses of this machine, which tell machines with the same key apart. Launchers name
            nodes on all machines at once, so their keys need none.
    """
    torch = sys.modules.get("torch")
    node = placement.this_node() if settings.node is None else f"launcher {settings.node}"
    return Identity(
        job=settings.job_id,
        attempt=truncate_utf8(settings.attempt or ""),
        member=os.urandom(16),
        rank=settings.rank,
        world_size=settings.world_size,
        node=truncate_utf8(node, MAX_NODE_KEY_BYTES),
        who=ProcessInfo(hostname=truncate_utf8(socket.gethostname()), pid=os.getpid(), rank=settings.rank, unit=unit),
        local_rank=settings.local_rank,
        local_world_size=settings.local_world_size,
        node_rank=settings.node_rank,
        kind="ranks" if minimum is None else "agents",
        versions={
            "mingle": __version__,
            "torch": str(getattr(torch, "__version__", "not imported"))[:64],
            "python": sys.version.split(maxsplit=1)[0][:64],
        },
        addresses=addresses if settings.node is None else tuple,
        minimum=minimum,
    )


def job_key(settings: Settings) -> JobKey | None:
    """Return the key of a job's secret, and show the warnings about the secret and the job id."""
    for remark in values.remarks(settings.secret):
        progress.say(logging.WARNING, remark, quiet=settings.progress == "off")
    return JobKey(settings.secret, settings.job_id) if settings.secret is not None else None


def machine_context(settings: Settings, key: JobKey | None, driver: Driver) -> Context:
    """Return what a machine works with."""
    return Context(
        key=key,
        new_id=driver.new_id,
        rng=driver.rng,
        timeout=settings.discovery_timeout,
        free_files=free_files,
        unsent=driver.connections.unsent,
    )


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
    limit = hard if hard != resource.RLIM_INFINITY else needed
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):  # beyond the system's own limit: fs.nr_open, or kern.maxfilesperproc on macOS
        limit = soft
    if limit < needed:
        progress.say(
            logging.WARNING,
            f"the host of a job may open {limit} files and needs about {needed} for {members} {what}: raise the hard "
            "limit (ulimit -Hn), and that of the system if it is lower (fs.nr_open, kern.maxfilesperproc)",
            quiet=quiet,
        )


class Discovery:
    """One rank's discovery, from its first datagram to the end of its session.

    A class that derives from it can have another kind of store (`keeper`), open and reach it only at the seal
    (`ahead`), call its ranks nodes (`unit`), go on scanning a member's interfaces after GO (`scans_on`), and wait for
    the end in its own way.

    Args:
        settings: of the call.
        enters: whether the connection by which a member proves the store is kept for a process group (`take_client`).

    Raises:
        InterfaceError: no interface can be used.
        ConfigurationError: the fixed port of the store is taken.
        MingleError: no file descriptor is free.
    """

    keeper: type[StoreKeeper] = StoreKeeper
    ahead = True
    scans_on = False
    unit: Unit = "rank"

    def __init__(self, settings: Settings, *, enters: bool = False) -> None:
        self.settings = settings
        self.identity = identity = process_identity(settings, unit=self.unit, addresses=self._addresses)
        self.watch: Callable[[], float] | None = None
        """Called by the serving thread; returns the seconds until it wants to be called again."""
        self.group_stands = False
        """Whether a process group has taken the store over."""
        self._elector: Elector | None = None
        """The machine that has this rank assigned, until the job has formed."""
        self._closed = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._watch_due = self._deaf_due = 0.0
        self._progress = Progress(
            settings.job_id,
            settings.world_size,
            settings.rank,
            off=settings.progress == "off",
            now=time.monotonic(),
            unit=self.unit,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self._progress.close)
            self._worker = PreStartedWorker()
            stack.callback(self._worker.end)
            key = job_key(settings)
            self.driver = Driver(
                settings,
                settings.job_id,
                key,
                stack,
                perform=self._perform,
                scanned=self._scanned,
                say=self._progress.say,
            )
            self.stores = self.keeper(
                self.driver,
                self._worker.run,
                port=settings.master_port,
                ahead=self.ahead,
                workers=identity.world_size if enters else None,
            )
            if identity.rank == 0:  # the waiting ranks take the cores as soon as they hear of it
                self._worker.prepare()
            # The time to answer begins when the sockets are open: on a starved machine that can take seconds.
            self._drive(self._make_machine(key))
            self._stack = stack.pop_all()

    def _addresses(self) -> Collection[str]:
        return self.driver.interfaces.addresses()

    def _make_machine(self, key: JobKey | None) -> Machine:
        identity, driver, fixed_port = self.identity, self.driver, self.settings.master_port
        context = machine_context(self.settings, key, driver)
        # Each role imports its own machine: an import of milliseconds.
        if identity.rank not in (0, None):
            from mingle.protocol.member import Joiner

            return Joiner(identity, context, time.monotonic())
        make_room(identity.world_size, FILES_PER_RANK, what=f"{self.unit}s", quiet=self.settings.progress == "off")
        endpoints = driver.listen()
        if fixed_port is not None:
            # Only the addresses that are ready: another one is no reason to refuse the port.
            store.check_port(fixed_port, [scoped(each.address, each.interface) for each in endpoints.addresses])
        if identity.rank is None:
            from mingle.protocol.election import Elector

            self._elector = Elector(identity, endpoints, context, time.monotonic())
            return self._elector
        from mingle.protocol.host import Host

        return Host(identity, os.urandom(16), endpoints, context, time.monotonic())

    def _drive(self, machine: Machine) -> None:
        self._machine = machine
        self.driver.drive(machine, unverified=machine.heard_unverified)

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Formation:
        """Wait until the job has formed.

        Raises:
            MingleError: it has not, and why.
        """
        machine, driver = self._machine, self.driver
        paused_until = time.monotonic() + COLLECTOR_PAUSE_SECONDS
        try:
            with driver.failures_explained():
                driver.carry_out()
                self._worker.prepare()  # there is time for that until an answer comes
                while not machine.finished:
                    if machine.expired(time.monotonic()):
                        machine.give_up(driver.facts(diagnosed=True))
                        break
                    driver.turn(self._progress.next_timer())
                    now = time.monotonic()
                    self._progress.show(machine, now, driver.facts_so_far)
                    if now > paused_until:
                        resume_collector()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted or comes_from_a_signal_handler(error):
                self._progress.interrupted(machine, time.monotonic())
            self.close("interrupted" if interrupted else "failed")
            raise
        self._progress.close()
        if machine.failure is not None:
            self.close(type(machine.failure).__name__)
            raise machine.failure
        assert machine.outcome is not None
        if self._elector is not None:
            driver.carry_out()
            self._drive(self._elector.acting)
            self._elector = None
        if self._machine.hosting is None:
            self.stores.release()  # that of a session that this rank has given up
        # A host that has lost an address can't be found at another one. Its members notice a broken connection by
        # TCP's timers, so it must not be quicker than they are.
        driver.settle(scanning=self.scans_on and self._machine.hosting is None)
        return machine.outcome

    def serve(self) -> None:
        """Continue in a daemon thread."""
        # No process group can exist yet: the new thread goes straight to its sockets, and its caller on.
        now = time.monotonic()
        self._watch_due, self._deaf_due = now + FIRST_WATCH_SECONDS, now + LINGER_SECONDS
        name = "mingle-member" if self._machine.hosting is None else "mingle-host"
        self._thread = self._worker.run(name, self._serve)

    def _serve(self) -> None:
        self._thread = threading.current_thread()  # here too: Ctrl-C may come before `run` has returned it
        try:
            while not self._stopping:
                listens = self._machine.hosting is None and self.driver.transport is not None
                self.driver.turn(min(self._watch_due, self._deaf_due) if listens else self._watch_due)
                now = time.monotonic()
                if listens and now >= self._deaf_due:
                    self.driver.close_transport()  # no process asks a member any more; a host answers while it lives
                if now >= self._watch_due:
                    self._watch_due = now + (self.watch() if self.watch is not None else LINGER_SECONDS)
        except BaseException as error:
            self.driver.die(error, self._abort_store, self._let_go)

    # --- what the driver calls -------------------------------------------------------------------------------------

    def _scanned(self, now: float, changed: bool) -> None:
        if changed:
            self._machine.rewired(now)
        listener = self._elector or self._machine.hosting
        if listener is not None:
            self.driver.relisten(listener, now)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, CloseStore):
            self.say(
                f"{effect.reason}; its store is closed, so that the other ranks fail now and not at torch's timeout"
            )
            self.stores.abort()
        else:
            self.stores.perform(effect)

    def say(self, text: str, error: BaseException | None = None) -> None:
        """Report a problem, also where the application has not configured logging."""
        self._progress.say(logging.ERROR, text, error)

    # --- what the session asks -------------------------------------------------------------------------------------

    @property
    def failure(self) -> MingleError | None:
        """The error that ended the thread; else None."""
        return self.driver.failure

    @property
    def store_server(self) -> StoreServer | None:
        """The store, if this process hosts it."""
        return self.stores.server

    def call(self, function: Callable[[], None], failed: FailedCall | None = None) -> None:
        """Run a function in the thread; see `Driver.call`."""
        self.driver.call(function, failed)

    @property
    def host(self) -> Host | None:
        """The machine of the rank that hosts the job that has formed; None on a member."""
        return self._machine.hosting

    @property
    def joiner(self) -> Joiner | None:
        """The machine of a member of the job that has formed; None on the host."""
        return None if self._machine.hosting is not None else cast("Joiner", self._machine)

    def say_good_bye(self, reason: str) -> None:
        """Have the machine end its session; the thread goes on."""
        self._machine.close(reason)

    def take_client(self) -> StoreClient | None:
        """Hand out a member's connection to the store, once the job has formed.

        None if it was handed out before, or this discovery was not told that it `enters`.
        """
        formation = self._machine.outcome
        client, self.stores.client = self.stores.client, None
        if formation is None or client is None or not client.leads_to(formation.store_address, formation.store_port):
            return None
        return client

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End the session: say good-bye, stop the thread, close every socket. A second call does nothing."""
        # Set the flag before looking for the thread: a thread that is not known yet checks the flag before it does
        # anything.
        self._stopping = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self.driver.call(lambda: None)  # wakes it
            self._worker.end()
            thread.join()
        if self._closed:
            return
        try:
            self.driver.part(partial(self._machine.close, reason))
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Close every socket without a BYE, and release the store. A second call does nothing."""
        if self._closed:
            return
        self._closed = self._stopping = True
        self.stores.close()
        try:
            self._stack.close()
        finally:
            if self.driver.failure is None:
                self.driver.run_calls()
            self.stores.release()

    def _abort_store(self) -> None:
        """Shut the store down for its users, unless a process group has taken it over: then torch owns it."""
        if self.group_stands:
            return
        formation, server = self._machine.outcome, self.stores.server
        if server is not None and server.held:
            server.abort()
        elif self._machine.hosting is None and formation is not None:
            store.shut_down_connections(formation.store_address, formation.store_port)
