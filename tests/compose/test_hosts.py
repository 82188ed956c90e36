"""Three hosts that each run a Docker engine: containers of one image train together, and no host knows an address."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launchers.cluster import EXAMPLES, Cluster, places

from .commands import provide
from .engine import Engine, started_engine
from .host_engines import start_engines

_COUNT = 3
_SECONDS = 240.0  # idle, a tenth of it


@pytest.fixture(scope="session")
def own_engine(engine: Engine, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of the tests' own that has the image."""
    if engine.own:
        yield engine
        return
    archive = tmp_path_factory.mktemp("image") / "image.tar"
    engine.docker("save", "--output", str(archive), image, timeout=_SECONDS)
    with started_engine() as started:
        started.docker("load", "--input", str(archive), timeout=_SECONDS)
        archive.unlink()
        yield started


@pytest.fixture
def cluster(lab: Lab, own_engine: Engine, tmp_path: Path) -> Cluster:
    """Three hosts on which `docker` speaks to an engine of the host."""
    provide(["pdsh"])
    made = Cluster(lab, tmp_path, _COUNT)
    engines = start_engines(made.hosts, own_engine)
    for host, engine in engines.items():
        (tmp_path / f"{host.name}.docker").write_text(engine.environment["DOCKER_HOST"])
    docker = made.programs / "docker"
    program = shutil.which("docker")
    docker.write_text(f'#!/bin/sh\nexec {program} --host "$(cat {tmp_path}/"$(hostname)".docker)" "$@"\n')
    docker.chmod(0o755)
    return made


def test_the_pdsh_example_with_one_container_on_each_host(cluster: Cluster, image: str) -> None:
    script = EXAMPLES / "pdsh" / "train-docker.sh"
    output = cluster.run(script, f"node[1-{_COUNT}]", str(_COUNT), "1", image, "--epochs", "12")
    found = places(output)
    assert sorted(host for host, *_ in found) == ["node1", "node2", "node3"]
    assert [(node, local) for _, node, local in found] == [(0, 0), (1, 0), (2, 0)]


def test_mingle_run_starts_torchrun_in_a_container_on_each_host(cluster: Cluster, image: str) -> None:
    """All that torchrun needs comes in its arguments; mingle is asked for nothing inside the containers."""
    static = ["--nnodes={nnodes}", "--node-rank={node_rank}", "--master-addr={master_addr}"]
    line = [
        *(sys.executable, "-m", "mingle.run.command", "--nnodes", str(_COUNT), "--"),
        *("docker", "run", "--rm", "--init", "--network", "host", "--ipc", "host", "--env", "GLOO_SOCKET_IFNAME"),
        *(image, "torchrun", *static, "--master-port={master_port}", "ddp_train.py", "--epochs", "2"),
    ]
    started = [host.run(line, env={"PATH": cluster.path, "MINGLE_PROGRESS": "off"}) for host in cluster.hosts]
    assert [process.wait(_SECONDS) for process in started] == [0] * _COUNT
    output = "".join(process.output for process in started)
    assert re.findall(r"parameters identical on (\d+) ranks", output) == [str(_COUNT)], output
    for host in cluster.hosts:
        assert not cluster.run("ssh", host.name, "docker", "ps", "--all", "--quiet").strip(), "no container is left"
