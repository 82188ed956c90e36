"""From a call to a job: what is refused before any packet, a rank alone, one call at a time, and what is left."""

from __future__ import annotations

import gc
import linecache
import logging
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec import structs
from rich.pretty import pretty_repr

import mingle
from mingle import records
from mingle.config import placement
from mingle.distributed import gloo, rendezvous
from mingle.distributed.environment import process_environment
from mingle.distributed.session import LoneSession
from mingle.distributed.url_scheme import rendezvous_handler
from mingle.engine import discovery, party, progress, store
from mingle.engine.discovery import Discovery
from mingle.engine.driver import Driver
from mingle.engine.party import process_identity
from mingle.errors import ConfigurationError, DiscoveryTimeoutError, InterfaceError, MingleError
from mingle.forksafe import Closable
from mingle.network import interfaces
from mingle.network.interfaces import Interface
from mingle.protocol.explain.observations import NetworkFacts
from mingle.protocol.machine import Formation, lone_formation
from mingle.wire.frame_codec import encode_frame
from tests.support.alarms import alarm_after
from tests.support.children import held_by_another_thread, in_child
from tests.support.failing import raising
from tests.support.frames import read
from tests.support.in_process import discovery_of, settings_of
from tests.support.launcher_environments import TORCHRUN
from tests.support.loopback import answers, busy_port, job_name, longer, until
from tests.support.ports import free_udp_port


def alone(what: str) -> mingle.Job:
    return mingle.discover(job_name(what), rank=0, world_size=1)


def through(door: str, rank: int) -> None:
    """Call as this rank of two."""
    if door == "rendezvous_handler":
        next(rendezvous_handler(f"mingle://resnet?rank={rank}&world_size=2"))
    else:
        getattr(mingle, door)("resnet", rank=rank, world_size=2)


doors = pytest.mark.parametrize("door", ["init", "discover", "rendezvous_handler"])


