"""The port of the program: reserved, reached by the other machines, and free when a program starts."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from click.testing import CliRunner

from mingle.engine import store
from mingle.engine.store import StoreServer, connect_plainly
from mingle.errors import ConfigurationError
from mingle.run import port
from mingle.run.command import run
from tests.support.bystanders import command_environment, patched_path
from tests.support.run_nodes import WAIT, Nodes

if TYPE_CHECKING:
    from mingle.engine.driver import Driver

PATIENT = "import mingle.network.inspection as inspection\ninspection.HOLDER_SECONDS = 60.0\n"
"""Run first in a process that looks for the holder of a port."""


def test_a_fixed_port_that_is_taken_is_wrong_usage_on_node_0_and_its_holder_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        code = f"{PATIENT}import mingle.run.port as port; port.reserve({number})"
        done = subprocess.run(
            [sys.executable, "-c", code], env=command_environment(29499), capture_output=True, text=True, check=False
        )
        assert f"ConfigurationError: the program can't listen on port {number} (MASTER_PORT)" in done.stderr
        assert f"pid {os.getpid()}" in done.stderr
        for place, status in (([], 2), (["--node-rank", "0"], 2), (["--node-rank", "1"], 1)):
            words = ["--nnodes", "2", *place, "-t", "0.1", "--master-port", str(number), "--", "true"]
            assert CliRunner().invoke(run, words).exit_code == status


def test_a_fixed_port_that_only_root_may_open_is_held_by_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_socket: socket.socket, _place: tuple[str, int]) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigurationError, match="which only root may open") as told:
        port.reserve(80)
    assert "another program" not in str(told.value)


def test_the_port_is_none_that_the_kernel_gives_to_outgoing_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = tmp_path / "range"
    monkeypatch.setattr(port, "_EPHEMERAL", limits)
    limits.write_text("21000\t60999\n")
    for _ in range(20):
        with port.reserve(None) as listener:
            assert 20_000 <= listener.getsockname()[1] < 21_000
    limits.write_text("1024\t65535\n")
    port.reserve(None).close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """Give the port of node 0, whose kernel queues one caller."""
    monkeypatch.setattr(port, "BACKLOG", 0)
    monkeypatch.setattr(port, "END_SECONDS", 30.0)
    monkeypatch.setattr(store, "CONNECT_SECONDS", 30.0)
    server = port.PortKeeper(cast("Driver", None), cast("Any", None), port=None).open("127.0.0.1", b"session")
    yield server
    server.release()
    assert "mingle-port" not in {thread.name for thread in threading.enumerate()}


def test_more_machines_reach_the_port_than_the_kernel_queues(opened: StoreServer) -> None:
    for _ in range(4):
        connect_plainly(opened.address, opened.port).close()
    opened.release()
    port.reserve(opened.port).close()


def test_a_caller_that_does_not_hang_up_leaves_the_port_free_for_a_program_without_options(opened: StoreServer) -> None:
    with connect_plainly(opened.address, opened.port) as caller, socket.socket() as program:
        with pytest.raises(ConnectionResetError):
            caller.recv(1)
        opened.release()
        program.bind((opened.address, opened.port))


def test_a_port_that_is_held_refuses_connections_and_every_other_program() -> None:
    with port.hold(but=None) as held, socket.socket() as other, socket.socket() as caller:
        number = held.getsockname()[1]
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", number))
        assert caller.connect_ex(("127.0.0.1", number)) == errno.ECONNREFUSED
        held.close()
        other.bind(("127.0.0.1", number))


def test_the_port_of_a_machine_is_not_the_one_of_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with port.hold(but=None) as held:
        fixed = held.getsockname()[1]
    monkeypatch.setattr(random, "sample", lambda *_: [fixed])
    with port.hold(but=fixed) as other:
        assert other.getsockname()[1] != fixed


def test_the_port_is_free_on_node_0_before_any_program_starts(nodes: Nodes) -> None:
    """No program may find the port of another one there, and node 0's binds it without any option."""
    head = (
        "import socket, sys; server = socket.create_server(('127.0.0.1', int(sys.argv[1])), reuse_port=False);"
        "[server.accept()[0].recv(1) for _ in range(2)]"
    )
    other = (
        "import errno, os, socket, sys, time\n"
        "while (error := (connection := socket.socket()).connect_ex(('127.0.0.1', int(sys.argv[1])))):\n"
        "    assert error == errno.ECONNREFUSED, error\n"
        "connection.send(b'x'); assert connection.recv(1) == b''"
    )
    nodes.start(
        "--head", f'{sys.executable} -c "{head}" {{master_port}}', "--", sys.executable, "-c", other, "{master_port}"
    )
    assert [(status, errors) for status, _, errors in nodes.ended()] == [(0, "")] * 3


def test_a_port_that_another_program_took_is_named(nodes: Nodes) -> None:
    """The program of node 0 can't bind it, and mingle-run says who holds it."""
    path = patched_path(nodes.folder, PATIENT)
    nodes.start("--", "sh", "-c", f"echo {{master_port}} > pid0; {WAIT} exit 9", count=1, PYTHONPATH=path)
    (number,) = nodes.started()
    with socket.create_server(("127.0.0.1", number)):
        nodes.go()
        ((status, _, errors),) = nodes.ended()
    assert status == 9
    assert f"the program can't listen on port {number} (MASTER_PORT) of this machine" in errors
    assert f"pid {os.getpid()}" in errors
