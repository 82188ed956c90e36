"""The conversation on a control connection, without the connection: bytes in, frames and bytes out.

Both sides begin with a handshake that proves the session (and, with a secret, each other)::

    member                                            host
    HELLO(job, member, nonce, session_hash, proof)  ────▶
                                         ◀────  WELCOME(session, nonce, addresses, proof)
    PROVE(proof)                         ────▶
    … frames, each with a MAC when there is a secret …

Why a relay gains nothing: both proofs cover both prefaces, the whole HELLO, and the host's nonce, session and
true list of addresses and port; and the member refuses an endpoint that is not in that list.

The member proves the secret first: a stranger who connects to a host gets no MAC against which to test guesses.
"""

from __future__ import annotations

from collections.abc import Container
from typing import get_args

import msgspec

from mingle.wire.authentication import FrameKeys, JobKey, join_fields, new_nonce, session_hash
from mingle.wire.frame_codec import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    PREFACE,
    FrameReader,
    encode_body,
    encode_frame,
)
from mingle.wire.frames import AnyFrame, Hello, ProcessInfo, Prove, Purpose, Refused, Welcome

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
PROOF_SECONDS_PER_RANK = 0.005
"""The time that either side gives the other for each rank of the job, if that is more than its least time. A host
proves itself to one rank after another, and a rank that hangs up and calls again makes the host begin anew."""


class HandshakeFailed(Exception):
    """The other side is another process than it should be, or refuses the conversation. ``reason`` is a short word.

    Reasons: ``session`` (another session, or another job, answers at this address), ``secret`` (one side
    lacks the secret, or holds another), ``relay`` (the endpoint is not one of the host's own), ``order`` (a
    frame where none may be), or the reason of a REFUSED that came instead of a WELCOME.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The caller, the session and the purpose of a connection."""

    job: str
    attempt: str = ""
    member: bytes
    session: bytes
    purpose: Purpose
    who: ProcessInfo = ProcessInfo()

    def hello(self, key: JobKey | None) -> Hello:
        """Return a HELLO for one connection. Every field is chosen by the caller, or hashed with the caller's nonce."""
        nonce = new_nonce()
        return Hello(
            job=self.job,
            attempt=self.attempt,
            member=self.member,
            nonce=nonce,
            session_hash=session_hash(self.session, nonce),
            purpose=self.purpose,
            who=self.who,
            proof=b"" if key is None else key.mac(b"hello", join_fields((self.session, nonce))),
        )


def _transcript(member_preface: bytes, hello_body: bytes, host_preface: bytes, welcome: Welcome) -> bytes:
    """Both sides' nonces and all that must not be changed on the way.

    The HELLO counts as the bytes that were sent, so that also what a host does not know of a later minor
    version is covered; a WELCOME holds the proof itself and counts field by field.
    """
    return join_fields(
        (
            member_preface,
            hello_body,
            host_preface,
            welcome.nonce,
            welcome.session,
            str(welcome.port).encode(),
            *(address.encode() for address in welcome.addresses),
        )
    )


