"""What a launcher tells a process: a table with one row for each launcher, and how a row is read.

A launcher is a program that starts the processes of a job and gives each its place in the environment. A row names its
variables by meaning and is read all or nothing: a rank is never guessed, and never composed from two launchers. Nothing
here reads ``os.environ``. A comment beside a row names its traps. A launcher that sets no ranks (Docker Swarm, ``docker
compose``, ``pdsh``) has no row: with a size alone, ranks are assigned.
"""

from __future__ import annotations

import re
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING

from msgspec import Struct

from mingle.config.values import parse_whole, text_of
from mingle.errors import LauncherError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Placement(Struct, frozen=True, kw_only=True):
    """A process's place in its job. What no source says is None.

    Attributes:
        rank: this process's rank in the job; None: ranks are assigned.
        world_size: the number of processes in the job.
        rank_from: the launcher's variable that held the rank; empty: no launcher gave it.
        world_size_from: likewise.
        local_rank: this process's rank among those of its node.
        local_world_size: the number of the job's processes on this node.
        node_rank: the rank of this node among the job's; where ranks are assigned, the one that it asks for.
        node_rank_from: where that was given, as a reader would write it; empty: no node rank is asked for.
        node_rank_launched: whether a launcher gave the node rank that is asked for.
        num_nodes: the number of nodes.
        node: a key that only this node's processes share within the job.
        job_id: the launcher's, the same for all processes of the job, and for no other job of this launcher.
        attempt: which start of this job it is, the same for all its processes.
        launcher: the name of the launcher's row; None: no launcher was seen.
    """

    rank: int | None
    world_size: int
    rank_from: str = ""
    world_size_from: str = ""
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    node_rank_from: str = ""
    node_rank_launched: bool = False
    num_nodes: int | None = None
    node: str | None = None
    job_id: str | None = None
    attempt: str | None = None
    launcher: str | None = None


