from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from mingle.config import placement
from mingle.config.launchers import Placement
from mingle.config.placement import NodeRank, argued_node_rank, asked_node_rank, resolve_placement
from mingle.errors import ConfigurationError, LauncherError
from tests.support import launcher_environments as recorded
from tests.support.isolation import needs_namespaces
from tests.support.launcher_environments import PYTORCH_JOB_OF_8_PER_POD as PODS_OF_8
from tests.support.launcher_environments import SBATCH_BODY, SRUN, SRUN_OF_ONE, TORCHRUN

POD = {"JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("environ", "arguments", "expected"),
    [
        pytest.param({}, {"rank": 1, "world_size": 2}, (1, 2), id="arguments"),
        pytest.param({"MINGLE_RANK": "1", "MINGLE_WORLD_SIZE": "2"}, {}, (1, 2), id="MINGLE_*"),
        pytest.param(SRUN, {}, (3, 4), id="launcher"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, {}, (1, 2), id="plain"),
        pytest.param({"WORLD_SIZE": "2"}, {"rank": 1}, (1, 2), id="rank argument, plain size"),
        pytest.param({"RANK": "1"}, {"world_size": 2}, (1, 2), id="size argument, plain rank"),
        pytest.param(
            {"MINGLE_RANK": "1", "MINGLE_WORLD_SIZE": "2", "RANK": "5", "WORLD_SIZE": "8"},
            {},
            (1, 2),
            id="MINGLE_* before plain",
        ),
        pytest.param({**SRUN, "RANK": "0", "WORLD_SIZE": "2"}, {}, (3, 4), id="launcher before plain"),
        pytest.param({**SRUN, "RANK": "x"}, {}, (3, 4), id="plain is not even read after a launcher"),
        pytest.param(SRUN, {"rank": 3, "world_size": 4}, (3, 4), id="arguments agree with the launcher"),
        pytest.param({**SRUN, "MINGLE_RANK": "0"}, {}, (0, 4), id="MINGLE_RANK overrules a launcher"),
        pytest.param({**SRUN, "MINGLE_WORLD_SIZE": "8"}, {}, (3, 8), id="MINGLE_WORLD_SIZE overrules a launcher"),
        pytest.param({**SRUN, "MINGLE_RANK": "0"}, {"rank": 0}, (0, 4), id="argument agrees with what overrules"),
        pytest.param({}, {"world_size": 4}, (None, 4), id="assigned: argument"),
        pytest.param({"MINGLE_WORLD_SIZE": "4"}, {}, (None, 4), id="assigned: MINGLE_WORLD_SIZE"),
        pytest.param({"SLURM_JOB_ID": "7"}, {"world_size": 4}, (None, 4), id="assigned: a job id is no launcher"),
        pytest.param({"RANK": "", "MINGLE_RANK": " ", "WORLD_SIZE": "4"}, {}, (None, 4), id="empty counts as unset"),
        pytest.param(SBATCH_BODY, {"rank": 1, "world_size": 2}, (1, 2), id="sbatch body: arguments"),
        pytest.param(
            {**SBATCH_BODY, "MINGLE_RANK": "1", "MINGLE_WORLD_SIZE": "2"}, {}, (1, 2), id="sbatch body: MINGLE_*"
        ),
        pytest.param({**SBATCH_BODY, "RANK": "1", "WORLD_SIZE": "2"}, {}, (1, 2), id="sbatch body: plain pair"),
        pytest.param(TORCHRUN, {}, (5, 8), id="torchrun"),
        pytest.param(TORCHRUN, {"rank": 5, "world_size": 8}, (5, 8), id="torchrun, arguments agree"),
        pytest.param({**TORCHRUN, "MINGLE_WORLD_SIZE": "8"}, {}, (5, 8), id="torchrun, MINGLE_* agrees"),
        pytest.param(POD, {"world_size": 4}, (2, 4), id="a pod's index, the size by argument"),
        pytest.param({**POD, "MINGLE_WORLD_SIZE": "4"}, {}, (2, 4), id="a pod's index, MINGLE_WORLD_SIZE"),
        pytest.param({**POD, "WORLD_SIZE": "4"}, {}, (2, 4), id="a pod's index, WORLD_SIZE"),
        pytest.param(
            {**POD, "WORLD_SIZE": "8", "MINGLE_WORLD_SIZE": "4"}, {}, (2, 4), id="a pod's index, MINGLE_ before plain"
        ),
        pytest.param({**POD, "RANK": "17", "WORLD_SIZE": "32"}, {}, (17, 32), id="a rank inside a pod"),
        pytest.param(
            {**PODS_OF_8, "MINGLE_RANK": "17", "MINGLE_WORLD_SIZE": "32"}, {}, (17, 32), id="by hand in a pod of 8"
        ),
        pytest.param({**PODS_OF_8, "RANK": "17", "LOCAL_RANK": "1"}, {}, (17, 32), id="a local rank in a pod of 8"),
        pytest.param(SRUN_OF_ONE, {}, (0, 1), id="a task of one"),
        pytest.param({**SRUN_OF_ONE, "WORLD_SIZE": "1"}, {}, (0, 1), id="a task of one, said twice"),
        pytest.param(
            {**SRUN_OF_ONE, "MINGLE_RANK": "2", "MINGLE_WORLD_SIZE": "4", "WORLD_SIZE": "4"},
            {},
            (2, 4),
            id="a task of one, overruled",
        ),
    ],
)
def test_precedence_of_arguments_launchers_and_variables(
    environ: dict[str, str], arguments: dict[str, int], expected: tuple[int | None, int]
) -> None:
    placement = resolve_placement(environ, **arguments)
    assert (placement.rank, placement.world_size) == expected


