"""Programs that know nothing of mingle, started by ``mingle-run`` on hosts that know no address; and what trains."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Host, Lab, Process

_EXAMPLES = Path(__file__).parents[2] / "examples" / "any-program"
_PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 150.0  # idle, the fresh interpreters take a tenth of it
_RUN = (sys.executable, "-m", "mingle.run.command")


@pytest.fixture
def hosts(lab: Lab) -> list[Host]:
    """Three hosts on a network of their own, on which multicast passes."""
    network = lab.network()
    return [lab.host(network) for _ in range(3)]


def start(hosts: list[Host], *words: str, **settings: str) -> list[Process]:
    """Start the same line on every host."""
    common = {"MINGLE_PROGRESS": "off", "MINGLE_TIMEOUT": "100", "OMP_NUM_THREADS": "1", **settings}
    return [host.run(words, env=common) for host in hosts]


def run(hosts: list[Host], *words: str, **settings: str) -> list[str]:
    """Run the same line of mingle-run on every host, and return their outputs."""
    processes = start(hosts, *_RUN, f"--nnodes={len(hosts)}", *words, **settings)
    assert [process.wait(_SECONDS) for process in processes] == [0] * len(hosts)
    return [process.stdout for process in processes]


def records(outputs: list[str], hosts: list[Host], each: int) -> list[dict[str, Any]]:
    """Return what each rank says at its end, by rank; all must have met, and end with one set of weights."""
    lines = [line for output in outputs for line in output.splitlines() if line.startswith('{"rank"')]
    found = sorted((json.loads(line) for line in lines), key=lambda record: int(record["rank"]))
    assert [int(record["rank"]) for record in found] == list(range(each * len(hosts)))
    assert {record["world_size"] for record in found} == {len(found)}
    assert {record["host"] for record in found} == {host.name for host in hosts}
    (master,) = {record["master"] for record in found}
    assert master in {host.address() for host in hosts}
    assert len({record["weights"] for record in found}) == 1
    return found


def test_jax_sums_over_three_hosts(hosts: list[Host]) -> None:
    outputs = run(hosts, "--", sys.executable, str(_EXAMPLES / "jax_psum.py"))
    said = sorted(line for output in outputs for line in output.splitlines() if line.startswith("process "))
    assert said == [f"process {number} of 3: the sum is 6" for number in range(3)]


@pytest.fixture
def short_path() -> Iterator[str]:
    """A directory for sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        yield directory


def test_ray_runs_a_task_on_each_of_three_hosts(hosts: list[Host], short_path: str) -> None:
    scripts = Path(sys.executable).parent
    head = f"{sys.executable} {_EXAMPLES / 'ray_head.py'} {{master_addr}} {{master_port}} {{nnodes}}"
    worker = [
        *(str(scripts / "ray"), "start", "--address={master_addr}:{master_port}", "--node-ip-address={address}"),
        *("--block", "--num-cpus=1"),
    ]
    processes = start(
        hosts,
        *(*_RUN, "--nnodes=3", "--keep-going", f"--head={head}", "--", *worker),
        # All hosts share a file system, and a worker shall soon see that the head has ended.
        RAY_TMPDIR=short_path,
        RAY_gcs_rpc_server_reconnect_timeout_s="5",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_NUM_REDIS_GET_RETRIES="100",  # a worker waits for a head that starts slowly
    )
    statuses = [process.wait(_SECONDS) for process in processes]
    (said,) = [line for process in processes for line in process.stdout.splitlines() if line.startswith("tasks ran")]
    assert said == "tasks ran on " + ", ".join(sorted(host.address() for host in hosts))
    assert sorted(statuses) == [0, 1, 1], "the workers' `ray start --block` ends with 1 when the head has gone"


@pytest.mark.parametrize("program", ["trainer", "deepspeed_zero1"])
def test_they_train_after_discover(hosts: list[Host], program: str) -> None:
    pair = hosts[:2]
    settings = {"DISCOVER": program, "WORLD_SIZE": "4", "MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(_PROGRAMS / f"{program}.py")]
    # DeepSpeed and Accelerate read these two, and mingle fills them in.
    ranks = [host.run(line, env={"MINGLE_TIMEOUT": "100", **settings}) for host in pair for _ in range(2)]
    assert [rank.wait(_SECONDS) for rank in ranks] == [0] * 4
    records([rank.stdout for rank in ranks], pair, each=2)


def test_trainer_trains_under_torchrun_and_mingle(hosts: list[Host]) -> None:
    pair = hosts[:2]
    line = ["--rdzv-backend=mingle", "--rdzv-id=trainer", "--nnodes=2", "--nproc-per-node=2"]
    words = [sys.executable, "-m", "torch.distributed.run", *line, str(_PROGRAMS / "trainer.py")]
    agents = start(pair, *words)
    assert [agent.wait(_SECONDS) for agent in agents] == [0, 0]
    records([agent.stdout for agent in agents], pair, each=2)


def test_deepspeeds_launcher_without_ssh(hosts: list[Host], tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    place = ["--node_rank={node_rank}", "--master_addr={master_addr}", "--master_port={master_port}"]
    launcher = [str(Path(sys.executable).parent / "deepspeed"), f"--hostfile={hostfile}", "--no_ssh", *place]
    outputs = run(
        hosts, "--", *launcher, str(_PROGRAMS / "deepspeed_zero1.py"), DS_ACCELERATOR="cpu", HOME=os.fspath(tmp_path)
    )
    records(outputs, hosts, each=1)
