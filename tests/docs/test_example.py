"""The example, run as a reader would run it: in processes of its own, without numpy. The demo is run by `test_docs`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from tests.support.without_numpy import python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "ddp_train.py"
DEADLINE = 400  # seconds; idle it is less than 20, most of them for importing torch

pytestmark = pytest.mark.timeout(DEADLINE + 60)


def environment(**settings: str) -> dict[str, str]:
    """Return a shell's environment that knows no job, and from which ranks stay on the loopback interface."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "MINGLE_INTERFACE": "lo"} | settings


def run(*command: str, **settings: str) -> str:
    done = subprocess.run(
        [python(), *command],
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def load_example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("ddp_train", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def run_ranks(world_size: int, *arguments: str) -> str:
    """Run the example on this many ranks, rank 0 last; return what all of them printed."""
    command = [python(), str(SCRIPT), "--job-id", f"example-{uuid4()}", "--device", "cpu", *arguments]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in reversed(range(world_size)):
            place = environment(RANK=str(rank), WORLD_SIZE=str(world_size))
            ranks.append(
                subprocess.Popen(command, env=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        outputs = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    finally:
        for rank_process in ranks:
            rank_process.kill()
            rank_process.wait()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(outputs)
    return "\n".join(outputs)


def accuracy(output: str) -> float:
    (value,) = re.findall(r"^final test accuracy: (\d\.\d+)$", output, re.MULTILINE)
    return float(value)


def digest(output: str) -> str:
    (value,) = re.findall(r"^parameters identical on \d+ ranks \(sha256 (\w+)\)$", output, re.MULTILINE)
    return str(value)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module, for what can be seen without other ranks."""
    return load_example()


def test_demo_fails_when_a_rank_does(tmp_path: Path) -> None:
    broken = tmp_path / "examples"
    broken.mkdir()
    (broken / "demo.py").write_bytes((ROOT / "examples" / "demo.py").read_bytes())
    (broken / "ddp_train.py").write_text("import os\nraise SystemExit(os.environ['RANK'] == '2')\n")
    done = subprocess.run(
        [sys.executable, str(broken / "demo.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["rank 2 ended with status 1; its own message is above"]


@pytest.mark.slow
def test_resumed_training_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    snapshot = tmp_path / "digits.snapshot.pt"
    unbroken = run_ranks(2, "--epochs", "4")
    run_ranks(2, "--epochs", "2", "--snapshot", str(snapshot))
    resumed = run_ranks(2, "--epochs", "4", "--snapshot", str(snapshot))
    assert f"resumed from {snapshot} after epoch 2" in resumed
    assert digest(resumed) == digest(unbroken)
    assert accuracy(resumed) == accuracy(unbroken)
    assert list(tmp_path.iterdir()) == [snapshot]


@pytest.mark.slow
def test_same_file_runs_under_torchrun() -> None:
    output = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(SCRIPT), "--epochs", "12", "--device", "cpu", "--bf16", "on"),
        GLOO_SOCKET_IFNAME="lo",
    )
    assert accuracy(output) >= 0.9
    assert "parameters identical on 2 ranks" in output


@pytest.mark.slow
def test_a_failed_save_leaves_the_old_snapshot(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = example.build_network()
    optimizer = example.AdamW(network.parameters())
    path = tmp_path / "digits.snapshot.pt"
    example.save_snapshot(path, network, optimizer, 1)
    before = path.read_bytes()

    def full_disk(state: object, file: Any) -> None:
        file.write(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(example.torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        example.save_snapshot(path, network, optimizer, 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_every_test_image_is_counted_once(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    torch = example.torch
    _, test_set = example.load_data()
    seen = []
    monkeypatch.setattr(example.dist, "all_reduce", lambda right: seen.append(int(right)))

    class Oracle(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Is right about the images of odd digits, and calls every other one a 1."""

        def forward(self, images: Any) -> Any:
            places = [(test_set.tensors[0] == image).flatten(1).all(1).nonzero()[0, 0] for image in images]
            labels = test_set.tensors[1][torch.stack(places)]
            return torch.nn.functional.one_hot(torch.where(labels % 2 == 1, labels, 1), 10)

    for rank in range(world_size):
        job = SimpleNamespace(rank=rank, world_size=world_size)
        example.measure_accuracy(Oracle(), test_set, job, torch.device("cpu"))
    assert sum(seen) == int((test_set.tensors[1] % 2 == 1).sum())


def test_ranks_that_differ_are_named(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_2_differs(everyones: list[Any], mine: Any) -> None:
        for rank, theirs in enumerate(everyones):
            theirs.copy_(mine if rank != 2 else 255 - mine)

    monkeypatch.setattr(example.dist, "all_gather", rank_2_differs)
    job = SimpleNamespace(rank=0, world_size=4)
    with pytest.raises(RuntimeError, match=r"ranks \[2\] differ"):
        example.check_identical(example.build_network(), job, example.torch.device("cpu"))
