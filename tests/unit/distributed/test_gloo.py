"""Gloo is told the address (what torch does with it is asked of torch itself), and its threads are waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import netifaces
import pytest
import torch
import torch.distributed as dist

from mingle.distributed import gloo
from mingle.network.interfaces import scan

IPV4, IPV6 = netifaces.AF_INET, netifaces.AF_INET6


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ({IPV4: [{"addr": "10.0.0.1"}, {"addr": "10.0.1.1"}], IPV6: [{"addr": "fd00::1"}]}, "10.0.0.1"),
        ({IPV6: [{"addr": "fe80::1%eth0"}, {"addr": "fd00::1"}]}, "fe80::1"),
        ({netifaces.AF_PACKET: [{"addr": "02:00:00:00:00:01"}]}, None),
        ({}, None),
    ],
)
def test_the_address_that_gloo_takes_by_itself(
    monkeypatch: pytest.MonkeyPatch, families: dict[int, list[dict[str, str]]], expected: str | None
) -> None:
    def ifaddresses(interface: str) -> dict[int, list[dict[str, str]]]:
        if interface != "eth0":
            raise ValueError("You must specify a valid interface name.")
        return families

    monkeypatch.setattr(netifaces, "ifaddresses", ifaddresses)
    assert gloo.default_address("eth0") == expected
    assert gloo.default_address("eth1") is None


@pytest.mark.parametrize(
    ("interface", "environ", "address", "missed"),
    [
        ("eth0", {gloo.VARIABLE: "eth0"}, "fd00::1", True),
        ("eth0", {gloo.VARIABLE: "eth0"}, "10.0.0.1", False),
        ("eth0", {gloo.VARIABLE: "eth1"}, "fd00::1", False),
        ("eth0", {}, "fd00::1", False),
        ("eth1", {gloo.VARIABLE: "eth1"}, "10.0.0.1", False),  # it has just gone
    ],
)
def test_misses_compares_the_address_that_gloo_takes(
    monkeypatch: pytest.MonkeyPatch, interface: str, environ: dict[str, str], address: str, missed: bool
) -> None:
    monkeypatch.setattr(gloo, "default_address", {"eth0": "10.0.0.1", "eth1": None}.__getitem__)
    assert gloo.misses(interface, address, environ) is missed


@pytest.fixture
def wrong_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group can be made by this name: who makes one has used something else."""
    monkeypatch.setenv(gloo.VARIABLE, "nonexistent0")


@pytest.fixture
def bound(wrong_interface: None) -> Iterator[None]:
    undo = gloo.bind("127.0.0.1")
    yield
    undo()


def alone() -> None:
    """Make a group of one rank, and one more inside it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        number = torch.ones(1)
        dist.all_reduce(number)
        dist.all_reduce(number, group=dist.new_group([0]))
        assert number.item() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("bound")
def test_every_group_uses_the_address() -> None:
    alone()


@pytest.mark.usefixtures("bound")
def test_a_timeout_is_kept_and_options_of_somebody_elses_are_theirs() -> None:
    def options(*given: Any, **named: Any) -> Any:
        return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, *given, **named).options

    assert options(timeout=timedelta(seconds=77))._timeout == timedelta(seconds=77)
    assert options(timedelta(seconds=78))._timeout == timedelta(seconds=78)
    assert len(options()._devices) == 1
    theirs = dist.ProcessGroupGloo._Options()
    device = dist.ProcessGroupGloo.create_device(interface=next(each.name for each in scan() if each.loopback))
    theirs._devices = [device]
    assert options(theirs)._devices == [device]


def test_group_arguments_of_a_newer_torch_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", lambda _self, *given, **named: made.append((*given, named)))
    group, timeout = dist.ProcessGroupGloo.__new__(dist.ProcessGroupGloo), timedelta(seconds=79)
    ranks = {"global_ranks_in_group": [0]} if hasattr(dist.ProcessGroupGloo._Options(), "global_ranks_in_group") else {}
    undo = gloo.bind("127.0.0.1")
    try:
        group.__init__("store", 0, 1, timeout=timeout, **ranks)
        group.__init__("store", 0, 1, timeout=timeout, of_tomorrow=True)
        group.__init__("store", 0, 1, timeout, "of tomorrow")
    finally:
        undo()
    (_, _, _, options, named), *as_given = made
    assert (options._timeout, len(options._devices)) == (timeout, 1)
    assert {name: getattr(options, name) for name in ranks} == ranks  # torch 2.6 has none
    assert named == {}
    assert as_given == [
        ("store", 0, 1, {"timeout": timeout, "of_tomorrow": True}),
        ("store", 0, 1, timeout, "of tomorrow", {}),
    ]
    for warning, unknown in zip(caplog.messages, ("of_tomorrow", "a positional one"), strict=True):
        assert unknown in warning
        assert "update mingle" in warning


@pytest.mark.usefixtures("wrong_interface")
def test_bind_can_be_undone() -> None:
    before = dist.ProcessGroupGloo.__init__
    undo = gloo.bind("127.0.0.1")
    assert dist.ProcessGroupGloo.__init__ is not before
    undo()
    undo()
    assert dist.ProcessGroupGloo.__init__ is before
    with pytest.raises(RuntimeError, match="ifa"):
        alone()


def test_the_end_of_a_binding_leaves_what_another_library_has_put_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = object()
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__)  # restored at the end
    undo = gloo.bind("127.0.0.1")
    dist.ProcessGroupGloo.__init__ = theirs
    undo()
    assert dist.ProcessGroupGloo.__init__ is theirs


def test_a_torch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    gloo.bind("127.0.0.1")()


# --- in processes that don't call mingle ------------------------------------------------------------------------------

SOURCES = {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}  # it need not be installed


def succeeds(code: str, environ: Mapping[str, str]) -> None:
    """Run the code in a fresh interpreter, which must say nothing on stderr."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_process_that_does_not_call_mingle_uses_the_address() -> None:
    """It is told of an interface that is not there, with not a word of mingle."""
    code = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.destroy_process_group()"
    )
    told = gloo.for_workers("127.0.0.1", SOURCES)
    succeeds(code, {"PATH": os.environ["PATH"], gloo.VARIABLE: "nonexistent0", **told})


