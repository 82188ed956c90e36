"""The connections of a process: what is written on them and when, and who hears what happens on them."""

from __future__ import annotations

from mingle.protocol.effects import Dial, Hangup, Reset, Write
from mingle.protocol.events import BytesReceived, Connected, ConnectionEvent, Disconnected
from mingle.protocol.links.handshake import Conversation
from mingle.protocol.links.link import MAX_NUMBER, Link, Links
from mingle.wire import frame_codec, frames


class Connections:
    """Links, and what happened on them."""

    def __init__(self) -> None:
        self.links = Links()
        self.happened: list[tuple[int, ConnectionEvent]] = []

    def link(self, conn: int, *, established: bool = True) -> Link:
        return Link(conn=conn, conversation=Conversation(None), handler=self._handle, established=established)

    def accepted(self, conn: int) -> Link:
        link = self.link(conn)
        self.links.add(link)
        self.links.take_effects()  # the preface
        return link

    def _handle(self, link: Link, event: ConnectionEvent, now: float) -> None:
        self.happened.append((link.conn, event))


def test_frames_of_one_event_are_written_in_one_piece_and_by_connection() -> None:
    connections = Connections()
    later, earlier = connections.accepted(7), connections.accepted(3)
    for link in (later, earlier, later):
        link.send(frames.Ping())
    written = connections.links.take_effects()
    assert [effect.conn for effect in written if isinstance(effect, Write)] == [3, 7]
    assert connections.links.take_effects() == []


def test_nothing_is_written_before_the_connection_stands() -> None:
    connections = Connections()
    link = connections.link(1, established=False)
    connections.links.dial(link, "10.0.0.1", 4000, "eth0")
    link.send(frames.Ping())
    assert connections.links.take_effects() == [Dial(1, "10.0.0.1", 4000, "eth0")]
    connections.links.handle(Connected(1, "10.0.0.2", "eth0"), 0.0)
    assert [type(effect) for effect in connections.links.take_effects()] == [Write]


def test_what_is_still_to_be_sent_goes_before_a_hangup_and_not_before_a_reset() -> None:
    connections = Connections()
    one, other = connections.accepted(1), connections.accepted(2)
    for link in (one, other):
        link.send(frames.Ping())
    connections.links.hang_up(one)
    connections.links.reset(other)
    one.send(frames.Ping())
    effects = connections.links.take_effects()
    assert [type(effect) for effect in effects] == [Write, Hangup, Reset]
    assert effects[1:] == [Hangup(1), Reset(2)]


def test_a_link_hears_of_its_end_once_and_of_nothing_after_it_was_hung_up() -> None:
    connections = Connections()
    ended, hung_up = connections.accepted(1), connections.accepted(2)
    connections.links.hang_up(hung_up)
    for conn in (1, 2):
        for event in (Disconnected(conn, "closed"), BytesReceived(conn, b"late")):
            connections.links.handle(event, 1.0)
    assert connections.happened == [(1, Disconnected(1, "closed"))]
    assert ended.conn not in connections.links


def numbers(links: Links) -> list[int]:
    """Return the numbers of the PINGs that are written."""
    said = b"".join(effect.data for effect in links.take_effects() if isinstance(effect, Write))
    reader = frame_codec.FrameReader(frame_codec.MAX_FRAME_BYTES)
    reader.feed(frame_codec.PREFACE + said)
    found = []
    while (frame := reader.next_frame()) is not None:
        assert isinstance(frame, frames.Ping)
        found.append(frame.number)
    return found


def test_an_answer_counts_from_the_sending_of_its_own_question() -> None:
    connections = Connections()
    link = connections.accepted(1)
    for at in (1.0, 2.0, 3.0):
        link.ping(at)
    first, second, third = numbers(connections.links)
    assert link.pong(second)
    assert link.answered_at == 2.0, "the third has no answer yet"
    assert not link.pong(first), "it comes late"
    assert not link.pong(third + 1), "nobody has asked that"
    assert link.answered_at == 2.0
    assert link.pong(third)
    assert link.answered_at == 3.0


def test_numbers_of_questions_begin_again_and_fit_into_a_ping() -> None:
    connections = Connections()
    link = connections.accepted(1)
    link.last_answered = MAX_NUMBER - 1
    for at in (1.0, 2.0):
        link.ping(at)
    last, first = numbers(connections.links)
    assert (last, first) == (MAX_NUMBER, 1)
    assert link.pong(first)
    assert link.answered_at == 2.0
