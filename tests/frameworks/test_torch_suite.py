"""Torch's own tests of torch.distributed and its RPC over `mingle://`: some of them.

`make test-torch-suite` runs all.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.bystanders import ROOT, command_environment
from tests.support.ports import free_udp_port

_NAMES = """
    Backend_enum_class DistributedDataParallelCPU DistributedDataParallelCPU_grad_is_view accumulate_gradients_no_sync
    all_gather all_gather_coalesced_simple all_gather_full_group all_gather_object_default_pg
    all_reduce_coalesced_sum all_reduce_full_group_max all_reduce_product all_reduce_sum all_reduce_sum_async barrier
    barrier_full_group batch_isend_irecv_gloo broadcast broadcast_full_group ddp_logging_data_cpu destroy_full_group
    gather gather_full_group get_rank_size_full_group irecv isend reduce_full_group_sum reduce_sum scatter send_recv
    send_recv_any_source
"""
_RPC_NAMES = """
    DistAutogradTest.test_backward_rref DistAutogradTest.test_trainer_ps DistOptimizerTest.test_dist_optim
    JitRpcTest.test_remote_script_module ParameterServerTest.test_batch_updating_parameter_server
    RemoteModuleTest.test_forward_sync RpcTest.test_add RpcTest.test_multi_py_udf_remote RpcTest.test_nested_rref
    RpcTest.test_send_to_rank RpcTest.test_graceful_shutdown_with_uneven_workload
    TensorPipeAgentRpcTest.test_nested_remote_sparse
"""
_SECONDS = 350


def test_torchs_own_tests_pass_over_mingle() -> None:
    names = [f"OverMingle.test_{name}" for name in _NAMES.split()]
    assert len(names) == 30
    all_pass("torch_suite", names)


def test_torchs_own_tests_of_rpc_pass_over_mingle() -> None:
    all_pass("torch_rpc_suite", _RPC_NAMES.split())


def all_pass(suite: str, names: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.frameworks.{suite}", *names],
        cwd=ROOT,
        env=command_environment(free_udp_port()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    assert f"Ran {len(names)} tests" in done.stdout
    assert "skipped" not in done.stdout
