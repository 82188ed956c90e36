"""Mistakes to plant in a registrar: what random schedules, some of them with strangers, have to find in it."""

from __future__ import annotations

from msgspec import structs

from mingle.protocol.phases import Confirming, Open
from mingle.protocol.registrar import Registrar
from mingle.wire import frames


class SealsWithoutConfirm(Registrar):
    """Asks everybody whether they are still there, and does not wait for the answers."""

    def _advance(self, now: float) -> None:
        super()._advance(now)
        if isinstance(self.state, Confirming) and not self.held:
            self.state.awaited.clear()
            super()._advance(now)


class ReusesVoidedEpochs(Registrar):
    """Counts an epoch only when it has come to its end."""

    voided = False

    def _void(self, event: str, reason: str, now: float) -> None:
        self.voided = not isinstance(self.state, Open)
        super()._void(event, reason, now)

    def _advance(self, now: float) -> None:
        complete = len(self.seats) == self.seats.size
        if self.voided and isinstance(self.state, Open) and complete and not self.held:
            self.voided = False
            self.state.epoch -= 1
        super()._advance(now)


class TrustsMemberIds(Registrar):
    """Gives a seat to whoever knows the member id of its holder."""

    def join(self, conn: int, member: bytes, applicant: frames.Join, now: float) -> None:
        known = self.seats.find(member)
        if known is not None:
            applicant = structs.replace(applicant, token=known.token)
        super().join(conn, member, applicant, now)
