"""What a discovery gives: the rank's place in its job."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mingle import forksafe
from mingle.errors import MingleError

if TYPE_CHECKING:
    from typing import Protocol

    from typing_extensions import Self

    class Held(Protocol):
        """What a job needs of the session behind it."""

        def roster(self) -> tuple[Member, ...]:
            """Fetch the members; raise MingleError when rank 0 can't be asked any more."""

        def close(self, *, failing: bool) -> None:
            """End the session; ``failing``: nothing may block."""


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


class _Handle:
    """The state of a job outside its fields, because a copy of the fields must not hold or end the session."""

    __slots__ = ("_closing", "_destroy_group", "_fetching", "_is_record", "_members", "_session")

    _session: Held | None
    _members: tuple[Member, ...] | None
    _destroy_group: Callable[[bool], None] | None
    _is_record: bool

    def _hold(self, session: Held | None, members: tuple[Member, ...] | None = None) -> None:
        self._session, self._members, self._destroy_group = session, members, None
        self._is_record = session is None
        # Reentrant: a signal handler may ask for the members, or close the job, while this thread does so.
        self._fetching = forksafe.register_lock(threading.RLock())
        self._closing = forksafe.register_lock(threading.RLock())

    def _owns_group(self, destroy: Callable[[bool], None]) -> None:
        """Adopt the process group; ``destroy``'s argument tells whether an exception is in flight."""
        self._destroy_group = destroy

    def _fetch(self, job_id: str) -> tuple[Member, ...]:
        with self._fetching:
            if self._members is None:
                session = self._session
                if session is None:
                    raise self._never_fetched(job_id)
                self._members = session.roster()
            return self._members

    def _never_fetched(self, job_id: str) -> MingleError:
        if self._is_record:
            return MingleError.explain(
                f"the members of job {job_id!r} were never asked for, and this is a copy of the job.",
                cause="the job was pickled or copied before the first use of job.members; a copy has no session to ask",
                remedy="read job.members once before the copy is made; the copy keeps it.",
            )
        return MingleError.explain(
            f"the members of job {job_id!r} were never asked for, and now the job is closed.",
            cause="close() or the end of the with block came before the first use of job.members",
            remedy="read job.members once while the job is open; it is kept from then on.",
        )

    def _end(self, *, failing: bool) -> None:
        with self._closing:
            failed = True  # until the process group has ended without an exception
            # Neither is there while it ends, because a signal handler may close the job meanwhile. If that is
            # interrupted, the next call continues it.
            try:
                destroy, self._destroy_group = self._destroy_group, None
                if destroy is not None:
                    try:
                        destroy(failing)
                    except BaseException:
                        self._destroy_group = destroy
                        raise
                failed = failing
            finally:
                session, self._session = self._session, None
                if session is not None:
                    try:
                        session.close(failing=failed)
                    except BaseException:
                        self._session = session
                        raise


@dataclass(slots=True, kw_only=True)
class Job(_Handle):
    """A job that has formed, seen from one rank. A context manager.

    The end of the ``with`` block calls :meth:`close`. A copy (``pickle``, ``copy.copy``, ``copy.deepcopy``) has the
    attributes, and the members if they had been fetched, but no session: closing it ends nothing. One that
    ``dataclasses.replace`` makes has the attributes only.

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
        address: this rank's address there; empty where torchrun did the discovery.
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

    def __post_init__(self) -> None:
        self._hold(None)

    def _with(self, session: Held, members: tuple[Member, ...] | None = None) -> Self:
        """Attach the session, and the members if they are already known."""
        self._hold(session, members)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"_members": self._members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for each in fields(self):
            setattr(self, each.name, state[each.name])
        self._hold(None, state["_members"])

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the job, in order of rank; empty where torchrun did the discovery.

        Fetched from rank 0 when first asked for, and then kept.

        Raises:
            MingleError: asked for the first time after rank 0 has ended its job or was lost, or it does not answer.
        """
        return self._fetch(self.job_id)

    def close(self) -> None:
        """Destroy the process group that ``init`` made, end the session and restore the environment.

        Rank 0 first waits until every rank's process group is initialized, for 5 s at most, because they still need its
        store. A second call does nothing, or continues one that was interrupted. While an exception is in flight,
        ``close`` never blocks.
        """
        self._end(failing=sys.exc_info()[1] is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(failing=error is not None)
