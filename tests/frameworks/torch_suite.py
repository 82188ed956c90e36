"""Torch's own tests of torch.distributed, which its wheel holds, over `mingle://`: on Gloo, with three ranks on `lo`.

``python -m tests.frameworks.torch_suite`` runs all of them; arguments are those of unittest, such as ``-k all_reduce``.
"""

from __future__ import annotations

import os
import tempfile
import unittest

os.environ |= {
    "BACKEND": "gloo",
    "WORLD_SIZE": "3",
    "INIT_METHOD": "mingle://torch-suite",
    "MINGLE_INTERFACE": "lo",
    "MINGLE_PROGRESS": "off",
    "OMP_NUM_THREADS": "1",
}
_directory = tempfile.TemporaryDirectory()
os.environ["TEMP_DIR"] = _directory.name

# Torch's module reads the environment while it is imported.
import torch  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


class OverMingle(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests, on ranks that are forked: a fresh interpreter would import torch for each rank of each test."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _barrier(self, *arguments: object, **settings: object) -> None:
        """Torch gives the ranks 10 s to meet before and after each test, which a busy machine may not have."""
        super()._barrier(*arguments, **{**settings, "timeout": 200})

    @property
    def init_method(self) -> str:
        """A job of its own for each test; the ranks ask for it."""
        return f"mingle://torch-suite-{os.getppid()}-{self._testMethodName}"


if __name__ == "__main__":
    unittest.main()
