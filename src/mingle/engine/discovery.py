"""A rank's discovery: the party that brings a job of ranks together, and goes on after GO.

The caller waits until the job has formed. After GO the loop answers other processes and notices when the process group
is made and destroyed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from mingle.collector import resume_collector
from mingle.config.settings import Settings
from mingle.engine import store
from mingle.engine.party import Party
from mingle.engine.store import StoreClient
from mingle.errors import MingleError
from mingle.protocol.effects import CloseStore
from mingle.protocol.machine import Context, Endpoints, Formation, scoped
from mingle.protocol.node import Node
from mingle.records import logger

if TYPE_CHECKING:
    from mingle.protocol.host import Host
    from mingle.protocol.membership import Membership

WATCH_SECONDS = 0.05
"""How often the loop looks for the process group at first."""
LINGER_SECONDS = 1.0
"""How long a member keeps its UDP sockets after GO. Closing them takes a tenth of a millisecond, but all ranks of the
machine compete for its cores at that moment, and this rank's caller for the interpreter."""
COLLECTOR_PAUSE_SECONDS = 1.0
"""For how long a discovery runs without garbage collection. A rank that waits longer collects while it waits."""


class Discovery(Party):
    """One rank's discovery, from its first datagram to the end of its session.

    A class that derives from it can have another kind of store (`keeper`), call its ranks nodes (`unit`), tell the
    others a port (`program_port`), go on scanning a member's interfaces after GO (`scans_on`), expect no process group
    (`watches`), and wait for the end in its own way.

    Args:
        settings: of the call.
        enters: whether the connection by which a member proves the store is kept for a process group (`take_client`).
    """

    name = "mingle-rank"
    scans_on = False
    watches = True
    _machine: Node

    def __init__(self, settings: Settings, *, enters: bool = False) -> None:
        super().__init__(settings)
        self.watch: Callable[[], float] | None = None
        """Called by the loop after GO; returns the seconds until it wants to be called again."""
        self.group_stands = False
        """Whether a process group has taken the store over."""
        self.formation: Formation | None = None
        """The job, once it has formed."""
        self._workers = self.identity.world_size if enters else None
        self._watch_due = self._deaf_due = 0.0
        self._pause_ends: float | None = None
        """When to resume garbage collection in a wait that lasts."""

    # --- the caller ------------------------------------------------------------------------------------------------

    def run(self) -> Formation:
        """Start the loop, and wait until the job has formed.

        Raises:
            InterfaceError: no interface can be used.
            ConfigurationError: the fixed port of the store is taken.
            MingleError: the job has not formed, and why; or no file descriptor or thread is free.
        """
        self._pause_ends = self.clock() + COLLECTOR_PAUSE_SECONDS
        try:
            self.start()
            return self._await(lambda: self.formation)
        except BaseException as error:
            self.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", failed=True)
            raise

    def wait(self, until: float | None = None) -> bool:
        """Wait as :meth:`Party.wait`, and resume garbage collection if that lasts."""
        if (ends := self._pause_ends) is None:
            return super().wait(until)
        news = super().wait(ends if until is None else min(until, ends))
        if self.clock() >= ends:
            self._pause_ends = None
            resume_collector()
        return news

    # --- the loop --------------------------------------------------------------------------------------------------

    def _make_machine(self, context: Context) -> Node:
        try:
            endpoints = self._endpoints()
        except MingleError as error:
            self.driver.udp.say_failed(self.identity.failed(error))
            raise
        return Node(self.identity, endpoints, context, self.clock())

    def _endpoints(self) -> Endpoints | None:
        """Listen, if this rank can host or proves the mesh."""
        if not self._can_host:
            return self.driver.control_port.listen(locally=True) if self._listens_for_mesh else None
        endpoints, fixed_port, asked = self._listen(), self.settings.master_port, self.settings.placement
        can_be_first = asked.node_rank_launched or not asked.node_rank
        if fixed_port is not None and (self.identity.rank == 0 or can_be_first):
            # Only the addresses that are ready: another one is no reason to refuse the port.
            store.check_port(fixed_port, [scoped(each.address, each.interface) for each in endpoints.addresses])
        return endpoints

    @property
    def _listens_for_mesh(self) -> bool:
        # Where ranks are assigned, all dial the first in order, whatever the mesh.
        return (super()._listens_for_mesh or self.identity.rank is None) and self.formation is None

    @property
    def _can_host(self) -> bool:
        return super()._can_host if self.formation is None else self.host is not None

    def _turn(self) -> None:
        if self.formation is not None:
            self._serve()
            return
        super()._turn()
        machine = self._machine
        if machine.failure is not None:
            self._refusal = machine.failure
            self._farewell = type(machine.failure).__name__, False
            self._stopping = True
        elif machine.outcome is not None:
            self._conclude(machine.outcome)

    def _conclude(self, formation: Formation) -> None:
        # A host that has lost an address can't be found at another one. Its members notice a broken connection by
        # TCP's timers, so it must not be quicker than they are.
        self.driver.settle(scanning=self.scans_on and self.host is None)
        if self.host is None:
            self.stores.release()  # that of a session that this rank has given up
            if self._listens_for_mesh:
                self.driver.connections.stop_listening()
            self.driver.folders.leave()
        now = self.clock()
        self._watch_due = now + WATCH_SECONDS if self.watches else math.inf
        self._deaf_due = now + LINGER_SECONDS
        self.formation = formation
        self._notify()

    def _serve(self) -> None:
        listens = self.host is None and self.driver.udp.transport is not None
        self.driver.turn(min(self._watch_due, self._deaf_due) if listens else self._watch_due)
        now = self.clock()
        if listens and now >= self._deaf_due:
            self.driver.udp.close()  # no process asks a member any more; a host answers while it lives
        if now >= self._watch_due:
            self._watch_due = now + (self.watch() if self.watch is not None else WATCH_SECONDS)
            self.driver.carry_out()  # what the watch has said must not wait for the next turn

    def _fail(self) -> None:
        """Shut the store down for its users, unless a process group has taken it over: then torch owns it."""
        formation, server = self.formation, self.stores.server
        if formation is None:
            self._leave()
        elif self.group_stands:
            return
        elif server is not None and server.held:
            server.abort()
        elif self.host is None:
            store.shut_down_connections(formation.store_address, formation.store_port)

    def _ended(self, error: BaseException | None) -> None:
        if self.formation is not None:
            if self.failure is not None:
                self.say(logging.ERROR, str(self.failure), error)
        elif self.failure is not None and self._unopened is None:
            logger.info("the traceback of what ended the loop", exc_info=error)

    def _close_store(self, effect: CloseStore) -> None:
        text = f"{effect.reason}; its store is closed, so that the other ranks fail now and not at torch's timeout"
        self.say(logging.ERROR, text)
        self.stores.abort()

    # --- what the session asks -------------------------------------------------------------------------------------

    @property
    def host(self) -> Host | None:
        """The session of the rank that hosts the job that has formed; None on a member."""
        return self._machine.host

    @property
    def membership(self) -> Membership | None:
        """A member's place in the job that has formed; None on the host."""
        return self._machine.joiner.membership

    def say_good_bye(self, reason: str) -> None:
        """Have the machine end its session; the loop goes on."""
        self._machine.close(reason)

    def take_client(self) -> StoreClient | None:
        """Hand out a member's connection to the store, once the job has formed.

        None if it was handed out before, or this discovery was not told that it `enters`.
        """
        formation = self.formation
        client, self.stores.client = self.stores.client, None
        if formation is None or client is None or not client.leads_to(formation.store_address, formation.store_port):
            return None
        return client
