"""The connections of the mesh, on the side that dials, with targets and a clock of the test's own."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingle.diagnostics import Detour
from mingle.protocol.effects import Dial, Hangup, Inspect, Write
from mingle.protocol.events import BytesReceived, Connected, Disconnected, Inspected
from mingle.protocol.links import prover
from mingle.protocol.links.handshake import HandshakeFailed, HostConversation
from mingle.protocol.links.prover import ANSWER_SECONDS, ProofResult, Prover, greeting
from mingle.protocol.machine import Context, Identity, Mesh
from mingle.wire import frames
from mingle.wire.authentication import JobKey
from mingle.wire.frames import Failure, Path, ProcessInfo, Target
from tests.support.mesh_proofs import member

SESSION, OTHER = b"S" * 16, b"T" * 16
ME = Identity(job="job", attempt="", member=b"M" * 16, rank=None, world_size=9, node="n", who=ProcessInfo())
PATH = Path(host_address="10.0.0.1", local_address="10.0.0.99", interface="eth0")
PORT = 4000
SECONDS = 6.0
"""How long a target that does not answer is dialed."""
EXAMPLES = settings(derandomize=True, database=None, deadline=None, max_examples=60)
NOT_CONNECTED = {
    "refuses": "Connection refused (ECONNREFUSED)",
    "times out": "Connection timed out (ETIMEDOUT)",
    "has no route": "No route to host (EHOSTUNREACH)",
    "has no descriptor": "Too many open files (EMFILE)",
}
CLOSED = "the other side closed it"
SAYS = {"HTTP": b"HTTP/1.1 400 Bad Request\r\n", "mute": b""}
"""What a program of another kind says to each caller."""


def target(number: int, *, process: int = 0) -> Target:
    return Target(member=member(process or number), address=f"10.0.0.{number}", port=PORT)


class Listener:
    """A target.

    Attributes:
        does: what becomes of a connection. It is "stopped" if its process does not run, though its kernel accepts,
            "silent" if nothing comes back from its address, and "small" if the path to it drops large packets.
        waiting: what its process has not read yet.
    """

    def __init__(
        self, number: int, *, key: JobKey | None = None, session: bytes = SESSION, process: int = 0, does: str = ""
    ) -> None:
        self.does = does
        self.waiting: list[tuple[int, bytes]] = []
        self._greeting = greeting(member(process or number))
        self._answer = functools.partial(
            HostConversation,
            job="job",
            attempt="",
            session=session,
            addresses=(f"10.0.0.{number}",),
            port=PORT,
            key=key,
        )
        self._conversations: dict[int, HostConversation] = {}

    def hear(self, conn: int, data: bytes) -> Iterator[BytesReceived | Disconnected]:
        """Yield what comes back on a connection."""
        if self.does == "closes":
            yield Disconnected(conn, CLOSED)
            return
        if self.does in SAYS:
            yield BytesReceived(conn, SAYS[self.does])
            return
        conversation = self._conversations.setdefault(conn, self._answer())
        try:
            if conversation.receive_data(data):
                conversation.send(self._greeting)
            yield BytesReceived(conn, conversation.data_to_send())
        except HandshakeFailed:
            yield BytesReceived(conn, conversation.data_to_send())
            yield Disconnected(conn, CLOSED)


class Lan:
    """A prover, and its targets by their addresses; everything is delivered at once."""

    def __init__(
        self,
        *listeners: Listener,
        key: JobKey | None = None,
        mode: Mesh = "off",
        astray: Callable[[str], Detour | None] = lambda _: None,
    ) -> None:
        self.now = 100.0
        self.dials: list[tuple[float, str]] = []
        self.listeners = {f"10.0.0.{number}": each for number, each in enumerate(listeners, 1)}
        self.open: dict[int, str] = {}
        """The connections that have not ended, by the address that they lead to."""
        self.most_open = 0
        self.context = Context(
            key=key, new_id=itertools.count(1).__next__, rng=random.Random(0), timeout=60.0, mesh=mode, astray=astray
        )
        self.links = self.context.links
        self._result: ProofResult | None = None
        self.prover = self.prove()

    def prove(self, *suspects: Target, session: bytes = SESSION, process: int = 0) -> Prover:
        """Begin a proof of all targets."""
        self.prover, self._result = Prover(ME, self.context, port=lambda: PORT), None
        targets = [target(number, process=process) for number in range(1, len(self.listeners) + 1)]
        self.prover.begin(session, 1, PATH, targets=targets, suspects=suspects, seconds=SECONDS, now=self.now)
        return self.prover

    def settle(self) -> None:
        """Carry out effects until nothing more happens by itself."""
        while effects := self.links.take_effects():
            self.links.effects[:] = effects[1:]
            match effects[0]:
                case Dial(conn, address):
                    self.dials.append((self.now, address))
                    self.open[conn] = address
                    self.most_open = max(self.most_open, len(self.open))
                    self._dialed(conn, self.listeners[address])
                case Write(conn, data) if conn in self.open:
                    listener = self.listeners[self.open[conn]]
                    if not (listener.does == "small" and len(data) > 1400):
                        listener.waiting.append((conn, data))
                        self._serve(listener)
                case Hangup(conn):
                    self.open.pop(conn, None)  # the other side can have hung up

    def tell(self, event: Connected | BytesReceived | Disconnected) -> None:
        if isinstance(event, Disconnected):
            self.open.pop(event.conn, None)
        self.links.handle(event, self.now)

    def _dialed(self, conn: int, listener: Listener) -> None:
        if listener.does in NOT_CONNECTED:
            self.tell(Disconnected(conn, NOT_CONNECTED[listener.does]))
        elif listener.does != "silent":
            self.tell(Connected(conn, "10.0.0.99", "eth0"))

    def _serve(self, listener: Listener) -> None:
        while listener.waiting and listener.does != "stopped":
            for event in listener.hear(*listener.waiting.pop(0)):
                self.tell(event)

    def mend(self, number: int) -> None:
        """Let a target behave from now on."""
        listener = self.listeners[f"10.0.0.{number}"]
        listener.does = ""
        self._serve(listener)
        self.settle()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.settle()
        end = self.now + seconds
        while self.prover.under_way and (due := self.prover.next_timer()) is not None and due <= end:
            self.now = max(self.now, due)
            self.prover.handle_timer(self.now)
            self.settle()
        self.now = end

    def pause(self, seconds: float) -> None:
        """Let time pass while the prover's process is stopped."""
        self.settle()
        self.now += seconds
        self.prover.handle_timer(self.now)
        self.settle()

    @property
    def result(self) -> ProofResult | None:
        """What the proof has shown, once it is over."""
        self._result = self._result or self.prover.take_result()
        return self._result

    @property
    def failures(self) -> dict[int, str]:
        """How targets failed, by their numbers, in a proof that is over."""
        assert self.result is not None
        return {int.from_bytes(each.member, "big"): each.how for each in self.result.failures}


