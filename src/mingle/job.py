"""What a discovery gives: the rank's place in its job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from mingle.errors import MingleError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of a job, the same on every rank.

    Attributes:
        rank: its rank in the job, 0 … world_size-1.
        local_rank: its rank among the ranks of its node.
        node_rank: the rank of its node.
        hostname: the name of its machine, cut at 64 bytes.
        address: its address on the network that all ranks share.
        pid: its process id, in its own pid namespace.
    """

    rank: int
    local_rank: int
    node_rank: int
    hostname: str
    address: str
    pid: int


class Session(Protocol):
    """What a job needs of the session behind it."""

    def roster(self) -> tuple[Member, ...]:
        """Fetches who is in the job; raises MingleError when rank 0 can't be asked any more."""

    def close(self, *, failing: bool) -> None:
        """Ends it; ``failing``: nothing may block."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A job that has formed, seen from one rank. A context manager; :meth:`close` may be called twice.

    Leaving the ``with`` block destroys the process group that :func:`mingle.init` made, and restores the
    environment. Where an exception is on its way that never blocks.

    Attributes:
        job_id: the id under which the ranks found each other.
        rank: this process's rank.
        world_size: the number of ranks.
        local_rank: its rank among the ranks of its node.
        local_world_size: the number of ranks on its node.
        node_rank: the rank of its node.
        num_nodes: the number of nodes.
        master_addr: the address of rank 0's store, an IP literal without brackets.
        master_port: the TCP port of rank 0's store.
        interface: the name of the interface by which the other nodes reach this rank; empty where torchrun did the
            discovery.
        address: this rank's address there; empty likewise.
        elapsed: how long the discovery took, in seconds.
    """

    job_id: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    interface: str
    address: str
    elapsed: float
    _session: Session | None = field(default=None, repr=False, compare=False)
    _members: tuple[Member, ...] | None = field(default=None, repr=False, compare=False)
    _destroy_group: Callable[[bool], None] | None = field(default=None, repr=False, compare=False)
    """Ends the process group that ``init`` made; the argument tells whether an exception is on its way."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody in the job, in order of rank; empty where torchrun did the discovery.

        Fetched from rank 0 when first asked for, and then kept.

        Raises:
            MingleError: asked for the first time after rank 0 has ended its job.
        """
        with self._lock:
            if self._members is None:
                if self._session is None:
                    raise MingleError.explain(
                        f"the members of job {self.job_id!r} were never asked for, and now the job is closed.",
                        cause="close() or the end of the with block came before the first use of job.members",
                        remedy="read job.members once while the job is open; it is kept from then on.",
                    )
                self._members = self._session.roster()
            return self._members

    def close(self) -> None:
        """Ends the session and restores the environment; a process group lives on. A second call does nothing."""
        session, self._session = self._session, None
        if session is not None:
            session.close(failing=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        destroy, self._destroy_group = self._destroy_group, None
        failing = True  # until the process group has ended without an exception
        try:
            if destroy is not None:
                destroy(error is not None)
            failing = error is not None
        finally:
            session, self._session = self._session, None
            if session is not None:
                session.close(failing=failing)
