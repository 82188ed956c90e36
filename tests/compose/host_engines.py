"""A Docker engine on each host of a lab, in the host's network and under its name: what `--network host` joins there.

They run beside an engine of the tests' own, in its process and mount namespaces, and begin with its images. A layer is
never written to, so they share the files of the layers by hard links.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab import Host, Process

from .engine import START_SECONDS, Engine
from .errors import EngineError

# The files of the host take the place of the machine's: a container of `--network host` gets copies of them.
_SCRIPT = """
cd {directory}
rm -rf data/{name} exec/{name}
mkdir data/{name}
cp -a data/image data/{name}
cp -al data/overlay2 data/{name}
mount --bind {hosts_file} /etc/hosts
mount --bind {resolver_file} /etc/resolv.conf
exec dockerd --host unix://{directory}/{name}.socket --pidfile {directory}/{name}.pid \
    --data-root {directory}/data/{name} --exec-root {directory}/exec/{name} \
    --bridge none --iptables=false --ip6tables=false --ip-forward=false
"""


def start_engines(hosts: Sequence[Host], engine: Engine) -> dict[Host, Engine]:
    """Start one engine on each host, with the images of an engine of the tests' own; they end with the hosts.

    Raises:
        EngineError: one did not start; with its log.
    """
    assert engine.directory is not None
    daemons = {host: _start(host, engine, engine.directory) for host in hosts}
    engines = {host: Engine({"DOCKER_HOST": f"unix://{_socket(host, engine.directory)}"}, own=True) for host in hosts}
    deadline = time.monotonic() + START_SECONDS
    for host, started in engines.items():
        while not _answers(started):
            if daemons[host].exit_code is not None or time.monotonic() > deadline:
                raise EngineError(f"the engine on {host.name} did not start:\n{daemons[host].output}")
            threading.Event().wait(0.1)
    return engines


def _start(host: Host, engine: Engine, directory: Path) -> Process:
    """Start the engine of one host."""
    paths = {"directory": directory, "hosts_file": host.hosts_file, "resolver_file": host.resolver_file}
    script = _SCRIPT.format(name=host.name, **{name: shlex.quote(str(path)) for name, path in paths.items()})
    enter = ["nsenter", "--target", str(engine.init), "--mount", "--pid", "--", "unshare", "--mount"]
    return host.run([*enter, "sh", "-ec", script])


def _socket(host: Host, directory: Path) -> Path:
    """Return where the engine of a host answers."""
    return directory / f"{host.name}.socket"


def _answers(engine: Engine) -> bool:
    """Return whether an engine serves."""
    try:
        engine.docker("version")
    except EngineError:
        return False
    return True
