"""The calls :func:`mingle.discover` and :func:`mingle.init`, from their arguments to a :class:`~mingle.job.Job`.

A call resolves the settings, discovers, exports the environment and, for ``init``, has torch make the process group.
A process has one session at a time; it lives on behind its job until it is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from msgspec import structs

from mingle import forksafe
from mingle.collector import collector_paused, resume_collector
from mingle.config import settings
from mingle.config.launchers import Placement
from mingle.config.settings import Arguments, Settings
from mingle.config.values import text_of
from mingle.distributed import environment, gloo, process_group
from mingle.distributed.environment import process_environment
from mingle.distributed.process_group import GroupArguments
from mingle.distributed.session import LoneSession, RunningSession, Session
from mingle.engine import progress, store
from mingle.engine.discovery import Discovery
from mingle.engine.party import process_identity
from mingle.errors import ConfigurationError, MingleError, no_port, opening
from mingle.job import Job, Member
from mingle.network.routes import port_range
from mingle.protocol.machine import Formation, lone_formation, scoped

logger = logging.getLogger("mingle")

FORMED = "mingle+formed"
"""The scheme by which torch asks for the store of a job that has formed (see `mingle.distributed.url_scheme`). The key
of the job's session follows."""

_caller: threading.Thread | None = None
"""The thread that is in a call of mingle's."""
_changing_caller = forksafe.register_lock(threading.Lock())
_active: Session | None = None
_formed: tuple[Settings, Job] | None = None
"""The job of that session, and the settings with which it has formed."""
_bound_gloo: Callable[[], None] | None = None
"""Undoes what Gloo was told."""


def discover(arguments: Arguments, group: GroupArguments | None = None, *, joins: bool = False) -> Job:
    """Carry out :func:`mingle.discover` or, if there are arguments for the process group, :func:`mingle.init`.

    Args:
        arguments: of the call.
        group: those of ``init_process_group``.
        joins: whether to return this process's job if it has formed with these arguments and goes on. For a framework
            that keeps its process group: what it starts later in the same process is in the same job.

    Raises:
        ConfigurationError: the process group that stands is not the caller's to end.
        MingleError: what discovery raises; or rank 0 was lost while torch made the process group.
    """
    begun = False
    try:
        with one_call(), collector_paused():
            if group is not None:  # first, so that a misspelled world_size= is named, and not called missing
                process_group.check_arguments(group)
            wanted = resolve(arguments)
            if group is not None and arguments.job_id is not None:
                settings.refuse_backend(arguments.job_id, "job_id", process_group.backends())
            if joins and (present := _present(wanted)) is not None:
                return present
            if earlier := process_group.end_earlier():
                _warn_of_its_end(earlier, wanted)
            begun = True
            job, session = form(wanted, enters=group is not None)
            if group is not None:
                make = importlib.import_module("torch.distributed").init_process_group
                with loss_explained(session), process_group.counted_if_made():
                    make(group.backend, init_method=f"{FORMED}://{session.key}", **group.options)
                job._owns_group(process_group.own(wanted.job_id, session.await_members))
                session.group_stands()
            return job
    except BaseException:
        # Ctrl-C can come at any line. A session that stayed open in its thread would keep the next cell of a notebook
        # waiting, and the group would count as the user's own.
        resume_collector()
        if begun:
            try:
                process_group.abandon()
            finally:
                end_session(failing=True)
        raise


def _present(wanted: Settings) -> Job | None:
    """Return this process's job if it has formed with these settings and goes on."""
    if _formed is None or _active is None or not _active.goes_on:
        return None
    settings, job = _formed
    if settings == wanted:
        return job
    if not process_group.stands():
        return None  # the new job takes the place of this one
    differing = _differing(settings, wanted)
    asked = f"job {wanted.job_id!r}" if "job_id" in differing else f"it with another {', '.join(differing)}"
    raise ConfigurationError.explain(
        f"this process is in job {job.job_id!r}, and its process group stands; this call asks for {asked}.",
        cause="a second Trainer, or a notebook's cell that was changed: a process is in one process group at a time",
        remedy="give the same job id and arguments as before, or first call "
        "torch.distributed.destroy_process_group() on every rank.",
    )


def _differing(settings: Settings, wanted: Settings) -> list[str]:
    """Return the names of the settings that differ, those of the place in the job among them."""
    names = [name for name in Settings.__struct_fields__ if getattr(settings, name) != getattr(wanted, name)]
    if "placement" in names:
        mine, asked = settings.placement, wanted.placement
        names.remove("placement")
        names += [name for name in Placement.__struct_fields__ if getattr(mine, name) != getattr(asked, name)]
    return names


