"""The connections of the mesh: the side that dials and the side that answers, with a clock of the test's own."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mingle.diagnostics import Detour
from mingle.protocol.effects import Dial, Hangup, Inspect, Write
from mingle.protocol.events import BytesReceived, Connected, Disconnected, Inspected
from mingle.protocol.links import prover
from mingle.protocol.links.callers import Caller, Callers
from mingle.protocol.links.handshake import HostConversation
from mingle.protocol.links.prover import INSPECTION_SECONDS, ProofResult, Prover, greeting
from mingle.protocol.machine import Context, Identity, Mesh
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.mesh_proof import targets_of
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.frames import Failure, Path, ProcessInfo, Target

SESSION = b"S" * 16
ME = Identity(job="job", attempt="", member=b"M" * 16, rank=None, world_size=9, node="n", who=ProcessInfo())
PATH = Path(host_address="10.0.0.1", local_address="10.0.0.99", interface="eth0")
PORT = 4000
REFUSED = "Connection refused (ECONNREFUSED)"
EXAMPLES = settings(derandomize=True, database=None, deadline=None, max_examples=60)


def member(number: int) -> bytes:
    return number.to_bytes(16, "big")


def target(number: int) -> Target:
    return Target(member=member(number), address=f"10.0.0.{number}", port=PORT)


class Listener:
    """A target: what it does with a connection is the test's choice."""

    def __init__(self, number: int, *, key: JobKey | None = None, session: bytes = SESSION) -> None:
        context = Context(key=key, new_id=itertools.count(1).__next__, rng=random.Random(0), timeout=60.0)
        self.links = context.links
        self.member = member(number)
        self.callers = Callers(self, context)
        self._conversation = functools.partial(
            HostConversation,
            job="job",
            attempt="",
            session=session,
            addresses=(f"10.0.0.{number}",),
            port=PORT,
            key=key,
            purposes=("mesh",),
        )
        self.stopped = False
        """Whether its process does not run: its kernel still accepts."""
        self.small = False
        """Whether the path to it drops large packets."""
        self.refuses = False
        self.silent = False
        """Whether nothing comes back from its address."""
        self.mute = False
        """Whether a program accepts there that says nothing, while the target's process runs."""
        self.speaks: bytes | None = b""
        """What a program of another kind says to each caller; None: it closes."""
        self.waiting: list[tuple[int, bytes | None]] = []

    def conversation(self) -> HostConversation:
        return self._conversation()

    def caller_proved(self, caller: Caller, now: float) -> None:
        pass

    def caller_said(self, caller: Caller, frame: frames.AnyFrame, now: float) -> None:
        self.callers.answer(caller.conn, "greeting", None, lambda: [greeting(self.member)])

    def caller_lost(self, caller: Caller, reason: str, now: float) -> None:
        pass


