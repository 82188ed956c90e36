"""What must hold after every step, whatever the network and the people do."""

from __future__ import annotations

from mingle.protocol.host import Host
from mingle.protocol.member import Joiner
from mingle.protocol.participant import AwaitingSeal
from mingle.protocol.session.phases import Acknowledging, Committed, Confirming, Open, Sealing
from tests.lan.process import Process
from tests.lan.world import World

LATENESS_SECONDS = 0.1
"""How much later than its deadline a process may end."""


class Invariants:
    """Watches a world. Each broken promise is an AssertionError in the step that breaks it."""

    def __init__(self, world: World, *, duplicates: bool = False) -> None:
        self._world = world
        self._duplicates = duplicates
        """Whether ranks run twice on purpose: then two whole jobs may form, each not knowing the other."""
        self._epochs: dict[bytes, int] = {}
        self._used: dict[bytes, set[int]] = {}
        self._formed: set[int] = set()
        self._confirmed: set[tuple[bytes, bytes, int]] = set()
        """Of each member that has confirmed: its id, the session and the epoch."""
        self.sessions: dict[bytes, Process] = {}
        """The sessions that have formed, each with its host."""
        world.watchers.append(self.check)

    def check(self, process: Process) -> None:
        """Looks at what may have changed in a step of one process."""
        core = process.core
        assert core is not None
        self._note_confirmation(process)
        if core.host is not None:
            self._epoch_never_returns(core.host)
            self._seals_what_was_confirmed(process)
        assert not (core.outcome is not None and core.failure is not None), "both an outcome and a failure"
        if core.outcome is not None and id(process) not in self._formed:
            self._formed.add(id(process))
            self._check_outcome(process)
        if process.alive and not process.stopped and not core.finished and process.processor is None:
            late = self._world.now - process.deadline
            assert late < LATENESS_SECONDS, f"{process.name} is {late:.3f} s over its deadline"

    def _epoch_never_returns(self, host: Host) -> None:
        registrar = host.registrar
        epoch, known = registrar.state.epoch, self._epochs.get(registrar.session, 0)
        assert epoch >= known, "an epoch number went back"
        used = self._used.setdefault(registrar.session, set())
        if isinstance(registrar.state, Open):
            used.add(epoch)
        elif isinstance(registrar.state, Confirming):
            assert epoch not in used, f"epoch {epoch} was voided and is used again"
        self._epochs[registrar.session] = epoch

    def _note_confirmation(self, process: Process) -> None:
        """Remembers that the process confirms; called in each step, so that the first is seen."""
        part = process.joiner.part
        if part is not None and isinstance(part.state, AwaitingSeal):
            confirmed = (process.identity.member, part.session.name, part.epoch)
            if confirmed not in self._confirmed:
                self._confirmed.add(confirmed)
                self._check_confirmation(process)

    def _check_confirmation(self, process: Process) -> None:
        """Looks at a process in the step in which it confirms."""

    def _seals_what_was_confirmed(self, process: Process) -> None:
        registrar = process.host.registrar
        if isinstance(registrar.state, (Sealing, Acknowledging)):
            for member in [seat.member for seat in registrar.seats.members()]:
                said = (member, registrar.session, registrar.state.epoch) in self._confirmed
                assert said or member == registrar.seats.host.member, (
                    f"{process.name} has sealed without a word of {member!r}"
                )

    def _check_outcome(self, process: Process) -> None:
        outcome = process.outcome
        assert outcome is not None
        if process.hosts:
            assert outcome.session not in self.sessions
            self._check_go(process)
            self.sessions[outcome.session] = process
        host = self.sessions.get(outcome.session)
        assert host is not None, "a member has formed before its host decided"
        theirs = host.outcome
        assert theirs is not None
        assert outcome.roster_digest == theirs.roster_digest
        assert (outcome.place.world_size, outcome.place.num_nodes) == (theirs.place.world_size, theirs.place.num_nodes)
        assert outcome.store_port == theirs.store_port
        assert outcome.store_address == theirs.store_address
        where = host.host.registrar.state.places[process.identity.member]
        assert outcome.place.rank == where.rank
        if process.identity.rank is not None:
            assert outcome.place.rank == process.identity.rank
        assert outcome.address in process.machine.addresses, "its own address was never its own"
        nic = process.machine.nic(outcome.address)
        assert nic is None or nic.name == outcome.interface

    @staticmethod
    def _has_acknowledged(joiner: Joiner, session: bytes, epoch: int) -> bool:
        """Whether a member has acknowledged in this epoch of this session, also if its connection has broken since."""
        if joiner.membership is not None:
            return joiner.membership.outcome.session == session
        known = joiner.sightings.get(session)
        return known is not None and known.acknowledged is not None and known.acknowledged.epoch == epoch

    def _check_go(self, process: Process) -> None:
        registrar = process.host.registrar
        state = registrar.state
        assert isinstance(state, Committed)
        members, size = [seat.member for seat in registrar.seats.members()], registrar.seats.size
        seated = len(members)
        assert seated == size, f"GO, but {seated} of {size} members have a seat"
        places = [state.places[member] for member in members]
        assert sorted(where.rank for where in places) == list(range(size)), (
            "GO, but a rank is given twice, or not at all"
        )
        by_member = {each.identity.member: each for each in self._world.processes}
        for member in members:
            other = by_member[member]
            if other is process or not other.alive or other.failed_at is not None:
                continue
            acknowledged = self._has_acknowledged(other.joiner, registrar.session, state.epoch)
            assert acknowledged, f"GO, but {other.name} is {other.joiner.stage()}"
        if not self._duplicates:
            for other in self._world.processes:
                if other is not process and other.alive and other.hosts:
                    same = other.identity.job == process.identity.job
                    assert not (same and other.phase is Committed), "two sessions of one job run"