def lan_of(*behaviors: str, mode: Mesh = "off") -> Lan:
    """Return targets that behave so."""
    return Lan(*(Listener(number, does=each) for number, each in enumerate(behaviors, 1)), mode=mode)


# --- what counts as reached -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, JobKey(b"secret", "job")], ids=["plain", "secret"])
def test_all_targets_are_reached_at_once(key: JobKey | None) -> None:
    lan = Lan(*(Listener(number, key=key) for number in range(1, 9)), key=key)
    lan.run(0.0)
    assert lan.failures == {}
    assert not lan.open
    assert len(lan.dials) == 8


@pytest.mark.parametrize(
    ("does", "how", "seconds", "dials"),
    [
        ("refuses", "refused", prover.REFUSED_SECONDS, 4),
        ("silent", "no answer", SECONDS, 12),
        ("times out", "no answer", SECONDS, 24),
        ("has no route", "no route", SECONDS, 24),
        ("has no descriptor", "no descriptor", SECONDS, 24),
        pytest.param("closes", "closed", SECONDS, 24, id="closes: its process has no free descriptor"),
        ("stopped", "silent", 2 * ANSWER_SECONDS, 3),
        ("mute", "silent", 2 * ANSWER_SECONDS, 3),
        ("small", "large packets", 2 * ANSWER_SECONDS, 3),
    ],
)
def test_target_fails_when_its_time_is_over(does: str, how: str, seconds: float, dials: int) -> None:
    lan = lan_of("", does, "")
    lan.run(seconds - 0.1)
    assert lan.prover.under_way
    lan.run(0.2)
    assert lan.failures == {2: how}
    assert [address for _, address in lan.dials].count("10.0.0.2") == dials
    assert not lan.open


@pytest.mark.parametrize(
    "listener",
    [
        pytest.param({"process": 3}, id="two machines have its address"),
        pytest.param({"session": OTHER}, id="another session"),
        pytest.param({"does": "HTTP"}, id="another protocol"),
        pytest.param({"key": JobKey(b"other", "job")}, id="another secret"),
    ],
)
def test_another_program_at_its_address_is_not_the_target(listener: dict[str, object]) -> None:
    key = JobKey(b"secret", "job") if "key" in listener else None
    lan = Lan(Listener(1, **listener), Listener(2, key=key), key=key)  # type: ignore[arg-type]
    lan.run(prover.REFUSED_SECONDS - 0.1)
    assert lan.prover.under_way, "its listener can be late"
    lan.run(0.5)
    assert lan.failures == {1: "another program"}


