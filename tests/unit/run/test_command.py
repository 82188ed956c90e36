"""mingle-run: its placeholders, what it refuses before a packet, and several of it on `lo`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from click.testing import CliRunner

from mingle.engine.store import connect_plainly
from mingle.errors import ConfigurationError, MingleError
from mingle.protocol.machine import Formation, lone_formation
from mingle.protocol.registrar import AHEAD_SECONDS
from mingle.run import addresses, placeholders, port
from mingle.run.command import run
from mingle.run.program import Program
from mingle.wire.frames import Seat
from tests.support.bystanders import ROOT, command_environment, free_udp_port
from tests.support.loopback import job_name, until

if TYPE_CHECKING:
    from mingle.engine.driver import Driver

COMMAND = (sys.executable, "-m", "mingle.run.command")
KNOWN = {
    "master_addr": "10.0.0.1",
    "master_port": 4242,
    "node_rank": 0,
    "nnodes": 3,
    "address": "10.0.0.2",
    "interface": "eth0",
    "my_port": 4243,
    "hosts": "10.0.0.1,10.0.0.2",
    "hostports": "10.0.0.1:4244,10.0.0.2:4243",
    "hostfile": "/tmp/hosts",
}


# --- placeholders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("--master={master_addr}:{master_port}", "--master=10.0.0.1:4242"),
        ("{node_rank}{nnodes}", "03"),
        ("{address}%{interface}", "10.0.0.2%eth0"),
        ("-H {hosts} --listen={my_port}", "-H 10.0.0.1,10.0.0.2 --listen=4243"),
        ("{hostfile}:{hostports}", "/tmp/hosts:10.0.0.1:4244,10.0.0.2:4243"),
        ("{{node_rank}}", "{node_rank}"),
        ("{{{node_rank}}}", "{{node_rank}}"),
        ("{{other}}", "{other}"),
        ("${HOME}/{node_rank}", "${HOME}/0"),
        ('{"a": {"b": {}}, "c": [{"d":1}]}', '{"a": {"b": {}}, "c": [{"d":1}]}'),
        ("{} {1} {a b} {a-b} { node_rank } {{ node_rank }} {", "{} {1} {a b} {a-b} { node_rank } {{ node_rank }} {"),
        ("{node_rank", "{node_rank"),
        ("", ""),
    ],
)
def test_placeholders_are_filled_in_and_other_braces_stay(word: str, filled: str) -> None:
    assert placeholders.fill([word], KNOWN) == [filled]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("{master_adr}", "write {master_addr}"),
        ("{MASTER_PORT}", "write {master_port}"),
        ("{hostport}", "write {hostports}"),
        ("{host}", "write {hosts}"),
        ("{host_file}", "write {hostfile}"),
        ("{port}", "write {my_port}"),
        ("{zzz}", "the placeholders are {master_addr}, {master_port}"),
        ("a{_}b", "for the text {_} itself write {{_}}"),
    ],
)
def test_an_unknown_placeholder_is_an_error_that_says_how_to_write_it(word: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(hint)):
        placeholders.check(["fine", word])


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "no-right"
    file.write_text("#!/bin/sh\n")
    return file


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nnodes", "2"], "Missing argument 'COMMAND"),
        (["--nnodes", "2", "--"], "Missing argument 'COMMAND"),
        (["--", "true"], "Missing option '--nnodes'"),
        (["--nnodes", "0", "--", "true"], "0 is not in the range 1<=x<=1000000"),
        (["--nnodes", "1000001", "--", "true"], "1000001 is not in the range 1<=x<=1000000"),
        (["--nnodes", "2", "--node-rank", "2", "--", "true"], "--node-rank=2 does not fit a job of 2 nodes"),
        (["--nnodes", "2", "--node-rank", "-1", "--", "true"], "-1 is not in the range x>=0"),
        (["--nnodes", "2", "--node-rank", "1000000", "--", "true"], "--node-rank=1000000 is too large"),
        (["--nnodes", "2", "--master-port", "70000", "--", "true"], "70000 is not in the range"),
        (["--nnodes", "2", "--job-id", "", "--", "true"], "is empty"),
        (["--nnodes", "2", "--", "echo", "{node}"], "{node} in the command is no placeholder"),
        (["--nnodes", "2", "--head", "echo {node}", "--", "true"], "{node} in the command is no placeholder"),
        (["--nnodes", "2", "--head", "echo '", "--", "true"], "can't be split into words"),
        (["--nnodes", "2", "--head", " ", "--", "true"], "--head is empty"),
        (["--nnodes", "2", "--", "no-such-program"], "the program 'no-such-program' is not there"),
        (["--nnodes", "2", "--head", "no-such-program", "--", "true"], "the program 'no-such-program' is not there"),
        (["--nnodes", "2", "--", "/no/such/program"], "the program '/no/such/program' is not there"),
        (["--nnodes", "2", "--", "/tmp"], "the program '/tmp' is not there"),
        (["--nnodes", "1", "--mlx", "--", "true"], "--mlx needs --nnodes 2 or more"),
        (["--nnodes", "2", "-t", "-1", "--", "true"], "--timeout"),
        (["--nnodes", "2", "--secret-file", "/none", "--", "true"], "--secret-file"),
    ],
    ids=" ".join,
)
def test_bad_input_is_wrong_usage_before_a_packet(words: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", never)
    done = CliRunner().invoke(run, words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert text in done.stderr


@pytest.mark.parametrize(
    ("variables", "options", "text"),
    [
        ({"MINGLE_NODE_RANK": "2"}, [], "MINGLE_NODE_RANK='2' does not fit a job of 2 nodes"),
        ({"MINGLE_NODE_RANK": "1"}, ["--node-rank", "0"], "--node-rank=0 contradicts MINGLE_NODE_RANK='1'"),
        ({"JOB_COMPLETION_INDEX": "1"}, ["--node-rank", "0"], "--node-rank=0 contradicts Kubernetes Indexed Job's"),
    ],
)
def test_a_node_rank_of_the_environment_is_checked_as_well(
    variables: dict[str, str], options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(run, ["--nnodes", "2", *options, "--", "true"])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert text in done.stderr


def test_an_empty_job_id_of_the_environment_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGLE_JOB_ID", "")
    done = CliRunner().invoke(run, ["--nnodes", "2", "--", "true"])
    assert done.exit_code == 2
    assert "MINGLE_JOB_ID='' is empty" in done.stderr


def test_a_job_id_of_the_environment_that_is_too_long_is_not_blamed_on_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINGLE_JOB_ID", 256 * "x")  # a rank can use it
    done = CliRunner().invoke(run, ["--nnodes", "2", "--", "true"])
    assert done.exit_code == 2
    assert "mingle-run- with MINGLE_JOB_ID='mingle-run-xxx" in done.stderr
    assert "is 267 bytes long in UTF-8" in done.stderr
    assert "--job-id" not in done.stderr


def test_a_file_without_the_right_to_execute_it_is_wrong_usage(script: Path) -> None:
    done = CliRunner().invoke(run, ["--nnodes", "2", "--", str(script)])
    assert done.exit_code == 2
    assert "is not executable" in done.stderr
    assert f"chmod +x {script}" in done.stderr


def test_the_program_of_another_node_need_not_be_there() -> None:
    for words in (["--node-rank", "0", "--head", "true", "--", "no-such"], ["--head", "no-such", "--", "true"]):
        done = one("--nnodes", "1", *words)
        assert done.returncode == (0 if "--node-rank" in words else 2), done.stderr


def test_a_fixed_port_that_is_taken_is_wrong_usage_and_its_holder_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        code = f"import mingle.run.port as port; port.reserve({number})"
        done = subprocess.run(
            [sys.executable, "-c", code], env=command_environment(29499), capture_output=True, text=True, check=False
        )
        assert f"ConfigurationError: the program can't listen on port {number} (MASTER_PORT)" in done.stderr
        assert f"pid {os.getpid()}" in done.stderr
        words = ["--nnodes", "2", "--master-port", str(number), "--", "true"]
        assert CliRunner().invoke(run, words).exit_code == 2
        # Only node 0 needs the port.
        words = ["--nnodes", "2", "--node-rank", "1", "-t", "0.1", "--master-port", str(number), "--", "true"]
        assert CliRunner().invoke(run, words).exit_code == 1


def test_a_fixed_port_that_only_root_may_open_is_held_by_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_port: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(port, "_listen", refuse)
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


def test_more_machines_reach_the_port_than_the_kernel_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "BACKLOG", 0)  # a queue of one place
    keeper = port.PortKeeper(cast("Driver", None), cast("Any", None), port=None)
    server = keeper.open("127.0.0.1", b"session")
    try:
        for _ in range(4):
            connect_plainly(server.address, server.port).close()
    finally:
        server.release()
    assert "mingle-port" not in {thread.name for thread in threading.enumerate()}
    port.reserve(server.port).close()


def test_a_caller_that_does_not_hang_up_leaves_the_port_free_for_a_program_without_options() -> None:
    keeper = port.PortKeeper(cast("Driver", None), cast("Any", None), port=None)
    server = keeper.open("127.0.0.1", b"session")
    with connect_plainly(server.address, server.port) as caller, socket.socket() as program:
        with pytest.raises(ConnectionResetError):
            caller.recv(1)
        server.release()
        program.bind((server.address, server.port))


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
    monkeypatch.setattr(port, "_outside_ephemeral", lambda: [fixed] * port._TRIES)
    with port.hold(but=fixed) as other:
        assert other.getsockname()[1] != fixed


# --- the addresses of all machines ---------------------------------------------------------------------------------


def formation(address: str, interface: str = "eth0") -> Formation:
    return msgspec.structs.replace(lone_formation(b"", 4242), store_address=address, interface=interface)


def seat(rank: int, address: str) -> Seat:
    return Seat(
        rank=rank, local_rank=0, node_rank=rank, hostname="h", address=address, pid=1, program_port=20_001 + rank
    )


def test_a_machine_behind_nat_is_listed_by_the_address_that_reaches_it() -> None:
    places = addresses.places_of(formation("192.0.2.1"), [seat(0, "10.0.0.1"), seat(1, "192.0.2.2")])
    assert addresses.hosts(places) == "192.0.2.1,192.0.2.2"
    assert addresses.hostports(places) == "192.0.2.1:20001,192.0.2.2:20002"


def test_ipv6_addresses_have_brackets_before_a_port_and_link_local_ones_an_interface(tmp_path: Path) -> None:
    places = addresses.places_of(formation("fe80::1%eth0"), [seat(0, "fe80::1"), seat(1, "fe80::2")])
    assert addresses.hosts(places) == "fe80::1%eth0,fe80::2%eth0"
    assert addresses.hostports(places) == "[fe80::1%eth0]:20001,[fe80::2%eth0]:20002"
    assert addresses.write_hostfile(tmp_path, places).read_text() == "fe80::1%eth0\nfe80::2%eth0\n"
    with pytest.raises(MingleError, match="MLX's ring uses IPv4 only"):
        addresses.write_mlx_hostfile(tmp_path, places)


def test_a_machine_without_a_directory_for_files_is_told_of_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_options: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with pytest.raises(MingleError, match="export TMPDIR"), addresses.private_directory():
        pass


def test_help_and_version() -> None:
    shown = CliRunner().invoke(run, ["-h"])
    assert shown.exit_code == 0
    assert shown.output.startswith("Usage: mingle-run --nnodes N [OPTIONS] -- COMMAND [ARG]...")
    for option in ("--interface", "--peers", "--secret-file", "--timeout", "--head", "--keep-going", "--mlx"):
        assert option in shown.output
    assert "--json" not in shown.output
    assert CliRunner().invoke(run, ["--version"]).output.startswith("mingle-run ")


def test_options_after_the_program_are_its_own() -> None:
    done = one("--nnodes", "1", "echo", "--nnodes", "7", "-h")
    assert (done.returncode, done.stdout) == (0, "--nnodes 7 -h\n")


# --- one machine -------------------------------------------------------------------------------------------------


def one(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        env={**command_environment(29499), **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_one_machine_needs_no_network() -> None:
    done = one("--nnodes", "1", "--", "sh", "-c", "echo {master_addr} {node_rank} {nnodes} $NNODES; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "127.0.0.1 0 1 1\n", "")


def test_one_machine_is_told_everybodys_address() -> None:
    done = one("--nnodes", "1", "--", "sh", "-c", "echo {hosts} {hostports} {my_port}; cat {hostfile}")
    hosts, hostports, own, listed = done.stdout.split()
    assert (hosts, hostports, listed) == ("127.0.0.1", f"127.0.0.1:{own}", "127.0.0.1")


def test_an_error_calls_the_machines_nodes() -> None:
    done = one("--nnodes", "2", "--node-rank", "1", "--job-id", job_name("alone"), "-t", "3", "--", "true")
    assert (done.returncode, "rank" in done.stderr) == (1, False), done.stderr
    assert "1 of 2 nodes joined (" in done.stderr


def test_the_status_of_a_program_that_is_ended_by_a_signal_is_that_of_a_shell() -> None:
    assert one("--nnodes", "1", "--", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


def test_a_file_that_is_no_program_is_an_error_of_its_own(script: Path) -> None:
    script.write_text("nothing that a kernel starts")
    script.chmod(0o755)
    done = one("--nnodes", "1", "--", str(script))
    assert done.returncode == 1
    assert "can't be started: Exec format error" in done.stderr


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("crlf", "the interpreter in its first line does not exist"),
        ("crlf-{node_rank}", "crlf-0' is not there"),
    ],
)
def test_cause_names_why_a_program_can_not_start(script: Path, program: str, text: str) -> None:
    (script.parent / "crlf").write_bytes(b"#!/bin/sh\r\n")
    (script.parent / "crlf").chmod(0o755)
    done = one("--nnodes", "1", "--", f"{script.parent}/{program}")
    assert done.returncode in (1, 2)
    assert text in done.stderr


def test_a_limit_that_keeps_a_program_from_its_start_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_more: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("mingle.run.program._adopt_orphans", lambda: None)  # it would last for the tests' process
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(MingleError, match="a limit of the system"):
        Program().start(["true"], os.environ)


def test_the_program_gets_no_socket_and_no_signal_mask_of_ours_and_what_we_inherited() -> None:
    look = (
        "import json, os; files = ['/proc/self/fd/' + name for name in os.listdir('/proc/self/fd')];"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'));"
        "links = [os.readlink(file) for file in files if os.path.exists(file)];"
        "print(json.dumps([links, [int(status[n], 16) for n in ('SigBlk', 'SigIgn')], os.getsid(0) == os.getpid()]))"
    )
    udp = free_udp_port()
    inherited = int(Path("/proc/self/status").read_text(encoding="ascii").partition("SigIgn:")[2].split()[0], 16)
    read, write = os.pipe()
    try:
        nodes = [
            subprocess.Popen(
                [*COMMAND, "--nnodes", "2", "--node-rank", rank, "--job-id", "test", "--", sys.executable, "-c", look],
                env=command_environment(udp),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=[write],
                text=True,
            )
            for rank in "01"
        ]
        for node in nodes:
            links, (blocked, ignored), leads = json.loads(node.communicate(timeout=60)[0])
            assert not [link for link in links if "socket" in link or "eventpoll" in link]
            assert f"pipe:[{os.fstat(write).st_ino}]" in links
            # CPython itself ignores these two.
            own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
            assert (blocked, ignored & ~own, leads) == (0, inherited & ~own, True)
    finally:
        os.close(read)
        os.close(write)


def test_mingle_run_loads_neither_torch_nor_rich() -> None:
    code = (
        "import sys, mingle.run.command as command, mingle.run.session, mingle.run.port\n"
        "try:\n    command.run(['--nnodes', '1', '--', 'true'])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "loaded = {'torch', 'rich', 'numpy'} & {*sys.modules}; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], env=command_environment(29499), check=True, timeout=60)


def test_lines_that_differ_are_not_blamed_on_a_job_id_that_nobody_gave() -> None:
    port = free_udp_port()
    with subprocess.Popen(
        [*COMMAND, "-vv", "--nnodes", "2", "-t", "60", "--", "echo", "one"],
        env=command_environment(port),
        stderr=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stderr is not None
        while "seeking" not in (line := other.stderr.readline()):
            assert line
        done = one("--nnodes", "2", "-t", "3", "--", "echo", "two", MINGLE_PORT=str(port))
        other.terminate()
    assert f"the command lines differ: host {socket.gethostname()}" in done.stderr
    assert "type the same line on every machine" in done.stderr
    assert "same job id" not in done.stderr


# --- several machines --------------------------------------------------------------------------------------------


class Nodes:
    """Several `mingle-run` of one job on `lo`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.udp = free_udp_port()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: str, count: int = 3, given: Sequence[int | None] | None = None, **more: str) -> None:
        """Start as many as there are given node ranks, by default all of them; None: it is assigned."""
        for rank in range(count) if given is None else given:
            place = [] if rank is None else ["--node-rank", str(rank)]
            line = ["--nnodes", str(count), "--job-id", "test", *place, *words]
            self.processes.append(
                subprocess.Popen(
                    [*COMMAND, *line],
                    env={**command_environment(self.udp), **more},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=self.folder,
                )
            )

    def started(self, count: int | None = None) -> list[int]:
        """Wait until every program has written its pid to the file of its node, and return them by node rank."""
        names = [self.folder / f"pid{rank}" for rank in range(len(self.processes) if count is None else count)]
        until(lambda: all(name.exists() and name.read_text().endswith("\n") for name in names), 60)
        return [int(name.read_text()) for name in names]

    def wait_for_words(self, words: str) -> None:
        """Wait until one of them has written these words to stderr; `ended` returns what follows."""
        errors = {process.stderr: b"" for process in self.processes if process.stderr is not None}
        while not any(words.encode() in said for said in errors.values()):
            readable, _, _ = select.select(list(errors), [], [], 60)
            assert readable, errors
            for stream in readable:
                errors[stream] += os.read(stream.fileno(), 65536)

    def ended(self, seconds: float = 60) -> list[tuple[int, str, str]]:
        """Return status, output and errors of each."""
        done = []
        for process in self.processes:
            output, errors = process.communicate(timeout=seconds)
            done.append((process.returncode, output, errors))
        return done


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        yield made
    finally:
        if any(process.poll() is None for process in made.processes):
            for name in tmp_path.glob("pid*"):  # a stopped program does not end with its mingle-run, and holds the pipe
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.killpg(int(name.read_text()), signal.SIGKILL)
        for process in made.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


