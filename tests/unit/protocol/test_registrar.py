"""The registrar, rule by rule. Whole jobs run in tests/lan."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mingle.protocol.machine import roster_digest
from mingle.protocol.membership import RETURN_SECONDS
from mingle.protocol.session.admission import ACKNOWLEDGE_SECONDS, Admission
from mingle.protocol.session.applications import CHALLENGE_SECONDS
from mingle.protocol.session.network_choice import READDRESSED_SECONDS
from mingle.protocol.session.phases import Acknowledging, Committed, Confirming, Open, Sealing, State
from mingle.protocol.session.registrar import CONFIRM_AGAIN_SECONDS
from mingle.protocol.session.roster import REMEMBERED_DEPARTURES
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from mingle.wire.frame_codec import MAX_FRAME_BYTES, encode_frame
from mingle.wire.frames import Path, ProcessInfo
from tests.support.registrar_port import HOST, SESSION, Recorded, of, told


def member(number: int) -> bytes:
    return number.to_bytes(16, "big")


def join(rank: int | None, *, size: int = 3, **more: Any) -> frames.Join:
    number = 0 if rank is None else rank
    local = f"10.0.0.{number + 1}"
    fields: dict[str, Any] = {
        "node": f"node{number}",
        "who": ProcessInfo(hostname=f"h{number}", pid=10 + number, address=local),
        "paths": (Path(host_address="10.0.0.1", local_address=local, interface="eth0"),),
    }
    return frames.Join(world_size=size, rank=rank, **{**fields, **more})


class Opened(Recorded):
    """An open session, of three ranks unless it is told otherwise."""

    def __init__(self, size: int = 3, rank: int | None = 0, *, confirm_seconds: float = float("inf")) -> None:
        host = HostSeat(member=HOST, applicant=join(rank, size=size), prefix_lengths={"10.0.0.1": 24})
        super().__init__(host, Admission(size))
        self.admission.confirm_seconds = confirm_seconds

    def conn(self, number: int) -> int | None:
        """The connection of a member."""
        return self.seats[member(number)].conn

    def token(self, number: int) -> bytes:
        return self.seats[member(number)].token

    def come(self, conn: int, rank: int | None, now: float = 1.0, **more: Any) -> None:
        """Let a process that was never here ask for a seat."""
        self.join(conn, member(conn), join(rank, **more), now)

    def come_again(self, conn: int, number: int, now: float, token: bytes | None = None) -> None:
        """Let a process ask for the seat of a member, with the token of that seat unless it names another one."""
        token = self.token(number) if token is None else token
        self.join(conn, member(number), join(number, token=token), now)

    def confirm(self, *conns: int, epoch: int | None = None, reached: bool = True, now: float = 2.0) -> None:
        """Let members confirm that they have reached the host's address, or that they have not."""
        epoch = self.state.epoch if epoch is None else epoch
        for conn in conns or (1, 2):
            paths = join(conn).paths if reached else ()
            self.confirmed(conn, frames.Confirmed(session=SESSION, epoch=epoch, paths=paths), now)

    def go_on(self) -> None:
        """Let that happen which ends the present phase."""
        if self.phase is Open:
            self.come(2, 2)
        elif self.phase is Confirming:
            self.confirm()
        elif self.phase is Sealing:
            self.store_opened(self.state.epoch, 4000, "token", 3.0)
        else:
            self.acknowledged(1, 4.0)
            self.acknowledged(2, 4.0)

    def refusal(self, conn: int) -> str:
        """Return why the newcomer on a connection was refused; empty if it was not."""
        return "".join(frame.reason for frame in self.said(conn, frames.Refused))


def at(phase: type[State], **settings: Any) -> Opened:
    """A session of three that has come so far: ranks 1 and 2 come, on the connections 1 and 2."""
    registrar = Opened(**settings)
    registrar.come(1, 1)
    while registrar.phase is not phase:
        registrar.go_on()
    registrar.port.take()
    return registrar