@pytest.mark.parametrize(
    ("does", "seconds"),
    [
        ("refuses", 0.6),
        ("silent", 5.4),
        ("stopped", 5.9),
        ("mute", ANSWER_SECONDS - 0.1),
        ("small", ANSWER_SECONDS - 0.1),
    ],
)
def test_target_that_behaves_before_its_time_is_over_is_reached(does: str, seconds: float) -> None:
    lan = lan_of(does)
    lan.run(seconds)
    lan.mend(1)
    lan.run(0.5)
    assert lan.failures == {}


def test_stopped_target_is_reached_on_the_connection_that_it_has_accepted() -> None:
    lan = lan_of("stopped")
    lan.run(1.0)
    lan.mend(1)
    assert lan.failures == {}
    assert len(lan.dials) == 1


def test_target_to_which_the_kernel_does_not_send_as_it_should_fails_with_the_interface() -> None:
    listeners = Listener(1), Listener(2, does="refuses"), Listener(3, does="silent")
    lan = Lan(*listeners, astray=lambda address: Detour(address, "eth1", "eth0"))
    lan.run(SECONDS + 0.1)
    assert lan.failures == {2: "refused", 3: "no route"}, "what refuses is reached"
    assert {each.detail for each in (lan.result.failures if lan.result else ())} == {"", "sent through eth0, not eth1"}


def test_target_that_hangs_up_after_a_while_is_dialed_no_longer_for_it() -> None:
    lan = lan_of("mute")
    for _ in range(3):
        lan.run(2.0)
        for conn in list(lan.open):
            lan.tell(Disconnected(conn, CLOSED))
    lan.run(0.1)
    assert lan.failures == {1: "closed"}


def test_connections_that_fail_in_different_ways_show_loss_and_no_cause() -> None:
    lan = lan_of("mute")
    lan.run(ANSWER_SECONDS - 0.1)
    lan.listeners["10.0.0.1"].does = "small"
    lan.run(4 * ANSWER_SECONDS)
    assert lan.result == ProofResult(1, (Failure(member=member(1), how="no answer", detail=prover.LOSSY),), None)


def test_pause_of_the_prover_leaves_each_target_the_rest_of_its_time() -> None:
    """Once one was called again, one has begun to refuse, and one was dialed in vain."""
    lan = lan_of("stopped", "has no route", "silent")
    lan.run(ANSWER_SECONDS + 0.1)
    lan.listeners["10.0.0.2"].does = "refuses"
    lan.run(prover.DIAL_SECONDS)
    lan.pause(60.0)
    for number in (1, 2, 3):
        lan.mend(number)
    lan.run(1.0)
    assert lan.failures == {}


@EXAMPLES
@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.sampled_from(["silent", "stopped"])), min_size=1, max_size=12),
    st.booleans(),
)
def test_fault_that_ends_in_time_fails_no_target(faults: list[tuple[float, str]], paused: bool) -> None:
    lan = lan_of(*(fault for _, fault in faults))
    lan.settle()
    began = lan.now
    for at, number in sorted((at, number) for number, (at, _) in enumerate(faults, start=1)):
        if paused:
            lan.now = began + at
        else:
            lan.run(max(0.0, began + at - lan.now))
        lan.mend(number)
    lan.run(1.5)
    assert lan.failures == {}


BEHAVIORS = {"silent": "no answer", "refuses": "refused", "small": "large packets", "mute": "silent", "": ""}


