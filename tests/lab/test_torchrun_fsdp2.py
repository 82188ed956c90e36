"""The example of sharded training on hosts that know no address: what 4 ranks saved, 3 ranks continue."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from . import Host, Lab, Rank
from .host import MODULES
from .torchrun_jobs import SECONDS, torchrun

pytestmark = pytest.mark.timeout(600)

_SCRIPT = Path(__file__).parents[2] / "examples" / "torchrun" / "train_fsdp2.py"
_TRAINED_SECONDS = 3 * SECONDS
"""A worker computes for ten seconds before its first step (FSDP, checkpoints), and four of them share the cores with
the tests beside this one."""
_ROUNDING = 0.02
"""bfloat16 rounds another split of the batch differently. A start from new weights would be off by more than 0.5."""
_CARRIED_ON = 0.02
"""The same as a part of the loss after further steps, each of which carries the rounding of the ones before it on."""


def start(
    hosts: list[Host], name: str, nodes: str, workers: int, checkpoints: Path, steps: int, save: int
) -> list[Rank[None]]:
    """Run the same line on every host."""
    line = [
        *("--rdzv-backend=mingle", f"--rdzv-id={name}", f"--nnodes={nodes}", f"--nproc-per-node={workers}"),
        *("--max-restarts=3", f"--rdzv-conf=discovery_timeout={SECONDS:g},last_call_timeout=3", str(_SCRIPT)),
        *(f"--checkpoints={checkpoints}", f"--steps={steps}", f"--save-every={save}", "--log-every=1", "--batch=12"),
    ]
    env = {"MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": MODULES}
    return [host.start(torchrun, line, env=env) for host in hosts]


def losses(agents: list[Rank[None]], ranks: int) -> dict[int, float]:
    """Return the loss of each step that so many ranks made."""
    found = re.findall(rf"^step (\d+) on {ranks} ranks: loss (\S+)\n", output(agents), re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def output(agents: list[Rank[None]]) -> str:
    """Return what all workers wrote."""
    return "".join(agent.stdout for agent in agents)


def went_on(before: dict[int, float], after: dict[int, float], saved: int) -> None:
    """The first step after the checkpoint and the following ones have the losses that they had on more ranks."""
    assert min(after) == saved + 1
    both = sorted(before.keys() & after.keys())
    assert both, "the steps after the checkpoint are made twice"
    assert after[both[0]] == pytest.approx(before[both[0]], abs=_ROUNDING)
    assert [after[step] for step in both] == pytest.approx([before[step] for step in both], rel=_CARRIED_ON)
    assert before[saved] < before[1] - 0.5, "it has learned, so a start from new weights would show"


def test_another_job_continues_on_three_hosts_what_two_hosts_with_two_ranks_saved(lab: Lab, tmp_path: Path) -> None:
    hosts = lab.lan(3)
    first = start(hosts[:2], "text", "2", 2, tmp_path, steps=16, save=8)
    for agent in first:
        agent.result(_TRAINED_SECONDS)
    assert [path.name[:13] for path in sorted(tmp_path.iterdir())] == ["step-00000008", "step-00000016"]
    # A job that is lost while it saves leaves a checkpoint without this file.
    (newest,) = tmp_path.glob("step-00000016-*")
    (newest / ".metadata").unlink()
    second = start(hosts, "text", "3", 1, tmp_path, steps=18, save=8)
    for agent in second:
        agent.result(_TRAINED_SECONDS)
    assert "3 ranks begin after step 8\n" in output(second)
    went_on(losses(first, 4), losses(second, 3), saved=8)
    assert max(losses(second, 3)) == 18


def test_three_ranks_continue_when_the_machine_of_rank_0_is_lost(lab: Lab, tmp_path: Path) -> None:
    hosts = lab.lan(4)
    agents = start(hosts, "elastic-text", "3:4", 1, tmp_path, steps=100, save=25)
    deadline = time.monotonic() + _TRAINED_SECONDS
    while 28 not in losses(agents, 4):
        assert time.monotonic() < deadline, output(agents)
        threading.Event().wait(0.1)  # a file gives no notice
    (lost,) = [number for number, agent in enumerate(agents) if "step 28 on 4 ranks" in agent.stdout]
    hosts[lost].kill()
    for agent in agents[:lost] + agents[lost + 1 :]:
        agent.result(_TRAINED_SECONDS)
    (saved,) = re.findall(r"^3 ranks begin after step (\d+)\n", output(agents), re.MULTILINE)
    went_on(losses(agents, 4), losses(agents, 3), saved=int(saved))
    assert max(losses(agents, 3)) == 100
