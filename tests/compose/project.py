"""A compose project of a test: what `docker compose` is told, and what its containers do and say."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any

from .commands import provide, run
from .engine import Engine
from .errors import EngineError

ROOT = Path(__file__).parents[2]
UP_SECONDS = 240.0
FORM_SECONDS = 120.0
"""For the import of torch in every container at once, on a loaded machine."""


def compose_command() -> list[str]:
    """The command of compose: $COMPOSE, else v2, else v1, which is installed if there is none.

    Raises:
        EngineError: it can't be installed.
    """
    if chosen := os.environ.get("COMPOSE"):
        return shlex.split(chosen)
    try:
        run("docker", "compose", "version", timeout=20)
    except EngineError:
        provide(["docker-compose"])
        return ["docker-compose"]
    return ["docker", "compose"]


@dataclass(frozen=True)
class Container:
    """One container of a project.

    Attributes:
        identity: its 64 hexadecimal digits; the first 12 are its host name.
    """

    engine: Engine
    identity: str

    @property
    def hostname(self) -> str:
        """Its name on its networks."""
        return self.identity[:12]

    def log(self) -> str:
        """All that it wrote, stderr included."""
        done = subprocess.run(
            ["docker", "logs", self.identity],
            env={**os.environ, **self.engine.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    def wait_for(self, pattern: str, *, times: int = 1, timeout: float = FORM_SECONDS) -> list[re.Match[str]]:
        """Read along, also through restarts, until so many lines match, and return the matches.

        Raises:
            EngineError: they did not within ``timeout`` seconds, or the container ended before; with its log.
        """
        wanted = re.compile(pattern, re.MULTILINE)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for written in self._follow(deadline):
                matches = list(wanted.finditer(written))
                if len(matches) >= times:
                    return matches
            # What follows a log stops with the container.
            if self.engine.docker("inspect", "--format", "{{.State.Status}}", self.identity) == "exited":
                break
        raise EngineError(
            f"{self.hostname} did not write {pattern!r} {times} times within {timeout:.0f} s:\n{self.log()}"
        )

    def _follow(self, deadline: float) -> Iterator[str]:
        """Yield all whole lines written so far, again and again until the container stops."""
        written = b""
        with subprocess.Popen(
            ["docker", "logs", "--follow", self.identity],
            env={**os.environ, **self.engine.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as following:
            assert following.stdout is not None
            try:
                while (left := deadline - time.monotonic()) > 0:
                    readable, _, _ = select.select([following.stdout], [], [], left)
                    piece = os.read(following.stdout.fileno(), 65536) if readable else b""
                    if not piece:
                        return
                    written += piece
                    yield written.decode(errors="replace").rpartition("\n")[0]
            finally:
                following.kill()

    def run(self, *command: str) -> str:
        """Run a command inside it."""
        return self.engine.docker("exec", self.identity, *command)

    def kill(self) -> None:
        """End it with SIGKILL and remove it."""
        self.engine.docker("kill", self.identity)
        self.engine.docker("rm", self.identity)

    def addresses(self) -> tuple[str, str]:
        """Its IPv4 and IPv6 address."""
        answer = self.engine.docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", self.identity)
        (network,) = json.loads(answer).values()
        return network["IPAddress"], network["GlobalIPv6Address"]


class Project:
    """Made by the `project` fixture, which also ends it.

    Attributes:
        name: what compose calls it.
        subnet: of its network.
        subnet6: of its network.
    """

    def __init__(
        self,
        engine: Engine,
        compose: Sequence[str],
        number: int,
        directory: Path,
        variables: Mapping[str, str],
        override: Mapping[str, Any],
    ) -> None:
        """Give the project a network of its own.

        Args:
            engine: where it runs.
            compose: the command of compose.
            number: from 0 to 255, another one for every project at the same time.
            directory: for the file with the override.
            variables: of the compose file.
            override: what is changed in the compose file, in its form.
        """
        self.name = f"mingle-test-{os.getpid()}-{number}"
        self.subnet = IPv4Network(f"172.29.{number}.0/24")
        self.subnet6 = IPv6Network(f"fd6d:696e:676c:{number:x}::/64")
        self._engine = engine
        self._network = f"{self.name}_lan"
        self._environment = {
            **engine.environment,
            "COMPOSE_PROJECT_NAME": self.name,
            "SUBNET": str(self.subnet),
            "SUBNET6": str(self.subnet6),
            **variables,
        }
        self._override = directory / f"{self.name}.yml"
        self._compose = compose
        self.change(override)

    def change(self, override: Mapping[str, Any] | str) -> None:
        """Have another override from the next command on, as YAML or as what JSON, which is YAML, can say."""
        text = override if isinstance(override, str) else json.dumps(override)
        self._override.write_text(text, encoding="utf-8")
        files = [ROOT / "docker-compose.yml", *([self._override] if override else [])]
        self._command = [*self._compose, *(part for file in files for part in ("--file", str(file)))]

    def compose(self, *arguments: str, accepted: Collection[int] = (0,)) -> str:
        """Run compose on this project and return what it wrote to stdout."""
        return run(*self._command, *arguments, timeout=UP_SECONDS, environment=self._environment, accepted=accepted)

    def up(self, *arguments: str) -> list[Container]:
        """Bring services up in the background and return all containers of the project."""
        self.compose("up", "--detach", *arguments)
        return self.containers()

    def up_ranks(self, *ranks: int) -> list[Container]:
        """Bring these services of the profile `ranks` up, one after another."""
        for rank in ranks:
            self.compose("--profile", "ranks", "up", "--detach", "--no-deps", f"rank{rank}")
        return self.containers()

    def containers(self, service: str | None = None) -> list[Container]:
        """The containers of the project or of one service, ended ones included."""
        labels = {"project": self.name, "oneoff": "False"} | ({"service": service} if service else {})
        filters = (f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items())
        answer = self._engine.docker("ps", "--all", "--quiet", "--no-trunc", *filters)
        return [Container(self._engine, identity) for identity in answer.split()]

    def discover(self, *arguments: str) -> Any:
        """Run mingle-discover beside the containers and return its answer, also that it found nothing."""
        answer = self.compose("run", "--rm", "-T", "discover", *arguments, "--json", accepted=(0, 1))
        return json.loads(answer)

    def logs(self, timeout: float = UP_SECONDS) -> str:
        """Wait until all containers have succeeded and return what they wrote, one after another.

        Raises:
            EngineError: one failed, or was not done within ``timeout`` seconds; with what all of them wrote.
        """
        containers = self.containers()
        try:
            identities = [container.identity for container in containers]
            statuses = self._engine.docker("wait", *identities, timeout=timeout).split()
        except EngineError as error:
            raise EngineError(f"{error}\n{self.describe()}") from error
        if set(statuses) != {"0"}:
            raise EngineError(f"containers ended with status {', '.join(statuses)}\n{self.describe()}")
        return "".join(container.log() for container in containers)

    def disconnect(self, container: Container) -> None:
        """Take a container's interface away, as when a machine is unplugged."""
        self._engine.docker("network", "disconnect", self._network, container.identity)

    def connect(self, container: Container, address: str) -> None:
        """Give it an interface again, of another name perhaps, with this IPv4 address of the subnet."""
        self._engine.docker("network", "connect", f"--ip={address}", self._network, container.identity)

    def describe(self) -> str:
        """What each container wrote, under its name."""
        return "\n".join(f"--- {container.hostname}\n{container.log()}" for container in self.containers())

    def down(self) -> None:
        """Remove its containers and its network."""
        self.compose("--profile", "ranks", "--profile", "tools", "down", "--timeout", "5", "--remove-orphans")


MakeProject = Callable[..., Project]
"""``project(override, WORLD_SIZE="2")`` changes what the compose file says and sets variables of it."""


def stage(directory: Path, wheel: Path | None) -> None:
    """Copy to a directory what the image is made of, by .dockerignore's account, and a wheel for it."""
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line.startswith("!"):
            continue
        source, target = ROOT / line[1:], directory / line[1:]
        if line == "!wheelhouse":  # made by `make wheels`, and not part of a clone
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.whl"))
        else:
            shutil.copy2(source, target)
    for name in (".dockerignore", "Dockerfile", "docker-compose.yml"):
        shutil.copy2(ROOT / name, directory)
    if wheel is not None:
        (directory / "wheelhouse").mkdir()
        shutil.copy2(wheel, directory / "wheelhouse")
