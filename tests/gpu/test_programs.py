"""The examples, the documents' programs and frameworks on two hosts that share a GPU, by NCCL."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Host, Lab
from tests.support.documents import ROOT, blocks, named

from .machines import SECONDS, own_machine

EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"
FRAMEWORKS = ROOT / "tests" / "frameworks" / "programs"


@pytest.fixture
def hosts(lab: Lab) -> list[Host]:
    network = lab.network()
    return [lab.host(network) for _ in range(2)]


def run(
    hosts: Sequence[Host],
    command: Sequence[Any],
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> list[str]:
    """Run the same command on every host; return what each wrote, without the line that shows NCCL in use."""
    settings = {"NCCL_DEBUG": "VERSION", **(environment or {})}
    started = [host.run(command, env=own_machine(host, **settings), cwd=cwd) for host in hosts]
    for process in started:
        assert process.wait(SECONDS) == 0, process.output
    said = [process.stdout for process in started]
    assert any("NCCL version" in each for each in said)
    return [re.sub(r"^NCCL version.*\n", "", each, flags=re.MULTILINE) for each in said]


def on_gpu(program: str, *changes: tuple[str, str]) -> str:
    """Return a program of the CPU for the GPU."""
    for old, new in changes:
        assert program.count(old) == 1
        program = program.replace(old, new)
    return program


def test_ddp_example(hosts: list[Host]) -> None:
    command = [sys.executable, EXAMPLES / "ddp_train.py", "--job-id=digits", "--device=cuda", "--epochs=3"]
    assert "parameters identical on 2 ranks" in "".join(run(hosts, command, {"WORLD_SIZE": "2"}))


def test_program_of_the_page_on_gpus(hosts: list[Host]) -> None:
    (program,) = (block.text for block in blocks(DOCS / "gpus.md") if block.language == "python")
    said = run(hosts, [sys.executable, "-c", program], {"WORLD_SIZE": "2"})
    assert sorted(said) == [f"rank {rank} on cuda:0: 2 ranks\n" for rank in range(2)]


def test_program_of_the_readme(hosts: list[Host]) -> None:
    (program,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    said = run(hosts, [sys.executable, "-c", program], {"WORLD_SIZE": "2"})
    assert sorted(said) == [f"rank {rank} of 2: the ranks add up to 1\n" for rank in range(2)]


def torchrun(script: str, checkpoints: Path) -> list[str | Path]:
    options = ["--rdzv-backend=mingle", f"--rdzv-id={script}", "--nnodes=2", "--nproc-per-node=1"]
    return ["torchrun", *options, EXAMPLES / "torchrun" / script, "--steps=60", f"--checkpoints={checkpoints}"]


def test_torchrun_example(hosts: list[Host], tmp_path: Path) -> None:
    lines = re.findall(r"slope \S+, offset \S+", "".join(run(hosts, torchrun("train.py", tmp_path))))
    assert len(lines) == 2
    assert len(set(lines)) == 1


def test_fsdp2_example(hosts: list[Host], tmp_path: Path) -> None:
    losses = re.findall(r"loss (\d+\.\d+)", "".join(run(hosts, torchrun("train_fsdp2.py", tmp_path))))
    assert float(losses[-1]) < float(losses[0])


def test_lightning(hosts: list[Host], tmp_path: Path) -> None:
    program = on_gpu(
        named(DOCS / "frameworks.md", "plugin").text,
        ('accelerator="cpu"', 'accelerator="gpu"'),
        ("devices=2", "devices=1"),
        ("num_nodes=1", "num_nodes=2"),
    )
    program += "\nprint(trainer.strategy.root_device, trainer.world_size, torch.distributed.get_backend())"
    said = run(hosts, [sys.executable, "-c", f"import torch\n{program}"], {"WORLD_SIZE": "2"}, cwd=tmp_path)
    assert all("cuda:0 2 nccl" in each for each in said)


def test_accelerate_launch(hosts: list[Host], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    source = (FRAMEWORKS / "accelerate_under_torchrun.py").read_text(encoding="utf-8")
    program.write_text(on_gpu(source, ("cpu=True", "")))
    options = ["--rdzv_backend=mingle", "--same_network", "--multi_gpu", "--machine_rank=0", "--num_machines=2"]
    said = run(hosts, ["accelerate", "launch", *options, "--num_processes=2", program], {"PET_RDZV_ID": "accelerate"})
    assert all('"world_size": 2' in each and "MULTI_GPU" in each for each in said)


def test_trainer_after_discover(hosts: list[Host], tmp_path: Path) -> None:
    source = (FRAMEWORKS / "trainer.py").read_text(encoding="utf-8")
    changes = (
        ("    use_cpu=True,\n", ""),
        ('ddp_backend="gloo"', 'ddp_backend="nccl"'),
        ("weights.numpy", "weights.cpu().numpy"),
    )
    said = run(hosts, [sys.executable, "-c", on_gpu(source, *changes)], {"WORLD_SIZE": "2", "DISCOVER": "trainer"})
    assert len(set(re.findall(r'"weights": "(\w+)"', "".join(said)))) == 1


def test_jax_under_mingle_run(hosts: list[Host], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    source = (EXAMPLES / "any-program" / "jax_psum.py").read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    program.write_text(
        "".join(line for line in lines if not line.startswith("jax.config.update"))
        + "assert jax.devices()[0].platform == 'gpu'\n"
    )
    command = ["mingle-run", "--job-id=jax", "--nnodes=2", "--", sys.executable, program]
    said = run(hosts, command, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    assert sorted(line for each in said for line in re.findall(r"process.*", each)) == [
        f"process {number} of 2: the sum is 3" for number in range(2)
    ]
