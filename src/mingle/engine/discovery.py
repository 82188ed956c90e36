"""A rank's discovery: the loop that drives the rank's machine, opens and proves the store, and goes on after GO.

The caller waits for the outcome, shows the progress, and diagnoses this machine when the time is up. After GO the loop
answers other processes and notices when the process group is made and destroyed.
"""

from __future__ import annotations

import codecs
import contextlib
import gc
import importlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, cast

from msgspec import structs

from mingle import records
from mingle._version import __version__
from mingle.config import placement, values
from mingle.config.order import order_of
from mingle.config.settings import Settings, gloo_problem
from mingle.engine import progress, store
from mingle.engine.driver import Driver
from mingle.engine.loop import Loop
from mingle.engine.progress import Progress
from mingle.engine.store import StoreClient, StoreKeeper, StoreServer
from mingle.errors import MingleError, counted
from mingle.network import folders
from mingle.network.transport import NothingOpenedError
from mingle.protocol.effects import CloseStore, Effect, Inspect
from mingle.protocol.events import InterfacesChanged
from mingle.protocol.machine import Context, Formation, Identity, scoped
from mingle.protocol.observations import Snapshot
from mingle.records import logger
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import truncate_utf8
from mingle.wire.frames import MAX_NODE_KEY_BYTES, ProcessInfo, Unit

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from mingle.protocol.election import Elector
    from mingle.protocol.host import Host
    from mingle.protocol.member import Joiner
    from mingle.protocol.membership import Membership

Machine: TypeAlias = "Host | Joiner | Elector"

FIRST_WATCH_SECONDS = 0.05
"""How soon after GO the loop first looks for the process group."""
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