def frames_of(error: BaseException) -> list[str]:
    """Return the functions in a traceback, from the test on."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.usefixtures("no_packet")
@doors
def test_a_traceback_has_no_frames_of_ours_but_the_entry_point(door: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mingle"), pytest.raises(ConfigurationError) as caught:
        through(door, rank=2)
    assert frames_of(caught.value)[1:] == ["through", door]
    assert "in resolve" in str(caplog.text), "the log has the others"


@pytest.mark.parametrize(("rank", "state"), [(0, "1/2 joined, waiting for rank 1"), (1, "looking for rank 0")])
def test_control_c_while_waiting_is_one_line_and_a_short_traceback(
    rank: int, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted_after(seconds: float) -> str:
        caplog.clear()
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt) as caught, alarm_after(0.3 * seconds):
                mingle.init(job_name("stopped"), rank=rank, world_size=2, port=free_udp_port(), interface="lo")
        finally:
            signal.signal(signal.SIGALRM, before)
        assert frames_of(caught.value)[1:] == ["init"]
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) <= 1
        return said[0] if said else ""  # the signal came before the wait

    said = longer(interrupted_after, lambda said: state in said)
    assert re.search(rf": interrupted: {re.escape(state)} · \d+ s$", said)


@doors
def test_control_c_during_the_end_of_a_failed_call_keeps_the_failure(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "form", raising(RuntimeError("a defect")))
    monkeypatch.setattr(rendezvous, "end_session", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as caught:
        through(door, rank=1)
    assert "RuntimeError: a defect" in "".join(traceback.format_exception(caught.value))


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_packet")
def test_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (*interfaces.scan(), Interface("bare0", 77, ()))
    monkeypatch.setattr(interfaces, "scan", lambda: found)
    with pytest.raises(InterfaceError, match="bare0"):
        mingle.discover("resnet", rank=1, world_size=2, interface="bare0")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fixed_port_that_is_taken_is_told_before_anybody_waits(world_size: int) -> None:
    with busy_port() as taken, pytest.raises(ConfigurationError, match=f":{taken}: Address already in use"):
        mingle.discover("port", rank=0, world_size=world_size, master_port=taken, port=free_udp_port())


@pytest.mark.parametrize(
    ("secret", "more"),
    [
        ("tell nobody", {"rank": 7}),
        (b"tell nobody", {"discovery_timeout": "soon"}),
        ("tell nobody", {"interface": "nosuch0"}),
        ("tell nobody", {"discovery_timeout": 0.1, "family": "4"}),
        ("tell nobody \udfff", {}),
        (["tell nobody"], {}),
    ],
    ids=["place", "settings", "interface", "timeout", "no text", "another type"],
)
@pytest.mark.parametrize("door", ["discover", "init"])
def test_a_traceback_that_shows_local_variables_does_not_show_the_secret(
    door: str, secret: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mingle, "cut_frames", lambda error: None)  # the log has them at DEBUG
    arguments = {"rank": 1, "world_size": 2, "port": free_udp_port(), **more}
    with pytest.raises(MingleError) as caught:
        getattr(mingle, door)("guarded", secret=secret, **arguments)
    ours = [entry.frame for entry in caught.traceback if entry.frame.f_globals.get("__name__", "").startswith("mingle")]
    assert len(ours) > 2
    for frame in ours:
        assert "tell nobody" not in repr(frame.f_locals) + pretty_repr(frame.f_locals), frame.code.name
    error: BaseException | None = caught.value
    while error is not None:  # also the ones that are hidden by "from None" are in a debugger
        assert "tell nobody" not in repr(error) + repr(vars(error))
        error = error.__context__


def test_an_environment_that_cannot_be_written_ends_the_session(
    opened: list[store.StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_environment, "export", raising(OSError("no memory for another variable")))
    with pytest.raises(OSError, match="no memory"):
        alone("export")
    assert [each.held for each in opened] == [False]


# --- alone ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_packet")
def test_a_rank_alone_needs_no_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "9")
    before = dict(os.environ)
    with alone("alone") as job:
        assert (job.rank, job.world_size, job.local_rank, job.local_world_size) == (0, 1, 0, 1)
        assert (job.node_rank, job.num_nodes, job.interface, job.address) == (0, 1, "lo", "127.0.0.1")
        (member,) = job.members
        assert (member.rank, member.pid, member.address) == (0, os.getpid(), "127.0.0.1")
        assert socket.gethostname().startswith(member.hostname)
        exported = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")}
        assert exported == {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        assert os.environ["MASTER_PORT"] == str(job.master_port)
        assert answers(job.master_port)
        assert job.elapsed < 60
    assert dict(os.environ) == before
    until(lambda: not answers(job.master_port))


OMPI_RANKS = dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0")


@pytest.mark.usefixtures("no_packet")
@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE"),
        ({"MINGLE_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, "MINGLE_WORLD_SIZE"),
        (dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "WORLD_SIZE"), "1") | OMPI_RANKS, None),
        ({}, None),
    ],
)
def test_a_variable_that_leaves_a_rank_alone_is_named(
    variables: dict[str, str], named: str | None, monkeypatch: pytest.MonkeyPatch, said: list[tuple[int, str]]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    mingle.discover(job_name("alone"), **({} if variables else {"world_size": 1}))
    told = [(level, text) for level, text in said if "runs alone" in text]
    assert [level for level, _ in told] == ([] if named is None else [logging.INFO])
    assert all(f"since {named} is 1; " in text for _, text in told)


def test_a_foreign_address_is_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, said: list[tuple[int, str]]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.9")
    with mingle.discover("replaced", rank=0, world_size=1):
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    ((level, text),) = said
    assert level == logging.WARNING
    assert "job replaced: MASTER_ADDR=192.0.2.9" in text


# --- two ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks(rank: int) -> None:
    job_id, port = job_name("two"), free_udp_port()
    other = discovery_of(settings_of(job_id, 1 - rank, 2, port))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(other.run)
        with mingle.discover(job_id, rank=rank, world_size=2, port=port, family="4", discovery_timeout=60) as job:
            formation = running.result(30)
            assert (formation.store_address, formation.store_port) == (job.master_addr, job.master_port)
            assert [member.rank for member in job.members] == [0, 1]
            assert (job.rank, job.local_rank, job.local_world_size, job.num_nodes) == (rank, rank, 2, 1)
            assert os.environ["LOCAL_RANK"] == str(rank)
        other.close("the test is over")
    assert "LOCAL_RANK" not in os.environ


def test_a_signal_handlers_exception_just_after_go_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would wait in `init_process_group` for a rank that has gone, until torch's timeout."""
    job_id, port = job_name("alarm"), free_udp_port()
    host = discovery_of(settings_of(job_id, 0, 2, port))
    losses: list[str] = []
    monkeypatch.setattr(host, "say", lambda _level, text, _error=None: losses.append(text))
    flush = records.flush

    def handle_signal() -> None:
        flush()
        if threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(records, "flush", flush)
            raise InterruptedError

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(host.run)
        monkeypatch.setattr(records, "flush", handle_signal)  # the last that a call does before its session is held
        with pytest.raises(InterruptedError):
            mingle.init(job_id, rank=1, world_size=2, port=port, interface="lo", discovery_timeout=60)
        running.result(30)
        assert host.stores.server is not None
        until(lambda: not host.stores.server.held)
    host.close("the test is over")
    (lost,) = losses
    assert "rank 1" in lost
    assert "its store is closed" in lost