class Lan:
    """A prover, and its targets by their addresses; everything is delivered at once."""

    def __init__(self, numbers: int, *, seconds: float = 6.0, key: JobKey | None = None, mode: Mesh = "off") -> None:
        self.now = 100.0
        self.dials: list[tuple[float, str]] = []
        self.listeners = {f"10.0.0.{number}": Listener(number, key=key) for number in range(1, numbers + 1)}
        self.open: dict[int, str] = {}
        """The connections that have not ended, by the address that they lead to."""
        self.most_open = 0
        self.context = Context(
            key=key, new_id=itertools.count(1).__next__, rng=random.Random(0), timeout=60.0, mesh=mode
        )
        self.links = self.context.links
        self._key = key
        self._seconds = seconds
        self._result: ProofResult | None = None
        self.prover = self.prove()

    def prove(self, *suspects: Target, session: bytes = SESSION) -> Prover:
        """Begin a proof of all targets."""
        self.prover, self._result = Prover(ME, self.context, port=lambda: PORT), None
        targets = [target(number) for number in range(1, len(self.listeners) + 1)]
        self.prover.begin(session, 1, PATH, targets=targets, suspects=suspects, seconds=self._seconds, now=self.now)
        return self.prover

    @property
    def result(self) -> ProofResult | None:
        """What the proof has shown, once it is over."""
        self._result = self._result or self.prover.take_result()
        return self._result

    def at(self, number: int) -> Listener:
        """Return a target."""
        return self.listeners[f"10.0.0.{number}"]

    def settle(self) -> None:
        """Carry out effects until nothing more happens by itself."""
        while effects := self.links.take_effects():
            self.links.effects[:] = effects[1:]
            effect = effects[0]
            match effect:
                case Dial(conn, address):
                    self.dials.append((self.now, address))
                    self.open[conn] = address
                    self.most_open = max(self.most_open, len(self.open))
                    self._dialed(conn, self.listeners[address])
                case Write(conn, data):
                    self._written(conn, data)
                case Hangup(conn):
                    self.open.pop(conn, None)  # the other side can have hung up

    def _tell(self, event: Connected | BytesReceived | Disconnected) -> None:
        if isinstance(event, Disconnected):
            self.open.pop(event.conn, None)
        self.links.handle(event, self.now)

    def _dialed(self, conn: int, listener: Listener) -> None:
        if listener.refuses:
            self._tell(Disconnected(conn, REFUSED))
        elif not listener.silent:
            self._tell(Connected(conn, "10.0.0.99", "eth0"))
            listener.waiting.append((conn, None))
            self._serve(listener)

    def _written(self, conn: int, data: bytes) -> None:
        if conn not in self.open:
            return
        listener = self.listeners[self.open[conn]]
        if not (listener.small and len(data) > 1400):
            listener.waiting.append((conn, data))
            self._serve(listener)

    def _serve(self, listener: Listener) -> None:
        while listener.waiting and not listener.stopped:
            conn, data = listener.waiting.pop(0)
            if listener.mute:
                pass
            elif listener.speaks is None:
                self._tell(Disconnected(conn, "the other side closed it"))
            elif listener.speaks:
                self._tell(BytesReceived(conn, listener.speaks))
            elif data is None:
                listener.callers.accepted(conn, "10.0.0.99", self.now)
            else:
                listener.links.handle(BytesReceived(conn, data), self.now)
            self._answer(listener)

    def _answer(self, listener: Listener) -> None:
        for effect in listener.links.take_effects():
            if isinstance(effect, Write):
                self._tell(BytesReceived(effect.conn, effect.data))
            elif isinstance(effect, Hangup):
                self._tell(Disconnected(effect.conn, "the other side closed it"))

    def cont(self, number: int) -> None:
        """Let a stopped target run."""
        self.at(number).stopped = False
        self._serve(self.at(number))
        self.settle()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.settle()
        end = self.now + seconds
        while self.prover.under_way and (due := self._due()) is not None and due <= end:
            self.now = max(self.now, due)
            self.prover.handle_timer(self.now)
            for listener in self.listeners.values():
                if not listener.stopped:
                    listener.callers.handle_timer(self.now)
                    self._answer(listener)
            self.settle()
        self.now = end

    def _due(self) -> float | None:
        times = [
            self.prover.next_timer(),
            *(each.callers.next_timer() for each in self.listeners.values() if not each.stopped),
        ]
        return min((due for due in times if due is not None), default=None)

    @property
    def failures(self) -> dict[int, str]:
        """How targets failed, by their numbers."""
        return {int.from_bytes(each.member, "big"): each.how for each in (self.result.failures if self.result else ())}


# --- which nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 128, mesh_proof.FULL_MESH])
def test_every_pair_is_dialed_in_both_directions_and_the_successor_first(nodes: int) -> None:
    assert {(one, other) for one in range(nodes) for other in targets_of(one, nodes)} == {
        (one, other) for one in range(nodes) for other in range(nodes) if one != other
    }
    assert [targets_of(one, nodes)[0] for one in range(nodes)] == [(one + 1) % nodes for one in range(nodes)]