SAY = "echo $$ > pid{node_rank}; "


def test_machines_are_assigned_node_ranks_and_told_one_address(nodes: Nodes) -> None:
    show = 'echo "$NODE_RANK $NNODES $MASTER_ADDR:$MASTER_PORT $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME '
    nodes.start(
        "--",
        "sh",
        "-c",
        show + '{node_rank} {nnodes} {master_addr}:{master_port} {address} {interface}"',
        given=[None] * 3,
    )
    done = nodes.ended()
    assert [status for status, _, _ in done] == [0, 0, 0]
    said = sorted(output.split() for _, output, _ in done)
    (place,) = {words[2] for words in said}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", place)
    assert said == [[str(rank), "3", place, "lo", "=lo", str(rank), "3", place, "127.0.0.1", "lo"] for rank in range(3)]


EVERYBODY = """\
import json, os, socket, stat, sys
hosts, hostfile, hostports, own = sys.argv[1:]
file, names = hostfile, ("MLX_RANK", "VLLM_HOST_IP", "SGLANG_HOST_IP", "HOST_IP")
with socket.socket() as server:
    server.bind(("127.0.0.1", int(own)))  # without SO_REUSEADDR
print(json.dumps({
    "rank": int(os.environ["NODE_RANK"]), "hosts": hosts, "hostports": hostports, "own": own, "file": file,
    "same": [os.environ["MINGLE_HOSTS"] == hosts, os.environ["MINGLE_HOSTFILE"] == hostfile],
    "lines": open(file).read().splitlines(), "ring": json.load(open(os.environ["MLX_HOSTFILE"])),
    "modes": [stat.S_IMODE(os.stat(path).st_mode) for path in (os.path.dirname(file), file)],
    "told": [os.environ[name] for name in names],
}))
"""


