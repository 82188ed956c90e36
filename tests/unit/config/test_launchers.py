"""The table of launchers, against the environments that they leave."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from mingle.config.launchers import LAUNCHERS, Launcher, Placement, expand_counts, seen
from mingle.errors import LauncherError
from tests.support import launcher_environments as recorded
from tests.support.launcher_environments import BY_LAUNCHER

ROWS = {row.name: row for row in LAUNCHERS}
HYDRA = "Hydra (MPICH, Intel MPI)"
BY_NAME = pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
Place = tuple[int, int, int | None, int | None, int | None, int | None, str | None, str | None]


def place(found: Placement | None) -> Place:
    assert found is not None
    ranks = (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank, found.num_nodes)
    return (*ranks, found.job_id, found.attempt)


def detect(environ: Mapping[str, str]) -> Placement | None:
    """Return the place that the innermost launcher gives to a process."""
    row = seen(environ)
    return None if row is None else row.read(environ)


@pytest.mark.parametrize(
    "variables",
    [
        (),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *(("SLURM_JOB_ID",), ("LSB_JOBID",), ("FLUX_JOB_ID",), ("AWS_BATCH_JOB_ID",), ("SKYPILOT_TASK_ID",)),
        ("LWS_LEADER_ADDRESS",),
    ],
    ids=" ".join,
)
def test_nothing_is_detected_where_no_launcher_is(variables: tuple[str, ...]) -> None:
    assert detect(dict.fromkeys(variables, "7")) is None


def test_every_row_has_an_environment_here() -> None:
    assert list(BY_LAUNCHER) == [row.name for row in LAUNCHERS]


# Rank, size, local rank, local size, node rank, nodes, job id, attempt.
WHOLE: dict[str, Place] = {
    "torchrun": (5, 8, 1, 4, 1, 2, "run-7", "2"),
    "jsrun": (7, 12, 1, 6, None, None, "4711", None),
    "Open MPI": (1, 2, 1, 2, None, None, "932315137", None),
    "MVAPICH2": (3, 4, 1, 2, None, None, None, None),
    "PALS": (13, 24, 1, 12, 1, None, "6e4b28c4-5fc5-4a5b-8b3b-9c4a0d2f3f10", None),
    "Flux": (3, 4, 1, None, None, 2, "ƒ2xVXmy3w", None),
    HYDRA: (1, 2, 1, 2, None, None, None, None),
    "Slurm": (3, 4, 1, 2, 1, 2, "1.0", None),
    "PMI": (1, 2, None, None, None, None, None, None),
    "LeaderWorkerSet": (2, 4, None, None, 2, None, "trainer-0.trainer.default", None),
    "Kubeflow": (2, 4, None, None, 2, 4, None, None),
    "SageMaker": (1, 3, None, None, 1, 3, "resnet-2026-11-20", None),
    "SkyPilot": (1, 2, None, None, 1, 2, "sky-managed-2026-11-20-10-11-12-123456_resnet_7-0", None),
    "AWS Batch": (1, 2, None, None, 1, 2, "6f4b7d0e-7d1c-4d3e-9a55-0a1b2c3d4e5f", "2"),
    "Kubernetes Indexed Job": (2, 4, None, None, 2, None, None, None),
}


@BY_NAME
def test_a_whole_row(row: Launcher) -> None:
    found = detect(BY_LAUNCHER[row.name])
    assert place(found) == WHOLE[row.name]
    assert found is not None
    assert found.launcher == row.name
    assert found.node == (None if found.node_rank is None else str(found.node_rank))


@BY_NAME
def test_the_rank_and_the_size_are_needed(row: Launcher) -> None:
    """Whatever of them is unset or blank, the error names it, with all that was seen; nothing is put in its place."""
    environ = BY_LAUNCHER[row.name]
    groups = [row.rank, row.world_size, *((name,) for name in row.required)]
    needed = [group for group in groups if set(group) & set(environ)]
    assert len(needed) >= 2
    for group, blank in itertools.product(needed, (False, True)):
        partial = {name: value for name, value in environ.items() if name not in group}
        partial |= dict.fromkeys(group, " ") if blank else {}
        if not row.is_seen(partial):  # no mark is left, as of the Indexed Job, whose only variable is the rank
            assert set(group) & set(row.marks)
            continue
        with pytest.raises(LauncherError) as raised:
            detect(partial)
        message = str(raised.value)
        assert group[0] in message
        assert all(f"{name}={value!r}" in message for name, value in row.variables_seen(partial).items())
        assert (raised.value.cause, raised.value.remedy) == (row.outside, row.start)


# SageMaker's rank is counted, not read.
@pytest.mark.parametrize("row", [row for row in LAUNCHERS if row.name != "SageMaker"], ids=lambda row: row.name)
def test_a_rank_that_is_no_rank(row: Launcher) -> None:
    for bad in ("x", "-1", "1.0", "1_0", "٣", "9" * 5000, "2147483648", "1:4"):
        with pytest.raises(LauncherError, match=row.rank[0]):
            detect({**BY_LAUNCHER[row.name], row.rank[0]: bad})


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**recorded.SRUN, **recorded.OPEN_MPI}, "Open MPI"),
        ({**recorded.SRUN, **recorded.TORCHRUN}, "torchrun"),
        ({**recorded.OPEN_MPI, **recorded.TORCHRUN}, "torchrun"),
        ({**recorded.SBATCH_BODY, **recorded.OPEN_MPI}, "Open MPI"),
        ({**recorded.SALLOC_SHELL, **recorded.TORCHRUN}, "torchrun"),
        ({**recorded.SRUN, **recorded.FLUX}, "Flux"),
        ({**recorded.MVAPICH2, **recorded.MPICH}, "MVAPICH2"),
        ({**recorded.INDEXED_JOB, **recorded.MPICH}, HYDRA),
        ({**recorded.TRAIN_JOB, **recorded.TORCHRUN}, "torchrun"),
        ({**recorded.SKYPILOT, **recorded.OPEN_MPI}, "Open MPI"),
        (recorded.JSRUN, "jsrun"),
        (recorded.SRUN_PMI2, "Slurm"),
        (recorded.MPICH_UNDER_SLURM, HYDRA),
    ],
)
def test_the_innermost_launcher_counts(environ: dict[str, str], launcher: str) -> None:
    found = detect(environ)
    assert found is not None
    assert found.launcher == launcher


def test_an_outer_launcher_does_not_stand_in_for_a_partial_inner_one() -> None:
    with pytest.raises(LauncherError, match="Open MPI"):
        detect({**recorded.SRUN, "OMPI_COMM_WORLD_RANK": "0"})


# --- Slurm ------------------------------------------------------------------------------------------------------


def test_a_slurm_step_of_one_task_in_a_larger_allocation() -> None:
    assert place(detect(recorded.SRUN_OF_ONE)) == (0, 1, 0, 1, 0, 1, "1.0", None)


@pytest.mark.parametrize(
    ("change", "size", "variable"),
    [
        ({"SLURM_NTASKS": "64"}, 4, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_STEP_NUM_TASKS": ""}, 4, "SLURM_NTASKS"),
        ({"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "", "SLURM_NPROCS": "8"}, 8, "SLURM_NPROCS"),
    ],
)
def test_the_size_of_a_slurm_step_counts_before_that_of_the_allocation(
    change: dict[str, str], size: int, variable: str
) -> None:
    found = detect({**recorded.SRUN, **change})
    assert found is not None
    assert (found.world_size, found.world_size_from) == (size, variable)


@pytest.mark.parametrize(
    ("environ", "job_id"),
    [
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, None),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "9"}, None),
        ({"SLURM_JOBID": "9", "SLURM_STEPID": "2", "SLURM_PROCID": "1", "SLURM_NPROCS": "2"}, "9.2"),
    ],
    ids=["without an id", "with half of one", "legacy names"],
)
def test_a_slurm_step_is_known_by_few_variables(environ: dict[str, str], job_id: str | None) -> None:
    found = place(detect(environ))
    assert (found[:2], found[6]) == ((1, 2), job_id)


@pytest.mark.parametrize(
    "environ",
    [
        recorded.SBATCH_BODY,
        recorded.SALLOC_SHELL,
        recorded.SALLOC_INTERACTIVE_STEP,
        {**recorded.SALLOC_INTERACTIVE_STEP, "SLURM_STEP_ID": str(0xFFFFFFF0)},
        {"SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "0"},
    ],
    ids=["sbatch body", "salloc shell", "salloc interactive step", "first reserved step", "size alone", "rank alone"],
)
def test_outside_a_slurm_step_the_fix_is_srun(environ: dict[str, str]) -> None:
    with pytest.raises(LauncherError, match="start it with srun") as raised:
        detect(environ)
    shown = ROWS["Slurm"].variables_seen(environ)
    assert {"SLURM_NTASKS", "SLURM_PROCID"} & set(shown)
    assert all(f"{name}={value!r}" in str(raised.value) for name, value in shown.items())


# --- the others' traps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (recorded.OPEN_MPI_5, (1, 2, 1, 2, None, None, "prterun-vm-19962@1", None)),
        (recorded.INTEL_MPI, (3, 4, 1, 2, None, None, "8c4c0000-875d-9ab7-bc60-060032a30f42", None)),
        (recorded.TRAIN_JOB, (2, 4, None, None, 2, 4, None, None)),
    ],
    ids=["Open MPI 5", "Intel MPI", "Kubeflow Trainer 2"],
)
def test_another_version_of_a_launcher(environ: dict[str, str], expected: Place) -> None:
    assert place(detect(environ)) == expected


def without(environ: dict[str, str], *prefixes: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("environ", "job_id", "attempt"),
    [
        pytest.param({**recorded.SRUN, "SLURM_STEP_ID": "1"}, "1.1", None, id="another step of Slurm's job"),
        pytest.param({**recorded.SRUN, "SLURM_RESTART_COUNT": "1"}, "1.0", "1", id="another attempt of Slurm's job"),
        pytest.param({**recorded.JSRUN, "LSB_JOBINDEX": "3"}, "4711[3]", None, id="an element of LSF's array"),
        pytest.param({**recorded.JSRUN, "LSB_JOBINDEX": "0"}, "4711", None, id="LSF's job that is no array"),
        pytest.param(without(recorded.JSRUN, "LSB_JOBINDEX"), "4711", None, id="LSF's job without an index"),
        pytest.param(without(recorded.JSRUN, "LSB_"), None, None, id="jsrun without LSF"),
        pytest.param(
            {**recorded.FLUX, "FLUX_JOB_ID": recorded.FLUX["FLUX_JOB_ID"].encode().decode("ascii", "surrogateescape")},
            recorded.FLUX["FLUX_JOB_ID"],
            None,
            id="Flux under an ASCII locale",
        ),
        pytest.param({**recorded.AWS_BATCH, "AWS_BATCH_JOB_ID": "6f4b#1"}, "6f4b", "2", id="a node of AWS Batch's job"),
    ],
)
def test_which_processes_have_one_job_id(environ: dict[str, str], job_id: str | None, attempt: str | None) -> None:
    assert place(detect(environ))[6:] == (job_id, attempt)


@pytest.mark.parametrize(
    "change",
    [
        {"SM_HOSTS": '["algo-1"]'},
        {"SM_HOSTS": "algo-1,algo-2"},
        {"SM_HOSTS": '"algo-2"'},
        {"SM_HOSTS": '["algo-2", "algo-2"]'},
        {"SM_CURRENT_HOST": ""},
    ],
)
def test_sagemaker_hosts_that_do_not_hold_this_one(change: dict[str, str]) -> None:
    with pytest.raises(LauncherError, match="but not the index of SM_CURRENT_HOST in SM_HOSTS"):
        detect({**recorded.SAGEMAKER, **change})


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        (recorded.PYTORCH_JOB_OF_8_PER_POD, "WORLD_SIZE / PET_NNODES='8'"),
        ({**recorded.PYTORCH_JOB_OF_8_PER_POD, "WORLD_SIZE": "33"}, "PET_NPROC_PER_NODE='8'"),
        ({**recorded.TRAIN_JOB, "PET_NPROC_PER_NODE": "gpu"}, "PET_NPROC_PER_NODE='gpu'"),
        ({**recorded.SAGEMAKER, "SM_NUM_GPUS": "8"}, "SM_NUM_GPUS='8'"),
        ({**recorded.SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "4"}, "SKYPILOT_NUM_GPUS_PER_NODE='4'"),
    ],
)
def test_a_nodes_number_is_no_rank_where_nodes_hold_several(environ: dict[str, str], variable: str) -> None:
    with pytest.raises(LauncherError, match="torchrun") as raised:
        detect(environ)
    assert f"{variable} says that there are several processes" in str(raised.value)


def test_an_elastic_kubeflow_job_has_no_fixed_size() -> None:
    with pytest.raises(LauncherError, match="PET_NNODES='1:4'"):
        detect({**recorded.TRAIN_JOB, "PET_NNODES": "1:4"})


@pytest.mark.parametrize("row", ["LeaderWorkerSet", "SageMaker", "SkyPilot", "AWS Batch", "Kubernetes Indexed Job"])
def test_launcher_that_numbers_nodes_yields_to_a_rank(row: str) -> None:
    assert seen({**BY_LAUNCHER[row], "RANK": " "}) is ROWS[row]
    assert seen({**BY_LAUNCHER[row], "RANK": "9"}) is None


def test_kubeflow_yields_to_a_local_rank_only_since_it_sets_the_rank_itself() -> None:
    assert seen(recorded.PYTORCH_JOB) is ROWS["Kubeflow"]
    assert seen({**recorded.PYTORCH_JOB, "LOCAL_RANK": "3"}) is None


@pytest.mark.parametrize(
    ("row", "change", "problem"),
    [
        ("Slurm", {"SLURM_PROCID": "4"}, "rank 4 does not fit a world_size of 4"),
        ("Slurm", {"SLURM_LOCALID": "2"}, "local_rank 2 does not fit a local_world_size of 2"),
        ("Slurm", {"SLURM_STEP_NUM_NODES": "1"}, "node_rank 1 does not fit a num_nodes of 1"),
        ("Slurm", {"SLURM_STEP_TASKS_PER_NODE": "2"}, "holds no count for node rank 1"),
        ("Slurm", {"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "holds no count for node rank 1"),
        ("Open MPI", {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "local_world_size 5 exceeds a world_size of 2"),
        ("torchrun", {"RANK": "8"}, "rank 8 does not fit a world_size of 8"),
        ("Kubernetes Indexed Job", {"JOB_COMPLETION_INDEX": "4"}, "rank 4 does not fit a world_size of 4"),
    ],
)
def test_contradictions(row: str, change: dict[str, str], problem: str) -> None:
    with pytest.raises(LauncherError) as raised:
        detect({**BY_LAUNCHER[row], **change})
    assert problem in str(raised.value)


# --- how a row is read ------------------------------------------------------------------------------------------------

PAIR = {"X_RANK": "1", "X_SIZE": "4"}


def launcher(**fields: Any) -> Launcher:
    plain: dict[str, Any] = {
        "name": "X",
        "marks": ("X_RANK", "X_SIZE"),
        "rank": ("X_RANK",),
        "world_size": ("X_SIZE",),
        "outside": "a part of X's environment",
        "start": "start it with x",
    }
    return Launcher(**plain | fields)


@pytest.mark.parametrize("count", ["0", "1", " 1 "])
def test_a_node_of_one_process_has_its_number_as_rank(count: str) -> None:
    assert launcher(one_per_node=("X_GPUS",)).read({**PAIR, "X_GPUS": count}).rank == 1


def test_a_number_that_is_none_is_shown_among_the_others() -> None:
    with pytest.raises(LauncherError) as raised:
        launcher().read({**PAIR, "X_SIZE": "many"})
    assert raised.value.observation.startswith("X has set X_RANK='1', X_SIZE='many': X_SIZE='many' is not a whole")


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2]), ("3(x1)", [3])])
def test_expand_counts(text: str, counts: list[int]) -> None:
    assert list(expand_counts(text)) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(x3", "-1", "2,,1"])
def test_expand_counts_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task count"):
        list(expand_counts(text))


@pytest.mark.parametrize(
    ("node_rank", "counts", "tasks"),
    [("0", "2(x3),1", 2), ("2", "2(x3),1", 2), ("3", "2(x3),1", 1), ("3", "1(x999999999)", 1)],
)
def test_the_tasks_of_this_node(node_rank: str, counts: str, tasks: int) -> None:
    row = launcher(node_rank=("X_NODE",), tasks_per_node=("X_TASKS",))
    environ = {"X_RANK": "6", "X_SIZE": "7", "X_NODE": node_rank, "X_TASKS": counts}
    assert row.read(environ).local_world_size == tasks
