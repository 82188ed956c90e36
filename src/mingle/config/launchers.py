"""How launchers tell a process who it is: a table with one row for each.

The traps of a row stand next to it. A launcher that says nothing of ranks (Docker Swarm, ``docker compose``,
``pdsh``) has no row: with a size alone, ranks are assigned.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mingle.config.launcher import Identity, Launcher, expand_counts
from mingle.config.values import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LAUNCHERS", "TORCHRUN", "Identity", "Launcher", "detect", "expand_counts", "seen"]

_BY_HAND = "or give this process its place with MINGLE_RANK and MINGLE_WORLD_SIZE"
_PART = "this process was started by hand from one of its tasks, or with a part of their environment"
_ONE_OF_NODE = "this launcher starts one process on each node and leaves the rest to the user"

TORCHRUN = Launcher(
    name="torchrun",
    marks=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    rank=("RANK",),
    world_size=("WORLD_SIZE",),
    required=("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK",),
    num_nodes=("GROUP_WORLD_SIZE",),
    job_id=(("TORCHELASTIC_RUN_ID",),),
    attempt=("TORCHELASTIC_RESTART_COUNT",),
    sets_plain_pair=True,
    outside="this process was started by a torchrun worker that had changed its environment",
    start="start it with torchrun, or unset the TORCHELASTIC_* variables to run without it",
)


def _lsf_job(environ: Mapping[str, str]) -> dict[str, str]:
    # The elements of a job array share LSB_JOBID; LSF itself writes 4711[3]. The index of a job alone is 0.
    job, index = text_of(environ, "LSB_JOBID"), text_of(environ, "LSB_JOBINDEX")
    if job is None:
        return {}
    return {"LSB_JOBID[LSB_JOBINDEX]": job if index in {None, "0"} else f"{job}[{index}]"}


# Before Open MPI: jsrun sets the variables of Spectrum MPI as well, which are Open MPI's, but not its job id.
JSRUN = Launcher(
    name="jsrun",
    marks=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    rank=("JSM_NAMESPACE_RANK",),
    world_size=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_world_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    computed=_lsf_job,
    job_id=(("LSB_JOBID[LSB_JOBINDEX]",),),
    outside=_PART,
    start=f"start it with jsrun, {_BY_HAND}",
)

OPEN_MPI = Launcher(
    name="Open MPI",
    marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    rank=("OMPI_COMM_WORLD_RANK",),
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    # OMPI_COMM_WORLD_NODE_RANK is not here: it counts this node's processes over several jobs, not the nodes.
    job_id=(("PMIX_NAMESPACE",),),
    outside=_PART,
    start=f"start it with mpirun, {_BY_HAND}",
)

# Before Hydra, which may start it and sets its own variables as well.
MVAPICH2 = Launcher(
    name="MVAPICH2",
    marks=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    rank=("MV2_COMM_WORLD_RANK",),
    world_size=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    outside=_PART,
    start=f"start it with mpirun_rsh or mpiexec, {_BY_HAND}",
)

# PALS, and Flux after it, speak PMI to the processes, as Hydra does: they come before it.
PALS = Launcher(
    name="PALS",
    marks=("PALS_RANKID",),
    rank=("PALS_RANKID",),
    # PALS has no variable of its own for the size; without PMI (under PMIx, say) nothing in the environment says it.
    world_size=("PMI_SIZE",),
    local_rank=("PALS_LOCAL_RANKID",),
    local_world_size=("PALS_LOCAL_SIZE",),
    node_rank=("PALS_NODEID",),
    job_id=(("PALS_APID",),),
    outside=f"{_PART}; or PALS speaks PMIx here, and says no size",
    start=f"start it with PALS's mpiexec or aprun and --pmi=cray, {_BY_HAND}",
)

FLUX = Launcher(
    name="Flux",
    marks=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    rank=("FLUX_TASK_RANK",),
    world_size=("FLUX_JOB_SIZE",),
    local_rank=("FLUX_TASK_LOCAL_ID",),
    num_nodes=("FLUX_JOB_NNODES",),
    job_id=(("FLUX_JOB_ID",),),
    outside=_PART,
    start=f"start it with flux run, {_BY_HAND}",
)

HYDRA = Launcher(
    name="Hydra (MPICH, Intel MPI)",
    # PMI_RANK is no mark here: srun --mpi=pmi2 sets it too. Where mpiexec runs inside a Slurm job, its
    # proxies are Slurm's tasks, so SLURM_PROCID counts nodes: hence before Slurm.
    marks=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    rank=("PMI_RANK",),
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID",),
    local_world_size=("MPI_LOCALNRANKS",),
    # Intel's; MPICH has none.
    job_id=(("I_MPI_HYDRA_UUID",),),
    outside=_PART,
    start=f"start it with mpiexec, {_BY_HAND}",
)

# Slurm keeps the ids from this one on for what is no srun: batch scripts, salloc's interactive step, adopted
# processes (slurm.h, SLURM_MAX_NORMAL_STEP_ID).
_SLURM_MAX_NORMAL_STEP_ID = 0xFFFFFFF0
_SLURM_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    # Slurm gives SLURM_PROCID=0 to a batch script and to salloc's interactive shell too: only the variables
    # of a normal step tell a task that srun started from them.
    step = text_of(environ, *_SLURM_STEP_ID)
    if step is None:
        return text_of(environ, "SLURM_STEP_NUM_TASKS") is not None
    return re.fullmatch(r"[0-9]{1,20}", step) is not None and int(step) < _SLURM_MAX_NORMAL_STEP_ID


SLURM = Launcher(
    name="Slurm",
    # SLURM_JOB_ID alone is no mark: an ssh session that Slurm adopted has it, and is no launched task.
    marks=(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_TASKS_PER_NODE",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
    ),
    rank=("SLURM_PROCID",),
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
    # SLURM_LAUNCH_NODE_IPADDR is not here: it is where srun was typed, not where rank 0 is.
    node_rank=("SLURM_NODEID",),
    num_nodes=("SLURM_STEP_NUM_NODES",),
    # SLURM_TASKS_PER_NODE is not here: it may be the allocation's, of which a step can take a part.
    tasks_per_node=("SLURM_STEP_TASKS_PER_NODE",),
    # Each element of a job array has a SLURM_JOB_ID of its own.
    job_id=(("SLURM_JOB_ID", "SLURM_JOBID"), _SLURM_STEP_ID),
    attempt=("SLURM_RESTART_COUNT",),
    started=_in_slurm_step,
    outside="this is the body of an sbatch script or an salloc shell, not a task that srun started",
    start=f"start it with srun, e.g. `srun python train.py`, {_BY_HAND}",
)

PMI = Launcher(
    name="PMI",
    marks=("PMI_RANK", "PMI_SIZE"),
    rank=("PMI_RANK",),
    world_size=("PMI_SIZE",),
    outside=_PART,
    start=f"start it with mpiexec, {_BY_HAND}",
)

LEADER_WORKER_SET = Launcher(
    name="LeaderWorkerSet",
    marks=("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
    yields_to=("RANK",),
    rank=("LWS_WORKER_INDEX",),
    world_size=("LWS_GROUP_SIZE",),
    # The name of the group's leader: the groups of one set are jobs of their own.
    job_id=(("LWS_LEADER_ADDRESS",),),
    outside="LeaderWorkerSet numbers the pods of a group since its version 0.6",
    start=f"update it, run torchrun in each pod, {_BY_HAND}",
)


def _kubeflow_processes(environ: Mapping[str, str]) -> dict[str, str]:
    # Version 1 of the operator counts the processes in WORLD_SIZE: one per pod also where nprocPerNode was left at
    # "auto", its default, which only torchrun could resolve.
    texts = [text_of(environ, name) or "" for name in ("WORLD_SIZE", "PET_NNODES")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", text) for text in texts):
        return {}
    processes, pods = map(int, texts)
    return {"WORLD_SIZE / PET_NNODES": str(processes // pods)} if processes % pods == 0 else {}


KUBEFLOW = Launcher(
    name="Kubeflow",
    # The variables are torchrun's options by another name. Version 1 of the operator also sets RANK, the pod's
    # number, and WORLD_SIZE, the number of processes: a pair that does not match with several in a pod.
    marks=("PET_NODE_RANK", "PET_NNODES"),
    yields_to=("LOCAL_RANK",),
    rank=("PET_NODE_RANK",),
    world_size=("PET_NNODES",),
    node_rank=("PET_NODE_RANK",),
    num_nodes=("PET_NNODES",),
    computed=_kubeflow_processes,
    one_per_node=("WORLD_SIZE / PET_NNODES", "PET_NPROC_PER_NODE"),
    sets_plain_pair=True,
    outside="in a pod of the Kubeflow operators torchrun is meant to start the processes",
    start=f"run torchrun in the pod in place of python, {_BY_HAND}",
)


def _sagemaker_hosts(environ: Mapping[str, str]) -> dict[str, str]:
    import json  # SageMaker alone needs it, and has it: torch is loaded there

    try:
        hosts = json.loads(environ.get("SM_HOSTS", ""))
    except ValueError:
        return {}
    current = text_of(environ, "SM_CURRENT_HOST")
    if not isinstance(hosts, list) or hosts.count(current) != 1:
        return {}
    return {
        "the index of SM_CURRENT_HOST in SM_HOSTS": str(hosts.index(current)),
        "the length of SM_HOSTS": str(len(hosts)),
    }


SAGEMAKER = Launcher(
    name="SageMaker",
    marks=("SM_HOSTS", "SM_CURRENT_HOST"),
    yields_to=("RANK",),
    required=("SM_HOSTS", "SM_CURRENT_HOST"),
    computed=_sagemaker_hosts,
    rank=("the index of SM_CURRENT_HOST in SM_HOSTS",),
    world_size=("the length of SM_HOSTS",),
    node_rank=("the index of SM_CURRENT_HOST in SM_HOSTS",),
    num_nodes=("the length of SM_HOSTS",),
    job_id=(("TRAINING_JOB_NAME",),),
    one_per_node=("SM_NUM_GPUS",),
    outside=_ONE_OF_NODE,
    start=f"run torchrun on each host, {_BY_HAND}",
)

SKYPILOT = Launcher(
    name="SkyPilot",
    marks=("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    yields_to=("RANK",),
    rank=("SKYPILOT_NODE_RANK",),
    world_size=("SKYPILOT_NUM_NODES",),
    node_rank=("SKYPILOT_NODE_RANK",),
    num_nodes=("SKYPILOT_NUM_NODES",),
    # It survives recoveries, and no variable counts those: a rank left over from before one is told apart only by
    # being dead.
    job_id=(("SKYPILOT_TASK_ID",),),
    one_per_node=("SKYPILOT_NUM_GPUS_PER_NODE",),
    outside=_ONE_OF_NODE,
    start=f"run torchrun on each node, {_BY_HAND}",
)


def _aws_batch_job(environ: Mapping[str, str]) -> dict[str, str]:
    # Each node of a multi-node job is a child of it: its id has #0, #1, … at the end.
    job = (text_of(environ, "AWS_BATCH_JOB_ID") or "").partition("#")[0]
    return {"AWS_BATCH_JOB_ID before #": job} if job else {}


AWS_BATCH = Launcher(
    name="AWS Batch",
    marks=("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
    yields_to=("RANK",),
    rank=("AWS_BATCH_JOB_NODE_INDEX",),
    world_size=("AWS_BATCH_JOB_NUM_NODES",),
    required=("AWS_BATCH_JOB_ID",),
    node_rank=("AWS_BATCH_JOB_NODE_INDEX",),
    num_nodes=("AWS_BATCH_JOB_NUM_NODES",),
    computed=_aws_batch_job,
    job_id=(("AWS_BATCH_JOB_ID before #",),),
    attempt=("AWS_BATCH_JOB_ATTEMPT",),
    outside=_ONE_OF_NODE,
    start=f"start it as a multi-node parallel job, {_BY_HAND}",
)

# In a JobSet the index is that of the pod in its child Job: with several of those no variable holds the rank.
INDEXED_JOB = Launcher(
    name="Kubernetes Indexed Job",
    marks=("JOB_COMPLETION_INDEX",),
    yields_to=("RANK",),
    rank=("JOB_COMPLETION_INDEX",),
    world_size=("WORLD_SIZE",),
    size_is_the_users=True,
    outside="Kubernetes numbers the pods of an Indexed Job, but does not tell them how many they are",
    start=f"set WORLD_SIZE in the Job's template to the number of its completions, {_BY_HAND}",
)

LAUNCHERS = (
    TORCHRUN,
    JSRUN,
    OPEN_MPI,
    MVAPICH2,
    PALS,
    FLUX,
    HYDRA,
    SLURM,
    PMI,
    LEADER_WORKER_SET,
    KUBEFLOW,
    SAGEMAKER,
    SKYPILOT,
    AWS_BATCH,
    INDEXED_JOB,
)
"""The rows, innermost first: torchrun and mpirun run inside Slurm's steps, and those inside pods and cloud nodes."""


def seen(environ: Mapping[str, str]) -> Launcher | None:
    """Returns the innermost launcher of which the environment bears a mark, or None."""
    return next((row for row in LAUNCHERS if row.is_seen(environ)), None)


def detect(environ: Mapping[str, str]) -> Identity | None:
    """Returns the place that the innermost launcher gives to this process, or None when there is none.

    Args:
        environ: the environment without what mingle itself has written into it.

    Raises:
        LauncherError: when that launcher's environment is incomplete or contradicts itself. An outer launcher
            does not stand in for it: its rank is another one.
    """
    row = seen(environ)
    return None if row is None else row.read(environ)
