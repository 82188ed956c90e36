"""Who holds the port, by tables like those of /proc and by the real ones."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingle.diagnostics.diagnosis import Holder
from mingle.network import inspection
from mingle.network.inspection import HOLDER_SECONDS, holders
from tests.support.ports import free_udp_port

TABLE = """  sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode ref pointer drops
  101: 00000000:733B 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 4711 2 0000000000000000 0
  102: 00000000:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4712 2 0000000000000000 0
  103: 00000000:733B 0200000A:1F90 06 00000000:00000000 03:00001770 00000000     0        0 0 3 0000000000000000
"""
"""Like that of TCP: the last row is a connection in TIME_WAIT, which no process holds."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@pytest.fixture(autouse=True)
def found_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the search read the files of a test, if it makes some."""
    monkeypatch.setattr(inspection, "_PROC", tmp_path)


def test_tables_that_are_short_or_missing(tmp_path: Path) -> None:
    assert holders(29499) == ()
    (tmp_path / "self/net").mkdir(parents=True)
    (tmp_path / "self/net/udp").write_text("")
    (tmp_path / "self/net/udp6").write_text("header\nshort\n")
    assert holders(29499) == ()
    (tmp_path / "self/net/udp").write_text(TABLE)
    assert holders(29499) == (Holder(None, user=1000),)
    assert holders(1) == ()


def a_proc(root: Path, *, pid: int = 77, maps: str = "libc.so.6", readable: bool = True) -> Path:
    (root / "self/net").mkdir(parents=True)
    (root / "self/net/udp").write_text(TABLE)
    if readable:
        process = root / str(pid)
        (process / "fd").mkdir(parents=True)
        (process / "fd/3").symlink_to("socket:[4711]")
        (process / "fd/4").symlink_to("socket:[4711]")
        (process / "cmdline").write_text("/usr/bin/telemetry\0--port\n\0")
        (process / "maps").write_text(maps)
    return root


@pytest.mark.parametrize(
    ("proc", "shown", "mingle"),
    [
        pytest.param({}, "pid 77 (/usr/bin/telemetry --port)", False, id="a stranger"),
        pytest.param({"maps": "/x/msgspec/_core.so\n/x/netifaces.so\n"}, "pid 77", True, id="a process that discovers"),
        # The kernel drops its memory before it closes its files, and all ranks of a machine time out at once.
        pytest.param({"maps": ""}, "", False, id="a process that ends"),
        pytest.param({"readable": False}, "may not be seen", False, id="one that may not be inspected"),
    ],
)
def test_who_holds_the_port(tmp_path: Path, proc: dict[str, Any], shown: str, mingle: bool) -> None:
    a_proc(tmp_path, **proc)
    found = holders(29499)
    assert [(each.user, each.mingle) for each in found] == [(1000, mingle)] * bool(shown)
    assert all(shown in str(each) for each in found)


def test_ranks_of_another_user_are_known_by_their_names(tmp_path: Path) -> None:
    a_proc(tmp_path, readable=False)
    names = "Num RefCount Protocol Flags Type St Inode Path\n0: 2 0 0 2 1 31 @mingle/udp-29499/0\n"
    (tmp_path / "self/net/unix").write_text(names)
    (found,) = holders(29499)
    assert found.mingle
    (tmp_path / "self/net/unix").write_text(names.replace("29499", "29498"))
    (found,) = holders(29499)
    assert not found.mingle


def a_clock_of(step: float) -> SimpleNamespace:
    """Return a clock that advances by this much at each reading."""
    return SimpleNamespace(monotonic=itertools.count(0, step).__next__)


def add_processes(root: Path, processes: int, files: int, inode: int) -> None:
    """Add processes that hold only a socket of this number."""
    for pid in range(1000, 1000 + processes):
        (root / str(pid) / "fd").mkdir(parents=True)
        (root / str(pid) / "maps").write_text("libc.so.6")
        for fd in range(files):
            (root / str(pid) / "fd" / str(fd)).symlink_to(f"socket:[{inode}]")


@pytest.mark.parametrize("processes", [(200, 1), (1, 200)], ids=["many processes", "many files"])
def test_search_of_processes_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: tuple[int, int]
) -> None:
    """A timeout is reported by all ranks of a machine at once, and /proc may hold a hundred thousand processes."""
    a_proc(tmp_path, readable=False)
    add_processes(tmp_path, *processes, inode=1)
    looked: list[str] = []
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: (looked.append(str(path)), readlink(path))[1])
    monkeypatch.setattr(inspection, "time", a_clock_of(HOLDER_SECONDS / 50))
    (found,) = holders(29499)
    assert 10 < len(looked) < 60
    assert found == Holder(None, user=1000, cut_short=True)
    assert str(found) == "a process of user 1000 that was not found in time among those of this machine"


def test_holders_are_looked_at_within_the_same_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_proc(tmp_path, maps="/x/msgspec/_core.so\n/x/netifaces.so\n")
    add_processes(tmp_path, 200, 1, inode=4711)  # many share the socket: forks of one process
    monkeypatch.setattr(inspection, "time", a_clock_of(HOLDER_SECONDS / 50))
    found = holders(29499)
    assert 1 <= len(found) < 60
    assert all(each.pid is not None for each in found)


def test_this_process_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_proc(tmp_path, pid=os.getpid())
    assert holders(29499) == ()
    monkeypatch.undo()
    monkeypatch.setattr(inspection, "HOLDER_SECONDS", 60.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", free_udp_port()))
        assert holders(own.getsockname()[1]) == ()


def test_another_process_is_found_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(inspection, "HOLDER_SECONDS", 60.0)
    port = free_udp_port()
    program = (
        f"import socket; s = socket.socket(2, 2); s.bind(('127.0.0.1', {port})); print('held', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = holders(port)
        other.communicate(b"\n", timeout=60)
    assert [each.pid for each in found] == [other.pid]
    assert sys.executable in found[0].command
    assert not found[0].mingle
