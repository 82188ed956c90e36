"""Run commands with a deadline, and install those that this machine lacks."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .errors import EngineError

INSTALL_SECONDS = 300.0

# The packages of Debian and Ubuntu.
_PACKAGES = {
    "debootstrap": "debootstrap",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "docker-init": "docker.io",
    "dockerd": "docker.io",
    "iperf3": "iperf3",
    "iptables": "iptables",
    "mpiexec.hydra": "mpich",
    "mpirun.openmpi": "openmpi-bin",
    "munged": "munge",
    "pdsh": "pdsh",
    "setpriv": "util-linux",
    "slirp4netns": "slirp4netns",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "unshare": "util-linux",
}


def run(
    *command: str,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    accepted: Collection[int] = (0,),
) -> str:
    """Return what a command wrote to stdout.

    Args:
        command: its name and its arguments.
        timeout: seconds until it is killed.
        environment: variables on top of this process's own.
        accepted: what it may end with.

    Raises:
        EngineError: it could not be started, ended otherwise, or took too long; with all that it wrote.
    """
    try:
        done = subprocess.run(
            command,
            env=None if environment is None else {**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise EngineError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        written = _text(error.stdout) + _text(error.stderr)
        raise EngineError(f"not done within {timeout:.0f} s: {' '.join(command)}\n{written}") from error
    if done.returncode not in accepted:
        raise EngineError(f"status {done.returncode}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _text(written: str | bytes | None) -> str:
    """What `subprocess.TimeoutExpired` holds, which is bytes even where text was asked for."""
    return written.decode(errors="replace") if isinstance(written, bytes) else written or ""


def provide(commands: Sequence[str]) -> None:
    """Install those of the commands that are missing, by apt.

    Raises:
        EngineError: that failed, or this is no Debian and no Ubuntu.
    """
    with Path(__file__).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # apt-get fails where another one runs
        missing = [command for command in commands if shutil.which(command) is None]
        if missing:
            _install(missing)


def _install(missing: Sequence[str]) -> None:
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
