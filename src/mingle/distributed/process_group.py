"""The doors that end in a torch process group: :func:`mingle.init` and ``init_method="mingle://JOB"``.

Both hand torch the very connection by which this rank has proved the store. Torch's own ``env://`` road would make
one more like it: the keys have the same prefix, and this rank has been counted among the workers already. So ranks that
came through different doors, one of them plain ``env://`` after ``discover()``, meet there. Under torchrun the store
is torchrun's, and that road is taken.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
import re
import sys
import threading
import urllib.parse
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from msgspec import structs

from mingle.config import settings, values
from mingle.config.settings import Settings
from mingle.distributed import rendezvous, session, torch_threads
from mingle.engine import progress
from mingle.errors import ConfigurationError, MingleError
from mingle.job import Job

logger = logging.getLogger("mingle")

SCHEME = "mingle"
FORMED = "mingle+formed"
"""The scheme of ``init``, whose job has formed when torch calls."""
DESTROY_SECONDS = 2.0
_OURS = frozenset({"init_method", "store", "rank", "world_size", "backend"})

# The process group that init() made, compared by identity: another one is the user's. By weak reference, since who
# holds a process group holds its store, too, and a store that outlives its group breaks the next one.
_own_group: weakref.ref[Any] | None = None
_own_job = ""
"""The job for which mingle made the process group."""
# Who made it. A forked child has a copy without the threads behind it: ending that would wait for them for ever.
_own_pid = 0


def discover(job_id: str | None = None, **arguments: Any) -> Job:
    """Carries :func:`mingle.discover` out; its arguments are documented there."""
    begun = False
    try:
        with rendezvous.one_call():
            wanted = rendezvous.resolve({"job_id": job_id, **arguments})
            _make_way(wanted)
            begun = True
            return rendezvous.form(wanted)
    except BaseException:
        _undo(begun)
        raise


def init(
    job_id: str | None,
    *,
    backend: str | None,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Job:
    """Carries :func:`mingle.init` out; its arguments are documented there.

    Raises:
        MingleError: what discovery raises, or rank 0 was lost while torch made the process group.
    """
    global _own_group, _own_job, _own_pid
    begun = False
    try:
        with rendezvous.one_call():
            wanted = rendezvous.resolve({"job_id": job_id, **arguments})
            check_options(backend, options)
            if job_id is not None:
                settings.refuse_backend(job_id, "job_id", _backends())
            _make_way(wanted)
            begun = True
            job = rendezvous.form(wanted, enters=True)
            distributed = importlib.import_module("torch.distributed")
            with _loss_told():
                distributed.init_process_group(backend, init_method=f"{FORMED}://", **options)
            _own_group, _own_job, _own_pid = weakref.ref(_default_group()), wanted.job_id, os.getpid()
            job._owns_group(partial(destroy, _own_group))
            rendezvous.tell_group_stands()
            return job
    except BaseException:
        _undo(begun)
        raise


def _undo(begun: bool) -> None:
    """Clean up after a call that ends by an exception; Ctrl-C can come at any line of it.

    Otherwise the session would stay open in its thread, and the group would count as the user's own: the next cell of a
    notebook would wait for the session, or be refused because of the group.

    Args:
        begun: whether the call had already ended the earlier session, so that everything left is its own.
    """
    global _own_group
    if not begun:
        return
    _own_group = None
    try:
        if _default_group() is not None:
            _destroy_without_waiting()
    finally:
        rendezvous.end_session(failing=True)


@contextlib.contextmanager
def _loss_told() -> Iterator[None]:
    """Where torch fails since rank 0 is lost, says so: that tells more than that its store is gone."""
    try:
        yield
    except RuntimeError as error:  # every error of torch's C++ side is one
        if (loss := rendezvous.loss()) is not None:
            raise loss from (loss.__cause__ or error)
        raise


def _default_group() -> Any:
    """Returns torch's default process group, or None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not session.group_stands():
        return None
    return distributed.group.WORLD


def _make_way(wanted: Settings) -> None:
    """End the process group that an earlier ``init`` made, as when a notebook's cell is run again.

    If the group was another job's, warn, because code that still uses that group fails.

    Raises:
        ConfigurationError: the process group was not made by mingle.
    """
    group = _default_group()
    if group is None:
        return
    if _own_group is not None and _own_group() is group:
        if _own_pid == os.getpid():
            if _own_job != wanted.job_id:
                progress.say(
                    logging.WARNING,
                    f"job {wanted.job_id}: this call has destroyed the process group of job {_own_job}, which "
                    "mingle.init had made; close() that job first to avoid this warning",
                    quiet=wanted.progress == "off",
                )
            destroy(_own_group, False)
            return
        raise ConfigurationError.explain(
            "this process has a process group already.",
            cause="it is a fork of the process that made the group, and a fork can neither use nor end it",
            remedy="start it with multiprocessing's spawn method, or before mingle is called.",
        )
    raise ConfigurationError.explain(
        "this process has a process group already.",
        cause="torch.distributed.init_process_group, or a framework, was called before mingle",
        remedy="call mingle first, or torch.distributed.destroy_process_group() before it.",
    )