def _warn_of_its_end(earlier: str, wanted: Settings) -> None:
    """Warn that the process group of another job has ended: code that still uses it fails."""
    if earlier != wanted.job_id:
        progress.say(
            logging.WARNING,
            f"job {wanted.job_id}: this call has destroyed the process group of job {earlier}, which "
            "mingle.init had made; close() that job first to avoid this warning",
            quiet=wanted.progress == "off",
        )


@contextlib.contextmanager
def loss_explained(session: Session) -> Iterator[None]:
    """Raise the reason where torch fails for want of a port, or because rank 0 is lost: it names neither."""
    try:
        yield
    except RuntimeError as error:  # every error of torch's C++ side is one
        if "Address already in use" in str(error):  # Gloo's sockets, whose ports the system chooses
            cause, remedy = no_port(*port_range())
            what = str(error).splitlines()[0]
            raise MingleError.explain(f"torch could not open a socket: {what}", cause=cause, remedy=remedy) from error
        if (loss := session.loss()) is not None:
            raise loss from (loss.__cause__ or error)
        raise


def _hold(session: Session) -> None:
    """Make a session that has begun this process's session."""
    global _active
    session.on_close = functools.partial(_forget, session)
    _active = session


def _forget(session: Session) -> None:
    """Restore the environment after the end of a session."""
    global _active, _formed
    if _active is session:
        _formed = None
        _active = None  # a signal handler can close the job meanwhile, and must not wait for this thread's lock
        try:
            process_environment.restore()
            _unbind_gloo()
        except BaseException:
            _active = session  # the next call continues here
            raise


def session_of(key: str) -> Session:
    """Return this process's session, which the URL of its key asks for.

    Raises:
        ConfigurationError: it has ended, or the key is that of no session.
    """
    if (active := _active) is not None and active.key == key:
        return active
    raise ConfigurationError.explain(
        f"there is no job behind {FORMED}://{key}.",
        cause="the job was closed while its process group was being made, as by a signal handler; or the URL was "
        "written by hand",
        remedy="call mingle.init again, or write mingle://JOB.",
    )


@contextlib.contextmanager
def one_call() -> Iterator[None]:
    """Let one call at a time through.

    Raises:
        ConfigurationError: another thread is in one.
    """
    global _caller
    with _changing_caller:
        # Do not hold a lock during the call: Ctrl-C between acquire and try would leave it locked, and a notebook could
        # never call again. A thread that calls is in no earlier call any more, whatever ended that one.
        if _caller not in (None, threading.current_thread()) and _caller.is_alive():
            raise ConfigurationError.explain(
                "mingle is already discovering a job in this process.",
                cause="init() or discover() was called from two threads at once",
                remedy="call it once, from one thread, and share the job.",
            )
        _caller = mine = threading.current_thread()
    try:
        yield
    finally:
        if _caller is mine:  # else this is the end of one that was interrupted, and another call has begun since
            _caller = None


def end_session(*, failing: bool = False) -> None:
    """End this process's session, if there is one.

    Args:
        failing: whether an exception ends the session.
    """
    if (active := _active) is not None:
        active.close(failing=failing)


def resolve(arguments: Arguments, longest: timedelta | None = None) -> Settings:
    """Return the settings of a call; what mingle itself exported earlier does not count.

    Args:
        arguments: of the call.
        longest: bounds the discovery timeout.
    """
    settings.refuse_windows()
    environ = process_environment.visible()
    progress.point_out_mistyped(environ)
    wanted = settings.resolve(environ, arguments)
    if longest is None or wanted.discovery_timeout <= longest.total_seconds():
        return wanted
    return structs.replace(wanted, discovery_timeout=longest.total_seconds())


def form(wanted: Settings, *, enters: bool = False) -> tuple[Job, Session]:
    """Carry out a call: end this process's old session, discover, export, and return the job and its session.

    The session is registered as soon as its job has formed, so that `end_session` ends it even if the call is
    interrupted.

    Args:
        wanted: of the call.
        enters: whether a process group is made of the session's entry.
    """
    global _formed
    end_session()
    _import_torch()
    job, session = _form(wanted, enters=enters) if wanted.master_addr is None else _passed_through(wanted)
    _formed = wanted, job
    return job, session


