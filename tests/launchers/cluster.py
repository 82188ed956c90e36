"""Hosts of a lab as launchers want them: with names, and an ``ssh`` from each to each."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab import Lab

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""What Open MPI wants to read before it does anything for root."""

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 240.0  # four ranks need a tenth of it, most of it for importing torch, where nothing else runs

# Launchers call `ssh [options] HOST COMMAND...`. Only what stands behind it is not sshd, but nsenter(1).
_SSH = """\
#!/bin/sh
while :; do
    case $1 in
        -l | -o | -p) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
pid=$(cat {directory}/$1.pid) || exit 255
shift
exec nsenter --target "$pid" --net --uts --mount -- sh -c "$*"
"""


class Cluster:
    """Hosts ``node1``, ``node2`` and so on; commands start on the first."""

    def __init__(self, lab: Lab, directory: Path, count: int = 2) -> None:
        network = lab.network()
        self.hosts = [lab.host(network, name=f"node{number}") for number in range(1, count + 1)]
        self.directory = directory
        names = "".join(f"{host.address()} {host.name}\n" for host in self.hosts)
        for host in self.hosts:
            host.hosts_file.write_text(f"127.0.0.1 localhost\n{names}")
            # Something must be in a host for others to enter it.
            resident = host.run(["sleep", "infinity"])
            for name in (host.name, host.address()):
                (directory / f"{name}.pid").write_text(str(resident.pid))
        self.programs = directory / "bin"
        self.programs.mkdir()
        ssh = self.programs / "ssh"
        ssh.write_text(_SSH.format(directory=shlex.quote(str(directory))))
        ssh.chmod(0o755)

    def run(
        self,
        *command: str | Path,
        status: int = 0,
        cwd: Path = EXAMPLES,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command on the first host until it ends with this status, and return what it wrote."""
        process = self.hosts[0].run(command, cwd=cwd, env={"PATH": self.path, **(variables or {})})
        assert process.wait(SECONDS) == status, process.describe()
        return process.output

    @property
    def path(self) -> str:
        """Where commands are found: the stand-in for ssh, then the tests' own Python, then all else."""
        process_path = os.environ.get("PATH", os.defpath)
        return os.pathsep.join([str(self.programs), str(Path(sys.executable).parent), process_path])


def places(output: str) -> list[tuple[str, int, int]]:
    """Return for each rank of the one job in the output its host, node rank and local rank, as rank 0 tells them.

    Raises:
        AssertionError: the ranks did not train, or not all of them the same network.
    """
    members = re.findall(r"^(?:\w+: )?  rank (\d+): (\w+) \S+, node (\d+), local rank (\d+), pid", output, re.MULTILINE)
    assert [int(rank) for rank, *_ in members] == list(range(len(members))), output
    (accuracy,) = re.findall(r"final test accuracy: (\d\.\d+)$", output, re.MULTILINE)
    assert float(accuracy) >= 0.9, output
    (identical,) = re.findall(r"parameters identical on (\d+) ranks", output)
    assert int(identical) == len(members), output
    return [(host, int(node), int(local)) for _, host, node, local in members]


def train(*arguments: str) -> Sequence[str]:
    """The command that trains, long enough to tell that it has learnt."""
    return ["python", str(EXAMPLES / "ddp_train.py"), "--device", "cpu", "--epochs", "12", *arguments]


BLOCKS = [("node1", 0, 0), ("node1", 0, 1), ("node2", 1, 0), ("node2", 1, 1)]
"""Four ranks, two on each node, in blocks."""