def test_the_way_to_go() -> None:
    registrar = Opened()
    registrar.come(1, 1)
    assert (registrar.seats.missing, registrar.status().hosts) == ((2,), "h0, h1")
    token = registrar.token(1)
    assert len(token) == 16
    assert registrar.said(1, frames.Joined) == [frames.Joined(session=SESSION, epoch=0, token=token)]
    registrar.come(2, 2)
    assert registrar.status().hosts == "", "nobody is waited for"
    calls = registrar.port.take()
    assert told(calls, 1, frames.Confirm) == told(calls, 2, frames.Confirm)
    assert registrar.phase is Confirming
    registrar.confirm()
    assert of(registrar.port.take(), "open_store") == [("open_store", 1, "10.0.0.1")]
    registrar.store_opened(1, 4000, "token", 3.0)
    calls = registrar.port.take()
    first, second = (told(calls, conn, frames.Sealed)[0] for conn in (1, 2))
    assert (first.place.rank, second.place.rank) == (1, 2)
    assert first.roster_digest == roster_digest(registrar.roster())
    registrar.acknowledged(1, 4.0)
    assert (registrar.phase, registrar.port.take()) == (Acknowledging, [])
    registrar.acknowledged(2, 4.0)
    calls = registrar.port.take()
    assert told(calls, 1, frames.Go)
    assert told(calls, 2, frames.Go)
    assert of(calls, "formed")
    assert registrar.phase is Committed


@pytest.mark.parametrize("phase", [Confirming, Sealing, Acknowledging])
def test_a_loss_voids_the_epoch_and_nothing_of_it_counts_in_the_next_one(phase: type[State]) -> None:
    registrar = at(phase)
    registrar.lost(2, 5.0, "reset")
    calls = registrar.port.take()
    (void,) = told(calls, 1, frames.Void)
    assert void.epoch == 1
    assert "rank 2 on host h2 (10.0.0.3), pid 12" in void.reason
    assert of(calls, "reopened")
    assert registrar.phase is Open
    registrar.come(3, 2, 6.0)
    registrar.confirm(3)
    registrar.acknowledged(1, 7.0)
    registrar.confirm(1, epoch=1)
    registrar.store_opened(1, 1, "late", 7.0)
    assert (registrar.phase, registrar.state.epoch) == (Confirming, 2)
    registrar.confirm(1, epoch=2)
    assert registrar.phase is Sealing


def test_words_of_another_phase_or_connection_change_nothing() -> None:
    registrar = at(Confirming)
    registrar.acknowledged(1, 2.0)
    registrar.confirm(77)
    registrar.pong(77, 2.0, 5.0)
    registrar.ready(1)
    registrar.lost(77, 2.0)
    assert (registrar.phase, registrar.port.take()) == (Confirming, [])
    assert not registrar.seats[member(1)].done


@pytest.mark.parametrize("phase", [Open, Confirming, Sealing, Acknowledging, Committed])
def test_a_store_is_awaited_for_the_present_seal_alone(phase: type[State]) -> None:
    for epoch in range(4):
        registrar = at(phase)
        awaited = phase is Sealing and epoch == registrar.state.epoch
        registrar.store_opened(epoch, 4000, "token", 3.0)
        assert registrar.phase is (Acknowledging if awaited else phase)
        assert bool(registrar.port.take()) == awaited


@pytest.mark.parametrize("phase", [Open, Confirming, Acknowledging])
def test_a_held_session_decides_nothing_that_cannot_be_taken_back(phase: type[State]) -> None:
    registrar = at(phase)
    registrar.advance(3.0, held=True)
    registrar.go_on()
    assert registrar.phase is phase
    registrar.advance(5.0, held=False)
    assert registrar.phase is {Open: Confirming, Confirming: Sealing, Acknowledging: Committed}[phase]