@pytest.mark.parametrize("nodes", [mesh_proof.FULL_MESH + 1, 1000, 1024])
def test_of_more_nodes_each_dials_a_sample_and_is_dialed_by_as_many(nodes: int) -> None:
    dialed = [other for one in range(nodes) for other in targets_of(one, nodes)]
    assert all(one not in targets_of(one, nodes) for one in range(nodes))
    assert {dialed.count(each) for each in range(0, nodes, 97)} == {mesh_proof.SAMPLE}


# --- what counts as reached -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, JobKey(b"secret", "job")], ids=["plain", "secret"])
def test_all_targets_are_reached_at_once(key: JobKey | None) -> None:
    lan = Lan(8, key=key)
    lan.run(0.0)
    assert not lan.prover.under_way
    assert not lan.failures
    assert not lan.open
    assert len(lan.dials) == 8


def test_target_that_is_dead_refuses_for_a_second() -> None:
    lan = Lan(3)
    lan.at(2).refuses = True
    lan.run(prover.REFUSED_SECONDS - 0.1)
    assert lan.prover.under_way
    lan.run(0.5)
    assert lan.failures == {2: "refused"}
    assert not lan.open


def test_target_whose_listener_is_late_is_reached() -> None:
    lan = Lan(3)
    lan.at(2).refuses = True
    lan.run(0.6)
    lan.at(2).refuses = False
    lan.run(0.5)
    assert not lan.prover.under_way
    assert not lan.failures


def test_target_to_which_the_kernel_does_not_send_as_it_should_fails_with_the_interface() -> None:
    lan = Lan(3)
    lan.context = structs.replace(lan.context, astray=lambda address: Detour(address, "eth1", "eth0"))
    lan.at(2).refuses = lan.at(3).silent = True
    lan.links.take_effects()
    lan.prove()
    lan.run(6.1)
    assert lan.failures == {2: "refused", 3: "no route"}, "what refuses is reached"
    assert {each.detail for each in (lan.result.failures if lan.result else ())} == {"", "sent through eth0, not eth1"}


def test_target_that_does_not_answer_is_dialed_every_half_second_for_six() -> None:
    lan = Lan(3)
    lan.at(3).silent = True
    lan.run(5.9)
    assert lan.prover.under_way
    lan.run(0.2)
    assert lan.failures == {3: "no answer"}
    assert len([at for at, address in lan.dials if address == "10.0.0.3"]) == 12
    assert not lan.open


def test_last_of_many_lost_syns_is_enough() -> None:
    lan = Lan(2)
    lan.at(1).silent = True
    lan.run(5.4)
    lan.at(1).silent = False
    lan.run(0.5)
    assert not lan.prover.under_way
    assert not lan.failures


def test_another_member_at_the_address_is_not_the_target() -> None:
    """Its greeting shows another id: two machines with one address."""
    lan = Lan(3)
    lan.at(2).member = member(3)
    lan.run(2.0)
    assert lan.failures == {2: "another program"}


def test_another_session_at_the_port_is_not_the_target() -> None:
    lan = Lan(3)
    lan.listeners["10.0.0.2"] = Listener(2, session=b"T" * 16)
    lan.run(2.0)
    assert lan.failures == {2: "another program"}


def test_program_that_speaks_another_protocol_is_named() -> None:
    lan = Lan(1)
    lan.at(1).speaks = b"HTTP/1.1 400 Bad Request\r\n"
    lan.run(2.0)
    assert lan.failures == {1: "another program"}


def test_target_without_the_secret_is_another_program() -> None:
    lan = Lan(2, key=JobKey(b"secret", "job"))
    lan.listeners["10.0.0.1"] = Listener(1, key=JobKey(b"other", "job"))
    lan.run(2.0)
    assert lan.failures == {1: "another program"}


def test_target_that_accepts_and_hangs_up_is_named_after_six_seconds() -> None:
    """As a process does that has no free descriptor."""
    lan = Lan(2)
    lan.at(1).speaks = None
    lan.run(5.9)
    assert lan.prover.under_way
    lan.run(0.5)
    assert lan.failures == {1: "closed"}


