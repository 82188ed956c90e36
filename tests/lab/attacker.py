"""Somebody on the same network who wants the job: functions for processes of a lab host.

They hear everything that is multicast, know the job's id and the format of every message, and send as fast as one core
can. What they lack, where there is one, is the secret.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator

import msgspec

from mingle.protocol.links.handshake import Call, MemberConversation
from mingle.wire import datagrams, frames
from mingle.wire.authentication import DATAGRAM_MAC_BYTES
from mingle.wire.datagrams import BROWSE_GROUP, job_group

from .rank import report

PORT = 29_499
BAIT_PORT = 4_321
_QUIET_SECONDS = 0.5
_BATCH = 256


def record(job_id: str, address: str) -> list[bytes]:
    """Return what was multicast for a job, and on the browse group, from ``listening`` to the job's BYE."""
    with _hearing(job_id, address) as receiver:
        report("listening")
        heard: list[bytes] = []
        while True:
            try:
                heard.append(receiver.recv(2048))
            except TimeoutError:
                return heard
            if b"bye" in heard[-1]:
                receiver.settimeout(_QUIET_SECONDS)


def forged_offer(job_id: str, address: str, rng: random.Random) -> bytes:
    """An OFFER that says that the attacker hosts the job."""
    offer = datagrams.Offer(
        job=job_id,
        session=rng.randbytes(16),
        host=bytes(16),  # the lowest id there is: in an election it would win
        addresses=(address,),
        port=BAIT_PORT,
        world_size=3,
        state=rng.choice(("open", "sealed")),
        assigned=rng.random() < 0.5,
        hostname="attacker",
        pid=1,
    )
    return datagrams.encode(offer)


def _signed_by_nobody(datagram: bytes, rng: random.Random) -> bytes:
    """The same with a MAC of nobody's."""
    flagged = bytearray(datagram)
    flagged[6] |= datagrams.FLAG_SIGNED
    return bytes(flagged) + rng.randbytes(DATAGRAM_MAC_BYTES)


def _unsigned(datagram: bytes) -> bytes:
    """A recorded datagram without its MAC, as if there were no secret."""
    if not datagrams.is_signed(datagram):
        return datagram
    plain = bytearray(datagram[:-DATAGRAM_MAC_BYTES])
    plain[6] &= ~datagrams.FLAG_SIGNED
    return bytes(plain)


def ammunition(job_id: str, address: str, recorded: list[bytes], seed: int) -> list[bytes]:
    """Return what an attacker sends, mixed: forgeries, replays, unsigned copies, truncations, garbage."""
    rng = random.Random(seed)
    found: list[bytes] = []
    for _ in range(_BATCH):
        forged = forged_offer(job_id, address, rng)
        replay = rng.choice(recorded) if recorded else forged
        cut = replay[: rng.randrange(len(replay))]
        turned = bytearray(replay)
        turned[rng.randrange(len(turned))] ^= 1 << rng.randrange(8)
        garbage = rng.randbytes(rng.randrange(1200))
        found += [cut, garbage, datagrams.MAGIC + garbage[:1190]]
        # Without a secret a signature says nothing, and these are OFFERs like any other.
        found += [_signed_by_nobody(forged, rng), forged, replay, _unsigned(replay), bytes(turned)]
    return found


def attack(job_id: str, address: str, recorded: list[bytes], seed: int = 0) -> None:
    """Send to the job's group as fast as possible, until killed; reports ``attacking``, then each second's count."""
    shots = ammunition(job_id, address, recorded, seed)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
        sender.connect((job_group(job_id).ipv4, PORT))
        report("attacking")
        sent, since = 0, time.monotonic()
        while True:
            for shot in shots:
                sender.send(shot)
            sent += len(shots)
            if time.monotonic() - since >= 1:
                report("sent", count=sent, cpu=time.process_time())
                sent, since = 0, time.monotonic()


