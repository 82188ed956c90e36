"""Slurm on the hosts of a cluster: munge, a controller and a daemon for each node, all of it in one directory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType

from tests.lab import Process

from .cluster import AS_ROOT, EXAMPLES, Cluster

_READY_SECONDS = 60.0
_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
MessageTimeout=60
TCPTimeout=60
BatchStartTimeout=120
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES State=UP
"""
_MUNGE_FILES = (("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))


class Slurm:
    """A context in which Slurm runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.directory = cluster.directory / "slurm"
        self.configuration = self.directory / "slurm.conf"
        self._daemons: list[Process] = []

    def __enter__(self) -> Slurm:  # noqa: PYI034 - Self came with Python 3.11
        names = [host.name for host in self.cluster.hosts]
        for directory in ("state", *(f"spool.{name}" for name in names)):
            (self.directory / directory).mkdir(parents=True)
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.configuration.write_text(
            _CONFIGURATION.format(controller=names[0], directory=self.directory, nodes=",".join(names))
        )
        # A host of the lab has no control groups to look for.
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        files = [f"--{kind}={self.directory}/munge.{end}" for kind, end in _MUNGE_FILES]
        # --force: that others could reach the socket through the directory is not needed here.
        munge = self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *files)
        munge.wait_for_output("Created socket")
        self._daemon("slurmctld", "-D", "-i", "-f", self.configuration)
        for number, name in enumerate(names):
            self._daemon("slurmd", "-D", "-N", name, "-f", self.configuration, host=number)
        self._wait_until_idle(names)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in reversed(self._daemons):
            if daemon.exit_code is None:
                daemon.kill()

    def run(self, *command: str | Path, status: int = 0, cwd: Path = EXAMPLES) -> str:
        """Run one of Slurm's commands on the first node until it ends with this status; return what it wrote."""
        variables = {"SLURM_CONF": str(self.configuration), **AS_ROOT}
        return self.cluster.run(*command, status=status, variables=variables, cwd=cwd)

    def _daemon(self, *command: str | Path, host: int = 0) -> Process:
        daemon = self.cluster.hosts[host].run(command, cwd=self.directory)
        self._daemons.append(daemon)
        return daemon

    def _wait_until_idle(self, names: list[str]) -> None:
        deadline, pause = time.monotonic() + _READY_SECONDS, threading.Event()
        while self.run("sinfo", "--noheader", "--Node", "--format=%N %T").split() != [
            word for name in names for word in (name, "idle")
        ]:
            assert time.monotonic() < deadline, "\n".join(daemon.describe() for daemon in self._daemons)
            pause.wait(0.1)  # Slurm gives no notice
