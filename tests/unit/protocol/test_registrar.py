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
from mingle.protocol.session.registrar import CONFIRM_AGAIN_SECONDS, Registrar
from mingle.protocol.session.roster import REMEMBERED_DEPARTURES
from mingle.protocol.session.seats import HostSeat
from mingle.wire import frames
from mingle.wire.frame_codec import MAX_FRAME_BYTES, encode_frame
from mingle.wire.frames import Path, ProcessInfo, Unit
from tests.support.registrar_port import RecordingPort, of, told

SESSION = b"S" * 16
HOST = b"H" * 16


def member(number: int) -> bytes:
    return number.to_bytes(16, "big")


def path(local: str = "10.0.0.9", host: str = "10.0.0.1") -> Path:
    return Path(host_address=host, local_address=local, interface="eth0")


def join(rank: int | None, *, size: int = 3, **more: Any) -> frames.Join:
    number = 0 if rank is None else rank
    fields: dict[str, Any] = {
        "node": f"node{number}",
        "who": ProcessInfo(hostname=f"h{number}", pid=10 + number, address=f"10.0.0.{number + 1}"),
        "paths": (path(f"10.0.0.{number + 1}"),),
    }
    return frames.Join(world_size=size, rank=rank, **{**fields, **more})


class Opened(Registrar):
    """A registrar with the port of a test."""

    def __init__(self, size: int = 3, rank: int | None = 0) -> None:
        host = HostSeat(member=HOST, applicant=join(rank, size=size), prefix_lengths={"10.0.0.1": 24})
        self.port = RecordingPort()
        super().__init__(SESSION, host, self.port, self.port, Admission(size))


def phase_of(registrar: Registrar) -> type[State]:
    """The state of a session, read anew each time: a type checker takes an attribute for unchanged."""
    return type(registrar.state)


def again(registrar: Registrar, number: int) -> frames.Join:
    """The JOIN of a member that comes back."""
    return join(number, token=registrar.seats[member(number)].token)


def confirm_all(registrar: Registrar, now: float = 2.0) -> None:
    for conn in (1, 2):
        frame = frames.Confirmed(session=SESSION, epoch=registrar.state.epoch, paths=(path(f"10.0.0.{conn + 1}"),))
        registrar.confirmed(conn, frame, now)


def at(phase: type[State]) -> Opened:
    """A session of three that has come so far."""
    registrar = Opened()
    registrar.join(1, member(1), join(1), 1.0)
    if phase is Open:
        return registrar
    registrar.join(2, member(2), join(2), 1.0)
    if phase is Confirming:
        return registrar
    confirm_all(registrar)
    if phase is Sealing:
        return registrar
    registrar.store_opened(registrar.state.epoch, 4000, "token", 3.0)
    if phase is Acknowledging:
        return registrar
    registrar.acknowledged(1, 4.0)
    registrar.acknowledged(2, 4.0)
    return registrar


def test_the_way_to_go() -> None:
    registrar = Opened()
    registrar.join(1, member(1), join(1), 1.0)
    assert registrar.seats.missing == (2,)
    token = registrar.seats[member(1)].token
    assert len(token) == 16
    assert told(registrar.port.take(), 1, frames.Joined) == [frames.Joined(session=SESSION, epoch=0, token=token)]
    registrar.join(2, member(2), join(2), 1.0)
    decided = registrar.port.take()
    assert told(decided, 1, frames.Confirm) == told(decided, 2, frames.Confirm)
    assert phase_of(registrar) is Confirming
    confirm_all(registrar)
    assert of(registrar.port.take(), "open_store") == [("open_store", 1, "10.0.0.1")]
    registrar.store_opened(1, 4000, "token", 3.0)
    sealed = {conn: told(decided, conn, frames.Sealed)[0] for decided in [registrar.port.take()] for conn in (1, 2)}
    assert {conn: frame.place.rank for conn, frame in sealed.items()} == {1: 1, 2: 2}
    assert sealed[1].roster_digest == roster_digest(registrar.roster())
    registrar.acknowledged(1, 4.0)
    assert phase_of(registrar) is Acknowledging
    assert not registrar.port.take()
    registrar.acknowledged(2, 4.0)
    decided = registrar.port.take()
    assert told(decided, 1, frames.Go)
    assert told(decided, 2, frames.Go)
    assert of(decided, "formed")
    assert phase_of(registrar) is Committed


