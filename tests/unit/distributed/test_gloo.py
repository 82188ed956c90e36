"""Gloo is told the address (what torch does with it is asked of torch itself), and its threads are waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import netifaces
import pytest
import torch
import torch.distributed as dist

from mingle.distributed import gloo
from mingle.network.interfaces import scan

LO = next(interface.name for interface in scan() if interface.loopback)
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
    ("interface", "told", "address", "missed"),
    [
        ("eth0", "eth0", "fd00::1", True),
        ("eth0", "eth0", "10.0.0.1", False),
        ("eth0", "eth1", "fd00::1", False),
        ("eth0", None, "fd00::1", False),
        ("eth1", "eth1", "10.0.0.1", False),  # it has just gone
    ],
)
def test_misses_compares_the_address_that_gloo_takes(
    monkeypatch: pytest.MonkeyPatch, interface: str, told: str | None, address: str, missed: bool
) -> None:
    monkeypatch.setattr(gloo, "default_address", {"eth0": "10.0.0.1", "eth1": None}.__getitem__)
    environ = {} if told is None else {gloo.VARIABLE: told}
    assert gloo.misses(interface, address, environ) is missed


@pytest.fixture
def wrong_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group can be made by this name: who makes one has used something else."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent0")


@pytest.fixture
def bound(wrong_interface: None) -> Iterator[None]:
    undo = gloo.bind("127.0.0.1")
    yield
    undo()


def alone(**options: Any) -> None:
    """Make a group of one rank, and one more inside it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        number = torch.ones(1)
        dist.all_reduce(number)
        dist.all_reduce(number, group=dist.new_group([0]))
        assert number.item() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"timeout": timedelta(seconds=20)}])
def test_every_group_uses_the_address(bound: None, options: dict[str, Any]) -> None:
    alone(**options)


def test_a_timeout_is_kept(bound: None) -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=77))
    assert group.options._timeout == timedelta(seconds=77)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=78))
    assert group.options._timeout == timedelta(seconds=78)
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


def test_options_that_somebody_gives_are_theirs(bound: None) -> None:
    options = dist.ProcessGroupGloo._Options()
    device = dist.ProcessGroupGloo.create_device(interface=LO)
    options._devices = [device]
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    assert group.options._devices == [device]


def test_group_arguments_of_a_newer_torch_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", lambda _self, *given, **named: made.append((*given, named)))
    group = dist.ProcessGroupGloo.__new__(dist.ProcessGroupGloo)
    undo = gloo.bind("127.0.0.1")
    try:
        group.__init__("store", 0, 1, timeout=timedelta(seconds=79), global_ranks_in_group=[0])
        group.__init__("store", 0, 1, timeout=timedelta(seconds=79), of_tomorrow=True)
        assert "of_tomorrow" in caplog.text
        group.__init__("store", 0, 1, timedelta(seconds=79), "of tomorrow")
        assert "a positional one" in caplog.text
    finally:
        undo()
    (_, _, _, options, named), as_given, by_position = made
    assert (options._timeout, options.global_ranks_in_group, len(options._devices)) == (timedelta(seconds=79), [0], 1)
    assert named == {}
    assert as_given == ("store", 0, 1, {"timeout": timedelta(seconds=79), "of_tomorrow": True})
    assert by_position == ("store", 0, 1, timedelta(seconds=79), "of tomorrow", {})
    assert "update mingle" in caplog.text


def test_bind_can_be_undone(wrong_interface: None) -> None:
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


@pytest.mark.slow
def test_a_process_that_does_not_call_mingle_uses_the_address() -> None:
    """In a fresh interpreter, told of an interface that is not there, with not a word of mingle."""
    sources = {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}  # it need not be installed
    code = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.destroy_process_group()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"], gloo.VARIABLE: "nonexistent0", **gloo.for_workers("127.0.0.1", sources)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")


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

# The threads own the tensors of works that nobody waits for, and with this interval the interpreter's lock changes
# hands only where it must: without help the interpreter is down before any of them gets it.
PROGRAM = """
import sys
import torch
import torch.distributed as dist
import mingle.distributed.rendezvous
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)
for _ in range(200):
    dist.all_gather([torch.empty(32)], torch.ones(32), async_op=True)
"""


@pytest.mark.slow
def test_tensors_that_gloo_holds_at_the_end_do_not_abort_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},  # installed or not
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def _tasks(directory: Path, *stats: str) -> Path:
    for number, stat in enumerate(stats):
        task = directory / str(number)
        task.mkdir()
        (task / "stat").write_text(stat)
    return directory


def test_only_gloos_threads_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = _tasks(tmp_path, "1 (python) R 1", "2 (pt_gloo_runloop) S 1", "3 (a) (b) R 1")
    (tmp_path / "4").mkdir()  # one that ends while it is looked at
    monkeypatch.setattr(gloo, "_TASKS", tasks)
    assert gloo._states() == {"S"}


@pytest.mark.parametrize(("version", "states"), [((2, 6), {"S"}), ((2, 8), set())])
def test_only_where_torch_gives_them_no_name_all_are_looked_at_but_pythons(
    version: tuple[int, int], states: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "_torch_version", lambda: version)
    monkeypatch.setitem(sys.modules, "torch", sys)  # whether or not somebody has imported it
    (tmp_path / str(threading.get_native_id())).mkdir()
    (tmp_path / str(threading.get_native_id()) / "stat").write_text("1 (python) R 1")
    monkeypatch.setattr(gloo, "_TASKS", _tasks(tmp_path, "1 (python) S 1", "2 (pt_tcpstore_uv) S 1"))
    assert gloo._states() == states


@pytest.mark.parametrize("state", ["R", "D"])
def test_a_thread_that_never_rests_is_left_behind(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_TASKS", _tasks(tmp_path, f"1 (pt_gloo_runloop) {state} 1"))
    monkeypatch.setattr(gloo, "SETTLE_SECONDS", 0.05)
    started = time.monotonic()
    gloo.settle()
    assert 0.05 <= time.monotonic() - started < 60


def test_without_proc_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_TASKS", tmp_path / "missing")
    monkeypatch.setattr(gloo, "SETTLE_SECONDS", 3600.0)
    gloo.settle()
