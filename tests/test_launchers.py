from __future__ import annotations

import pytest

from mingle.errors import LauncherError
from mingle.launchers import LAUNCHERS, OPEN_MPI, SLURM, TORCHRUN, Launcher, detect, expand_counts

TORCHRUN_TASK = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}
SRUN_TASK = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
OPEN_MPI_TASK = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-a-123@1",
}
# What slurmstepd gives a batch script: the place of its own one task, and the size of the whole allocation.
SBATCH_BODY = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_JOB_NUM_NODES": "2",
}
SALLOC_SHELL = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# salloc with LaunchParameters=use_interactive_step: the shell is a step of one task, with a reserved id.
SALLOC_INTERACTIVE_STEP = {
    **SALLOC_SHELL,
    "SLURM_STEP_ID": str(0xFFFFFFFA),
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
}
WHOLE_ROWS = {"torchrun": TORCHRUN_TASK, "Open MPI": OPEN_MPI_TASK, "Slurm": SRUN_TASK}


def test_nothing_is_detected_where_no_launcher_is() -> None:
    assert detect({}) is None
    assert detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None


def test_a_job_id_alone_is_no_launcher() -> None:
    assert detect({"SLURM_JOB_ID": "77"}) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN_TASK, ("torchrun", 5, 8, 1, 4, 1, 2, "1", "run-7", "2")),
        (SRUN_TASK, ("Slurm", 6, 7, 0, 1, 3, 4, "3", "77.0", None)),
        (OPEN_MPI_TASK, ("Open MPI", 3, 4, 1, 2, None, None, None, "prterun-host-a-123@1", None)),
    ],
)
def test_a_whole_row(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    found = detect(environ)
    assert found is not None
    assert (
        found.launcher,
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.node_rank,
        found.num_nodes,
        found.node,
        found.job_id,
        found.attempt,
    ) == expected


@pytest.mark.parametrize(("node_rank", "tasks"), [("0", 2), ("2", 2), ("3", 1)])
def test_slurm_counts_the_tasks_of_this_node(node_rank: str, tasks: int) -> None:
    found = detect({**SRUN_TASK, "SLURM_NODEID": node_rank})
    assert found is not None
    assert found.local_world_size == tasks


def test_slurm_prefers_the_steps_size_to_the_allocations() -> None:
    found = detect({**SRUN_TASK, "SLURM_NTASKS": "64"})
    assert found is not None
    assert (found.world_size, found.world_size_from) == (7, "SLURM_STEP_NUM_TASKS")


def test_slurm_without_a_steps_size_takes_the_number_of_tasks() -> None:
    older = {name: value for name, value in SRUN_TASK.items() if name != "SLURM_STEP_NUM_TASKS"}
    found = detect(older)
    assert found is not None
    assert (found.world_size, found.world_size_from) == (7, "SLURM_NTASKS")


def test_slurms_legacy_names() -> None:
    found = detect({"SLURM_JOBID": "9", "SLURM_STEPID": "2", "SLURM_PROCID": "1", "SLURM_NPROCS": "2"})
    assert found is not None
    assert (found.rank, found.world_size, found.job_id) == (1, 2, "9.2")


def test_slurms_restart_count_is_the_attempt() -> None:
    found = detect({**SRUN_TASK, "SLURM_RESTART_COUNT": "1"})
    assert found is not None
    assert found.attempt == "1"


def test_two_steps_of_one_slurm_job_are_two_jobs() -> None:
    first, second = detect(SRUN_TASK), detect({**SRUN_TASK, "SLURM_STEP_ID": "1"})
    assert first is not None
    assert second is not None
    assert first.job_id != second.job_id


@pytest.mark.parametrize(
    "environ",
    [SBATCH_BODY, SALLOC_SHELL, SALLOC_INTERACTIVE_STEP, {"SLURM_NTASKS": "4"}, {"SLURM_PROCID": "0"}],
    ids=["sbatch body", "salloc shell", "salloc interactive step", "size alone", "rank alone"],
)
def test_outside_a_slurm_step_the_way_out_is_srun(environ: dict[str, str]) -> None:
    with pytest.raises(LauncherError, match="start it with srun") as raised:
        detect(environ)
    for name in environ.keys() - {"SLURM_JOB_ID"}:
        assert f"{name}={environ[name]!r}" in str(raised.value)


@pytest.mark.parametrize("name", TORCHRUN.required + TORCHRUN.rank + TORCHRUN.world_size)
def test_a_partial_torchrun_names_what_is_missing(name: str) -> None:
    partial = {key: value for key, value in TORCHRUN_TASK.items() if key != name}
    with pytest.raises(LauncherError, match=f"but not {name}\n"):
        detect(partial)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_a_partial_open_mpi(name: str) -> None:
    partial = {key: value for key, value in OPEN_MPI_TASK.items() if key != name}
    with pytest.raises(LauncherError, match=name):
        detect(partial)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SRUN_TASK, **OPEN_MPI_TASK}, "Open MPI"),
        ({**SRUN_TASK, **TORCHRUN_TASK}, "torchrun"),
        ({**OPEN_MPI_TASK, **TORCHRUN_TASK}, "torchrun"),
        ({**SBATCH_BODY, **OPEN_MPI_TASK}, "Open MPI"),
        ({**SALLOC_SHELL, **TORCHRUN_TASK}, "torchrun"),
    ],
)
def test_the_innermost_launcher_counts(environ: dict[str, str], launcher: str) -> None:
    found = detect(environ)
    assert found is not None
    assert found.launcher == launcher


