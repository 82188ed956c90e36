"""What the host asks its members before it seals, and what follows. See also test_network_choice.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mingle.protocol.explain import mesh_report
from mingle.protocol.links import prover
from mingle.protocol.machine import Mesh
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.network_choice import MOST_REPEATS
from mingle.protocol.session.phases import Confirming, NoNetwork, Open, Sealing
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.seats import HostSeat, Stage
from mingle.wire import frames
from mingle.wire.frames import Failure, Path, ProcessInfo
from tests.support.registrar_port import RecordingPort, of, told

SESSION = b"S" * 16
HOST = b"H" * 16
FIRST, SECOND = "10.1.0.1", "10.2.0.1"


def member(number: int) -> bytes:
    return HOST if number == 0 else number.to_bytes(16, "big")


def paths(number: int, networks: Sequence[int] = (1, 2)) -> tuple[Path, ...]:
    return tuple(
        Path(host_address=f"10.{each}.0.1", local_address=f"10.{each}.0.{number + 1}", interface=f"eth{each}")
        for each in networks
    )


def join(number: int, networks: Sequence[int] = (1, 2), *, mesh_port: int = 4000) -> frames.Join:
    who = ProcessInfo(hostname=f"h{number}", pid=number, address=f"10.{networks[0]}.0.{number + 1}")
    return frames.Join(
        world_size=3,
        rank=number,
        node=f"node{number}",
        who=who,
        paths=paths(number, networks),
        mesh_port=mesh_port + number if mesh_port else 0,
    )


class Opened(Registrar):
    """A registrar of three nodes, on two networks, with the port of a test."""

    def __init__(
        self,
        mode: Mesh = "on",
        networks: Sequence[int] = (1, 2),
        *,
        deadline: float = float("inf"),
        mesh_port: int = 4000,
    ) -> None:
        lengths = {f"10.{each}.0.1": 24 for each in networks}
        host = HostSeat(member=HOST, applicant=join(0, networks), prefix_lengths=lengths)
        self.port = RecordingPort()
        super().__init__(SESSION, host, self.port, self.port, Admission(3), mesh=mode, deadline=deadline)
        for number in (1, 2):
            self.join(number, member(number), join(number, networks, mesh_port=mesh_port), 1.0)

    def confirm(self, failures: dict[int, Sequence[int]] | None = None, networks: Sequence[int] = (1, 2)) -> None:
        """Have all nodes confirm; each of them failed to reach some."""
        epoch = self.state.epoch
        for number in (1, 2, 0):
            failed = tuple(Failure(member=member(other), how="no answer") for other in (failures or {}).get(number, ()))
            if number:
                frame = frames.Confirmed(session=SESSION, epoch=epoch, paths=paths(number, networks), failures=failed)
                self.confirmed(number, frame, 2.0)
            elif isinstance(self.state, Confirming) and self.state.epoch == epoch:
                self.confirm_itself(epoch, failed)

    def confirm_itself(self, epoch: int, failures: tuple[Failure, ...] = ()) -> None:
        """Have the host confirm what it has proved itself."""
        own = self.seats.own.paths
        self.confirmed(None, frames.Confirmed(session=SESSION, epoch=epoch, paths=own, failures=failures), 2.0)

    def asked(self) -> list[tuple[str | None, float]]:
        """The networks that member 1 was asked to prove since the last time, each with its time."""
        return [(each.network, each.seconds) for each in told(self.port.calls, 1, frames.Confirm)]


def test_each_node_gets_its_own_targets_and_the_host_as_well() -> None:
    registrar = Opened()
    (confirm,) = told(registrar.port.calls, 1, frames.Confirm)
    assert (confirm.network, confirm.seconds) == (FIRST, mesh_proof.NETWORK_SECONDS)
    assert [(each.member, each.address, each.port) for each in confirm.targets] == [
        (member(2), "10.1.0.3", 4002),
        (HOST, FIRST, 4000),
    ]
    ((_, epoch, proof),) = of(registrar.port.calls, "prove_mesh")
    assert (epoch, proof.network, proof.seconds) == (1, FIRST, mesh_proof.NETWORK_SECONDS)
    assert [each.member for each in proof.targets(HOST)] == [member(1), member(2)]


def test_session_is_sealed_only_when_the_host_has_proved_its_own_part() -> None:
    registrar = Opened()
    for number in (1, 2):
        registrar.confirmed(number, frames.Confirmed(session=SESSION, epoch=1, paths=paths(number)), 2.0)
    assert isinstance(registrar.state, Confirming)
    registrar.confirm_itself(1)
    assert of(registrar.port.calls, "open_store") == [("open_store", 1, FIRST)]


def test_proof_of_a_voided_epoch_does_not_count() -> None:
    registrar = Opened()
    registrar.lost(2, 1.5)
    registrar.join(3, member(2), join(2), 1.6)
    registrar.confirm_itself(1)
    assert isinstance(registrar.state, Confirming)
    assert registrar.seats[HOST] in registrar.seats.behind(Stage.CONFIRMED)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_nothing_is_proved_with_off_or_if_no_other_node_takes_part(mode: Mesh) -> None:
    registrar = Opened(mode, mesh_port=4000 if mode == "off" else 0)
    assert told(registrar.port.calls, 1, frames.Confirm) == [frames.Confirm(session=SESSION, epoch=1)]
    assert not of(registrar.port.calls, "prove_mesh")


def test_nodes_of_a_broken_pair_look_at_themselves_with_the_last_proof() -> None:
    registrar = Opened(networks=(1,))
    registrar.confirm({1: [2]}, networks=(1,))
    asked = [told(registrar.port.calls, number, frames.Confirm)[-1] for number in (1, 2)]
    assert [[each.member for each in confirm.suspects] for confirm in asked] == [[member(2)], [member(1)]]
    found = frames.Blocked(address="10.1.0.2", chain="inet own c", rule="tcp drop")
    failed = (Failure(member=member(2), how="no answer"),)
    first = frames.Confirmed(session=SESSION, epoch=2, paths=paths(1, (1,)), failures=failed)
    registrar.confirmed(1, first, 2.0)
    registrar.confirmed(2, frames.Confirmed(session=SESSION, epoch=2, paths=paths(2, (1,)), blocked=found), 2.0)
    registrar.confirm_itself(2)
    ((_, broken),) = of(registrar.port.calls, "end_without_network")
    proof = broken.proof
    assert "finds in its own firewall, rule `tcp drop`" in mesh_report.cause_of(proof)[0]


def test_first_network_is_proved_once_more_before_the_session_ends() -> None:
    registrar = Opened()
    registrar.confirm({1: [2]})
    registrar.confirm({0: [2], 2: [0]})
    assert registrar.asked()[2:] == [(FIRST, mesh_proof.AGAIN_SECONDS)]
    registrar.confirm({1: [2]})
    assert isinstance(registrar.state, NoNetwork)
    ((_, broken),) = of(registrar.port.calls, "end_without_network")
    proof = broken.proof
    assert (proof.network, proof.others, list(proof.failures)) == (FIRST, (SECOND,), [(1, 2)])


def test_warning_is_shown_once_and_the_session_is_sealed() -> None:
    registrar = Opened("warn", networks=(1,))
    for _ in range(2):
        registrar.confirm({1: [2]}, networks=(1,))
    ((_, text),) = of(registrar.port.calls, "notice")
    assert "the ranks start anyway (mesh=warn)" in text
    assert isinstance(registrar.state, Sealing)


def test_error_comes_before_a_near_deadline() -> None:
    assert Opened(deadline=4.0).asked() == [(FIRST, 1.0)]


def test_new_members_begin_with_the_first_network_again() -> None:
    registrar = Opened()
    registrar.confirm({1: [2]})
    registrar.lost(2, 2.5)
    assert isinstance(registrar.state, Open)
    registrar.port.take()
    registrar.join(3, member(3), join(2), 3.0)
    assert registrar.asked() == [(FIRST, mesh_proof.NETWORK_SECONDS)]


# --- processes that can be stopped ------------------------------------------------------------------------------------


class Silent(Opened):
    """One whose members confirm one after another, on one network, and call targets silent."""

    def __init__(self, mode: Mesh = "on") -> None:
        super().__init__(mode, networks=(1,))

    def say(self, number: int, *silent: int, how: frames.Unreached = "silent", detail: str = "") -> None:
        """Have a node confirm that it reaches all others but these."""
        failed = tuple(Failure(member=member(each), how=how, detail=detail) for each in silent)
        if number == 0:
            self.confirm_itself(self.state.epoch, failed)
            return
        frame = frames.Confirmed(session=SESSION, epoch=self.state.epoch, paths=paths(number, (1,)), failures=failed)
        self.confirmed(number, frame, 2.0)

    @property
    def failed(self) -> list[tuple[int, int]]:
        """The pairs of the error with which the session has ended."""
        ((_, broken),) = of(self.port.calls, "end_without_network")
        proof = broken.proof
        return list(proof.failures)


LOST = ("no answer", prover.LOSSY)


@pytest.mark.parametrize(("how", "detail"), [("silent", ""), ("large packets", ""), LOST])
def test_process_that_is_silent_until_it_confirms_is_dialed_once_more(how: frames.Unreached, detail: str) -> None:
    registrar = Silent()
    registrar.say(0, 2, how=how, detail=detail)
    registrar.say(1, 2, how=how, detail=detail)
    assert registrar.status().unconfirmed == (2,)
    assert registrar.status().unanswered.startswith("rank 2 on host h2 (10.1.0.3 on eth1), pid 2, accepts connections")
    registrar.say(2)
    assert registrar.asked() == [(FIRST, mesh_proof.NETWORK_SECONDS)] * 2
    assert registrar.status().unanswered == ""
    for number in (0, 1, 2):
        registrar.say(number)
    assert isinstance(registrar.state, Sealing)


def test_host_that_is_silent_until_its_own_part_is_over_is_dialed_once_more() -> None:
    registrar = Silent()
    registrar.say(1, 0)
    registrar.say(2)
    registrar.say(0)
    assert registrar.asked() == [(FIRST, mesh_proof.NETWORK_SECONDS)] * 2


def test_process_that_is_silent_though_it_has_confirmed_can_not_be_reached() -> None:
    registrar = Silent()
    for _ in range(2):
        registrar.say(2)
        registrar.say(0)
        registrar.say(1, 2)
    assert registrar.failed == [(1, 2)]


def test_two_nodes_that_call_each_other_silent_have_both_failed() -> None:
    registrar = Silent()
    for _ in range(2):
        registrar.say(0)
        registrar.say(1, 2)
        registrar.say(2, 1)
    assert sorted(registrar.failed) == [(1, 2), (2, 1)]


def test_process_that_was_stopped_is_not_named_beside_a_broken_path() -> None:
    """Whether the path to it is broken is not known, nor that it works."""
    registrar = Silent()
    for _ in range(2):
        registrar.say(0, 2)
        registrar.say(1, 0, how="no answer")
        registrar.say(2)
    ((_, broken),) = of(registrar.port.calls, "end_without_network")
    proof = broken.proof
    assert list(proof.failures) == [(1, 0)]
    assert list(proof.unanswered) == [(0, 2)]


def test_process_that_always_confirms_last_and_never_answers_has_failed_in_the_end() -> None:
    registrar = Silent("warn")
    epochs = 0
    while isinstance(registrar.state, Confirming):
        epochs += 1
        for number in (0, 1):
            registrar.say(number, 2)
        registrar.say(2)
    assert epochs == MOST_REPEATS + 2
    ((_, text),) = of(registrar.port.calls, "notice")
    assert "no other node reaches rank 2 on host h2" in text


# --- members that do not confirm in time ------------------------------------------------------------------------------


def test_members_that_have_not_confirmed_in_time_are_dropped_whoever_has_dialed_them_in_vain() -> None:
    registrar = Silent()
    assert isinstance(registrar.state, Confirming)
    registrar.state.ends = 13.0
    registrar.say(0, 2)
    registrar.say(1, 2)
    registrar.handle_timer(13.0)
    assert list(registrar.seats) == [HOST, member(1)]
