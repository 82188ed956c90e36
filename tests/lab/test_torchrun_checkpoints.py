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
from tests.support.levels import chosen, repeated, soaking

from . import Host, Lab, Rank
from .host import MODULES
from .torchrun_jobs import SECONDS, torchrun

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

    def __init__(self, directory: Path, hosts: list[Host]) -> None:
        self.script = directory / "train.py"
        self.script.write_text(named(ROOT / "docs" / "torchrun.md", "checkpoints").text + TRAINING)
        self.directory = directory
        self.hosts = hosts
        self.agents: dict[Host, Rank[None]] = {}
        self.every: list[Rank[None]] = []

    def start(self, target: int, *hosts: Host, pause: float = 0.0) -> None:
        """Run the line on these hosts, up to a step."""
        line = ["--rdzv-backend=mingle", "--rdzv-id=restarted", "--nnodes=2:3", "--nproc-per-node=1"]
        line += ["--max-restarts=3", f"--rdzv-conf=discovery_timeout={SECONDS:g},last_call_timeout=3"]
        env = {"MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": MODULES}
        for host in hosts:
            arguments = [*line, str(self.script), str(target), str(pause)]
            self.agents[host] = host.start(torchrun_in, str(self.directory), arguments, env=env)
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

    def end(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            self.agents.pop(host).result(SECONDS)

    def store_host(self) -> Host:
        said = r"the agents' store is at (\S+):\d+,"
        stores = [
            match[1]
            for agent in self.agents.values()
            for event in agent.events
            if event.name == "log" and (match := re.search(said, event["text"]))
        ]
        return next(host for host in self.agents if host.address() == stores[-1])


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=4))
@pytest.mark.parametrize("lost", chosen(["host and all"], soak=["nothing", "host"]))
def test_every_start_makes_ten_further_steps(lab: Lab, tmp_path: Path, lost: str, seed: int) -> None:
    network = lab.network()
    hosts = [lab.host(network) for _ in range(3)]
    job = Restarted(tmp_path, hosts)
    for number in range(1, STARTS + 1):
        target = number * STEPS
        if number != 4 or lost == "nothing":
            job.start(target, *hosts)
            job.end(hosts)
            continue
        job.start(target, *hosts, pause=1.0)
        job.until_step(33)
        store = job.store_host()
        rest = [host for host in hosts if host is not store]
        store.kill()
        del job.agents[store]
        if lost == "host and all":
            job.until(lambda: len(job.found(r"begins at 3[1-9]$")) > 0)
            job.until_step(job.steps() + 1)
            for host in rest:
                host.kill()
                del job.agents[host]
            job.start(target, *rest)
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


class Spread(Restarted):
    """A job whose ranks keep their shards in a directory of their own machine."""

    def __init__(self, directory: Path, hosts: list[Host]) -> None:
        super().__init__(directory, hosts)
        self.script = LOCAL_SHARDS

    def start(self, target: int, *hosts: Host, pause: float = 0.0) -> None:
        line = ["--rdzv-backend=mingle", "--rdzv-id=spread", "--nnodes=3", "--nproc-per-node=1", "--max-restarts=3"]
        line += [f"--rdzv-conf=discovery_timeout={SECONDS:g}"]
        env = {"MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": MODULES}
        for host in hosts:
            (own := self.directory / host.name).mkdir(exist_ok=True)
            self.agents[host] = host.start(
                torchrun_in, str(own), [*line, str(self.script), f"--steps={target}"], env=env
            )
            self.every.append(self.agents[host])

    def continued(self, hosts: Sequence[Host]) -> dict[str, tuple[int, int, str]]:
        """Rank, step and source of each host's worker in its last start."""
        said = r"^rank (\d) continues at step (\d+) with its shard from (.+)$"
        found = {host.name: re.findall(said, self.agents[host].stdout, re.MULTILINE) for host in hosts}
        return {name: (int(every[-1][0]), int(every[-1][1]), every[-1][2]) for name, every in found.items() if every}


@pytest.mark.soak
@pytest.mark.parametrize("seed", repeated(1, soak=4))
def test_a_new_start_of_all_machines_finds_each_shard_on_its_own_disk(lab: Lab, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    network = lab.network()
    hosts = [lab.host(network, name=name) for name in ("node1", "node2", "node10")]
    job = Spread(tmp_path, hosts)
    job.start(20, *rng.sample(hosts, 3))
    job.end(hosts)
    for _ in range(2):
        before = job.steps()
        job.start(10**9, *rng.sample(hosts, 3))
        job.until_step(before + 100)
        for host in hosts:
            host.kill()
        found = job.continued(hosts)
        assert [found[host.name][0] for host in hosts] == [0, 1, 2]
        assert {step for _, step, _ in found.values()} <= {before, before + 10}
        assert {source for _, _, source in found.values()} == {"its own disk"}


def test_a_machine_that_comes_back_gets_the_shard_of_its_new_rank(lab: Lab, tmp_path: Path) -> None:
    network = lab.network()
    hosts = [lab.host(network, name=name) for name in ("node1", "node2", "node10")]
    job = Spread(tmp_path, hosts)
    job.start(10**9, *hosts)
    job.until_step(100)
    hosts[0].kill()
    job.start(10**9, hosts[0])
    job.until(lambda: len(job.continued(hosts)) == len(hosts))
    found = job.continued(hosts)
    assert [found[host.name][0] for host in hosts] == [2, 0, 1], "who stayed comes first"
    assert len({step for _, step, _ in found.values()}) == 1
    assert [found[host.name][2] for host in hosts] == ["rank 1", "rank 2", "rank 0"]
    for host in hosts:
        host.kill()
