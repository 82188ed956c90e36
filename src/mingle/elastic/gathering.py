"""One agent's place among the agents of its job: the interface that the torchrun backend uses.

An agent is the process that starts a node's workers (torchrun). Agents find each other like ranks without a number,
and one of them hosts the store. Their job, unlike a job of ranks, survives the loss of its host: the others gather
anew.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from mingle import forksafe, records
from mingle.config.order import order_of
from mingle.config.settings import Settings
from mingle.elastic import reports as elastic_reports
from mingle.elastic.agent import Agent
from mingle.elastic.host import ElasticHost
from mingle.elastic.leases import Hold
from mingle.elastic.quorum import Policy
from mingle.engine import progress
from mingle.engine.discovery import FILES_PER_NODE, job_key, machine_context, make_room, process_identity
from mingle.engine.driver import Driver
from mingle.engine.loop import Loop
from mingle.engine.progress import Progress
from mingle.engine.store import StoreKeeper
from mingle.errors import MingleError, opening
from mingle.network import folders
from mingle.network.folder import FolderStorage
from mingle.network.transport import NothingOpenedError
from mingle.protocol.effects import CloseStore, Effect, Inspect
from mingle.protocol.events import InterfacesChanged
from mingle.protocol.machine import Formation
from mingle.protocol.observations import NetworkFacts
from mingle.records import logger
from mingle.wire.authentication import JobKey

ASK_SECONDS = 1.0
"""How often this agent asks whether the session stands, until torchrun gets its round."""
ROUND_WAIT_SECONDS = 0.1
"""How often it looks whether the round is given up meanwhile."""


def boot_time() -> float:
    """Return the seconds since boot, including the time in which the machine was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A session that this agent is in.

    Attributes:
        formation: its name, its store, and how the others reach this agent.
        generation: its number, higher than that of any earlier session of its founders. It is a time in seconds since
            1970, or slightly more, so that it is also higher after a restart of all agents.
        small: whether it began with few agents, after a last call.
    """

    formation: Formation
    generation: int
    small: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The agent's state as its callers read it: replaced as a whole, so that reading needs no lock."""

    gathered: Gathered | None = None
    present: frozenset[bytes] | None = None
    ending: bool = False
    hold: Hold = field(default_factory=Hold)
    lost: str | None = None
    ended: str | None = None
    failure: MingleError | None = None
    time_is_up: bool = False