@pytest.mark.parametrize(
    ("phase", "ends"), [(Confirming, 1.0 + 12.0), (Acknowledging, 3.0 + ACKNOWLEDGE_SECONDS)], ids=["asked", "sealed"]
)
def test_a_session_that_is_held_for_too_long_is_open_again(phase: type[State], ends: float) -> None:
    registrar = at(phase, confirm_seconds=12.0)
    registrar.advance(3.0, held=True)
    registrar.go_on()
    registrar.port.take()
    due: float | None = 0.0
    while registrar.phase is phase:
        due = registrar.next_timer()
        assert due is not None
        registrar.handle_timer(due)
    assert (due, registrar.phase) == (ends, Open)
    calls = registrar.port.take()
    assert all(told(calls, conn, frames.Void) for conn in (1, 2))
    registrar.advance(20.0, held=False)
    assert registrar.phase is Confirming


# --- who gets no seat ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "applicant", "reason"),
    [
        pytest.param(member(5), join(1, size=4), "world size", id="world size"),
        pytest.param(member(5), join(0), "rank taken", id="the host's rank"),
        pytest.param(HOST, join(1), "session", id="the host's own id: it looks further"),
    ],
)
def test_misfit_is_refused_at_once(name: bytes, applicant: frames.Join, reason: str) -> None:
    registrar = Opened()
    registrar.join(5, name, applicant, 1.0)
    assert of(registrar.port.calls, "hang_up") == [("hang_up", 5)]
    assert registrar.refusal(5) == reason
    assert registrar.seats[HOST].conn is None
    assert [reason in each for each in registrar.status().refused] == [True] * (reason != "session")


def test_a_refusal_is_forgotten_when_the_rank_comes_with_the_right_settings() -> None:
    registrar = Opened()
    registrar.come(1, 1, size=2)
    registrar.come(2, 2, size=2)
    assert len(registrar.status().refused) == 2
    registrar.come(3, 1)
    (refused,) = registrar.status().refused
    assert refused.startswith("rank 2 on ")


def test_full_session_that_assigns_ranks_refuses_and_says_who_is_there() -> None:
    registrar = Opened(2, rank=None)
    registrar.come(1, None, size=2)
    registrar.come(2, None, size=2)
    (refused,) = registrar.said(2, frames.Refused)
    assert refused.reason == "full"
    assert "host h0" in refused.detail


@pytest.mark.parametrize("phase", [Sealing, Acknowledging, Committed])
def test_a_sealed_session_takes_nobody(phase: type[State]) -> None:
    registrar = at(phase)
    registrar.come(9, 1, 5.0)
    assert registrar.refusal(9) == "running"
    registrar.come(10, 1, 5.0, kind="agents")
    assert registrar.refusal(10) == "kind", "it has nothing to wait for"


# --- a rank that is claimed by another process -----------------------------------------------------------------------


def claimed() -> Opened:
    """A session with one member, whose rank another process claims at 2.0, on connection 7."""
    registrar = at(Open)
    registrar.come(7, 1, 2.0)
    registrar.port.take()
    return registrar


def test_a_member_that_comes_back_while_its_rank_is_claimed_keeps_it() -> None:
    registrar = claimed()
    registrar.come_again(3, 1, 2.5)
    assert registrar.refusal(7) == "rank taken"
    assert registrar.next_timer() is None
    registrar.handle_timer(2.0 + CHALLENGE_SECONDS)
    assert (registrar.port.take(), registrar.conn(1)) == ([], 3)


def test_a_silent_member_loses_its_rank_and_the_first_claim_wins() -> None:
    registrar = claimed()
    registrar.come(8, 1, 2.1)
    assert registrar.next_timer() == 2.0 + CHALLENGE_SECONDS
    registrar.port.take()
    registrar.handle_timer(2.1 + CHALLENGE_SECONDS)
    calls = registrar.port.take()
    assert ("hang_up", 1) in calls
    assert told(calls, 7, frames.Joined)
    assert told(calls, 7, frames.Ping), "the second claim is one on the first claimant now"
    assert registrar.status().joined == 2