@pytest.mark.parametrize(
    ("environ", "arguments", "named"),
    [
        pytest.param({"MINGLE_RANK": "2"}, {"rank": 1, "world_size": 4}, ["rank=1", "MINGLE_RANK='2'"], id="rank"),
        pytest.param({"WORLD_SIZE": "2"}, {"world_size": 4}, ["world_size=4", "WORLD_SIZE='2'"], id="size"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "4"}, {"rank": 1}, ["rank=1", "RANK='0'"], id="plain rank"),
        pytest.param(SRUN, {"rank": 1}, ["rank=1", "SLURM_PROCID=3"], id="launcher's rank"),
        pytest.param(SRUN, {"world_size": 8}, ["world_size=8", "SLURM_STEP_NUM_TASKS=4"], id="launcher's size"),
        pytest.param(TORCHRUN, {"rank": 1}, ["rank=1", "torchrun's RANK=5"], id="torchrun's rank"),
        pytest.param(TORCHRUN, {"world_size": 4}, ["world_size=4", "WORLD_SIZE=8"], id="torchrun's size"),
        pytest.param(
            {**TORCHRUN, "MINGLE_RANK": "1"}, {}, ["MINGLE_RANK='1'", "torchrun's RANK=5"], id="torchrun's own"
        ),
        pytest.param({"RANK": "7"}, {"world_size": 4}, ["RANK='7'", "world_size=4"], id="rank beyond the size"),
        pytest.param({}, {"rank": 4, "world_size": 4}, ["rank=4", "world_size=4"], id="rank counted from 1"),
        pytest.param({"RANK": "x", "WORLD_SIZE": "4"}, {}, ["RANK='x'"], id="no number"),
        pytest.param({"RANK": "-1", "WORLD_SIZE": "4"}, {}, ["RANK='-1'", "negative"], id="negative"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "0"}, {}, ["WORLD_SIZE='0'"], id="no ranks at all"),
        pytest.param({}, {"world_size": 2**31}, ["world_size=2147483648"], id="beyond a C int"),
        pytest.param({"RANK": "1"}, {}, ["RANK='1'", "WORLD_SIZE"], id="RANK without WORLD_SIZE"),
        pytest.param({}, {"rank": 0}, ["rank=0", "world_size="], id="rank without a size"),
        pytest.param({"MINGLE_RANK": "0"}, {}, ["MINGLE_RANK='0'"], id="MINGLE_RANK without a size"),
        pytest.param({}, {}, ["world_size=", "MINGLE_WORLD_SIZE"], id="nothing"),
        pytest.param(
            {**POD, "WORLD_SIZE": "8"}, {"world_size": 4}, ["world_size=4", "WORLD_SIZE='8'"], id="a pod's two sizes"
        ),
    ],
)
def test_contradicting_or_invalid_placement_is_refused(
    environ: dict[str, str], arguments: dict[str, int], named: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve_placement(environ, **arguments)
    for text in named:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "arguments", "named"),
    [
        pytest.param(SBATCH_BODY, {}, "srun", id="sbatch body"),
        pytest.param(SBATCH_BODY, {"world_size": 4}, "srun", id="sbatch body: a size does not make ranks assigned"),
        pytest.param({**SBATCH_BODY, "MINGLE_WORLD_SIZE": "4"}, {}, "srun", id="sbatch body: MINGLE_WORLD_SIZE"),
        pytest.param({**SBATCH_BODY, "WORLD_SIZE": "4"}, {}, "srun", id="sbatch body: WORLD_SIZE"),
        pytest.param({**SBATCH_BODY, "RANK": "1"}, {}, "srun", id="sbatch body: half of a pair"),
        pytest.param({"SLURM_NTASKS": "4"}, {}, "srun", id="salloc shell"),
        pytest.param(
            {key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"},
            {"rank": 5, "world_size": 8},
            "MASTER_PORT",
            id="partial torchrun, even with arguments",
        ),
        pytest.param(POD, {}, "WORLD_SIZE", id="a pod's index without a size"),
        pytest.param(PODS_OF_8, {}, "torchrun", id="RANK of a pod, WORLD_SIZE of processes"),
        pytest.param(PODS_OF_8, {"world_size": 32}, "torchrun", id="the same, with the size as an argument"),
        pytest.param({**SRUN_OF_ONE, "WORLD_SIZE": "4"}, {}, "WORLD_SIZE='4'", id="alone against WORLD_SIZE"),
        pytest.param({**SRUN_OF_ONE, "RANK": "2", "WORLD_SIZE": "4"}, {}, "WORLD_SIZE='4'", id="alone against a pair"),
    ],
)
def test_launcher_without_a_usable_rank_is_a_launcher_error(
    environ: dict[str, str], arguments: dict[str, int], named: str
) -> None:
    with pytest.raises(LauncherError) as raised:
        resolve_placement(environ, **arguments)
    assert named in str(raised.value)


