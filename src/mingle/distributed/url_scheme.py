"""``init_method="mingle://JOB"``: the scheme, and its registration with torch, whichever of the two is imported first.

At ``import torch``, torch calls :mod:`mingle_autoload`, so a script need not import mingle. ``import mingle`` registers
the scheme as well, for a checkout on ``PYTHONPATH``, which has no entry points, and for
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. It must not load torch (that takes seconds). So when torch is there already the
scheme is registered at once, else a finder waits in ``sys.meta_path`` for ``torch.distributed.rendezvous`` to be
imported; right after that the scheme is registered and the finder gone.

The handlers give torch the connection over which this rank has proved the store. Torch's own ``env://`` would make
another one like it: the keys have the same prefix, and this rank is counted among the workers already. So ranks meet in
the store whichever entry point they use, including plain ``env://`` after ``discover()``. Under torchrun the store is
torchrun's, and the handlers use ``env://``, unless rank, world size and another job id than torchrun's are given: then
they win, as with ``tcp://`` and ``file://``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any, cast

from mingle.collector import collector_paused, resume_collector
from mingle.errors import ConfigurationError, MingleError, cut_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from mingle.config.settings import Arguments
    from mingle.distributed.session import Session

SCHEME = "mingle"
_MODULE = "torch.distributed.rendezvous"
_C10D = "torch.distributed.distributed_c10d"
_UNSET = "-1"
"""What torch appends for a rank or a world size that was not given."""


def install() -> None:
    """Register the scheme now or as soon as torch comes."""
    if _MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    # Torch is there, so this is a rank: it loads what it needs now, and not while the others wait for it.
    with collector_paused() if gc.isenabled() else contextlib.nullcontext():  # a call of mingle may have paused it
        from mingle.distributed.rendezvous import FORMED

    torch_rendezvous = importlib.import_module(_MODULE)
    for scheme, handler in ((SCHEME, rendezvous_handler), (FORMED, formed_handler)):
        with contextlib.suppress(RuntimeError):  # it is registered
            torch_rendezvous.register_rendezvous_handler(scheme, handler)


class _Finder:
    """Waits for one module until it has been loaded; a mere look for it, or a failed import, changes nothing.

    It has the method of importlib.abc's class and not that as a base, which would bring importlib.resources along, and
    with it tempfile and zipfile, a quarter of all that `import mingle` takes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        """Have the scheme registered, and this finder removed, when the loader of the module has loaded it."""
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            with contextlib.suppress(ValueError):  # another thread was quicker
                sys.meta_path.remove(cast("Any", self))
            _register()

        loader.exec_module = exec_module  # the loader is this spec's own


# --- what torch calls ----------------------------------------------------------------------------------------------


def parse_url(url: str) -> tuple[str | None, dict[str, str]]:
    """Return the job id in ``mingle://JOB`` and what torch appended (``?rank=…&world_size=…``).

    The id is percent-decoded: one with ``?`` or ``#`` in it is written with ``%3F`` and ``%23``. An empty one gives
    None: then ``MINGLE_JOB_ID`` or the launcher says it.

    Raises:
        ConfigurationError: what is appended is neither, or the id holds a ``#``.
    """
    from urllib import parse

    # With nothing after them torch drops the slashes when it appends, and the scheme may be in capitals.
    rest = url.partition(":")[2].removeprefix("//")
    name, _, query = rest.partition("?")
    if "#" in query:  # a URL's fragment comes after its query, so torch has moved it there
        raise ConfigurationError.explain(
            f"the job id in {url!r} holds a #.",
            cause="a # begins a URL's fragment, and torch puts the rank and the world size before that",
            remedy="write it as %23.",
        )
    options = dict(parse.parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - {"rank", "world_size"})
    if unknown:
        raise ConfigurationError.explain(
            f"{url!r} carries {', '.join(unknown)}.",
            cause="only the job id stands in the URL; a question mark in it is written %3F",
            remedy="set the rest by MINGLE_… variables.",
        )
    job_id = parse.unquote(name, errors="strict") if "%" in name else name
    return job_id or None, options


def _warn_of_address(url: str, job_id: str | None) -> None:
    """Warn of a job id that looks like an address or a path, unless it is escaped."""
    from mingle.engine import progress

    name = url.partition(":")[2].removeprefix("//").partition("?")[0]
    if re.search(r":[0-9]+$", name):
        doubt = "looks like an address, and mingle needs none"
    elif "/" in name:
        doubt = "holds a slash"
    else:
        return
    progress.say(
        logging.WARNING,
        f"{url.partition('?')[0]!r} {doubt}: the whole of it is the job id, {job_id!r}; write %3A for "
        "a colon or %2F for a slash to avoid this warning",
        quiet=os.environ.get("MINGLE_PROGRESS", "").strip() == "off",
    )


