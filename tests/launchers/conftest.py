"""Real launchers on hosts of a lab: only when asked for, as by ``make test-launchers``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.commands import provide
from tests.lab import Lab
from tests.lab.conftest import _zygote, lab, pytest_runtest_makereport

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
    ours = [item for item in items if _HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.launchers)
        item.add_marker(pytest.mark.timeout(_TEST_SECONDS))
    named = any(
        _HERE in (path := config.invocation_params.dir / argument.partition("::")[0]).parents or path == _HERE
        for argument in config.args
    )
    if ours and not named and "launchers" not in config.option.markexpr:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)


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
