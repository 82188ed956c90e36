"""The finder, wired to hosts in memory, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mingle.observe.finder import (
    MAX_SEEKERS,
    MAX_SESSIONS,
    SEEKER_SECONDS,
    SESSION_SECONDS,
    SETTLE_SECONDS,
    UNTRIED_SECONDS,
    Finder,
    FoundSession,
    Seeking,
    ranks_seeking,
)
from mingle.protocol.effects import Dial, Multicast
from mingle.protocol.events import Disconnected, Heard, Source, TimerDue
from mingle.protocol.links.race import DialTarget
from mingle.protocol.sessions import RETRY_SECONDS
from mingle.wire import frames
from mingle.wire.datagrams import Bye, List, Offer, Seek
from tests.support.bystanders import WHO, Wire, a_finder, a_formed_job


def an_offer(job: str = "resnet", *, address: str = "10.0.0.9", **fields: Any) -> Offer:
    given = {"session": b"S" * 16, "host": b"H" * 16, "port": 5000, "world_size": 2, **fields}
    return Offer(job=job, addresses=(address,), **given)


@pytest.fixture
def wire() -> Wire:
    return Wire()


def is_racing(finder: Finder) -> bool:
    """Return whether a session that is not proved is being tried."""
    return any(each.race is not None and not each.alive for each in finder.sessions)


def test_finder_of_a_job_asks_both_groups_as_an_observer(wire: Wire) -> None:
    finder = a_finder(wire, "resnet")
    finder.handle(TimerDue(), wire.now + 0.001)
    asked = [effect for effect in finder.effects() if isinstance(effect, Multicast)]
    assert {(type(effect.message), effect.browse) for effect in asked} == {(Seek, False), (List, True)}
    (seek,) = [effect.message for effect in asked if isinstance(effect.message, Seek)]
    assert (seek.kind, seek.rank, seek.pid) == ("observer", None, WHO.pid)


def test_finder_of_all_jobs_asks_only_the_browse_group(wire: Wire) -> None:
    finder = a_finder(wire, None)
    finder.handle(TimerDue(), wire.now)
    assert finder.effects() == [Multicast(List(member=bytes(15) + b"F"), browse=True)]


def test_finder_names_the_store_of_a_formed_job(wire: Wire) -> None:
    wire.host()
    finder = wire.look()
    wire.run(0.3)
    early = finder.settled
    wire.run(0.5)
    assert (early, finder.settled) == (False, True), "for a moment a second host may still answer"
    (session,) = finder.alive
    assert str(session.target()) == "10.0.0.1:29500"
    assert session.target().kind == "store"


def test_a_link_local_address_gets_the_zone_on_which_it_was_reached(wire: Wire) -> None:
    wire.host("resnet", "fe80::1")
    finder = wire.look("resnet", "fe80::2")
    wire.run(1)
    assert [str(each.target()) for each in finder.alive] == ["[fe80::1%eth0]:29500"]


def test_finder_waits_a_while_for_sessions_that_are_still_tried(wire: Wire) -> None:
    wire.silent = {"10.0.0.9"}
    wire.host()
    finder = wire.look()
    wire.run(SETTLE_SECONDS)
    wire.hear("10.0.0.2", an_offer(session=b"T" * 16), "10.0.0.9")
    wire.run(0.3)
    assert len(finder.alive) == 1
    assert is_racing(finder)
    assert not finder.settled, "the other session can prove itself as well"
    wire.run(UNTRIED_SECONDS)
    assert finder.settled


@pytest.mark.parametrize(
    ("silent", "problem"), [(False, "refused"), (True, "no answer within 1 s")], ids=["dead", "silent"]
)
def test_a_datagram_alone_finds_nothing(wire: Wire, silent: bool, problem: str) -> None:
    wire.silent = {"10.0.0.9"} if silent else set()
    finder = wire.look()
    wire.hear("10.0.0.2", an_offer(), "10.0.0.9")
    assert is_racing(finder) is silent
    wire.run(1.5)
    assert not is_racing(finder)
    assert not finder.settled
    assert finder.alive == []
    assert problem in finder.sessions[0].problem


def test_another_session_at_the_address_is_not_taken_for_it(wire: Wire) -> None:
    wire.host("other", "10.0.0.9")
    finder = wire.look()
    wire.hear("10.0.0.2", an_offer(), "10.0.0.9")
    assert finder.alive == []
    assert "another session" in finder.sessions[0].problem


@pytest.mark.parametrize(
    ("theirs", "ours", "problem"),
    [
        (b"right", b"right", ""),
        (b"right", b"wrong", "the host's secret is another one"),
        (b"right", None, "the host has a secret and we have none"),
        (None, b"right", "we have a secret and the host has none"),
    ],
)
def test_a_secret_must_be_the_same(wire: Wire, theirs: bytes | None, ours: bytes | None, problem: str) -> None:
    wire.host(secret=theirs)
    finder = wire.look(secret=ours)
    wire.run(1)
    assert bool(finder.alive) is not bool(problem)
    assert problem in finder.sessions[0].problem


def test_finder_of_all_jobs_with_a_secret_sees_jobs_without_one(wire: Wire) -> None:
    wire.host()
    finder = wire.look(None, secret=b"some other job's")
    wire.run(1)
    assert len(finder.alive) == 1


def test_dead_session_is_no_longer_found(wire: Wire) -> None:
    wire.host()
    finder = wire.look(refresh=0.5)
    wire.run(1)
    assert finder.settled
    wire.remove("10.0.0.1")
    wire.run(2)
    assert finder.alive == []
    assert not finder.settled


def test_a_session_that_is_proved_keeps_its_job(wire: Wire) -> None:
    host = wire.host()
    finder = wire.look(None)
    wire.run(2)
    wire.hear("10.0.0.2", msgspec.structs.replace(host.host.offer(), job="invented"), "10.0.0.66")
    assert [(each.offer.job, each.alive) for each in finder.sessions] == [("resnet", True)]


def test_a_signed_offer_is_not_replaced_by_one_without_a_signature() -> None:
    finder = a_finder(Wire(), "resnet", secret=b"ours")
    told = Source(interface="eth0", address="10.0.0.9", signed=True, verified=True)
    finder.handle(Heard(an_offer(), told), 0.0)
    finder.handle(Heard(an_offer(address="10.0.0.66"), Source(interface="eth0", address="10.0.0.66")), 0.1)
    (found,) = finder.sessions
    assert found.offer.addresses == ("10.0.0.9",)
    finder.close()


def test_a_good_bye_is_looked_into(wire: Wire) -> None:
    host = wire.host()
    finder = wire.look()
    wire.run(2)
    wire.hear("10.0.0.2", Bye(job="resnet", session=host.host.offer().session), "10.0.0.66")
    assert len(finder.alive) == 1, "somebody lied"
    wire.run(1)
    wire.remove("10.0.0.1")
    wire.hear("10.0.0.2", Bye(job="resnet", session=host.host.offer().session), "10.0.0.1")
    assert finder.alive == []


def test_a_host_that_proves_itself_and_then_says_nothing_is_given_up(wire: Wire) -> None:
    host = a_formed_job(wire, "resnet", "10.0.0.1")

    host.host.caller_proved = lambda _caller, _now: None  # type: ignore[method-assign]
    wire.add("10.0.0.1", host, 5000)
    finder = wire.look()
    wire.run(1)
    assert is_racing(finder)
    wire.run(1.5)
    assert finder.alive == []
    assert "said nothing" in finder.sessions[0].problem


def test_other_jobs_and_seekers_are_remembered_for_the_report(wire: Wire) -> None:
    finder = wire.look()
    wire.hear("10.0.0.2", an_offer("resnext"), "10.0.0.9")
    seek = Seek(job="resnet", member=b"M" * 16, world_size=2, rank=1, hostname="worker", pid=9)
    wire.hear("10.0.0.2", seek, "10.0.0.7")
    wire.hear("10.0.0.2", msgspec.structs.replace(seek, member=b"N" * 16, kind="observer"), "10.0.0.8")
    wire.hear("10.0.0.2", msgspec.structs.replace(seek, member=bytes(15) + b"F"), "10.0.0.2")  # its own comes back
    assert list(finder.diagnostics.other_jobs) == ["resnext"]
    assert [str(each) for each in finder.seekers.values()] == ["rank 1 on host worker (10.0.0.7), pid 9"]
    assert finder.sessions == []


def test_inventions_one_after_the_other_do_not_hold_up_who_has_found_a_host(wire: Wire) -> None:
    wire.silent = {"10.0.0.66"}
    finder = wire.look()
    wire.host()
    for number in range(round((SETTLE_SECONDS + UNTRIED_SECONDS) / 0.1) + 1):
        wire.hear("10.0.0.2", an_offer(session=number.to_bytes(16, "big"), address="10.0.0.66"), "10.0.0.66")
        wire.run(0.1)
    assert is_racing(finder)
    assert finder.settled
    assert [each.target().address for each in finder.alive] == ["10.0.0.1"]


def test_repeated_offers_and_good_byes_do_not_set_the_rate_of_dials(wire: Wire) -> None:
    finder = a_finder(wire, "resnet")
    dials = 0
    for number in range(100):
        message = Bye(job="resnet", session=b"S" * 16) if number % 2 else an_offer()
        finder.handle(Heard(message, Source(interface="eth0", address="10.0.0.9")), wire.now)
        for effect in finder.effects():
            if isinstance(effect, Dial):
                dials += 1
                finder.handle(Disconnected(effect.conn, "refused"), wire.now)
        wire.now += RETRY_SECONDS / 50
    assert dials <= 3


def test_closing_hangs_up_on_all(wire: Wire) -> None:
    wire.silent = {"10.0.0.9"}
    finder = wire.look()
    wire.hear("10.0.0.2", an_offer(), "10.0.0.9")
    raced = is_racing(finder)
    finder.close()
    assert (raced, is_racing(finder)) == (True, False)
    assert len(finder.effects()) == 1


def a_seek(number: int) -> Seek:
    return Seek(job="resnet", member=number.to_bytes(16, "big"), world_size=2, rank=1)


@pytest.mark.parametrize("seconds_between", [0.0, 0.01])
def test_watching_finder_sees_the_last_seeker(wire: Wire, seconds_between: float) -> None:
    """Ranks that are restarted have new ids, and a stranger can invent them."""
    finder = wire.look(None, "10.0.0.9", refresh=1.0, forgets=True)
    for number in range(1, 2 * MAX_SEEKERS):
        wire.hear("10.0.0.9", a_seek(number), "10.0.0.1")
        wire.now += seconds_between
        assert len(finder.seekers) <= MAX_SEEKERS
    last = a_seek(2 * MAX_SEEKERS)
    wire.hear("10.0.0.9", last, "10.0.0.7")
    assert last.member in finder.seekers
    wire.run(SEEKER_SECONDS - 1)
    assert [each.address for each in finder.seekers.values() if each.address == "10.0.0.7"] == ["10.0.0.7"]
    wire.run(3)
    assert finder.seekers == {}


def test_a_seeker_that_is_heard_again_makes_room_after_those_that_are_silent(wire: Wire) -> None:
    finder = wire.look(None, forgets=True)
    first, *others = (a_seek(number) for number in range(256, 256 + MAX_SEEKERS + 1))
    for seek in (first, *others[:-1], first, others[-1]):
        wire.hear("10.0.0.2", seek, "10.0.0.1")
    assert [seek.member in finder.seekers for seek in (first, *others[:2])] == [True, False, True]


def test_watching_finder_sees_the_last_host_and_forgets_dead_ones(wire: Wire) -> None:
    finder = wire.look(None, "10.0.0.9", refresh=1.0, forgets=True)
    for number in range(MAX_SESSIONS + 50):
        session = number.to_bytes(16, "big")
        wire.hear("10.0.0.9", an_offer(session=session, address="10.0.0.66"), "10.0.0.66")
    wire.host()
    wire.run(3)
    assert [each.target().address for each in finder.alive] == ["10.0.0.1"]
    wire.run(SESSION_SECONDS)
    assert len(finder.sessions) == 1
    wire.remove("10.0.0.1")
    wire.run(1.5)
    assert (len(finder.sessions), finder.alive) == (1, [])
    wire.run(SESSION_SECONDS + 2)
    assert finder.sessions == []


def test_finder_that_reports_once_forgets_nothing(wire: Wire) -> None:
    finder = wire.look("resnet", "10.0.0.9", refresh=0.5)
    wire.hear("10.0.0.9", an_offer(), "10.0.0.66")
    wire.hear("10.0.0.9", a_seek(1), "10.0.0.7")
    wire.run(60)
    assert (len(finder.sessions), len(finder.seekers)) == (1, 1)


# --- sessions ---


def session(running: frames.Running | None, **fields: Any) -> FoundSession:
    offer = an_offer("j", **{"address": "10.0.0.1", "port": 4000, "joined": 1, "hostname": "head", "pid": 7, **fields})
    path = frames.Path(host_address="10.0.0.1", local_address="10.0.0.2", interface="eth0")
    return FoundSession(
        offer, [DialTarget("10.0.0.1", "eth0", 4000)], signed=False, probed=offer, running=running, path=path
    )


def running(**fields: object) -> frames.Running:
    given = {"state": "open", "world_size": 4, "host": frames.ProcessInfo(hostname="head", pid=7, rank=0), **fields}
    return frames.Running(**given)  # type: ignore[arg-type]


def test_the_target_is_the_control_port_until_there_is_a_store() -> None:
    assert str(session(running()).target()) == "10.0.0.1:4000"
    sealed = session(running(state="sealed", store_address="10.9.0.1", store_port=555)).target()
    assert (str(sealed), sealed.kind) == ("10.9.0.1:555", "store")


def test_the_proved_ranks_count_more_than_the_offers_number() -> None:
    assert session(None, joined=3).joined == 3
    assert session(running(joined=(0, 2)), joined=4).joined == 2
    assert session(running(), joined=3, assigned=True).joined == 3, "assigned ranks have no number yet"
    cut = session(running(joined=tuple(range(4096)), world_size=5000), joined=4500)
    assert cut.joined == 4500, "the list of ranks is cut"


def test_a_rank_that_is_seated_is_no_seeker() -> None:
    seekers = [
        Seeking(Seek(job="j", member=bytes([rank]) * 16, world_size=4, rank=rank), "10.0.0.3", False) for rank in (1, 2)
    ]
    several = [session(None), session(running(joined=(0,))), session(running(joined=(1,)))]
    seekers.append(Seeking(Seek(job="j", member=b"n" * 16, world_size=4), "10.0.0.3", False))  # its rank is assigned
    for sessions in ([session(running(joined=(0, 1)))], several):
        assert [each.seek.rank for each in ranks_seeking(seekers, sessions)] == [2, None]


def test_a_session_that_is_not_proved_says_so() -> None:
    seen = session(None)
    assert not seen.alive
    assert seen.problem == "it has not answered yet"
    assert str(seen.host()) == "host head (10.0.0.1), pid 7"
    seen.failures = {"10.0.0.1": "refused"}
    assert seen.problem == "10.0.0.1: refused"
