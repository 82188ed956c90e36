"""The session behind a job that has formed: the loop in its thread, the store, the roster, and the end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from mingle import detached, forksafe
from mingle.detached import AbandonedError
from mingle.distributed import process_group
from mingle.engine import store
from mingle.engine.discovery import WATCH_SECONDS, Discovery
from mingle.errors import MingleError
from mingle.job import Member
from mingle.protocol.machine import Formation, roster_digest
from mingle.records import logger
from mingle.wire.frames import Seat

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Entry: TypeAlias = "tuple[TCPStore, int, int]"
"""What torch makes a process group of: the store, this rank, the world size."""

ROSTER_SECONDS = 30.0
"""How long `job.members` waits for rank 0, whose process or network can stand still for a while."""
LOSS_NOTICED_SECONDS = 0.25
"""How long the loop needs at most to see that a connection has ended, and what follows from that."""
FRESH_SECONDS = 1.0
"""For how long a proof of the store is taken for its being in reach: torch's calls can't be stopped if it is not."""
READY_SECONDS = 5.0
"""How long the end of rank 0 waits for members that have no process group yet, because they still need the store."""
ROSTER_LOOK_SECONDS = 0.005
WATCH_QUICKLY_SECONDS = 10.0
"""How long after GO a process group is expected at any moment."""
WATCH_SLOW_SECONDS = 0.5
WATCH_STANDING_SECONDS = 4.0
"""How late the end of a process group may be noticed. Each look costs the training a tenth of a millisecond."""


class Session:
    """What mingle holds behind a job. It ends once, and never in a forked child.

    This base is the session of a job whose ranks torchrun has brought together: mingle owns only a variable.
    """

    def __init__(self) -> None:
        self.key = os.urandom(8).hex()
        """Names the session in the URL by which ``mingle.init`` has torch ask for its store."""
        self.on_close: Callable[[], None] = lambda: None
        self.awaits_group = False
        """Whether torch was handed the store for a process group that has not been made."""
        self._pid = os.getpid()
        self._closed = False
        self._closing_begun = False
        # Reentrant: a signal handler may close the job while this thread closes it.
        self._closing = forksafe.register_lock(threading.RLock())

    def close(self, *, failing: bool) -> None:
        """End the session and restore the environment. A later call does nothing; a concurrent call waits.

        After an interrupt, a second call continues where the first one stopped.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if not self._closed:
                self._closing_begun = True
                self._end(failing=failing)
                self.on_close()
                self._closed = True

    @property
    def goes_on(self) -> bool:
        """Whether the process group of this job stands or can still be made, in this process."""
        return os.getpid() == self._pid and not self._closing_begun

    def _end(self, *, failing: bool) -> None:
        """End the resources behind the session."""

    def roster(self) -> tuple[Member, ...]:
        """Return the members of the job; none under torchrun, which keeps its roster to itself."""
        return ()

    def entry(self, _seconds: float) -> Entry | None:
        """Return what torch makes the process group of; None: the store is torchrun's."""
        return None

    def loss(self) -> MingleError | None:
        """Return the error that rank 0 is lost or that the session's thread has failed; None if neither is so."""
        return None

    def group_stands(self) -> None:
        """Take note that the process group has taken the store over."""

    def await_members(self) -> None:
        """Wait until no other rank needs this one to make its process group."""


class LoneSession(Session):
    """The session of a job with one rank: a store, and a thread until torch has taken it over."""

    def __init__(self, member: Member, server: store.StoreServer) -> None:
        super().__init__()
        self.server: store.StoreServer | None = server
        self._member = member
        self._let_go = threading.Event()
        self._thread = threading.Thread(target=self._await_group, name="mingle-lone", daemon=True)

    def serve(self) -> None:
        """Start the thread. Register the session first, so that it can be ended if Ctrl-C interrupts this call."""
        detached.start_explained(self._thread)

    def _await_group(self) -> None:
        """Release the store once a process group uses it, even one that was not made by mingle."""
        while not self._let_go.wait(WATCH_SECONDS):
            if process_group.stands():
                self.group_stands()

    @property
    def goes_on(self) -> bool:
        """Whether the process group stands, or its store is kept for it."""
        return super().goes_on and (not self._let_go.is_set() or process_group.stands())

    def roster(self) -> tuple[Member, ...]:
        """Return only this rank."""
        return (self._member,)

    def entry(self, _seconds: float) -> Entry | None:
        """Return the store of this rank alone."""
        handle = self.server.handle if self.server is not None else None
        return None if handle is None else (handle, 0, 1)

    def group_stands(self) -> None:
        """Release the store: the process group has taken it over."""
        self._let_go.set()
        if self.server is not None:
            self.server.release()

    def _end(self, *, failing: bool) -> None:
        self.group_stands()
        if self._thread.ident is not None:  # else its start was interrupted, and it ends by itself
            self._thread.join()
        self.server = None