@pytest.mark.parametrize("phase", [Confirming, Sealing, Acknowledging])
def test_a_loss_voids_the_epoch_and_its_number_is_never_used_again(phase: type[State]) -> None:
    registrar = at(phase)
    registrar.port.take()
    registrar.lost(2, 5.0, "reset")
    decided = registrar.port.take()
    (void,) = told(decided, 1, frames.Void)
    assert void.epoch == 1
    assert "rank 2 on host h2 (10.0.0.3), pid 12" in void.reason
    assert of(decided, "reopened")
    assert phase_of(registrar) is Open
    registrar.join(3, member(3), join(2), 6.0)
    assert registrar.state.epoch == 2
    registrar.acknowledged(1, 7.0)
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=1, paths=()), 7.0)
    registrar.store_opened(1, 1, "late", 7.0)
    assert phase_of(registrar) is Confirming


def test_a_confirmation_of_a_voided_epoch_does_not_count_in_the_next_one() -> None:
    registrar = at(Confirming)
    registrar.lost(2, 2.0, "reset")
    registrar.join(3, member(3), join(2), 3.0)
    registrar.confirmed(3, frames.Confirmed(session=SESSION, epoch=2, paths=(path(),)), 4.0)
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=1, paths=(path(),)), 4.0)
    assert (phase_of(registrar), registrar.state.epoch) == (Confirming, 2)
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=2, paths=(path(),)), 5.0)
    assert phase_of(registrar) is Sealing


def test_words_of_another_phase_or_connection_change_nothing() -> None:
    registrar = at(Confirming)
    registrar.port.take()
    registrar.acknowledged(1, 2.0)
    registrar.confirmed(77, frames.Confirmed(session=SESSION, epoch=1, paths=()), 2.0)
    registrar.pong(77, 2.0, 5.0)
    registrar.ready(1)
    registrar.lost(77, 2.0)
    assert not registrar.port.take()
    assert phase_of(registrar) is Confirming
    assert not registrar.seats[member(1)].done


@pytest.mark.parametrize(("applicant", "reason"), [(join(1, size=4), "world size"), (join(0), "rank taken")])
def test_misfit_is_refused_at_once(applicant: frames.Join, reason: str) -> None:
    registrar = Opened()
    registrar.join(5, member(5), applicant, 1.0)
    decided = registrar.port.take()
    (refused,) = told(decided, 5, frames.Refused)
    assert refused.reason == reason
    assert of(decided, "hang_up") == [("hang_up", 5)]
    assert reason in registrar.status().refused[0]


def test_a_refusal_is_forgotten_when_the_rank_comes_with_the_right_settings() -> None:
    registrar = Opened()
    registrar.join(1, member(1), join(1, size=2), 1.0)
    registrar.join(2, member(2), join(2, size=2), 1.0)
    assert len(registrar.status().refused) == 2
    registrar.join(3, member(3), join(1), 2.0)
    (refused,) = registrar.status().refused
    assert refused.startswith("rank 2 on ")


def test_refused_claim_of_a_rank_stays_in_the_status() -> None:
    registrar = at(Open)
    registrar.join(7, member(7), join(1), 2.0)
    registrar.pong(1, 2.0, 5.0)
    registrar.lost(1, 3.0)
    registrar.join(8, member(1), join(1), 4.0)
    assert "rank taken" in registrar.status().refused[0]


def test_full_session_that_assigns_ranks_refuses_without_blaming_settings() -> None:
    registrar = Opened(2, rank=None)
    registrar.join(1, member(1), join(None, size=2), 1.0)
    registrar.join(2, member(2), join(None, size=2), 1.0)
    (refused,) = told(registrar.port.take(), 2, frames.Refused)
    assert refused.reason == "full"
    assert "host h0" in refused.detail
    assert not registrar.status().refused


def test_the_status_names_the_hosts_that_are_there_while_others_are_missing() -> None:
    registrar = Opened(size=128, rank=None)
    for number in range(1, 127):
        registrar.join(
            number, member(number), join(None, size=128, who=ProcessInfo(hostname=f"node{number // 2}")), 1.0
        )
    assert registrar.status().hosts == "h0, node0, node1, node2, node3, node4, node5, node6 and 57 more"
    registrar.join(127, member(127), join(None, size=128), 1.0)
    assert registrar.status().hosts == ""


