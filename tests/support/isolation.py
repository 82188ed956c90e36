"""A network of one's own for a test that needs interfaces: a process in fresh network and mount namespaces.

For tests of the layers below discovery, which need no torch and no second process: the scenario runs in a new
interpreter, opens its sockets in one namespace after another, and all of it vanishes when that process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_CLONE_NEWNET = 0x4000_0000  # <linux/sched.h>
_NETLINK_ROUTE = 0  # <linux/netlink.h>
_RTMGRP_IPV6_IFADDR = 0x100  # <linux/rtnetlink.h>
_IFA_F_TENTATIVE = 0x40  # <linux/if_addr.h>
_MISSING = [tool for tool in ("unshare", "ip", "nft") if shutil.which(tool) is None]

needs_namespaces = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or bool(_MISSING),
    reason=f"needs root and {', '.join(_MISSING) or 'Linux'} to make network namespaces",
)


def run_isolated(scenario: Callable[[], None]) -> None:
    """Run a function of a test module in namespaces that hold nothing but a `lo` that is up."""
    code = (
        f"import {scenario.__module__} as module; from tests.support.isolation import prepare; "
        f"prepare(); module.{scenario.__name__}()"
    )
    finished = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-W", "error", "-c", code],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'src'}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, f"{scenario.__name__} failed:\n{finished.stdout}{finished.stderr}"
    # A warning that Python could only print, such as that of a socket which nobody closed.
    assert finished.stderr == ""


def prepare() -> None:
    """Give this process a /run/netns of its own, and IPv6 addresses that are usable at once."""
    Path("/run/netns").mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run/netns"], check=True)
    ip("link set lo up")
    Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0")


def ip(command: str) -> None:
    """Run ip(8)."""
    subprocess.run(["ip", *command.split()], check=True)


def nft(command: str) -> None:
    """Run nft(8) in the current namespace."""
    subprocess.run(["nft", command], check=True)


@contextlib.contextmanager
def inside(host: str) -> Iterator[None]:
    """Be in the namespace that `ip netns add` made; sockets opened there stay there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open("rb") as home, Path(f"/run/netns/{host}").open("rb") as away:
        assert libc.setns(away.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def host(name: str) -> None:
    """Make a namespace with a `lo` that is up."""
    ip(f"netns add {name}")
    ip(f"-n {name} link set lo up")
    with inside(name):
        Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0")


def cable(number: int, *ends: str) -> None:
    """Join two hosts by `eth<number>`, with 10.<number>.0.1/24 and fd00:<number>::1/64, and .2 and ::2."""
    interface = f"eth{number}"
    ip(f"link add {interface} netns {ends[0]} type veth peer name {interface} netns {ends[1]}")
    for place, end in enumerate(ends, start=1):
        ip(f"-n {end} address add 10.{number}.0.{place}/24 dev {interface}")
        ip(f"-n {end} address add fd00:{number}::{place}/64 dev {interface} nodad")
        ip(f"-n {end} link set {interface} up")
    for end in ends:
        with inside(end):
            wait_for_link_local(interface)


def wait_for_link_local(interface: str) -> None:
    """Wait until IPv6 works: the kernel starts it some time after both ends of a cable are up."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as changes:
        changes.bind((0, _RTMGRP_IPV6_IFADDR))
        changes.settimeout(30)
        # Address, index, prefix length, scope, flags, name.
        while not any(
            fields[0].startswith("fe80") and fields[5] == interface and not int(fields[4], 16) & _IFA_F_TENTATIVE
            for fields in map(str.split, Path("/proc/self/net/if_inet6").read_text().splitlines())
        ):
            changes.recv(65536)