def test_every_machine_is_told_the_addresses_and_ports_of_all(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "everybody.py").write_text(EVERYBODY)
    words = [sys.executable, "everybody.py", "{hosts}", "{hostfile}", "{hostports}", "{my_port}"]
    nodes.start("--mlx", "--", *words, given=[None] * 3, TMPDIR=str(tmp_path), VLLM_HOST_IP="192.0.2.9", HOST_IP="")
    done = nodes.ended()
    assert [(status, errors) for status, _, errors in done] == [(0, "")] * 3
    said = sorted((json.loads(output) for _, output, _ in done), key=lambda each: int(each["rank"]))
    ports = [each["own"] for each in said]
    assert len(set(ports)) == 3
    for rank, each in enumerate(said):
        file = Path(each["file"])
        assert file.parent.parent == tmp_path
        assert not file.parent.exists()
        assert each == {
            "rank": rank,
            "own": ports[rank],
            "file": str(file),
            "hosts": "127.0.0.1,127.0.0.1,127.0.0.1",
            "hostports": ",".join(f"127.0.0.1:{number}" for number in ports),
            "same": [True, True],
            "lines": ["127.0.0.1"] * 3,
            "ring": [[f"127.0.0.1:{number}"] for number in ports],
            "modes": [0o700, 0o600],
            "told": [str(rank), "192.0.2.9", "127.0.0.1", "127.0.0.1"],
        }


