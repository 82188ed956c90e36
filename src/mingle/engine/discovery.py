"""A rank's loop: it drives the rank's machine, opens and proves the store, and goes on after GO.

Until the job has formed it runs in the calling thread; afterwards it goes on in a daemon thread, to answer those who
ask and to see the process group come and go.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from mingle.config.settings import Settings
from mingle.engine import store
from mingle.engine.progress import Progress
from mingle.engine.store_loop import StoreLoop
from mingle.errors import MingleError
from mingle.protocol.election import Elector
from mingle.protocol.host import Host
from mingle.protocol.machine import (
    CloseStore,
    Effect,
    Formation,
    Identity,
    OpenStore,
    PrepareStore,
    ProveStore,
    ReachStore,
)
from mingle.protocol.member import Joiner

logger = logging.getLogger("mingle")

Machine: TypeAlias = Host | Joiner | Elector

FIRST_WATCH_SECONDS = 0.05
"""When the thread that serves looks after the process group first."""
LINGER_SECONDS = 1.0
"""How long a member keeps its sockets for datagrams after GO. Closing them takes a tenth of a millisecond, but in a
moment in which all ranks of a machine want its cores, and this rank's caller the interpreter."""


class Discovery(StoreLoop):
    """One rank's discovery, from its first datagram to the end of its session.

    Args:
        settings: of the call.
        identity: of this rank.
        enters: whether the connection by which a member proves the store is kept for a process group (`take_client`).

    Raises:
        InterfaceError: no interface can be used.
        ConfigurationError: the fixed port of the store is taken.
    """

    _machine: Machine

    def __init__(self, settings: Settings, identity: Identity, *, enters: bool = False) -> None:
        self.identity = identity
        self._enters = enters
        self.watch: Callable[[], float] | None = None
        """Called by the serving thread; returns the seconds until it wants to be called again."""
        self.group_stands = False
        """Whether a process group has taken the store over."""
        self._stopping = False
        self._serving = False
        self._thread: threading.Thread | None = None
        self._watch_due = self._deaf_from = 0.0
        self._store_client: store.StoreClient | None = None
        self._reaching = False
        now = time.monotonic()
        self._progress = Progress(
            settings.job_id, settings.world_size, settings.rank, off=settings.progress == "off", now=now
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self._progress.close)
            super().__init__(settings, stack)
            if identity.rank == 0:  # those who wait take the cores as soon as they hear of it
                self._spare_thread.prepare()
            # The time to answer begins when the sockets are open: on a starved machine that may take seconds.
            self._machine = self._make_machine(time.monotonic())
            self._stack = stack.pop_all()

    def _make_machine(self, now: float) -> Machine:
        identity, context, fixed_port = self.identity, self._context(), self.settings.master_port
        if identity.rank not in (0, None):
            return Joiner(identity, context, now)
        if fixed_port is not None:
            store.check_port(fixed_port, [each.address for each in self.listening_addresses])
        endpoints = self._listen()
        if identity.rank is None:
            return Elector(identity, endpoints, context, now)
        return Host(identity, secrets.token_bytes(16), endpoints, context, now)

    def _interfaces_looked_at(self, now: float, *, changed: bool) -> None:
        machine = self._machine
        if changed and not isinstance(machine, Host):
            machine.rewired(now)
        if isinstance(machine, Joiner):
            return
        addresses = self._listen_also()
        if addresses and addresses != machine.endpoints.addresses:
            machine.readdress(addresses, now)

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Formation:
        """Waits until the job has formed.

        Raises:
            MingleError: it has not, and why.
        """
        machine = self._machine
        try:
            with self._failures_explained():
                self._carry_out()
                self._spare_thread.prepare()  # who asks has time for that until it is answered
                while not machine.finished:
                    if machine.expired(time.monotonic()):
                        machine.give_up(self.facts(diagnosed=True))
                        break
                    self._turn()
        except KeyboardInterrupt:
            self.close("interrupted")
            raise
        except BaseException:
            self.close("failed")
            raise
        self._progress.close()
        if machine.failure is not None:
            self.close(type(machine.failure).__name__)
            raise machine.failure
        assert machine.outcome is not None
        if isinstance(machine, Elector):
            self._carry_out()
            self._machine = machine.acting
        if isinstance(self._machine, Joiner):
            self._release_store()  # that of a session that it has given up
        self._peers.stop()
        return machine.outcome

    def serve(self) -> None:
        """Goes on in a daemon thread."""
        # Nobody can have made a process group yet: the new thread goes straight to its sockets, and its caller on.
        now = time.monotonic()
        self._watch_due, self._deaf_from = now + FIRST_WATCH_SECONDS, now + LINGER_SECONDS
        name = "mingle-host" if isinstance(self._machine, Host) else "mingle-member"
        self._serving = True
        self._thread = self._spare_thread.run(name, self._serve)

    def _serve(self) -> None:
        self._thread = threading.current_thread()  # here too: Ctrl-C may come before `run` has returned it
        try:
            while not self._stopping:
                self._turn()
                now = time.monotonic()
                if self._deaf_due is not None and now >= self._deaf_due:
                    self._close_transport()  # nobody asks it any more
                if self.watch is not None and now >= self._watch_due:
                    self._watch_due = now + self.watch()
        except BaseException as error:
            self._die(error, self._abort_store, self._let_go)

    def _more_timers(self) -> Iterable[float | None]:
        if not self._serving:
            return (self._progress.next_timer(),)
        return (self._watch_due if self.watch is not None else None, self._deaf_due)

    @property
    def _deaf_due(self) -> float | None:
        """When a member that has heard GO closes its sockets for datagrams; a host answers for as long as it lives."""
        listens = self._transport is not None and isinstance(self._machine, Joiner)
        return self._deaf_from if listens else None

    def _seeks(self) -> bool:
        return not self._machine.finished

    def _house_keeping(self, now: float) -> None:
        if self._progress.wants_status(now):
            self._machine.ask_status()
        due = self._progress.next_timer()
        if due is not None and now >= due:
            self._progress.tick(self._machine.snapshot(), now)
        super()._house_keeping(now)

    # --- what comes in and goes out --------------------------------------------------------------------------------

    def _accepted(self, conn: int, address: str, now: float) -> None:
        if isinstance(self._machine, Joiner) or (isinstance(self._machine, Host) and self._machine.closed):
            super()._accepted(conn, address, now)
        else:
            self._machine.accepted(conn, address, now)

    def _ended(self, conn: int, reason: str, now: float) -> None:
        self._machine.disconnected(conn, reason, now)

    def _perform_more(self, effect: Effect) -> None:
        match effect:
            case PrepareStore(address):
                host = self._host()
                if host is not None:
                    self._open_in_turn(partial(self._prepare_store, host, address), (address, host.session))
            case OpenStore(epoch, address):
                host = self._host()
                if host is not None:
                    self._open_in_turn(partial(self._open_store, host, epoch, address), (address, host.session))
            case ReachStore(address, port):
                if not self._reaching:  # it may block for seconds, and a host may name places as fast as it likes
                    self._reaching = True
                    self._in_thread("store-ahead", partial(self._reach_store, address, port))
            case ProveStore():
                client, self._store_client = self._store_client, None
                self._in_thread("store-proof", partial(self._prove_store, effect, client))
            case CloseStore(reason):
                self._close_store(reason)

    def _say(self, level: int, text: str) -> None:
        self._progress.say(level, text)

    def _host(self) -> Host | None:
        """The machine that hosts; an elector may have given its session up meanwhile."""
        host = self._machine.host if isinstance(self._machine, Elector) else self._machine
        return host if isinstance(host, Host) else None

    # --- the store -------------------------------------------------------------------------------------------------

    def _prepare_store(self, host: Host, address: str) -> Callable[[], None]:
        return partial(self._store_prepared, host, self._server(address, self.settings.master_port, host.session))

    def _store_prepared(self, host: Host, server: store.StoreServer | MingleError) -> None:
        if isinstance(server, MingleError):
            logger.debug("the store can't be prepared: %s", server)  # tried again, and told, when it is needed
        elif self._closed or host.closed:
            server.release()
        else:
            self.store_server = server
            host.store_prepared(server.port, time.monotonic())

    def _open_store(self, host: Host, epoch: int, address: str) -> Callable[[], None]:
        server = self._server(address, self.settings.master_port, host.session)
        if isinstance(server, MingleError):
            return partial(self._store_failed, host, epoch, server)
        return partial(self._store_opened, host, epoch, server)

    def _store_opened(self, host: Host, epoch: int, server: store.StoreServer) -> None:
        if self._closed or host.closed:
            server.release()
            return
        self.store_server = server
        assert not isinstance(self._machine, Joiner)
        self._machine.store_opened(epoch, server.port, server.token, time.monotonic())

    def _store_failed(self, host: Host, epoch: int, error: MingleError) -> None:
        if not host.closed:
            assert not isinstance(self._machine, Joiner)
            self._machine.store_failed(epoch, error, time.monotonic())

    def _reach_store(self, address: str, port: int) -> Callable[[], None]:
        client = None
        try:
            client = store.connect(address, port, self._workers)
            client.tune()
        except OSError as error:
            logger.debug("the store can't be reached ahead: %s", error)  # tried again, and told, when it must be proved
        return partial(self._store_reached, client)

    def _store_reached(self, client: store.StoreClient | None) -> None:
        self._reaching = False
        if not self._closed and not self._machine.finished:
            self._store_client = client

    def _prove_store(self, wanted: ProveStore, client: store.StoreClient | None) -> Callable[[], None]:
        joiner = self._machine
        assert not isinstance(joiner, Host)
        place = wanted.address, wanted.port
        try:
            client = store.prove(*place, wanted.session, wanted.token, ahead=client, workers=self._workers)
        except OSError as error:
            reason = str(error)
            return lambda: joiner.store_unreachable(wanted.epoch, reason, time.monotonic())
        return partial(self._store_proved, joiner, wanted.epoch, client)

    @property
    def _workers(self) -> int | None:
        """For how many workers a rank 0 waits that makes its process group by torch's own road, if we enter with it."""
        return self.identity.world_size if self._enters else None

    def _store_proved(self, joiner: Joiner | Elector, epoch: int, client: store.StoreClient) -> None:
        if self._enters and not self._closed and not joiner.finished:
            self._store_client = client
        joiner.store_proved(epoch)

    def take_client(self) -> store.StoreClient | None:
        """Hands out a member's connection to the store, once the job has formed.

        None if there is none to be had: it was handed out before, or this discovery was not told that it `enters`.
        """
        formation = self.machine.outcome
        client, self._store_client = self._store_client, None
        if formation is None or client is None or not client.leads_to(formation.store_address, formation.store_port):
            return None
        return client

    def _close_store(self, reason: str) -> None:
        self.say(f"{reason}; its store is closed, so that the other ranks fail now and not at torch's timeout")
        if self.store_server is not None:
            self.store_server.abort()

    # --- what others ask -------------------------------------------------------------------------------------------

    def say(self, text: str, error: BaseException | None = None) -> None:
        """Says that something is wrong, for a person who may never have configured logging."""
        self._progress.say(logging.ERROR, text, error)

    def _complain(self, text: str, error: BaseException) -> None:
        self.say(text, error)

    @property
    def machine(self) -> Host | Joiner:
        """The machine that this loop drives, once the job has formed."""
        assert not isinstance(self._machine, Elector)
        return self._machine

    def close(self, reason: str) -> None:
        """Ends the session: says good-bye, stops the thread, closes every socket. A second call does nothing."""
        # Set the flag before looking for the thread: a thread that is not known yet checks the flag before it does
        # anything.
        self._stopping = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self.call(lambda: None)
            self._spare_thread.end()
            thread.join()
        if self._closed:
            return
        try:
            self._part(partial(self._machine.close if isinstance(self._machine, Host) else self._machine.leave, reason))
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Close every socket without a BYE, and release the store. A second call does nothing."""
        if self._closed:
            return
        self._closed = self._stopping = True
        try:
            self._stack.close()
        finally:
            if self.failure is None:
                while self._calls:
                    self._calls.popleft()[0]()
            self._store_client = None
            self._release_store()

    def _abort_store(self) -> None:
        """Shut the store down for its users, unless a process group has taken it over: then torch owns it."""
        if self.group_stands:
            return
        formation = self._machine.outcome
        if self.store_server is not None and self.store_server.held:
            self.store_server.abort()
        elif isinstance(self._machine, Joiner) and formation is not None:
            store.cut_off(formation.store_address, formation.store_port)
