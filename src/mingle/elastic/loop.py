"""An agent's loop: drives its machine in a daemon thread, from its first datagram to the end of its part in the job."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from mingle.config.settings import Settings
from mingle.detached import PreStartedWorker
from mingle.elastic.agent import Agent
from mingle.elastic.quorum import Policy
from mingle.engine import progress
from mingle.engine.discovery import FILES_PER_NODE, job_key, machine_context, make_room
from mingle.engine.driver import Driver
from mingle.engine.progress import Progress
from mingle.engine.store import StoreKeeper
from mingle.protocol.machine import CloseStore, Effect, Identity

logger = logging.getLogger("mingle")


def boot_time() -> float:
    """Return the seconds since boot, including the time in which the machine was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class AgentLoop:
    """The thread of one agent, with its driver.

    Args:
        settings: how to discover; the job's id and secret.
        identity: of this agent.
        policy: how many agents found and keep a session.
        changed: called by the loop's thread after each turn and when it ends.

    Raises:
        InterfaceError: no interface can be used.
        MingleError: no file descriptor is free.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        policy: Policy,
        *,
        changed: Callable[[], None],
    ) -> None:
        self.settings = settings
        self._changed = changed
        self._stopping = False
        self._progress: Progress | None = None
        quiet = settings.progress == "off"
        make_room(policy.nodes.maximum, FILES_PER_NODE, what="nodes", quiet=quiet)
        with contextlib.ExitStack() as stack:
            worker = PreStartedWorker()
            stack.callback(worker.end)
            key = job_key(settings)
            self.driver = driver = Driver(
                settings,
                settings.job_id,
                key,
                stack,
                clock=boot_time,
                perform=self._perform,
                scanned=self._scanned,
                say=self._say,
            )
            self.stores = StoreKeeper(driver, worker.run, port=settings.master_port)
            context = machine_context(settings, key, driver)
            self._machine = Agent(identity, driver.listen(), context, boot_time(), policy=policy)
            driver.drive(self._machine, unverified=self._machine.heard_unverified)
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._serve, name="mingle-agent", daemon=True)
        self._thread.start()

    @property
    def agent(self) -> Agent:
        """The machine; only the loop's thread may touch it."""
        return self._machine

    @property
    def alive(self) -> bool:
        """Whether the loop's thread lives."""
        return self._thread.is_alive()

    # --- running ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        driver, machine = self.driver, self._machine
        try:
            driver.carry_out()
            while not self._stopping:
                driver.turn(None if self._progress is None else self._progress.next_timer())
                if self.stores.server is not None:
                    # A client of this session's store can still hold the port in the next session.
                    self.stores.port = None
                now = boot_time()
                if machine.deadline_passed(now):
                    machine.give_up(driver.facts(diagnosed=True), now)
                    driver.carry_out()
                self._show_progress(now)
                self._changed()
            self.stores.close()
            with contextlib.suppress(OSError):
                driver.carry_out()
            self._end_progress()
            self._stack.close()
            driver.run_calls()
            self.stores.release()
        except BaseException as error:
            self.stores.close()
            driver.die(error, self._end_store, self._stack.close, self._end_progress, self._changed)

    def stop(self, reason: str) -> None:
        """End the agent's part in the job, and return when every socket is closed. Not for the loop's own thread."""

        def end() -> None:
            self._machine.close(reason)
            self._stopping = True

        self.driver.call(end)
        self._thread.join()

    def _show_progress(self, now: float) -> None:
        if self._machine.outcome is not None or self._machine.part is None:
            self._end_progress()
            return
        if self._progress is None:
            settings, nodes = self.settings, self._machine.identity.world_size
            self._progress = Progress(settings.job_id, nodes, None, off=settings.progress == "off", now=now)
        self._progress.show(self._machine, now)

    def _end_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    # --- what the driver calls -------------------------------------------------------------------------------------

    def _scanned(self, now: float, changed: bool) -> None:
        if changed:
            self._machine.rewired(now)
        self.driver.relisten(self._machine, now)

    def _say(self, level: int, text: str, error: BaseException | None = None) -> None:
        if self._progress is not None or error is not None:
            progress.say(level, text, quiet=self.settings.progress == "off", error=error)
        else:
            logger.log(level, "%s", text)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, CloseStore):
            logger.debug("job %s: the store is closed: %s", self.settings.job_id, effect.reason)
            self._end_store()
        else:
            self.stores.perform(effect)

    def _end_store(self) -> None:
        self.stores.abort()
        self.stores.release()