@pytest.mark.parametrize("end", ["fails", "SIGTERM", "SIGTERM before the start"])
def test_the_host_file_is_gone_at_the_end(nodes: Nodes, tmp_path: Path, end: str) -> None:
    def files() -> list[Path]:
        return list(tmp_path.glob("mingle-run-*"))

    waits = end == "SIGTERM before the start"
    given = [0] if waits else [0, 1]
    nodes.start(
        "--",
        "sh",
        "-c",
        SAY + "until test -e go; do sleep 0.05; done; exit 5",
        given=given,
        count=2,
        TMPDIR=str(tmp_path),
    )
    until(lambda: len(files()) == len(given), 60)
    if not waits:
        nodes.started()
    if end == "fails":
        (tmp_path / "go").touch()
    else:
        nodes.processes[0].send_signal(signal.SIGTERM)
    assert 0 not in [status for status, _, _ in nodes.ended()]
    assert files() == []


def test_machines_that_wait_for_others_need_no_torch(nodes: Nodes) -> None:
    """A rank connects to rank 0's store while it waits. A machine must not: that takes torch."""
    modules = nodes.folder / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text("raise ImportError('torch is not installed')")
    without_torch = {"PYTHONPATH": f"{modules}:{ROOT / 'src'}"}
    nodes.start("-vv", "--", "true", given=[0, 1], count=3, **without_torch)
    nodes.wait_for_words("2/3 joined")  # of the one that hosts until all are there
    time.sleep(AHEAD_SECONDS + 0.5)  # a store that is not opened gives no notice
    nodes.start("--", "true", given=[2], count=3, **without_torch)
    assert [(status, errors) for status, _, errors in nodes.ended() if status] == []


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


