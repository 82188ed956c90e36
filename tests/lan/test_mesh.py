"""Jobs whose nodes can't all reach each other, on the simulated network, and the same on a healthy one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from msgspec import structs

from mingle.errors import ConnectivityError
from mingle.protocol.links.handshake import HandshakeFailed, MemberConversation
from mingle.protocol.links.prover import Prover
from mingle.protocol.links.prover import greeting as genuine_greeting
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.phases import Confirming
from mingle.protocol.session.registrar import Registrar
from mingle.wire import frames
from mingle.wire.datagrams import Rejected
from tests.lan.gathering import Gathering, failure_of, outcome_of
from tests.lan.meshes import Faults, MeshElectionSchedule, MeshInvariants, MeshSchedule, a_mesh_with_stopped_processes
from tests.lan.network import Barrier
from tests.lan.planting import Act, Rule, Seam, always, expect_found
from tests.lan.process import Mute
from tests.lan.seeds import failures
from tests.support.levels import batches

RAISED_SECONDS = 12.0


class Meshed(Gathering):
    """A gathering whose jobs need a mesh."""

    def __init__(self, seed: int = 1, *, size: int = 4, electing: bool = False, **settings: object) -> None:
        super().__init__(seed, size=size, mesh="on", **settings)  # type: ignore[arg-type]
        MeshInvariants(self.world)
        if electing:
            self.processes_to_be = [self.elector(f"m{number}", at=self.rng.uniform(0, 1)) for number in range(size)]
        else:
            self.processes_to_be = self.everybody([self.rng.uniform(0, 1) for _ in range(size)])

    def part(self, one: int, other: int, *, barrier: Barrier = "drop") -> None:
        """Let nothing pass between two machines."""
        machines = self.network.machine(f"m{one}"), self.network.machine(f"m{other}")
        self.network.part(self.lan, *machines, barrier=barrier)

    def raised(self) -> str:
        """Run; return the error that all raise in time."""
        self.run()
        texts = {str(failure_of(process)) for process in self.processes}
        assert len(texts) == 1
        assert all(isinstance(process.failure, ConnectivityError) for process in self.processes)
        last = max(process.started_at for process in self.processes)
        assert all((process.failed_at or 0.0) - last < RAISED_SECONDS for process in self.processes)
        return texts.pop()

    def expect_mesh(self) -> None:
        """Run; all must form."""
        self.run()
        self.expect_formed()


def hosts_in(text: str, size: int) -> list[int]:
    """The machines that an error names about pairs."""
    lines = text.partition("likely cause")[0]
    return [
        number for number in range(size) if f"m{number} " in lines or f"m{number}," in lines or f"m{number}:" in lines
    ]


@pytest.mark.parametrize("electing", [False, True])
@pytest.mark.parametrize(("barrier", "words"), [("drop", "no answer"), ("reset", "refuses"), ("icmp", "refuses")])
@pytest.mark.parametrize("seed", range(3))
def test_pair_that_is_parted_is_named_by_all(electing: bool, barrier: Barrier, words: str, seed: int) -> None:
    gathering = Meshed(seed, electing=electing, size=5)
    gathering.world.run(3.0, until=lambda: any(each.hosts for each in gathering.processes))
    host = next(each for each in gathering.processes if each.hosts)
    one, other = [number for number in range(5) if f"m{number}" != host.machine.name][:2]
    gathering.part(one, other, barrier=barrier)
    text = gathering.raised()
    assert hosts_in(text, 5) == [one, other]
    assert "do not reach each other" in text
    assert words in text


def test_machine_that_takes_no_calls_is_named() -> None:
    gathering = Meshed(size=8)
    gathering.network.machine("m5").takes_calls = False
    assert "no other node reaches rank 5 on host m5" in gathering.raised()


@pytest.mark.parametrize("seed", range(4))
def test_machine_that_takes_no_calls_is_named_whoever_is_elected(seed: int) -> None:
    gathering = Meshed(seed, electing=True)
    gathering.network.machine("m1").takes_calls = False
    assert "no other node reaches host m1" in gathering.raised()


def test_host_is_named_whose_firewall_lets_only_those_connections_live_by_which_the_others_have_joined() -> None:
    gathering = Meshed(5, size=3)
    host, *others = gathering.processes_to_be

    def close() -> None:
        for each in others:
            gathering.network.close(gathering.lan, each.machine, host.machine)

    gathering.world.when(lambda: host.core is not None and host.phase is Confirming, close)
    assert "no other node reaches rank 0 on host m0" in gathering.raised()


def test_groups_are_named() -> None:
    gathering = Meshed(size=9)
    for one, other in itertools.product(range(1, 5), range(5, 9)):
        gathering.part(one, other)
    assert "m1, m2, m3, m4 and m5, m6, m7, m8 do not reach each other" in gathering.raised()


def plug(gathering: Meshed | Gathering, numbers: Iterable[int]) -> None:
    for number in numbers:
        gathering.network.bare_machine(f"m{number}")
        gathering.network.plug(f"m{number}", "a0", f"10.1.0.{number + 1}", "first")
        gathering.network.plug(f"m{number}", "b0", f"10.2.0.{number + 1}", "second")


def two_networks(seed: int) -> Gathering:
    gathering = Gathering(seed, mesh="on")
    MeshInvariants(gathering.world)
    plug(gathering, range(4))
    gathering.everybody()
    return gathering


@pytest.mark.parametrize("seed", range(5))
def test_next_network_is_taken_if_the_mesh_holds_there(seed: int) -> None:
    gathering = two_networks(seed)
    first = gathering.segment("first")
    gathering.network.part(first, gathering.network.machine("m1"), gathering.network.machine("m2"))
    gathering.run()
    gathering.expect_formed(within=RAISED_SECONDS)
    assert {outcome_of(process).store_address for process in gathering.processes} == {"10.2.0.1"}
    assert {outcome_of(process).interface for process in gathering.processes} == {"b0"}


def test_networks_on_all_of_which_a_pair_is_parted_are_named() -> None:
    gathering = two_networks(1)
    for name in ("first", "second"):
        gathering.network.part(gathering.segment(name), gathering.machine("m1"), gathering.machine("m2"))
    gathering.run()
    (text,) = {str(failure_of(process)) for process in gathering.processes}
    assert "on the network of 10.1.0.1, nor on those of 10.2.0.1" in text
    assert max(process.elapsed for process in gathering.processes) < RAISED_SECONDS


def test_path_that_is_cut_for_a_moment_ends_no_job() -> None:
    gathering = Meshed(3)
    gathering.world.when(lambda: gathering.processes[0].phase is Confirming, functools.partial(gathering.part, 1, 2))
    gathering.part(1, 2)
    gathering.world.after(7.0, gathering.network.heal_all)
    gathering.expect_mesh()


# --- healthy networks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 24])
@pytest.mark.parametrize("electing", [False, True])
def test_healthy_job_forms_at_once(size: int, electing: bool) -> None:
    gathering = Meshed(size=size, electing=electing)
    gathering.run()
    gathering.expect_formed(within=2.5 if electing else 0.3)


@pytest.mark.slow
def test_job_of_more_than_256_nodes_dials_a_sample() -> None:
    gathering = Gathering(1, size=mesh_proof.FULL_MESH + 44, mesh="on")
    dialed = []
    gathering.world.before_write.append(
        lambda sender, _, data: dialed.append(sender) if b"purpose\xa4mesh" in data else None
    )
    gathering.everybody()
    gathering.run()
    gathering.expect_formed(within=3.0)
    assert len(dialed) == mesh_proof.SAMPLE * gathering.size
    (notice,) = gathering.processes[0].notices
    assert "its mesh of 300 nodes is sampled: each node has reached 32 others" in notice


@pytest.mark.soak
@pytest.mark.parametrize("seeds", batches(20, 160, soak=2_500, size=20))
def test_lost_datagrams_and_stopped_processes_cause_no_alarm(seeds: range) -> None:
    for seed in seeds:
        a_mesh_with_stopped_processes(seed)


# --- planted mistakes -------------------------------------------------------------------------------------------------


def deaf(gathering: Meshed) -> None:
    """Close the listener of a member, which keeps its connection to the host."""
    process = gathering.processes_to_be[2]

    def close() -> None:
        for port in [port for port, owner in process.machine.listeners.items() if owner is process]:
            del process.machine.listeners[port]

    gathering.world.when(lambda: process.alive, close)


def strange(gathering: Meshed, says: bytes = b"HTTP/1.1 400 Bad Request\r\n\r\n") -> None:
    """Put another program at the port of a member, which keeps its connection to the host."""
    process = gathering.processes_to_be[2]

    def take() -> None:
        for port in [port for port, owner in process.machine.listeners.items() if owner is process]:
            Mute(process.machine, port, says)

    gathering.world.when(lambda: process.alive, take)


FAULTS: dict[str, tuple[Callable[[Meshed], None], str]] = {
    "deaf": (deaf, "no other node reaches rank 2 on host m2 (10.0.0.3 on eth0): TCP port"),
    "strange": (strange, "no other node reaches rank 2 on host m2 (10.0.0.3 on eth0): another program"),
    "silent": (
        functools.partial(strange, says=b""),
        "no other node reaches rank 2 on host m2 (10.0.0.3 on eth0): TCP port",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_port_without_its_listener_is_named(fault: str) -> None:
    cause, words = FAULTS[fault]
    gathering = Meshed(4)
    cause(gathering)
    assert words in gathering.raised()


def test_process_that_is_stopped_is_named_while_the_others_wait_for_it() -> None:
    gathering = Meshed(4, timeout=30.0)
    victim = gathering.processes_to_be[2]
    host = gathering.processes_to_be[0]
    gathering.world.when(lambda: host.core is not None and host.phase is Confirming, victim.stop)
    gathering.world.run(20.0)
    status = host.host.registrar.status()
    assert status.unconfirmed == (2,)
    assert status.unanswered.startswith("rank 2 on host m2 (10.0.0.3 on eth0), pid ")
    gathering.run()
    first = min(gathering.processes, key=lambda each: each.failed_at or float("inf"))
    failure = str(failure_of(first))
    assert "no answer while confirming from ranks: 2" in failure
    assert "likely cause: rank 2 on host m2 (10.0.0.3 on eth0), pid" in failure


def has_failures(_: Registrar, __: int | None, said: frames.Confirmed, now: float) -> bool:
    return bool(said.failures)


def without_failures(genuine: Any, registrar: Registrar, conn: int | None, frame: frames.Confirmed, now: float) -> None:
    genuine(registrar, conn, structs.replace(frame, failures=()), now)


def any_answer(genuine: Any, conversation: MemberConversation, untrusted: bytes) -> Sequence[frames.AnyFrame]:
    try:
        answer: Sequence[frames.AnyFrame] = genuine(conversation, untrusted)
    except (Rejected, HandshakeFailed):
        greeting = genuine_greeting(b"")
        conversation.welcome = greeting  # type: ignore[assignment]
        return [greeting]
    return answer


UNREACHED_COUNTS = (Act(Registrar, "confirmed", without_failures, when=has_failures),)
STRANGER_COUNTS = (Act(MemberConversation, "receive_data", any_answer), Rule(Prover, "accepts", always(True)))


@pytest.mark.parametrize(("fault", "seams"), [("deaf", UNREACHED_COUNTS), ("strange", STRANGER_COUNTS)])
def test_planted_mistake_is_found(fault: str, seams: tuple[Seam, ...]) -> None:
    def scenario() -> None:
        gathering = Meshed(4)
        FAULTS[fault][0](gathering)
        gathering.run()

    expect_found(f"{fault}_counts", *seams, run=scenario, finding="have not met in both directions")


# --- bad days -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("kind", [MeshSchedule, MeshElectionSchedule])
@pytest.mark.parametrize("seeds", batches(10, 160, soak=2_500, size=30))
def test_random_schedules(kind: type[MeshSchedule | MeshElectionSchedule], seeds: range) -> None:
    assert list(failures(kind, seeds)) == []


@pytest.mark.parametrize("seed", [100448, 101014])
def test_pair_that_stays_parted_until_its_job_fails(seed: int) -> None:
    schedule = MeshElectionSchedule(seed)
    schedule.run()
    assert schedule.errors


def test_host_that_goes_on_after_a_stop_names_the_fault_that_it_knew_before() -> None:
    gathering = Meshed()
    host, *_ = gathering.processes_to_be
    faults = Faults(gathering.network)
    gathering.part(1, 2)
    for after, action in ((8.0, host.stop), (9.0, gathering.network.heal_all), (20.0, host.cont)):
        gathering.world.after(after, action)
    gathering.run()
    assert failure_of(host)
    assert host.failed_at == host.continued_at
    assert faults.without(str(host.failure)) == []
