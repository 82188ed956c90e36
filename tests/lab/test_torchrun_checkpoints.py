"""The checkpoints of docs/torchrun.md: a job that is restarted, or loses its host, or both, loses none of its steps.

The workers run the code of that page, as it stands there, or the example that keeps shards on each machine's own disk.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.documents import ROOT, named
from tests.support.levels import chosen, soaking

from . import Host, Lab, Rank
from .host import MODULES
from .torchrun_jobs import SECONDS, store_host, torchrun

pytestmark = pytest.mark.timeout(900)

STARTS, STEPS = 8 if soaking() else 5, 10
"""How often the line is started, and how many further steps each start makes."""
TRAINING = """
import sys, time

dist.init_process_group("gloo")
target, pause = int(sys.argv[1]), float(sys.argv[2])
state = load() or {"step": 0, "sum": torch.zeros(1)}
if dist.get_rank() == 0:
    print(f"generation {generation} begins at {state['step']}", flush=True)
for step in range(state["step"] + 1, target + 1):
    time.sleep(pause)
    part = torch.ones(1) / dist.get_world_size()
    dist.all_reduce(part)
    state = {"step": step, "sum": state["sum"] + part}
    save(step, state)
    if dist.get_rank() == 0:
        print(f"step {step}, sum {state['sum'].item():.1f}", flush=True)
dist.destroy_process_group()
"""


def torchrun_in(directory: str, line: Sequence[str]) -> None:
    """What the command does in a directory."""
    os.chdir(directory)
    torchrun(line)


class Restarted:
    """A job whose line is started again and again on the hosts that are left."""

    def __init__(self, directory: Path, nodes: str, script: Path, *, own_disks: bool = False) -> None:
        self.line = ["--rdzv-backend=mingle", "--rdzv-id=restarted", f"--nnodes={nodes}", "--nproc-per-node=1"]
        self.line += ["--max-restarts=3", f"--rdzv-conf=discovery_timeout={SECONDS:g},last_call_timeout=3", str(script)]
        self.directory = directory
        self.own_disks = own_disks
        self.agents: dict[Host, Rank[None]] = {}
        self.every: list[Rank[None]] = []

    def start(self, hosts: Sequence[Host], *arguments: str) -> None:
        """Run the line on these hosts, in a directory of all or of each."""
        env = {"MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": MODULES}
        for host in hosts:
            place = self.directory / host.name if self.own_disks else self.directory
            place.mkdir(exist_ok=True)
            self.agents[host] = host.start(torchrun_in, str(place), [*self.line, *arguments], env=env)
            self.every.append(self.agents[host])

    def found(self, pattern: str) -> list[str]:
        """What the workers have printed in all starts, in the order of the starts."""
        return [match for agent in self.every for match in re.findall(pattern, agent.stdout, re.MULTILINE)]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, "\n".join(agent.stdout for agent in self.every)
            threading.Event().wait(0.1)  # a file gives no notice

    def steps(self) -> int:
        return max(map(int, self.found(r"^step (\d+),")), default=0)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps() >= step)

    def kill(self, *hosts: Host) -> None:
        for host in hosts:
            host.kill()
            del self.agents[host]

    def end(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            self.agents.pop(host).result(SECONDS)


@pytest.mark.soak(4)
@pytest.mark.parametrize("lost", chosen(["host and all"], soak=["nothing", "host"]))
def test_every_start_makes_ten_further_steps(lab: Lab, tmp_path: Path, lost: str) -> None:
    hosts = lab.lan(3)
    script = tmp_path / "train.py"
    script.write_text(named(ROOT / "docs" / "torchrun.md", "checkpoints").text + TRAINING)
    job = Restarted(tmp_path, "2:3", script)
    for number in range(1, STARTS + 1):
        target = str(number * STEPS)
        if number != 4 or lost == "nothing":
            job.start(hosts, target, "0.0")
            job.end(hosts)
            continue
        job.start(hosts, target, "1.0")
        job.until_step(33)
        store = store_host(job.agents)
        rest = [host for host in hosts if host is not store]
        job.kill(store)
        if lost == "host and all":
            job.until(lambda: len(job.found(r"begins at 3[1-9]$")) > 0)
            job.until_step(job.steps() + 1)
            job.kill(*rest)
            job.start(rest, target, "0.0")
        job.end(rest)
    begins = [int(step) for step in job.found(r"begins at (\d+)$")]
    regular = [number * STEPS for number in range(STARTS)]
    assert sorted(begins) == sorted({*begins, *regular}), "no start begins again where an earlier one did"
    assert len(begins) == STARTS + {"nothing": 0, "host": 1, "host and all": 2}[lost]
    assert all(30 <= step <= 40 for step in set(begins) - set(regular))
    total = STARTS * STEPS
    assert job.found(rf"^step {total}, sum (\S+)$") == [f"{total}.0"], "each step counts once"
    generations = job.found(r"generation (\S+) begins")
    assert len(set(generations)) == len(begins)
    assert all(re.fullmatch(r"\d{10}-\d{6}-[0-9a-f]{8}", generation) for generation in generations)
    by_start = [generation for _, generation in sorted(zip(begins, generations, strict=True))]
    assert by_start == sorted(by_start), "generations sort by time"
    assert len(list((tmp_path / "checkpoints").glob("step-*.pt"))) == 2


# --- shards on each machine's own disk -----------------------------------------------------------------------------

LOCAL_SHARDS = ROOT / "examples" / "torchrun" / "train_local_shards.py"
FOR_EVER = "--steps=1000000000"


def spread(lab: Lab, directory: Path) -> tuple[list[Host], Restarted]:
    """Hosts in order, and a job whose ranks keep their shards in a directory of their own machine."""
    network = lab.network()
    hosts = [lab.host(network, name=name) for name in ("node1", "node2", "node10")]
    return hosts, Restarted(directory, "3", LOCAL_SHARDS, own_disks=True)


def continued(job: Restarted, hosts: Sequence[Host]) -> list[tuple[int, int, str]]:
    """Rank, step and source of each host's worker in its last start, of those that have said it."""
    said = r"^rank (\d) continues at step (\d+) with its shard from (.+)$"
    found = [re.findall(said, job.agents[host].stdout, re.MULTILINE) for host in hosts]
    return [(int(every[-1][0]), int(every[-1][1]), every[-1][2]) for every in found if every]