class Conversation:
    """What both sides share: an outgoing buffer, a reader, and keys once they are proved."""

    def __init__(self, key: JobKey | None) -> None:
        self._key = key
        self._keys: FrameKeys | None = None
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._outgoing = bytearray(PREFACE)

    def send(self, frame: AnyFrame) -> None:
        """Append a frame to the outgoing buffer."""
        self._outgoing += encode_frame(frame, self._keys)

    def send_body(self, body: bytes) -> None:
        """Append a frame that was encoded once for several connections to the outgoing buffer."""
        self._outgoing += encode_body(body, self._keys)

    @property
    def has_data_to_send(self) -> bool:
        """Whether bytes wait to be written."""
        return bool(self._outgoing)

    def data_to_send(self) -> bytes:
        """Return the bytes to write on the connection, once."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def _begin(self, transcript: bytes, *, host: bool) -> None:
        """End the handshake: from now on frames can be long and, with a secret, carry MACs."""
        self._reader.max_bytes = MAX_FRAME_BYTES
        if self._key is not None:
            self._keys = self._reader.keys = FrameKeys(self._key, transcript, host=host)


class MemberConversation(Conversation):
    """The calling side. ``welcome`` is set once the host has proved its session."""

    def __init__(self, call: Call, endpoint: tuple[str, int], key: JobKey | None = None) -> None:
        super().__init__(key)
        self.call = call
        self.welcome: Welcome | None = None
        self._endpoint = endpoint
        encoded = encode_frame(call.hello(key))
        self._hello_body = encoded[LENGTH_BYTES:]
        self._outgoing += encoded

    def receive_data(self, untrusted: bytes) -> list[AnyFrame]:
        """Take bytes from the host and return the frames in them that came after its proof.

        Raises:
            HandshakeFailed: this is not the host we look for.
            Rejected: the bytes are no frames.
        """
        self._reader.feed(untrusted)
        received: list[AnyFrame] = []
        while (frame := self._reader.next_frame()) is not None:
            if self.welcome is None:
                self._check_welcome(frame)
            else:
                received.append(frame)
        return received

    def _check_welcome(self, frame: AnyFrame) -> None:
        if isinstance(frame, Refused) and frame.reason == "secret":
            ours = "the host has a secret and we have none" if self._key is None else "the host's secret is another one"
            raise HandshakeFailed("secret", ours)
        if isinstance(frame, Refused):
            raise HandshakeFailed(frame.reason, frame.detail)
        if not isinstance(frame, Welcome):
            raise HandshakeFailed("order", f"{type(frame).__name__} instead of Welcome")
        if frame.session != self.call.session:
            raise HandshakeFailed("session", "another session answers at this address")
        transcript = b""
        if self._key is None:
            if frame.proof:
                raise HandshakeFailed("secret", "the host has a secret and we have none")
        elif not frame.proof:
            raise HandshakeFailed("secret", "we have a secret and the host has none")
        else:
            transcript = _transcript(PREFACE, self._hello_body, self._reader.preface, frame)
            if not self._key.verify(b"host proof", transcript, frame.proof):
                raise HandshakeFailed("secret", "the host's secret is another one")
        if self._endpoint[0] not in frame.addresses or self._endpoint[1] != frame.port:
            raise HandshakeFailed("relay", f"{self._endpoint[0]} is not one of the host's own addresses")
        self.welcome = frame
        self.send(Prove(proof=b"" if self._key is None else self._key.mac(b"member proof", transcript)))
        self._begin(transcript, host=False)


class HostConversation(Conversation):
    """The called side. ``hello`` is set once the caller has named itself, ``proved`` once it has proved itself.

    Callers with another purpose than ``purposes`` are told that no such session is hosted here.
    """

    def __init__(
        self,
        *,
        job: str,
        attempt: str,
        session: bytes,
        addresses: tuple[str, ...],
        port: int,
        key: JobKey | None = None,
        purposes: Container[Purpose] = PURPOSES,
    ) -> None:
        super().__init__(key)
        self._purposes = purposes
        self._job = job
        self._attempt = attempt
        self._session = session
        self._addresses = addresses
        self._port = port
        self._transcript = b""
        self.hello: Hello | None = None
        self.claimed: Purpose | None = None
        """What the caller wants, as it says before it has proved anything."""
        self.proved = False

    def receive_data(self, untrusted: bytes) -> list[AnyFrame]:
        """Take bytes from a caller and return the frames in them that came after its proof.

        Raises:
            HandshakeFailed: the caller looks for another session or has no secret. The outgoing buffer holds a
                REFUSED to send before hanging up.
            Rejected: the bytes are no frames.
        """
        self._reader.feed(untrusted)
        received: list[AnyFrame] = []
        while (frame := self._reader.next_frame()) is not None:
            if self.hello is None:
                self._answer_hello(frame)
            elif not self.proved:
                self._check_proof(frame)
            else:
                received.append(frame)
        return received

    def _answer_hello(self, frame: AnyFrame) -> None:
        if not isinstance(frame, Hello):
            raise HandshakeFailed("order", f"{type(frame).__name__} instead of Hello")
        session = session_hash(self._session, frame.nonce)
        ours = (frame.job, frame.attempt, frame.session_hash) == (self._job, self._attempt, session)
        if not ours or frame.purpose not in self._purposes:
            self.send(Refused(reason="session", detail="another session is hosted here"))
            raise HandshakeFailed("session", "the caller looks for another session")
        self.claimed = frame.purpose
        signed = join_fields((self._session, frame.nonce))
        if self._key is not None and not self._key.verify(b"hello", signed, frame.proof):
            self.send(Refused(reason="secret", detail="the secret was not proved"))
            raise HandshakeFailed("secret", "the caller did not prove the secret")
        self.hello = frame
        welcome = Welcome(session=self._session, nonce=new_nonce(), addresses=self._addresses, port=self._port)
        if self._key is not None:
            self._transcript = _transcript(self._reader.preface, self._reader.body, PREFACE, welcome)
            proof = self._key.mac(b"host proof", self._transcript)
            welcome = msgspec.structs.replace(welcome, proof=proof)
        self.send(welcome)

    def _check_proof(self, frame: AnyFrame) -> None:
        if not isinstance(frame, Prove):
            raise HandshakeFailed("order", f"{type(frame).__name__} instead of Prove")
        if self._key is not None and not self._key.verify(b"member proof", self._transcript, frame.proof):
            self.send(Refused(reason="secret", detail="the secret was not proved"))
            raise HandshakeFailed("secret", "the caller did not prove the secret")
        self.proved = True
        self._begin(self._transcript, host=True)
