"""What a launcher tells a process, and how a row of the table in `mingle.config.launchers` is read.

A launcher is a program that starts the processes of a job and leaves each its place in the environment. A row
names its variables by meaning and is read all or nothing: a rank is never guessed, and never put together from
two launchers. Nothing here reads ``os.environ``.
"""

from __future__ import annotations

import re
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING

from msgspec import Struct

from mingle.config.values import parse_whole, text_of
from mingle.errors import LauncherError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Identity(Struct, frozen=True, kw_only=True):
    """A process's place in its job, as its launcher says. What the launcher does not say is None.

    Attributes:
        launcher: the row's name.
        rank: this process's rank in the job.
        rank_from: the variable that held it.
        world_size: the number of processes in the job.
        world_size_from: the variable that held it.
        local_rank: this process's rank among those of its node.
        local_world_size: the number of the job's processes on this node.
        node_rank: the rank of this node among the job's.
        num_nodes: the number of nodes.
        node: a key that only this node's processes share within the job.
        job_id: the same for all processes of the job, and for no other job of this launcher.
        attempt: which start of this job it is, the same for all its processes.
    """

    launcher: str
    rank: int
    rank_from: str
    world_size: int
    world_size_from: str
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    node: str | None = None
    job_id: str | None = None
    attempt: str | None = None


def _always(environ: Mapping[str, str]) -> bool:  # noqa: ARG001 - the signature of Launcher.started
    return True


def _nothing(environ: Mapping[str, str]) -> dict[str, str]:  # noqa: ARG001 - the signature of Launcher.computed
    return {}


