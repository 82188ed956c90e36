"""The messages behind the golden packets, and the code that makes their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from unittest import mock

import msgspec

from mingle.protocol.links.handshake import Call, Conversation, HostConversation, MemberConversation
from mingle.wire import datagrams, frames
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Bye, Datagram, Failed, List, Offer, Seek
from mingle.wire.frames import AnyFrame
from tests.golden import Packet

JOB = "resnet-Ж"
SECRET = b"correct horse battery staple"
KEY = JobKey(SECRET, JOB)
MEMBER = bytes(range(0x10, 0x20))
HOST = bytes(range(0x20, 0x30))
SESSION = bytes(range(0x30, 0x40))
MEMBER_NONCE = bytes(range(0x40, 0x50))
HOST_NONCE = bytes(range(0x50, 0x60))
TOKEN = bytes(range(0x60, 0x70))
ADDRESSES = ("192.0.2.10", "2001:db8::a")
PORT = 40123

_OTHER_OFFER = Offer(
    job=JOB,
    attempt="1",
    session=bytes(range(0x80, 0x90)),
    host=bytes(range(0x10)),
    addresses=("192.0.2.20",),
    port=40125,
    world_size=4,
    joined=1,
    assigned=True,
    hostname="node-5",
    pid=99,
)
DATAGRAMS: dict[str, tuple[str, Datagram]] = {
    "seek": (
        "rank 3 of 4 looks for the host",
        Seek(job=JOB, attempt="1", member=MEMBER, world_size=4, rank=3, hostname="node-3", pid=4711),
    ),
    "seek-unreached": (
        "rank 3 of 4 hears the host and can't connect to it",
        Seek(
            job=JOB,
            attempt="1",
            member=MEMBER,
            world_size=4,
            rank=3,
            hostname="node-3",
            pid=4711,
            unreached=SESSION,
            how="192.0.2.10 no answer within 1 s",
        ),
    ),
    "offer": (
        "node-0 hosts the session, open, two of four ranks are in",
        Offer(
            job=JOB,
            attempt="1",
            session=SESSION,
            host=HOST,
            addresses=ADDRESSES,
            port=PORT,
            world_size=4,
            joined=2,
            hostname="node-0",
            pid=815,
        ),
    ),
    "bye": ("the session is over", Bye(job=JOB, attempt="1", session=SESSION)),
    "failed": (
        "rank 0 could not listen",
        Failed(
            job=JOB,
            attempt="1",
            member=HOST,
            rank=0,
            hostname="node-0",
            pid=815,
            reason="the store can't listen on 192.0.2.10:29400: Address already in use",
        ),
    ),
    "list": ("who is there?", List(job=JOB, attempt="1", member=MEMBER)),
}

_WHO = frames.ProcessInfo(hostname="node-3", pid=4711, address="192.0.2.13", rank=3)
_HOST_WHO = frames.ProcessInfo(hostname="node-0", pid=815, address="192.0.2.10", rank=0)
_PATHS = (frames.Path(host_address="192.0.2.10", local_address="192.0.2.13", interface="eth0"),)
_JOIN = frames.Join(
    world_size=4,
    rank=3,
    node="boot:9a3f/net:4026531840/pid:4026531836",
    local_rank=0,
    local_world_size=1,
    node_rank=3,
    who=_WHO,
    versions={"mingle": "1.0", "torch": "2.6"},
    paths=_PATHS,
    addresses=("127.0.0.1", "192.0.2.13"),
)
_PRESENT = tuple(msgspec.structs.replace(who, rank=None) for who in (_HOST_WHO, _WHO))
_AGENT_JOIN = frames.Join(
    world_size=4,
    node="boot:9a3f/net:4026531840/pid:4026531836",
    who=msgspec.structs.replace(_WHO, rank=None),
    kind="agents",
    paths=_PATHS,
    minimum=2,
    generation=1_700_000_000,
    clock=1_700_000_100,
    had_quorum=True,
    age=125.0,
    rounds=True,
)
_SEAT = frames.Seat(rank=3, local_rank=0, node_rank=3, hostname="node-3", address="192.0.2.13", pid=4711)
_SEALED = frames.Sealed(
    session=SESSION,
    epoch=1,
    place=frames.Place(rank=3, world_size=4, local_rank=0, local_world_size=1, node_rank=3, num_nodes=4),
    store_address="192.0.2.10",
    store_port=40124,
    store_token="a1b2c3d4",
    roster_digest=bytes(range(0x60, 0x80)),
)


@dataclass(frozen=True)
class Line:
    """One frame of a conversation, and who says it."""

    speaker: Literal["member", "host"]
    name: str
    meaning: str
    frame: AnyFrame


@dataclass(frozen=True)
class Story:
    """A conversation after its handshake."""

    call: Call
    lines: tuple[Line, ...]


def _call(purpose: frames.Purpose) -> Call:
    return Call(
        job=JOB,
        attempt="1",
        member=MEMBER,
        session=SESSION,
        purpose=purpose,
        who=_WHO,
    )


STORIES: dict[str, Story] = {
    "join": Story(
        _call("join"),
        (
            Line("member", "join", "rank 3 asks for its seat", _JOIN),
            Line("host", "joined", "it has one", frames.Joined(session=SESSION, token=TOKEN)),
            Line("host", "ping", "another process claims rank 3: are you alive?", frames.Ping(number=7)),
            Line("member", "pong", "I am", frames.Pong(number=7)),
            Line("member", "ask", "how does it stand?", frames.Ask(what="status")),
            Line(
                "host",
                "status",
                "rank 2 is missing",
                frames.Status(
                    joined=3,
                    world_size=4,
                    missing=(2,),
                    left=("rank 2 on host node-2 (192.0.2.12), pid 99: its connection closed",),
                ),
            ),
            Line("host", "confirm", "all are in", frames.Confirm(session=SESSION, epoch=1)),
            Line(
                "member",
                "confirmed",
                "still there",
                frames.Confirmed(session=SESSION, epoch=1, paths=_PATHS),
            ),
            Line("host", "sealed", "its place and the store's", _SEALED),
            Line("host", "ping again", "5 s later: are you still trying to reach it?", frames.Ping(number=8)),
            Line("member", "pong again", "I am", frames.Pong(number=8, proving=True)),
            Line("member", "ack", "the store was reached", frames.Ack(session=SESSION, epoch=1)),
            Line(
                "host",
                "void",
                "rank 2 is lost before GO",
                frames.Void(session=SESSION, epoch=1, reason="rank 2 on host node-2, pid 99 is gone"),
            ),
            Line("host", "go", "a later epoch holds", frames.Go(session=SESSION, epoch=2)),
            Line("member", "ready", "the process group stands", frames.Ready(session=SESSION)),
            Line(
                "host",
                "roster",
                "one seat of four",
                frames.Roster(
                    first=3,
                    total=4,
                    seats=(_SEAT,),
                ),
            ),
            Line("member", "leave", "done", frames.Leave(session=SESSION, reason="closed")),
            Line("host", "closed", "the session ends", frames.Closed(session=SESSION, reason="closed")),
        ),
    ),
    "refused": Story(
        _call("join"),
        (
            Line("member", "join", "a second rank 3 asks for a seat", _JOIN),
            Line(
                "host",
                "refused",
                "the seat is taken, by whom",
                frames.Refused(
                    reason="rank taken",
                    detail="rank 3 is held by a live process",
                    who=frames.ProcessInfo(hostname="node-7", pid=23, address="192.0.2.17", rank=3),
                ),
            ),
        ),
    ),
    "mesh": Story(
        _call("mesh"),
        (
            Line("member", "greet", "a large packet", frames.Greet(member=MEMBER, padding=b"\0" * 8)),
            Line("host", "greet back", "another one back", frames.Greet(member=HOST, padding=b"\0" * 8)),
        ),
    ),
    "unconnected": Story(
        _call("join"),
        (
            Line("member", "join", "rank 3 listens, too", msgspec.structs.replace(_JOIN, mesh_port=40130)),
            Line(
                "host",
                "confirm",
                "open a connection to this node, and say whether your machine blocks it",
                frames.Confirm(
                    session=SESSION,
                    epoch=1,
                    network="192.0.2.10",
                    targets=(frames.Target(member=HOST, address="192.0.2.10", port=PORT),),
                    seconds=2.0,
                    suspects=(frames.Target(member=HOST, address="192.0.2.10", port=PORT),),
                ),
            ),
            Line(
                "member",
                "confirmed",
                "it was not reached",
                frames.Confirmed(
                    session=SESSION,
                    epoch=1,
                    paths=_PATHS,
                    failures=(frames.Failure(member=HOST, how="no route", detail="No route to host (EHOSTUNREACH)"),),
                    blocked=frames.Blocked(
                        address="10.77.0.1", outgoing=True, chain="inet filter output", rule="tcp dport 45000 drop"
                    ),
                ),
            ),
            Line(
                "host",
                "sealed",
                "with mesh=warn they start, and one was not dialed",
                msgspec.structs.replace(_SEALED, unproved="that other nodes reach rank 2 is not proved"),
            ),
            Line(
                "host",
                "closed",
                "no network is left",
                frames.Closed(
                    session=SESSION,
                    reason="its nodes can't all open TCP connections",
                    conflict=True,
                    unconnected=("rank 3 does not reach rank 0: no route",),
                    cause="a wrong netmask",
                    remedy="compare the routes.",
                ),
            ),
        ),
    ),
    "election": Story(
        _call("join"),
        (
            Line("member", "join", "a process without a rank asks", msgspec.structs.replace(_JOIN, rank=None)),
            Line("member", "host-seen", "another host is there", frames.HostSeen(offer=_OTHER_OFFER)),
            Line(
                "host",
                "closed",
                "it has won; join it",
                frames.Closed(session=SESSION, reason="it closes for host node-7", offer=_OTHER_OFFER),
            ),
        ),
    ),
    "leading": Story(
        _call("join"),
        (
            Line(
                "member",
                "join",
                "node 0 asks",
                msgspec.structs.replace(_JOIN, rank=None, node_rank=0, order=bytes(5)),
            ),
            Line("host", "lead", "all have confirmed, and it is the first", frames.Lead(session=SESSION, epoch=1)),
            Line(
                "member",
                "host-seen",
                "it leads",
                frames.HostSeen(offer=msgspec.structs.replace(_OTHER_OFFER, host=MEMBER)),
            ),
        ),
    ),
    "competing": Story(
        _call("conflict"),
        (
            Line(
                "host",
                "running",
                "the session takes members",
                frames.Running(state="open", world_size=4, seconds=0.5, host=_HOST_WHO, joined=(), roster=""),
            ),
            Line(
                "member",
                "host-seen",
                "I host the job too, and have the lower id",
                frames.HostSeen(offer=msgspec.structs.replace(_OTHER_OFFER, host=MEMBER)),
            ),
            Line("host", "unreachable", "I can't reach you", frames.Unreachable(session=_OTHER_OFFER.session)),
        ),
    ),
    "nodes": Story(
        _call("join"),
        (
            Line(
                "member",
                "join",
                "a machine of mingle-run asks, and names a free port of its own",
                msgspec.structs.replace(
                    _JOIN,
                    local_rank=None,
                    local_world_size=None,
                    node_rank=None,
                    who=msgspec.structs.replace(_WHO, unit="node"),
                    program_port=20123,
                ),
            ),
            Line("member", "ask roster", "who is where?", frames.Ask(what="roster")),
            Line(
                "host",
                "roster",
                "one machine of four, with its port",
                frames.Roster(first=3, total=4, seats=(msgspec.structs.replace(_SEAT, program_port=20123),)),
            ),
        ),
    ),
    "agents": Story(
        _call("join"),
        (
            Line("member", "join", "an agent that has lost its host asks", _AGENT_JOIN),
            Line(
                "host",
                "members",
                "who is in, before SEALED",
                frames.Members(generation=1_700_000_100, present=_PRESENT),
            ),
            Line(
                "host",
                "members quorum",
                "who is in, after GO",
                frames.Members(generation=1_700_000_100, quorum=True, present=_PRESENT),
            ),
            Line(
                "host",
                "refused mesh",
                "you reach not all of us: no seat",
                frames.Refused(reason="mesh", detail="node2 does not reach node3", cause="a firewall", remedy="nft …"),
            ),
            Line(
                "host",
                "members left out",
                "who got no seat",
                frames.Members(
                    generation=1_700_000_100, quorum=True, present=_PRESENT, left_out=("node2 gets no place: …",)
                ),
            ),
            Line("host", "ping", "are you alive?", frames.Ping(number=1)),
            Line("member", "next", "I wait for my first round", frames.Next()),
            Line(
                "member",
                "next again",
                "I wait for a round, and this was my first one",
                frames.Next(generation=1_700_000_000, number=3),
            ),
            Line("host", "begin", "a round begins, and you are in it", frames.Begin(number=4, rank=1, size=3)),
            Line(
                "host",
                "begin doubts",
                "and some node ranks are doubtful",
                frames.Begin(number=4, rank=1, size=3, doubts="some nodes ask for a node rank …"),
            ),
            Line("member", "round", "a round has begun: does the session stand?", frames.Round(number=1)),
            Line("host", "round-held", "it did when you asked", frames.RoundHeld(number=1)),
            Line("host", "wanted", "another round has to follow", frames.Wanted(number=4)),
            Line("member", "done", "my workers are done", frames.Done()),
            Line(
                "member",
                "leave failed",
                "I got no round; the job goes on without me",
                frames.Leave(session=SESSION, reason="ended by RendezvousTimeoutError", failed=True),
            ),
            Line(
                "host",
                "members ending",
                "an agent has ended the job",
                frames.Members(generation=1_700_000_100, quorum=True, present=_PRESENT, ending=True),
            ),
            Line(
                "host",
                "refused version",
                "you know no rounds",
                frames.Refused(reason="version", detail="the newcomer has mingle 0.9, the host 1.0"),
            ),
            Line(
                "host",
                "closed",
                "this session is no more; look for another one",
                frames.Closed(session=SESSION, reason="too few", regather=True),
            ),
        ),
    ),
    "probe": Story(
        _call("probe"),
        (
            Line(
                "host",
                "running",
                "yes, the session lives",
                frames.Running(
                    state="running",
                    world_size=2,
                    seconds=12.5,
                    host=_HOST_WHO,
                    joined=(0, 1),
                    roster="rank 0 on host node-0 (192.0.2.10), pid 815",
                ),
            ),
        ),
    ),
}


@dataclass(frozen=True)
class Spoken:
    """What one side wrote in one go."""

    speaker: Literal["member", "host"]
    name: str
    meaning: str
    data: bytes


def conversations(story: Story, key: JobKey | None) -> tuple[MemberConversation, HostConversation]:
    """Return both sides of a story before the first byte; the host takes its nonce when HELLO comes."""
    with mock.patch("mingle.protocol.links.handshake.new_nonce", return_value=MEMBER_NONCE):
        member = MemberConversation(story.call, (ADDRESSES[0], PORT), key)
    host = HostConversation(job=JOB, attempt="1", session=SESSION, addresses=ADDRESSES, port=PORT, key=key)
    return member, host


def speak(story: Story, key: JobKey | None) -> Iterator[Spoken]:
    """Play a story with fixed nonces and yield what each side writes."""
    member, host = conversations(story, key)
    sides: dict[str, Conversation] = {"member": member, "host": host}
    with mock.patch("mingle.protocol.links.handshake.new_nonce", return_value=HOST_NONCE):
        hello = member.data_to_send()
        yield Spoken("member", "hello", "preface and HELLO", hello)
        host.receive_data(hello)
        welcome = host.data_to_send()
        yield Spoken("host", "welcome", "preface and WELCOME", welcome)
        member.receive_data(welcome)
        prove = member.data_to_send()
        yield Spoken("member", "prove", "the member's proof", prove)
        host.receive_data(prove)
    for line in story.lines:
        sides[line.speaker].send(line.frame)
        yield Spoken(line.speaker, line.name, line.meaning, sides[line.speaker].data_to_send())


def render() -> dict[str, Packet]:
    """Return all packets as this version of the code makes them; what two stories share comes once."""
    packets: dict[str, Packet] = {}
    for name, (meaning, message) in DATAGRAMS.items():
        packets[name] = {"meaning": meaning, "hex": datagrams.encode(message).hex()}
        packets[f"{name} signed"] = {"meaning": meaning, "hex": datagrams.encode(message, KEY).hex()}
    for suffix, key in (("", None), (" signed", KEY)):
        seen: set[bytes] = set()
        for name, story in STORIES.items():
            for spoken in speak(story, key):
                if spoken.data not in seen:
                    seen.add(spoken.data)
                    packets[f"{name}{suffix}/{spoken.name}"] = {
                        "meaning": f"{spoken.speaker}: {spoken.meaning}",
                        "hex": spoken.data.hex(),
                    }
    return packets
