"""The plug-in for Lightning: its ranks find each other without ``MASTER_ADDR``.

A Trainer or a Fabric needs only this plug-in and the number of ranks::

    from lightning.pytorch import Trainer
    from mingle.lightning import MingleEnvironment

    Trainer(plugins=[MingleEnvironment(job_id="resnet")], strategy="ddp", devices=8, num_nodes=4)

The processes are started by hand, or by any launcher: Lightning starts none. Without the plug-in,
:func:`mingle.discover` before the Trainer does the same. Lightning keeps its process group from one Trainer to the next
in a process, and so the plug-in keeps the job.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mingle.config.settings import Arguments
from mingle.config.values import Secret
from mingle.distributed import rendezvous
from mingle.errors import ConfigurationError

if TYPE_CHECKING:
    from typing import Any

    from mingle.job import Job

    # Where Lightning is not installed there is nothing to check the types against.
    ClusterEnvironment: Any = object
else:
    try:
        from lightning.fabric.plugins.environments import ClusterEnvironment
    except ImportError as error:
        raise ImportError(
            "mingle.lightning needs Lightning, which is not installed here: pip install lightning"
        ) from error


class MingleEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """Tells Lightning this process's place in a job that :func:`mingle.discover` brings together.

    Lightning works a rank out as ``node_rank * devices + local_rank``, so each node must hold one block of
    ``devices`` ranks. Assigned ranks are like that; ``srun`` needs ``--distribution=block``.

    Args:
        job_id: as for :func:`mingle.discover`.
        **options: the other arguments of :func:`mingle.discover`: ``rank``, ``world_size``, ``interface``, …

    Its methods raise what :func:`mingle.discover` raises.
    """

    def __init__(self, job_id: str | None = None, **options: Any) -> None:
        super().__init__()
        if "secret" in options:
            options["secret"] = Secret.of(options["secret"])  # else a traceback that shows local variables shows it
        self._arguments = Arguments(job_id=job_id, **options)
        self._job: Job | None = None

    @property
    def job(self) -> Job:
        """The job. The first one to ask waits until all ranks are there: Lightning, when it makes its Trainer.

        In a process that is in the job already, because of an earlier Trainer, it is that one.
        """
        if self._job is None:
            self._refuse_to_be_started()
            self._job = rendezvous.discover(self._arguments, joins=True)
        return self._job

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """The address of rank 0's store."""
        return self.job.master_addr

    @property
    def main_port(self) -> int:
        """The TCP port of rank 0's store."""
        self._refuse_to_be_started()
        return self.job.master_port

    @staticmethod
    def detect() -> bool:
        """False: it is used where it is named, and never chosen by Lightning itself."""
        return False

    def world_size(self) -> int:
        """The number of ranks."""
        return self.job.world_size

    def set_world_size(self, size: int) -> None:
        """Check Lightning's count of ranks, which is ``devices`` times ``num_nodes``.

        Raises:
            ConfigurationError: the job has another number of ranks.
        """
        if size != self.job.world_size:
            raise self._miscounted(f"Lightning counts {size} ranks, and the job has {self.job.world_size}")

    def global_rank(self) -> int:
        """This process's rank."""
        return self.job.rank

    def set_global_rank(self, rank: int) -> None:
        """Check the rank that Lightning has computed.

        Raises:
            ConfigurationError: it is not this process's.
        """
        self._refuse_to_be_started()
        if rank != self.job.rank:
            raise self._miscounted(f"Lightning takes this process for rank {rank}, and it is rank {self.job.rank}")

    def local_rank(self) -> int:
        """This process's rank among those of its node."""
        return self.job.local_rank

    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.job.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's ``devices`` and ``num_nodes``.

        Raises:
            ConfigurationError: they are not the job's.
        """
        if (num_devices, num_nodes) != (self.job.local_world_size, self.job.num_nodes):
            raise self._miscounted(
                f"Lightning was told devices={num_devices} and num_nodes={num_nodes}, and the job has "
                f"{self.job.local_world_size} ranks on this node, one of {self.job.num_nodes}"
            )

    def teardown(self) -> None:
        """Do nothing: a Trainer tears down after each ``fit`` and goes on with its process group."""

    def _refuse_to_be_started(self) -> None:
        """Refuse a strategy or a launcher of Lightning's that asks for the job where it is to start the ranks.

        It would wait there for ranks that it starts only later.
        """
        frame = sys._getframe()
        while frame.f_locals.get("self") is self and frame.f_back is not None:
            frame = frame.f_back
        # Lightning says in no other way who starts the processes.
        start_method = getattr(frame.f_locals.get("self"), "_start_method", "popen")
        if start_method in ("spawn", "fork", "forkserver"):
            raise ConfigurationError.explain(
                f"this strategy of Lightning starts the ranks itself (start_method={start_method!r}), and "
                "MingleEnvironment is for ranks that have been started.",
                cause='strategy="ddp_spawn", "ddp_fork" or "ddp_notebook", which Lightning also chooses in a notebook',
                remedy='give strategy="ddp", and start one process for each rank, by a launcher or by hand.',
            )

    def _miscounted(self, observation: str) -> ConfigurationError:
        job = self.job
        return ConfigurationError.explain(
            f"job {job.job_id!r}: {observation}.",
            cause="devices= or num_nodes= is not what was started, or a node's ranks are not one block "
            "(srun: --distribution=block)",
            remedy=f"give the Trainer devices={job.local_world_size}, num_nodes={job.num_nodes}, and start as many "
            "ranks on every node.",
        )