def test_the_launchers_word_about_nodes() -> None:
    placement = resolve_placement({**SRUN, "SLURM_RESTART_COUNT": "1", "LOCAL_RANK": "7", "NODE_RANK": "9"})
    assert (placement.local_rank, placement.local_world_size) == (1, 2)
    assert (placement.node_rank, placement.num_nodes, placement.node) == (1, 2, "1")
    assert (placement.job_id, placement.attempt, placement.launcher) == ("1.0", "1", "Slurm")


# Also where the rank by hand is the launcher's: of ranks in another order some are the same, and their nodes and their
# attempt would not be comparable with the others'.
@pytest.mark.parametrize("change", [{"MINGLE_RANK": "0"}, {"MINGLE_RANK": "3"}, {"MINGLE_WORLD_SIZE": "8"}])
def test_an_overruled_launchers_nodes_do_not_count(change: dict[str, str]) -> None:
    placement = resolve_placement({**SRUN, "SLURM_RESTART_COUNT": "1", **change})
    assert (placement.local_rank, placement.local_world_size) == (None, None)
    assert (placement.node_rank, placement.num_nodes, placement.node) == (None, None, None)
    assert (placement.job_id, placement.attempt, placement.launcher) == ("1.0", None, "Slurm")


@pytest.mark.parametrize(("environ", "again"), [(SRUN, {"MINGLE_WORLD_SIZE": "4"}), (TORCHRUN, {"MINGLE_RANK": "5"})])
def test_what_agrees_with_the_launcher_leaves_its_nodes(environ: dict[str, str], again: dict[str, str]) -> None:
    assert resolve_placement({**environ, **again}) == resolve_placement(environ)