def test_a_late_answer_to_another_question_keeps_no_seat() -> None:
    """Its process can have been killed while the answer was under way."""
    registrar = claimed()
    registrar.lost(7, 2.1)
    registrar.come(8, 1, 2.2)
    registrar.port.take()
    registrar.pong(1, 2.19, 2.3)
    assert not registrar.port.take()
    registrar.lost(1, 2.4)
    assert registrar.conn(8) == 8


def test_a_connection_claims_one_rank_at_a_time() -> None:
    """Its last JOIN counts: refused for the first rank, it must not hold a seat on a connection that is hung up."""
    registrar = claimed()
    registrar.come(7, 2, 2.0)
    registrar.pong(1, 2.0, 5.0)
    assert ("hang_up", 7) not in registrar.port.take()
    assert registrar.conn(7) == 7
    assert not registrar.status().refused


def test_a_claim_goes_with_its_connection() -> None:
    registrar = claimed()
    registrar.lost(7, 2.1)
    assert registrar.next_timer() is None
    registrar.handle_timer(9.0)
    assert member(1) in registrar.seats


def test_a_claim_is_refused_at_go() -> None:
    registrar = at(Confirming)
    registrar.come(7, 1, 2.0)
    while registrar.phase is not Committed:
        registrar.go_on()
    assert registrar.refusal(7) == "running"
    registrar.handle_timer(2.0 + CHALLENGE_SECONDS)
    assert registrar.conn(1) == 1


# --- a member that comes back, and its token -------------------------------------------------------------------------

STRANGER = 66
"""The connection of a process that knows a member's id, and not its token."""


def test_a_member_that_comes_back_replaces_its_old_connection() -> None:
    registrar = at(Confirming)
    token = registrar.token(1)
    registrar.come_again(11, 1, 3.0)
    calls = registrar.port.take()
    assert ("hang_up", 1) in calls
    assert [frame.token for frame in told(calls, 11, frames.Joined)] == [token]
    assert told(calls, 2, frames.Void)
    assert told(calls, 11, frames.Confirm)[0].epoch == 2
    # The end of the old connection, when it is noticed, is nobody's loss.
    registrar.lost(1, 3.1)
    assert len(registrar.seats) == 3


def test_every_seat_has_a_token_of_its_own_also_if_the_same_process_had_it_before() -> None:
    registrar = at(Confirming)
    token = registrar.token(1)
    assert token != registrar.token(2)
    registrar.lost(1, 4.0)
    registrar.come_again(12, 1, 5.0, token)
    assert registrar.token(1) not in (token, b"")


@pytest.mark.parametrize("noticed", [False, True])
def test_a_member_that_comes_back_is_told_that_the_epoch_it_may_have_acknowledged_was_voided(noticed: bool) -> None:
    registrar = at(Acknowledging)
    registrar.acknowledged(1, 2.5)
    token = b"" if noticed else registrar.token(1)
    if noticed:
        registrar.lost(1, 3.0)
    registrar.lost(2, 3.0)
    assert registrar.phase is Open
    registrar.port.take()
    registrar.come_again(11, 1, 3.1, token)
    joined, void = (call[2] for call in registrar.port.take() if call[:2] == ("send", 11))
    assert (type(joined), type(void)) == (frames.Joined, frames.Void)
    assert void.epoch == joined.epoch == 1