def destroy(group: weakref.ref[Any], failing: bool) -> None:
    """Destroys a process group that ``init`` made, if it still stands.

    Args:
        group: it; another one that came after it is left alone, and so is all in a forked child.
        failing: an exception is on its way. The other ranks may be gone, and a backend may wait for them: then
            this waits a moment only, and leaves the rest to a thread that nobody waits for.
    """
    global _own_group
    if group() is None or _default_group() is not group() or _own_pid != os.getpid():
        return
    if failing:
        _own_group = None
        _destroy_without_waiting()
    else:
        _end()
        _own_group = None  # not before: after an interrupt the next call ends it


def _destroy_without_waiting() -> None:
    """Destroy the process group in a thread; wait for it briefly, then abandon it."""
    thread = threading.Thread(target=_end_quietly, name="mingle-abandoned-destroy", daemon=True)
    thread.start()
    thread.join(DESTROY_SECONDS)


def _end() -> None:
    torch_threads.settle()  # torch before 2.8 waits for its threads with the interpreter's lock, which they may want
    sys.modules["torch.distributed"].destroy_process_group()


def _end_quietly() -> None:
    try:
        _end()
    except Exception as error:
        # The exception that is on its way already is the one to be seen.
        logger.debug("destroying the process group failed: %s", error)


# --- the options of init -------------------------------------------------------------------------------------------


def check_options(backend: str | None, options: Mapping[str, Any]) -> None:
    """Checks, before the first packet, what ``init_process_group`` would refuse after the whole wait.

    Raises:
        ConfigurationError: a name that it does not know or that is mingle's own, or a value of the wrong type.
    """
    distributed = importlib.import_module("torch.distributed")
    if options:
        _check_names(distributed, options)
    timeout = options.get("timeout")
    if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
        raise ConfigurationError.explain(
            f"timeout={timeout!r} is not a positive datetime.timedelta.",
            cause="timeout= is the process group's own timeout, as torch takes it",
            remedy="pass datetime.timedelta(minutes=10); mingle's own is discovery_timeout=, in seconds.",
        )
    for name, kinds in (("group_name", (str,)), ("device_id", (int, sys.modules["torch"].device))):
        value = options.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ConfigurationError.explain(
                f"{name}={value!r} has the wrong type.",
                cause=f"init_process_group takes {' or '.join(kind.__name__ for kind in kinds)} there",
                remedy=f"pass such a value, or leave {name}= out.",
            )
    if backend is not None:
        _check_backend(backend)


def _check_names(distributed: Any, options: Mapping[str, Any]) -> None:
    own = [*inspect.signature(settings.resolve).parameters, "backend"][1:]  # without the environment
    known = [name for name in inspect.signature(distributed.init_process_group).parameters if name not in _OURS]
    for name in options:
        if name in _OURS:
            raise ConfigurationError.explain(
                f"{name}= is not an option of mingle.init.",
                cause="mingle itself decides how the ranks find each other",
                remedy=f"leave {name}= out.",
            )
        if name not in known:
            meant = values.nearest(name, [*own, *known])
            hint = "" if meant is None else f"; did you mean {meant}=?"
            raise ConfigurationError.explain(
                f"there is no option {name}={hint or '.'}",
                cause="a spelling mistake, or an option of init_process_group in another version of torch",
                remedy=f"mingle.init's own are: {', '.join(own)}; init_process_group's are: {', '.join(known)}.",
            )


def _check_backend(backend: str) -> None:
    if not isinstance(backend, str):
        raise _no_backend(backend, "it is not a str")
    # Before torch parses the whole: of a name that it does not know it would only warn.
    names = [part.rpartition(":")[2].lower() for part in backend.split(",")]
    for name in names:
        if name not in _backends():
            meant = values.nearest(name, _available())
            hint = "" if meant is None else f"; did you mean {meant!r}?"
            raise _no_backend(backend, f"torch knows no {name!r}{hint}")
        if name not in _available():
            raise _no_backend(backend, f"this build of torch has no {name}")
    distributed = importlib.import_module("torch.distributed")
    problem = ""
    try:
        distributed.distributed_c10d.BackendConfig(distributed.Backend(backend))
    except ValueError as error:
        problem = " ".join(str(error).split())
    if problem:
        raise _no_backend(backend, problem)


def _backends() -> list[str]:
    """Return the backends that torch knows, available or not."""
    names = importlib.import_module("torch.distributed").Backend.backend_list
    return [name for name in names if name != "undefined"]


def _available() -> list[str]:
    distributed = importlib.import_module("torch.distributed")
    return [name for name in _backends() if getattr(distributed, f"is_{name}_available", lambda: True)()]


def _no_backend(backend: object, why: str) -> ConfigurationError:
    return ConfigurationError.explain(
        f"backend={backend!r} can't be used: {why}{'' if why.endswith('?') else '.'}",
        cause="a spelling mistake, or a build of torch without it",
        remedy=f"use one of {', '.join(_available())}, or leave backend= out.",
    )


