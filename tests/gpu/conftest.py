"""NCCL between hosts of a lab that share this machine's GPU: only when asked for, as by ``make test-gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lab.conftest import _zygote, lab, pytest_runtest_makereport
from tests.support.asked_for import leave_out_unless_asked_for

__all__ = ["_zygote", "lab", "pytest_runtest_makereport"]

_HERE = Path(__file__).parent
_TEST_SECONDS = 200


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "gpu: needs a GPU, and root as the lab does; only when asked for")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this directory, and leave them out of a run that does not ask for them."""
    leave_out_unless_asked_for(config, items, _HERE, "gpu", _TEST_SECONDS)


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    """Fail without a GPU: all of these programs would run on the CPU instead."""
    # NVML is asked, not CUDA, which a forked process could not use after that.
    if torch.cuda.device_count() == 0:
        pytest.fail(f"torch {torch.__version__} sees no GPU: `make test-gpu` needs one, and a torch for CUDA")
