"""Random schedules without ranks. A failing seed is replayed by ``python -m tests.lan elect --replay SEED``."""

from __future__ import annotations

import pytest

from mingle.protocol import host as host_module
from mingle.protocol.election import Elector
from mingle.protocol.host import Host
from mingle.protocol.machine import Source
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from mingle.wire.datagrams import Offer
from tests.lan import gathering
from tests.lan.election_schedules import ElectionSchedule
from tests.lan.planted import ReusesVoidedEpochs, SealsWithoutConfirm
from tests.levels import repeated

SEEDS_PER_TEST = 50
"""More than ten times as many schedules as it takes to find the rarest of the planted bugs (4)."""


@pytest.mark.soak
@pytest.mark.parametrize("batch", repeated(6, soak=200))
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


class MovesBeforeItHasJoined(Elector):
    """Sends its members to the winner as soon as it has heard of it."""

    def _step_down(self, host: Host, offer: Offer, source: Source, now: float) -> None:
        super()._step_down(host, offer, source, now)
        host.redirect_members(offer)


class HearsNoAnswer(Elector):
    """Tells another host to step down, and does not read what that one answers."""

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        pass


class AnswersWhereItMayNotBeHeard(Elector):
    """Tells every host that it stands on a connection of its own making."""

    def _compete(self, offer: Offer, source: Source, *, stands: bool, now: float, caller: int | None = None) -> None:
        super()._compete(offer, source, stands=stands, now=now)


@pytest.mark.parametrize(
    ("module", "name", "bug", "finding"),
    [
        (host_module, "Registrar", SealsWithoutConfirm, "has sealed without a word of"),
        (host_module, "Registrar", ReusesVoidedEpochs, "was voided and is used again|an epoch number went back"),
        (gathering, "Elector", MovesBeforeItHasJoined, "sends its members where it has no seat"),
        (gathering, "Elector", HearsNoAnswer, "no GO 40 s after the end of the chaos|without GO 40 s after"),
        (
            gathering,
            "Elector",
            AnswersWhereItMayNotBeHeard,
            "no GO 40 s after the end of the chaos|without GO 40 s after",
        ),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, bug: type, finding: str
) -> None:
    monkeypatch.setattr(module, name, bug)

    def search() -> None:
        for seed in range(SEEDS_PER_TEST):
            ElectionSchedule(seed).run()

    with pytest.raises(AssertionError, match=finding):
        search()
