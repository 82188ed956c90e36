from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from mingle.config import node

KNOWN: dict[str, Any] = {
    "boot_id": "b00t",
    "network_namespace": 1,
    "pid_namespace": 2,
    "hostname": "alpha",
    "machine_id": "m1",
}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"hostname": "beta"}, True),
        ({"machine_id": None}, True),
        ({"boot_id": "other"}, False),
        ({"network_namespace": 9}, False),
        ({"pid_namespace": 9}, False),
    ],
)
def test_what_tells_nodes_apart_where_there_is_a_boot_id(change: dict[str, Any], same: bool) -> None:
    assert (node.describe(**KNOWN) == node.describe(**{**KNOWN, **change})) is same


@pytest.mark.parametrize(
    ("change", "same"),
    [({}, True), ({"hostname": "beta"}, False), ({"machine_id": "m2"}, False), ({"pid_namespace": 9}, False)],
)
def test_what_tells_nodes_apart_elsewhere(change: dict[str, Any], same: bool) -> None:
    elsewhere = {**KNOWN, "boot_id": None}
    assert (node.describe(**elsewhere) == node.describe(**{**elsewhere, **change})) is same


def test_the_two_namespaces_are_not_mixed_up() -> None:
    swapped = {**KNOWN, "network_namespace": 2, "pid_namespace": 1}
    assert node.describe(**KNOWN) != node.describe(**swapped)


def test_without_anything_but_a_name() -> None:
    key = node.describe(boot_id=None, network_namespace=None, pid_namespace=None, hostname="alpha", machine_id=None)
    assert key == "host:alpha"


def test_a_random_hardware_address_does_not_count() -> None:
    assert node.hardware_id(0x02420A000001) == "02420a000001"
    assert node.hardware_id(0x01420A000001) is None


def test_identity_falls_back_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(node, "_NAMESPACES", tmp_path / "ns")
    monkeypatch.setattr(node, "_MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(uuid, "getnode", lambda: 0x02420A000001)
    monkeypatch.setattr(socket, "gethostname", lambda: "alpha")
    assert node.identity() == "host:alpha/machine:02420a000001"
    (tmp_path / "machine-id").write_text("0123\n")
    assert node.identity() == "host:alpha/machine:0123"


def identity_in_a_new_process(*, own_network: bool = False) -> str:
    clone_newnet = 0x40000000
    unshare = f"ctypes.CDLL(None, use_errno=True).unshare({clone_newnet})"
    enter = f"if {unshare}: raise OSError(ctypes.get_errno(), 'unshare')"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import ctypes\n{enter if own_network else ''}\nfrom mingle.config import node\nprint(node.identity())",
        ],
        env={**os.environ, "PYTHONPATH": str(Path(node.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
class TestOnLinux:
    def test_all_processes_here_agree(self) -> None:
        assert identity_in_a_new_process() == node.identity()

    def test_identity_is_the_kernels(self) -> None:
        assert node.identity() == (
            f"boot:{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            f"/net:{Path('/proc/self/ns/net').stat().st_ino}/pid:{Path('/proc/self/ns/pid').stat().st_ino}"
        )

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to make a namespace")
    def test_another_network_namespace_is_another_node(self) -> None:
        assert identity_in_a_new_process(own_network=True) != node.identity()
