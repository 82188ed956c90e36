"""Random schedules without ranks. A failing seed is replayed by ``python -m tests.lan elect --replay SEED``."""

from __future__ import annotations

import pytest

from mingle.election.electing import Elector
from mingle.host import hosting
from mingle.host.hosting import Host
from mingle.rules.registrar import Registrar
from mingle.rules.seats import Phase
from mingle.wire.datagrams import Offer
from tests.lan import gathering
from tests.lan.election_schedules import ElectionSchedule
from tests.soak import repeated

SEEDS_PER_TEST = 100
PLANTED_SEEDS = 100
"""Within so many schedules each planted bug must be found."""


@pytest.mark.soak
@pytest.mark.parametrize("batch", repeated(8, soak=100))
def test_random_schedules(batch: int) -> None:
    failed = []
    for seed in range(batch * SEEDS_PER_TEST, (batch + 1) * SEEDS_PER_TEST):
        try:
            ElectionSchedule(seed).run()
        except AssertionError as problem:
            failed.append(f"python -m tests.lan elect --replay {seed}: {str(problem).splitlines()[0]}")
    assert not failed, "\n".join(failed)


def test_the_same_seed_is_the_same_day() -> None:
    days = []
    for _ in range(2):
        schedule = ElectionSchedule(8, tracing=True)
        schedule.run()
        days.append((schedule.gathering.world.steps, schedule.gathering.world.trace))
    assert days[0] == days[1]


class SealsWithoutConfirm(Registrar):
    """Asks everybody whether they are still there, and does not wait for the answers."""

    def _advance(self, now: float) -> None:
        super()._advance(now)
        if self.phase is Phase.CONFIRMING and not self.held:
            self._awaited.clear()
            super()._advance(now)


class ReusesVoidedEpochs(Registrar):
    """Counts an epoch only when it has come to its end."""

    voided = False

    def _void(self, reason: str, now: float) -> None:
        self.voided = self.phase is not Phase.OPEN
        super()._void(reason, now)

    def _advance(self, now: float) -> None:
        if self.voided and self.phase is Phase.OPEN and len(self.seats) == self.world_size and not self.held:
            self.voided = False
            self.epoch -= 1
        super()._advance(now)


class MovesBeforeItHasJoined(Elector):
    """Sends its members to the winner as soon as it has heard of it."""

    def _make_way(self, host: Host, offer: Offer, interface: str, now: float) -> None:
        super()._make_way(host, offer, interface, now)
        host.send_after(offer)


@pytest.mark.parametrize(
    ("module", "name", "bug", "finding"),
    [
        (hosting, "Registrar", SealsWithoutConfirm, "has sealed without a word of"),
        (hosting, "Registrar", ReusesVoidedEpochs, "was voided and is used again|an epoch number went back"),
        (gathering, "Elector", MovesBeforeItHasJoined, "sends its members where it has no seat"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, bug: type, finding: str
) -> None:
    monkeypatch.setattr(module, name, bug)

    def search() -> None:
        for seed in range(PLANTED_SEEDS):
            ElectionSchedule(seed).run()

    with pytest.raises(AssertionError, match=finding):
        search()
