"""The rules among processes without a rank that would all host: how long to wait first, and who makes way for whom.

Only open sessions compete, and the lower host id wins. Ids are totally ordered, so moves cannot cycle; the exceptions
(a host that *stands*, because somebody can't reach the lower one) last for a while only.
"""

from __future__ import annotations

from typing import TypeGuard

from mingle.protocol.machine import Identity
from mingle.wire.datagrams import Datagram, Offer

ELECT_AFTER_SECONDS = 0.6
"""How long everybody looks for a host before the first becomes one: a few questions, so that one may be lost, and
longer than a job that runs already keeps back its next answer
(:data:`mingle.protocol.pacing.SEALED_ANSWER_GAP_SECONDS`)."""
ELECT_SPREAD_SECONDS = 0.3
"""Over how long after that they become hosts, by their member ids …"""
ELECT_SPREAD_SECONDS_PER_RANK = 0.0005
ELECT_SPREAD_MAX_SECONDS = 3.0
"""… and how much longer in a large job, where more of them could be quicker than the first one's datagram."""
STAND_SECONDS = 10.0
"""How long a host that was not reached by all of ours does not beat us; then it may have become reachable."""
# Hosts remembered; bounded against somebody who invents them.
REMEMBERED = 64


class Candidacy:
    """One process as a candidate."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._stands: dict[bytes, float] = {}
        """Hosts that don't beat us, since somebody of ours can't reach them, and until when."""

    def patience(self) -> float:
        """How long to look for a host before becoming one, in seconds: the lower the member id, the shorter."""
        spread = min(
            ELECT_SPREAD_SECONDS + ELECT_SPREAD_SECONDS_PER_RANK * self._identity.world_size, ELECT_SPREAD_MAX_SECONDS
        )
        return ELECT_AFTER_SECONDS + spread * int.from_bytes(self._identity.member[:8], "big") / 2**64

    def competes(self, message: Datagram) -> TypeGuard[Offer]:
        """Whether this is another open session of our job."""
        return (
            isinstance(message, Offer)
            and (message.job, message.attempt) == (self._identity.job, self._identity.attempt)
            and message.state == "open"
            and message.kind == self._identity.kind
            and message.host != self._identity.member
        )

    def loses_to(self, offer: Offer, *, stands: bool, now: float) -> bool:
        """Whether we make way for that host, which may have said that it ``stands`` though its id is higher."""
        # A host that was given its rank is no candidate: whoever joins it is told that ranks are mixed.
        better = offer.host < self._identity.member or stands or not offer.assigned
        return better and not self.stands_against(offer.host, now)

    def stands_against(self, host: bytes, now: float) -> bool:
        """Whether that host does not beat us at present."""
        return now < self._stands.get(host, now)

    def stand_against(self, host: bytes, now: float) -> None:
        """Somebody of ours can't reach that host: it does not beat us for a while."""
        self._stands.pop(host, None)
        if len(self._stands) >= REMEMBERED:
            del self._stands[next(iter(self._stands))]
        self._stands[host] = now + STAND_SECONDS
