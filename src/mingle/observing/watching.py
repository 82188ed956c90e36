"""What is still there: a finder forgets nobody, somebody who watches for hours must. Pure: time is an argument."""

from __future__ import annotations

from mingle.observing.finding import Finder
from mingle.observing.sighting import Seeking, Sighting

SESSION_SECONDS = 5.0
"""How long a host that does not prove itself any more is shown: hosts answer the lobby every two seconds."""
SEEKER_SECONDS = 12.0
"""Of the seekers of a job only one answers each time, and not always the same one."""


class Watching:
    """Tells who of those that a finder has seen is still there."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self._heard: dict[bytes, tuple[object, float]] = {}

    def present(self, now: float) -> tuple[list[Sighting], list[Seeking]]:
        """Returns the sessions and the seekers that are there now."""
        sessions = [
            sighting
            for sighting in self._finder.sessions
            if self._age(sighting.offer.session, sighting.offer, now) < SESSION_SECONDS or sighting.alive
        ]
        seekers = [
            seeking
            for member, seeking in self._finder.seekers.items()
            if self._age(member, seeking, now) < SEEKER_SECONDS
        ]
        return sessions, seekers

    def _age(self, name: bytes, heard: object, now: float) -> float:
        """Returns how long ago somebody was heard; what was heard is a new object each time."""
        last = self._heard.get(name)
        if last is None or last[0] is not heard:
            self._heard[name] = last = (heard, now)
        return now - last[1]