def test_target_that_hangs_up_after_a_while_is_dialed_no_longer_for_it() -> None:
    lan = Lan(1)
    lan.at(1).mute = True
    for _ in range(3):
        lan.run(2.0)
        for conn in list(lan.open):
            lan._tell(Disconnected(conn, "the other side closed it"))
    lan.run(0.1)
    assert lan.failures == {1: "closed"}


def test_lack_of_descriptors_of_its_own_is_named() -> None:
    lan = Lan(1)
    while lan.prover.under_way:
        for effect in lan.links.take_effects():
            if isinstance(effect, Dial):
                lan.links.handle(Disconnected(effect.conn, "Too many open files (EMFILE)"), lan.now)
        lan.now = lan.prover.next_timer() or lan.now
        lan.prover.handle_timer(lan.now)
    assert lan.failures == {1: "no descriptor"}


@pytest.mark.parametrize(("fault", "how"), [("stopped", "silent"), ("mute", "silent"), ("small", "large packets")])
def test_target_that_accepts_and_does_not_answer_fails_if_two_further_connections_go_the_same_way(
    fault: str, how: str
) -> None:
    lan = Lan(3)
    setattr(lan.at(2), fault, True)
    lan.run(2 * prover.ANSWER_SECONDS - 0.1)
    assert lan.prover.under_way
    assert [address for _, address in lan.dials[3:]] == ["10.0.0.2"] * 2
    lan.run(0.2)
    assert lan.failures == {2: how}
    assert not lan.open


@pytest.mark.parametrize("seconds", [1.0, 5.9])
def test_target_that_was_stopped_and_goes_on_is_reached_on_a_connection_of_that_time(seconds: float) -> None:
    lan = Lan(1)
    lan.at(1).stopped = True
    lan.run(seconds)
    lan.cont(1)
    assert not lan.prover.under_way
    assert not lan.failures


@pytest.mark.parametrize("fault", ["mute", "small"])
def test_connection_on_which_all_is_lost_is_made_up_for_by_the_next(fault: str) -> None:
    lan = Lan(1)
    setattr(lan.at(1), fault, True)
    lan.run(prover.ANSWER_SECONDS - 0.1)
    setattr(lan.at(1), fault, False)
    lan.run(0.2)
    assert not lan.prover.under_way
    assert not lan.failures


def test_connections_that_fail_in_different_ways_show_loss_and_no_cause() -> None:
    lan = Lan(1)
    lan.at(1).mute = True
    lan.run(prover.ANSWER_SECONDS - 0.1)
    lan.at(1).mute, lan.at(1).small = False, True
    lan.run(4 * prover.ANSWER_SECONDS)
    assert not lan.prover.under_way
    assert lan.result is not None
    (failure,) = lan.result.failures
    assert (failure.how, failure.detail) == ("no answer", prover.LOSSY)


def test_pause_of_the_prover_is_no_failure_of_its_targets() -> None:
    """It stood still for a minute after its first SYN, which was lost."""
    lan = Lan(1)
    lan.at(1).silent = True
    lan.settle()
    lan.now += 60.0
    lan.prover.handle_timer(lan.now)
    lan.settle()
    assert lan.prover.under_way
    lan.at(1).silent = False
    lan.run(1.0)
    assert not lan.prover.under_way
    assert not lan.failures


def test_pause_of_the_prover_leaves_a_target_its_time_to_answer() -> None:
    lan = Lan(2)
    lan.at(1).mute = lan.at(2).silent = True  # the second one is dialed all the time
    lan.run(prover.ANSWER_SECONDS + 0.1)
    lan.now += 60.0
    lan.prover.handle_timer(lan.now)
    assert lan.failures == {}
    lan.run(prover.ANSWER_SECONDS)
    assert lan.failures[1] == "silent"


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_targets_are_dialed_32_at_a_time_with_bounded_descriptors() -> None:
    lan = Lan(100)
    for number in range(1, 101):
        lan.at(number).silent = True
    lan.run(0.0)
    assert len({address for _, address in lan.dials}) == prover.TARGETS_AT_ONCE
    lan.run(60.0)
    assert len(lan.failures) == 100
    assert lan.most_open <= prover.TARGETS_AT_ONCE * prover.DIALS_AT_ONCE
    assert not lan.open