class Launcher(Struct, frozen=True, kw_only=True):
    """One row: the variables that a launcher sets, by meaning; of several names the first that is set counts.

    Attributes:
        name: what people call it.
        marks: when one of these is set, the launcher is here, and its row must be complete.
        defers_to: when one of these is set, the launcher is ignored: another one has placed the process.
        rank, world_size: always needed.
        required: further variables that belong to a complete environment.
        local_rank, local_world_size, node_rank, num_nodes, attempt: optional.
        tasks_per_node: a compressed list (``2(x3),1``) of which this node's entry is the local world size.
        job_id: parts, each with its names, that are joined by dots when all are set.
        one_per_node: counts of processes or GPUs on a node, of a launcher that starts one process on each and
            numbers the nodes. Where there are more, the ranks are not the nodes'.
        computed: gives what has to be worked out of the variables, under names made of theirs.
        started: whether the launcher started this very process, rather than a shell that sees its job.
        size_is_the_users: the launcher says no size; the user does, in the Job or by an argument.
        sets_plain_pair: ``RANK`` and ``WORLD_SIZE`` come from this launcher: they don't complete its row.
        outside: what a process is that sees the marks and no complete row.
        start: how to start it properly.
    """

    name: str
    marks: tuple[str, ...]
    defers_to: tuple[str, ...] = ()
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    required: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    tasks_per_node: tuple[str, ...] = ()
    job_id: tuple[tuple[str, ...], ...] = ()
    attempt: tuple[str, ...] = ()
    one_per_node: tuple[str, ...] = ()
    computed: Callable[[Mapping[str, str]], dict[str, str]] | None = None
    started: Callable[[Mapping[str, str]], bool] | None = None
    size_is_the_users: bool = False
    sets_plain_pair: bool = False
    outside: str
    start: str

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of all variables that this row knows, in the table's order."""
        plain = ("marks", "rank", "world_size", "required", "local_rank", "local_world_size", "node_rank")
        more = ("num_nodes", "tasks_per_node", "one_per_node", "attempt")
        named = chain(*(getattr(self, field) for field in plain + more), *self.job_id)
        # What is computed has a name that no variable can have.
        return tuple(dict.fromkeys(name for name in named if name.isidentifier()))

    def variables_seen(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return this row's variables that are set, with their values."""
        return {name: environ[name] for name in self.variables if name in environ}

    def is_seen(self, environ: Mapping[str, str]) -> bool:
        """Return whether the environment bears a mark of this launcher; it may still be incomplete."""
        return text_of(environ, *self.marks) is not None and text_of(environ, *self.defers_to) is None

    def read(self, environ: Mapping[str, str]) -> Placement:
        """Return the place that this row gives to the process.

        Raises:
            LauncherError: when a needed variable is missing, the launcher did not start this very process, it
                numbers nodes that hold several processes, or the values contradict each other.
        """
        if self.computed is not None:
            environ = {**environ, **self.computed(environ)}
        rank_from, world_size_from = _set_name(environ, self.rank), _set_name(environ, self.world_size)
        missing = [name for name in self.required if text_of(environ, name) is None]
        if (
            rank_from is None
            or world_size_from is None
            or missing
            or not (self.started is None or self.started(environ))
        ):
            missing[:0] = self.world_size[:1] if world_size_from is None else ()
            missing[:0] = self.rank[:1] if rank_from is None else ()
            raise self._incomplete(environ, missing)
        self._check_one_per_node(environ)
        rank, world_size = self._number(environ, self.rank), self._number(environ, self.world_size, minimum=1)
        assert rank is not None
        assert world_size is not None
        node_rank = self._number(environ, self.node_rank)
        placement = Placement(
            launcher=self.name,
            rank=rank,
            rank_from=rank_from,
            world_size=world_size,
            world_size_from=world_size_from,
            local_rank=self._number(environ, self.local_rank),
            local_world_size=self._local_world_size(environ, node_rank),
            node_rank=node_rank,
            node_rank_from="" if node_rank is None else self._node_rank_from(environ),
            node_rank_launched=node_rank is not None,
            num_nodes=self._number(environ, self.num_nodes, minimum=1),
            node=None if node_rank is None else str(node_rank),
            job_id=self._job_id(environ),
            attempt=text_of(environ, *self.attempt),
        )
        self._check(placement, environ)
        return placement

    def node_number(self, environ: Mapping[str, str]) -> tuple[int, str] | None:
        """Return this node's number and where it was given, for a program that is started once on each node.

        None: the launcher does not number nodes, or did not start this very process.

        Raises:
            LauncherError: it is not a number.
        """
        if self.started is not None and not self.started(environ):
            return None
        if self.computed is not None:
            environ = {**environ, **self.computed(environ)}
        number = self._number(environ, self.node_rank)
        return None if number is None else (number, self._node_rank_from(environ))

    def _node_rank_from(self, environ: Mapping[str, str]) -> str:
        name = _set_name(environ, self.node_rank)
        assert name is not None
        return f"{self.name}'s {name}={environ[name].strip()}"

    def _number(self, environ: Mapping[str, str], names: tuple[str, ...], *, minimum: int = 0) -> int | None:
        name = _set_name(environ, names)
        if name is None:
            return None
        try:
            return parse_whole(environ[name].strip(), name, minimum=minimum, error=LauncherError)
        except LauncherError as error:
            raise LauncherError.explain(
                f"{self.name} has set {_listed(self.variables_seen(environ))}: {error.observation}",
                cause=f"{self.outside}, or the value was set by hand",
                remedy=self.start,
            ) from None

    def _local_world_size(self, environ: Mapping[str, str], node_rank: int | None) -> int | None:
        name = _set_name(environ, self.tasks_per_node)
        if name is None or node_rank is None:
            return self._number(environ, self.local_world_size, minimum=1)
        try:
            return next(islice(expand_counts(environ[name]), node_rank, None))
        except (ValueError, StopIteration) as error:
            raise self._contradiction(
                environ, f"{name}={environ[name]!r} holds no count for node rank {node_rank}"
            ) from error

    def _job_id(self, environ: Mapping[str, str]) -> str | None:
        parts = [text for names in self.job_id if (text := text_of(environ, *names)) is not None]
        if not parts or len(parts) < len(self.job_id):
            return None
        # PEP 383: under an ASCII locale the bytes of a letter such as Flux's ƒ come as surrogates.
        return ".".join(parts).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

    def _check_one_per_node(self, environ: Mapping[str, str]) -> None:
        name = _set_name(environ, self.one_per_node)
        if name is not None and environ[name].strip() not in {"0", "1"}:
            raise LauncherError.explain(
                f"{self.name} has set {_listed(self.variables_seen(environ))}: its ranks are those of nodes, and "
                f"{name}={environ[name]!r} says that there are several processes on each",
                cause=self.outside,
                remedy=self.start,
            )

    def _check(self, placement: Placement, environ: Mapping[str, str]) -> None:
        for part, whole in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            index, size = getattr(placement, part), getattr(placement, whole)
            if index is not None and size is not None and index >= size:
                raise self._contradiction(environ, f"{part} {index} does not fit a {whole} of {size}")
        if placement.local_world_size is not None and placement.local_world_size > placement.world_size:
            raise self._contradiction(
                environ,
                f"local_world_size {placement.local_world_size} exceeds a world_size of {placement.world_size}",
            )

    def _incomplete(self, environ: Mapping[str, str], missing: list[str]) -> LauncherError:
        lacking = f"but not {', '.join(missing)}" if missing else "but not for a task that it started"
        return LauncherError.explain(
            f"{self.name} has set {_listed(self.variables_seen(environ))}, {lacking}",
            cause=self.outside,
            remedy=self.start,
        )

    def _contradiction(self, environ: Mapping[str, str], problem: str) -> LauncherError:
        return LauncherError.explain(
            f"{self.name} has set {_listed(self.variables_seen(environ))}: {problem}",
            cause="variables of two different starts are mixed in one environment",
            remedy=self.start,
        )


def expand_counts(text: str) -> Iterator[int]:
    """Yield the task count of each node from Slurm's compressed form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: when the text has another form.
    """
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\s*", item)
        if match is None:
            raise ValueError(f"{item!r} is not a task count such as 2 or 2(x3)")
        yield from repeat(int(match[1]), int(match[2] or 1))


def _set_name(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if text_of(environ, name) is not None), None)


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in variables.items())