def test_pythonpath_of_the_user_stays_behind_ours() -> None:
    alone, more = (gloo.for_workers("::1", environ)["PYTHONPATH"] for environ in ({}, {"PYTHONPATH": "/one:/two"}))
    assert Path(alone).is_dir()
    assert more == f"{alone}:/one:/two"


def test_without_an_address_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dist.ProcessGroupGloo.__init__
    (name,) = set(gloo.for_workers("127.0.0.1", {})) - {"PYTHONPATH"}
    monkeypatch.delenv(name, raising=False)
    gloo.bind_as_told()
    assert dist.ProcessGroupGloo.__init__ is before


# --- its threads ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensors_that_gloo_holds_at_the_end_do_not_abort_the_process() -> None:
    # The threads own the tensors of works that nobody waits for, and with this interval the interpreter's lock changes
    # hands only where it must: without help the interpreter is down before any of them gets it.
    code = (
        "import sys, torch\n"
        "import torch.distributed as dist\n"
        "import mingle.distributed.rendezvous\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "sys.setswitchinterval(1000)\n"
        "for _ in range(200):\n"
        "    dist.all_gather([torch.empty(32)], torch.ones(32), async_op=True)\n"
    )
    succeeds(code, {**os.environ, **SOURCES})


@pytest.mark.parametrize(
    ("version", "threads", "waits"),
    [
        ((2, 8), ["pt_gloo_runloop) R"], True),
        ((2, 8), ["pt_gloo_runloop) D"], True),
        ((2, 8), ["pt_gloo_runloop) S", "pt_gloo_runloop) R"], True),
        ((2, 8), ["pt_gloo_runloop) S", "python) R", "a) (b) R"], False),
        ((2, 8), ["pt_tcpstore_uv) R"], False),
        ((2, 6), ["pt_tcpstore_uv) R"], True),  # where torch gives them no name it can be any
        ((2, 6), ["pt_tcpstore_uv) S"], False),
        ((2, 6), ["pt_gloo_runloop) S", "pt_tcpstore_uv) R"], False),
        ((2, 8), None, False),  # a system without proc(5)
    ],
)
def test_gloos_threads_are_waited_for_while_they_work(
    version: tuple[int, int],
    threads: list[str] | None,
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "ended while it is looked at").mkdir()
    pythons = str(threading.get_native_id())
    for task, stat in (*enumerate(threads or ()), (pythons, "python) R")):
        (tmp_path / str(task)).mkdir()
        (tmp_path / str(task) / "stat").write_text(f"1 ({stat} 1")
    limit = 0.05 if waits else 20.0
    monkeypatch.setattr(gloo, "_TASKS", tmp_path / ("" if threads else "missing"))
    monkeypatch.setattr(gloo, "_torch_version", lambda: version)
    monkeypatch.setattr(gloo, "SETTLE_SECONDS", limit)
    started = time.monotonic()
    gloo.settle()
    assert (time.monotonic() - started >= limit) is waits