@pytest.mark.parametrize(("unit", "numbers"), [("rank", "world_size=3"), ("node", "--nnodes=3")])
def test_a_number_that_differs_is_called_what_its_user_typed(unit: Unit, numbers: str) -> None:
    registrar = Opened(rank=None)
    registrar.join(1, member(1), join(None, size=2, who=ProcessInfo(hostname="h1", unit=unit)), 1.0)
    (refused,) = told(registrar.port.take(), 1, frames.Refused)
    assert f"the host was started with {numbers}, " in refused.detail
    assert (": world size (" in registrar.status().refused[0]) is (unit == "rank")


@pytest.mark.parametrize("phase", [Sealing, Acknowledging, Committed])
def test_a_sealed_session_takes_nobody(phase: type[State]) -> None:
    registrar = at(phase)
    registrar.port.take()
    registrar.join(9, member(9), join(1), 5.0)
    (refused,) = told(registrar.port.take(), 9, frames.Refused)
    assert refused.reason == "running"
    registrar.join(10, member(10), join(1, kind="agents"), 5.0)
    (refused,) = told(registrar.port.take(), 10, frames.Refused)
    assert refused.reason == "kind", "it has nothing to wait for"


def test_a_caller_with_the_hosts_own_id_gets_no_seat_and_looks_further() -> None:
    registrar = Opened()
    registrar.join(4, HOST, join(1), 1.0)
    (refused,) = told(registrar.port.take(), 4, frames.Refused)
    assert refused.reason == "session"
    assert registrar.seats[HOST].conn is None


def test_a_member_that_comes_back_while_its_rank_is_claimed_keeps_it() -> None:
    registrar = at(Open)
    registrar.join(7, member(7), join(1), 2.0)
    registrar.port.take()
    registrar.join(3, member(1), again(registrar, 1), 2.5)
    (refused,) = told(registrar.port.take(), 7, frames.Refused)
    assert refused.reason == "rank taken"
    registrar.port.take()
    assert registrar.next_timer() is None
    registrar.handle_timer(2.0 + CHALLENGE_SECONDS)
    assert registrar.port.take() == []
    assert registrar.seats[member(1)].conn == 3


def test_a_silent_member_loses_its_rank_and_the_first_claim_wins() -> None:
    registrar = at(Open)
    registrar.join(7, member(7), join(1), 2.0)
    registrar.join(8, member(8), join(1), 2.1)
    assert registrar.next_timer() == 2.0 + CHALLENGE_SECONDS
    registrar.port.take()
    registrar.handle_timer(2.1 + CHALLENGE_SECONDS)
    decided = registrar.port.take()
    assert ("hang_up", 1) in decided
    assert told(decided, 7, frames.Joined)
    # The second claim is one on the first claimant now.
    assert told(decided, 7, frames.Ping)
    assert registrar.status().joined == 2


@pytest.mark.parametrize("asked_at", [1.0, 2.0, 2.19])
def test_a_late_answer_to_another_question_keeps_no_seat(asked_at: float) -> None:
    """Its process can have been killed while the answer was under way."""
    registrar = at(Open)
    registrar.join(7, member(7), join(1), 2.0)
    registrar.lost(7, 2.1)
    registrar.join(8, member(8), join(1), 2.2)
    registrar.port.take()
    registrar.pong(1, asked_at, 2.3)
    assert not registrar.port.take()
    registrar.lost(1, 2.4)
    assert registrar.seats[member(8)].conn == 8


def test_a_connection_claims_one_rank_at_a_time() -> None:
    """Its last JOIN counts: refused for the first rank, it must not hold a seat on a connection that is hung up."""
    registrar = at(Open)
    registrar.join(7, member(7), join(1), 2.0)
    registrar.join(7, member(7), join(2), 2.0)
    registrar.pong(1, 2.0, 5.0)
    assert ("hang_up", 7) not in registrar.port.take()
    assert registrar.seats[member(7)].conn == 7
    assert not registrar.status().refused


def test_a_claim_goes_with_its_connection() -> None:
    registrar = at(Open)
    registrar.join(7, member(7), join(1), 2.0)
    registrar.lost(7, 2.1)
    assert registrar.next_timer() is None
    registrar.handle_timer(9.0)
    assert member(1) in registrar.seats


