"""The door: that torch finds it, in whatever order things are imported, and what it refuses before the first packet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from uuid import uuid4

import pytest

from mingle.elastic import torchrun
from mingle.errors import ConfigurationError
from tests.support.loopback import job_name

INSTALL = "install the tree (`make test` does, or `pip install --no-deps -e .`): torch looks at installed metadata"


def run_python(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_torch_is_told_of_the_backend_by_the_installed_metadata() -> None:
    found = [point for point in entry_points(group="torchrun.handlers") if point.name == "mingle"]
    assert found, INSTALL
    assert found[0].load() is torchrun.backend
    assert torchrun.backend() is torchrun.create


def test_the_door_needs_no_torch() -> None:
    loaded = run_python("import json, sys, mingle.elastic.torchrun; print(json.dumps(sorted(sys.modules)))")
    assert isinstance(loaded, list)
    assert "torch" not in loaded


@pytest.mark.slow
def test_the_backend_is_registered_although_it_is_imported_before_torch() -> None:
    """Every other test imports torch first."""
    found = run_python(
        "import warnings; warnings.simplefilter('error', RuntimeWarning)\nimport mingle.elastic.torchrun\n"
        "import torch.distributed.run\n"
        "import mingle, json\n"
        "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry\n"
        "from torch.distributed.rendezvous import _rendezvous_handlers\n"
        "print(json.dumps(['mingle' in registry._registry, 'mingle' in _rendezvous_handlers]))"
    )
    assert found == [True, True], INSTALL


def test_the_backend_is_registered_after_torch() -> None:
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry

    assert "mingle" in registry._registry, INSTALL


def parameters(**given: object) -> object:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    values: dict[str, object] = {"endpoint": "", "run_id": "door", "min_nodes": 1, "max_nodes": 1, **given}
    return RendezvousParameters("mingle", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["n" * 64, "n" * 63 + ".local" + "d" * 64, "caf\udce9", "node1..local"])
def test_a_host_name_that_torch_can_not_look_up_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's agents call ``socket.getfqdn``, which raises ``UnicodeError`` for it."""
    monkeypatch.setattr("socket.gethostname", lambda: name)
    with pytest.raises(ConfigurationError, match=r"this machine's host name, .* can't be looked up"):
        torchrun.create(parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["n" * 63, "café", "node1.example.org", "node1.example.org."])
def test_any_other_host_name_will_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    torchrun.create(parameters())  # type: ignore[arg-type]


def test_one_node_trains_alone() -> None:
    job_id = job_name("door")
    handler = torchrun.create(parameters(run_id=job_id, last_call_timeout="1"))  # type: ignore[arg-type]
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("mingle", job_id, True)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert handler.shutdown()


GROUPS = """
import os, sys, mingle, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
method = "mingle://pair {}".format(rank // 2) + sys.argv[1]
dist.init_process_group("gloo", init_method=method, rank=rank % 2, world_size=2)
numbers = torch.tensor([rank])
dist.all_reduce(numbers)
dist.destroy_process_group()
dist.init_process_group("gloo")  # torchrun's, which its own variables lead to
dist.barrier()
os.write(1, b"%d of %d: pair %d\\n" % (dist.get_rank(), dist.get_world_size(), numbers.item()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_groups_of_two_inside_four_workers() -> None:
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--no-python", sys.executable, "-c"]
    done = subprocess.run(
        [sys.executable, *line, GROUPS, str(uuid4())],
        env={**os.environ, "MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 4: pair {1 if rank < 2 else 5}" for rank in range(4)]


@pytest.mark.slow
def test_torch_logs_shows_the_log_of_the_agents() -> None:
    """As docs/torchrun.md says."""
    line = ["-m", "torch.distributed.run", "--rdzv-backend=mingle", f"--rdzv-id={uuid4()}", "--nnodes=1", "--no-python"]
    done = subprocess.run(
        [sys.executable, *line, "true"],
        env={**os.environ, "TORCH_LOGS": "mingle"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the agents' store is at 127.0.0.1:" in done.stderr
    assert "round 0, agent 0 of 1, the workers' store is at" in done.stderr


@pytest.mark.slow
def test_the_example_trains_on_two_agents_in_fresh_interpreters(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "torchrun" / "train.py"
    line = ["-m", "torch.distributed.run", "--rdzv-backend=mingle", f"--rdzv-id={uuid4()}", "--nnodes=2"]
    agents = [
        subprocess.Popen(
            [sys.executable, *line, "--nproc-per-node=1", script, f"--checkpoints={tmp_path / name}"],
            env={**os.environ, "MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        outputs = [agent.communicate(timeout=110)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    for rank in range(2):
        assert sum(f"rank {rank} of 2 at 127.0.0.1: slope " in output for output in outputs) == 1
