"""Other hosts of the same job: what is proved counts, what a datagram says does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mingle.protocol.effects import Dial
from mingle.protocol.events import Disconnected, Heard, TimerDue
from mingle.protocol.links.race import ADDRESS_SECONDS
from mingle.protocol.session.conflicts import CONFLICT_SECONDS, ConflictingHosts
from mingle.protocol.sessions import RETRY_SECONDS
from mingle.protocol.sightings import SILENT_SECONDS, Sightings
from mingle.wire import frames
from mingle.wire.datagrams import State
from mingle.wire.frames import ProcessInfo
from tests.support.lone_host import Alone
from tests.support.scripted_host import HERE, OTHER, offer, running

WHO = running().host
CONFLICT = frames.Closed(session=OTHER, reason="two rank 0s", conflict=True)


class Watched(Alone):
    """A host with a given rank, and one other host that says what it is told to say."""

    @property
    def conflicts(self) -> ConflictingHosts:
        return self.host.conflicts

    @property
    def sightings(self) -> Sightings:
        return self.conflicts.sightings

    def hear(
        self, state: State = "open", now: float = 0.0, session: bytes = OTHER, sender: str = "10.0.0.9"
    ) -> list[int]:
        """Hear an OFFER; return the connections that are made for it."""
        self.node.handle(Heard(offer(session, state=state), replace(HERE, address=sender)), now)
        return [effect.conn for effect in self.done() if isinstance(effect, Dial)]

    def prove(self, says: str = "open", *, state: State = "open") -> int:
        """Hear an OFFER, whose host proves its session after a second, and says how that stands."""
        (conn,) = self.hear(state)
        self.told(conn, says, 1.0)
        return conn

    def told(self, conn: int, says: str, now: float) -> None:
        """Let the other host prove its session on a new connection, and say how that stands."""
        self.prove_other(conn, offer(OTHER), now=now)
        self.answer(conn, running(says), now=now)

    def lose(self, conn: int, now: float, reason: str = "closed") -> None:
        self.node.handle(Disconnected(conn, reason), now)


def test_a_datagram_alone_is_no_rival() -> None:
    watched = Watched()
    watched.hear()
    assert not watched.conflicts.any_alive
    assert watched.conflicts.lasting(99.0) == []
    watched.node.handle(TimerDue(), ADDRESS_SECONDS)
    assert not watched.conflicts.any_alive, "nor is the silence of its host"


def test_a_proved_rival_lasts_after_two_seconds() -> None:
    watched = Watched()
    watched.prove()
    assert watched.conflicts.any_alive
    assert watched.conflicts.lasting(1.0 + CONFLICT_SECONDS - 0.1) == []
    assert watched.conflicts.verdict_timer() == 1.0 + CONFLICT_SECONDS
    assert watched.conflicts.lasting(1.0 + CONFLICT_SECONDS) == [WHO]


def test_a_rival_that_goes_is_forgotten_and_looked_at_again_later() -> None:
    watched = Watched()
    watched.lose(watched.prove(), 2.0)
    assert not watched.conflicts.any_alive
    assert watched.hear(now=2.1) == []
    assert len(watched.hear(now=2.0 + RETRY_SECONDS)) == 1


@pytest.mark.parametrize(
    ("state", "says", "gone_at", "conceded"),
    [
        pytest.param("open", "open", 1.5, [], id="it was just there"),
        pytest.param("open", "open", 1.0 + CONFLICT_SECONDS - 0.01, [WHO], id="it fails a moment before this host"),
        pytest.param("sealed", "running", 9.0, [], id="a run that ends for another conflict"),
    ],
)
def test_a_rival_that_fails_of_the_conflict_takes_us_along(
    state: State, says: str, gone_at: float, conceded: list[ProcessInfo]
) -> None:
    watched = Watched()
    conn = watched.prove(says, state=state)
    watched.answer(conn, CONFLICT, now=gone_at)
    watched.lose(conn, gone_at)
    assert watched.conflicts.lasting(gone_at) == conceded


def test_process_that_calls_and_is_called_is_named_once() -> None:
    watched = Watched()
    watched.prove()
    watched.call(50, purpose="conflict", member=OTHER)
    assert watched.conflicts.lasting(9.0) == [WHO]
    watched.lose(50, 1.5)
    watched.call(51, purpose="conflict")
    assert len(watched.conflicts.lasting(9.0)) == 2


def test_a_sealed_session_is_waited_for() -> None:
    watched = Watched()
    (conn,) = watched.hear("sealed")
    assert watched.conflicts.any_alive, "GO must wait for the answer"
    assert [each.races_to("probe") for each in watched.sightings] == [True], "a conflict would need two open ones"
    watched.told(conn, "running", 1.0)
    assert watched.conflicts.any_alive
    assert watched.conflicts.lasting(99.0) == []
    assert watched.sightings.running == [running()]


@pytest.mark.parametrize(("says", "claims"), [("running", "open"), ("open", "sealed")])
def test_proved_state_outweighs_a_datagram(says: str, claims: State) -> None:
    watched = Watched()
    watched.prove(says, state="sealed" if says == "running" else "open")
    (again,) = watched.hear(claims, now=2.0)
    # It is asked again, and until it answers the proved word stands.
    assert bool(watched.sightings.running) is (says == "running")
    watched.told(again, says, 2.1)
    assert bool(watched.sightings.running) is (says == "running")
    assert watched.conflicts.lasting(1.0 + CONFLICT_SECONDS) == ([] if says == "running" else [WHO])


def test_a_silent_sealed_session_is_suspected_once_for_ten_seconds() -> None:
    watched, alive = Watched(), []
    for now in (tick * ADDRESS_SECONDS / 2 for tick in range(60)):
        watched.node.handle(TimerDue(), now)
        watched.hear("sealed", now)
        if watched.conflicts.any_alive:
            alive.append(now)
    assert SILENT_SECONDS - ADDRESS_SECONDS < max(alive) < SILENT_SECONDS


# --- sessions that are only claimed ----------------------------------------------------------------------------------


def held_up(watched: Watched, number: int, now: float) -> bool:
    """Whether a session that is claimed now holds this host up."""
    watched.hear("sealed", now, number.to_bytes(16, "big"), f"10.0.1.{number}")
    watched.node.handle(TimerDue(), now)
    return watched.conflicts.any_alive


def test_sealed_sessions_that_are_only_claimed_hold_nobody_up_for_longer_than_one() -> None:
    watched = Watched()
    held = [tick / 2 for tick in range(60) if held_up(watched, tick, tick / 2)]
    assert held == [tick / 2 for tick in range(20)]
    (*_, conn) = watched.hear("sealed", 30.0)
    watched.told(conn, "running", 30.0)
    assert watched.conflicts.any_alive, "what is proved counts in the midst of claims"


def test_time_without_a_claim_is_no_time_of_waiting() -> None:
    watched = Watched()
    for tick in range(10):
        (conn,) = watched.hear("sealed", 5.0 * tick, bytes([tick]) * 16, f"10.0.1.{tick}")
        watched.node.handle(TimerDue(), 5.0 * tick)
        watched.lose(conn, 5.0 * tick, "ECONNREFUSED")
        assert not watched.conflicts.any_alive
    assert held_up(watched, 99, 50.0)


def test_host_that_ends_forgets_all_rivals() -> None:
    watched = Watched()
    conn = watched.prove()
    watched.node.close("over")
    assert not watched.conflicts.any_alive
    assert conn not in watched.node.links
    assert watched.conflicts.verdict_timer() is None