# --- mingle://JOB --------------------------------------------------------------------------------------------------


def parse_url(url: str) -> tuple[str | None, dict[str, str]]:
    """Returns the job id in ``mingle://JOB`` and what torch appended (``?rank=…&world_size=…``).

    The id is percent-decoded: one with ``?`` or ``#`` in it is written with ``%3F`` and ``%23``. An empty one gives
    None: then ``MINGLE_JOB_ID`` or the launcher says it.

    Raises:
        ConfigurationError: what is appended is neither.
    """
    # With nothing after them torch drops the slashes when it appends, and the scheme may be in capitals.
    rest = url.partition(":")[2].removeprefix("//")
    name, _, query = rest.partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - {"rank", "world_size"})
    if unknown:
        raise ConfigurationError.explain(
            f"{url!r} carries {', '.join(unknown)}.",
            cause="only the job id stands in the URL; a question mark in it is written %3F",
            remedy="set the rest by MINGLE_… variables.",
        )
    job_id = urllib.parse.unquote(name, errors="strict") if "%" in name else name
    return job_id or None, options


def _doubt_about(name: str) -> str | None:
    """Return the doubt about a URL's job id that looks like an address or a path, unless it is escaped; else None."""
    if re.search(r":[0-9]+$", name):
        return "looks like an address, and mingle needs none"
    if "/" in name:
        return "holds a slash"
    return None


def _warn_of_doubt(url: str, job_id: str | None) -> None:
    name = url.partition(":")[2].removeprefix("//").partition("?")[0]
    if (doubt := _doubt_about(name)) is not None:
        progress.say(
            logging.WARNING,
            f"{url.partition('?')[0]!r} {doubt}: the whole of it is the job id, {job_id!r}; write %3A for "
            "a colon or %2F for a slash to avoid this warning",
            quiet=os.environ.get("MINGLE_PROGRESS", "").strip() == "off",
        )


def rendezvous_handler(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """What torch calls for ``init_method="mingle://JOB"``; yields its store, rank and world size."""
    try:
        job_id, options = parse_url(url)
        arguments: dict[str, Any] = {name: _integer(name, value) for name, value in options.items()}
    except UnicodeDecodeError:
        raise ConfigurationError.explain(
            f"the job id in {url!r} is not UTF-8 once it is percent-decoded.",
            cause="a percent sign that stands for itself",
            remedy="write it as %25.",
        ) from None
    _warn_of_doubt(url, job_id)
    begun = False
    try:
        with rendezvous.one_call():
            wanted = rendezvous.resolve({"job_id": job_id, **arguments})
            if timeout is not None:
                wanted = _bounded(wanted, timeout)
            begun = True
            job = rendezvous.form(wanted, enters=True)
        for entry in _entry(timeout, job.rank, job.world_size):
            with _loss_told():
                entry[0].check([])  # what fails later, in torch's own call, can't be told in our words
            yield entry
    except GeneratorExit:
        raise  # torch takes one store and drops the generator: that is the good end
    except BaseException:
        if begun:
            rendezvous.end_session(failing=True)
        raise


def formed_handler(_url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """What torch calls for ``init``; yields as `rendezvous_handler` does."""
    return _entry(timeout)


def _entry(timeout: timedelta | None, *place: int) -> Iterator[tuple[Any, int, int]]:
    """Hands torch the store that this rank has proved, or goes torch's ``env://`` road to one that is torchrun's.

    Raises:
        MingleError: rank 0 is lost, or its store has not answered.
    """
    distributed_rendezvous = importlib.import_module("torch.distributed.rendezvous")
    if timeout is None:
        timeout = distributed_rendezvous.default_pg_timeout
    if (entry := rendezvous.entry(timeout.total_seconds())) is not None:
        entry[0].set_timeout(timeout)
        yield entry
        return
    yield from distributed_rendezvous.rendezvous("env://", *place, timeout=timeout)


def _bounded(wanted: Any, timeout: timedelta) -> Any:
    seconds = min(wanted.discovery_timeout, timeout.total_seconds())
    return structs.replace(wanted, discovery_timeout=seconds)


def _integer(name: str, text: str) -> int | None:
    try:
        value = int(text)
    except ValueError:
        raise ConfigurationError.explain(
            f"{name}={text} in the URL is not a number.",
            cause="the URL was written by hand",
            remedy="pass rank= and world_size= to init_process_group.",
        ) from None
    # torch appends -1 for an argument that was not given.
    return None if value == -1 else value


def register() -> None:
    """Registers our schemes with torch; once is enough and twice is no error."""
    distributed_rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(distributed_rendezvous, "_rendezvous_handlers", {})
    for scheme, handler in ((SCHEME, rendezvous_handler), (FORMED, formed_handler)):
        if scheme not in handlers:
            with contextlib.suppress(RuntimeError):  # somebody else has registered it in between
                distributed_rendezvous.register_rendezvous_handler(scheme, handler)


__all__ = ["MingleError", "check_options", "destroy", "discover", "init", "parse_url", "register"]