# --- one at a time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_garbage_collector_pauses_during_a_call_and_is_then_as_before(
    collects: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def form(*_: object, **__: object) -> tuple[None, None]:
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("as asked for")
        return None, None

    monkeypatch.setattr(rendezvous, "form", form)
    if not collects:
        gc.disable()
    try:
        with pytest.raises(RuntimeError) if fails else nullcontext():
            alone("collector")
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert seen == [False]


def test_a_rank_that_waits_collects_garbage_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    collects = threading.Event()

    class Progress(progress.Progress):
        def show(self, machine: progress.Shown, now: float, facts: Callable[[], NetworkFacts]) -> None:
            super().show(machine, now, facts)
            if gc.isenabled():
                collects.set()

    monkeypatch.setattr(party, "Progress", Progress)
    monkeypatch.setattr(discovery, "COLLECTOR_PAUSE_SECONDS", 0.05)
    with pytest.raises(DiscoveryTimeoutError):
        mingle.discover(job_name("collects"), rank=1, world_size=2, port=free_udp_port(), discovery_timeout=4.0)
    assert collects.is_set()


def test_a_second_thread_is_refused_and_leaves_the_pause_of_the_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two steps of that pause, it would leave the collector off for ever."""
    disable, seen = gc.disable, []

    def disable_later() -> None:
        for step in (lambda: None, disable):
            step()
            with pytest.raises(ConfigurationError, match="already discovering"):
                pool.submit(alone, "second").result(30)
            seen.append(gc.isenabled())

    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(gc, "disable", disable_later)
            alone("first").close()
        pool.submit(alone, "third").result(30).close()
    assert seen == [True, False]
    assert gc.isenabled()


def test_a_close_that_is_interrupted_restores_the_environment_when_it_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dict(os.environ)
    job = alone("interrupted")
    with monkeypatch.context() as patch:
        patch.setattr(process_environment, "restore", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            job.close()
    job.close()
    assert dict(os.environ) == before


@pytest.mark.parametrize("ended", [False, True], ids=["its thread calls again", "its thread has ended"])
def test_a_call_that_was_interrupted_before_it_could_tidy_up_blocks_no_other(ended: bool) -> None:
    """Ctrl-C may come between any two steps, and a notebook's cell is run again."""
    left_over = rendezvous.one_call()
    if ended:
        thread = threading.Thread(target=left_over.__enter__)
        thread.start()
        thread.join()
    else:
        left_over.__enter__()
    with alone("again") as job:
        assert job.rank == 0


def interrupted(call: Callable[[], Closable], line: int) -> str | None:
    """Call, with a KeyboardInterrupt at the n-th line that mingle runs in this thread from the loop's start on.

    Returns where that was; None: the call has so few lines, and its job is closed.
    """
    passed = -1
    begun = False
    place: str | None = None

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed, begun, place
        if not frame.f_globals.get("__name__", "").startswith(
            ("mingle.distributed", "mingle.engine.discovery", "mingle.engine.party", "mingle.job")
        ):
            return None
        # The end of a with block counts as its first line, before the call of __exit__: no signal comes in between.
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and begun and not source.lstrip().startswith("with "):
            passed += 1
            if passed == line:
                sys.settrace(None)
                place = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        begun = begun or frame.f_code in (Discovery.run.__code__, rendezvous._form_alone.__code__)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job = call()
        sys.settrace(before)
        job.close()
    except KeyboardInterrupt:
        assert place is not None
    finally:
        sys.settrace(before)
    return place


def interrupted_everywhere(
    arrange: Callable[[], AbstractContextManager[Callable[[], Closable]]], *, step: int
) -> set[str]:
    """Interrupt a call at each line or each few; return the functions in which it was.

    The next cell of a notebook must neither wait for what the interrupted one has left, nor be refused. Each test of
    ours looks for threads and sockets at its end.
    """
    before, functions = dict(os.environ), set[str]()
    for line in count(step=step):
        with arrange() as call:
            place = interrupted(call, line)
        assert gc.isenabled(), place
        assert rendezvous._active is None, place
        assert dict(os.environ) == before, place
        assert not torch.distributed.is_initialized(), place
        if place is None:
            break
        functions.add(place.partition(":")[0])
    return functions