# --- the table --------------------------------------------------------------------------------------------------

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
    # PMI_RANK is not a mark here: srun --mpi=pmi2 sets it too. Where mpiexec runs inside a Slurm job, its
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

# Slurm keeps the ids from this one on for steps that srun did not start: batch scripts, salloc's interactive step,
# adopted processes (slurm.h, SLURM_MAX_NORMAL_STEP_ID).
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
    # SLURM_JOB_ID alone is not a mark: an ssh session that Slurm adopted has it, and srun did not start it.
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
    defers_to=("RANK",),
    rank=("LWS_WORKER_INDEX",),
    world_size=("LWS_GROUP_SIZE",),
    node_rank=("LWS_WORKER_INDEX",),
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
    defers_to=("LOCAL_RANK",),
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
    defers_to=("RANK",),
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
    defers_to=("RANK",),
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
    defers_to=("RANK",),
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
    defers_to=("RANK",),
    rank=("JOB_COMPLETION_INDEX",),
    world_size=("WORLD_SIZE",),
    node_rank=("JOB_COMPLETION_INDEX",),
    size_is_the_users=True,
    outside="Kubernetes numbers the pods of an Indexed Job, but does not tell them how many there are",
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
    """Return the innermost launcher of which the environment bears a mark, or None."""
    return next((row for row in LAUNCHERS if row.is_seen(environ)), None)