@pytest.mark.parametrize("token", [b"", b"?" * 16], ids=["none", "another"])
@pytest.mark.parametrize("phase", [Open, Confirming])
def test_a_member_id_without_its_token_takes_no_seat_from_a_living_member(phase: type[State], token: bytes) -> None:
    registrar = at(phase)
    epoch = registrar.state.epoch
    registrar.come_again(STRANGER, 1, 2.0, token)
    assert registrar.port.take() == [("send", 1, frames.Ping())]
    registrar.pong(STRANGER, 2.0, 5.0)
    registrar.left(STRANGER, 2.1, "forged")
    registrar.come_again(STRANGER + 1, 1, 2.2, token)
    registrar.pong(1, 2.2, 5.0)
    assert registrar.refusal(STRANGER + 1) == "session"
    assert (registrar.conn(1), registrar.state.epoch) == (1, epoch)


@pytest.mark.parametrize("noticed", [False, True], ids=["silent", "closed"])
def test_a_member_that_never_heard_its_token_gets_the_seat_of_its_dead_connection(noticed: bool) -> None:
    registrar = at(Confirming)
    registrar.come_again(11, 1, 3.0, b"")
    if noticed:
        registrar.lost(1, 3.1, "ECONNRESET")
    else:
        registrar.handle_timer(3.0 + CHALLENGE_SECONDS)
        assert ("hang_up", 1) in registrar.port.calls
    assert registrar.conn(1) == 11
    assert registrar.said(11, frames.Joined)


@pytest.mark.parametrize("lost", [False, True], ids=["connected", "coming back"])
def test_after_go_only_the_token_brings_a_member_back(lost: bool) -> None:
    registrar = at(Committed)
    if lost:
        registrar.lost(1, 10.0)
    registrar.come_again(STRANGER, 1, 11.0, b"")
    assert registrar.refusal(STRANGER) == "running"
    registrar.left(STRANGER, 11.0, "forged")
    registrar.ready(STRANGER)
    registrar.come_again(12, 1, 12.0)
    assert registrar.said(12, frames.Go)
    assert not registrar.seats.all_ready


# --- losses after GO -------------------------------------------------------------------------------------------------


def test_member_that_does_not_return_before_ready_is_lost() -> None:
    registrar = at(Committed)
    registrar.ready(1)
    registrar.lost(1, 10.0)
    registrar.lost(2, 10.0)
    assert not registrar.seats.all_left
    registrar.handle_timer(10.0 + RETURN_SECONDS)
    ((_, lost, how),) = of(registrar.port.take(), "member_lost")
    assert (lost.rank, how) == (2, "its connection closed")
    assert registrar.seats.all_left
    assert registrar.next_timer() is None


def test_member_that_has_returned_after_go_is_not_lost() -> None:
    registrar = at(Committed)
    registrar.lost(1, 10.0)
    registrar.come_again(11, 1, 11.0)
    registrar.port.take()
    assert registrar.next_timer() is None
    registrar.handle_timer(10.0 + RETURN_SECONDS)
    assert not registrar.port.take()
    registrar.lost(11, 20.0)
    registrar.handle_timer(20.0 + RETURN_SECONDS)
    assert of(registrar.port.take(), "member_lost")


def test_good_bye_after_go_is_a_loss_at_once_without_ready_alone() -> None:
    registrar = at(Committed)
    registrar.ready(1)
    registrar.left(1, 10.0, "done")
    assert not registrar.port.take()
    assert not registrar.seats.all_left
    registrar.left(2, 10.0, "gave up")
    assert [(who.rank, how) for _, who, how in of(registrar.port.take(), "member_lost")] == [(2, "gave up")]
    assert registrar.seats.all_left


# --- acknowledgements that are late ----------------------------------------------------------------------------------