def test_stopped_targets_do_not_keep_others_waiting() -> None:
    lan = Lan(100)
    for number in range(1, 51):
        lan.at(number).stopped = True
    lan.run(1.0)
    assert len({address for _, address in lan.dials}) == 100
    for number in range(1, 51):
        lan.cont(number)
    assert not lan.prover.under_way


def test_targets_that_were_reached_are_not_dialed_again_for_a_minute() -> None:
    lan = Lan(4)
    lan.run(0.0)
    lan.now += prover.REMEMBERED_SECONDS - 1
    assert not lan.prove().under_way
    lan.now += 2
    assert lan.prove().under_way
    lan.run(0.0)
    assert not lan.prover.under_way


@pytest.mark.parametrize(
    ("mode", "session", "seconds", "known"),
    [
        pytest.param("warn", b"another session.", 59.0, True, id="another session"),
        pytest.param("warn", b"another session.", 61.0, False, id="too long ago"),
        pytest.param("warn", SESSION, 1.0, False, id="the same session"),
        pytest.param("on", b"another session.", 1.0, False, id="a broken mesh is an error"),
    ],
)
def test_target_that_has_failed_in_another_session_is_not_dialed_again_at_once(
    mode: Mesh, session: bytes, seconds: float, known: bool
) -> None:
    """The first in order proves the same mesh in its own session; its second try dials again."""
    lan = Lan(1, mode=mode)
    lan.at(1).silent = True
    lan.run(6.0)
    lan.now += seconds
    assert lan.prove(session=session).under_way is not known
    assert lan.failures == ({1: "no answer"} if known else {})
    assert lan.prove(session=session).under_way


def test_memory_of_failed_targets_ends_once_they_are_reached_and_is_bounded() -> None:
    lan = Lan(1, mode="warn")
    lan.at(1).refuses = True
    known = (lan.now, SESSION, Failure(member=member(9), how="refused"))
    lan.context.failed.update({(member(9), "10.0.0.9", port): known for port in range(prover.MAX_REMEMBERED)})
    lan.run(2.0)
    assert lan.context.failed.keys() == {(member(1), "10.0.0.1", PORT)}
    lan.at(1).refuses = False
    lan.prove()
    lan.run(0.1)
    assert not lan.context.failed


def test_memory_of_reached_targets_is_bounded() -> None:
    lan = Lan(1)
    lan.context.reached.update({(member(9), "10.0.0.9", port): lan.now for port in range(prover.MAX_REMEMBERED)})
    lan.run(0.1)
    assert lan.context.reached.keys() == {(member(1), "10.0.0.1", PORT)}


def test_target_that_is_gone_with_its_address_is_dialed_again() -> None:
    """A process that was started again has another member id."""
    lan = Lan(1)
    lan.run(0.0)
    fresh = Target(member=member(7), address="10.0.0.1", port=PORT)
    again = Prover(ME, lan.context, port=lambda: PORT)
    again.begin(SESSION, 2, PATH, targets=[fresh], seconds=6.0, now=lan.now)
    assert again.under_way


def inspecting(lan: Lan) -> Inspect:
    """Begin a proof for which the machine is to look at itself."""
    lan.prove(target(1))
    (inspect,) = [each for each in lan.links.effects if isinstance(each, Inspect)]
    assert (inspect.interface, inspect.address, inspect.port) == (PATH.interface, PATH.local_address, PORT)
    lan.settle()
    return inspect


def test_proof_waits_for_what_the_machine_finds_out_about_itself() -> None:
    lan = Lan(1)
    number = inspecting(lan).number
    assert lan.prover.under_way
    lan.prover.inspected(Inspected(number - 1, None))  # of an earlier proof
    assert lan.prover.under_way
    found = frames.Blocked(address="10.0.0.1", chain="inet own c")
    lan.prover.inspected(Inspected(number, found))
    assert lan.result == ProofResult(1, (), found)