@pytest.mark.parametrize(
    "environ",
    [TORCHRUN, {**TORCHRUN, **SRUN}, {"TORCHELASTIC_RUN_ID": "run-7"}, {**TORCHRUN, "RANK": "x"}],
    ids=["torchrun", "torchrun in a step of srun", "a process that a worker started", "a changed environment"],
)
def test_a_job_beside_torchruns_knows_only_what_was_passed(environ: dict[str, str]) -> None:
    assert resolve_placement(environ, rank=1, world_size=2, beside_torchrun=True) == Placement(rank=1, world_size=2)


@pytest.mark.parametrize(
    ("environ", "rank", "named"),
    [({"MINGLE_RANK": "0"}, 1, ["rank=1", "MINGLE_RANK='0'"]), ({}, 2, ["rank=2", "world_size=2"])],
)
def test_a_job_beside_torchruns_is_checked_too(environ: dict[str, str], rank: int, named: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve_placement({**TORCHRUN, **environ}, rank=rank, world_size=2, beside_torchrun=True)
    for text in named:
        assert text in raised.value.observation


def test_a_contradiction_of_torchrun_names_the_way_to_a_job_beside_it() -> None:
    with pytest.raises(ConfigurationError, match=r"torchrun's RANK=5") as raised:
        resolve_placement(TORCHRUN, rank=1, world_size=2)
    assert 'init_method="mingle://NAME"' in str(raised.value.remedy)


PLAIN = {"RANK": "5", "WORLD_SIZE": "8"}
# --- the node rank that a process asks for ----------------------------------------------------------------------

BY_HAND = {"MINGLE_NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "argument", "expected"),
    [
        pytest.param({}, None, (None, ""), id="none"),
        pytest.param({"WORLD_SIZE": "4"}, 2, (2, "node_rank=2"), id="argument"),
        pytest.param(BY_HAND, None, (1, "MINGLE_NODE_RANK='1'"), id="variable"),
        pytest.param(BY_HAND, 1, (1, "node_rank=1"), id="both"),
        pytest.param({"NODE_RANK": "3"}, None, (None, ""), id="NODE_RANK, which anything may have left, is no wish"),
        pytest.param({"PET_NODE_RANK": "x"}, 2, (2, "node_rank=2"), id="torchrun's variable is none of a rank's"),
        pytest.param({"MINGLE_NODE_RANK": " "}, None, (None, ""), id="blank"),
    ],
)
def test_the_node_rank_where_ranks_are_assigned(
    environ: dict[str, str], argument: int | None, expected: tuple[int | None, str]
) -> None:
    if "PET_NODE_RANK" in environ:
        environ = {**environ, "LOCAL_RANK": "0"}  # Kubeflow's row yields to it
    found = resolve_placement(environ, world_size=4, node_rank=argued_node_rank(argument, "node_rank"))
    assert (found.rank, found.node_rank, found.node_rank_from) == (None, *expected)
    assert not found.node_rank_launched


@pytest.mark.parametrize(
    ("environ", "argument", "expected"),
    [
        pytest.param(SRUN, None, (1, "Slurm's SLURM_NODEID=1", True), id="launcher"),
        pytest.param({**SRUN, "MINGLE_NODE_RANK": "0"}, None, (0, "MINGLE_NODE_RANK='0'", False), id="overruled"),
        pytest.param(SRUN, 1, (1, "node_rank=1", False), id="agrees"),
        pytest.param({**TORCHRUN, "MINGLE_NODE_RANK": "7"}, None, (1, "torchrun's GROUP_RANK=1", True), id="agent"),
    ],
)
def test_the_node_rank_beside_a_launcher(
    environ: dict[str, str], argument: int | None, expected: tuple[int, str, bool]
) -> None:
    found = resolve_placement(environ, node_rank=argued_node_rank(argument, "node_rank"))
    assert (found.node_rank, found.node_rank_from, found.node_rank_launched) == expected


@pytest.mark.parametrize(
    ("environ", "argument", "problem"),
    [
        ({}, -1, "node_rank=-1 is negative"),
        ({}, "1", "node_rank='1' is a str"),
        ({}, True, "node_rank=True is not an integer"),
        ({}, 4, "node_rank=4 does not fit a job of 4 ranks, and there are no more nodes than ranks"),
        ({"MINGLE_NODE_RANK": "-1"}, None, "MINGLE_NODE_RANK='-1' is negative"),
        ({"MINGLE_NODE_RANK": "first"}, None, "MINGLE_NODE_RANK='first' is not a whole number"),
        ({"MINGLE_NODE_RANK": "4"}, None, "MINGLE_NODE_RANK='4' does not fit a job of 4 ranks"),
        (BY_HAND, 2, "node_rank=2 contradicts MINGLE_NODE_RANK='1'"),
        (SRUN, 0, "node_rank=0 contradicts Slurm's SLURM_NODEID=1"),
        ({**SRUN, "MINGLE_NODE_RANK": "2"}, None, "MINGLE_NODE_RANK='2' does not fit a job of 2 nodes"),
        ({"RANK": "1", "NODE_RANK": "1"}, 0, "node_rank=0 contradicts NODE_RANK='1'"),
        ({**TORCHRUN, "WORLD_SIZE": "4", "RANK": "1"}, 0, "node_rank=0 contradicts torchrun's GROUP_RANK=1"),
    ],
)
def test_a_node_rank_that_cannot_be(environ: dict[str, str], argument: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)) as raised:
        resolve_placement(environ, world_size=4, node_rank=argued_node_rank(argument, "node_rank"))
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (BY_HAND, NodeRank(1, "MINGLE_NODE_RANK='1'")),
        (SRUN, NodeRank(1, "Slurm's SLURM_NODEID=1", launched=True)),
        ({**SRUN, **BY_HAND, "SLURM_NODEID": "2"}, NodeRank(1, "MINGLE_NODE_RANK='1'")),
        (SBATCH_BODY, None),
        (recorded.TRAIN_JOB, NodeRank(2, "Kubeflow's PET_NODE_RANK=2", launched=True)),
        (recorded.SAGEMAKER, NodeRank(1, "SageMaker's the index of SM_CURRENT_HOST in SM_HOSTS=1", launched=True)),
        (POD, NodeRank(2, "Kubernetes Indexed Job's JOB_COMPLETION_INDEX=2", launched=True)),
        (recorded.LEADER_WORKER_SET, NodeRank(2, "LeaderWorkerSet's LWS_WORKER_INDEX=2", launched=True)),
        # mpirun leaves the variables of Slurm's batch script to the processes of its own node.
        ({**SRUN, **recorded.OPEN_MPI_5}, None),
    ],
)
def test_node_rank_of_a_program_that_starts_once_on_each_node(
    environ: dict[str, str], expected: NodeRank | None
) -> None:
    assert asked_node_rank(environ) == expected