def test_a_program_that_fails_ends_those_of_the_other_machines(nodes: Nodes) -> None:
    nodes.start(
        "--head", f"sh -c '{SAY} sleep 100'", "--", "sh", "-c", SAY + "test {node_rank} = 1 && exit 3; sleep 100"
    )
    done = nodes.ended()
    assert [status for status, _, _ in done] == [128 + signal.SIGTERM, 3, 128 + signal.SIGTERM]
    assert "the command ended with status 3; those of the other machines are ended, too" in done[1][2]
    for number in (0, 2):
        assert f"node 1 on host {socket.gethostname()} (127.0.0.1), pid " in done[number][2]
        assert ": its command ended with status 3" in done[number][2]
        assert "likely cause: " in done[number][2]


def test_failure_of_node_0_names_it_and_its_status(nodes: Nodes) -> None:
    nodes.start("--head", "sh -c 'exit 4'", "--", "sleep", "100")
    done = nodes.ended()
    assert [status for status, _, _ in done] == [4, 128 + signal.SIGTERM, 128 + signal.SIGTERM]
    assert f"node 0 on host {socket.gethostname()}: its command ended with status 4" in done[2][2]


def test_a_program_that_ignores_sigterm_is_killed_with_its_children(nodes: Nodes) -> None:
    stubborn = f"trap '' TERM; {SAY} (trap '' TERM; echo > child{{node_rank}}; while :; do sleep 0.1; done) & wait"
    head = f"{SAY} until test -e child1 -a -e child2; do sleep 0.05; done; kill -9 $$"
    patched = nodes.folder / "sitecustomize.py"
    patched.write_text("import mingle.run.program as program\nprogram.GRACE_SECONDS = 0.5\n")
    path = os.pathsep.join([str(nodes.folder), command_environment(29499)["PYTHONPATH"]])
    nodes.start("--head", f"sh -c '{head}'", "--", "sh", "-c", stubborn, PYTHONPATH=path)
    pids = nodes.started()
    done = nodes.ended()
    assert [status for status, _, _ in done] == [128 + signal.SIGKILL] * 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)


