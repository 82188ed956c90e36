"""Random schedules without ranks. A failing seed is replayed by ``python -m tests.lan elect --replay SEED``."""

from __future__ import annotations

import functools

import pytest
from msgspec import structs

from mingle.protocol import election
from mingle.protocol import host as host_module
from mingle.protocol.connection_race import ConnectionRace
from mingle.protocol.election import Attendance, Candidate, Elector
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from mingle.wire.datagrams import Offer
from tests.lan import gathering
from tests.lan.election_schedules import ElectionSchedule
from tests.lan.planted import ReusesVoidedEpochs, SealsWithoutConfirm
from tests.lan.seeds import failures, search
from tests.support.levels import batches

SEARCHED = 50
"""More than twice as many schedules as it takes to find the rarest of the planted bugs (19)."""


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(10, 150, soak=5_000, size=35))
def test_random_schedules(seeds: range) -> None:
    assert list(failures(ElectionSchedule, seeds)) == []


class ClosesWithoutProof(Elector):
    """Closes for a lower id as soon as it has heard of it."""

    def _call(self, offer: Offer, now: float, *, interface: str = "", sender: str = "") -> None:
        if self._competing() is not None and self._candidacy.loses_to(offer):
            self._end_host("it closes for another host", offer)
            self.joiner.look_again(offer, interface, now)
        else:
            super()._call(offer, now, interface=interface, sender=sender)


class GoesOnAfterClosed(Elector):
    """Says CLOSED and keeps its session."""

    def _close_for(self, session: KnownSession, now: float) -> None:
        host = self.host
        assert host is not None
        state = host.state
        super()._close_for(session, now)
        host.state, self.host = state, host


class HearsNoAnswer(Elector):
    """Wins although another host says that it can't reach this one."""

    def on_frame(self, session: KnownSession, frame: frames.AnyFrame, now: float) -> None:
        if not isinstance(frame, frames.Unreachable):
            super().on_frame(session, frame, now)


class GivesNoAnswer(Elector):
    """Does not say that it can't reach the winner."""

    def on_unreached(self, session: KnownSession, race: ConnectionRace, now: float) -> None:
        pass


class WaitsForTheCount(Elector):
    """Waits until it has heard as many processes as the job has."""

    def _watch(self, now: float) -> None:
        super()._watch(now)
        if self._elect_at is not None and not self._attendance.complete(now):
            self._elect_at += 1.0


class BeginsAnewForEachQuestion(Elector):
    """Has the patience of its start again with each process that it hears first."""

    def _watch(self, now: float) -> None:
        heard = len(self._attendance._asked)
        if self._patient_until is not None and heard > getattr(self, "_counted", 0):
            self._counted = heard
            self._look_from(now)
        super()._watch(now)


class IgnoresLowerIds(Attendance):
    """Ends its patience although a process with a lower id is there."""

    def complete(self, now: float) -> bool:
        others = self._identity.world_size - 1
        return len([at for at in self._asked.values() if at >= now - 3.0]) >= others


class AsksAndBecomesTheHost(Elector):
    """Does not give a host the time to answer its first question."""

    def _watch(self, now: float) -> None:
        super()._watch(now)
        if self._elect_at is not None and self._attendance.complete(now):
            self._elect_at = now


class IgnoresOffers(Attendance):
    """Counts questions only, also where a host has answered one of them."""

    def complete(self, now: float) -> bool:
        self._offered_at = float("-inf")
        return super().complete(now)


class JoinsBeforeClosed(Elector):
    """Joins the first in order, and closes its own session for it only then."""

    def _close_for(self, session: KnownSession, now: float) -> None:
        host = self.host
        if host is None or session.offer.host not in host.registrar.asked_to_lead or self.joiner.session is not None:
            super()._close_for(session, now)
        else:
            self.joiner.look_again(session.offer, session.paths[0].interface, now)


class OrdersAnew(Candidate):
    """Computes its order whenever it asks for a seat."""

    def _application(self, session: KnownSession, now: float) -> frames.Join:
        application = super()._application(session, now)
        return structs.replace(application, order=application.order and bytes((1, int(now) % 7)))


LATE = "no GO 40 s after the end of the chaos|without GO 40 s after"
# Near the first seed that finds it.
FIRST = {ReusesVoidedEpochs: 9, HearsNoAnswer: 11, GivesNoAnswer: 11, IgnoresOffers: 17}


@pytest.mark.parametrize(
    ("module", "name", "bug", "finding"),
    [
        pytest.param(
            *(host_module, "Registrar", SealsWithoutConfirm, f"has sealed without a word of|{LATE}"),
            marks=pytest.mark.slow,  # the schedules with ranks look for it on every level, and sooner
        ),
        (host_module, "Registrar", ReusesVoidedEpochs, "was voided and is used again|an epoch number went back"),
        (gathering, "Elector", ClosesWithoutProof, "which has proved nothing"),
        (gathering, "Elector", GoesOnAfterClosed, "hosts a session and has asked another host"),
        (gathering, "Elector", JoinsBeforeClosed, "hosts a session and has asked another host"),
        (
            gathering,
            "Elector",
            functools.partial(Elector, make_joiner=OrdersAnew),
            "has another order than at its start",
        ),
        (gathering, "Elector", HearsNoAnswer, LATE),
        (gathering, "Elector", GivesNoAnswer, LATE),
        (gathering, "Elector", WaitsForTheCount, "has looked for a host for .* and not become one"),
        (gathering, "Elector", BeginsAnewForEachQuestion, "has looked for a host for .* and not become one"),
        (gathering, "Elector", AsksAndBecomesTheHost, "hosts 0.* s after its question"),
        (election, "Attendance", IgnoresLowerIds, "hosts early without the lowest id"),
        (election, "Attendance", IgnoresOffers, "hosts early, .* after an OFFER"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, bug: object, finding: str
) -> None:
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError, match=finding):
        search(ElectionSchedule, range(FIRST.get(bug, 0), SEARCHED), finding)
