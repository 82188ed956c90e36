"""One machine's part in the session of a command: the machines meet, and hear of each other's end."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING

from mingle.engine.discovery import Discovery
from mingle.errors import MingleError
from mingle.protocol.host import Host
from mingle.protocol.machine import CloseStore, Effect, Formation, lone_formation
from mingle.protocol.member import Joiner
from mingle.run.port import PortKeeper, reserve

if TYPE_CHECKING:
    from mingle.config.settings import Settings


COMMAND = "its command"
"""The subject of the reason that a machine gives whose command has ended."""
LEAVE_SECONDS = 20.0
"""How long a machine tries to tell node 0 of the end of its command. Node 0 gives up an unreachable machine by then."""


class NodeSession(Discovery):
    """The session of one machine; after GO its caller runs the turns. Each machine is a rank."""

    keeper = PortKeeper
    ahead = False  # there is no store to connect to, only a port, and no torch to connect with
    scans_on = True
    unit = "node"

    def __init__(self, settings: Settings) -> None:
        self._lost: CloseStore | None = None
        super().__init__(settings)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, CloseStore):
            self._lost = effect
        else:
            super()._perform(effect)

    def run(self) -> Formation:
        """Wait until the machines have found each other, as :meth:`Discovery.run`."""
        formation = super().run()
        self._worker.end()  # the program is forked from a process with one thread
        if isinstance(self._part, Joiner):
            self.driver.close_transport()  # no process asks a member any more
        # From before the program's start to the end: a signal between two waits must end the second one.
        signal.set_wakeup_fd(self.driver.wakeup_fd, warn_on_full_buffer=False)
        return formation

    def _let_go(self) -> None:
        signal.set_wakeup_fd(-1)
        super()._let_go()

    def turn(self, until: float | None = None) -> None:
        """Wait for news of the other machines, or for a signal, at most until a time.

        Raises:
            MingleError: an unforeseen exception has ended the session.
        """
        with self.driver.failures_explained():
            self.driver.turn(until)

    @property
    def _part(self) -> Host | Joiner:
        """The machine, once the others have been found."""
        assert isinstance(self._machine, Host | Joiner)
        return self._machine

    @property
    def trouble(self) -> MingleError | None:
        """Why the program must not go on here: another machine, or the program there, has failed."""
        machine = self._part
        if isinstance(machine, Host):
            return None if self._lost is None else _failed_elsewhere(_describe(self._lost))
        if machine.close_reason:
            return _failed_elsewhere(machine.close_reason)
        return None if machine.host_lost is None else _failed_elsewhere(f"node 0 is lost ({machine.loss})")

    def pass_on(self) -> None:
        """End the session because of the trouble; the host tells the other machines."""
        trouble = self.trouble
        assert trouble is not None
        self.close("" if self._lost is None else _describe(self._lost))

    @property
    def others_left(self) -> bool:
        """Whether all other machines have left, as far as this one has to know: it must if it is the host."""
        machine = self._part
        return not isinstance(machine, Host) or machine.registrar.all_left

    def leave(self) -> bool:
        """As a member, tell node 0 that the command has ended; return whether it has heard of it."""
        machine = self._part
        return isinstance(machine, Host) or self._tell(machine, f"{COMMAND} has ended", failed=False)

    def _tell(self, machine: Joiner, reason: str, *, failed: bool) -> bool:
        """Say good-bye until node 0 answers: the connection can be dead, and the network be cut for a moment."""
        now = self.driver.clock()
        machine.leave(reason, now, failed=failed)
        self.driver.carry_out()
        until = now + LEAVE_SECONDS
        while machine.leaving and self.driver.clock() < until:
            self.turn(until)
        return bool(machine.close_reason)

    def fail(self, how: str) -> None:
        """End the session with a failure of the command, which the other machines hear of."""
        machine, reason = self._part, f"{COMMAND} {how}"
        if isinstance(machine, Host):
            farewell = partial(machine.close, f"node 0 on host {self.identity.who.hostname}: {reason}")
        else:
            farewell = partial(machine.close, reason, failed=True)
            self._tell(machine, reason, failed=True)
        self.driver.part(farewell)
        self._let_go()


def _describe(lost: CloseStore) -> str:
    who = lost.lost
    assert who is not None
    how = f": {lost.how}" if lost.how.startswith(COMMAND) else f" is lost ({lost.how})"
    return f"{who}{how}"


def _failed_elsewhere(what: str) -> MingleError:
    return MingleError.explain(
        f"{what}.",
        cause="the command failed there; or the machine, its link or its mingle-run is gone, if the connection broke",
        remedy="see the output of that machine; --keep-going lets the commands of the others run on.",
    )


def form_alone(settings: Settings) -> Formation:
    """Return the place of the only machine, without a packet."""
    listener = reserve(settings.master_port)
    port = listener.getsockname()[1]
    listener.close()
    return lone_formation(b"", port)