def test_an_outer_launcher_does_not_stand_in_for_a_partial_inner_one() -> None:
    with pytest.raises(LauncherError, match="Open MPI"):
        detect({**SRUN_TASK, "OMPI_COMM_WORLD_RANK": "0"})


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_an_empty_variable_counts_as_unset(launcher: Launcher) -> None:
    emptied = {**WHOLE_ROWS[launcher.name], launcher.rank[0]: " "}
    with pytest.raises(LauncherError, match=launcher.rank[0]):
        detect(emptied)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
@pytest.mark.parametrize("bad", ["x", "-1", "1.0", "1_0", "٣", "9" * 5000, "2147483648"])
def test_a_rank_that_is_no_rank(launcher: Launcher, bad: str) -> None:
    with pytest.raises(LauncherError, match=launcher.rank[0]):
        detect({**WHOLE_ROWS[launcher.name], launcher.rank[0]: bad})


@pytest.mark.parametrize(
    ("environ", "change", "problem"),
    [
        (SRUN_TASK, {"SLURM_PROCID": "7"}, "rank 7 does not fit a world_size of 7"),
        (SRUN_TASK, {"SLURM_LOCALID": "1"}, "local_rank 1 does not fit a local_world_size of 1"),
        (SRUN_TASK, {"SLURM_STEP_NUM_NODES": "3"}, "node_rank 3 does not fit a num_nodes of 3"),
        (SRUN_TASK, {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "holds no count for node rank 3"),
        (SRUN_TASK, {"SLURM_STEP_TASKS_PER_NODE": "2(y3),1"}, "holds no count for node rank 3"),
        (OPEN_MPI_TASK, {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "local_world_size 5 exceeds a world_size of 4"),
        (TORCHRUN_TASK, {"RANK": "8"}, "rank 8 does not fit a world_size of 8"),
    ],
)
def test_contradictions(environ: dict[str, str], change: dict[str, str], problem: str) -> None:
    with pytest.raises(LauncherError) as raised:
        detect({**environ, **change})
    assert problem in str(raised.value)


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2]), ("3(x1)", [3])])
def test_expand_counts(text: str, counts: list[int]) -> None:
    assert list(expand_counts(text)) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(x3", "-1", "2,,1"])
def test_expand_counts_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task count"):
        list(expand_counts(text))


def test_a_huge_count_costs_nothing() -> None:
    found = detect({**SRUN_TASK, "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"})
    assert found is not None
    assert found.local_world_size == 1


def test_variables_seen_are_the_rows_own() -> None:
    seen = SLURM.variables_seen({**SRUN_TASK, **OPEN_MPI_TASK})
    assert seen.keys() <= SRUN_TASK.keys()
    assert {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID"} <= seen.keys()
    assert "OMPI_COMM_WORLD_NODE_RANK" not in OPEN_MPI.variables


def test_another_row_is_data() -> None:
    hydra = Launcher(
        name="Hydra",
        marks=("PMI_RANK",),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_world_size=("MPI_LOCALNRANKS",),
        outside="a part of mpiexec's environment",
        start="start it with mpiexec",
    )
    found = hydra.read({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, 1, 2)
    assert (found.job_id, found.node, found.attempt) == (None, None, None)
