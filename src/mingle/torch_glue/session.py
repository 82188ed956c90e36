"""What goes on behind a job that has formed: the loop in its thread, the store, the roster, and the end."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from mingle.abandonable import AbandonedError
from mingle.engine import store
from mingle.engine.discovery import Discovery
from mingle.errors import MingleError
from mingle.host.hosting import Host
from mingle.job import Member
from mingle.rank.joining import Joiner
from mingle.rank.membership import RETURN_SECONDS
from mingle.rules.machine import Formation
from mingle.rules.seats import roster_digest
from mingle.wire.frames import Seat

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger("mingle")

Entry: TypeAlias = "tuple[TCPStore, int, int]"
"""What torch makes a process group of: the store, this rank, the world size."""

ROSTER_SECONDS = 10.0
LOSS_NOTICED_SECONDS = 0.25
"""How long the loop needs at most to see that a connection has ended, and what follows from that."""
FRESH_SECONDS = 1.0
"""For how long a proof of the store is taken for its being in reach: torch's calls can't be stopped if it is not."""
WATCH_QUICK_SECONDS = 0.05
WATCH_SLOW_SECONDS = 0.5

_T = TypeVar("_T")


class ForeignSession:
    """The session of a job whose ranks torchrun has brought together: nothing of it is ours but a variable."""

    def __init__(self) -> None:
        self.on_close: Callable[[], None] = _nothing
        self._pid = os.getpid()

    def roster(self) -> tuple[Member, ...]:
        """Nobody: torchrun keeps its roster to itself."""
        return ()

    def entry(self, _seconds: float) -> Entry | None:
        """Nothing: the store is torchrun's."""
        return None

    def group_stands(self) -> None:
        """The process group stands; the store is torchrun's."""

    def close(self, *, failing: bool) -> None:
        """Restores the environment."""
        if os.getpid() == self._pid:
            self.on_close()


class LoneSession:
    """The session of a job with one rank: a store, nobody to talk to, and a thread until torch has the store."""

    def __init__(self, member: Member, server: store.StoreServer) -> None:
        self.server: store.StoreServer | None = server
        self.on_close: Callable[[], None] = _nothing
        self._member = member
        self._pid = os.getpid()
        self._let_go = threading.Event()
        self._thread = threading.Thread(target=self._await_group, name="mingle-lone", daemon=True)
        self._thread.start()

    def _await_group(self) -> None:
        """Lets go of the store once a process group uses it, also one that was made through no door of ours."""
        while not self._let_go.wait(WATCH_QUICK_SECONDS):
            if group_stands():
                self.group_stands()

    def roster(self) -> tuple[Member, ...]:
        """Only this rank."""
        return (self._member,)

    def entry(self, _seconds: float) -> Entry | None:
        """The store of this rank alone."""
        handle = self.server.handle if self.server is not None else None
        return None if handle is None else (handle, 0, 1)

    def group_stands(self) -> None:
        """The process group has taken the store over."""
        self._let_go.set()
        if self.server is not None:
            self.server.release()

    def close(self, *, failing: bool) -> None:
        """Lets go of the store and restores the environment."""
        if os.getpid() != self._pid:
            return
        self.group_stands()
        self._thread.join()
        self.server = None
        self.on_close()


