"""Real launchers on hosts of a lab: only when asked for, as by ``make test-launchers``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.commands import provide
from tests.lab import Lab
from tests.lab.conftest import _zygote, lab, pytest_runtest_makereport
from tests.support.asked_for import leave_out_unless_asked_for

from .cluster import Cluster
from .slurm import Slurm

__all__ = ["_zygote", "lab", "pytest_runtest_makereport"]

_HERE = Path(__file__).parent
_COMMANDS = ("mpiexec.hydra", "mpirun.openmpi", "munged", "pdsh", "slurmctld", "slurmd", "srun")
_TEST_SECONDS = 300


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "launchers: starts real launchers, as root; only when asked for")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this directory, and leave them out of a run that does not ask for them."""
    leave_out_unless_asked_for(config, items, _HERE, "launchers", _TEST_SECONDS)


@pytest.fixture(scope="session")
def _launchers() -> None:
    """The launchers, of this machine or installed."""
    provide(_COMMANDS)


@pytest.fixture
def cluster(lab: Lab, _launchers: None, tmp_path: Path) -> Cluster:
    """Two hosts that reach each other, by name too, and by what they take for ssh."""
    return Cluster(lab, tmp_path)


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Slurm]:
    """Slurm on the cluster."""
    with Slurm(cluster) as running:
        yield running
