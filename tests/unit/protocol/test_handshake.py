"""Both sides of a control connection, with a wire between them that a test may hold, cut and change."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING

import msgspec
import pytest

from mingle.protocol.links.handshake import (
    PURPOSES,
    Call,
    HandshakeFailed,
    HostConversation,
    MemberConversation,
)
from mingle.wire import frames
from mingle.wire.authentication import JobKey, session_hash
from mingle.wire.datagrams import Rejected
from mingle.wire.frame_codec import MAX_HANDSHAKE_BYTES, PREFACE, FrameReader, encode_frame
from tests import golden
from tests.golden.examples import (
    ADDRESSES,
    HOST_NONCE,
    JOB,
    KEY,
    MEMBER_NONCE,
    PORT,
    SECRET,
    SESSION,
    STORIES,
    conversations,
    speak,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mingle.wire.frames import AnyFrame

CALL = STORIES["join"].call
ANOTHER_KEY = JobKey(b"another secret", JOB)
EITHER_KEY = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "secret"])


def new_member(
    call: Call = CALL, endpoint: tuple[str, int] = (ADDRESSES[0], PORT), key: JobKey | None = None
) -> MemberConversation:
    return MemberConversation(call, endpoint, key)


def new_host(
    job: str = JOB,
    attempt: str = "1",
    session: bytes = SESSION,
    addresses: tuple[str, ...] = ADDRESSES,
    key: JobKey | None = None,
) -> HostConversation:
    return HostConversation(job=job, attempt=attempt, session=session, addresses=addresses, port=PORT, key=key)


@dataclass
class Meeting:
    """A member and a host, and what each has received."""

    member: MemberConversation
    host: HostConversation
    to_member: list[AnyFrame] = field(default_factory=list)
    to_host: list[AnyFrame] = field(default_factory=list)

    def carry(self) -> None:
        """Carries bytes to and fro until nobody has any."""
        while True:
            upward = self.member.data_to_send()
            self.to_host += self.host.receive_data(upward)
            downward = self.host.data_to_send()
            self.to_member += self.member.receive_data(downward)
            if not upward and not downward:
                return


def met(key: JobKey | None = None) -> Meeting:
    meeting = Meeting(*conversations(STORIES["join"], key))
    meeting.carry()
    return meeting


# --- golden conversations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("story", STORIES)
@EITHER_KEY
def test_golden_conversation_is_what_we_say(story: str, key: JobKey | None) -> None:
    title = story if key is None else f"{story} signed"
    known = golden.load()
    said = {each.data.hex() for each in speak(STORIES[story], key)}
    recorded = {packet["hex"] for name, packet in known.items() if name.startswith(f"{title}/")}
    assert recorded
    assert recorded <= said <= {packet["hex"] for packet in known.values()}


@EITHER_KEY
def test_golden_conversation_is_understood(key: JobKey | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingle.protocol.links.handshake.new_nonce", lambda: HOST_NONCE)
    title = "join" if key is None else "join signed"
    member, host = conversations(STORIES["join"], key)
    member.data_to_send()
    said: list[AnyFrame] = []
    for name, packet in golden.load().items():
        if name.startswith(f"{title}/"):
            hearer = host if packet["meaning"].startswith("member") else member
            said += hearer.receive_data(bytes.fromhex(packet["hex"]))
    assert said == [line.frame for line in STORIES["join"].lines]


# --- the handshake ------------------------------------------------------------------------------------------


@EITHER_KEY
def test_handshake(key: JobKey | None) -> None:
    meeting = met(key)
    hello = meeting.host.hello
    assert hello is not None
    assert (hello.member, hello.purpose, hello.who, hello.nonce) == (CALL.member, "join", CALL.who, MEMBER_NONCE)
    assert meeting.host.proved
    assert meeting.member.welcome is not None
    assert meeting.member.welcome.addresses == ADDRESSES
    assert bool(meeting.member.welcome.proof) == (key is not None)
    assert meeting.to_host == meeting.to_member == []


@EITHER_KEY
def test_member_may_speak_right_after_its_proof(key: JobKey | None) -> None:
    """What comes in one piece with the proof may be long already, and carries a MAC already."""
    member, host = conversations(STORIES["join"], key)
    host.receive_data(member.data_to_send())
    member.receive_data(host.data_to_send())
    path = frames.Path(host_address="192.0.2.10", local_address="192.0.2.13", interface="x" * 64)
    join = frames.Join(world_size=4, rank=3, node="n", paths=(path,) * 64)
    assert len(encode_frame(join)) > MAX_HANDSHAKE_BYTES
    member.send(join)
    assert host.receive_data(member.data_to_send()) == [join]


@pytest.mark.parametrize(
    "host",
    [
        pytest.param({"session": bytes(16)}, id="another session"),
        pytest.param({"job": "another"}, id="another job"),
        pytest.param({"attempt": "2"}, id="another attempt"),
    ],
)
@EITHER_KEY
def test_another_session_is_refused_and_said_so(host: dict[str, object], key: JobKey | None) -> None:
    meeting = Meeting(new_member(key=key), new_host(**host, key=key))  # type: ignore[arg-type]
    with pytest.raises(HandshakeFailed, match="looks for another session"):
        meeting.carry()
    answer = meeting.host.data_to_send()
    with pytest.raises(HandshakeFailed, match="session: another session is hosted here"):
        meeting.member.receive_data(answer)
    assert not meeting.host.proved
    assert meeting.host.hello is None


def test_host_that_claims_another_session_is_not_believed() -> None:
    meeting = Meeting(new_member(), new_host())
    meeting.host.receive_data(meeting.member.data_to_send())
    welcome = frames.Welcome(session=bytes(16), nonce=HOST_NONCE, addresses=ADDRESSES, port=PORT)
    with pytest.raises(HandshakeFailed, match="session: another session answers"):
        meeting.member.receive_data(PREFACE + encode_frame(welcome))


@pytest.mark.parametrize(
    ("member_key", "host_key", "detail"),
    [
        pytest.param(None, KEY, "the host has a secret and we have none", id="member has none"),
        pytest.param(KEY, None, "we have a secret and the host has none", id="host has none"),
        pytest.param(ANOTHER_KEY, KEY, "the host's secret is another one", id="different secrets"),
        pytest.param(JobKey(SECRET, "job"), KEY, "the host's secret is another one", id="another job's key"),
    ],
)
def test_secret_that_is_not_shared(member_key: JobKey | None, host_key: JobKey | None, detail: str) -> None:
    meeting = Meeting(new_member(key=member_key), new_host(key=host_key))
    with pytest.raises(HandshakeFailed, match="secret") as failed:
        meeting.carry()
    if refusal := meeting.host.data_to_send():
        with pytest.raises(HandshakeFailed) as failed:
            meeting.member.receive_data(refusal)
    assert str(failed.value) == f"secret: {detail}"
    assert meeting.member.welcome is None
    assert not meeting.host.proved
    assert meeting.member.data_to_send() == b"", "a member proves nothing to a host that is not believed"


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize(
    "proof_for",
    [
        pytest.param(lambda welcome: b"", id="none"),
        pytest.param(lambda welcome: bytes(32), id="zeros"),
        pytest.param(lambda welcome: KEY.mac(b"member proof", b""), id="of nothing"),
        pytest.param(lambda welcome: welcome[-32:], id="the host's own"),
    ],
)
def test_caller_without_a_proof_is_refused_and_said_so(
    proof_for: Callable[[bytes], bytes], purpose: frames.Purpose
) -> None:
    host = new_host(key=KEY)
    host.receive_data(new_member(msgspec.structs.replace(CALL, purpose=purpose), key=KEY).data_to_send())
    proof = proof_for(host.data_to_send())
    with pytest.raises(HandshakeFailed, match="secret"):
        host.receive_data(encode_frame(frames.Prove(proof=proof)))
    assert not host.proved
    assert b"secret" in host.data_to_send()


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("proof", [b"", bytes(32), KEY.mac(b"hello", b"")])
def test_host_proves_nothing_to_a_caller_that_has_not(proof: bytes, purpose: frames.Purpose) -> None:
    """Else one connection would give everybody a MAC to try guesses of the secret on."""
    host = new_host(key=KEY)
    hello = msgspec.structs.replace(CALL.hello(None), purpose=purpose, proof=proof)
    with pytest.raises(HandshakeFailed, match="secret: the caller did not prove the secret"):
        host.receive_data(PREFACE + encode_frame(hello))
    answer = FrameReader()
    answer.feed(host.data_to_send())
    assert [type(answer.next_frame()) for _ in range(2)] == [frames.Refused, NoneType]


def test_proof_of_one_hello_is_none_of_another_nonce_or_session() -> None:
    hello = CALL.hello(KEY)
    for nonce, session in ((HOST_NONCE, SESSION), (hello.nonce, bytes(16))):
        host = new_host(session=session, key=KEY)
        said = msgspec.structs.replace(hello, nonce=nonce, session_hash=session_hash(session, nonce))
        with pytest.raises(HandshakeFailed, match="secret"):
            host.receive_data(PREFACE + encode_frame(said))


@pytest.mark.parametrize("offered", [bytes(16), b"SET victim 1\r\n\0\0", SESSION])
@EITHER_KEY
def test_members_first_bytes_hold_nothing_of_the_offered_session(offered: bytes, key: JobKey | None) -> None:
    call = msgspec.structs.replace(CALL, session=offered)
    assert offered not in new_member(call, key=key).data_to_send()
    assert call.hello(key).session_hash != call.hello(key).session_hash, "a hash of the session alone could be chosen"


@EITHER_KEY
@pytest.mark.parametrize(
    "endpoint", [("192.0.2.66", PORT), (ADDRESSES[0], PORT + 1), ("2001:db8::b", PORT), ("192.0.2.1", PORT)]
)
def test_endpoint_that_is_not_the_hosts_is_a_relay(endpoint: tuple[str, int], key: JobKey | None) -> None:
    meeting = Meeting(new_member(endpoint=endpoint, key=key), new_host(key=key))
    with pytest.raises(HandshakeFailed, match="relay"):
        meeting.carry()
    assert meeting.member.welcome is None
    assert not meeting.host.proved


def test_relay_that_adds_itself_to_the_list_breaks_the_proof() -> None:
    member, host = new_member(endpoint=("192.0.2.66", PORT), key=KEY), new_host(key=KEY)
    host.receive_data(member.data_to_send())
    welcome = msgspec.msgpack.decode(host.data_to_send()[len(PREFACE) + 4 :], type=frames.Welcome)
    forged = msgspec.structs.replace(welcome, addresses=(*welcome.addresses, "192.0.2.66"))
    with pytest.raises(HandshakeFailed, match="secret"):
        member.receive_data(PREFACE + encode_frame(forged))


@EITHER_KEY
def test_refusal_instead_of_a_welcome(key: JobKey | None) -> None:
    member = new_member(key=key)
    with pytest.raises(HandshakeFailed) as failed:
        member.receive_data(PREFACE + encode_frame(frames.Refused(reason="session", detail="over")))
    assert (failed.value.reason, failed.value.detail) == ("session", "over")


EVERY_FRAME: list[AnyFrame] = [
    CALL.hello(None),
    frames.Welcome(session=SESSION, nonce=HOST_NONCE, addresses=ADDRESSES, port=PORT),
    frames.Prove(),
    *{type(line.frame): line.frame for story in STORIES.values() for line in story.lines}.values(),
]


AWAITED: list[tuple[type[AnyFrame], tuple[type[AnyFrame], ...]]] = [
    (frames.Hello, (frames.Hello,)),
    (frames.Prove, (frames.Prove,)),
    (frames.Welcome, (frames.Welcome, frames.Refused)),
]


@pytest.mark.parametrize(
    ("awaited", "frame"),
    [
        pytest.param(awaited, frame, id=f"{type(frame).__name__} instead of {awaited.__name__}")
        for awaited, taken in AWAITED
        for frame in EVERY_FRAME
        if not isinstance(frame, taken)
    ],
)
def test_nothing_is_taken_before_the_frame_that_is_awaited(awaited: type[AnyFrame], frame: AnyFrame) -> None:
    conversation: MemberConversation | HostConversation = new_member() if awaited is frames.Welcome else new_host()
    if awaited is frames.Prove:
        conversation.receive_data(new_member().data_to_send())
    preface = b"" if awaited is frames.Prove else PREFACE
    with pytest.raises(HandshakeFailed, match=f"order: {type(frame).__name__} instead of {awaited.__name__}"):
        conversation.receive_data(preface + encode_frame(frame))


def test_stranger_can_not_send_a_long_frame() -> None:
    with pytest.raises(Rejected, match="size"):
        new_host().receive_data(PREFACE + (MAX_HANDSHAKE_BYTES + 1).to_bytes(4, "big"))


@EITHER_KEY
def test_member_of_a_later_minor_version_is_welcome(key: JobKey | None) -> None:
    """Its HELLO has fields, and its preface a version, that the host does not know; the proofs cover both."""
    hello = CALL.hello(key)
    body = msgspec.msgpack.encode({**msgspec.msgpack.decode(msgspec.msgpack.encode(hello)), "colour": "blue"})
    preface = b"MNGL\x01\x09\x00\x00"
    host = new_host(key=key)
    host.receive_data(preface + len(body).to_bytes(4, "big") + body)
    assert host.hello == hello
    welcome = msgspec.msgpack.decode(host.data_to_send()[len(PREFACE) + 4 :], type=frames.Welcome)
    proof = b""
    if key is not None:
        port = str(welcome.port).encode()
        covered = (preface, body, PREFACE, welcome.nonce, welcome.session, port, *map(str.encode, ADDRESSES))
        transcript = b"".join(len(each).to_bytes(4, "big") + each for each in covered)
        assert key.verify(b"host proof", transcript, welcome.proof)
        proof = key.mac(b"member proof", transcript)
    host.receive_data(encode_frame(frames.Prove(proof=proof)))
    assert host.proved


# --- after it -----------------------------------------------------------------------------------------------


PING = frames.Ping(number=1)


@pytest.mark.parametrize("fault", ["on another connection", "back to its sender", "without a MAC"])
def test_frame_counts_only_with_its_mac_on_its_connection_and_in_its_direction(fault: str) -> None:
    meeting = met(KEY)
    meeting.member.send(PING)
    sealed = meeting.member.data_to_send()
    hearer: MemberConversation | HostConversation = meeting.member if fault == "back to its sender" else meeting.host
    if fault == "on another connection":
        hearer = met(KEY).host
    with pytest.raises(Rejected, match="signature"):
        hearer.receive_data(encode_frame(PING) if fault == "without a MAC" else sealed)


def test_whole_conversation_replayed_is_refused() -> None:
    """Without the secret, whoever recorded a member's half can't play it to the host again."""
    spoken = [each for each in speak(STORIES["join"], KEY) if each.speaker == "member"]
    host = new_host(key=KEY)
    host.receive_data(spoken[0].data)
    with pytest.raises(HandshakeFailed, match="secret"):
        host.receive_data(b"".join(each.data for each in spoken[1:]))


# --- a wire that changes bytes ------------------------------------------------------------------------------


def _told(tampered: int, byte: int, mask: int) -> list[AnyFrame] | str:
    """Play a short conversation, with one byte of one piece changed.

    Returns what was heard, or why it broke off. The pieces: HELLO, WELCOME, PROVE, and one frame each way.
    """
    member, host = conversations(STORIES["join"], KEY)
    heard: list[AnyFrame] = []
    sides: Sequence[tuple[MemberConversation | HostConversation, HostConversation | MemberConversation]] = (
        (member, host),
        (host, member),
        (member, host),
        (member, host),
        (host, member),
    )
    for number, (speaker, hearer) in enumerate(sides):
        if number >= 3:
            speaker.send(SAID[number - 3])
        data = bytearray(speaker.data_to_send())
        if number == tampered:
            data[byte] ^= mask
        try:
            heard += hearer.receive_data(bytes(data))
        except (HandshakeFailed, Rejected) as noticed:
            return noticed.reason
    return heard


SAID: list[AnyFrame] = [line.frame for line in STORIES["join"].lines[:2]]
LENGTHS = [len(golden.data(f"join signed/{name}")) for name in ("hello", "welcome", "prove", "join", "joined")]


def test_short_conversation_without_tampering() -> None:
    assert _told(-1, 0, 0) == SAID


@pytest.mark.parametrize("piece", range(5), ids=["HELLO", "WELCOME", "PROVE", "JOIN", "JOINED"])
def test_every_changed_byte_is_noticed(piece: int) -> None:
    """Each change ends the conversation, or leaves it waiting for a frame that never gets whole."""
    rng = random.Random(piece)
    for byte in range(LENGTHS[piece]):
        for mask in (1 << rng.randrange(8), rng.randrange(1, 0x100)):
            outcome = _told(piece, byte, mask)
            if isinstance(outcome, list):
                assert outcome in ([], SAID[:1], SAID[1:]), (byte, mask)
