"""What no discovery can be faster than: its single steps, one after the other, between two processes."""

from __future__ import annotations

import socket
import struct
import time
from datetime import timedelta

from tests.lab import report
from torch.distributed import TCPStore

from benchmarks import precedence
from benchmarks.bare_ranks import GROUP, KEY, MESSAGE_BYTES, TOKEN, _listen, _receive
from benchmarks.hosts import Place, field
from benchmarks.results import Comparison
from benchmarks.samples import median

ROUND_TRIPS = 4
"""HELLO and WELCOME; PROVE, JOIN and JOINED; CONFIRM and CONFIRMED; SEALED, ACK and GO."""

TEXT = """\
Between two hosts: one multicast datagram, one TCP connection, four round trips of messages as long as mingle's, and
one TCPStore client that reads one key."""


def answer(place: Place) -> None:
    """Rank 0: answers for as long as rank 1 asks."""
    precedence.take()
    store = TCPStore(place.address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    store.set(KEY, TOKEN.decode())
    listener = socket.create_server((place.address, 0))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    _listen(datagrams)
    report("ready", control=listener.getsockname()[1], store=store.port)
    while True:
        datagrams.recv(MESSAGE_BYTES)
        reached = time.monotonic()
        member, _ = listener.accept()
        with member:
            member.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUND_TRIPS):
                _receive(member)
                member.sendall(struct.pack("!d", reached).ljust(MESSAGE_BYTES))


def ask(place: Place, control: int, store_port: int, rounds: int) -> None:
    """Rank 1: measures each step so many times."""
    precedence.take()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(rounds + 1):
        times = [time.monotonic()]
        datagrams.sendto(bytes(MESSAGE_BYTES), GROUP)
        host = socket.socket()
        time.sleep(0.01)  # the datagram's time is told by its receiver
        times.append(time.monotonic())
        host.connect((place.address, control))
        host.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times.append(time.monotonic())
        for _ in range(ROUND_TRIPS):
            host.sendall(bytes(MESSAGE_BYTES))
            data = _receive(host)
        times.append(time.monotonic())
        store = TCPStore(place.address, store_port, is_master=False, timeout=timedelta(seconds=30))
        if store.get(KEY) != TOKEN:
            raise RuntimeError("the store holds something else")
        times.append(time.monotonic())
        reached = struct.unpack("!d", data[:8])[0]
        host.close()
        report(
            "round",
            steps={
                "datagram": reached - times[0],
                "connection": times[2] - times[1],
                "round trips": times[3] - times[2],
                "store client": times[4] - times[3],
            },
        )
    report("end")


def _measure(rounds: int) -> dict[str, list[float]]:
    with field(2) as hosts:
        place = Place("limit", 0, 2, hosts.hosts[0].address())
        ready = hosts.hosts[0].start(answer, place).wait_for("ready")
        asking = hosts.hosts[1].start(ask, place, ready["control"], ready["store"], rounds)
        asking.wait_for("end")
        # The first round also loads what the others find loaded.
        taken = [event["steps"] for event in asking.events if event.name == "round"][1:]
    return {name: [steps[name] * 1e3 for steps in taken] for name in taken[0]}


def steps(rounds: int) -> list[float]:
    """Return the milliseconds of all steps together, so many times."""
    taken = _measure(rounds)
    return [sum(each) for each in zip(*taken.values(), strict=True)]


def run(rounds: int) -> Comparison:
    """Measure."""
    samples = _measure(rounds)
    total = sum(median(values) for values in samples.values())
    text = f"{TEXT} Together {total:.2f} ms."
    return Comparison(name="limit", title="The limit, step by step", text=text, unit="ms", samples=samples)