class Launcher(Struct, frozen=True, kw_only=True):
    """One row: the variables that a launcher sets, by meaning; of several names the first that is set counts.

    Attributes:
        name: what people call it.
        marks: when one of these is set, the launcher is here, and its row must be complete.
        yields_to: when one of these is set, it is not: somebody closer to the process has placed it.
        rank, world_size: always needed.
        required: further variables that belong to a complete environment.
        local_rank, local_world_size, node_rank, num_nodes, attempt: optional.
        tasks_per_node: a compressed list (``2(x3),1``) of which this node's entry is the local world size.
        job_id: parts, each with its names, that are joined by dots when all are set.
        one_per_node: counts of processes or GPUs on a node, of a launcher that starts one process on each and
            numbers the nodes. Where there are more, the ranks are not the nodes'.
        computed: gives what has to be worked out of the variables, under names made of theirs.
        started: whether the launcher started this very process, rather than a shell that sees its job.
        size_is_the_users: the launcher says no size; the user does, in the Job or by an argument.
        sets_plain_pair: ``RANK`` and ``WORLD_SIZE`` come from this launcher: they don't complete its row.
        outside: what a process is that sees the marks and no complete row.
        start: how to start it properly.
    """

    name: str
    marks: tuple[str, ...]
    yields_to: tuple[str, ...] = ()
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    required: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    tasks_per_node: tuple[str, ...] = ()
    job_id: tuple[tuple[str, ...], ...] = ()
    attempt: tuple[str, ...] = ()
    one_per_node: tuple[str, ...] = ()
    computed: Callable[[Mapping[str, str]], dict[str, str]] = _nothing
    started: Callable[[Mapping[str, str]], bool] = _always
    size_is_the_users: bool = False
    sets_plain_pair: bool = False
    outside: str
    start: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of all variables that this row knows, in the table's order."""
        plain = ("marks", "rank", "world_size", "required", "local_rank", "local_world_size", "node_rank")
        more = ("num_nodes", "tasks_per_node", "one_per_node", "attempt")
        named = chain(*(getattr(self, field) for field in plain + more), *self.job_id)
        # What is computed has a name that no variable can have.
        return tuple(dict.fromkeys(name for name in named if name.isidentifier()))

    def variables_seen(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns this row's variables that are set, with their values."""
        return {name: environ[name] for name in self.variables if name in environ}

    def is_seen(self, environ: Mapping[str, str]) -> bool:
        """Tells whether the environment bears a mark of this launcher; it may still be incomplete."""
        return text_of(environ, *self.marks) is not None and text_of(environ, *self.yields_to) is None

    def read(self, environ: Mapping[str, str]) -> Identity:
        """Returns the place that this row gives to the process.

        Raises:
            LauncherError: when a needed variable is missing, the launcher did not start this very process, it
                numbers nodes that hold several processes, or the values contradict each other.
        """
        environ = {**environ, **self.computed(environ)}
        rank_from, world_size_from = _set_name(environ, self.rank), _set_name(environ, self.world_size)
        missing = [name for name in self.required if text_of(environ, name) is None]
        if rank_from is None or world_size_from is None or missing or not self.started(environ):
            missing[:0] = self.world_size[:1] if world_size_from is None else ()
            missing[:0] = self.rank[:1] if rank_from is None else ()
            raise self._incomplete(environ, missing)
        self._check_one_per_node(environ)
        rank, world_size = self._number(environ, self.rank), self._number(environ, self.world_size, minimum=1)
        assert rank is not None
        assert world_size is not None
        node_rank = self._number(environ, self.node_rank)
        identity = Identity(
            launcher=self.name,
            rank=rank,
            rank_from=rank_from,
            world_size=world_size,
            world_size_from=world_size_from,
            local_rank=self._number(environ, self.local_rank),
            local_world_size=self._local_world_size(environ, node_rank),
            node_rank=node_rank,
            num_nodes=self._number(environ, self.num_nodes, minimum=1),
            node=None if node_rank is None else str(node_rank),
            job_id=self._job_id(environ),
            attempt=text_of(environ, *self.attempt),
        )
        self._check(identity, environ)
        return identity

    def _number(self, environ: Mapping[str, str], names: tuple[str, ...], *, minimum: int = 0) -> int | None:
        name = _set_name(environ, names)
        if name is None:
            return None
        try:
            return parse_whole(environ[name].strip(), name, minimum=minimum, error=LauncherError)
        except LauncherError as error:
            raise LauncherError.explain(
                f"{self.name} has set {_listed(self.variables_seen(environ))}: {error.observation}",
                cause=f"{self.outside}, or the value was set by hand",
                remedy=self.start,
            ) from None

    def _local_world_size(self, environ: Mapping[str, str], node_rank: int | None) -> int | None:
        name = _set_name(environ, self.tasks_per_node)
        if name is None or node_rank is None:
            return self._number(environ, self.local_world_size, minimum=1)
        try:
            return next(islice(expand_counts(environ[name]), node_rank, None))
        except (ValueError, StopIteration) as error:
            raise self._contradiction(
                environ, f"{name}={environ[name]!r} holds no count for node rank {node_rank}"
            ) from error

    def _job_id(self, environ: Mapping[str, str]) -> str | None:
        parts = [text for names in self.job_id if (text := text_of(environ, *names)) is not None]
        if not parts or len(parts) < len(self.job_id):
            return None
        # PEP 383: under an ASCII locale the bytes of a letter such as Flux's ƒ come as surrogates.
        return ".".join(parts).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

    def _check_one_per_node(self, environ: Mapping[str, str]) -> None:
        name = _set_name(environ, self.one_per_node)
        if name is not None and environ[name].strip() not in {"0", "1"}:
            raise LauncherError.explain(
                f"{self.name} has set {_listed(self.variables_seen(environ))}: its ranks are those of nodes, and "
                f"{name}={environ[name]!r} speaks of several processes on each",
                cause=self.outside,
                remedy=self.start,
            )

    def _check(self, identity: Identity, environ: Mapping[str, str]) -> None:
        for part, whole in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            index, size = getattr(identity, part), getattr(identity, whole)
            if index is not None and size is not None and index >= size:
                raise self._contradiction(environ, f"{part} {index} does not fit a {whole} of {size}")
        if identity.local_world_size is not None and identity.local_world_size > identity.world_size:
            raise self._contradiction(
                environ,
                f"local_world_size {identity.local_world_size} exceeds a world_size of {identity.world_size}",
            )

    def _incomplete(self, environ: Mapping[str, str], missing: list[str]) -> LauncherError:
        lacking = f"but not {', '.join(missing)}" if missing else "but not for a task that it started"
        return LauncherError.explain(
            f"{self.name} has set {_listed(self.variables_seen(environ))}, {lacking}",
            cause=self.outside,
            remedy=self.start,
        )

    def _contradiction(self, environ: Mapping[str, str], problem: str) -> LauncherError:
        return LauncherError.explain(
            f"{self.name} has set {_listed(self.variables_seen(environ))}: {problem}",
            cause="variables of two different starts are mixed in one environment",
            remedy=self.start,
        )


def expand_counts(text: str) -> Iterator[int]:
    """Yields the task count of each node from Slurm's compressed form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: when the text has another form.
    """
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\s*", item)
        if match is None:
            raise ValueError(f"{item!r} is not a task count such as 2 or 2(x3)")
        yield from repeat(int(match[1]), int(match[2] or 1))


def _set_name(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if text_of(environ, name) is not None), None)


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in variables.items())
