"""Frameworks on top of mingle: they find the ranks in their places, train, and end with one set of weights.

All programs run at once, on processes that are forked from one which has imported torch and the frameworks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT, blocks
from tests.support.forked_ranks import Rank, run_ranks
from tests.support.loopback import job_name

_DOCUMENT = ROOT / "docs" / "frameworks.md"
_PROGRAMS = Path(__file__).parent / "programs"
Results = dict[str, list[tuple[int, str]]]


def given(world_size: int) -> list[dict[str, str]]:
    return [{"RANK": str(rank), "WORLD_SIZE": str(world_size)} for rank in range(world_size)]


def assigned(world_size: int) -> list[dict[str, str]]:
    return [{"WORLD_SIZE": str(world_size)}] * world_size


def launched() -> list[dict[str, str]]:
    """Four tasks on two nodes, as srun would start them; it is mingle that tells Lightning of both."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    return [
        {**step, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2)}
        for rank in range(4)
    ]


def ranks(program: str, places: list[dict[str, str]], **settings: str) -> list[Rank]:
    """Ranks that run a program of the directory beside this file."""
    code = (_PROGRAMS / f"{program}.py").read_text(encoding="utf-8")
    common = {"JOB": job_name(program), "MINGLE_TIMEOUT": "100", "MINGLE_PROGRESS": "off", **settings}
    return [Rank({**common, **place}, code, f"{program}.py") for place in places]


def quoted(directory: Path) -> dict[str, list[Rank]]:
    """Two ranks for each program of the document, which may leave files in a directory."""
    settings = {"MINGLE_TIMEOUT": "100", "MINGLE_PROGRESS": "off"}
    return {
        str(block): [
            Rank({**settings, **place}, f"import os; os.chdir({str(directory)!r})\n{block.text}", str(block))
            for place in given(2)
        ]
        for block in blocks(_DOCUMENT)
        if block.language == "python"
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the ranks of every program have ended with and have printed."""
    return run_ranks(
        {
            **quoted(tmp_path_factory.mktemp("quoted")),
            "plugin, ranks given": ranks("lightning_plugin", given(2), DEVICES="2"),
            "plugin, ranks assigned": ranks("lightning_plugin", assigned(2), DEVICES="2"),
            "plugin, two nodes": ranks("lightning_plugin", launched(), DEVICES="2", NODES="2"),
            "plugin, wrong devices": ranks("lightning_plugin", given(2), DEVICES="1"),
            "plugin, ranks by Lightning": ranks("lightning_plugin", assigned(2)[:1], DEVICES="2", STRATEGY="ddp_spawn"),
            "lightning": ranks("lightning_after_discover", given(2)),
            "accelerate": ranks("accelerate_after_discover", given(2)),
            "fsdp2": ranks("fsdp2_mesh", assigned(4)),
        },
        preload=["lightning.pytorch", "lightning.pytorch.demos.boring_classes", "accelerate"],
    )


def records(results: Results, group: str) -> list[dict[str, Any]]:
    """Return what each rank of a group says at its end, by rank."""
    outputs = [output for _, output in results[group]]
    assert {status for status, _ in results[group]} == {0}, "\n".join(outputs)
    found = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    found.sort(key=lambda record: int(record["rank"]))
    assert [record["rank"] for record in found] == list(range(len(outputs)))
    return found


def test_the_programs_of_the_document_run(results: Results) -> None:
    programs = [name for name in results if name.startswith(_DOCUMENT.name)]
    assert len(programs) == 5
    for name in programs:
        assert [status for status, _ in results[name]] == [0, 0], "\n".join(output for _, output in results[name])


@pytest.mark.parametrize("who", ["given", "assigned"])
def test_lightning_with_the_plugin(results: Results, who: str) -> None:
    found = records(results, f"plugin, ranks {who}")
    assert len({point for record in found for point in record["first epoch"]}) == 16, "each rank has a half of its own"
    for record in found:
        assert record["job"] == record["local_rank"] == record["rank"]
        assert (record["world_size"], record["backend"]) == (2, "gloo")
        assert record["weights"] == found[0]["weights"] == pytest.approx([3, 1], abs=0.1)


def test_lightning_on_two_nodes_of_a_launcher(results: Results) -> None:
    found = records(results, "plugin, two nodes")
    assert [(record["node_rank"], record["local_rank"]) for record in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {record["world_size"] for record in found} == {4}
    assert len({point for record in found for point in record["first epoch"]}) == 16, "each rank has a quarter"
    assert len({tuple(record["weights"]) for record in found}) == 1


def test_lightning_with_the_wrong_number_of_devices_says_the_right_one(results: Results) -> None:
    for status, output in results["plugin, wrong devices"]:
        assert status == 1
        assert "ConfigurationError" in output
        assert "give the Trainer devices=2, num_nodes=1" in output


def test_lightning_that_is_to_start_the_ranks_says_how_they_start(results: Results) -> None:
    ((status, output),) = results["plugin, ranks by Lightning"]
    assert status == 1
    assert "starts the ranks itself (start_method='spawn')" in output
    assert 'give strategy="ddp"' in output


def test_lightning_after_discover(results: Results) -> None:
    for rank, record in enumerate(records(results, "lightning")):
        assert (record["job"], record["world_size"], record["total"]) == (rank, 2, 3)
        assert record["gradient"] == 0.5, "the mean over the ranks of what each has made of it: 0 and 1"


def test_accelerate_after_discover(results: Results) -> None:
    found = records(results, "accelerate")
    for rank, record in enumerate(found):
        assert (record["job"], record["local_rank"], record["world_size"]) == (rank, rank, 2)
        assert (record["type"], record["wrapped"]) == ("DistributedType.MULTI_CPU", "DistributedDataParallel")
        assert record["batches"] == 2, "of four"
        assert record["weights"] == pytest.approx([3, 1, 3, 1], abs=0.1)
        assert record["weights"][:2] == record["weights"][2:] == found[0]["weights"][:2]


def test_fsdp2_on_a_device_mesh(results: Results) -> None:
    for rank, record in enumerate(records(results, "fsdp2")):
        assert record["coordinate"] == [rank // 2, rank % 2]
        assert record["column"] == 2 * (rank % 2) + 2
        assert record["parameters"] == 8 * 16 + 16 + 16 * 4 + 4
        assert record["difference"] < 1e-6, "training on four shards is training on one process"