def test_a_launchers_number_may_exceed_the_nodes_of_one_of_its_jobs() -> None:
    asked = asked_node_rank({**SRUN, "SLURM_NODEID": "6", "SLURM_STEP_NUM_NODES": "8"}, nodes=4)
    assert asked == NodeRank(6, "Slurm's SLURM_NODEID=6", launched=True)


def test_a_launchers_number_that_is_none_is_an_error() -> None:
    with pytest.raises(LauncherError, match="SLURM_NODEID='x' is not a whole number"):
        asked_node_rank({**SRUN, "SLURM_NODEID": "x"})


LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "arguments", "expected"),
    [
        pytest.param({**PLAIN, **LOCAL}, {}, (1, 4, 1), id="all three"),
        pytest.param({**PLAIN, "GROUP_RANK": "1"}, {}, (None, None, 1), id="torchrun's name of the node rank"),
        pytest.param({**PLAIN, "NODE_RANK": "1", "GROUP_RANK": "1"}, {}, (None, None, 1), id="both names"),
        pytest.param({**PLAIN, **LOCAL, "LOCAL_RANK": ""}, {}, (None, 4, 1), id="empty counts as unset"),
        pytest.param(LOCAL, {"rank": 5, "world_size": 8}, (1, 4, 1), id="with arguments"),
        pytest.param({**LOCAL, "WORLD_SIZE": "8"}, {}, (None, None, None), id="not with assigned ranks"),
        pytest.param(
            {**PLAIN, **LOCAL, "MINGLE_RANK": "0"}, {}, (None, None, None), id="not when the rank is overruled"
        ),
        pytest.param({**SBATCH_BODY, **PLAIN, **LOCAL}, {}, (1, 4, 1), id="by hand in an sbatch body"),
    ],
)
def test_node_variables_complete_a_placement_by_hand(
    environ: dict[str, str], arguments: dict[str, int], expected: tuple[int | None, ...]
) -> None:
    placement = resolve_placement(environ, **arguments)
    assert (placement.local_rank, placement.local_world_size, placement.node_rank) == expected
    assert (placement.node, placement.launcher) == (None, None)


