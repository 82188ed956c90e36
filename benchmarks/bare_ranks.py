"""The limit, as the function of a rank: mingle's steps with nothing in them, so what is left is the kernel and torch.

One datagram says where rank 0 is; each member connects, and as many messages of the same order go back and forth, each
waiting for what it waits for in mingle; rank 0 opens a TCPStore, each member constructs a client and reads a key there.
Nothing is validated, proved, retried or timed out.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from datetime import timedelta

from tests.lab import report
from torch.distributed import TCPStore

from benchmarks.hosts import Place

GROUP = ("239.192.1.1", 29498)
MESSAGE_BYTES = 200
KEY, TOKEN = "bench/token", b"0123456789abcdef"
LATE = "late"
# What a member has sent by the time that everybody is at the next barrier: HELLO; PROVE and JOIN; CONFIRMED; ACK.
HELLO, JOINED, CONFIRMED, ACKNOWLEDGED = 1, 2, 3, 4


def run(place: Place) -> None:
    """Go through the steps; the rank stays until it is killed."""
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if place.rank == 0:
        started, cpu = place.wait(), time.process_time()
        kept = _host(place, own)
    elif place.rank == place.world_size - 1 and place.option == LATE:
        started, cpu = place.wait(), time.process_time()
        kept = _member(own)
    else:
        _listen(own)  # who waits has its sockets already
        started, cpu = place.wait(), time.process_time()
        kept = _member(own, listening=True)
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
    threading.Event().wait()
    del kept


def _listen(own: socket.socket) -> None:
    own.bind(GROUP)
    membership = struct.pack("=4s4s", socket.inet_aton(GROUP[0]), socket.inet_aton("0.0.0.0"))
    own.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)


def _host(place: Place, own: socket.socket) -> object:
    listener = socket.create_server(("0.0.0.0", 0), backlog=128)
    _listen(own)
    where = struct.pack("!H", listener.getsockname()[1]).ljust(MESSAGE_BYTES)
    own.sendto(where, GROUP)
    report("hosting")
    sent: dict[socket.socket, int] = {}
    store = None
    done = 0
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(own, selectors.EVENT_READ)
        while done < ACKNOWLEDGED:
            for key, _ in selector.select():
                if key.fileobj is own:
                    if own.recv(MESSAGE_BYTES)[:1] == b"?":
                        own.sendto(where, GROUP)
                elif key.fileobj is listener:
                    member, _ = listener.accept()
                    member.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sent[member] = 0
                    selector.register(member, selectors.EVENT_READ)
                else:
                    member = key.fileobj  # type: ignore[assignment]
                    _receive(member)
                    sent[member] += 1
                    if sent[member] in (HELLO, JOINED):
                        member.sendall(_port_of(store))  # WELCOME, JOINED
            if len(sent) == place.world_size - 1 and min(sent.values()) > max(done, HELLO):
                done = min(sent.values())
                if done == CONFIRMED:
                    store = _open_store(place)
                message = _port_of(store)
                for member in sent:
                    member.sendall(message)  # CONFIRM, SEALED, GO
    return store, sent


def _open_store(place: Place) -> TCPStore:
    store = TCPStore(place.address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    store.set(KEY, TOKEN.decode())
    return store


def _port_of(store: TCPStore | None) -> bytes:
    return struct.pack("!H", store.port if store else 0).ljust(MESSAGE_BYTES)


def _member(own: socket.socket, *, listening: bool = False) -> object:
    if not listening:
        _listen(own)
        own.sendto(b"?".ljust(MESSAGE_BYTES), GROUP)
    where, sender = own.recvfrom(MESSAGE_BYTES)
    while where[:1] == b"?":
        where, sender = own.recvfrom(MESSAGE_BYTES)
    host = socket.socket()
    host.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host.connect((sender[0], struct.unpack("!H", where[:2])[0]))
    for _ in (HELLO, JOINED):
        host.sendall(bytes(MESSAGE_BYTES))
        _receive(host)  # WELCOME, JOINED
    _receive(host)  # CONFIRM
    host.sendall(bytes(MESSAGE_BYTES))  # CONFIRMED
    answer = _receive(host)  # SEALED
    store = _connect_store(sender[0], answer)
    if store.get(KEY) != TOKEN:
        raise RuntimeError("the store holds something else")
    host.sendall(bytes(MESSAGE_BYTES))  # ACK
    _receive(host)  # GO
    return host, store


def _connect_store(address: str, answer: bytes) -> TCPStore:
    port = struct.unpack("!H", answer[:2])[0]
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))


def _receive(sock: socket.socket) -> bytes:
    data = sock.recv(MESSAGE_BYTES, socket.MSG_WAITALL)
    if len(data) < MESSAGE_BYTES:
        raise RuntimeError("the other side has gone")
    return data