def test_a_member_that_comes_back_replaces_its_old_connection() -> None:
    registrar = at(Confirming)
    registrar.port.take()
    registrar.join(11, member(1), again(registrar, 1), 3.0)
    decided = registrar.port.take()
    assert ("hang_up", 1) in decided
    assert told(decided, 11, frames.Joined)
    assert told(decided, 2, frames.Void)
    assert told(decided, 11, frames.Confirm)[0].epoch == 2
    # The end of the old connection, when it is noticed, is nobody's loss.
    registrar.lost(1, 3.1)
    assert len(registrar.seats) == 3


@pytest.mark.parametrize("noticed", [False, True])
def test_a_member_that_comes_back_is_told_that_the_epoch_it_may_have_acknowledged_was_voided(noticed: bool) -> None:
    registrar = at(Acknowledging)
    registrar.acknowledged(1, 2.5)
    if noticed:
        registrar.lost(1, 3.0)
    registrar.lost(2, 3.0)
    assert type(registrar.state) is Open
    registrar.port.take()
    registrar.join(11, member(1), join(1) if noticed else again(registrar, 1), 3.1)
    said = [call[2] for call in registrar.port.take() if call[:2] == ("send", 11)]
    assert [type(frame) for frame in said] == [frames.Joined, frames.Void]
    assert said[1].epoch == said[0].epoch == 1


def test_member_that_does_not_return_before_ready_is_lost() -> None:
    registrar = at(Committed)
    registrar.ready(1)
    registrar.lost(1, 10.0)
    registrar.lost(2, 10.0)
    registrar.port.take()
    assert not registrar.seats.all_left
    registrar.handle_timer(10.0 + RETURN_SECONDS)
    ((_, lost, how),) = of(registrar.port.take(), "member_lost")
    assert (lost.rank, how) == (2, "its connection closed")
    assert registrar.seats.all_left
    assert registrar.next_timer() is None


def test_member_that_has_returned_after_go_is_not_lost() -> None:
    registrar = at(Committed)
    registrar.lost(1, 10.0)
    registrar.join(11, member(1), again(registrar, 1), 11.0)
    registrar.port.take()
    assert registrar.next_timer() is None
    registrar.handle_timer(10.0 + RETURN_SECONDS)
    assert not registrar.port.take()
    registrar.lost(11, 20.0)
    registrar.handle_timer(20.0 + RETURN_SECONDS)
    assert of(registrar.port.take(), "member_lost")


def test_good_bye_after_go_is_a_loss_at_once_without_ready_alone() -> None:
    registrar = at(Committed)
    registrar.port.take()
    registrar.ready(1)
    registrar.left(1, 10.0, "done")
    assert not registrar.port.take()
    assert not registrar.seats.all_left
    registrar.left(2, 10.0, "gave up")
    assert [(who.rank, how) for _, who, how in of(registrar.port.take(), "member_lost")] == [(2, "gave up")]
    assert registrar.seats.all_left


def test_no_acknowledgement_in_time() -> None:
    registrar = at(Acknowledging)
    registrar.acknowledged(1, 4.0)
    registrar.port.take()
    registrar.handle_timer(3.0 + ACKNOWLEDGE_SECONDS - 0.1)
    assert phase_of(registrar) is Acknowledging
    registrar.port.take()
    assert registrar.next_timer() == 3.0 + ACKNOWLEDGE_SECONDS
    registrar.handle_timer(3.0 + ACKNOWLEDGE_SECONDS)
    (void,) = told(registrar.port.take(), 1, frames.Void)
    assert "rank 2" in void.reason
    assert "rank 1" not in void.reason
    assert registrar.state.epoch == 2


def test_go_waits_for_the_word_of_members_that_can_have_gone_since_they_acknowledged() -> None:
    """A host that was stopped reads an acknowledgement before it sees that the member's connection has ended."""
    registrar = at(Acknowledging)
    registrar.acknowledged(1, 3.1)
    late = 3.0 + RETURN_SECONDS
    registrar.port.take()
    registrar.acknowledged(2, late)
    asked = registrar.port.take()
    assert not told(asked, 1, frames.Go)
    assert told(asked, 1, frames.Ping)
    assert told(asked, 2, frames.Ping)
    registrar.pong(1, late - 1.0, late + 0.1)  # the answer to an earlier question
    registrar.pong(2, late, late + 0.1)
    assert phase_of(registrar) is Acknowledging
    registrar.pong(1, late, late + 0.2)
    assert phase_of(registrar) is Committed


