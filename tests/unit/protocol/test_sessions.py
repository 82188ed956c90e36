"""The table of sessions: how many it holds, and whose connections they are."""

from __future__ import annotations

from mingle.protocol.effects import Dial, Hangup
from mingle.protocol.links.race import ADDRESS_SECONDS
from mingle.protocol.sessions import REMEMBERED_BY_SENDER, REMEMBERED_SESSIONS, RETRY_SECONDS
from tests.support.session_tables import Table, offer


def test_the_idle_one_that_was_silent_for_longest_makes_room() -> None:
    table = Table()
    racing, kept, heard, *_ = (table.added(number) for number in range(REMEMBERED_SESSIONS))
    table.race(racing)
    table.policy.kept = kept
    table.sessions.heard(heard)
    assert table.add(99) is not None
    assert len(list(table.sessions)) == REMEMBERED_SESSIONS
    for session in (racing, kept, heard):
        assert table.sessions.get(session.name) is session
    assert table.sessions.get(offer(3).session) is None


def test_sender_of_invented_sessions_leaves_room_for_others() -> None:
    table = Table()
    for number in range(2 * REMEMBERED_SESSIONS):
        if (session := table.add(number, sender="10.0.0.66")) is not None:
            table.race(session)
    assert len(list(table.sessions)) == REMEMBERED_BY_SENDER
    assert table.add(99, sender="10.0.0.9") is not None


def test_table_full_of_races_takes_no_session() -> None:
    table = Table()
    for number in range(REMEMBERED_SESSIONS):
        table.race(table.added(number))
    assert table.add(99) is None
    assert table.sessions.get(offer(99).session) is None


def test_a_connection_has_one_owner_until_it_is_hung_up() -> None:
    table = Table()
    one, other = table.added(1), table.added(2)
    table.race(one)
    table.race(other)
    conns = [effect.conn for effect in table.effects if isinstance(effect, Dial)]
    assert all(conn in table.links for conn in conns)
    assert max(conns) + 1 not in table.links
    one.hang_up()
    assert [conn in table.links for conn in conns] == [False, True]
    table.sessions.remove(other)
    assert conns[1] not in table.links


def test_all_but_the_chosen_one_are_hung_up_on() -> None:
    table = Table()
    chosen, other = table.added(1), table.added(2)
    table.race(chosen)
    table.race(other)
    (_, conn) = [effect.conn for effect in table.effects if isinstance(effect, Dial)]
    table.effects.clear()
    table.sessions.hang_up(but=chosen)
    assert other.race is None
    assert chosen.race is not None
    assert Hangup(conn) in table.effects
    table.sessions.hang_up()
    assert chosen.race is None


def test_a_race_that_was_lost_is_none_and_not_run_again_at_once() -> None:
    table = Table()
    session = table.added()
    table.race(session)
    assert session.races_to("join")
    assert not session.races_to("probe")
    table.sessions.handle_timer(ADDRESS_SECONDS)
    assert session.race is None
    assert session.retry_at == ADDRESS_SECONDS + RETRY_SECONDS
