"""Recipes and examples run where numpy is not installed: pip brings none with torch.

The programs of the other pages run there, too: see `tests.support.forked_ranks`.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.documents import ROOT, named
from tests.support.forked_ranks import Rank, run_ranks
from tests.support.without_numpy import python

TORCHRUN = ROOT / "examples" / "torchrun"
# What a worker of torchrun finds in its environment, and then the script as torchrun starts it.
WORKER = """
import runpy, sys, mingle
mingle.discover()
sys.argv = {line!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RECIPE = """
dist.init_process_group("gloo")
state = load() or {"step": 0}
print(f"continues at {state['step']}")
save(state["step"] + 10, {"step": state["step"] + 10, "sum": torch.ones(1)})
dist.destroy_process_group()
"""


def start(code: str) -> list[str]:
    """Run the code on two ranks; return what each printed, without torch's warnings."""
    ranks = [Rank({"RANK": str(rank), "WORLD_SIZE": "2", "MINGLE_JOB_ID": "numpy"}, code) for rank in range(2)]
    results = run_ranks({"numpy": ranks})["numpy"]
    assert [status for status, _ in results] == [0, 0], "\n".join(output for _, output in results)
    return [output for _, output in results]


def worker(script: str, *arguments: str) -> str:
    return WORKER.format(line=[str(TORCHRUN / script), *arguments])


def test_torch_says_there_that_numpy_is_not_available() -> None:
    (said, _) = start("import torch\ntry:\n    torch.ones(1).numpy()\nexcept RuntimeError as error:\n    print(error)")
    assert said == "Numpy is not available\n"


def test_the_recipe_for_checkpoints_continues_from_the_newest_one(tmp_path: Path) -> None:
    recipe = f"import os, mingle\nos.chdir({str(tmp_path)!r})\nmingle.discover()\n"
    recipe += named(ROOT / "docs" / "torchrun.md", "checkpoints").text + RECIPE
    for step in (0, 10, 20, 30):
        assert start(recipe) == [f"continues at {step}\n"] * 2
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_the_example_for_torchrun_continues_from_its_checkpoint(tmp_path: Path) -> None:
    program = worker("train.py", f"--checkpoints={tmp_path}", "--steps=20")
    first, second = (re.findall(r"slope \S+, offset \S+", "".join(start(program))) for _ in range(2))
    assert len(first) == 2
    assert {*first, *second} == {first[0]}, "all steps were made by the first start"


def test_the_example_of_local_shards_sends_a_shard_that_is_elsewhere(tmp_path: Path) -> None:
    disks = [str(tmp_path / name) for name in "ab"]
    for disk in disks:
        Path(disk).mkdir()
    on = "import os\nos.chdir({disks}[int(os.environ['RANK'])])\n"
    start(on.format(disks=disks) + worker("train_local_shards.py", "--steps=20"))
    said = start(on.format(disks=disks[::-1]) + worker("train_local_shards.py", "--steps=30"))
    for rank in range(2):
        assert f"rank {rank} continues at step 20 with its shard from rank {1 - rank}\n" in said[rank]
        assert f"rank {rank} has learned {0.96 * rank:.2f}\n" in said[rank]


def test_the_example_of_fsdp2_says_at_once_that_checkpoints_need_numpy() -> None:
    ((status, said),) = run_ranks({"fsdp2": [Rank({}, worker("train_fsdp2.py").replace("mingle.discover()\n", ""))]})[
        "fsdp2"
    ]
    fix = f"fix: {python()} -m pip install numpy\n"
    assert said.endswith(f"SystemExit: torch.distributed.checkpoint needs numpy, which is not installed.\n  {fix}")
    assert status == 1