class RunningSession:
    """A job that has formed: its loop goes on in a thread, answers others and sees the process group come and go.

    ``bereft``: rank 0 is gone for good, and there is no process group yet.
    """

    def __init__(self, discovery: Discovery, formation: Formation) -> None:
        self.on_close: Callable[[], None] = _nothing
        self._discovery = discovery
        self._formation = formation
        self._pid = os.getpid()
        self._group_stood = False
        self._ended = False
        self._closed = False
        self.bereft: MingleError | None = None
        discovery.watch = self._watch
        discovery.serve()

    # --- the process group -----------------------------------------------------------------------------------------

    def entry(self, seconds: float) -> Entry | None:
        """What a process group is made of, once; None where nobody has said that one is wanted.

        Args:
            seconds: for how long a store that does not answer is waited for.

        Raises:
            DiscoveryTimeoutError: it has not answered within that time.
            MingleError: this is not rank 0, and rank 0 is lost.
        """
        if self._discovery.store_server is not None:
            handle = self._discovery.store_server.handle
        elif (client := self._discovery.take_client()) is not None:
            if not (self._is_connected and time.monotonic() - client.proved_at < FRESH_SECONDS):
                self._await_store(client, seconds)
            handle = client.hand_over()
        else:
            handle = None
        return None if handle is None else (handle, self._formation.rank, self._formation.world_size)

    @property
    def _is_connected(self) -> bool:
        machine = self._discovery.machine
        return isinstance(machine, Joiner) and machine.connection_stands

    def _await_store(self, client: store.StoreClient, seconds: float) -> None:
        try:
            store.await_server(client.address, client.port, seconds=seconds, given_up=lambda: self.bereft is not None)
        except AbandonedError:
            assert self.bereft is not None
            raise self.bereft from None

    def loss(self) -> MingleError | None:
        """Returns that rank 0 is lost, if it is: asked by a member whose process group could not be made.

        Its store breaks at the same moment as its connection, but it is lost only when it does not come back.
        """
        if not isinstance(self._discovery.machine, Joiner):
            return None
        now = time.monotonic()
        noticed, returned = now + LOSS_NOTICED_SECONDS, now + RETURN_SECONDS + LOSS_NOTICED_SECONDS
        while self.bereft is None and now < (noticed if self._is_connected else returned):
            time.sleep(WATCH_QUICK_SECONDS)
            now = time.monotonic()
        return self.bereft

    def _watch(self) -> float:
        """Looks whether the process group has come or gone; torch has no hook for either. Runs in the loop."""
        stands = group_stands()
        if stands and not self._group_stood:
            self._note_group()
        elif self._group_stood and not stands and not self._ended:
            self._ended = True
            self._say_good_bye()
        elif not stands and self.bereft is None:
            self._look_after_host()
        return WATCH_SLOW_SECONDS if self._group_stood else WATCH_QUICK_SECONDS

    def _note_group(self) -> None:
        self._group_stood = True
        if self._discovery.store_server is not None:
            self._discovery.store_server.release()
        machine = self._discovery.machine
        if isinstance(machine, Joiner):
            machine.ready()

    def _look_after_host(self) -> None:
        """Notes that rank 0 is gone before there was a process group: torch would look for its store for half an hour.

        Whoever waits there through a door of ours is told by an exception; who calls torch by himself, by this line.
        """
        machine = self._discovery.machine
        if isinstance(machine, Joiner) and (bereft := machine.bereft) is not None:
            self.bereft = bereft
            if machine.membership.dismissed:
                # It may have done all that it was there for, if nobody wants a process group.
                logger.info("%s", bereft.observation)
            else:
                self._discovery.say(bereft.observation)

    def _say_good_bye(self) -> None:
        machine = self._discovery.machine
        if isinstance(machine, Host):
            machine.close("its process group was destroyed")
        else:
            machine.leave("its process group was destroyed")

    def group_stands(self) -> None:
        """The process group has taken the store over; on the rank that holds it this returns when that is done."""
        if self._discovery.store_server is None:
            self._discovery.call(self._note_group)  # nothing is let go of, so nobody need wait for the other thread
        else:
            self._in_loop(self._note_group)

    def _in_loop(self, function: Callable[[], _T]) -> _T:
        """Runs a function in the loop's thread and returns its result."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._discovery.call(run)
        return future.result(timeout=ROSTER_SECONDS)

    # --- the roster ------------------------------------------------------------------------------------------------

    def roster(self) -> tuple[Member, ...]:
        """Fetches who is in the job.

        Raises:
            MingleError: rank 0 does not answer any more.
        """
        machine = self._discovery.machine
        if os.getpid() != self._pid:
            raise self._gone("this process is a fork of the rank; only the rank itself can ask")
        if self._closed:
            raise self._gone("its session has ended", cause="a later call of init() or discover() took its place")
        try:
            seats = self._in_loop(machine.registrar.roster) if isinstance(machine, Host) else self._ask(machine)
        except FutureTimeoutError:
            raise self._gone("rank 0 did not answer") from None
        if roster_digest(seats) != self._formation.roster_digest:
            raise self._gone("what came is not the roster that was sealed")
        return tuple(_member(seat) for seat in seats)

    def _ask(self, joiner: Joiner) -> list[Seat]:
        def ask() -> bool:
            if not joiner.connection_stands:
                return False
            joiner.ask_roster()
            return True

        if not self._in_loop(ask):
            raise self._gone("rank 0 has ended its job")
        deadline = time.monotonic() + ROSTER_SECONDS
        arrived = threading.Event()
        while time.monotonic() < deadline:
            seats, stands = self._in_loop(lambda: (list(joiner.roster), joiner.connection_stands))
            if len(seats) == self._formation.world_size:
                return list(seats)
            if not stands:
                break
            arrived.wait(0.005)
        raise self._gone("rank 0 ended its job while it was asked")

    def _gone(
        self, why: str, cause: str = "job.members was read for the first time after rank 0 had closed its job or exited"
    ) -> MingleError:
        return MingleError.explain(
            f"the members of job {self._discovery.settings.job_id!r} can't be fetched: {why}.",
            cause=cause,
            remedy="read job.members once, early, on every rank that needs it; it is kept from then on.",
        )

    def close(self, *, failing: bool) -> None:
        """Ends the session and restores the environment."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._discovery.close("an exception ended it" if failing else "its job was closed")
        self.on_close()


def _member(seat: Seat) -> Member:
    return Member(
        rank=seat.rank,
        local_rank=seat.local_rank,
        node_rank=seat.node_rank,
        hostname=seat.hostname,
        address=seat.address,
        pid=seat.pid,
    )


def _nothing() -> None:
    """Stands for a callback until there is one."""


def group_stands() -> bool:
    """Tells whether torch's default process group exists, without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not hasattr(distributed, "is_initialized"):
        return False
    return bool(distributed.is_initialized())
