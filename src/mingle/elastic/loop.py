"""An agent's loop: drives its machine in a daemon thread, from its first datagram to the end of its part in the job."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from mingle.config.settings import Settings
from mingle.elastic.agent import Agent
from mingle.elastic.host import ElasticHost
from mingle.elastic.quorum import Policy
from mingle.engine import file_limit, progress, store
from mingle.engine.progress import Progress
from mingle.engine.store_loop import StoreLoop
from mingle.protocol.machine import CloseStore, Effect, Identity, OpenStore, PrepareStore, ProveStore

logger = logging.getLogger("mingle")


def boot_time() -> float:
    """Return the seconds since boot, including the time in which the machine was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class AgentLoop(StoreLoop):
    """The sockets and the clock of one agent.

    Args:
        settings: how to discover; the job's id and secret.
        identity: who this agent is.
        policy: how many agents found and keep a session.
        changed: called by the loop's thread after each turn and when it ends.

    Raises:
        InterfaceError: no interface can be used.
    """

    _machine: Agent
    clock = staticmethod(boot_time)

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        policy: Policy,
        *,
        changed: Callable[[], None],
    ) -> None:
        self._changed = changed
        self._stopping = False
        self._first_port = settings.master_port
        self._progress: Progress | None = None
        quiet = settings.progress == "off"
        file_limit.make_room(policy.nodes.maximum, file_limit.FILES_PER_NODE, what="nodes", quiet=quiet)
        with contextlib.ExitStack() as stack:
            super().__init__(settings, stack)
            self._machine = Agent(identity, self._listen(), self._context(), self.clock(), policy=policy)
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._serve, name="mingle-agent", daemon=True)
        self._thread.start()

    def _interfaces_looked_at(self, now: float, *, changed: bool) -> None:
        if changed:
            self._machine.rewired(now)
        addresses = self._listen_also()
        if addresses and addresses != self._machine.endpoints.addresses:
            self._machine.readdress(addresses, now)

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
        try:
            self._carry_out()
            while not self._stopping:
                self._turn()
                now = self.clock()
                if self._machine.deadline_passed(now):
                    self._machine.give_up(self.facts(diagnosed=True), now)
                    self._carry_out()
                self._changed()
            self._closed = True
            with contextlib.suppress(OSError):
                self._carry_out()
            self._show_no_progress()
            self._stack.close()
            while self._calls:
                self._calls.popleft()[0]()
            self._release_store()
        except BaseException as error:
            self._closed = True
            self._die(error, self._close_store, self._stack.close, self._show_no_progress, self._changed)

    def _complain(self, text: str, error: BaseException) -> None:
        progress.say(logging.ERROR, text, quiet=self.settings.progress == "off", error=error)

    def stop(self, reason: str) -> None:
        """Ends the agent's part in the job and returns when every socket is closed. Not for the loop's own thread."""

        def end() -> None:
            self._machine.close(reason)
            self._stopping = True

        self.call(end)
        self._thread.join()

    def _seeks(self) -> bool:
        return self._transport is not None

    def _more_timers(self) -> Iterable[float | None]:
        return (self._progress.next_timer() if self._progress is not None else None,)

    def _house_keeping(self, now: float) -> None:
        super()._house_keeping(now)
        if self._machine.outcome is not None or self._machine.part is None:
            self._show_no_progress()
            return
        if self._progress is None:
            settings = self.settings
            self._progress = Progress(
                settings.job_id, self._machine.identity.world_size, None, off=settings.progress == "off", now=now
            )
        if self._progress.wants_status(now):
            self._machine.ask_status()
        due = self._progress.next_timer()
        if due is not None and now >= due:
            self._progress.tick(self._machine.snapshot(), now)

    def _show_no_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    # --- what comes in and goes out --------------------------------------------------------------------------------

    def _accepted(self, conn: int, address: str, now: float) -> None:
        self._machine.accepted(conn, address, now)

    def _ended(self, conn: int, reason: str, now: float) -> None:
        self._machine.disconnected(conn, reason, now)

    def _say(self, level: int, text: str) -> None:
        if self._progress is not None:
            self._progress.say(level, text)
        else:
            logger.log(level, "%s", text)

    def _perform_more(self, effect: Effect) -> None:
        match effect:
            case PrepareStore():
                pass  # a round of torchrun takes seconds: it is early enough when the session is sealed
            case OpenStore(epoch, address):
                host = self._machine.host
                assert host is not None
                self._open_in_turn(partial(self._open_store, host, epoch, address), (address, host.session))
            case ProveStore():
                self._in_thread("store-proof", partial(self._prove_store, self._machine.part, effect))
            case CloseStore(reason):
                logger.debug("job %s: the store is closed: %s", self.settings.job_id, reason)
                self._close_store()

    # --- the store -------------------------------------------------------------------------------------------------

    def _open_store(self, host: ElasticHost, epoch: int, address: str) -> Callable[[], None]:
        # Whoever still uses the store of an earlier session may hold its port.
        server = self._server(address, self._first_port, host.session)
        if isinstance(server, store.StoreServer):
            return partial(self._store_opened, host, epoch, server)
        error = server
        return lambda: self._machine.store_failed(host, epoch, error, self.clock())

    def _store_opened(self, host: ElasticHost, epoch: int, server: store.StoreServer) -> None:
        if self._closed or host.closed or host is not self._machine.host:
            server.release()
            return
        self.store_server, self._first_port = server, None
        self._machine.store_opened(host, epoch, server.port, server.token, self.clock())

    def _prove_store(self, part: object, wanted: ProveStore) -> Callable[[], None]:
        try:
            store.prove(wanted.address, wanted.port, wanted.session, wanted.token)
        except OSError as error:
            reason = str(error)
            return lambda: self._machine.store_unreachable(part, wanted.epoch, reason, self.clock())
        return lambda: self._machine.store_proved(part, wanted.epoch, self.clock())

    def _close_store(self) -> None:
        if self.store_server is not None:
            self.store_server.abort()
            self.store_server = None