def _form(wanted: Settings, *, enters: bool) -> tuple[Job, Session]:
    started = time.monotonic()
    try:
        formation, session = (
            _form_alone(wanted) if wanted.placement.world_size == 1 else _discover(wanted, enters=enters)
        )
        _export(wanted, formation)
        _bind_gloo(formation)
    except BaseException:
        end_session(failing=True)
        raise
    logger.info(
        "job %s: rank %d of %d, rank 0 at %s:%d, own interface %s%s",
        wanted.job_id,
        formation.place.rank,
        formation.place.world_size,
        formation.store_address,
        formation.store_port,
        formation.interface,
        formation.unproved and f"; {formation.unproved}",
    )
    job = Job(
        job_id=wanted.job_id,
        **structs.asdict(formation.place),
        master_addr=formation.store_address,
        master_port=formation.store_port,
        interface=formation.interface,
        address=formation.address,
        elapsed=time.monotonic() - started,
    )._with(session)
    return job, session


def _import_torch() -> None:
    """Import torch before the first packet: its seconds must not count as waiting for the others."""
    with opening("torch"):
        importlib.import_module("torch.distributed")


def _discover(wanted: Settings, *, enters: bool) -> tuple[Formation, RunningSession]:
    with opening("what a discovery needs"):
        discovery = Discovery(wanted, enters=enters)
    try:
        formation = discovery.run()
        session = RunningSession(discovery, formation)
        _hold(session)
    except BaseException:
        discovery.close("interrupted", failed=True)  # unless it is closed already
        raise
    return formation, session


def _form_alone(wanted: Settings) -> tuple[Formation, LoneSession]:
    """Form a job of one rank: a store on loopback, and not a single packet."""
    session = os.urandom(16)
    server = store.open_server("127.0.0.1", wanted.master_port, session)
    local_rank = wanted.placement.local_rank or 0
    formation = lone_formation(session, server.port, local_rank=local_rank)
    who = process_identity(wanted).who
    member = Member(
        rank=0,
        local_rank=local_rank,
        node_rank=0,
        hostname=who.hostname,
        address=formation.address,
        pid=who.pid,
    )
    lone = LoneSession(member, server)
    _hold(lone)
    lone.serve()
    _say_alone(wanted)
    return formation, lone


def _say_alone(wanted: Settings) -> None:
    """Say which variable makes this process a job of its own: left over, it keeps the other ranks waiting."""
    variables = ("MINGLE_WORLD_SIZE", "WORLD_SIZE") if wanted.placement.launcher is None else ("MINGLE_WORLD_SIZE",)
    environ = process_environment.visible()
    if (variable := next((name for name in variables if text_of(environ, name) is not None), None)) is not None:
        text = (
            f"job {wanted.job_id}: this process runs alone, since {variable} is 1; if other ranks wait for it, give it "
            f"the {variable} that they have, or unset it on all"
        )
        progress.say(logging.INFO, text, quiet=wanted.progress == "off")


def _export(wanted: Settings, formation: Formation) -> None:
    named = wanted.interface_was_named
    if wanted.beside_torchrun:
        # torchrun's variables stay, for this process's own use and for its children.
        values = environment.socket_interfaces(formation.interface, named=named)
    else:
        values = environment.variables(formation, named=named)
    notes = process_environment.export(values)
    for note in notes:
        progress.say(logging.WARNING, f"job {wanted.job_id}: {note}", quiet=wanted.progress == "off")


def _bind_gloo(formation: Formation) -> None:
    """Make Gloo use the proved address if it would choose another one of the interface."""
    global _bound_gloo
    interface, address = formation.interface, formation.address
    if gloo.misses(interface, address, os.environ):
        _bound_gloo = gloo.bind(scoped(address, interface))


def _unbind_gloo() -> None:
    global _bound_gloo
    if (undo := _bound_gloo) is not None:
        undo()
        _bound_gloo = None


def _passed_through(wanted: Settings) -> tuple[Job, Session]:
    """Return the job and the session of a worker of torchrun, which has brought the ranks together already."""
    told = wanted.placement
    assert told.rank is not None
    assert wanted.master_addr is not None
    assert wanted.master_port is not None
    session = Session()
    _hold(session)
    node_rank = told.node_rank or 0
    if text_of(os.environ, "NODE_RANK") is None:
        process_environment.export({"NODE_RANK": str(node_rank)})
    local_world_size = told.local_world_size or 1
    job = Job(
        job_id=wanted.job_id,
        rank=told.rank,
        world_size=told.world_size,
        local_rank=told.local_rank or 0,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=told.num_nodes or max(1, told.world_size // local_world_size),
        master_addr=wanted.master_addr,
        master_port=wanted.master_port,
        interface="",
        address="",
        elapsed=0.0,
    )._with(session, members=())
    return job, session


@atexit.register
def _at_exit() -> None:
    """Say good-bye at the interpreter's exit, so that no rank takes a finished one for a crashed one."""
    with contextlib.suppress(MingleError):
        end_session()
    gloo.settle()