class Gathering(Loop):
    """One agent's place among the agents of its job, across generations. Thread-safe.

    Nothing is sent before the first :meth:`gather`. From then on the loop drives the agent's machine, to the end of its
    part in the job. After a loss this agent looks for the next session by itself; :meth:`gather` waits for it.

    Args:
        settings: how to discover; the job's id, attempt and secret.
        policy: how many nodes the job may have, and how many found and keep a session; the same on all of them.
    """

    _stores: StoreKeeper
    _agent: Agent
    """The machine; only the loop touches it."""

    def __init__(self, settings: Settings, policy: Policy) -> None:
        super().__init__("mingle-agent", settings.job_id, clock=boot_time)
        self.session_lost = threading.Event()
        """Set whenever ``lost`` or ``ended`` becomes set; cleared by :meth:`gather`."""
        self._settings = settings
        self._policy = policy
        self._identity = process_identity(
            settings, minimum=policy.nodes.minimum, unit="node", addresses=self._addresses
        )
        self._pid = os.getpid()
        self._quiet = settings.progress == "off"
        self._key: JobKey | None = None
        self._storages: Mapping[str, FolderStorage] = {}
        self._progress: Progress | None = None
        self._lock = forksafe.register_lock(threading.Condition())
        self._state = _State()
        self._unopened: NothingOpenedError | None = None
        self._reason = "its part has ended"
        self._inspection: Inspect | None = None
        """What the caller has to find out about this machine."""
        self._losses = 0
        self._closed = False

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def member(self) -> bytes:
        """This agent's own member id, the same in all its sessions."""
        return self._identity.member

    @property
    def present(self) -> frozenset[bytes] | None:
        """On the host, the member ids of all that are in the session now, its own included; None elsewhere."""
        return self._state.present

    @property
    def ending(self) -> bool:
        """On the host: whether an agent has ended the job for all, after which no round begins."""
        return self._state.ending

    @property
    def lost(self) -> str | None:
        """Why the session that :meth:`gather` returned was lost, in words; None while it exists."""
        return self._state.lost

    @property
    def ended(self) -> str | None:
        """Why the host has ended the job on purpose, in words; None: it has not."""
        return self._state.ended

    # --- what the caller does --------------------------------------------------------------------------------------

    def gather(self) -> Gathered:
        """Block until this agent is in a session whose store is open; a signal handler can raise out of it.

        Raises:
            DiscoveryTimeoutError: it did not come to that in time; names how many nodes were there, and which.
            ConflictError: the other nodes were started with other numbers, or are no agents.
            InterfaceError: no interface can be used.
            MingleError: the job has ended, this gathering is closed, or no file descriptor is free.
        """
        nodes = self._policy.nodes.maximum
        progress = Progress(self._settings.job_id, nodes, None, off=self._quiet, now=self.clock())
        self._start_once()
        self._progress = progress
        try:
            self.ask(self._begin, patient=True)
            return self._await_session(progress)
        except MingleError:
            if self._closed:
                raise elastic_reports.closed_here(self._identity) from None
            if self._unopened is not None:
                raise self._unopened.diagnosed() from None
            raise
        except BaseException:  # a signal handler of torchrun's
            self._progress = None
            progress.interrupted(lambda: self.ask(self._agent.snapshot), self.clock())
            raise
        finally:
            self._progress = None
            progress.close()
            records.flush()

    def _start_once(self) -> None:
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                raise elastic_reports.closed_here(self._identity)
            if self._thread is None:
                self._key = job_key(self._settings)
                if self._settings.peers:
                    codecs.lookup("idna")  # of the names that the resolver's threads look up
                with opening("what a gathering needs"):
                    self._storages = folders.storages(self._settings.folders, self._settings.job_id)
                try:
                    self.start()
                except MingleError:  # a full cgroup refuses threads: a later call starts anew
                    self._thread = None
                    folders.close(self._storages)
                    raise
                except BaseException:
                    self._closed = self._stopping = True
                    folders.close(self._storages)  # the loop may never have opened them
                    raise

    def _begin(self) -> None:
        with self._lock:
            self._state = replace(self._state, lost=None, failure=None, time_is_up=False)
            self.session_lost.clear()
        self._agent.gather(self.clock())
        self._publish()

    def _await_session(self, progress: Progress) -> Gathered:
        while True:
            with self._lock:
                if self._closed:
                    raise elastic_reports.closed_here(self._identity)
                state = self._state
                if state.gathered is not None:
                    return state.gathered
                if state.failure is not None:
                    raise state.failure.copied()
                if state.ended is not None:
                    raise elastic_reports.ended(self._identity, state.ended)
                inspection, self._inspection = self._inspection, None
                if inspection is None and not state.time_is_up:
                    due = progress.next_timer()
                    if due is None or (seconds := due - self.clock()) > 0:
                        self._lock.wait(None if due is None else seconds)
                        continue
            if inspection is not None:
                self.inspect(inspection)
                continue
            if state.time_is_up:
                self._give_up()
            self.show(progress)

    def _give_up(self) -> None:
        """Have the agent's gathering end with the error that explains why the time is up."""
        with contextlib.suppress(MingleError):  # the loop is starved, or it has ended with an outcome of its own
            facts = self.facts()
            self.ask(lambda: self._end_gathering(facts))

    def _end_gathering(self, facts: NetworkFacts) -> None:
        if self._agent.deadline_passed(now := self.clock()):
            self._agent.give_up(facts, now)

    def await_round(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Block until torchrun can get a round that is complete now; a signal handler can raise out of it.

        Return to torchrun at once afterwards: what this agent knows of the others is outdated within 2 s.

        Args:
            is_over: whether the round is given up.
            seconds: for how long to wait.

        Returns:
            Whether it can: False if the session is lost, the job has ended, or the round is given up.
        """
        made, asked_at, deadline = boot_time(), float("-inf"), time.monotonic() + seconds
        while not (self._closed or self.session_lost.is_set() or is_over() or time.monotonic() > deadline):
            with self._lock:
                state, now = self._state, boot_time()
                if state.lost is None and state.hold.allows(made, now):
                    return True
                if now < asked_at + ASK_SECONDS:
                    self._lock.wait(ROUND_WAIT_SECONDS)
                    continue
            asked_at = now
            self.call(lambda: self._agent.ask_round(self.clock()))
        return False

    def workers_done(self) -> None:
        """Note that this node's workers are done: from now on a loss starts no election and no gathering."""
        with self._lock:
            started = self._thread is not None and not self._closed
        if started:
            self.call(lambda: self._agent.stop_electing())  # noqa: PLW0108 - the loop makes the agent first

    def close(self, reason: str) -> None:
        """End this agent's part in the job on purpose: the others hear the reason and do not count it as lost.

        Where it hosts the session, the job has ended for all. Returns when every socket is closed and the thread has
        ended; a call that is blocked in torch is left behind. A second call does nothing, nor does one in a fork.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._reason = reason
            self._state = replace(self._state, gathered=None, present=None)
            self._lock.notify_all()
        self.stop()

    # --- the loop --------------------------------------------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack) -> None:
        settings = self._settings
        make_room(self._policy.nodes.maximum, FILES_PER_NODE, what="node", quiet=self._quiet)
        self.driver = driver = Driver(
            settings,
            settings.job_id,
            self._key,
            stack,
            storages=self._storages,
            clock=self.clock,
            perform=self._perform,
            scanned=self._scanned,
            say=self._say,
        )
        self._stores = StoreKeeper(driver, self.call, port=settings.master_port)
        stack.callback(self._stores.release)
        stack.callback(self._stores.close)
        context = machine_context(settings, self._key, driver)
        endpoints = driver.control_port.listen(locally=settings.mesh != "off")
        order = order_of(settings.placement, self._identity.who.hostname, endpoints.addresses[0].address)
        self._identity = structs.replace(self._identity, order=order)
        self._agent = Agent(
            self._identity,
            endpoints,
            context,
            self.clock(),
            policy=self._policy,
            wall_clock=time.time,
        )
        driver.drive(self._agent, verifies=True)

    def _turn(self) -> None:
        agent, stores = self._agent, self._stores
        if not self._state.time_is_up:
            self.driver.turn()
        elif self._progress is not None:
            self._rest()  # the caller that waits says what is known of this machine
        else:
            self._end_gathering(self.driver.evidence.facts())
            self.driver.carry_out()
        self._log_stage()
        if stores.server is not None:
            # A client of this session's store can still hold the port in the next session.
            stores.port = None
        if agent.finished and agent.hosting is None:
            stores.release()  # that of a session that this agent has given up
        self._publish()

    def _leave(self) -> None:
        self.driver.part(lambda: self._agent.close(self._reason))

    def _fail(self) -> None:
        self._stores.close()
        self._end_store()

    def _ended(self, error: BaseException | None, over: MingleError) -> None:
        if isinstance(error, NothingOpenedError):
            self._unopened = error
        self._publish()
        if error is not None and not isinstance(error, MingleError | NothingOpenedError):
            self._say(logging.ERROR, str(self.failure), error)

    # --- what the driver calls -------------------------------------------------------------------------------------

    def _scanned(self, now: float, changed: bool) -> None:
        if changed:
            self._agent.handle(InterfacesChanged(), now)
        self.driver.relisten(now, locally=self._settings.mesh != "off")

    def _say(self, level: int, text: str, error: BaseException | None = None) -> None:
        if self._progress is not None or error is not None:
            progress.say(level, text, quiet=self._quiet, error=error)
        else:
            logger.log(level, "%s", text)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, CloseStore):
            logger.debug("job %s: the store is closed: %s", self._settings.job_id, effect.reason)
            self._end_store()
        elif isinstance(effect, Inspect):
            with self._lock:
                self._inspection = effect
                self._lock.notify_all()
        else:
            self._stores.perform(effect)

    def _end_store(self) -> None:
        self._stores.abort()
        self._stores.release()

    # --- what callers read -----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        state = self._present_state()
        with self._lock:
            if self._closed:
                return
            self._state = state
            if state.lost is not None or state.ended is not None:
                self.session_lost.set()
            self._lock.notify_all()

    def _present_state(self) -> _State:
        before, failure = self._state, self.failure
        if failure is not None:
            # The machine's state is void after the failure, and no other session follows.
            return _State(lost=failure.observation, ended=before.ended, failure=failure)
        agent = self._agent
        lost, outcome, gathered = before.lost, agent.outcome, before.gathered
        if agent.losses > self._losses:
            self._losses, lost = agent.losses, agent.lost
        hosting = agent.part if isinstance(agent.part, ElasticHost) and outcome is not None else None
        if outcome is None:
            gathered = None
        elif gathered is None or gathered.formation.session != outcome.session:
            gathered = Gathered(outcome, agent.generation, agent.small)
        return _State(
            gathered=gathered,
            present=None if hosting is None else frozenset(hosting.registrar.seats),
            ending=hosting is not None and hosting.quorum.ending,
            hold=agent.hold,
            lost=lost,
            ended=agent.ended,
            failure=agent.failure,
            time_is_up=agent.deadline_passed(self.clock()),
        )
