"""What a rank of mingle-check finds on the path to another one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
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
    with contextlib.closing(control.Server(1)) as server:
        there = ProbedRank(1, "127.0.0.1", server.port, server.token)
        tried = probes.Probes(None, None, [structs.replace(there, rank=0), there])  # type: ignore[arg-type,list-item]
        assert tried.path(peer=1, seconds=60) == ""
        assert "rank 1 answers there" in tried.path(peer=0, seconds=60)


@pytest.mark.parametrize(("visible", "ids"), [(0, ["", ""]), (1, ["GPU-0", "GPU-0"]), (2, ["GPU-0", "GPU-1"])])
def test_a_rank_names_the_gpu_that_it_would_use(monkeypatch: pytest.MonkeyPatch, visible: int, ids: list[str]) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(probes, "_DRIVER", Path("/nowhere"))
    monkeypatch.setattr(probes.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    assert [probes.gpu(local_rank) for local_rank in range(2)] == [(each, "") for each in ids]


def test_the_gpu_of_a_machine_that_nccl_knows_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an ID each, two ranks can share a GPU."""
    monkeypatch.setenv("NCCL_HOSTID", "one")
    monkeypatch.setattr(probes, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-0"))
    assert probes.gpu(0) == ("one GPU-0", "")


@pytest.mark.parametrize("built", [True, False])
def test_the_driver_is_loaded_before_torch_uses_it(monkeypatch: pytest.MonkeyPatch, *, built: bool) -> None:
    done: list[str] = []
    library = SimpleNamespace(cuInit=lambda flags: done.append(f"cuInit {flags}") or 0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(probes.ctypes, "CDLL", {"libcuda.so.1": library}.__getitem__)
    monkeypatch.setattr(probes, "has_gpu", lambda: done.append("torch"))
    probes.Probes(SimpleNamespace(local_rank=0), None, []).gpu()  # type: ignore[arg-type]
    assert done == (["cuInit 0", "torch"] if built else ["torch"])


@pytest.mark.parametrize(
    ("error", "driver", "reason"),
    [
        (999, True, "has a GPU whose driver fails (CUDA error 999)"),
        (probes.NO_DEVICE, True, "torch was asked"),
        (34, False, "torch was asked"),  # a stub, as images have it
    ],
)
def test_a_driver_that_fails_is_not_loaded_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, error: int, driver: bool, reason: str
) -> None:
    monkeypatch.setattr(probes, "load_driver", lambda: error)
    monkeypatch.setattr(probes, "gpu", lambda _: ("", "torch was asked"))
    monkeypatch.setattr(probes, "_DRIVER", tmp_path if driver else tmp_path / "none")
    assert probes.Probes(SimpleNamespace(local_rank=0), None, []).gpu() == ("", reason)  # type: ignore[arg-type]


def test_a_machine_without_a_driver_has_none_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(probes.ctypes, "CDLL", missing)
    assert probes.load_driver() == 0


@pytest.mark.parametrize("driver", [True, False])
def test_a_gpu_that_this_torch_can_not_use_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, driver: bool
) -> None:
    monkeypatch.setattr(probes, "has_gpu", lambda: False)
    monkeypatch.setattr(probes, "_DRIVER", device := tmp_path / "nvidiactl")
    if driver:
        device.touch()
    assert probes.gpu(0) == (
        "",
        "sees no GPU beside its NVIDIA driver (CUDA_VISIBLE_DEVICES, or a torch without CUDA)" if driver else "",
    )


def test_a_gpu_that_fails_is_none_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_device: object) -> None:
        raise torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization")

    monkeypatch.setattr(probes, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert probes.gpu(0) == (
        "",
        "sees a GPU that fails (DeferredCudaCallError: CUDA call failed lazily at initialization)",
    )


def test_torch_does_not_end_the_process_when_nccl_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in probes.TORCH_NCCL:
        monkeypatch.setenv(name, "1")  # also where a cluster's profile asks for it
    seen: dict[str, str] = {}
    monkeypatch.setattr(probes.Probes, "_device", lambda *_: None)
    monkeypatch.setattr(probes.dist, "set_debug_level", lambda level: seen.update(level=level.name))
    monkeypatch.setattr(probes.dist, "init_process_group", lambda *_, **__: seen.update(os.environ))
    job = SimpleNamespace(rank=0, world_size=2)
    timeouts: list[timedelta] = []
    store = SimpleNamespace(set_timeout=timeouts.append)
    probes.Probes(job, store, []).group(backend="nccl", seconds=1.0)  # type: ignore[arg-type]
    assert timeouts == [timedelta(seconds=1)], "another rank's failure must not block the store for longer"
    assert {seen[name] for name in probes.TORCH_NCCL} == {"0"}
    assert seen["level"] == "OFF"
