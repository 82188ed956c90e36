"""Run commands with a deadline, and install those that this machine lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import EngineError

INSTALL_SECONDS = 300.0

# The packages of Debian and Ubuntu.
_PACKAGES = {
    "debootstrap": "debootstrap",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "dockerd": "docker.io",
    "iptables": "iptables",
    "setpriv": "util-linux",
    "slirp4netns": "slirp4netns",
    "unshare": "util-linux",
}


def run(
    *command: str,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> str:
    """Return what a command wrote to stdout.

    Raises:
        EngineError: it could not be started, failed, or took longer than ``timeout`` seconds; with all it wrote.
    """
    try:
        done = subprocess.run(
            command,
            env=None if environment is None else {**os.environ, **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        )
    except FileNotFoundError as error:
        raise EngineError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        written = "".join(
            part.decode(errors="replace") if isinstance(part, bytes) else part or ""
            for part in (error.stdout, error.stderr)
        )
        raise EngineError(f"not done within {timeout:.0f} s: {' '.join(command)}\n{written}") from error
    except subprocess.CalledProcessError as error:
        raise EngineError(
            f"status {error.returncode}: {' '.join(command)}\n{error.stdout}{error.stderr}"
        ) from error
    return done.stdout


def provide(commands: Sequence[str]) -> None:
    """Install those of the commands that are missing, by apt.

    Raises:
        EngineError: that failed, or this is no Debian and no Ubuntu.
    """
    missing = [command for command in commands if shutil.which(command) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise EngineError(f"{', '.join(missing)} missing on this machine, and there is no apt-get to install it")
    packages = sorted({_PACKAGES[command] for command in missing})
    quietly = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq", timeout=INSTALL_SECONDS, environment=quietly)
    run(
        *("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages),
        timeout=INSTALL_SECONDS,
        environment=quietly,
    )
