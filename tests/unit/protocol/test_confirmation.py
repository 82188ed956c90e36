"""What the host asks its members before it seals, and what follows. See also test_network_choice.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from mingle.protocol.links import prover
from mingle.protocol.machine import Mesh
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.admission import Admission
from mingle.protocol.session.mesh_proof import Pair
from mingle.protocol.session.network_choice import MOST_REPEATS
from mingle.protocol.session.phases import Confirming, NoNetwork, Open, Sealing
from mingle.protocol.session.seats import HostSeat, Stage
from mingle.wire import frames
from mingle.wire.frames import Failure, Path, ProcessInfo, Unreached
from tests.support.registrar_port import HOST, SESSION, Recorded, of, told

FIRST, SECOND = "10.1.0.1", "10.2.0.1"
NOTHING: Mapping[int, Unreached] = {}


def member(number: int) -> bytes:
    return HOST if number == 0 else number.to_bytes(16, "big")


def join(number: int, networks: Sequence[int], *, mesh_port: int = 4000) -> frames.Join:
    paths = tuple(
        Path(host_address=f"10.{each}.0.1", local_address=f"10.{each}.0.{number + 1}", interface=f"eth{each}")
        for each in networks
    )
    who = ProcessInfo(hostname=f"h{number}", pid=number, address=paths[0].local_address)
    port = mesh_port + number if mesh_port else 0
    return frames.Join(world_size=3, rank=number, node=f"node{number}", who=who, paths=paths, mesh_port=port)


class Opened(Recorded):
    """The session of three nodes, on two networks unless it is told otherwise; all have joined."""

    def __init__(
        self,
        mesh: Mesh = "on",
        networks: Sequence[int] = (1, 2),
        *,
        mesh_port: int = 4000,
        confirm_seconds: float = float("inf"),
        **settings: Any,
    ) -> None:
        lengths = {f"10.{each}.0.1": 24 for each in networks}
        host = HostSeat(member=HOST, applicant=join(0, networks), prefix_lengths=lengths)
        super().__init__(host, Admission(3), mesh=mesh, **settings)
        self.admission.confirm_seconds = confirm_seconds
        for number in (1, 2):
            self.join(number, member(number), join(number, networks, mesh_port=mesh_port), 1.0)

    def confirm(self, number: int, failed: Mapping[int, Unreached] = NOTHING, detail: str = "", **more: Any) -> None:
        """Let a node confirm: it has failed to reach these."""
        failures = tuple(Failure(member=member(each), how=how, detail=detail) for each, how in failed.items())
        own = self.seats[member(number)]
        frame = frames.Confirmed(
            **{
                "session": SESSION,
                "epoch": self.state.epoch,
                "paths": own.applicant.paths,
                "failures": failures,
                **more,
            }
        )
        self.confirmed(number or None, frame, 2.0)

    def asked(self) -> list[tuple[str | None, float]]:
        """The networks that member 1 was asked to prove since the last time, each with its time."""
        return [(each.network, each.seconds) for each in told(self.port.calls, 1, frames.Confirm)]

    @property
    def broken(self) -> mesh_proof.Proof:
        """The proof with which the session has ended."""
        assert self.phase is NoNetwork
        ((_, broken),) = of(self.port.calls, "end_without_network")
        return broken.proof


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


@pytest.mark.parametrize(("mesh", "mesh_port"), [("off", 4000), ("on", 0)], ids=["off", "no other node takes part"])
def test_nothing_is_proved_with_off_or_if_no_other_node_takes_part(mesh: Mesh, mesh_port: int) -> None:
    registrar = Opened(mesh, mesh_port=mesh_port)
    assert told(registrar.port.calls, 1, frames.Confirm) == [frames.Confirm(session=SESSION, epoch=1)]
    assert not of(registrar.port.calls, "prove_mesh")


def test_error_comes_before_a_near_deadline() -> None:
    assert Opened(deadline=4.0).asked() == [(FIRST, 1.0)]


def test_session_is_sealed_only_when_the_host_has_proved_its_own_part() -> None:
    registrar = Opened()
    registrar.confirm(1)
    registrar.confirm(2)
    assert registrar.phase is Confirming
    registrar.confirm(0)
    assert of(registrar.port.calls, "open_store") == [("open_store", 1, FIRST)]


def test_proof_of_a_voided_epoch_does_not_count() -> None:
    registrar = Opened()
    registrar.lost(2, 1.5)
    registrar.join(3, member(2), join(2, (1, 2)), 1.6)
    registrar.confirm(0, epoch=1)
    assert registrar.phase is Confirming
    assert registrar.seats[HOST] in registrar.seats.behind(Stage.CONFIRMED)


def test_nodes_of_a_broken_pair_look_at_themselves_with_the_last_proof() -> None:
    registrar = Opened(networks=(1,))
    for number in (1, 2, 0):
        registrar.confirm(number, {2: "no answer"} if number == 1 else {})
    asked = [told(registrar.port.calls, number, frames.Confirm)[-1] for number in (1, 2)]
    assert [[each.member for each in confirm.suspects] for confirm in asked] == [[member(2)], [member(1)]]
    registrar.confirm(1, {2: "no answer"})
    found = frames.Blocked(address="10.1.0.2", chain="inet own c", rule="tcp drop")
    registrar.confirm(2, blocked=found)
    registrar.confirm(0)
    assert (list(registrar.broken.failures), registrar.broken.blocked) == ([(1, 2)], {2: found})


def test_warning_is_shown_once_and_the_session_is_sealed() -> None:
    registrar = Opened("warn", networks=(1,))
    for number in (1, 2, 0) * 2:
        registrar.confirm(number, {2: "no answer"} if number == 1 else {})
    assert len(of(registrar.port.calls, "notice")) == 1
    assert registrar.phase is Sealing


def test_new_members_begin_with_the_first_network_again() -> None:
    registrar = Opened()
    for number in (1, 2, 0):
        registrar.confirm(number, {2: "no answer"} if number == 1 else {})
    assert registrar.asked()[-1] == (SECOND, mesh_proof.NEXT_NETWORK_SECONDS)
    registrar.lost(2, 2.5)
    assert registrar.phase is Open
    registrar.port.take()
    registrar.join(3, member(3), join(2, (1, 2)), 3.0)
    assert registrar.asked() == [(FIRST, mesh_proof.NETWORK_SECONDS)]


# --- processes that can be stopped ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "detail"),
    [("silent", ""), ("large packets", ""), ("no answer", prover.LOSSY)],
    ids=["silent", "large", "lossy"],
)
def test_process_that_is_silent_until_it_confirms_is_dialed_once_more(how: Unreached, detail: str) -> None:
    registrar = Opened(networks=(1,))
    for number in (0, 1):
        registrar.confirm(number, {2: how}, detail)
    assert registrar.status().unconfirmed == (2,)
    assert registrar.status().unanswered.startswith("rank 2 on host h2 (10.1.0.3 on eth1), pid 2, ")
    registrar.confirm(2)
    assert registrar.asked() == [(FIRST, mesh_proof.NETWORK_SECONDS)] * 2
    assert registrar.status().unanswered == ""
    for number in (0, 1, 2):
        registrar.confirm(number)
    assert registrar.phase is Sealing


def test_host_that_is_silent_until_its_own_part_is_over_is_dialed_once_more() -> None:
    registrar = Opened(networks=(1,))
    registrar.confirm(1, {0: "silent"})
    registrar.confirm(2)
    registrar.confirm(0)
    assert registrar.asked() == [(FIRST, mesh_proof.NETWORK_SECONDS)] * 2


@pytest.mark.parametrize(
    ("confirmations", "failed", "unanswered"),
    [
        pytest.param([(2, {}), (0, {}), (1, {2: "silent"})], {(1, 2)}, set(), id="it had confirmed"),
        pytest.param(
            [(0, {}), (1, {2: "silent"}), (2, {1: "silent"})], {(1, 2), (2, 1)}, set(), id="two call each other silent"
        ),
        pytest.param(
            [(0, {2: "silent"}), (1, {0: "no answer"}), (2, {})],
            {(1, 0)},
            {(0, 2)},  # whether this path is broken is not known, nor that it works
            id="it was stopped, and another path is broken",
        ),
    ],
)
def test_silent_process_has_failed_if_it_had_confirmed_or_says_the_same(
    confirmations: Sequence[tuple[int, Mapping[int, Unreached]]], failed: Collection[Pair], unanswered: Collection[Pair]
) -> None:
    registrar = Opened(networks=(1,))
    for number, failures in (*confirmations, *confirmations):
        registrar.confirm(number, failures)
    assert (set(registrar.broken.failures), set(registrar.broken.unanswered)) == (failed, unanswered)


def test_process_that_always_confirms_last_and_never_answers_has_failed_in_the_end() -> None:
    registrar, epochs = Opened("warn", networks=(1,)), 0
    while registrar.phase is Confirming:
        epochs += 1
        for number in (0, 1, 2):
            registrar.confirm(number, {2: "silent"} if number < 2 else {})
    assert epochs == MOST_REPEATS + 2
    ((_, text),) = of(registrar.port.calls, "notice")
    assert "rank 2 on host h2" in text


def test_members_that_have_not_confirmed_in_time_are_dropped_whoever_has_dialed_them_in_vain() -> None:
    registrar = Opened(networks=(1,), confirm_seconds=12.0)
    registrar.confirm(0, {2: "silent"})
    registrar.confirm(1, {2: "silent"})
    registrar.handle_timer(13.0)
    assert list(registrar.seats) == [HOST, member(1)]
