"""What a rank of mingle-check finds on the path to another one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from mingle.check import control, probes
from mingle.check.messages import Greeting, ProbedRank, send


def test_a_network_on_which_a_message_stalls_is_slow_and_not_absent() -> None:
    ends = threading.Event()

    def swallow(listening: socket.socket) -> None:
        with Connection(listening.accept()[0].detach()) as connection:
            connection.recv_bytes()
            send(connection, Greeting(1))
            ends.wait()

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:
        peer = ProbedRank(1, "127.0.0.1", listening.getsockname()[1], "")
        for stall in (0.5, 2.0, 8.0):  # the limit of the connect and of the greeting as well
            pool.submit(swallow, listening)
            if rate := probes.path_rate(peer, "127.0.0.1", stall=stall):
                break
        ends.set()
        assert rate == probes.PATH_BYTES / stall
        listening.close()
        assert probes.path_rate(peer, "127.0.0.1") == 0


def test_a_path_that_does_not_answer_shows_before_a_short_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = ProbedRank(1, "127.0.0.1", silent.getsockname()[1], "")
        tried = probes.Probes(None, None, [there, there])  # type: ignore[arg-type,list-item]
        assert tried.path(peer=1, seconds=0.2) == "a small message is not answered (timed out)"


def test_a_path_that_leads_to_another_rank_is_a_fault() -> None:
    with closing(control.Server(1)) as server:
        there = ProbedRank(1, "127.0.0.1", server.port, server.token)
        tried = probes.Probes(None, None, [structs.replace(there, rank=0), there])  # type: ignore[arg-type,list-item]
        assert tried.path(peer=1, seconds=60) == ""
        assert "rank 1 answers there" in tried.path(peer=0, seconds=60)


# --- GPUs ----------------------------------------------------------------------------------------------------------


def fails(_device: object) -> SimpleNamespace:
    raise torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization")


def named(device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(uuid=f"GPU-{device.index}")


@pytest.mark.parametrize(
    ("visible", "properties", "machine", "driver", "gpu", "why"),
    [
        pytest.param(0, named, "", False, "", "", id="none"),
        pytest.param(0, named, "", True, "", "sees no GPU beside its NVIDIA driver", id="hidden"),
        pytest.param(1, named, "", True, "GPU-0", "", id="the one that a launcher shows each rank"),
        pytest.param(2, named, "", True, "GPU-1", "", id="the one of its local rank"),
        # With a machine's ID each, two ranks can share a GPU.
        pytest.param(1, named, "one", True, "one GPU-0", "", id="on a machine that NCCL knows by another name"),
        pytest.param(1, fails, "", True, "", "sees a GPU that fails (DeferredCudaCallError", id="broken"),
    ],
)
def test_a_rank_names_the_gpu_that_it_would_use_or_says_why_it_uses_none(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    visible: int,
    properties: Callable[[torch.device], SimpleNamespace],
    machine: str,
    driver: bool,
    gpu: str,
    why: str,
) -> None:
    monkeypatch.setenv("NCCL_HOSTID", machine)
    monkeypatch.setattr(probes, "_DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setattr(probes.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found, reason = probes.gpu(1)
    assert found == gpu
    assert reason.startswith(why)
    assert bool(reason) == bool(why)


@pytest.mark.parametrize(
    ("built", "answer", "driver", "torch_is_asked"),
    [
        pytest.param(True, 0, True, True, id="loaded"),
        pytest.param(False, 999, True, True, id="not loaded for a torch that would not use it"),
        pytest.param(True, None, False, True, id="no driver to load"),
        pytest.param(True, 999, True, False, id="failed, and torch would load it once more"),
        pytest.param(True, probes.NO_DEVICE, True, True, id="no device"),
        pytest.param(True, 34, False, True, id="a stub, as images have it"),
    ],
)
def test_the_driver_is_loaded_before_torch_uses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: bool, answer: int | None, driver: bool, torch_is_asked: bool
) -> None:
    """torch's own call holds the GIL, so that the rank could neither answer nor be stopped by Ctrl-C."""
    done: list[str] = []

    def library(name: str) -> SimpleNamespace:
        if answer is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuInit=lambda flags: done.append("driver") or answer)

    def torch_s_own(_local_rank: int) -> tuple[str, str]:
        done.append("torch")
        return "", ""

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(probes.ctypes, "CDLL", library)
    monkeypatch.setattr(probes, "_DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setattr(probes, "gpu", torch_s_own)
    _, why = probes.Probes(SimpleNamespace(local_rank=0), None, []).gpu()  # type: ignore[arg-type]
    assert done == ["driver"] * (built and answer is not None) + ["torch"] * torch_is_asked
    assert (why == "") is torch_is_asked


def test_torch_does_not_end_the_process_when_nccl_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in probes.TORCH_NCCL:
        monkeypatch.setenv(name, "1")  # also where a cluster's profile asks for it
    seen: dict[str, str] = {}
    monkeypatch.setattr(probes.Probes, "_device", lambda *_: None)
    monkeypatch.setattr(probes.dist, "set_debug_level", lambda level: seen.update(level=level.name))
    monkeypatch.setattr(probes.dist, "init_process_group", lambda *_, **__: seen.update(os.environ))
    timeouts: list[timedelta] = []
    job, store = SimpleNamespace(rank=0, world_size=2), SimpleNamespace(set_timeout=timeouts.append)
    probes.Probes(job, store, []).group(backend="nccl", seconds=1.0)  # type: ignore[arg-type]
    assert timeouts == [timedelta(seconds=1)], "another rank's failure must not block the store for longer"
    assert {seen[name] for name in probes.TORCH_NCCL} == {"0"}
    assert seen["level"] == "OFF"