@EXAMPLES
@given(st.lists(st.sampled_from(sorted(BEHAVIORS)), min_size=1, max_size=80))
def test_each_target_ends_as_it_behaves_and_no_other(behaviors: list[str]) -> None:
    lan = lan_of(*behaviors)
    lan.run(6.5 * (1 + len(behaviors) // prover.TARGETS_AT_ONCE))
    assert lan.failures == {
        number: BEHAVIORS[behavior] for number, behavior in enumerate(behaviors, start=1) if behavior
    }
    assert not lan.open


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_targets_are_dialed_32_at_a_time_with_bounded_descriptors() -> None:
    lan = lan_of(*["silent"] * 100)
    lan.run(0.0)
    assert len({address for _, address in lan.dials}) == prover.TARGETS_AT_ONCE
    lan.run(60.0)
    assert len(lan.failures) == 100
    assert lan.most_open <= prover.TARGETS_AT_ONCE * prover.DIALS_AT_ONCE
    assert not lan.open


def test_stopped_targets_do_not_keep_others_waiting() -> None:
    lan = lan_of(*["stopped"] * 50, *[""] * 50)
    lan.run(1.0)
    assert len({address for _, address in lan.dials}) == 100
    for number in range(1, 51):
        lan.mend(number)
    assert lan.failures == {}


def test_targets_that_were_reached_are_not_dialed_again_for_a_minute() -> None:
    lan = lan_of("", "")
    lan.run(0.0)
    lan.now += prover.REMEMBERED_SECONDS - 1
    assert not lan.prove().under_way
    assert lan.prove(process=7).under_way, "a process that was started again has another member id"
    lan.now += 2
    assert lan.prove().under_way


@pytest.mark.parametrize(
    ("mode", "session", "seconds", "known"),
    [
        pytest.param("warn", OTHER, prover.REMEMBERED_SECONDS - 1, True, id="another session"),
        pytest.param("warn", OTHER, prover.REMEMBERED_SECONDS + 1, False, id="too long ago"),
        pytest.param("warn", SESSION, 1.0, False, id="the same session"),
        pytest.param("on", OTHER, 1.0, False, id="a broken mesh is an error"),
    ],
)
def test_target_that_has_failed_in_another_session_is_not_dialed_again_at_once(
    mode: Mesh, session: bytes, seconds: float, known: bool
) -> None:
    """The first in order proves the same mesh in its own session; its second try dials again."""
    lan = lan_of("silent", mode=mode)
    lan.run(SECONDS)
    lan.now += seconds
    assert lan.prove(session=session).under_way is not known
    assert not known or lan.failures == {1: "no answer"}
    assert lan.prove(session=session).under_way


def test_memory_of_targets_is_bounded_and_that_of_a_failure_ends_when_it_is_reached() -> None:
    lan = lan_of("refuses", mode="warn")
    others = [(member(9), "10.0.0.9", port) for port in range(prover.MAX_REMEMBERED)]
    lan.context.failed.update(dict.fromkeys(others, (lan.now, SESSION, Failure(member=member(9), how="refused"))))
    lan.context.reached.update(dict.fromkeys(others, lan.now))
    place = (member(1), "10.0.0.1", PORT)
    lan.run(2.0)
    assert lan.context.failed.keys() == {place}
    lan.mend(1)
    lan.prove()
    lan.run(0.1)
    assert (lan.context.failed.keys(), lan.context.reached.keys()) == (set(), {place})


# --- what the machine finds out about itself --------------------------------------------------------------------------

FOUND = frames.Blocked(address="10.0.0.1", chain="inet own c")


def inspecting() -> tuple[Lan, int]:
    """Begin a proof for which the machine is to look at itself."""
    lan = lan_of("")
    lan.prove(target(1))
    (inspect,) = [each for each in lan.links.effects if isinstance(each, Inspect)]
    assert inspect == Inspect(inspect.number, PATH.interface, PATH.local_address, PORT, (target(1),))
    lan.settle()
    assert lan.prover.under_way
    return lan, inspect.number


def test_proof_waits_for_what_the_machine_finds_out_about_itself() -> None:
    lan, number = inspecting()
    lan.prover.inspected(Inspected(number - 1, None))  # of an earlier proof
    assert lan.prover.under_way
    lan.prover.inspected(Inspected(number, FOUND))
    assert lan.result == ProofResult(1, (), FOUND)


def test_proof_does_not_wait_for_a_tool_that_hangs() -> None:
    lan, number = inspecting()
    assert lan.prover.next_timer() == lan.now + prover.INSPECTION_SECONDS, "it has 6 s for its targets"
    lan.prover.handle_timer(lan.now + prover.INSPECTION_SECONDS)
    assert lan.result == ProofResult(1, (), None)
    lan.prover.inspected(Inspected(number, FOUND))
    assert lan.prover.take_result() is None, "the host has been told already"


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_result_is_taken_once_with_its_epoch() -> None:
    lan = lan_of("", "refuses")
    assert lan.prover.take_result() is None, "targets are dialed"
    lan.run(2.0)
    assert lan.prover.take_result() == ProofResult(1, (Failure(member=member(2), how="refused"),), None)
    assert lan.prover.take_result() is None


def test_next_epoch_hangs_up_on_the_targets_of_the_one_before() -> None:
    lan = lan_of("")
    (dial,) = [each for each in lan.links.effects if isinstance(each, Dial)]
    assert dial.interface == PATH.interface, "link-local targets have no other scope"
    lan.prover.begin(SESSION, 2, None, targets=[target(1)], suspects=(target(1),), seconds=SECONDS, now=lan.now)
    assert Hangup(dial.conn) in lan.links.effects
    assert dial.conn not in lan.links
    assert not any(isinstance(each, Inspect) for each in lan.links.effects), "without a path it has nothing to look at"


def test_nothing_is_left_of_a_proof_that_was_stopped() -> None:
    lan = lan_of("", "stopped", "silent")
    lan.settle()
    lan.prover.stop()
    lan.prover.inspected(Inspected(1, None))
    lan.prover.handle_timer(lan.now + 60.0)
    lan.settle()
    assert not lan.open
    assert (lan.prover.next_timer(), lan.prover.take_result()) == (None, None)