def test_member_that_has_gone_since_it_acknowledged_voids_the_epoch_of_a_host_that_was_stopped() -> None:
    registrar = at(Acknowledging)
    registrar.acknowledged(1, 3.0 + RETURN_SECONDS)
    registrar.acknowledged(2, 3.0 + RETURN_SECONDS)
    registrar.lost(1, 3.0 + RETURN_SECONDS)
    assert phase_of(registrar) is Open


@pytest.mark.parametrize("proving", [True, False])
def test_a_member_that_still_tries_to_reach_the_store_has_more_time_for_its_ack(proving: bool) -> None:
    """Torch looks up a name there, which can take longer. After a failed attempt another network may be needed."""
    registrar = at(Acknowledging)
    registrar.acknowledged(1, 4.0)
    registrar.port.take()
    ask_at, ends = 3.0 + ACKNOWLEDGE_SECONDS / 2, 3.0 + ACKNOWLEDGE_SECONDS
    assert registrar.next_timer() == ask_at
    registrar.handle_timer(ask_at)
    asked = registrar.port.take()
    assert not told(asked, 1, frames.Ping)
    assert told(asked, 2, frames.Ping)
    registrar.pong(2, ask_at, ask_at + 0.1, proving=proving)
    registrar.handle_timer(ends)
    assert phase_of(registrar) is (Acknowledging if proving else Confirming)
    if proving:
        registrar.handle_timer(ask_at + 0.1 + ACKNOWLEDGE_SECONDS)  # silent since
        assert phase_of(registrar) is Confirming


@pytest.mark.parametrize("phase", [Open, Confirming, Acknowledging])
def test_a_held_session_decides_nothing_that_cannot_be_taken_back(phase: type[State]) -> None:
    registrar = at(phase)
    registrar.advance(3.0, held=True)
    registrar.port.take()
    if phase is Open:
        registrar.join(2, member(2), join(2), 3.0)
        waits_in = Open
    elif phase is Confirming:
        confirm_all(registrar)
        waits_in = Confirming
    else:
        registrar.acknowledged(1, 4.0)
        registrar.acknowledged(2, 4.0)
        waits_in = Acknowledging
    assert phase_of(registrar) is waits_in
    registrar.advance(5.0, held=False)
    assert type(registrar.state) is {Open: Confirming, Confirming: Sealing, Acknowledging: Committed}[phase]


@pytest.mark.parametrize("phase", [Confirming, Acknowledging])
def test_a_session_that_is_held_for_too_long_is_open_again(phase: type[State], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "confirm_seconds", 12.0)
    registrar = at(phase)
    registrar.advance(3.0, held=True)
    if phase is Confirming:
        confirm_all(registrar)
    else:
        registrar.acknowledged(1, 4.0)
        registrar.acknowledged(2, 4.0)
    registrar.port.take()
    due: float | None = 0.0
    while phase_of(registrar) is phase:
        due = registrar.next_timer()
        assert due is not None
        registrar.handle_timer(due)
    assert due == {Confirming: 1.0 + 12.0, Acknowledging: 3.0 + ACKNOWLEDGE_SECONDS}[phase]
    decided = registrar.port.take()
    for conn in (1, 2):
        (void,) = told(decided, conn, frames.Void)
        assert "held by another session" in void.reason
    assert phase_of(registrar) is Open
    registrar.advance(20.0, held=False)
    assert phase_of(registrar) is Confirming


def test_paths_that_failed_for_a_moment_end_no_job() -> None:
    """A host that stands still for a second proves no path, and each member has one by which it came."""
    registrar = at(Confirming)
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=1, paths=(path(),)), 2.0)
    registrar.confirmed(2, frames.Confirmed(session=SESSION, epoch=1, paths=()), 2.0)
    registrar.port.take()
    registrar.handle_timer(2.0 + CONFIRM_AGAIN_SECONDS)
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=2, paths=(path(),)), 3.0)
    registrar.confirmed(2, frames.Confirmed(session=SESSION, epoch=2, paths=(path(),)), 3.0)
    calls = registrar.port.take()
    assert of(calls, "open_store") == [("open_store", 2, "10.0.0.1")]
    assert not of(calls, "end_without_network")