@pytest.mark.parametrize(
    "change",
    [
        {"LOCAL_RANK": "4"},
        {"LOCAL_RANK": "x"},
        {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "9"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"NODE_RANK": "8"},
        {"GROUP_RANK": "2"},
    ],
)
def test_node_variables_that_do_not_fit_are_refused(change: dict[str, str]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(ConfigurationError, match=f"{name}='{value}'"):
        resolve_placement({**PLAIN, **LOCAL, **change})


# --- the node ---------------------------------------------------------------------------------------------------------

KNOWN: dict[str, Any] = {"network_namespace": 1, "pid_namespace": 2, "hostname": "alpha", "machine_id": "m1"}


@pytest.mark.parametrize(
    ("boot_id", "change", "same"),
    [
        ("b00t", {}, True),
        ("b00t", {"hostname": "beta", "machine_id": None}, True),
        ("b00t", {"boot_id": "other"}, False),
        ("b00t", {"network_namespace": 9}, False),
        ("b00t", {"pid_namespace": 9}, False),
        ("b00t", {"network_namespace": 2, "pid_namespace": 1}, False),
        (None, {}, True),
        (None, {"hostname": "beta"}, False),
        (None, {"machine_id": "m2"}, False),
        (None, {"pid_namespace": 9}, False),
    ],
)
def test_which_processes_are_of_one_node(boot_id: str | None, change: dict[str, Any], same: bool) -> None:
    known = {**KNOWN, "boot_id": boot_id}
    assert (placement.describe_node(**known) == placement.describe_node(**{**known, **change})) is same


def test_without_anything_but_a_name() -> None:
    unknown = dict.fromkeys(("boot_id", "network_namespace", "pid_namespace", "machine_id"))
    assert placement.describe_node(**unknown, hostname="alpha") == "host:alpha"


def test_a_random_hardware_address_does_not_count() -> None:
    assert placement.hardware_id(0x02420A000001) == "02420a000001"
    assert placement.hardware_id(0x01420A000001) is None


def test_identity_falls_back_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placement, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(placement, "_NAMESPACES", tmp_path / "ns")
    monkeypatch.setattr(placement, "_MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(uuid, "getnode", lambda: 0x02420A000001)
    monkeypatch.setattr(socket, "gethostname", lambda: "alpha")
    assert placement.this_node() == "host:alpha/machine:02420a000001"
    (tmp_path / "machine-id").write_text("0123\n")
    assert placement.this_node() == "host:alpha/machine:0123"


def identity_in_a_new_process(*within: str) -> str:
    code = "from mingle.config.placement import this_node; print(this_node())"
    environment = {**os.environ, "PYTHONPATH": str(Path(placement.__file__).parents[2])}
    command = [*within, sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
class TestOnLinux:
    def test_all_processes_here_agree(self) -> None:
        assert identity_in_a_new_process() == placement.this_node()

    def test_identity_is_the_kernels(self) -> None:
        assert placement.this_node() == (
            f"boot:{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            f"/net:{Path('/proc/self/ns/net').stat().st_ino}/pid:{Path('/proc/self/ns/pid').stat().st_ino}"
        )

    @needs_namespaces
    def test_another_network_namespace_is_another_node(self) -> None:
        assert identity_in_a_new_process("unshare", "--net") != placement.this_node()