def aim(job_id: str, address: str, target: str, victims: list[str], per_second: int, seconds: float) -> list[bytes]:
    """Send OFFERs of a new session each, to the job's group and to each victim: at a target, or at its loopback.

    Returns the ids of the sessions; reports ``aiming`` when the first have been sent.
    """
    rng = random.Random(1)
    traps = ("127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1")
    sessions = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        started = time.monotonic()
        for number in range(int(per_second * seconds)):
            time.sleep(max(0.0, started + number / per_second - time.monotonic()))
            offer = datagrams.decode(forged_offer(job_id, address, rng))
            assert isinstance(offer, datagrams.Offer)
            named = (target,) if number % 2 else traps
            forged = datagrams.encode(msgspec.structs.replace(offer, addresses=named))
            sessions.append(offer.session)
            for to in (job_group(job_id).ipv4, *victims):
                sender.sendto(forged, (to, PORT))
            if number == 10:
                report("aiming")
    return sessions


def shout(address: str, everybody: list[str], data: bytes, per_second: int, seconds: float) -> int:
    """Send a datagram to broadcast addresses at a rate, and return how many answers came."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.bind((address, 0))
        started = time.monotonic()
        for number in range(int(per_second * seconds)):
            time.sleep(max(0.0, started + number / per_second - time.monotonic()))
            sender.sendto(data, (everybody[number % len(everybody)], PORT))
        answers = 0
        sender.settimeout(_QUIET_SECONDS)
        with contextlib.suppress(TimeoutError):
            while True:
                sender.recv(2048)
                answers += 1
        return answers


def bait(address: str) -> None:
    """Listen where forged OFFERs lead; report what each caller says first as ``bitten``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, BAIT_PORT), family=family, backlog=1024) as server:
        report("listening")
        while True:
            caller, peer = server.accept()
            with caller:
                caller.settimeout(0.2)
                try:
                    said = caller.recv(4096)
                except OSError:
                    said = b""
            report("bitten", peer=peer[0], said=said)


def flood_port(address: str, port: int, count: int) -> int:
    """Open and drop connections to a control port, with rubbish on every second; return how many stood."""
    stood = 0
    rng = random.Random(count)
    for number in range(count):
        if number == count // 10:
            report("flooding")
        try:
            with socket.create_connection((address, port), timeout=2) as caller:
                stood += 1
                if number % 2:
                    caller.sendall(rng.choice((b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), b"MNGL\x01\x00\x00\x00")))
        except OSError:
            continue
    return stood


def stay_silent(address: str, port: int, count: int) -> None:
    """Hold so many connections to a control port and say nothing; each that is closed is opened anew."""
    held: list[socket.socket] = []
    reported = False
    while True:
        for caller in [each for each in held if _closed(each)]:
            held.remove(caller)
            caller.close()
        while len(held) < count:
            try:
                held.append(socket.create_connection((address, port), timeout=2))
            except OSError:
                break
        if not reported and len(held) == count:
            report("silent")
            reported = True
        time.sleep(0.05)


def besiege(address: str, port: int, count: int, per_second: int) -> int:
    """Open so many connections to a control port, say nothing and close none; return how many stood.

    Reports ``besieging`` once a quarter of them was tried.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * count, 2 * count))
    held: list[socket.socket] = []
    started = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, started + number / per_second - time.monotonic()))
        caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        caller.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            caller.connect((address, port))
        held.append(caller)
        if number == count // 4:
            report("besieging")
    stood = 0
    for caller in held:
        with contextlib.suppress(OSError):
            caller.getpeername()
            stood += 1
        caller.close()
    return stood


def _closed(caller: socket.socket) -> bool:
    try:
        return caller.recv(65536, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def relay(job_id: str, address: str) -> None:
    """Stand between the host of a job and its ranks: offer its very session at an address of ours, and pass all on.

    Reports ``relaying`` once, and for each caller ``relayed`` with what it said.
    """
    with _hearing(job_id, address) as receiver, socket.create_server((address, BAIT_PORT)) as server:
        report("listening")
        offer = _next_offer(receiver)
        ours = msgspec.structs.replace(offer, addresses=(address,), port=BAIT_PORT)
        server.settimeout(0.05)
        report("relaying")
        while True:
            receiver.sendto(datagrams.encode(ours), (job_group(job_id).ipv4, PORT))
            try:
                caller, _ = server.accept()
            except TimeoutError:
                continue
            with caller, socket.create_connection((offer.addresses[0], offer.port)) as host:
                report("relayed", said=_pass_on(caller, host))


def _pass_on(caller: socket.socket, host: socket.socket) -> bytes:
    """Pass bytes on both ways until one side has ended; return the caller's."""
    said = b""
    while True:
        readable, _, _ = select.select([caller, host], [], [], 5)
        for source, target in ((caller, host), (host, caller)):
            if source in readable:
                try:
                    piece = source.recv(65536)
                    said += piece if source is caller else b""
                    target.sendall(piece)
                except ConnectionError:  # one side was too late for the other
                    return said
                if not piece:
                    return said