def test_proof_does_not_wait_for_a_tool_that_hangs() -> None:
    lan = Lan(1)
    number = inspecting(lan).number
    assert lan.prover.next_timer() == lan.now + INSPECTION_SECONDS, "it has 6 s for its targets"
    lan.prover.handle_timer(lan.now + INSPECTION_SECONDS)
    assert lan.result == ProofResult(1, (), None)
    lan.prover.inspected(Inspected(number, frames.Blocked(address="10.0.0.1", chain="inet own c")))
    assert lan.prover.take_result() is None, "the host has been told already"


def test_node_without_a_path_on_the_network_can_not_look_at_itself() -> None:
    lan = Lan(1)
    lan.prover.begin(SESSION, 2, None, targets=[], suspects=(target(1),), seconds=6.0, now=lan.now)
    assert not any(isinstance(each, Inspect) for each in lan.links.effects)


def test_result_is_taken_once_with_its_epoch() -> None:
    lan = Lan(2)
    lan.at(2).refuses = True
    assert lan.prover.take_result() is None, "targets are dialed"
    lan.run(2.0)
    assert lan.prover.take_result() == ProofResult(1, (Failure(member=member(2), how="refused"),), None)
    assert lan.prover.take_result() is None


def test_next_epoch_hangs_up_on_the_targets_of_the_one_before() -> None:
    lan = Lan(1)
    (dial,) = [each for each in lan.links.effects if isinstance(each, Dial)]
    assert dial.interface == PATH.interface, "link-local targets have no other scope"
    lan.prover.begin(SESSION, 2, PATH, targets=[target(1)], seconds=6.0, now=lan.now)
    assert Hangup(dial.conn) in lan.links.effects
    assert dial.conn not in lan.links


def test_events_without_a_proof_mean_nothing() -> None:
    lan = Lan(1)
    lan.prover.stop()
    lan.prover.inspected(Inspected(1, None))
    lan.prover.handle_timer(lan.now + 60.0)
    assert lan.prover.next_timer() is None
    assert lan.prover.take_result() is None


def test_stop_hangs_up_on_all() -> None:
    lan = Lan(5)
    lan.at(2).stopped = lan.at(3).silent = True
    lan.settle()
    lan.prover.stop()
    lan.settle()
    assert not lan.open
    assert lan.prover.next_timer() is None


# --- any network ------------------------------------------------------------------------------------------------------

Behavior = Callable[[Listener], None]
BEHAVIORS: dict[str, str] = {
    "silent": "no answer",
    "refuses": "refused",
    "small": "large packets",
    "mute": "silent",
    "": "",
}


@EXAMPLES
@given(st.lists(st.sampled_from(sorted(BEHAVIORS)), min_size=1, max_size=80))
def test_each_target_ends_as_it_behaves_and_no_other(behaviors: list[str]) -> None:
    lan = Lan(len(behaviors))
    for number, behavior in enumerate(behaviors, start=1):
        if behavior:
            setattr(lan.at(number), behavior, True)
    lan.run(6.5 * (1 + len(behaviors) // prover.TARGETS_AT_ONCE))
    assert not lan.prover.under_way
    assert lan.failures == {
        number: BEHAVIORS[behavior] for number, behavior in enumerate(behaviors, start=1) if behavior
    }
    assert not lan.open


@EXAMPLES
@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.sampled_from(["silent", "stopped"])), min_size=1, max_size=12),
    st.booleans(),
)
def test_fault_that_ends_in_time_fails_no_target(faults: list[tuple[float, str]], paused: bool) -> None:
    lan = Lan(len(faults))
    for number, (_, fault) in enumerate(faults, start=1):
        setattr(lan.at(number), fault, True)
    lan.settle()
    began = lan.now
    for at, number in sorted((at, number) for number, (at, _) in enumerate(faults, start=1)):
        if paused:
            lan.now = began + at
        else:
            lan.run(max(0.0, began + at - lan.now))
        lan.at(number).silent = False
        lan.cont(number)
    lan.run(1.5)
    assert not lan.prover.under_way
    assert not lan.failures
