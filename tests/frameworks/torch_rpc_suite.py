"""Torch's own tests of its RPC, from its wheel, over `mingle://`: on TensorPipe, with four ranks or more on `lo`.

``python -m tests.frameworks.torch_rpc_suite`` runs all of them; arguments are those of unittest, such as ``-k rref``.
Process groups that a test makes beside its agents keep the file that torch's fixture names.
"""

from __future__ import annotations

import os
import unittest

os.environ |= {"MINGLE_INTERFACE": "lo", "MINGLE_PROGRESS": "off", "OMP_NUM_THREADS": "1"}

import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)
from torch.testing._internal.distributed.rpc_utils import (
    GENERIC_TESTS,
    TENSORPIPE_TESTS,
    TensorPipeAgentRpcTest,
)


class _OverMingle(TensorPipeRpcAgentTestFixture, MultiProcessTestCase):  # type: ignore[misc]
    """The fixture, on ranks that are forked: a fresh interpreter would import torch for each rank of each test."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @property
    def init_method(self) -> str:
        """A job of its own for each test; the ranks ask for it."""
        return f"mingle://torch-rpc-{os.getppid()}-{self._testMethodName}"


# Agents that come and go without a world size: mingle says that it forms no such group.
_WITHOUT_A_WORLD_SIZE = (
    "test_dynamic_and_static_init_rpc_together",
    "test_dynamic_rpc_existing_rank_can_communicate_with_new_rank",
    "test_dynamic_rpc_init_rpc",
    "test_dynamic_rpc_init_rpc_without_rank",
    "test_dynamic_rpc_new_rank_can_communicated_with_existing_rank",
)
for _name in _WITHOUT_A_WORLD_SIZE:
    delattr(TensorPipeAgentRpcTest, _name)

for _tests in (*GENERIC_TESTS, *TENSORPIPE_TESTS):
    globals()[_tests.__name__] = type(_tests.__name__, (_tests, _OverMingle), {"__module__": __name__})


if __name__ == "__main__":
    unittest.main()