def locate(job_id: str, address: str) -> tuple[str, int]:
    """Return where a job's control port is, as its next OFFER says."""
    with _hearing(job_id, address) as receiver:
        report("listening")
        offer = _next_offer(receiver)
        return offer.addresses[0], offer.port


def overhear(job_id: str, address: str, count: int) -> list[datagrams.Seek]:
    """Return the questions of so many processes that look for a job; reports ``listening``."""
    heard: dict[bytes, datagrams.Seek] = {}
    with _hearing(job_id, address) as receiver:
        report("listening")
        while len(heard) < count:
            message = datagrams.decode(receiver.recv(2048))
            if isinstance(message, datagrams.Seek):
                heard[message.member] = message
    return list(heard.values())


def impersonate(job_id: str, address: str, members: list[datagrams.Seek], times: int) -> int:
    """Call the host of a job under each member's id, ask for its seat and leave it; return how often that was heard."""
    heard = 0
    with _hearing(job_id, address) as receiver:
        ask = datagrams.Seek(job=job_id, member=os.urandom(16), world_size=2, kind=members[0].kind)
        receiver.sendto(datagrams.encode(ask), (job_group(job_id).ipv4, PORT))
        offer = _next_offer(receiver)
    for _ in range(times):
        heard += sum(_join_and_leave(offer, seek) for seek in members if seek.member != offer.host)
        time.sleep(_QUIET_SECONDS)
    return heard


def _join_and_leave(offer: datagrams.Offer, seek: datagrams.Seek) -> bool:
    """Send all that can end a member's part in the job on one connection; return whether the host took it."""
    here = offer.addresses[0], offer.port
    who = frames.ProcessInfo(hostname="attacker", pid=1)
    call = Call(job=seek.job, attempt=seek.attempt, member=seek.member, session=offer.session, purpose="join", who=who)
    conversation = MemberConversation(call, here)
    with contextlib.suppress(OSError), socket.create_connection(here, timeout=20) as caller:
        caller.sendall(conversation.data_to_send())
        while conversation.welcome is None:
            if not (said := caller.recv(65536)):
                return False
            conversation.receive_data(said)
        conversation.send(
            frames.Join(world_size=seek.world_size, rank=seek.rank, node="attacker", who=who, kind=seek.kind)
        )
        conversation.send(frames.Pong())
        conversation.send(frames.Leave(session=offer.session, reason="its command has failed"))
        caller.sendall(conversation.data_to_send())
        while caller.recv(65536):
            pass
        return True
    return False


def _next_offer(receiver: socket.socket) -> datagrams.Offer:
    while True:
        untrusted = receiver.recv(2048)
        if b"offer" in untrusted:
            offer = datagrams.decode(_unsigned(untrusted))
            assert isinstance(offer, datagrams.Offer)
            return offer


@contextlib.contextmanager
def _hearing(job_id: str, address: str) -> Iterator[socket.socket]:
    """A socket that hears what is multicast for a job, and on the browse group."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        receiver.bind(("", PORT))
        for group in (job_group(job_id).ipv4, BROWSE_GROUP.ipv4):
            request = struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton(address))  # struct ip_mreq
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
        yield receiver


def whisper(job_id: str, world_size: int, uid: int | None = None) -> None:
    """Send every process of this host local messages with a destination that is no address, until killed.

    They are what the processes of one host hand to each other; any user of the host can send them. Reports
    ``whispering``.
    """
    if uid is not None:
        os.setuid(uid)
    seek = datagrams.Seek(job=job_id, member=bytes(16), world_size=world_size, rank=world_size - 1)
    ask = datagrams.padded(seek, datagrams.MAX_BYTES)
    message = msgspec.msgpack.encode([ask, "lo", "127.0.0.1", 9, 0, "4", True, "127.0.0.1\0"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        report("whispering")
        while True:
            for number in range(64):
                with contextlib.suppress(OSError):  # nobody has that name
                    sender.sendto(message, f"\0mingle/udp-{PORT}/{number}")
            time.sleep(0.001)