@pytest.mark.soak(4)
def test_a_new_start_of_all_machines_finds_each_shard_on_its_own_disk(lab: Lab, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    hosts, job = spread(lab, tmp_path)
    job.start(rng.sample(hosts, 3), "--steps=20")
    job.end(hosts)
    for _ in range(2):
        before = job.steps()
        job.start(rng.sample(hosts, 3), FOR_EVER)
        job.until_step(before + 100)
        found = continued(job, hosts)
        job.kill(*hosts)
        assert [rank for rank, _, _ in found] == [0, 1, 2]
        assert {step for _, step, _ in found} <= {before, before + 10}
        assert {source for _, _, source in found} == {"its own disk"}


def test_a_machine_that_comes_back_gets_the_shard_of_its_new_rank(lab: Lab, tmp_path: Path) -> None:
    hosts, job = spread(lab, tmp_path)
    job.start(hosts, FOR_EVER)
    job.until_step(100)
    job.kill(hosts[0])
    job.start(hosts[:1], FOR_EVER)
    job.until(lambda: len(continued(job, hosts)) == len(hosts))
    found = continued(job, hosts)
    assert [rank for rank, _, _ in found] == [2, 0, 1], "who stayed comes first"
    assert len({step for _, step, _ in found}) == 1
    assert [source for _, _, source in found] == ["rank 1", "rank 2", "rank 0"]
    for host in hosts:
        host.kill()