def test_each_time_members_share_no_address_they_are_asked_again() -> None:
    registrar = at(Confirming)
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=1, paths=()), 2.0)
    registrar.confirmed(2, frames.Confirmed(session=SESSION, epoch=1, paths=()), 2.0)
    registrar.handle_timer(2.0 + CONFIRM_AGAIN_SECONDS)
    registrar.lost(1, 3.0)
    registrar.join(1, member(1), join(1), 3.1)
    assert phase_of(registrar) is Confirming
    registrar.port.take()
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=3, paths=()), 4.0)
    registrar.confirmed(2, frames.Confirmed(session=SESSION, epoch=3, paths=()), 4.0)
    assert not of(registrar.port.take(), "end_without_network")


def test_members_without_a_common_network_are_asked_again_while_addresses_come() -> None:
    """A host and a member are plugged into a second network, the host a moment earlier: rank 2 waits there."""
    registrar = at(Confirming)
    paths = (path("10.0.0.1"), path("10.1.0.1", "10.1.0.1"))
    lengths = {"10.0.0.1": 24, "10.1.0.1": 24}
    registrar.seats.readdress(
        HostSeat(member=HOST, applicant=join(0, paths=paths), prefix_lengths=lengths, readdressed_at=1.9)
    )
    second = path("10.1.0.3", "10.1.0.1")
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=1, paths=(path(),)), 2.0)
    registrar.confirmed(2, frames.Confirmed(session=SESSION, epoch=1, paths=(second,)), 2.0)
    registrar.port.take()
    due = registrar.next_timer()
    assert due == pytest.approx(2.0 + CONFIRM_AGAIN_SECONDS)
    registrar.handle_timer(2.1)
    assert not registrar.port.take()
    registrar.handle_timer(due)
    assert [told(registrar.port.calls, conn, frames.Confirm)[0].epoch for conn in (1, 2)] == [2, 2]
    registrar.port.take()
    both = (path(), path("10.1.0.2", "10.1.0.1"))
    registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=2, paths=both), 3.0)
    registrar.confirmed(2, frames.Confirmed(session=SESSION, epoch=2, paths=(second,)), 3.0)
    assert of(registrar.port.take(), "open_store") == [("open_store", 2, "10.1.0.1")]


def test_members_without_a_common_network_are_not_asked_for_ever() -> None:
    registrar = at(Confirming)
    registrar.seats.readdress(replace(registrar.seats.host, readdressed_at=1.9))
    now = 2.0
    while True:
        registrar.port.take()
        registrar.confirmed(1, frames.Confirmed(session=SESSION, epoch=registrar.state.epoch, paths=(path(),)), now)
        registrar.confirmed(2, frames.Confirmed(session=SESSION, epoch=registrar.state.epoch, paths=()), now)
        due = registrar.next_timer()
        if due is None:
            break
        now = due
        registrar.handle_timer(now)
    assert 1.9 + READDRESSED_SECONDS <= now <= 1.9 + READDRESSED_SECONDS + CONFIRM_AGAIN_SECONDS
    ((_, nothing),) = of(registrar.port.take(), "end_without_network")
    assert nothing.matrix.splitlines()[1:] == [
        "  rank 1 on host h1 (10.0.0.2), pid 11: 10.0.0.1 through eth0",
        "  rank 2 on host h2 (10.0.0.3), pid 12: not 10.0.0.1",
    ]


@pytest.mark.parametrize("phase", [Open, Confirming, Sealing, Acknowledging, Committed])
def test_a_store_is_awaited_for_the_present_seal_alone(phase: type[State]) -> None:
    for epoch in range(4):
        registrar = at(phase)
        registrar.port.take()
        awaited = phase is Sealing and epoch == registrar.state.epoch
        registrar.store_opened(epoch, 4000, "token", 3.0)
        assert phase_of(registrar) is (Acknowledging if awaited else phase)
        assert bool(registrar.port.take()) == awaited


def test_the_status_fits_into_a_frame_whatever_members_call_themselves() -> None:
    registrar = Opened(size=5000)
    loud = ProcessInfo(hostname="\U0001f600" * 64, pid=1, address="10.0.0.1")
    for number in range(1, 60):
        registrar.join(number, member(number), join(number, size=5000, who=loud), 1.0)
        registrar.lost(number, 1.0, "\U0001f600" * 2048)
        registrar.join(number, member(number), join(0, size=5000, who=loud), 1.0)
    status = registrar.status()
    assert len(status.left) == len(status.refused) == REMEMBERED_DEPARTURES
    assert len(encode_frame(status)) <= MAX_FRAME_BYTES


