"""Programs that know nothing of mingle, started by ``mingle-run`` on hosts that know no address; and what trains."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Host, Lab, Process
from tests.support.loopback import until

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


def test_mlx_sums_over_a_ring_of_three_hosts(hosts: list[Host]) -> None:
    outputs = run(hosts, "--mlx", "--", sys.executable, str(_EXAMPLES / "mlx_all_sum.py"))
    assert sorted(output.strip() for output in outputs) == [f"rank {number} of 3: the sum is 6" for number in range(3)]


def test_a_replica_group_of_torchft_is_killed_and_comes_back(hosts: list[Host], tmp_path: Path) -> None:
    """Both groups find the lighthouse on node 0, whose address nothing names before the start."""
    names = "".join(f"{host.address()} {host.name}\n" for host in hosts)  # torchft sends checkpoints to a host's name
    for host in hosts:
        host.hosts_file.write_text(f"127.0.0.1 localhost\n{names}")
    again, end = tmp_path / "again", tmp_path / "end"
    head = f"{Path(sys.executable).parent}/torchft_lighthouse --bind=[::]:{{master_port}} --min_replicas=1"
    group = f"{sys.executable} {_PROGRAMS / 'torchft_group.py'} {{address}} {{my_port}} {end}"
    lighthouse_at = "TORCHFT_LIGHTHOUSE=http://{master_addr}:{master_port}"
    line = f"export {lighthouse_at}; until {group}; do until test -e {again}; do sleep 0.1; done; done"
    nodes = [
        start([host], *_RUN, "--nnodes=3", f"--node-rank={rank}", f"--head={head}", "--", "sh", "-c", line)[0]
        for rank, host in enumerate(hosts)
    ]

    def said(node: Process) -> list[dict[str, Any]]:
        return [json.loads(text) for text in node.stdout.splitlines(keepends=True) if text.endswith("}\n")]

    def trains(node: Process, groups: int, but: int = 0, after: int = 0) -> bool:
        steps = [record for record in said(node) if record["groups"] == groups and record["pid"] != but]
        return any(record["step"] > after for record in steps)

    lighthouse, survivor, victim = nodes
    until(lambda: trains(victim, groups=2), _SECONDS)
    first = said(victim)[0]["pid"]
    os.kill(first, signal.SIGKILL)
    last = max(record["step"] for record in said(victim))
    until(lambda: trains(survivor, groups=1, after=last), _SECONDS)  # it goes on alone
    again.touch()
    until(lambda: trains(victim, groups=2, but=first), _SECONDS)
    for node in (survivor, victim):
        until(lambda node=node: said(node)[-1]["weights"] == pytest.approx([3, 1], abs=0.1), _SECONDS)
    end.touch()
    assert [node.wait(_SECONDS) for node in (survivor, victim)] == [0, 0]
    back = [record for record in said(victim) if record["pid"] != first]
    assert min(record["step"] for record in back if record["groups"] == 2) > last, "with the other group's state"
    lighthouse.send_signal(signal.SIGTERM)
    lighthouse.wait(_SECONDS)


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
def test_frameworks_train_after_discover(hosts: list[Host], program: str) -> None:
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
    """DeepSpeed also wants to read how many processes each host takes."""
    hostfile = f"{tmp_path}/hostfile{{node_rank}}"
    deepspeed = f"{Path(sys.executable).parent}/deepspeed --hostfile={hostfile} --no_ssh --node_rank={{node_rank}}"
    line = (
        f"sed 's/$/ slots=1/' {{hostfile}} > {hostfile} && exec {deepspeed} --master_addr={{master_addr}}"
        f" --master_port={{master_port}} {_PROGRAMS / 'deepspeed_zero1.py'}"
    )
    outputs = run(hosts, "--", "sh", "-c", line, DS_ACCELERATOR="cpu", HOME=os.fspath(tmp_path))
    records(outputs, hosts, each=1)