class RunningSession(Session):
    """A job that has formed. Its loop runs in a thread, answers others and watches the process group.

    ``host_lost_error``: the error if rank 0 is gone for good and there is no process group yet.
    """

    def __init__(self, discovery: Discovery, formation: Formation) -> None:
        super().__init__()
        self._discovery = discovery
        self._formation = formation
        self._group_stood = False
        self._group_ended = False
        self._group: Callable[[], Any] = lambda: None
        """The process group that stood; a weak reference, as in `process_group.own`."""
        self._await_until: float | None = None
        """By when the end of rank 0 has to go on; None before it."""
        self.host_lost_error: MingleError | None = None
        self._watch_quickly_until = time.monotonic() + WATCH_QUICKLY_SECONDS
        discovery.watch = self._watch

    # --- the process group -----------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether the process group stands, or rank 0 is there for it."""
        if not super().goes_on:
            return False
        if self._group_stood:  # and no other one that was made since
            return process_group.stands() and process_group.current() is self._group()
        return self._no_group_error is None

    def entry(self, seconds: float) -> Entry | None:
        """Return the store for a process group, once; None if no process group was requested.

        Args:
            seconds: how long to wait for a store that does not answer.

        Raises:
            DiscoveryTimeoutError: the store has not answered within that time.
            MingleError: this is not rank 0, and rank 0 is lost; or the loop has failed.
        """
        if self._discovery.failure is not None:
            raise self._discovery.failure.copied()
        if self._discovery.stores.server is not None:
            handle = self._discovery.stores.server.handle
        elif (client := self._discovery.take_client()) is not None:
            if not (self._is_connected and time.monotonic() - client.proved_at < FRESH_SECONDS):
                self._await_store(client, seconds)
            handle = client.hand_over()
        else:
            handle = None
        return None if handle is None else (handle, self._formation.place.rank, self._formation.place.world_size)

    @property
    def _is_connected(self) -> bool:
        membership = self._discovery.membership
        return membership is not None and membership.connected

    def _await_store(self, client: store.StoreClient, seconds: float) -> None:
        try:
            store.await_server(
                client.address, client.port, seconds=seconds, given_up=lambda: self._no_group_error is not None
            )
        except AbandonedError:
            lost = self._no_group_error
            assert lost is not None
            raise lost.copied() from lost.__cause__

    @property
    def _no_group_error(self) -> MingleError | None:
        """The error that says why no process group can be made any more; None while one can."""
        return self._discovery.failure or self.host_lost_error

    def loss(self) -> MingleError | None:
        """Return the error that rank 0 is lost or that the loop has failed; None if neither is so.

        Called when the process group could not be made. Rank 0's store breaks at the same moment as its connection, but
        it is lost only when it does not come back.
        """
        if self._discovery.membership is not None:
            from mingle.protocol.membership import RETURN_SECONDS

            now = time.monotonic()
            noticed, returned = now + LOSS_NOTICED_SECONDS, now + RETURN_SECONDS + LOSS_NOTICED_SECONDS
            while self._no_group_error is None and now < (noticed if self._is_connected else returned):
                time.sleep(WATCH_SECONDS)
                now = time.monotonic()
        return None if self._no_group_error is None else self._no_group_error.copied()

    def _watch(self) -> float:
        """Check, in the loop, whether the process group has come or gone: torch has no hook for either."""
        stands = process_group.stands()
        if stands and not self._group_stood:
            self._note_group()
        elif self._group_stood and not stands and not self._group_ended:
            self._group_ended = True
            self._discovery.say_good_bye("its process group was destroyed")
        elif not stands and self.host_lost_error is None:
            self._look_after_host()
        if self._group_stood:
            return WATCH_STANDING_SECONDS
        return WATCH_SECONDS if time.monotonic() < self._watch_quickly_until else WATCH_SLOW_SECONDS

    def _note_group(self) -> None:
        if (group := process_group.current()) is not None:
            self._group = weakref.ref(group)
        self.awaits_group = False
        self._group_stood = self._discovery.group_stands = True
        if self._discovery.stores.server is not None:
            self._discovery.stores.server.release()
        if (membership := self._discovery.membership) is not None:
            membership.ready(self._discovery.driver.clock())

    def _look_after_host(self) -> None:
        """Note that rank 0 is gone before there was a process group: torch would look for its store for half an hour.

        Our entry points raise. Code that called torch directly gets only this log line.
        """
        membership = self._discovery.membership
        if membership is not None and (error := membership.host_lost_error) is not None:
            self.host_lost_error = error
            if membership.close_reason:
                # A job without a process group may have done its work.
                logger.info("%s", error.observation)
            else:
                self._discovery.say(logging.ERROR, error.observation)

    def group_stands(self) -> None:
        """Take note that the process group has taken the store over; on the store's rank, wait until that is done.

        Raises:
            MingleError: the loop has failed, or does not answer.
        """
        if self._discovery.failure is not None:
            raise self._discovery.failure.copied()
        if self._discovery.stores.server is None:
            self._discovery.call(self._note_group)  # no store is released, so there is no need to wait for the thread
            return
        self._discovery.ask(self._note_group)

    def await_members(self) -> None:
        """On rank 0, wait until the process group of every member stands, for `READY_SECONDS` at most.

        Rank 0's ``init`` returns when its own group stands. If it ended the store then, it would end the ``init`` of
        members that are a moment later.
        """
        host = self._discovery.host
        if host is None or not (self._group_stood or process_group.stands()):
            return
        if self._await_until is None:
            self._await_until = time.monotonic() + READY_SECONDS
        with contextlib.suppress(MingleError):  # the loop has failed: nothing to wait for
            if not self._group_stood:  # it was made after the loop had last looked
                self.group_stands()
            while time.monotonic() < self._await_until:
                if self._discovery.ask(lambda: host.closed or host.registrar.seats.all_ready):
                    break
                time.sleep(WATCH_SECONDS)

    # --- the roster ------------------------------------------------------------------------------------------------

    def roster(self) -> tuple[Member, ...]:
        """Fetch the members of the job.

        Raises:
            MingleError: rank 0 does not answer, or is gone; or the loop has failed.
        """
        host = self._discovery.host
        if os.getpid() != self._pid:
            raise self._gone(
                "this process is a fork of the rank; only the rank itself can ask",
                cause="job.members was read for the first time in a forked process, such as a worker of a DataLoader",
            )
        self._refuse_if_closed()
        seats = self._discovery.ask(host.registrar.roster) if host is not None else self._ask()
        if roster_digest(seats) != self._formation.roster_digest:
            raise self._gone(
                "what came is not the roster that was sealed",
                cause="another process than rank 0 answered, or the answer was changed on its way",
            )
        return tuple(
            Member(
                rank=seat.rank,
                local_rank=seat.local_rank,
                node_rank=seat.node_rank,
                hostname=seat.hostname,
                address=seat.address,
                pid=seat.pid,
            )
            for seat in seats
        )

    def _ask(self) -> list[Seat]:
        membership = self._discovery.membership
        assert membership is not None

        self._discovery.ask(membership.ask_roster)
        deadline = time.monotonic() + ROSTER_SECONDS
        while time.monotonic() < deadline:
            self._refuse_if_closed()
            seats, host_gone = self._discovery.ask(lambda: (list(membership.roster.seats), membership.host_gone))
            if len(seats) == self._formation.place.world_size:
                return seats
            if host_gone:
                if membership.close_reason:
                    raise self._gone("rank 0 has ended its job")
                if membership.loss:
                    raise self._gone(f"rank 0 is lost ({membership.loss})")
                raise self._gone("its session has ended", cause="its process group ended, and the session with it")
            time.sleep(ROSTER_LOOK_SECONDS)
        raise self._gone(
            f"rank 0 has not answered for {ROSTER_SECONDS:g} s",
            cause="rank 0's process is stopped or starved of CPU, or no packets get through to its host any more",
            remedy="look at rank 0's machine and output; the next use of job.members asks again.",
        )

    def _refuse_if_closed(self) -> None:
        if self._closing_begun:
            raise self._gone(
                "its session has ended",
                cause="the job was closed, or a later call of init() or discover() took its place",
            )

    def _gone(
        self,
        why: str,
        cause: str = "job.members was read for the first time after rank 0 had closed its job or exited",
        remedy: str = "read job.members once, early, on every rank that needs it; it is kept from then on.",
    ) -> MingleError:
        return MingleError.explain(
            f"the members of job {self._discovery.settings.job_id!r} can't be fetched: {why}.",
            cause=cause,
            remedy=remedy,
        )

    def _end(self, *, failing: bool) -> None:
        if not failing:
            self.await_members()
        self._await_until = 0.0  # a close that continues after an interrupt would ask a loop that has ended
        reason = "an exception ended it" if failing else "its job was closed"
        if self.awaits_group:
            reason = "its process group could not be made"
        # A member that was not ready is a loss: the other ranks would wait for it until torch's timeout.
        failed = (failing or self.awaits_group) and not process_group.stands()
        self._discovery.close(reason, failed=failed)
