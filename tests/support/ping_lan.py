"""A network in memory for machines that ping each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from mingle.observe.ping import Cast, EchoHeard, PingMachine, Post, Reply
from mingle.protocol.effects import Dial, Hangup, Write
from mingle.protocol.events import Accepted, BytesReceived, Connected, Disconnected, TimerDue
from mingle.wire import echo
from mingle.wire.authentication import JobKey
from mingle.wire.echo import EchoMessage, Way
from mingle.wire.frames import ProcessInfo

PORT = 29499
Lost = Callable[[str, str, Way], bool]


class Lan:
    """Carries what the machines send, in no time; `lost(sender, receiver, way)` says what it loses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.machines: dict[str, PingMachine] = {}
        self.lost: Lost = lambda *_: False
        self.sent: list[tuple[str, object]] = []
        self._ids = itertools.count(1)
        self._ends: dict[tuple[str, int], tuple[str, int]] = {}

    def add(self, address: str, *, count: int | None = 5, key: JobKey | None = None, job: str = "") -> PingMachine:
        number = len(self.machines) + 1
        machine = PingMachine(
            job,
            pinger=bytes([number]) * 16,
            who=ProcessInfo(hostname=f"node{number}", pid=number),
            port=4000 + number,
            shared_port=PORT,
            interval=0.5,
            count=count,
            new_id=self._ids.__next__,
            now=self.now,
            key=key,
            own=[address],
        )
        self.machines[address] = machine
        return machine

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = min((machine.next_timer() or end, address) for address, machine in self.machines.items())
            if due[0] > end:
                break
            self.now = max(self.now, due[0])
            self.machines[due[1]].handle(TimerDue(), self.now)
            self.settle()
        self.now = end

    def settle(self) -> None:
        busy = True
        while busy:
            busy = False
            for address, machine in list(self.machines.items()):
                for effect in machine.effects():
                    busy = True
                    self.sent.append((address, effect))
                    self.carry(address, effect)

    def carry(self, sender: str, effect: object) -> None:
        match effect:
            case Cast(message, link):
                for receiver in self.machines:
                    self.deliver(sender, receiver, message, "link" if link else "multicast")
            case Post(address, port, message):
                assert port == PORT
                self.deliver(sender, address, message, "unicast")
            case Reply(handle, message):
                assert isinstance(handle, str)
                self.deliver(sender, handle, message, "unicast", reply=True)
            case Dial(conn, address, _, _):
                if self.lost(sender, address, "tcp"):
                    return
                far = next(self._ids)
                self._ends |= {(sender, conn): (address, far), (address, far): (sender, conn)}
                self.machines[address].handle(Accepted(far, sender), self.now)
                self.machines[sender].handle(Connected(conn, sender, "eth0"), self.now)
            case Write(conn, data):
                other, far = self._ends[sender, conn]
                if far in self.machines[other].links:
                    self.machines[other].handle(BytesReceived(far, data), self.now)
            case Hangup(conn):
                other, far = self._ends.pop((sender, conn), ("", 0))
                if other and far in self.machines[other].links:
                    self.machines[other].handle(Disconnected(far, "closed"), self.now)

    def deliver(self, sender: str, receiver: str, message: EchoMessage, way: Way, *, reply: bool = False) -> None:
        if receiver not in self.machines or (sender != receiver and not reply and self.lost(sender, receiver, way)):
            return
        machine = self.machines[receiver]
        data = echo.encode(message, self.machines[sender]._key)
        event = EchoHeard(
            message=echo.decode(data),
            address=sender,
            interface="eth0",
            trusted=echo.is_trusted(data, machine._key),
            size=len(data),
            handle=sender,
        )
        machine.handle(event, self.now)


def echo_heard(message: EchoMessage, address: str, *, size: int) -> EchoHeard:
    return EchoHeard(message=message, address=address, interface="eth0", trusted=True, size=size, handle="x")