def through_discover() -> Closable:
    with pytest.MonkeyPatch.context() as patch:
        # Nobody asks for the store here, and torch takes longer to open one than all the rest.
        patch.setattr(store, "open_server", lambda *_: store.StoreServer("127.0.0.1", 1, b"S" * 16, "token"))
        return alone("discover")


def through_init() -> Closable:
    return mingle.init(job_name("init"), rank=0, world_size=1, backend="gloo")


def through_the_url() -> Closable:
    handing_out = rendezvous_handler("mingle://alone?rank=0&world_size=1")
    next(handing_out)
    return SimpleNamespace(close=rendezvous.end_session, kept_as_torch_does=handing_out)


@pytest.mark.parametrize(("door", "step"), [(through_discover, 1), (through_init, 9), (through_the_url, 9)])
def test_an_interrupt_at_any_line_of_a_rank_alone_leaves_nothing(door: Callable[[], Closable], step: int) -> None:
    assert len(interrupted_everywhere(lambda: nullcontext(door), step=step)) > 5


@pytest.mark.parametrize("step", [9, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_at_any_line_from_the_start_of_the_loop_leaves_nothing(rank: int, step: int) -> None:
    @contextmanager
    def beside_another() -> Iterator[Callable[[], Closable]]:
        job_id, port = job_name("two"), free_udp_port()
        other = discovery_of(settings_of(job_id, 1 - rank, 2, port))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(other.run)
            yield partial(mingle.discover, job_id, rank=rank, world_size=2, port=port, family="4", discovery_timeout=60)
            other.close("the test is over")
            running.exception(30)

    assert len(interrupted_everywhere(beside_another, step=step)) > 1  # of a short function no step need be a line


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_forked_while_another_thread_is_in_our_code_can_call_and_leaves_its_parents_job_alone() -> None:
    """A DataLoader forks its workers while a thread of the rank reads ``job.members`` or closes the job."""
    with alone("parent") as job:
        session = job._session
        assert isinstance(session, LoneSession)
        locks = (
            *(job._fetching, job._closing, session._closing),
            *(rendezvous._changing_caller, process_environment._lock),
        )

        def child() -> str:
            signal.alarm(60)
            members = len(job.members)
            job.close()
            rendezvous._at_exit()
            kept = os.environ["MASTER_PORT"] == str(job.master_port)
            with alone("child") as own:
                return f"{members} {own.rank} {kept} {os.environ['MASTER_PORT'] != str(job.master_port)}"

        with held_by_another_thread(*locks):
            assert in_child(child) == "1 0 True True"
        assert answers(job.master_port)
        assert len(job.members) == 1


def test_a_new_call_ends_the_session_before_it() -> None:
    first = alone("first")
    with alone("second") as second:
        until(lambda: not answers(first.master_port))
        # The older one has nothing left to close: not the newer one's variables, nor its store.
        first.close()
        assert os.environ["MASTER_PORT"] == str(second.master_port)
        assert answers(second.master_port)
    assert "MASTER_PORT" not in os.environ


def test_the_end_of_the_interpreter_ends_the_session() -> None:
    job = alone("exit")
    rendezvous._at_exit()
    assert "MASTER_PORT" not in os.environ
    until(lambda: not answers(job.master_port))
    rendezvous._at_exit()


# --- under torchrun -------------------------------------------------------------------------------------------------


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("no_packet", "torchrun")
@pytest.mark.parametrize("node_rank", [None, "", "3"])
def test_under_torchrun_nothing_is_discovered(monkeypatch: pytest.MonkeyPatch, node_rank: str | None) -> None:
    if node_rank is not None:
        monkeypatch.setenv("NODE_RANK", node_rank)
    before = dict(os.environ)
    for _ in range(2):
        with mingle.discover() as job:
            assert (job.job_id, job.rank, job.world_size, job.local_rank, job.num_nodes) == ("run-7", 5, 8, 1, 2)
            assert (job.master_addr, job.master_port, job.interface, job.address) == ("10.0.0.1", 29500, "", "")
            assert job.members == ()
            assert dict(os.environ) == {**before, "NODE_RANK": node_rank or "1"}
        assert dict(os.environ) == before


@pytest.mark.usefixtures("torchrun")
def test_a_url_with_a_place_forms_a_job_beside_torchruns() -> None:
    """As ``tcp://`` and ``file://`` do. What torchrun has told this process stays for others, such as its children."""
    before = dict(os.environ)
    handing_out = rendezvous_handler("mingle://beside?rank=0&world_size=1")
    store_handed, rank, world_size = next(handing_out)
    assert (rank, world_size, store_handed.host) == (0, 1, "127.0.0.1")
    assert store_handed.port != int(TORCHRUN["MASTER_PORT"])
    told = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert dict(os.environ) == {**before, **told}
    rendezvous.end_session()
    assert dict(os.environ) == before


# --- who this process is --------------------------------------------------------------------------------------------


def test_a_member_says_who_it_is_and_has_a_new_name_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a-machine-with-a-name-of-65-bytes-" + "ä" * 40)
    wanted = settings_of("resnet", 1, 2, 29499, local_rank=3, attempt="2" * 300)
    first, second = process_identity(wanted), process_identity(wanted)
    assert first.member != second.member
    assert (first.job, first.rank, first.world_size, first.local_rank) == ("resnet", 1, 2, 3)
    assert len(first.who.hostname.encode()) <= 64
    assert first.who.hostname.startswith("a-machine-with-a-name-of-65-bytes-")
    assert first.who.pid == os.getpid()
    assert len(first.attempt.encode()) <= 64
    assert first.versions["torch"] == str(torch.__version__)
    assert first.versions["mingle"] == mingle.__version__


def test_the_launchers_word_for_a_node_counts_before_the_machines() -> None:
    assert process_identity(settings_of("x", 1, 2, 1, node="7")).node == "launcher 7"
    assert process_identity(settings_of("x", 1, 2, 1)).node.startswith("boot:" if os.name == "posix" else "")


def test_a_host_name_in_another_encoding_can_be_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placement, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr(socket, "gethostname", lambda: os.fsdecode(b"k\xfcche"))
    for wanted in settings_of("x", 1, 2, 1), settings_of("x", 1, 2, 1, node=os.fsdecode(b"\xfc" * 300)):
        identity = process_identity(wanted)
        join = identity.join(identity.who, ())
        assert read(encode_frame(join)) == join


@pytest.mark.parametrize(("rank", "asked_for"), [(0, [2]), (None, [2]), (1, [])])
def test_process_that_can_host_raises_its_file_limit(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, asked_for: list[int]
) -> None:
    asked: list[int] = []

    monkeypatch.setattr(party, "make_room", lambda members, *_, **__: asked.append(members))
    monkeypatch.setattr(Driver, "drive", raising(ZeroDivisionError()))
    with pytest.raises(MingleError, match="unforeseen ZeroDivisionError"):
        mingle.discover("room", rank=rank, world_size=2)
    assert asked == asked_for


# --- Gloo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("10.0.0.1", []),  # by the name alone it takes the right one
        ("fd00::1", ["fd00::1", "undone"]),
        ("fe80::1", ["fe80::1%eth0", "undone"]),
    ],
)
def test_gloo_is_told_the_address_where_it_would_take_another(
    monkeypatch: pytest.MonkeyPatch, address: str, told: list[str]
) -> None:
    calls: list[str] = []

    def bind(where: str) -> Callable[[], None]:
        calls.append(where)
        return lambda: calls.append("undone")

    def formation_of(*given: Any, **more: Any) -> Formation:
        return structs.replace(lone_formation(*given, **more), interface="eth0", address=address)

    monkeypatch.setattr(gloo, "bind", bind)
    monkeypatch.setattr(gloo, "default_address", lambda _interface: "10.0.0.1")
    monkeypatch.setattr(rendezvous, "lone_formation", formation_of)
    job = alone("gloo")
    assert calls == told[:1]
    for _ in range(2):
        job.close()
    assert calls == told


def test_gloo_that_finds_no_free_port_is_explained() -> None:
    session = SimpleNamespace(loss=lambda: MingleError("rank 0 was lost"))
    with (
        pytest.raises(MingleError, match="no port is free among those that the system chooses from") as caught,
        rendezvous.loss_explained(cast("Any", session)),
    ):
        raise RuntimeError("[enforce fail at device.cc:99] rv != -1. bind: Address already in use\nmore")
    assert caught.value.observation.endswith("bind: Address already in use")