def rendezvous_handler(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and world size for ``init_method="mingle://JOB"``; torch calls this function."""
    try:
        yield from _rendezvous(url, timeout)
    except (MingleError, KeyboardInterrupt) as error:
        cut_frames(error)
        raise error


def _rendezvous(url: str, timeout: timedelta | None) -> Iterator[tuple[Any, int, int]]:
    from mingle.distributed import process_group, rendezvous

    backend, group_name = _call_of_torch()
    world = process_group.world()
    begun = False
    try:
        arguments = _arguments(url)
        with rendezvous.one_call(), collector_paused():
            wanted = rendezvous.resolve(arguments, timeout)
            if group_name is not None:
                process_group.check_backend(backend)
            begun = True
            job, session = rendezvous.form(wanted, enters=True)
        for entry in _entry(session, timeout, job.rank, job.world_size):
            with rendezvous.loss_explained(session):
                entry[0].check([])  # what fails later, in torch's own call, can't be told in our words
            session.awaits_group = group_name is not None  # else torch's RPC asks, which makes no group
            yield entry
    except GeneratorExit:
        # Torch takes one store, and drops the generator when its call ends. If that is the good end, nothing is called
        # here: a Ctrl-C during the call would be lost.
        if world is not None and world._default_pg is None:
            process_group.take_back_count(group_name)
        else:
            session.awaits_group = False
        raise
    except BaseException:
        process_group.take_back_count(group_name)
        resume_collector()
        if begun:
            rendezvous.end_session(failing=True)
        raise


def formed_handler(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield what `rendezvous_handler` yields, for ``mingle.init``: the URL names the session of the call."""
    from mingle.distributed import rendezvous

    key = url.partition("://")[2].partition("?")[0]
    return _entry(rendezvous.session_of(key), timeout)


def _arguments(url: str) -> Arguments:
    """Return the arguments that a URL gives."""
    from mingle.config.settings import Arguments

    try:
        job_id, options = parse_url(url)
    except UnicodeDecodeError:
        raise ConfigurationError.explain(
            f"the job id in {url!r} is not UTF-8 once it is percent-decoded.",
            cause="a percent sign that is part of the job id",
            remedy="write it as %25.",
        ) from None
    if options.get("world_size") == _UNSET:  # torch appends it in this case alone
        raise ConfigurationError.explain(
            f"torch asks for a group without a world size by {url!r}.",
            cause="init_rpc without world_size= makes a dynamic group, whose members come and go; a job of mingle is "
            "complete when it forms",
            remedy="pass world_size= to init_rpc.",
        )
    rank, world_size = (_integer(name, options.get(name, _UNSET)) for name in ("rank", "world_size"))
    _warn_of_address(url, job_id)
    return Arguments(job_id=job_id, rank=rank, world_size=world_size, may_leave_torchrun=True)


def _call_of_torch() -> tuple[str | None, str | None]:
    """Return backend and group name of the ``init_process_group`` that asks for a store; None: another function asks.

    Torch hands a scheme's handler neither of them.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name == "init_process_group" and frame.f_globals.get("__name__") == _C10D:
            return frame.f_locals.get("backend"), frame.f_locals.get("group_name")
    return None, None


def _entry(session: Session, timeout: timedelta | None, *place: int) -> Iterator[tuple[Any, int, int]]:
    """Yield the store that this rank has proved; under torchrun, what torch's ``env://`` yields.

    Raises:
        MingleError: rank 0 is lost, or its store has not answered.
    """
    torch_rendezvous = importlib.import_module(_MODULE)
    if timeout is None:
        timeout = torch_rendezvous.default_pg_timeout
    if (entry := session.entry(timeout.total_seconds())) is not None:
        entry[0].set_timeout(timeout)
        yield entry
        return
    yield from torch_rendezvous.rendezvous("env://", *place, timeout=timeout)


def _integer(name: str, text: str) -> int | None:
    try:
        value = int(text)
    except ValueError:
        raise ConfigurationError.explain(
            f"{name}={text} in the URL is not a number.",
            cause="the URL was written by hand",
            remedy="pass rank= and world_size= to init_process_group.",
        ) from None
    return None if text == _UNSET else value