# --- a seat and its token ------------------------------------------------------------------------------------------

STRANGER = 66
"""The connection of a process that knows a member's id, and not its token."""


@pytest.mark.parametrize("token", [b"", b"?" * 16], ids=["none", "another"])
@pytest.mark.parametrize("phase", [Open, Confirming])
def test_a_member_id_without_its_token_takes_no_seat_from_a_living_member(phase: type[State], token: bytes) -> None:
    registrar = at(phase)
    epoch = registrar.state.epoch
    registrar.port.take()
    registrar.join(STRANGER, member(1), join(1, token=token), 2.0)
    assert [call[:2] for call in registrar.port.take()] == [("send", 1)]  # a PING
    registrar.pong(STRANGER, 2.0, 5.0)
    registrar.left(STRANGER, 2.1, "forged")
    registrar.join(STRANGER + 1, member(1), join(1, token=token), 2.2)
    registrar.pong(1, 2.2, 5.0)
    (refused,) = told(registrar.port.take(), STRANGER + 1, frames.Refused)
    assert refused.reason == "session"
    assert (registrar.seats[member(1)].conn, registrar.state.epoch) == (1, epoch)


def test_a_caller_without_the_token_is_no_rank_with_contradicting_settings() -> None:
    """Refusals are named as a likely cause, and this one tells nothing of the job's settings."""
    registrar = at(Open)
    registrar.join(STRANGER, member(1), join(1), 2.0)
    registrar.pong(1, 2.0, 5.0)
    assert told(registrar.port.take(), STRANGER, frames.Refused)
    assert registrar.status().refused == ()


def test_a_member_that_never_heard_its_token_gets_the_seat_of_its_dead_connection() -> None:
    registrar = at(Confirming)
    registrar.join(11, member(1), join(1), 3.0)
    registrar.port.take()
    registrar.handle_timer(3.0 + CHALLENGE_SECONDS)
    decided = registrar.port.take()
    assert ("hang_up", 1) in decided
    assert told(decided, 11, frames.Joined)
    assert registrar.seats[member(1)].conn == 11


def test_returning_member_gets_its_seat_once_the_old_connection_ends() -> None:
    registrar = at(Confirming)
    registrar.join(11, member(1), join(1), 3.0)
    registrar.lost(1, 3.1, "ECONNRESET")
    assert registrar.seats[member(1)].conn == 11


@pytest.mark.parametrize("lost", [False, True], ids=["connected", "coming back"])
def test_after_go_only_the_token_brings_a_member_back(lost: bool) -> None:
    registrar = at(Committed)
    if lost:
        registrar.lost(1, 10.0)
    registrar.port.take()
    registrar.join(STRANGER, member(1), join(1), 11.0)
    (refused,) = told(registrar.port.take(), STRANGER, frames.Refused)
    assert refused.reason == "running"
    registrar.left(STRANGER, 11.0, "forged")
    registrar.ready(STRANGER)
    registrar.join(12, member(1), again(registrar, 1), 12.0)
    assert told(registrar.port.take(), 12, frames.Go)
    assert not registrar.seats.all_ready


def test_challenger_is_refused_at_go() -> None:
    registrar = at(Confirming)
    registrar.join(STRANGER, member(1), join(1), 2.0)
    confirm_all(registrar)
    registrar.store_opened(registrar.state.epoch, 4000, "token", 2.1)
    for conn in (1, 2):
        registrar.acknowledged(conn, 2.2)
    assert type(registrar.state) is Committed
    assert told(registrar.port.take(), STRANGER, frames.Refused)[0].reason == "running"
    registrar.handle_timer(2.0 + CHALLENGE_SECONDS)
    assert registrar.seats[member(1)].conn == 1


def test_every_seat_has_a_token_of_its_own_which_it_keeps() -> None:
    registrar = at(Confirming)
    token = registrar.seats[member(1)].token
    assert token != registrar.seats[member(2)].token
    registrar.port.take()
    registrar.join(11, member(1), again(registrar, 1), 3.0)
    assert told(registrar.port.take(), 11, frames.Joined)[0].token == token
    registrar.lost(11, 4.0)
    registrar.join(12, member(1), join(1, token=token), 5.0)
    assert registrar.seats[member(1)].token not in (token, b"")