def test_with_keep_going_a_failure_ends_no_other_program(nodes: Nodes) -> None:
    # Node 0 fails first, and goes on keeping the others together.
    nodes.start(
        "--keep-going", "--", "sh", "-c", SAY + "test {node_rank} = 2 || exit 3; until test -e go; do sleep 0.05; done"
    )
    nodes.started()
    assert nodes.processes[1].wait(60) == 3
    assert nodes.processes[2].poll() is None
    (nodes.folder / "go").touch()
    assert [status for status, _, _ in nodes.ended()] == [3, 3, 0]


def test_with_keep_going_a_lost_machine_is_told_and_ends_nothing(nodes: Nodes) -> None:
    nodes.start("--keep-going", "--", "sh", "-c", SAY + "until test -e go; do sleep 0.05; done")
    pids = nodes.started()
    nodes.processes[0].kill()
    until(lambda: _ended(pids[0]))
    (nodes.folder / "go").touch()
    done = nodes.ended()
    assert [status for status, _, _ in done] == [-signal.SIGKILL, 0, 0]


def _ended(pid: int) -> bool:
    """Whether a process has ended; whoever adopted it need not have reaped it yet."""
    try:
        return state(pid) == "Z"
    except FileNotFoundError:
        return True


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_mingle_run_that_is_killed_ends_its_program_and_the_others(nodes: Nodes, victim: int) -> None:
    nodes.start("--", "sh", "-c", SAY + "exec sleep 100")
    pids = nodes.started()
    nodes.processes[victim].kill()
    done = nodes.ended()
    assert [status for status, _, _ in done] == [
        -signal.SIGKILL if number == victim else 128 + signal.SIGTERM for number in range(3)
    ]
    for number, (_, _, errors) in enumerate(done):
        if number != victim:
            assert f"node {victim} " in errors
            assert "is lost" in errors
    until(lambda: all(_ended(pid) for pid in pids))


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_signal_goes_to_the_program_and_its_end_ends_the_others(nodes: Nodes, number: str) -> None:
    trap = f"trap 'echo caught; exit 0' {number[3:]}; {SAY} while :; do sleep 0.05; done"
    nodes.start("--", "sh", "-c", trap)
    nodes.started()
    nodes.processes[1].send_signal(getattr(signal, number))
    done = nodes.ended()
    # The program has ended well, and the job has not: it was asked to end.
    assert done[1][:2] == (0, "caught\n")
    assert [done[0][0], done[2][0]] == [128 + signal.SIGTERM, 128 + signal.SIGTERM] or number == "SIGTERM"
    assert f"its command ended with status 0 after {number}" in done[0][2]
    assert f"its command ended with status 0 after {number}" in done[2][2]


