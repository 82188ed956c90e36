"""Frameworks that know nothing of mingle, under ``torchrun --rdzv-backend=mingle`` on hosts that know no address."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Host, Lab, Rank
from tests.lab.host import MODULES
from tests.lab.torchrun_jobs import torchrun
from tests.support.documents import ROOT, blocks

_PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 120.0  # idle, the fresh interpreters of the workers take a tenth of it


@pytest.fixture
def hosts(lab: Lab) -> list[Host]:
    """Two hosts on a network of their own, on which multicast passes."""
    network = lab.network()
    return [lab.host(network) for _ in range(2)]


def run(hosts: list[Host], program: str, workers: int) -> list[dict[str, Any]]:
    """Run the same line on every host and return what each worker says at its end, by rank."""
    command = [
        *("--rdzv-backend=mingle", f"--rdzv-id={program}", f"--nnodes={len(hosts)}", f"--nproc-per-node={workers}"),
        *(f"--rdzv-conf=discovery_timeout={_SECONDS:g}", str(_PROGRAMS / f"{program}.py")),
    ]
    settings = {"MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": MODULES}
    agents: list[Rank[None]] = [host.start(torchrun, command, env=settings) for host in hosts]
    for agent in agents:
        agent.result(_SECONDS)
    return said([agent.stdout for agent in agents], hosts, workers)


def said(outputs: list[str], hosts: list[Host], workers: int) -> list[dict[str, Any]]:
    """Return what each worker says at its end, by rank."""
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("{")]
    records = sorted((json.loads(line) for line in lines), key=lambda record: int(record["rank"]))
    assert [record["rank"] for record in records] == list(range(len(hosts) * workers))
    assert {record["host"] for record in records} == {host.name for host in hosts}
    (master,) = {record["master"] for record in records}
    assert master in {host.address() for host in hosts}
    return records


def test_plain_lightning_trains(hosts: list[Host]) -> None:
    found = run(hosts, "lightning_under_torchrun", workers=2)
    assert [(record["node_rank"], record["local_rank"]) for record in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({point for record in found for point in record["first epoch"]}) == 16, "each rank has a quarter"
    for record in found:
        assert (record["world_size"], record["backend"]) == (4, "gloo")
        assert record["environment"] == "TorchElasticEnvironment", "Lightning's own, which reads what torchrun gives"
        assert record["weights"] == found[0]["weights"] == pytest.approx([3, 1], abs=0.1)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_plain_accelerate_trains(hosts: list[Host], launcher: str) -> None:
    program = "accelerate_under_torchrun"
    workers = 1 if launcher == "torchrun" else 2
    if launcher == "torchrun":
        found = run(hosts, program, workers)
    else:
        options = ["--rdzv_backend=mingle", "--same_network", "--multi_gpu", "--machine_rank=0"]
        line = [*options, "--num_machines=2", "--num_processes=4", str(_PROGRAMS / f"{program}.py")]
        words = [str(Path(sys.executable).parent / "accelerate"), "launch", *line]
        settings = {"PET_RDZV_ID": program, "MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1"}
        agents = [host.run(words, env=settings) for host in hosts]
        assert [agent.wait(_SECONDS) for agent in agents] == [0, 0]
        found = said([agent.stdout for agent in agents], hosts, workers)
    ranks = 2 * workers
    for record in found:
        assert (record["world_size"], record["type"]) == (ranks, "DistributedType.MULTI_CPU")
        assert record["batches"] == 4 // ranks
        assert record["weights"] == found[0]["weights"] == pytest.approx([3, 1] * ranks, abs=0.1)


def test_the_notebook_of_the_document_runs_on_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    (cell,) = [block for block in blocks(ROOT / "docs" / "frameworks.md") if block.name == "notebook"]
    notebook = tmp_path / "notebook.py"
    notebook.write_text(cell.text)
    settings = {"MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1"}
    agents = [host.run([sys.executable, str(notebook)], env=settings) for host in hosts]
    assert [agent.wait(_SECONDS) for agent in agents] == [0, 0]
    said = sorted(line for agent in agents for line in agent.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} of 4: 4 ranks" for rank in range(4)]