def machine_context(settings: Settings, key: JobKey | None, driver: Driver) -> Context:
    """Return what a machine works with."""
    return Context(
        key=key,
        new_id=driver.new_id,
        rng=driver.rng,
        timeout=settings.discovery_timeout,
        folder_seconds=driver.folders.first_look_seconds,
        mesh=settings.mesh,
        free_files=free_files,
        unsent=driver.connections.unsent,
        astray=driver.interfaces.astray,
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


class Discovery(Loop):
    """One rank's discovery, from its first datagram to the end of its session.

    A class that derives from it can have another kind of store (`keeper`), call its ranks nodes (`unit`), tell the
    others a port (`program_port`), go on scanning a member's interfaces after GO (`scans_on`), expect no process group
    (`watches`), and wait for the end in its own way.

    Args:
        settings: of the call.
        enters: whether the connection by which a member proves the store is kept for a process group (`take_client`).
    """

    keeper: type[StoreKeeper] = StoreKeeper
    scans_on = False
    watches = True
    unit: Unit = "rank"
    program_port = 0

    def __init__(self, settings: Settings, *, enters: bool = False) -> None:
        super().__init__(f"mingle-{self.unit}", settings.job_id)
        self.settings = settings
        self.identity = identity = process_identity(
            settings, unit=self.unit, addresses=self._addresses, program_port=self.program_port
        )
        self.watch: Callable[[], float] | None = None
        """Called by the loop after GO; returns the seconds until it wants to be called again."""
        self.group_stands = False
        """Whether a process group has taken the store over."""
        self._enters = enters
        self._key = job_key(settings)
        self._elector: Elector | None = None
        """The machine that has this rank assigned, until the job has formed."""
        self._formed = self._time_is_up = False
        self._refusal: MingleError | None = None
        """Why the job has not formed."""
        self._farewell = ("its session has ended", False)
        """The reason that the machine gives for its end, and whether the others must take that for a loss."""
        self._outcome: SimpleQueue[Formation | MingleError | NothingOpenedError | Inspect | None] = SimpleQueue()
        """What the caller waits for; None: the time is up, and the caller is to say what is known of this machine."""
        self._watch_due = self._deaf_due = 0.0
        self._progress = Progress(
            settings.job_id,
            identity.world_size,
            identity.rank,
            off=settings.progress == "off",
            now=time.monotonic(),
            unit=self.unit,
        )
        self._import_machine()
        self._storages = folders.storages(settings.folders, settings.job_id)

    def _import_machine(self) -> None:
        """Import what the loop needs: each role its own machine, an import of milliseconds."""
        role = {None: "election", 0: "host"}.get(self.identity.rank, "member")
        importlib.import_module(f"mingle.protocol.{role}")
        if self.settings.peers:
            codecs.lookup("idna")  # of the names that the resolver's threads look up

    # --- the caller ------------------------------------------------------------------------------------------------

    def run(self) -> Formation:
        """Start the loop, and wait until the job has formed.

        Raises:
            InterfaceError: no interface can be used.
            ConfigurationError: the fixed port of the store is taken.
            MingleError: the job has not formed, and why; or no file descriptor or thread is free.
        """
        try:
            self.start()
            outcome = self._await_outcome()
        except BaseException as error:
            # The loop's errors are returned: a signal handler has raised this one here, or no thread is free.
            self.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", failed=True)
            if not isinstance(error, MingleError):
                self._progress.interrupted(self._snapshot, time.monotonic())
            raise
        finally:
            self._progress.close()
            records.flush()
        if isinstance(outcome, Formation):
            return outcome
        self.stop()
        raise outcome.diagnosed() if isinstance(outcome, NothingOpenedError) else outcome

    def _await_outcome(self) -> Formation | MingleError | NothingOpenedError:
        paused_until: float | None = time.monotonic() + COLLECTOR_PAUSE_SECONDS
        while True:
            times = [each for each in (paused_until, self._progress.next_timer()) if each is not None]
            try:
                outcome = self._outcome.get(timeout=max(0.0, min(times) - time.monotonic()) if times else None)
            except Empty:
                if paused_until is not None and time.monotonic() >= paused_until:
                    paused_until = None
                    resume_collector()
                self.show(self._progress)
            else:
                if isinstance(outcome, Inspect):
                    self.inspect(outcome)
                elif outcome is not None:
                    return outcome
                else:
                    self._give_up()

    def _give_up(self) -> None:
        """Have the machine end with the error that explains why the time is up."""

        def give_up() -> None:
            if not self._machine.finished:
                self._machine.give_up(facts)

        try:
            facts = self.facts()
        except MingleError:  # the loop is starved, or it has ended with an outcome of its own
            self._outcome.put(None)
        else:
            self.call(give_up)

    def _snapshot(self) -> Snapshot:
        return self._machine.snapshot()

    # --- the loop --------------------------------------------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        self.driver = Driver(
            settings,
            settings.job_id,
            self._key,
            stack,
            storages=self._storages,
            perform=self._perform,
            scanned=self._scanned,
            say=self._progress.say,
        )
        self.stores = self.keeper(
            self.driver,
            self.call,
            port=settings.master_port,
            workers=self.identity.world_size if self._enters else None,
        )
        stack.callback(self.stores.release)
        stack.callback(self.stores.close)
        # The time to answer begins when the sockets are open: on a starved machine that can take seconds.
        try:
            machine = self._make_machine()
        except MingleError as error:
            self.driver.udp.say_failed(self.identity.failed(error))
            raise
        self._drive(machine)

    def _make_machine(self) -> Machine:
        identity, driver, fixed_port = self.identity, self.driver, self.settings.master_port
        context = machine_context(self.settings, self._key, driver)
        if identity.rank not in (0, None):
            from mingle.protocol.member import Joiner

            joiner = Joiner(identity, context, time.monotonic())
            if self._listens_for_mesh:
                joiner.endpoints = driver.control_port.listen(locally=True)
            return joiner
        make_room(identity.world_size, FILES_PER_RANK, what=self.unit, quiet=self.settings.progress == "off")
        endpoints = driver.control_port.listen(locally=self._listens_for_mesh)
        asked = self.settings.placement
        can_be_first = asked.node_rank_launched or not asked.node_rank
        if fixed_port is not None and (identity.rank == 0 or can_be_first):
            # Only the addresses that are ready: another one is no reason to refuse the port.
            store.check_port(fixed_port, [scoped(each.address, each.interface) for each in endpoints.addresses])
        if identity.rank is None:
            from mingle.protocol.election import Elector

            # Computed once: an order that followed a change of addresses would let two hosts sort differently.
            order = order_of(self.settings.placement, identity.who.hostname, endpoints.addresses[0].address)
            self.identity = identity = structs.replace(identity, order=order)
            self._elector = Elector(identity, endpoints, context, time.monotonic())
            return self._elector
        from mingle.protocol.host import Host

        return Host(identity, os.urandom(16), endpoints, context, time.monotonic())

    @property
    def _listens_for_mesh(self) -> bool:
        return self.settings.mesh != "off"

    def _drive(self, machine: Machine) -> None:
        self._machine = machine
        self.driver.drive(machine, verifies=True)

    def _turn(self) -> None:
        if self._formed:
            self._serve()
            return
        machine = self._machine
        if self._time_is_up:
            self._rest()
        else:
            self.driver.turn()
        self._log_stage()
        if machine.finished:
            self._conclude(machine)
        elif not self._time_is_up and machine.expired(time.monotonic()):
            self._time_is_up = True
            self._outcome.put(None)

    def _conclude(self, machine: Machine) -> None:
        if machine.failure is not None:
            self._refusal = machine.failure
            self._farewell = type(machine.failure).__name__, False
            self._stopping = True
            return
        assert machine.outcome is not None
        if self._elector is not None:
            self.driver.carry_out()
            self._drive(self._elector.acting)
            self._elector = None
        if self._machine.hosting is None:
            self.stores.release()  # that of a session that this rank has given up
            if self._listens_for_mesh:
                self.driver.connections.stop_listening()
        # A host that has lost an address can't be found at another one. Its members notice a broken connection by
        # TCP's timers, so it must not be quicker than they are.
        self.driver.settle(scanning=self.scans_on and self._machine.hosting is None)
        if self._machine.hosting is None:
            self.driver.folders.leave()
        now = time.monotonic()
        self._watch_due = now + FIRST_WATCH_SECONDS if self.watches else math.inf
        self._deaf_due = now + LINGER_SECONDS
        self._formed = True
        self._outcome.put(machine.outcome)

    def _serve(self) -> None:
        listens = self._machine.hosting is None and self.driver.udp.transport is not None
        self.driver.turn(min(self._watch_due, self._deaf_due) if listens else self._watch_due)
        now = time.monotonic()
        if listens and now >= self._deaf_due:
            self.driver.udp.close()  # no process asks a member any more; a host answers while it lives
        if now >= self._watch_due:
            self._watch_due = now + (self.watch() if self.watch is not None else FIRST_WATCH_SECONDS)
            self.driver.carry_out()  # what the watch has said must not wait for the next turn

    def _leave(self) -> None:
        reason, failed = self._farewell
        if self._machine.hosting is None:
            self.driver.part(partial(self._machine.close, reason, failed=failed))
        else:  # its end closes its store, and needs no word of a loss
            self.driver.part(partial(self._machine.close, reason))

    def _fail(self) -> None:
        """Shut the store down for its users, unless a process group has taken it over: then torch owns it."""
        if not self._formed:
            self._leave()
            return
        if self.group_stands:
            return
        formation, server = self._machine.outcome, self.stores.server
        if server is not None and server.held:
            server.abort()
        elif self._machine.hosting is None and formation is not None:
            store.shut_down_connections(formation.store_address, formation.store_port)

    def _ended(self, error: BaseException | None, over: MingleError) -> None:
        if self._formed:
            if self.failure is not None:
                self.say(str(self.failure), error)
        elif isinstance(error, NothingOpenedError):
            self._outcome.put(error)
        elif self.failure is not None:
            logger.info("the traceback of what ended the loop", exc_info=error)
            self._outcome.put(self.failure)
        else:
            self._outcome.put(self._refusal or over)

    # --- what the driver calls -------------------------------------------------------------------------------------

    def _scanned(self, now: float, changed: bool) -> None:
        if changed:
            self._machine.handle(InterfacesChanged(), now)
        listens_for_mesh = self._listens_for_mesh and not self._formed
        if listens_for_mesh or self._elector is not None or self._machine.hosting is not None:
            self.driver.relisten(now, locally=listens_for_mesh)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, CloseStore):
            self.say(
                f"{effect.reason}; its store is closed, so that the other ranks fail now and not at torch's timeout"
            )
            self.stores.abort()
        elif isinstance(effect, Inspect):
            self._outcome.put(effect)
        else:
            self.stores.perform(effect)

    def say(self, text: str, error: BaseException | None = None) -> None:
        """Report a problem, also where the application has not configured logging."""
        self._progress.say(logging.ERROR, text, error)

    # --- what the session asks -------------------------------------------------------------------------------------

    @property
    def store_server(self) -> StoreServer | None:
        """The store, if this process hosts it."""
        return self.stores.server

    @property
    def host(self) -> Host | None:
        """The machine of the rank that hosts the job that has formed; None on a member."""
        return self._machine.hosting

    @property
    def membership(self) -> Membership | None:
        """A member's place in the job that has formed; None on the host."""
        return None if self._machine.hosting is not None else cast("Joiner", self._machine).membership

    def say_good_bye(self, reason: str) -> None:
        """Have the machine end its session; the loop goes on."""
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

    def close(self, reason: str, *, failed: bool = False) -> None:
        """End the session: say good-bye, close every socket, end the thread. A later call does nothing.

        Args:
            reason: is told to the others.
            failed: whether the others must take this for a loss, since this rank will make no process group.
        """
        if not self._stopping:
            self._farewell = reason, failed
        self.stop()
        folders.close(self._storages)  # if the loop has never opened