def test_other_signals_are_handed_on(nodes: Nodes) -> None:
    nodes.start("--", "sh", "-c", f"trap 'exit 0' USR1; {SAY} while :; do sleep 0.05; done", count=2)
    nodes.started()
    for process in nodes.processes:
        process.send_signal(signal.SIGUSR1)
    assert [status for status, _, _ in nodes.ended()] == [0, 0]


def test_a_program_is_suspended_and_continued_with_mingle_run(nodes: Nodes) -> None:
    # No command in a loop: a shell waits in vfork until its child calls exec, and a child that is stopped never does.
    os.mkfifo(nodes.folder / "go")
    nodes.start("--", "sh", "-c", SAY + "read line < go", count=2)
    pids = nodes.started()
    nodes.processes[0].send_signal(signal.SIGTSTP)
    until(lambda: state(pids[0]) == "T" and state(nodes.processes[0].pid) == "T")
    nodes.processes[0].send_signal(signal.SIGCONT)
    until(lambda: state(pids[0]) != "T")
    go = os.open(nodes.folder / "go", os.O_RDWR)
    try:
        os.write(go, b"\n\n")
        assert [status for status, _, _ in nodes.ended()] == [0, 0]
    finally:
        os.close(go)


def test_a_suspension_during_the_start_reaches_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, stopped = subprocess.Popen, set()

    def interrupted(*words: object, **more: object) -> object:
        process = popen(*words, **more)  # type: ignore[call-overload]
        signal.raise_signal(signal.SIGTSTP)
        return process

    program = Program()
    with program.signals(), monkeypatch.context() as patched:
        patched.setattr("mingle.run.program._adopt_orphans", lambda: None)  # it would last for the tests' process
        patched.setattr(subprocess, "Popen", interrupted)
        patched.setattr(os, "kill", lambda pid, number: stopped.add((pid, number)))
        patched.setattr(os, "killpg", lambda pid, number: stopped.add((pid, number)))
        program.start(["true"], os.environ)
    assert program.wait() == 0
    assert program._process is not None
    assert stopped == {(pid, signal.SIGSTOP) for pid in (os.getpid(), program._process.pid)}


def test_an_ignored_signal_stays_ignored(nodes: Nodes) -> None:
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        nodes.start("--", "sh", "-c", SAY + "until test -e go; do sleep 0.05; done", count=2)
    finally:
        signal.signal(signal.SIGHUP, before)
    nodes.started()
    for process in nodes.processes:
        process.send_signal(signal.SIGHUP)
    (nodes.folder / "go").touch()
    assert [(status, errors) for status, _, errors in nodes.ended()] == [(0, "")] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_the_others(nodes: Nodes, number: int) -> None:
    nodes.start("-vv", "--", "true", given=[0, 1])
    for process in nodes.processes:
        assert process.stderr is not None
        while "2/3 joined" not in (line := process.stderr.readline()) and "seated" not in line:
            assert line
    for process in nodes.processes:
        process.send_signal(number)
    assert [status for status, _, _ in nodes.ended()] == [128 + number] * 2


def test_node_0_waits_for_the_programs_of_the_others(nodes: Nodes) -> None:
    nodes.start(
        "--head", f"sh -c '{SAY}'", "--", "sh", "-c", SAY + "until test -e go; do sleep 0.05; done; exit {node_rank}"
    )
    nodes.started()
    errors = nodes.processes[0].stderr
    assert errors is not None
    assert "the command of node 0 has ended; waiting" in errors.readline()
    (nodes.folder / "go").touch()
    # Its own status is not 0 then, although its own command has succeeded: the job has failed.
    assert sorted(status for status, _, _ in nodes.ended()) in ([1, 1, 2], [1, 1, 143], [1, 2, 143])


def test_ctrl_c_on_a_node_0_that_waits_ends_the_others(nodes: Nodes) -> None:
    nodes.start("--head", f"sh -c '{SAY}'", "--", "sh", "-c", SAY + "exec sleep 100")
    nodes.started()
    errors = nodes.processes[0].stderr
    assert errors is not None
    assert "the command of node 0 has ended; waiting" in errors.readline()
    nodes.processes[0].send_signal(signal.SIGINT)
    assert [status for status, _, _ in nodes.ended()] == [130, 143, 143]


