"""One machine's part in the session of a command: the machines meet, and hear of each other's end."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from mingle.config.values import Peer
from mingle.engine.discovery import Discovery
from mingle.errors import MingleError
from mingle.protocol.effects import CloseStore, Effect, ProveStore
from mingle.protocol.machine import Formation, lone_formation, roster_digest
from mingle.run import addresses
from mingle.run.port import PortKeeper, hold, reserve

if TYPE_CHECKING:
    from mingle.config.settings import Settings
    from mingle.wire.frames import Seat


ROSTER_SECONDS = 30.0
"""How long a machine waits for everybody's address, which node 0 sends within milliseconds."""
COMMAND = "its command"
"""The subject of the reason that a machine gives whose command has ended."""
LEAVE_SECONDS = 20.0
"""How long a machine tries to tell node 0 of the end of its command. Node 0 gives up an unreachable machine by then."""


class NodeSession(Discovery):
    """The session of one machine, which is a rank of its job.

    After GO the caller waits for news: `turn` returns after each turn of the loop, which notes how the other machines
    are, and after a signal.
    """

    keeper = PortKeeper
    scans_on = True
    watches = False  # no process group comes or goes
    name = "mingle-node"
    unit = "node"

    def __init__(self, settings: Settings) -> None:
        self._held = hold(but=settings.master_port)
        self.program_port = self._held.getsockname()[1]
        super().__init__(settings)
        self.trouble: MingleError | None = None
        """Why the program must not go on here: another machine, or the program there, has failed."""
        self.others_left = False
        """Whether all other machines have left, as far as this one has to know: it must if it is the host."""
        self._leaving = False
        """Whether node 0 has not answered this machine's good-bye yet."""
        self._lost: CloseStore | None = None
        self._roster: list[Seat] | None = None
        """All machines, once a member has heard of them."""

    def _close_store(self, effect: CloseStore) -> None:
        self._lost = effect

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, ProveStore):
            # The session is sealed. The answer comes before GO, so no machine needs node 0 for it after GO.
            self._ask_roster()
        super()._perform(effect)

    def run(self) -> Formation:
        """Wait until the machines have found each other, as :meth:`Discovery.run`."""
        with self._held:
            formation = super().run()
        # From before the program's start to the end: a signal between two waits must end the second one. It ends the
        # wait of the loop, whose turn ends that of the caller.
        signal.set_wakeup_fd(self.driver.wakeup_fd, warn_on_full_buffer=False)
        return formation

    def close(self, reason: str, *, failed: bool = False) -> None:
        """End the session, as :meth:`Discovery.close`."""
        signal.set_wakeup_fd(-1)
        super().close(reason, failed=failed)

    def turn(self, until: float | None = None) -> None:
        """Wait for news of the other machines, or for a signal, at most until a time.

        Raises:
            MingleError: an unforeseen exception has ended the loop.
        """
        self.wait(until)
        if self.failure is not None:
            raise self.failure.copied()

    def _turn(self) -> None:
        super()._turn()
        if self.formation is not None:
            self._note()
            self._notify()

    def _note(self) -> None:
        if (host := self.host) is not None:
            if self._lost is not None and self.trouble is None:
                self.driver.interfaces.rescan(self.clock())  # a host does not look at them after GO
                self.trouble = self._failed_elsewhere(_describe(self._lost))
            self.others_left = host.registrar.seats.all_left
            return
        membership = self.membership
        assert membership is not None
        self.others_left, self._leaving = True, membership.leaving
        if self._roster is None and roster_digest(membership.roster.seats) == self._formation.roster_digest:
            self._roster = list(membership.roster.seats)
        if membership.close_reason:
            self.trouble = self._failed_elsewhere(membership.close_reason)
        elif membership.host_lost_error is not None:
            self.trouble = self._failed_elsewhere(f"node 0 is lost ({membership.loss})")

    def _failed_elsewhere(self, what: str) -> MingleError:
        """Return why the program must not go on; a machine that is offline itself says so, and blames no other one."""
        lost = self.driver.interfaces.lost() if self.driver.interfaces.had_carrier else {}
        if lost:
            return MingleError.explain(
                f"this machine is offline ({', '.join(f'{name} {how}' for name, how in lost.items())}), so {what}.",
                cause="a cable, a switch, or a change of this machine's network",
                remedy="look at `ip -brief address` here; --keep-going lets the command run on.",
            )
        return MingleError.explain(
            f"{what}.",
            cause="the command failed there; or, if the connection broke, that machine, its link or its mingle-run is "
            "gone, or the network between the two",
            remedy="see the output of that machine; --keep-going lets the commands of the others run on.",
        )

    def places(self) -> list[Peer]:
        """Return the address of each machine and the port of its program, in order of node rank.

        Raises:
            MingleError: node 0 is gone, or does not answer.
        """
        if (host := self.host) is not None:
            return addresses.places_of(self._formation, self.ask(host.registrar.roster))
        self.ask(self._note)
        if self._roster is None:  # the connection broke before it came
            self.call(self._ask_roster)
        until = time.monotonic() + ROSTER_SECONDS
        while self._roster is None:
            if self.trouble is not None:
                raise self.trouble
            if time.monotonic() >= until:
                raise MingleError.explain(
                    f"node 0 has not told the addresses of all machines within {ROSTER_SECONDS:g} s.",
                    cause="its mingle-run is stopped or starved of CPU, or no packets get through to it any more",
                    remedy="look at node 0's machine and output, and start again.",
                )
            self.turn(until)
        return addresses.places_of(self._formation, self._roster)

    @property
    def _formation(self) -> Formation:
        assert self.formation is not None
        return self.formation

    def _ask_roster(self) -> None:
        joiner = self._machine.joiner
        joiner.roster.ask(joiner.session)

    def pass_on(self) -> None:
        """End the session because of the trouble; the host tells the other machines."""
        trouble = self.trouble
        assert trouble is not None
        self.close("" if self._lost is None else _describe(self._lost))

    def leave(self) -> bool:
        """As a member, tell node 0 that the command has ended; return whether it has heard of it."""
        return self.host is not None or self._tell(f"{COMMAND} has ended", failed=False)

    def _tell(self, reason: str, *, failed: bool) -> bool:
        """Say good-bye until node 0 answers: the connection can be dead, and the network be cut for a moment."""
        until, membership = time.monotonic() + LEAVE_SECONDS, self.membership
        assert membership is not None

        def leave() -> None:
            membership.leave(reason, self.clock(), failed=failed)
            self._note()

        self.ask(leave)
        while self._leaving and time.monotonic() < until:
            self.turn(until)
        return bool(self.ask(lambda: membership.close_reason))

    def fail(self, how: str, *, waits: bool = True) -> None:
        """End the session with a failure of the command, which the other machines hear of.

        Args:
            how: how the command ended.
            waits: whether to wait for node 0's answer.
        """
        reason = f"{COMMAND} {how}"
        if self.host is not None:
            self.close(f"node 0 on host {self.identity.who.hostname}: {reason}")
        else:
            if waits:
                self._tell(reason, failed=True)
            self.close(reason, failed=True)


def _describe(lost: CloseStore) -> str:
    who = lost.lost
    assert who is not None
    how = f": {lost.how}" if lost.how.startswith(COMMAND) else f" is lost ({lost.how})"
    return f"{who}{how}"


def form_alone(settings: Settings) -> tuple[Formation, list[Peer]]:
    """Return the place of the only machine, and where its program is reached, without a packet."""
    with reserve(settings.master_port) as listener, hold(but=settings.master_port) as held:
        port, own = listener.getsockname()[1], held.getsockname()[1]
    formation = lone_formation(b"", port)
    return formation, [Peer(formation.store_address, own)]
