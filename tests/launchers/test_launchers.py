"""Each launcher starts examples/ddp_train.py, unchanged, on two hosts: it trains, and every rank has its place.

No host learns an address from anybody: the hosts have a network of their own, with multicast.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.lab import Lab

from .cluster import AS_ROOT, BLOCKS, EXAMPLES, SECONDS, Cluster, places, train
from .slurm import Slurm


def test_open_mpi(cluster: Cluster) -> None:
    output = cluster.run("mpirun.openmpi", "--host", "node1:2,node2:2", "-n", "4", *train(), variables=AS_ROOT)
    assert places(output) == BLOCKS


def test_mpich(cluster: Cluster) -> None:
    """It gives no job id, so the user does."""
    output = cluster.run("mpiexec.hydra", "-hosts", "node1:2,node2:2", "-n", "4", *train("--job-id", "digits"))
    assert places(output) == BLOCKS


@pytest.mark.usefixtures("_launchers")
def test_open_mpi_by_the_host_file_of_mingle_run(lab: Lab, tmp_path: Path) -> None:
    """Node 0 starts mpirun with the addresses of all, and the others only tell theirs."""
    cluster = Cluster(lab, tmp_path, count=3)
    mpirun = "mpirun.openmpi --hostfile {hostfile} --map-by ppr:1:node"
    tell = "sh -c 'echo rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $(hostname)'"
    line = ["python", "-m", "mingle.run.command", "--nnodes=3", f"--head={mpirun} {tell}", "--", "true"]
    variables = {**AS_ROOT, "PATH": cluster.path, "MINGLE_PROGRESS": "off"}
    nodes = [host.run(line, env=variables) for host in cluster.hosts]
    assert [node.wait(SECONDS) for node in nodes] == [0, 0, 0]
    (said,) = [node.stdout for node in nodes if node.stdout]
    assert sorted(re.findall("rank ([0-2]) of 3 on", said)) == ["0", "1", "2"]
    assert sorted(re.findall("on (node[1-3])$", said, re.MULTILINE)) == ["node1", "node2", "node3"]


def test_srun(slurm: Slurm) -> None:
    """Also where the ranks go round the nodes, of which there is a warning."""
    output = slurm.run("srun", "-n", "4", "--distribution=cyclic", *train())
    assert places(output) == [("node1", 0, 0), ("node2", 1, 0), ("node1", 0, 1), ("node2", 1, 1)]
    assert "not contiguous" in output


def test_the_sbatch_example(slurm: Slurm) -> None:
    """On two ranks: what is given on the command line comes before what the script says."""
    log = slurm.directory / "digits.log"
    options = ["--wait", f"--output={log}", "--ntasks-per-node=1"]
    arguments = ("train.sbatch", "--device", "cpu", "--epochs", "12")
    slurm.run("sbatch", *options, *arguments, cwd=EXAMPLES / "slurm")
    assert places(log.read_text()) == [("node1", 0, 0), ("node2", 1, 0)]


def test_the_sbatch_example_with_one_torchrun_for_each_node(slurm: Slurm) -> None:
    log, checkpoints = slurm.directory / "line-fit.log", slurm.directory / "line-fit"
    arguments = ("torchrun.sbatch", "--steps", "20", "--checkpoints", checkpoints)
    slurm.run("sbatch", "--wait", f"--output={log}", *arguments, cwd=EXAMPLES / "slurm")
    # Under torchrun print writes the end of a line apart, and two workers share a file.
    assert sorted(re.findall(r"rank (\d) of 4 at ", log.read_text())) == ["0", "1", "2", "3"]


def test_outside_a_step_of_slurm_there_is_an_error_at_once(slurm: Slurm) -> None:
    log = slurm.directory / "body.log"
    slurm.run("sbatch", "--wait", "-n", "4", f"--output={log}", "--wrap", "python -m mingle env", status=1)
    assert "SLURM_NTASKS='4'" in log.read_text()
    output = slurm.run("salloc", "-n", "4", "python", "-m", "mingle", "env", status=1)
    assert "conflict: Slurm has set" in output
    assert "start it with srun" in output


@pytest.mark.parametrize("options", [[], ["--mpi=pmi2"]], ids=["plain", "pmi2"])
def test_srun_with_and_without_pmi(slurm: Slurm, options: list[str]) -> None:
    """With PMI the task has PMI_RANK, too, as one of mpiexec has; it is Slurm's all the same."""
    output = slurm.run("srun", *options, "-n", "2", "python", "-m", "mingle", "env", "--json")
    resolved = [json.loads(line)["resolved"] for line in output.splitlines() if line.startswith("{")]
    assert {(each["launcher"], each["world_size"]) for each in resolved} == {("Slurm", 2)}
    assert sorted(each["rank"] for each in resolved) == [0, 1]
    assert len({each["job_id"] for each in resolved}) == 1