def test_leftovers_of_a_failed_program_are_ended(nodes: Nodes) -> None:
    """Also in a session of its own, as the workers of a torchrun that was killed."""
    nodes.start("--", "sh", "-c", "setsid sleep 100 & echo $! > pid{node_rank}; kill -9 $$", count=1)
    assert nodes.ended()[0][0] == 128 + signal.SIGKILL
    assert _ended(*nodes.started())


@pytest.mark.parametrize("count", [1, 2])
def test_leftovers_of_an_interrupted_program_are_ended(nodes: Nodes, count: int) -> None:
    script = "trap 'exit 0' TERM; setsid sleep 30 >/dev/null 2>&1 & echo $! > pid{node_rank}; wait"
    nodes.start("--", "sh", "-c", script, count=count)
    sleepers = nodes.started()
    nodes.processes[0].send_signal(signal.SIGTERM)
    assert nodes.ended()[0][0] == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in sleepers))


def test_orphans_are_reaped_while_the_program_runs(nodes: Nodes) -> None:
    orphan = "(sh -c 'echo $$ > orphan; until test -e go; do sleep 0.05; done' &)"
    nodes.start("--", "sh", "-c", f"{orphan}; echo $$ > pid0; until test -e end; do sleep 0.05; done", count=1)
    nodes.started()
    until(lambda: (nodes.folder / "orphan").exists() and (nodes.folder / "orphan").read_text())
    pid = int((nodes.folder / "orphan").read_text())
    assert state(pid) != "Z"
    (nodes.folder / "go").touch()
    until(lambda: not Path(f"/proc/{pid}").exists())
    (nodes.folder / "end").touch()
    assert nodes.ended()[0][0] == 0


def test_a_closed_stderr_keeps_no_failure_from_the_others(nodes: Nodes) -> None:
    nodes.start("--head", f"sh -c '{SAY} until test -e go; do sleep 0.05; done; exit 3'", "--", "sleep", "100", count=2)
    nodes.started(1)
    assert nodes.processes[0].stderr is not None
    nodes.processes[0].stderr.close()
    (nodes.folder / "go").touch()
    assert nodes.processes[0].wait(60) == 3
    assert nodes.processes[1].wait(60) == 128 + signal.SIGTERM
    nodes.processes[0].stderr = None


def test_a_log_whose_reader_is_gone_ends_nothing(nodes: Nodes) -> None:
    nodes.start("-vv", "--", "true", given=[0], count=2)
    (node_0,) = nodes.processes
    assert node_0.stderr is not None
    assert node_0.stderr.readline()
    node_0.stderr.close()
    nodes.start("--", "true", given=[1], count=2)
    assert [process.wait(60) for process in nodes.processes] == [0, 0]
    node_0.stderr = None


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_the_status_is_that_of_the_program_also_without_a_standard_stream(closed: str) -> None:
    command = f'"{sys.executable}" -m mingle.run.command --nnodes 1 -- true {closed}>&-'
    assert subprocess.run(command, shell=True, env=command_environment(29499), timeout=60, check=False).returncode == 0


def test_daemons_that_a_program_leaves_behind_live_on(nodes: Nodes) -> None:
    """As Ray's `ray start` has it."""
    nodes.start("--", "sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $! > pid{node_rank}", count=2)
    assert [status for status, _, _ in nodes.ended()] == [0, 0]
    for pid in nodes.started():
        os.kill(pid, signal.SIGKILL)  # raises if it has ended


def test_a_node_rank_that_is_given_twice_is_a_conflict(nodes: Nodes) -> None:
    nodes.start("-t", "15", "--", "true", given=[0, 1, 1])
    refused = next(iter(done for done in _in_order_of_end(nodes)))
    assert refused[0] == 1
    assert "node rank taken (node rank 1 is held by another live node)" in refused[1]
    assert "give each machine its own node rank" in refused[1]
    for process in nodes.processes:
        process.send_signal(signal.SIGINT)


def _in_order_of_end(nodes: Nodes) -> Iterator[tuple[int, str]]:
    while True:
        ended = [process for process in nodes.processes if process.poll() is not None]
        for process in ended:
            nodes.processes.remove(process)
            yield process.returncode, process.communicate()[1]
        time.sleep(0.02)


def test_a_port_that_another_program_took_is_named(nodes: Nodes) -> None:
    """The program of node 0 can't bind it, and mingle-run says who holds it."""
    nodes.start("--", "sh", "-c", "echo {master_port} > pid0; until test -e go; do sleep 0.05; done; exit 9", count=1)
    (number,) = nodes.started()
    with socket.create_server(("127.0.0.1", number)):
        (nodes.folder / "go").touch()
        ((status, _, errors),) = nodes.ended()
    assert status == 9
    assert f"the program can't listen on port {number} (MASTER_PORT) of this machine" in errors
    assert f"pid {os.getpid()}" in errors
