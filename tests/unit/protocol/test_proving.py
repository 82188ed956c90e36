"""A node's part in the proof of the mesh."""

from __future__ import annotations

import itertools
import random

from mingle.protocol.effects import Dial, Effect, Hangup, Inspect
from mingle.protocol.events import Disconnected, Inspected
from mingle.protocol.machine import Context
from mingle.protocol.mesh import REFUSED_SECONDS
from mingle.protocol.proving import Proving
from mingle.wire.frames import Blocked, Failure, Path, Target
from tests.support.scripted_host import IDENTITY

SESSION = b"s" * 16
PATH = Path(host_address="10.0.0.1", local_address="10.0.0.2", interface="eth0")
TARGET = Target(member=b"t" * 16, address="10.0.0.3", port=7)
BLOCKED = Blocked(address="10.0.0.3", chain="inet lab input", rule="tcp dport 7 drop")


class Node:
    """A node and what it has done."""

    def __init__(self) -> None:
        context = Context(key=None, new_id=itertools.count(1).__next__, rng=random.Random(0), timeout=60.0)
        self.links, self.effects = context.links, context.links.effects
        self.proving = Proving(IDENTITY, context, port=lambda: 5000)

    def begin(self, epoch: int = 1, *, path: Path | None = PATH, suspects: tuple[Target, ...] = ()) -> None:
        self.proving.begin(SESSION, epoch, path, targets=[TARGET], suspects=suspects, seconds=6.0, now=0.0)

    def take(self, kind: type[Effect]) -> list[Effect]:
        found = [each for each in self.effects if isinstance(each, kind)]
        self.effects[:] = [each for each in self.effects if not isinstance(each, kind)]
        return found

    def refuse_all(self) -> None:
        """Have every dial refused until the node gives up."""
        now = 0.0
        while self.proving.under_way and now <= 2 * REFUSED_SECONDS:
            for dial in self.take(Dial):
                assert isinstance(dial, Dial)
                self.links.handle(Disconnected(dial.conn, "ECONNREFUSED"), now)
            if (due := self.proving.next_timer()) is not None:
                self.proving.handle_timer(now := due)


def test_result_is_taken_once_with_its_epoch() -> None:
    node = Node()
    assert node.proving.take_result() is None, "nothing was asked for"
    node.begin(epoch=3)
    assert node.proving.take_result() is None, "a target is dialed"
    node.refuse_all()
    result = node.proving.take_result()
    assert result is not None
    assert (result.epoch, result.failures) == (3, (Failure(member=TARGET.member, how="refused"),))
    assert node.proving.take_result() is None


def test_next_epoch_hangs_up_on_the_targets_of_the_one_before() -> None:
    node = Node()
    node.begin(epoch=1)
    (dial,) = node.take(Dial)
    assert isinstance(dial, Dial)
    assert dial.conn in node.links
    node.begin(epoch=2)
    assert node.take(Hangup) == [Hangup(dial.conn)]
    assert dial.conn not in node.links


def test_link_local_targets_are_dialed_on_the_interface_of_the_network() -> None:
    node = Node()
    node.begin()
    (dial,) = node.take(Dial)
    assert isinstance(dial, Dial)
    assert dial.interface == "eth0"


def test_suspect_looks_at_itself_and_the_result_waits_for_it() -> None:
    node = Node()
    node.begin(suspects=(TARGET,))
    (inspect,) = node.take(Inspect)
    assert isinstance(inspect, Inspect)
    assert (inspect.interface, inspect.address, inspect.port, inspect.peers) == ("eth0", "10.0.0.2", 5000, (TARGET,))
    for dial in node.take(Dial):
        assert isinstance(dial, Dial)
        node.links.handle(Disconnected(dial.conn, "ECONNREFUSED"), 0.0)
    for now in (REFUSED_SECONDS / 2, REFUSED_SECONDS):
        node.proving.handle_timer(now)
        for dial in node.take(Dial):
            assert isinstance(dial, Dial)
            node.links.handle(Disconnected(dial.conn, "ECONNREFUSED"), now)
    assert node.proving.take_result() is None
    node.proving.inspected(Inspected(inspect.number, BLOCKED))
    result = node.proving.take_result()
    assert result is not None
    assert result.blocked == BLOCKED


def test_node_without_a_path_on_the_network_can_not_look_at_itself() -> None:
    node = Node()
    node.begin(path=None, suspects=(TARGET,))
    assert not node.take(Inspect)


def test_events_without_a_proof_mean_nothing() -> None:
    node = Node()
    node.proving.inspected(Inspected(1, BLOCKED))
    node.proving.handle_timer(0.0)
    assert node.proving.next_timer() is None
    assert not node.effects