@pytest.mark.parametrize(
    ("mpi", "launcher"),
    [(["mpirun.openmpi"], "Open MPI"), (["mpiexec.hydra"], "Hydra (MPICH, Intel MPI)")],
    ids=["Open MPI", "MPICH"],
)
def test_mpi_inside_a_slurm_job(slurm: Slurm, mpi: list[str], launcher: str) -> None:
    """It has srun start one daemon on each node, so its processes inherit a place among those, which is not theirs."""
    output = slurm.run("salloc", "-n", "4", *mpi, "-n", "4", "python", "-m", "mingle", "env", "--json")
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    resolved = [record["resolved"] for record in found]
    assert sorted(each["rank"] for each in resolved) == [0, 1, 2, 3]
    assert {(each["launcher"], each["world_size"]) for each in resolved} == {(launcher, 4)}
    assert {"Slurm", launcher} <= {seen["name"] for record in found for seen in record["launchers"]}


def test_pdsh(cluster: Cluster) -> None:
    """By `-R exec`, which runs a command here for each host and puts the host's name and number into it."""
    words = ["MINGLE_JOB_ID=digits", "WORLD_SIZE=2", "RANK=%n", *train()]
    output = cluster.run("pdsh", "-S", "-R", "exec", "-w", "node[1-2]", "ssh", "%h", *words)
    assert places(output) == [("node1", 0, 0), ("node2", 1, 0)]


def test_the_pdsh_example(cluster: Cluster) -> None:
    output = cluster.run(EXAMPLES / "pdsh" / "train.sh", "node[1-2]", "2", "2", "--device", "cpu", "--epochs", "12")
    found = places(output)
    assert [(node, local) for _, node, local in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[0][0] == found[1][0] != found[2][0] == found[3][0]


def test_the_pdsh_example_in_docker(cluster: Cluster) -> None:
    """As far as Docker, which a stand-in takes the place of: it prints what it was asked for."""
    docker = cluster.programs / "docker"
    docker.write_text('#!/bin/sh\nhostname; printf "<%s>" "$@"; echo\n')
    docker.chmod(0o755)
    arguments = ("node[1-2]", "2", "1", "mingle-demo", "--snapshot", "two words.pt")
    output = cluster.run(EXAMPLES / "pdsh" / "train-docker.sh", *arguments)
    asked = dict(re.findall(r"^(node\d): <run>(.*)$", output, re.MULTILINE))
    assert set(asked) == {"node1", "node2"}
    assert len(set(asked.values())) == 1, "one and the same command, the job's name included"
    for words in ("<--network><host>", "<WORLD_SIZE=2>", "<--ipc><host>"):
        assert words in asked["node1"]
    assert re.search(r"<MINGLE_JOB_ID=[\w.-]+-digits-\d+-\d+>", asked["node1"])
    assert asked["node1"].endswith("<mingle-demo><python><ddp_train.py><--snapshot><two words.pt>")


def test_the_pdsh_example_ends_as_its_ranks_do(cluster: Cluster) -> None:
    arguments = ("node[1-2]", "2", "1", "--no-such-option")
    output = cluster.run(EXAMPLES / "pdsh" / "train.sh", *arguments, cwd=cluster.directory, status=123)
    assert output.count("error: unrecognized arguments: --no-such-option") == 2
