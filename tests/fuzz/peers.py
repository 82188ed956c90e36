"""The other ends of a machine's connections: they answer as they should, so that the machine gets far, or nearly so."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import msgspec

from mingle.protocol.links.handshake import Call, Conversation, HandshakeFailed, HostConversation, MemberConversation
from mingle.wire import frames
from mingle.wire.datagrams import Rejected
from mingle.wire.frame_codec import LENGTH_BYTES, PREFACE
from tests.golden.examples import ADDRESSES, JOB, PORT, SESSION, STORIES

from . import mutation

WORLD_SIZE = 2
_ANY = [line.frame for story in STORIES.values() for line in story.lines]


class Peer:
    """One other end. ``honest`` is the chance that a piece goes out as it should."""

    def __init__(self, conversation: Conversation, rng: random.Random, honest: float) -> None:
        self.conversation = conversation
        self._rng, self._honest = rng, honest

    def heard(self, data: bytes) -> None:
        """The machine has written to it."""
        conversation = self.conversation
        assert isinstance(conversation, (MemberConversation, HostConversation))
        with contextlib.suppress(Rejected, HandshakeFailed):
            for frame in conversation.receive_data(data):
                for answer in self.answers(frame):
                    conversation.send(answer)

    def answers(self, frame: frames.AnyFrame) -> Iterator[frames.AnyFrame]:
        """What it should answer."""
        raise NotImplementedError

    def says(self) -> bytes:
        """What it sends now: what it has to say, or something like it, or anything at all."""
        rng, data = self._rng, self.conversation.data_to_send()
        if rng.random() < self._honest:
            return data
        if rng.random() < 0.5:
            body = mutation.vary(msgspec.msgpack.encode(rng.choice(_ANY)), rng)
            return data + len(body).to_bytes(LENGTH_BYTES, "big") + body
        if data.startswith(PREFACE) or len(data) <= LENGTH_BYTES or rng.random() < 0.3:
            return mutation.damage(data, rng)
        body = mutation.vary(data[LENGTH_BYTES:], rng)
        return len(body).to_bytes(LENGTH_BYTES, "big") + body


class MemberPeer(Peer):
    """Joins a host, as rank 1, with no rank, or as an agent."""

    def __init__(self, session: bytes, rank: int | None, rng: random.Random, honest: float, *, agent: bool) -> None:
        self._who = frames.ProcessInfo(hostname="peer", pid=2, address="192.0.2.13", rank=rank)
        self._path = frames.Path(host_address=ADDRESSES[0], local_address="192.0.2.13", interface="eth0")
        call = Call(
            job=JOB,
            attempt="1",
            member=rng.randbytes(16),
            session=session,
            purpose=rng.choice(("join", "join", "join", "probe", "conflict")),
            who=self._who,
        )
        conversation = MemberConversation(call, (ADDRESSES[0], PORT))
        super().__init__(conversation, rng, honest)
        self._session, self._member = session, conversation
        self._join = frames.Join(world_size=WORLD_SIZE, rank=rank, node="peer", who=self._who, paths=(self._path,))
        if agent:
            self._join = msgspec.structs.replace(self._join, kind="agents", minimum=1, rounds=True, age=60.0)
        self._joined = False

    def heard(self, data: bytes) -> None:
        """Join once the host has proved itself."""
        super().heard(data)
        if self._member.welcome is not None and not self._joined:
            self._joined = True
            self._member.send(self._join)

    def answers(self, frame: frames.AnyFrame) -> Iterator[frames.AnyFrame]:
        """Go on as a member does."""
        if isinstance(frame, frames.Confirm):
            yield frames.Confirmed(session=frame.session, epoch=frame.epoch, paths=(self._path,))
        elif isinstance(frame, frames.Sealed):
            yield frames.Ack(session=frame.session, epoch=frame.epoch)
        elif isinstance(frame, frames.Go):
            yield frames.Ready(session=frame.session)
            if self._join.rounds:
                yield frames.Next()
        elif isinstance(frame, frames.Begin | frames.Wanted):
            again = frames.Round() if isinstance(frame, frames.Begin) else frames.Next(generation=1, number=0)
            leave = frames.Leave(session=self._session, failed=self._rng.random() < 0.5)
            yield self._rng.choice((again, again, frames.Done(), leave))
        elif isinstance(frame, frames.Ping):
            yield frames.Pong(number=frame.number)


class HostPeer(Peer):
    """Hosts the session that every OFFER of the corpus names."""

    def __init__(self, rng: random.Random, honest: float) -> None:
        conversation = HostConversation(job=JOB, attempt="1", session=SESSION, addresses=ADDRESSES, port=PORT)
        super().__init__(conversation, rng, honest)
        self._epoch = 0

    def answers(self, frame: frames.AnyFrame) -> Iterator[frames.AnyFrame]:
        """Go on as a host does."""
        if isinstance(frame, frames.Join):
            self._epoch += 1
            yield frames.Joined(session=SESSION)
            yield frames.Confirm(session=SESSION, epoch=self._epoch)
        elif isinstance(frame, frames.Confirmed):
            yield frames.Sealed(
                session=SESSION,
                epoch=frame.epoch,
                place=frames.Place(
                    rank=1, world_size=WORLD_SIZE, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2
                ),
                store_address=ADDRESSES[0],
                store_port=4567,
                store_token="token",
                roster_digest=bytes(32),
            )
        elif isinstance(frame, frames.Ack):
            yield frames.Go(session=SESSION, epoch=frame.epoch)