@pytest.mark.parametrize("proving", [True, False])
def test_only_a_member_that_still_tries_to_reach_the_store_has_more_time_for_its_ack(proving: bool) -> None:
    """Torch looks up a name there, which can take longer. After a failed attempt another network may be needed."""
    registrar = at(Acknowledging)
    registrar.acknowledged(1, 4.0)
    ask_at, ends = 3.0 + ACKNOWLEDGE_SECONDS / 2, 3.0 + ACKNOWLEDGE_SECONDS
    assert registrar.next_timer() == ask_at
    registrar.handle_timer(ask_at)
    assert registrar.port.take() == [("send", 2, frames.Ping())]
    registrar.pong(2, ask_at, ask_at + 0.1, proving=proving)
    registrar.handle_timer(ends - 0.1)
    assert registrar.phase is Acknowledging
    registrar.port.take()
    if proving:
        registrar.handle_timer(ends)
        assert registrar.phase is Acknowledging
        ends = ask_at + 0.1 + ACKNOWLEDGE_SECONDS  # silent since
    registrar.handle_timer(ends)
    (void,) = registrar.said(1, frames.Void)
    assert "rank 2" in void.reason
    assert "rank 1" not in void.reason
    assert (registrar.phase, registrar.state.epoch) == (Confirming, 2)


@pytest.mark.parametrize("gone", [False, True], ids=["it is there", "it has gone"])
def test_go_waits_for_the_word_of_members_that_can_have_gone_since_they_acknowledged(gone: bool) -> None:
    """A host that was stopped reads an acknowledgement before it sees that the member's connection has ended."""
    registrar = at(Acknowledging)
    registrar.acknowledged(1, 3.1)
    late = 3.0 + RETURN_SECONDS
    registrar.acknowledged(2, late)
    assert registrar.port.take() == [("send", 1, frames.Ping()), ("send", 2, frames.Ping())]
    registrar.pong(1, late - 1.0, late + 0.1)  # the answer to an earlier question
    registrar.pong(2, late, late + 0.1)
    assert registrar.phase is Acknowledging
    if gone:
        registrar.lost(1, late + 0.2)
        assert registrar.phase is Open
    else:
        registrar.pong(1, late, late + 0.2)
        assert registrar.phase is Committed


# --- members that share no address of the host -----------------------------------------------------------------------


def test_paths_that_failed_for_a_moment_end_no_job() -> None:
    """A host that stands still for a second proves no path, and each member has one by which it came."""
    registrar = at(Confirming)
    registrar.confirm(1)
    registrar.confirm(2, reached=False)
    due = registrar.next_timer()
    assert due == 2.0 + CONFIRM_AGAIN_SECONDS
    registrar.handle_timer(due - 0.1)
    assert not registrar.port.take()
    registrar.handle_timer(due)
    assert [told(registrar.port.calls, conn, frames.Confirm)[0].epoch for conn in (1, 2)] == [2, 2]
    registrar.confirm()
    calls = registrar.port.take()
    assert of(calls, "open_store") == [("open_store", 2, "10.0.0.1")]
    assert not of(calls, "end_without_network")


def test_members_without_a_common_network_are_asked_for_a_while_after_the_addresses_have_changed() -> None:
    registrar = at(Confirming)
    registrar.seats.readdress(replace(registrar.seats.host, readdressed_at=1.9))
    now: float | None = 2.0
    while now is not None:
        asked_at = now
        registrar.handle_timer(now)
        registrar.confirm(1, now=now)
        registrar.confirm(2, reached=False, now=now)
        now = registrar.next_timer()
    assert 1.9 + READDRESSED_SECONDS <= asked_at <= 1.9 + READDRESSED_SECONDS + CONFIRM_AGAIN_SECONDS
    assert of(registrar.port.calls, "end_without_network")


def test_the_status_fits_into_a_frame_whatever_members_call_themselves() -> None:
    registrar = Opened(size=5000)
    loud = ProcessInfo(hostname="\U0001f600" * 64, pid=1, address="10.0.0.1")
    for number in range(1, 60):
        registrar.come(number, number, size=5000, who=loud)
        registrar.lost(number, 1.0, "\U0001f600" * 2048)
        registrar.come(number, 0, size=5000, who=loud)
    status = registrar.status()
    assert len(status.left) == len(status.refused) == REMEMBERED_DEPARTURES
    assert len(encode_frame(status)) <= MAX_FRAME_BYTES
